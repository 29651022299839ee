"""One transport between this process and the other side: verified, then timed.

Owns the local memory, the peer's (through the control channel) and what a single timed operation
is. Knows no grid and no limits.

How every byte is checked: fill the peer with one pattern and this side with another, read, compare
both sides; fill this side, write, compare both sides. Timed operations then move what is already
there, so that the same comparison at the end covers them as well.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple, TypeVar, cast

import msgspec

from kvstore.checksum import PageBytes, checksums, checksums_now
from kvstore.page import PageSpec
from launch.doctor.grid import Case, step_timeout_s
from launch.doctor.memory import Memory, TransportUnavailable
from launch.doctor.messages import (
    CheckMemory,
    Done,
    FillMemory,
    MemoryChecked,
    MemoryOpened,
    OpenMemory,
    OpenSocket,
    SocketOpened,
)
from launch.doctor.options import DoctorOptions
from launch.doctor.pattern import arrived_here, fill, untouched, wrong_byte
from launch.doctor.peer import Link
from launch.doctor.plain_socket import PlainSocket
from transfer.errors import DeadlineExceeded, PeerLost, RemoteFailed
from transfer.interface import Range, deadline_after
from transfer.ranges import total_nbytes

OPEN_TIMEOUT_S = 15.0  # of the other side's engine: ucx is loaded for it
SESSION_TIMEOUT_S = 24 * 3600.0  # a session that nobody ends

R = TypeVar("R", bound=msgspec.Struct)


class Verified(NamedTuple):
    """What was wrong with the bytes of each direction; empty when nothing was."""

    read: str
    write: str


class Session:
    """An open transport. Made by ``open_session``."""

    def __init__(self, link: Link, memory: Memory, token: bytes) -> None:
        self.memory = memory
        self._link = link
        self._token = token
        self._seeds = itertools.count(1)
        self._content = 0  # seed of the pattern that both sides hold after ``verify``

    @property
    def via(self) -> str:
        """Transports and devices in use, for people."""
        return self.memory.via

    async def verify(self, case: Case) -> Verified:
        """Move the case both ways and compare every byte on both ends."""
        await self._fill_here(case)
        sent = await self._fill_there(case)
        await self.read(case.ranges())
        wrong_read = await self._wrong_here(sent, case, arrived=True)
        wrong_read = wrong_read or await self._wrong_there(sent, case, written=False)
        self._content = await self._fill_here(case)
        await self.write(case.ranges())
        self._check_path()
        return Verified(wrong_read, await self.still_verified(case))

    async def still_verified(self, case: Case) -> str:
        """Return which byte changed since ``verify``; empty when none did."""
        wrong = await self._wrong_here(self._content, case, arrived=False)
        return wrong or await self._wrong_there(self._content, case, written=True)

    def _check_path(self) -> None:
        """Raise ``TransportUnavailable`` if the engine had to take another path than this one."""
        engine = self.memory.engine
        if engine.counters().fallbacks:
            name = engine.config.transport
            raise TransportUnavailable(f"{name} does not reach the other side, which tcp does")

    async def read(self, ranges: Sequence[Range]) -> None:
        await self.memory.engine.read(
            self._token,
            ranges,
            into=self.memory.region,
            deadline_s=deadline_after(step_timeout_s(total_nbytes(ranges))),
        )

    async def write(self, ranges: Sequence[Range]) -> None:
        await self.memory.engine.write(
            self._token,
            ranges,
            source=self.memory.region,
            deadline_s=deadline_after(step_timeout_s(total_nbytes(ranges))),
        )

    async def timed(self, op: str, case: Case) -> float:
        """Return the seconds of one batch: the mean of ``case.repeats`` operations."""
        move, ranges = (self.write if op == "write" else self.read), case.ranges()
        start = time.perf_counter()
        for _ in range(case.repeats):
            await move(ranges)
        return (time.perf_counter() - start) / case.repeats

    async def timed_with_checksum(self, case: Case, digests: list[bytes]) -> tuple[float, bool]:
        """As ``timed`` for reads, each page then hashed as a reader of the store does.

        Also returns whether every digest was the expected one.
        """
        ranges, pages, right = case.ranges(), self.pages(case), True
        start = time.perf_counter()
        for _ in range(case.repeats):
            await self.read(ranges)
            right = await checksums(pages) == digests and right
        return (time.perf_counter() - start) / case.repeats, right

    async def timed_checksum(self, case: Case) -> float:
        """Return the seconds of hashing one batch on one thread."""

        def hashed() -> float:
            start = time.perf_counter()
            for _ in range(case.repeats):
                checksums_now(pages)
            return (time.perf_counter() - start) / case.repeats

        pages = self.pages(case)
        return await asyncio.to_thread(hashed)

    async def latencies(self, case: Case, count: int) -> list[float]:
        """Return the seconds of each of ``count`` reads."""
        ranges, seconds = case.ranges(), []
        for _ in range(count):
            start = time.perf_counter()
            await self.read(ranges)
            seconds.append(time.perf_counter() - start)
        return seconds

    def pages(self, case: Case) -> list[PageBytes]:
        """The local pages of a case, as the store's checksum takes them."""
        spec = PageSpec(
            num_layers=1, num_kv_heads=1, head_dim=case.page_nbytes // 2, page_size=1, dtype="uint8"
        )
        nbytes, view = case.page_nbytes, self.memory.view
        return [
            PageBytes(spec, view[start : start + nbytes], 1)
            for start in range(0, case.nbytes, nbytes)
        ]

    async def plain_socket(self) -> PlainSocket:
        """Return a plain socket to the other side.

        Raises:
            OSError, RemoteFailed: there is none to be had.
        """
        where = await self._ask(OpenSocket(), SocketOpened)
        return await asyncio.to_thread(PlainSocket, where.host, where.port, where.key)

    async def _fill_here(self, case: Case) -> int:
        seed = next(self._seeds)
        await asyncio.to_thread(fill, self.memory.view[: case.nbytes], seed)
        return seed

    async def _fill_there(self, case: Case) -> int:
        seed = next(self._seeds)
        await self._ask(FillMemory(seed, case.nbytes), Done)
        return seed

    async def _wrong_here(self, seed: int, case: Case, *, arrived: bool) -> str:
        places = arrived_here(case) if arrived else untouched(case)
        wrong = await asyncio.to_thread(wrong_byte, self.memory.view, seed, places)
        return f"on this side {wrong}" if wrong else ""

    async def _wrong_there(self, seed: int, case: Case, *, written: bool) -> str:
        message = CheckMemory(
            seed=seed, page_nbytes=case.page_nbytes, batch=case.batch, written=written
        )
        wrong = (await self._ask(message, MemoryChecked)).wrong
        return f"on the other side {wrong}" if wrong else ""

    async def _ask(self, message: msgspec.Struct, reply: type[R]) -> R:
        deadline_s = deadline_after(step_timeout_s(len(self.memory.view)))
        return await self._link.channel.request(message, reply, deadline_s=deadline_s)


@asynccontextmanager
async def open_session(
    link: Link, transport: str, nbytes: int, options: DoctorOptions, secret: str | None
) -> AsyncIterator[Session]:
    """Open a transport with ``nbytes`` on both sides; close both at the end.

    Raises:
        TransportUnavailable: one of the sides does not have it.
        TransferError: the other side broke, or did not answer in time.
    """
    memory = await Memory.open(transport, nbytes, options, secret)
    try:
        opened = link.channel.stream(
            OpenMemory(transport, nbytes),
            MemoryOpened,
            deadline_s=deadline_after(SESSION_TIMEOUT_S),
        )
        async with aclosing(cast("AsyncGenerator[MemoryOpened, None]", opened)):
            yield Session(link, memory, (await _first(opened)).token)
    finally:
        await memory.close()


async def _first(opened: AsyncIterator[MemoryOpened]) -> MemoryOpened:
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await anext(opened)
    except RemoteFailed as error:
        raise TransportUnavailable(f"on the other side: {error.message}") from error
    except StopAsyncIteration:
        raise PeerLost("the other side ended before it opened it") from None
    except TimeoutError:
        reason = f"the other side did not open it within {OPEN_TIMEOUT_S:g} s"
        raise DeadlineExceeded(reason) from None
