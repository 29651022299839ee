"""The pages of a pool that the host cannot address, and pinned host memory to reach them through.

Owns the staging memory and two CUDA streams, one per direction, so that copies run beside compute
and beside one another. What a copy touches is whole pages; neighbours are copied in one piece.
Satisfies ``kvstore.device.staging.DevicePages``. Knows no store and no network.

A copy waits for all compute that was enqueued before it (steps are enqueued on the device's default
stream), because a step may return before the device has done it; compute never waits for a copy:
pages are handed to a step only after the copy that brought them has returned.

A pool in host memory works too, with plain copies: so that the whole path is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.errors import ModelLoadError
from engine.page_pool import PagePool

Move = tuple[int, int]  # (device_offset, staging_offset)


class PoolPages:
    """Copies pages between ``pool`` and ``staging``. Thread-safe on disjoint pages.

    Args:
        num_staging_pages: pages of pinned host memory.

    Raises:
        ModelLoadError: the host has no memory for the staging pages.
    """

    def __init__(self, pool: PagePool, num_staging_pages: int) -> None:
        assert num_staging_pages >= 1, num_staging_pages
        self._storage = pool.storage
        self._page_nbytes = pool.spec.page_nbytes
        self._staging = _host_memory(num_staging_pages * self._page_nbytes, pool.storage.is_cuda)
        self._out = _stream(pool.storage)
        self._in = _stream(pool.storage)

    @property
    def nbytes(self) -> int:
        return self._storage.numel()

    @property
    def staging(self) -> torch.Tensor:
        """``[num_staging_pages * page_nbytes]`` uint8, pinned when the pool is on a GPU."""
        return self._staging

    def copy_out(self, moves: Sequence[Move]) -> None:
        """Copy pages from the device into ``staging``; blocks until they are there."""

        def enqueue() -> None:
            for device, staging, nbytes in _runs(moves, self._page_nbytes):
                source = self._storage[device : device + nbytes]
                self._staging[staging : staging + nbytes].copy_(source, non_blocking=True)

        _perform(enqueue, self._out)

    def copy_in(self, moves: Sequence[Move]) -> None:
        """Copy pages from ``staging`` to the device; blocks until they are there."""

        def enqueue() -> None:
            for device, staging, nbytes in _runs(moves, self._page_nbytes):
                source = self._staging[staging : staging + nbytes]
                self._storage[device : device + nbytes].copy_(source, non_blocking=True)

        _perform(enqueue, self._in)


def _perform(enqueue: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    """Run copies on ``stream`` and sleep until they are done; on the CPU they are done at once."""
    if stream is None:
        enqueue()
        return
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(stream.device))
        enqueue()
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, no spin
        done.record(stream)
    done.synchronize()


def _stream(storage: torch.Tensor) -> torch.cuda.Stream | None:
    if not storage.is_cuda:
        return None
    return torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]


def _runs(moves: Sequence[Move], page_nbytes: int) -> list[tuple[int, int, int]]:
    """Join moves that are neighbours on both sides: ``(device_offset, staging_offset, nbytes)``."""
    runs: list[tuple[int, int, int]] = []
    for device, staging in sorted(moves):
        if runs:
            last_device, last_staging, nbytes = runs[-1]
            if (last_device + nbytes, last_staging + nbytes) == (device, staging):
                runs[-1] = (last_device, last_staging, nbytes + page_nbytes)
                continue
        runs.append((device, staging, page_nbytes))
    return runs


def _host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    except (RuntimeError, MemoryError) as exc:
        raise ModelLoadError(
            f"no host memory for {nbytes >> 20} MiB of staging pages: free memory, or raise the "
            "limit on locked memory (ulimit -l)"
        ) from exc
