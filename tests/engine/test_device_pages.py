"""Pages move between a pool and staging memory whole, to where they were sent, and no others.

The CPU stands in for a device wherever there is no GPU.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engine.device_pages import PoolPages
from engine.page_pool import PagePool
from kvstore.page import PageSpec

SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype="uint8")
NUM_PAGES = 24
PAGE = SPEC.page_nbytes
NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


def pool_on(device: str) -> PagePool:
    """A pool in which every byte of page ``i`` is ``i + 1``."""
    numbers = torch.arange(1, NUM_PAGES + 1, dtype=torch.uint8)
    return PagePool(SPEC, NUM_PAGES, numbers.repeat_interleave(PAGE).to(device))


def numbers_in(memory: torch.Tensor) -> list[int]:
    """The byte that fills each page; fails when a page is not of one kind."""
    pages = memory.cpu().view(-1, PAGE)
    assert (pages == pages[:, :1]).all(), "a page was torn"
    return [int(number) for number in pages[:, 0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_pages_land_where_they_were_sent_and_nowhere_else(device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = pool_on(device)
    pages = PoolPages(pool, 8)
    assert pages.nbytes == NUM_PAGES * PAGE
    num_moves = int(rng.integers(1, 9))
    sources = rng.permutation(NUM_PAGES)[:num_moves].tolist()
    slots = rng.permutation(8)[:num_moves].tolist()
    pages.copy_out([(s * PAGE, t * PAGE) for s, t in zip(sources, slots, strict=True)])
    expected = [0] * 8
    for source, slot in zip(sources, slots, strict=True):
        expected[slot] = source + 1
    assert numbers_in(pages.staging) == expected
    targets = rng.permutation(NUM_PAGES)[:num_moves].tolist()
    pages.copy_in([(t * PAGE, s * PAGE) for t, s in zip(targets, slots, strict=True)])
    expected = list(range(1, NUM_PAGES + 1))
    for target, source in zip(targets, sources, strict=True):
        expected[target] = source + 1
    assert numbers_in(pool.storage) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_copies_in_both_directions_run_beside_one_another(device: str) -> None:
    pool = pool_on(device)
    pages = PoolPages(pool, 8)
    pages.staging[4 * PAGE :] = 200
    start = threading.Barrier(8)

    def move(i: int) -> None:
        start.wait()
        if i < 4:
            pages.copy_out([(i * PAGE, i * PAGE)])
        else:
            pages.copy_in([(i * PAGE, i * PAGE)])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(move, range(8)))
    assert numbers_in(pages.staging) == [1, 2, 3, 4] + [200] * 4
    assert numbers_in(pool.storage) == [1, 2, 3, 4] + [200] * 4 + list(range(9, NUM_PAGES + 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")
def test_a_copy_sees_what_was_enqueued_before_it() -> None:
    pool = pool_on("cuda")
    pages = PoolPages(pool, 1)
    assert pages.staging.is_pinned()
    work = torch.rand(4096, 4096, device="cuda")
    for _ in range(20):  # keeps the device busy, so that the fill below is still to come
        work = work @ work
        work /= work.norm()
    pool.storage[:PAGE].fill_(77)
    pages.copy_out([(0, 0)])
    assert numbers_in(pages.staging) == [77]
