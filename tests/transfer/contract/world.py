"""What a check may rely on: engines of one transport, and a way to stop an operation half-way.

Owns the interfaces, the hold that all worlds share, and what the checks build from them. Knows no
transport.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest

from tests.transfer.bulk_harness import LIMIT_S, POLL_S, pattern, soon, whole
from transfer.counters import TransferCounters
from transfer.errors import PeerClosed, PeerLost, PeerUnreachable, Stale
from transfer.interface import Region, Transfer

GONE = (PeerClosed, PeerLost, PeerUnreachable)
PIECE_NBYTES = 4096
NUM_PIECES = 32
HELD_NBYTES = PIECE_NBYTES * NUM_PIECES
# Engines whose operations move in small pieces, none of them on the caller's event loop.
IN_PIECES = {"piece_nbytes": PIECE_NBYTES, "inline_copy_nbytes": 0, "copy_threads": 2}

BOTH_KINDS = pytest.mark.parametrize("kind", ["read", "write"])


class Trait(Enum):
    """What not every transport has. ``needs`` keeps a check to those that do."""

    SECRET = auto()  # peers prove that they hold the cluster secret
    CONNECTS = auto()  # to an address in the token, where a test can listen instead
    WIRE = auto()  # all bytes pass that address: a test can stand in between
    DEVICE_MEMORY = auto()  # takes buffers on a CUDA device


class Engine(Transfer, Protocol):
    """A ``Transfer`` that counts."""

    def counters(self) -> TransferCounters: ...


class Hold:
    """Stops every piece after the first ``passes``. May be asked from any thread."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self.released = False

    def admits(self) -> bool:
        """True if the piece that asks may move now; it counts as moved."""
        with self._lock:
            if not self.released:
                self._passes -= 1
                if self._passes < 0:
                    self._loop.call_soon_threadsafe(self._reached.set)
            return self.released or self._passes >= 0

    def stops(self) -> bool:
        """True if the next piece would not be admitted. Counts nothing."""
        with self._lock:
            if self.released or self._passes > 0:
                return False
            self._loop.call_soon_threadsafe(self._reached.set)
            return True

    async def reached(self) -> None:
        """Wait until an operation stands still; the next call waits for the next one."""
        async with asyncio.timeout(LIMIT_S):
            await self._reached.wait()
        self._reached.clear()

    def release(self) -> None:
        with self._lock:
            self.released = True


class World(Protocol):
    """Engines of one transport, and what happens to them. All are closed at the end.

    Attributes:
        serves_registered_memory: False if memory that was not allocated takes another path.
        revoking_waits: False if a peer may end its piece after ``revoke`` has returned.
    """

    serves_registered_memory: bool
    revoking_waits: bool

    async def make(self, **settings: Any) -> Engine:
        """Return a started engine; ``settings`` are those of ``TransferConfig``."""
        ...

    async def restart(self, engine: Engine) -> Engine:
        """Return another life of an engine that was closed, at the same address."""
        ...

    def hold(self, user: Engine, region: Region, *, passes: int = 1, inside: bool = False) -> Hold:
        """Stop what ``user`` does with a peer's ``region`` after ``passes`` pieces.

        The engines must be made with ``IN_PIECES``. Other peers are not held up, nor are reads
        by a held read. A piece that is held while its operation is told to stop may still move;
        no other does. ``inside``: where a thread copies, after it was let in to its piece.
        """
        ...

    async def asked(self, user: Engine) -> None:
        """Return once all that ``user`` has begun was put on the connections to its peers."""
        ...

    def disrupt(self, user: Engine, token: bytes) -> None:
        """Break the connections from ``user`` to the owner of ``token``, as a network would."""
        ...


Check = Callable[..., Awaitable[None]]


def needs(trait: Trait) -> Callable[[Check], Check]:
    """Run the check only on transports that have ``trait``."""

    def mark(check: Check) -> Check:
        check.needs = trait  # type: ignore[attr-defined]
        return check

    return mark


class Pair(NamedTuple):
    """An owner of memory and a user of it."""

    owner: Engine
    user: Engine


async def make_pair(world: World, **settings: Any) -> Pair:
    return Pair(await world.make(**settings), await world.make(**settings))


def filled(engine: Engine, nbytes: int, seed: int = 1) -> Region:
    """Return allocated memory full of ``pattern(nbytes, seed)``."""
    region = engine.allocate(nbytes)
    region.view[:] = pattern(nbytes, seed).data
    return region


class Ends:
    """One operation between two regions: reads move the remote bytes here, writes the local ones
    there. Both regions hold patterns of their own."""

    def __init__(self, pair: Pair, kind: str, nbytes: int = HELD_NBYTES) -> None:
        self.owner, self.user = pair
        self.kind = kind
        self.nbytes = nbytes
        self.remote = filled(self.owner, nbytes, seed=31)
        self.local = filled(self.user, nbytes, seed=32)
        self.token = self.remote.export("rw")

    @property
    def source(self) -> Region:
        return self.remote if self.kind == "read" else self.local

    @property
    def target(self) -> Region:
        return self.local if self.kind == "read" else self.remote

    async def move(self, deadline_s: float | None = None) -> None:
        ranges = whole(self.nbytes)
        deadline_s = soon() if deadline_s is None else deadline_s
        if self.kind == "read":
            await self.user.read(self.token, ranges, into=self.local, deadline_s=deadline_s)
        else:
            await self.user.write(self.token, ranges, source=self.local, deadline_s=deadline_s)

    def start(self, deadline_s: float | None = None) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self.move(deadline_s))

    async def connect(self) -> None:
        """Have the first operation behind us."""
        spare = self.user.allocate(8)
        await self.user.read(self.token, whole(8), into=spare, deadline_s=soon())

    def last_piece(self, region: Region) -> bytes:
        return bytes(region.view[-PIECE_NBYTES:])


async def small_read_works(pair: tuple[Engine, Engine], nbytes: int = 1000) -> None:
    """Move bytes behind everything that is still on its way between the two."""
    ends = Ends(Pair(*pair), "read", nbytes)
    await ends.move()
    assert ends.local.view == ends.remote.view
    ends.remote.revoke()
    ends.local.revoke()


async def becomes_stale(operation: Callable[[], Awaitable[None]]) -> None:
    """The operation never succeeds, and is ``Stale`` as soon as the user has been told that the
    connection to the old life has ended; it may find that connection until then."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await operation()
            except Stale:
                return
            except (PeerClosed, PeerLost):
                await asyncio.sleep(POLL_S)
            else:
                raise AssertionError("an old token was accepted by a new life")


def assert_nothing_reused(found: memoryview, old: bytes, new: bytes) -> None:
    """Every byte is what was there, what was sent, or zero where the rest of a frame was voided."""
    got, before, sent = (np.frombuffer(each, np.uint8) for each in (found, old, new))
    known = (got == before) | (got == sent) | (got == 0)
    assert known.all(), "bytes of reused memory reached the peer"
