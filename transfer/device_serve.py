"""Device memory of ours as a connection serves it: payloads that pass through pinned slots.

Owns the slots that one request holds on the serving side. Lives on the I/O loop; a peer's request
never waits for compute (the owner orders what it lets a peer read), only for copies.

A connection's slots are its own (``device_ring``): a peer that stalls keeps a few, and nobody
waits for it while there are others left. None is held for bytes that nobody has announced: a source
fetches a little ahead of what the connection can send, a sink takes room when a DATA frame begins
and gives it to the device when the frame, or the slot, is full. So the frame that is on its way
always finds a slot in the end, whatever waits behind it::

    source    slot ──copy──▶ ready ──sent──▶ given back
    sink      slot, ready ──frame or slot full──▶ copy ──▶ given back; after the last: settled
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator

from transfer.config import TransferConfig
from transfer.cursor import FileSource
from transfer.device_copier import DeviceCopiers
from transfer.device_memory import Run
from transfer.device_slots import SlotLimits
from transfer.device_stage import DeviceStages, pack
from transfer.errors import RegionRevoked, TransferError
from transfer.interface import Priority, Range, Rights
from transfer.ranges import split
from transfer.region import DeviceRegion, RegionTable, Spans

SERVED_SLOTS = 64  # of each device, each as long as a DATA frame
SERVED_SLOTS_PER_LINK = 4  # in each direction
FETCHED_AHEAD = 2  # chunks of one request: one is sent while the device copies the next


class DeviceServer:
    """Makes the payloads of one serving side."""

    def __init__(
        self, config: TransferConfig, copiers: DeviceCopiers, regions: RegionTable
    ) -> None:
        limits = SlotLimits(
            config.piece_nbytes, SERVED_SLOTS, SERVED_SLOTS_PER_LINK, config.max_ranges_per_request
        )
        self._stages = DeviceStages(copiers, regions, limits)

    def payload(
        self, region: DeviceRegion, spans: Spans, right: Rights, link: object
    ) -> DeviceSource | DeviceSink:
        """Return the bytes of a request of ``link``, to be sent ("r") or received ("w").

        What goes wrong later, be it at once, is its ``error``.
        """
        made = DeviceSource if right == "r" else DeviceSink
        return made(self._stages, region, spans, (link, right))


def _nobody_waits() -> None:
    """Until a connection says whom to wake."""


class _DevicePayload(ABC):
    """What both directions share; see ``cursor.Payload``."""

    def __init__(
        self, stages: DeviceStages, region: DeviceRegion, spans: Spans, holder: Hashable
    ) -> None:
        self.remaining = sum(nbytes for _, nbytes in spans)
        self.wake: Callable[[], None] = _nobody_waits
        self.error: TransferError | None = None
        self.file: FileSource | None = None
        self._stages = stages
        self._region = region
        self._holder = holder
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    @abstractmethod
    def ready_nbytes(self) -> int: ...

    def next_run(self, limit_nbytes: int) -> tuple[int, int]:
        raise AssertionError("memory of a device lies in no file")

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TransferError as error:
            if self.error is None:
                self.error = error
                self.close()
                self.wake()

    def _refusal(self) -> TransferError:
        return RegionRevoked("the region was revoked while its bytes were moved")

    def close(self) -> None:
        """Give every slot back as soon as the device is done with it. Idempotent."""
        for task in self._tasks:
            task.cancel()


class _Part:
    """A chunk of a source; ``left`` is what has not been sent, None until it is there."""

    __slots__ = ("chunk", "left", "sent")

    def __init__(self, chunk: list[Range]) -> None:
        self.chunk = chunk
        self.left: memoryview | None = None
        self.sent = asyncio.Event()


class DeviceSource(_DevicePayload):
    """Bytes of a device on their way to a peer."""

    def __init__(
        self, stages: DeviceStages, region: DeviceRegion, spans: Spans, holder: Hashable
    ) -> None:
        super().__init__(stages, region, spans, holder)
        self._chunks: Iterator[list[Range]] = split(
            [Range(0, offset, nbytes) for offset, nbytes in spans],
            max_ranges=stages.limits.max_ranges,
            max_nbytes=stages.limits.slot_nbytes,
        )
        self._parts: deque[_Part] = deque()
        self._fetch_ahead()

    @property
    def ready_nbytes(self) -> int:
        return sum(view.nbytes for view in self._ready())

    @property
    def settled(self) -> bool:
        return True

    def begin(self, nbytes: int) -> None:
        raise AssertionError("a source receives nothing")

    def _ready(self) -> Iterator[memoryview]:
        for part in self._parts:
            if part.left is None:
                return
            yield part.left

    def buffers(self, limit_nbytes: int) -> list[memoryview]:
        found: list[memoryview] = []
        for view in self._ready():
            if limit_nbytes == 0:
                break
            found.append(view[:limit_nbytes])
            limit_nbytes -= found[-1].nbytes
        return found

    def advance(self, nbytes: int) -> None:
        self.remaining -= nbytes
        while nbytes:
            part = self._parts[0]
            assert part.left is not None, "advanced past what was ready"
            step = min(nbytes, part.left.nbytes)
            part.left = part.left[step:]
            nbytes -= step
            if not part.left:
                part.sent.set()
                self._parts.popleft()
        self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        while len(self._parts) < FETCHED_AHEAD:
            chunk = next(self._chunks, None)
            if chunk is None:
                return
            self._parts.append(_Part(chunk))
            self._start(self._fetch(self._parts[-1]))

    async def _fetch(self, part: _Part) -> None:
        _, runs = pack(part.chunk)
        slots = self._stages.slots(self._region.memory)
        async with slots.lend(self._holder, Priority.NOW) as slot:
            await slots.copier.copy_out(self._region, slot.pinned, runs, self._refusal)
            part.left = slot.pinned.view[: sum(run.nbytes for run in runs)]
            if self._parts[0] is part:
                self.wake()
            await part.sent.wait()


class _Landing:
    """One slot of a sink; ``room`` is what is not filled, None until there is a slot."""

    __slots__ = ("full", "num_filled", "room", "runs")

    def __init__(self) -> None:
        self.room: memoryview | None = None
        self.num_filled = 0
        self.runs: list[Run] = []
        self.full = asyncio.Event()


class DeviceSink(_DevicePayload):
    """Bytes of a peer on their way to a device."""

    def __init__(
        self, stages: DeviceStages, region: DeviceRegion, spans: Spans, holder: Hashable
    ) -> None:
        super().__init__(stages, region, spans, holder)
        self._spans = deque(spans)  # not received yet
        self._frame_left = 0
        self._landing: _Landing | None = None  # the one that is being filled
        self._num_landings = 0  # whose bytes are not on the device yet

    @property
    def ready_nbytes(self) -> int:
        landing = self._landing
        return 0 if landing is None or landing.room is None else landing.room.nbytes

    @property
    def settled(self) -> bool:
        return self.remaining == 0 and self._num_landings == 0

    def begin(self, nbytes: int) -> None:
        self._frame_left = nbytes
        self._make_room()

    def _make_room(self) -> None:
        if self._landing is None and self._frame_left and self.error is None:
            self._landing = _Landing()
            self._num_landings += 1
            self._start(self._land(self._landing))

    def buffers(self, limit_nbytes: int) -> list[memoryview]:
        landing = self._landing
        if landing is None or landing.room is None:
            return []
        return [landing.room[:limit_nbytes]]

    def advance(self, nbytes: int) -> None:
        landing = self._landing
        assert landing is not None, "received without room"
        assert landing.room is not None, "received before there was room"
        landing.room = landing.room[nbytes:]
        landing.num_filled += nbytes
        self.remaining -= nbytes
        self._frame_left -= nbytes
        if not landing.room:  # which is never longer than the frame
            landing.runs = self._next_runs(landing.num_filled)
            landing.full.set()
            self._landing = None
            self._make_room()

    def _next_runs(self, nbytes: int) -> list[Run]:
        """Take the places of the next ``nbytes`` bytes, which lie in a slot without gaps."""
        runs: list[Run] = []
        place = 0
        while place < nbytes:
            offset, length = self._spans.popleft()
            step = min(length, nbytes - place)
            runs.append(Run(offset, place, step))
            place += step
            if step < length:
                self._spans.appendleft((offset + step, length - step))
        return runs

    async def _land(self, landing: _Landing) -> None:
        slots = self._stages.slots(self._region.memory)
        async with slots.lend(self._holder, Priority.NOW) as slot:
            landing.room = slot.pinned.view[: self._frame_left]
            self.wake()
            await landing.full.wait()
            await slots.copier.copy_in(self._region, slot.pinned, landing.runs, self._refusal)
        self._num_landings -= 1
        if self.settled:
            self.wake()
