"""On which CUDA stream what happens; torch's streams and events are ones that take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from transfer.device_memory import Run
from transfer.device_torch import TorchCopyEngine, TorchMemory, TorchPinned
from transfer.errors import DeviceFailed

WHOLE = [Run(0, 0, 64)]


class Notes:
    """What was done, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num_streams = 0
        self.error = ""

    def stream(self, device: object) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, f"own {self.num_streams}")

    def event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "an event that spins takes a core from the models"
        return FakeEvent(self)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.lines.append(f"on {stream.name}")
        yield
        self.lines.append(f"off {stream.name}")


class FakeStream:
    def __init__(self, notes: Notes, name: str) -> None:
        self.notes = notes
        self.name = name

    def synchronize(self) -> None:
        self.notes.lines.append(f"synchronize {self.name}")


class FakeEvent:
    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def record(self, stream: FakeStream) -> None:
        self.notes.lines.append(f"event on {stream.name}")

    def query(self) -> bool:
        if self.notes.error:
            raise RuntimeError(self.notes.error)
        return False

    def synchronize(self) -> None:
        if self.notes.error:
            raise RuntimeError(self.notes.error)
        self.notes.lines.append("wait")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    made = Notes()
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: FakeStream(made, "the caller's")
    )
    return made


def engine_of_cuda() -> TorchCopyEngine:
    return TorchCopyEngine(SimpleNamespace(type="cuda"))


def test_each_direction_copies_on_a_stream_of_its_own(notes: Notes) -> None:
    engine = engine_of_cuda()
    memory = TorchMemory(torch.arange(64, dtype=torch.uint8))
    pinned = TorchPinned(64, pinned=False)
    engine.copy_out(memory, pinned, WHOLE).wait()
    assert notes.lines == ["on own 2", "off own 2", "event on own 2", "wait"]
    notes.lines.clear()
    engine.copy_in(memory, pinned, WHOLE).wait()
    assert notes.lines == ["on own 1", "off own 1", "event on own 1", "wait"]


def test_a_copy_that_fails_half_way_leaves_nothing_on_its_stream(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of_cuda()
    memory = TorchMemory(torch.zeros(64, dtype=torch.uint8))
    pinned = TorchPinned(64, pinned=False)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.Tensor, "copy_", refuse)
    with pytest.raises(DeviceFailed, match="invalid argument"):
        engine.copy_in(memory, pinned, WHOLE)
    assert notes.lines[-1] == "synchronize own 1"


def test_the_fence_stands_on_the_callers_stream(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    fence = TorchMemory(torch.zeros(64, dtype=torch.uint8)).fence()
    assert notes.lines == ["event on the caller's"]
    assert not fence.done


def test_an_error_of_the_device_is_ours_when_it_is_waited_for(notes: Notes) -> None:
    engine = engine_of_cuda()
    memory = TorchMemory(torch.zeros(64, dtype=torch.uint8))
    event = engine.copy_in(memory, TorchPinned(64, pinned=False), WHOLE)
    notes.error = "CUDA error: an illegal memory access was encountered"
    assert event.done, "whoever polls must not poll for ever"
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        event.wait()
