"""The contract of attention back ends: equal to a naive dense reference on random ragged shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.interface import (
    AttentionShape,
    RaggedBatch,
    flashinfer_is_installed,
    make_attention,
)
from engine.page_pool import PagePool
from kvstore.page import PageSpec

NEEDS_FLASHINFER = pytest.mark.skipif(
    not (torch.cuda.is_available() and flashinfer_is_installed()),
    reason="needs CUDA and flashinfer",
)
BACKENDS = [
    pytest.param("torch", "cpu", "float32", id="torch-cpu"),
    pytest.param("torch", "cpu", "bfloat16", id="torch-cpu-bf16"),
    pytest.param(
        "torch",
        "cuda",
        "float16",
        id="torch-cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")],
    ),
    pytest.param(
        "flashinfer",
        "cuda",
        "bfloat16",
        id="flashinfer",
        marks=[pytest.mark.gpu, NEEDS_FLASHINFER],
    ),
]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
NUM_PAGES = 64


class World:
    """One pool filled with NaN, and the dense K and V that its sequences should have."""

    def __init__(self, name: str, device: str, dtype: str, seed: int, window: int | None) -> None:
        self.rng = np.random.default_rng(seed)
        heads = int(self.rng.integers(1, 4))
        dim = 64 if device == "cuda" else int(self.rng.choice([8, 16, 64]))
        self.spec = PageSpec(
            num_layers=2,
            num_kv_heads=heads,
            head_dim=dim,
            page_size=16 if device == "cuda" else int(self.rng.choice([1, 4, 16])),
            dtype=dtype,
        )
        self.shape = AttentionShape(heads * int(self.rng.integers(1, 4)), heads, dim, window)
        storage = torch.zeros(NUM_PAGES * self.spec.page_nbytes, dtype=torch.uint8, device=device)
        self.pool = PagePool(self.spec, NUM_PAGES, storage)
        self.pool.pages.fill_(float("nan"))
        self.backend = make_attention(name, self.shape, self.pool)
        self.device, self.dtype = device, getattr(torch, dtype)

    def random(self, *shape: int) -> torch.Tensor:
        values = torch.from_numpy(self.rng.normal(size=shape)).to(self.dtype)
        return values.to(self.device)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """``q [q, Hq, D]`` against all of ``k, v [n, H, D]``, in float64, written out."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,nhd->hqn", q, k) / q.shape[-1] ** 0.5
    place = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    hidden = key > place
    if window is not None:
        hidden |= key <= place - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqn,nhd->qhd", weights, v).flatten(1)


def batch_of(world: World, lengths: list[int], counts: list[int]) -> tuple[RaggedBatch, list[int]]:
    size = world.spec.page_size
    pages = (world.rng.permutation(NUM_PAGES - 1) + 1).astype(np.int32)
    tables, taken = [], 0
    for n in lengths:
        tables.append(pages[taken : taken + -(-n // size)])
        taken += -(-n // size)
    slots = [
        int(table[p // size]) * size + p % size
        for table, n, q in zip(tables, lengths, counts, strict=True)
        for p in range(n - q, n)
    ]
    last = np.array([(n - 1) % size + 1 for n in lengths], dtype=np.int32)
    batch = RaggedBatch(
        qo_indptr=np.cumsum([0, *counts]).astype(np.int32),
        kv_indptr=np.cumsum([0, *map(len, tables)]).astype(np.int32),
        kv_indices=np.concatenate(tables),
        kv_last_page_len=last,
        slots=np.array(slots, dtype=np.int64),
    )
    return batch, [int(x) for x in taken_slots(tables, lengths, size)]


def taken_slots(tables: list[np.ndarray], lengths: list[int], size: int) -> list[int]:
    return [
        int(t[p // size]) * size + p % size
        for t, n in zip(tables, lengths, strict=True)
        for p in range(n)
    ]


def check(world: World, lengths: list[int], counts: list[int]) -> None:
    """Place the prefixes by hand, let the back end append the rest, compare every layer."""
    heads, dim, size = world.spec.num_kv_heads, world.spec.head_dim, world.spec.page_size
    batch, slots = batch_of(world, lengths, counts)
    world.backend.plan(batch)
    for layer in range(world.spec.num_layers):
        k, v = (world.random(sum(lengths), heads, dim) for _ in range(2))
        q = world.random(sum(counts), world.shape.num_heads, dim)
        starts = np.cumsum([0, *lengths])
        new = [
            i
            for s, (n, c) in enumerate(zip(lengths, counts, strict=True))
            for i in range(starts[s] + n - c, starts[s] + n)
        ]
        old = sorted(set(range(sum(lengths))) - set(new))
        k_pages, v_pages = world.pool.layer(layer)
        place = torch.tensor(slots, device=world.device)[old]
        k_pages[place // size, :, place % size] = k[old]
        v_pages[place // size, :, place % size] = v[old]
        out = world.backend.run(q, k[new], v[new], layer)
        assert out.shape == (sum(counts), world.shape.num_heads * dim)
        assert out.is_contiguous()
        token = 0
        for s, count in enumerate(counts):
            own = slice(int(starts[s]), int(starts[s + 1]))
            expected = dense(q[token : token + count], k[own], v[own], world.shape.window)
            tolerance = TOLERANCE[world.spec.dtype]
            torch.testing.assert_close(
                out[token : token + count].double().cpu(), expected, atol=tolerance, rtol=tolerance
            )
            token += count


@pytest.mark.parametrize(("name", "device", "dtype"), BACKENDS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(4))
def test_random_ragged_batches_equal_the_dense_reference(
    name: str, device: str, dtype: str, window: int | None, seed: int
) -> None:
    """Slots that hold no valid KV are NaN throughout."""
    world = World(name, device, dtype, seed, window)
    budget = (NUM_PAGES - 10) * world.spec.page_size
    lengths: list[int] = []
    while len(lengths) < 9:
        length = int(world.rng.integers(1, max(2, budget // 8)))
        lengths.append(length)
    counts = [1 if world.rng.random() < 0.6 else int(world.rng.integers(1, n + 1)) for n in lengths]
    while sum(-(-n // world.spec.page_size) for n in lengths) >= NUM_PAGES:
        lengths.pop()
        counts.pop()
    check(world, lengths, counts)


@pytest.mark.parametrize(("name", "device", "dtype"), BACKENDS)
def test_edges_of_pages_and_blocks(name: str, device: str, dtype: str) -> None:
    world = World(name, device, dtype, 11, None)
    size = world.spec.page_size
    check(world, [1], [1])
    check(world, [size], [size])
    check(world, [size + 1, size, 1], [1, 1, 1])
    check(world, [1, 3 * size], [1, 1])
    check(world, [2 * size + 1], [2 * size + 1])


def test_query_blocks_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.torch_backend.QUERY_BLOCK", 5)
    for window in (None, 3, 9):
        world = World("torch", "cpu", "float32", 3, window)
        check(world, [17, 24, 1], [17, 13, 1])
