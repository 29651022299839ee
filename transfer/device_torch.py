"""CUDA memory that torch tensors hold, as ``device_memory`` wants it.

Owns everything that is torch's: streams, events, pinned tensors, and the translation of its errors.
Does not import torch: whoever registers a CUDA tensor has brought it. Knows no wire.

Copies run on two streams of their own, one for each direction, and never on the caller's. A tensor
in host memory works too, with plain copies: so that all but the streams is tested without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from transfer.device_memory import DeviceEvent, DeviceMemory, PinnedMemory, Run
from transfer.device_rows import INDEX_NBYTES, WORD_NBYTES, Rows, as_rows
from transfer.errors import DeviceFailed


def _torch() -> Any:
    """Return torch, which whoever registers one of its tensors has imported."""
    return sys.modules["torch"]


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn torch's errors into ours: CUDA's, and those of its allocators, are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFailed(f"{what}: {error}") from error


class TorchMemory:
    """The bytes of a contiguous tensor; keeps it alive."""

    readonly = False

    def __init__(self, tensor: Any) -> None:
        if not tensor.is_contiguous():
            raise ValueError("only contiguous tensors can be registered; call .contiguous() first")
        self.flat = tensor.detach().reshape(-1).view(_torch().uint8)
        self.device = str(tensor.device)

    @property
    def nbytes(self) -> int:
        return int(self.flat.numel())

    def array(self, offset: int, nbytes: int) -> object:
        return self.flat[offset : offset + nbytes]

    def fence(self) -> DeviceEvent:
        with _translated(f"no fence on {self.device}"):
            return _event_on(_current_stream(self.flat))

    def open_copy_engine(self) -> TorchCopyEngine:
        with _translated(f"no copy streams on {self.device}"):
            return TorchCopyEngine(self.flat.device)


class TorchPinned:
    """Pinned memory of one slot, and room behind it for the index of a copy by rows."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        torch = _torch()
        in_words = -(-nbytes // WORD_NBYTES) * WORD_NBYTES  # the index behind it is aligned
        whole = torch.empty(in_words + INDEX_NBYTES, dtype=torch.uint8, pin_memory=pinned)
        self.flat = whole[:nbytes]
        self.index = whole[-INDEX_NBYTES:].view(torch.int64)
        self.view = memoryview(self.flat.numpy()).cast("B")


class TorchCopyEngine:
    """Two streams of one device; see ``device_memory.CopyEngine``."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._into = _Direction(device)
        self._out = _Direction(device)

    def pin(self, nbytes: int) -> TorchPinned:
        try:
            return TorchPinned(nbytes, pinned=self._device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            raise DeviceFailed(
                f"no pinned host memory ({nbytes} bytes) to reach {self._device} through: free "
                "memory, raise the limit on locked memory (ulimit -l), or lower bounce_slots"
            ) from error

    def copy_in(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        flat, host = _flat(memory), _pinned(pinned)

        def enqueue() -> None:
            rows = _as_rows(flat, runs)
            if rows is not None:
                self._into.scatter(flat, host, rows)
                return
            for device, place, nbytes in runs:
                _copy(host.flat[place : place + nbytes], flat[device : device + nbytes])

        return self._into.perform(enqueue)

    def copy_out(
        self, memory: DeviceMemory, pinned: PinnedMemory, runs: Sequence[Run]
    ) -> DeviceEvent:
        flat, host = _flat(memory), _pinned(pinned)

        def enqueue() -> None:
            rows = _as_rows(flat, runs)
            if rows is not None:
                self._out.gather(flat, host, rows)
                return
            for device, place, nbytes in runs:
                _copy(flat[device : device + nbytes], host.flat[place : place + nbytes])

        return self._out.perform(enqueue)


class _Direction:
    """One stream, and device memory for the rows that pass through it one copy after another."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = _new_stream(device)
        self._scratch: Any = None

    def perform(self, enqueue: Callable[[], None]) -> DeviceEvent:
        with _translated(f"a copy on {self._device} failed"):
            try:
                with _on(self._stream), _torch().inference_mode():
                    enqueue()  # memory that was made in inference mode is written in it only
                return _event_on(self._stream)
            except BaseException:
                if self._stream is not None:
                    self._stream.synchronize()  # part of it may be queued
                raise

    def scatter(self, flat: Any, host: TorchPinned, rows: Rows) -> None:
        """Copy the pinned bytes in one piece, then put every row where it belongs."""
        scratch = self._room(rows.nbytes)
        _copy(host.flat[rows.pinned_offset : rows.pinned_offset + rows.nbytes], scratch)
        index = self._index(host, rows)
        _by_row(flat, rows).index_copy_(0, index, _by_row(scratch, rows))

    def gather(self, flat: Any, host: TorchPinned, rows: Rows) -> None:
        """Collect the rows on the device, then copy them to pinned memory in one piece."""
        scratch = self._room(rows.nbytes)
        index = self._index(host, rows)
        _torch().index_select(_by_row(flat, rows), 0, index, out=_by_row(scratch, rows))
        _copy(scratch, host.flat[rows.pinned_offset : rows.pinned_offset + rows.nbytes])

    def _room(self, nbytes: int) -> Any:
        """Return scratch; a later copy of this stream begins when an earlier is done with it."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            torch = _torch()
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch[:nbytes]

    def _index(self, host: TorchPinned, rows: Rows) -> Any:
        """Send the index from its place behind the slot, which stays as it is until the event."""
        torch = _torch()
        place = host.index[: len(rows.places)]
        place.copy_(torch.tensor(rows.places, dtype=torch.int64))
        return place.to(self._device, non_blocking=True)


class _TorchEvent:
    """An event of CUDA; sleeps rather than spins."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:
            return True  # failed: ``wait`` says why

    def wait(self) -> None:
        with _translated("the device failed"):
            self._event.synchronize()


class _DoneEvent:
    """Work on host memory is done when the call returns."""

    done = True

    def wait(self) -> None:
        """Return at once."""


def _as_rows(flat: Any, runs: Sequence[Run]) -> Rows | None:
    aligned = flat.data_ptr() % WORD_NBYTES == 0 == flat.storage_offset() % WORD_NBYTES
    return as_rows(runs) if aligned else None


def _by_row(flat: Any, rows: Rows) -> Any:
    """View bytes as ``[num_rows, words]`` int64; what is left behind the last row is cut off."""
    whole = flat.numel() // rows.row_nbytes * rows.row_nbytes
    words = flat[:whole].view(_torch().int64)
    return words.view(-1, rows.row_nbytes // WORD_NBYTES)


def _copy(source: Any, target: Any) -> None:
    target.copy_(source, non_blocking=True)


def _flat(memory: DeviceMemory) -> Any:
    assert isinstance(memory, TorchMemory), f"{memory!r} is not torch's"
    return memory.flat


def _pinned(pinned: PinnedMemory) -> TorchPinned:
    assert isinstance(pinned, TorchPinned), f"{pinned!r} is not torch's"
    return pinned


def _current_stream(flat: Any) -> Any:
    return _torch().cuda.current_stream(flat.device) if flat.is_cuda else None


def _new_stream(device: Any) -> Any:
    return _torch().cuda.Stream(device) if device.type == "cuda" else None


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else _torch().cuda.stream(stream)


def _event_on(stream: Any) -> DeviceEvent:
    if stream is None:
        return _DoneEvent()
    event = _torch().cuda.Event(blocking=True)
    event.record(stream)
    return _TorchEvent(event)
