"""The physical limits that transports are held against, each measured between their rounds.

Owns the timing of a copy, a plain socket and ``ucx_perftest``, off the event loop. Knows no
transport of kvferry. A limit that does not exist here says why (``note``) and gives no samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from launch.doctor.grid import Case, step_timeout_s
from launch.doctor.perftest import (
    LATENCY_MESSAGES,
    PerftestFailed,
    Program,
    num_messages,
    run,
)
from launch.doctor.plain_socket import PlainSocket
from launch.doctor.rows import Op

T = TypeVar("T")


class Limit(Protocol):
    """One physical limit. ``ops`` are measured each for itself; a missing one is the other's."""

    name: str
    ops: tuple[Op, ...]
    note: str

    async def sample(self, op: Op, case: Case) -> float | None:
        """Return the seconds of one batch; None when there is no limit here."""
        ...

    async def latencies(self, case: Case, count: int) -> list[float]:
        """Return the seconds of single reads of a small case; empty when there is no limit."""
        ...

    def close(self) -> None: ...


class NoLimit:
    """There is nothing to compare with; ``note`` says why."""

    name = ""
    ops: tuple[Op, ...] = ()

    def __init__(self, note: str) -> None:
        self.note = note

    async def sample(self, op: Op, case: Case) -> float | None:
        return None

    async def latencies(self, case: Case, count: int) -> list[float]:
        return []

    def close(self) -> None: ...


class Memcpy:
    """A copy of the same scattered pages on one thread, from page to page as the transport does."""

    name = "memcpy"
    ops: tuple[Op, ...] = ("read",)  # a copy has no direction
    note = ""

    def __init__(self, source: memoryview, target: memoryview) -> None:
        """Both hold the largest case; ``target`` is overwritten."""
        self._source = np.frombuffer(source, np.uint8)
        self._target = np.frombuffer(target, np.uint8)

    def _copies(self, case: Case) -> Callable[[], None]:
        pairs = [
            (self._target[local : local + nbytes], self._source[remote : remote + nbytes])
            for remote, local, nbytes in case.ranges()
        ]

        def copy() -> None:
            for target, source in pairs:
                np.copyto(target, source)

        return copy

    async def sample(self, op: Op, case: Case) -> float | None:
        copies = self._copies(case)
        return await asyncio.to_thread(_seconds_each, copies, case.repeats)

    async def latencies(self, case: Case, count: int) -> list[float]:
        copies = self._copies(case)
        return await asyncio.to_thread(_seconds_of_each, copies, count)

    def close(self) -> None: ...


class Socket:
    """The same bytes through a plain blocking socket, in one stream."""

    name = "plain socket"
    ops: tuple[Op, ...] = ("read", "write")
    note = ""

    def __init__(self, connection: PlainSocket, memory: memoryview) -> None:
        self._connection = connection
        self._memory = memory

    async def sample(self, op: Op, case: Case) -> float | None:
        return await self._run(_seconds_each, op, case, case.repeats)

    async def latencies(self, case: Case, count: int) -> list[float]:
        return await self._run(_seconds_of_each, "read", case, count)

    async def _run(
        self, timed: Callable[[Callable[[], None], int], T], op: Op, case: Case, count: int
    ) -> T:
        """Run on a thread that has ended when this returns, raises or is cancelled."""
        memory = self._memory[: case.nbytes]

        def exchange() -> None:
            self._connection.exchange("write" if op == "write" else "read", memory)

        thread = asyncio.ensure_future(asyncio.to_thread(timed, exchange, count))
        try:
            await asyncio.wait({thread}, timeout=step_timeout_s(count * case.nbytes))
        finally:
            if not thread.done():
                self._connection.interrupt()
                await asyncio.gather(thread, return_exceptions=True)
        return thread.result()

    def close(self) -> None:
        self._connection.close()


class Perftest:
    """UCX's own benchmark over the transports that UCX_TLS allows, in two new processes."""

    name = "ucx_perftest"
    ops: tuple[Op, ...] = ("read",)  # tagged messages: one way is as the other

    def __init__(self, program: Program) -> None:
        self._program = program
        self.note = ""

    async def sample(self, op: Op, case: Case) -> float | None:
        if self.note:
            return None  # it failed before: it will fail again, and each try takes its time
        try:
            each = await run(self._program, "tag_bw", case.page_nbytes, num_messages(case))
        except PerftestFailed as error:
            self.note = str(error)
            return None
        return each * case.batch

    async def latencies(self, case: Case, count: int) -> list[float]:
        """Return one median: there and back, because a read asks and is answered."""
        if self.note:
            return []
        try:
            one_way = await run(self._program, "tag_lat", case.page_nbytes, LATENCY_MESSAGES)
        except PerftestFailed as error:
            self.note = str(error)
            return []
        return [2 * one_way]

    def close(self) -> None: ...


def _seconds_each(action: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats


def _seconds_of_each(action: Callable[[], None], count: int) -> list[float]:
    return [_seconds_each(action, 1) for _ in range(count)]
