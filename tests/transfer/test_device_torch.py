"""Torch's memory as the transfer engine wants it: with CPU tensors all but the streams runs.

The tests marked ``gpu`` need a CUDA device.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.transfer.bulk_harness import (
    MIB,
    checked_engines,
    pattern,
    soon,
    whole,
)
from transfer.buffers import device_memory_of
from transfer.device_memory import CopyEngine, DeviceMemory, PinnedMemory, Run
from transfer.device_rows import as_rows
from transfer.device_torch import TorchMemory
from transfer.errors import DeviceFailed
from transfer.interface import Range
from transfer.region import DeviceRegion

KIB = 1024


def filled(nbytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(pattern(nbytes).copy()).to(device)


def check_copies(memory: DeviceMemory, tensor: torch.Tensor, runs: Sequence[Run]) -> None:
    """Copy the runs out and in again, into zeroed memory; nothing else may change."""
    engine: CopyEngine = memory.open_copy_engine()
    nbytes = sum(run.nbytes for run in runs)
    pinned: PinnedMemory = engine.pin(nbytes)
    before = tensor.cpu().numpy().copy()
    engine.copy_out(memory, pinned, runs).wait()
    for offset, place, length in runs:
        assert pinned.view[place : place + length] == before[offset : offset + length].data
    tensor.zero_()
    memory.fence().wait()
    event = engine.copy_in(memory, pinned, runs)
    event.wait()
    assert event.done
    expected = np.zeros_like(before)
    for offset, _, length in runs:
        expected[offset : offset + length] = before[offset : offset + length]
    assert (tensor.cpu().numpy() == expected).all()


def packed(spans: Sequence[tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    for offset, nbytes in spans:
        place = runs[-1].pinned_offset + runs[-1].nbytes if runs else 0
        runs.append(Run(offset, place, nbytes))
    return runs


class ForeignArray:
    """What the arrays of cupy and numba look like."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # the array keeps its memory alive
        self.__cuda_array_interface__ = getattr(tensor, "__cuda_array_interface__", {})


without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_cuda])]


@pytest.mark.parametrize("device", DEVICES)
def test_runs_that_go_as_rows_and_runs_that_do_not_land_where_they_belong(device: str) -> None:
    rng = random.Random(3)
    pages = rng.sample(range(64), 30)
    by_rows = packed([(page * 64 * KIB, 64 * KIB) for page in pages])
    one_by_one = packed([(page * 64 * KIB + 1, 5001) for page in pages])
    assert as_rows(by_rows) is not None
    assert as_rows(one_by_one) is None
    for runs in (by_rows, one_by_one):
        tensor = filled(4 * MIB, device)
        check_copies(TorchMemory(tensor), tensor, runs)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_reach_the_last_byte_of_memory_of_any_length(device: str) -> None:
    tensor = filled(100 * KIB + 7, device)
    check_copies(TorchMemory(tensor), tensor, packed([(i * 10 * KIB, 5 * KIB) for i in range(10)]))
    tensor = filled(100 * KIB + 7, device)
    check_copies(TorchMemory(tensor), tensor, packed([(100 * KIB, 7)]))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_is_not_aligned_to_words_is_copied_all_the_same(device: str) -> None:
    tensor = filled(64 * KIB + 3, device)[3:]
    check_copies(TorchMemory(tensor), tensor, packed([(i * 4096, 1024) for i in range(16)]))


@pytest.mark.parametrize("device", DEVICES)
def test_memory_made_in_inference_mode_is_written_all_the_same(device: str) -> None:
    with torch.inference_mode():
        tensor = filled(64 * KIB, device).clone()
    memory = TorchMemory(tensor)
    engine = memory.open_copy_engine()
    pinned = engine.pin(32 * KIB)
    pinned.view[:] = bytes(32 * KIB)
    runs = packed([(i * 8 * KIB, 4 * KIB) for i in range(8)])
    assert as_rows(runs) is not None
    engine.copy_in(memory, pinned, runs).wait()
    engine.copy_in(memory, pinned, runs[:1]).wait()
    assert not tensor.cpu().view(8, 8 * KIB)[:, : 4 * KIB].any()


def test_any_dtype_is_bytes_and_the_array_is_a_part_of_it() -> None:
    tensor = torch.arange(64, dtype=torch.bfloat16).reshape(8, 8)
    memory = TorchMemory(tensor)
    assert memory.nbytes == 128
    part = memory.array(2, 4)
    assert isinstance(part, torch.Tensor)
    assert part.data_ptr() == tensor.data_ptr() + 2
    assert part.nbytes == 4


def test_tensors_that_are_not_contiguous_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"\.contiguous\(\)"):
        TorchMemory(torch.zeros(8, 8).t())


def test_only_cuda_tensors_are_device_memory() -> None:
    assert device_memory_of(torch.zeros(4)) is None
    assert device_memory_of(torch.zeros(4, device="meta")) is None
    assert device_memory_of(bytearray(4)) is None


def test_errors_of_torch_become_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = TorchMemory(torch.zeros(64, dtype=torch.uint8))
    engine = memory.open_copy_engine()
    pinned = engine.pin(64)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "copy_", refuse)
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        engine.copy_in(memory, pinned, [Run(0, 0, 64)])
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DeviceFailed, match="ulimit -l"):
        engine.pin(64)


@pytest.mark.gpu
@without_cuda
@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp", "ucx"])
@pytest.mark.parametrize("nbytes", [1, 4097, 4 * MIB, 37 * MIB + 5])
async def test_cuda_tensors_move_over_every_transport(transport: str, nbytes: int) -> None:
    if transport == "ucx":
        pytest.importorskip("ucxx")
    async with checked_engines(transport) as engines:
        owner, peer = await engines.make(), await engines.make()
        data = pattern(nbytes).tobytes()
        remote = owner.register(filled(nbytes, "cuda"))
        into = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        local = peer.register(into)
        await peer.read(remote.export("r"), whole(nbytes), into=local, deadline_s=soon())
        assert into.cpu().numpy().tobytes() == data
        into.add_(1)  # a write must send what the stream was told to compute
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        token = owner.register(target).export("w")
        await peer.write(token, whole(nbytes), source=local, deadline_s=soon())
        assert (target.cpu() == into.cpu()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("page_nbytes", [64 * KIB, 368_640])
async def test_scattered_pages_of_a_pool_are_pulled_and_pushed(
    transport: str, page_nbytes: int, device: str
) -> None:
    async with checked_engines(transport) as engines:
        owner, peer = await engines.make(), await engines.make()
        pool = torch.zeros(128, page_nbytes, dtype=torch.uint8, device=device)
        local = peer.register(TorchMemory(pool))  # a CPU tensor is staged too
        remote = owner.allocate(64 * page_nbytes)
        remote.view[:] = pattern(64 * page_nbytes).data
        pages = random.Random(1).sample(range(128), 64)
        ranges = [
            Range(i * page_nbytes, page * page_nbytes, page_nbytes) for i, page in enumerate(pages)
        ]
        await peer.read(remote.export("r"), ranges, into=local, deadline_s=soon())
        expected = np.zeros((128, page_nbytes), np.uint8)
        expected[pages] = np.frombuffer(remote.view, np.uint8).reshape(64, page_nbytes)
        assert (pool.cpu().numpy() == expected).all()
        target = owner.register(TorchMemory(torch.zeros_like(pool)))
        back = [Range(r.local_offset, r.local_offset, r.nbytes) for r in ranges]
        await peer.write(target.export("w"), back, source=local, deadline_s=soon())
        assert isinstance(target, DeviceRegion)
        assert isinstance(target.memory, TorchMemory)
        assert (target.memory.flat.cpu() == pool.cpu().reshape(-1)).all()


@pytest.mark.gpu
@without_cuda
async def test_cuda_arrays_of_other_libraries_are_registered_as_they_are() -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    async with checked_engines("loopback") as engines:
        engine = await engines.make()
        region = engine.register(ForeignArray(tensor))
        source = engine.register(pattern(4096).tobytes())
        await engine.write(region.export("w"), whole(4096), source=source, deadline_s=soon())
    assert tensor.cpu().numpy().tobytes() == pattern(4096).tobytes()


def test_a_cuda_array_without_torch_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(TypeError, match="import torch first"):
        device_memory_of(ForeignArray(torch.zeros(4)))


def test_a_cuda_array_that_torch_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(4)
    array = ForeignArray(tensor)
    array.__cuda_array_interface__ = {"data": (tensor.data_ptr(), False)}
    monkeypatch.setattr(torch, "as_tensor", lambda buffer, device: tensor)
    memory = device_memory_of(array)
    assert memory is not None
    assert memory.nbytes == 16
    monkeypatch.setattr(torch, "as_tensor", lambda buffer, device: tensor.clone())
    with pytest.raises(ValueError, match=r"torch\.cuda\.device"):
        device_memory_of(array)
