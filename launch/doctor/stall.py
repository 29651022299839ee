"""One stalled peer among four: what the other three keep of their throughput.

Owns the processes of that experiment. Three peers are read from at the same time, once alone and
once while a fourth, which was stopped (SIGSTOP) in the middle of being read from, still owes its
bytes; alternately, for the rounds asked for. The row's ``limit`` is the three alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from launch.doctor.grid import MIB, Case
from launch.doctor.measure import broken, unavailable
from launch.doctor.memory import TransportUnavailable
from launch.doctor.options import DoctorOptions
from launch.doctor.peer import in_a_child
from launch.doctor.rows import Bound, Finding, Row, throughput_row
from launch.doctor.session import Session, open_session
from transfer.channel import Network
from transfer.errors import DeadlineExceeded, PeerClosed, PeerLost, TransferError

OTHERS = 3
CASE = Case(MIB, 32)  # of each read, from each peer
SAMPLE_S = 1.0  # the three are read from for so long: shorter than a stopped peer is put up with
RETRY_S = 0.05  # between reads from the stalled peer that failed
LIMIT = "three alone"
BEGIN_TIMEOUT_S = 30.0  # until the fourth, which worked a moment ago, has been read from once more
STOP_TIMEOUT_S, STOP_POLL_S = 10.0, 0.001


async def measure_stalled(
    transport: str, network: Network, options: DoctorOptions, secret: str | None
) -> Finding:
    """Return the row ``stalled_peer`` of one transport."""
    try:
        return await _measure(transport, network, options, secret)
    except TransportUnavailable as error:
        return unavailable(transport, str(error))
    except (TransferError, OSError) as error:  # a timeout is an OSError
        gone = isinstance(error, PeerLost | PeerClosed | DeadlineExceeded | TimeoutError)
        return broken(transport, error, gone=gone)


async def _measure(
    transport: str, network: Network, options: DoctorOptions, secret: str | None
) -> Row:
    alone: list[float] = []
    beside: list[float] = []
    async with AsyncExitStack() as stack:
        peers = [_peer(transport, network, options, secret) for _ in range(OTHERS)]
        sessions = [(await stack.enter_async_context(peer))[0] for peer in peers]
        wrong = [(await session.verify(CASE)).read for session in sessions]
        for _ in range(options.rounds):
            alone.append(await _seconds_of_all(sessions))
            async with _stalled(transport, network, options, secret):
                beside.append(await _seconds_of_all(sessions))
        wrong += [await session.still_verified(CASE) for session in sessions]
        via = sessions[0].via
    case, bound = Case(CASE.page_nbytes, CASE.batch * OTHERS), Bound(LIMIT, alone)
    first_wrong = next(filter(None, wrong), "")
    return throughput_row(
        transport, "stalled_peer", case, beside, bound, wrong=first_wrong, via=via
    )


@asynccontextmanager
async def _peer(
    transport: str, network: Network, options: DoctorOptions, secret: str | None
) -> AsyncIterator[tuple[Session, int]]:
    """A peer process with memory, and its id."""
    async with in_a_child(network, options) as link:
        assert link.pid is not None, "the peer is a child"
        async with open_session(link, transport, CASE.nbytes, options, secret) as session:
            yield session, link.pid


async def _seconds_of_all(sessions: Sequence[Session]) -> float:
    """Return the mean seconds in which all together read one case each, at the same time."""
    start = time.perf_counter()
    ends_at = start + SAMPLE_S

    async def keep_reading(session: Session) -> int:
        count = 0
        while time.perf_counter() < ends_at:
            await session.read(CASE.ranges())
            count += 1
        return count

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_reading(session)) for session in sessions]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    taken = time.perf_counter() - start
    return taken * len(sessions) / sum(task.result() for task in tasks)


@asynccontextmanager
async def _stalled(
    transport: str, network: Network, options: DoctorOptions, secret: str | None
) -> AsyncIterator[None]:
    """A fourth peer that is stopped while it is read from, and goes on being asked."""
    async with _peer(transport, network, options, secret) as (session, pid):
        await session.verify(CASE)
        has_begun = asyncio.Event()
        reader = asyncio.create_task(_keep_asking(session, has_begun))
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                await has_begun.wait()
            os.kill(pid, signal.SIGSTOP)
            await _until_stopped(pid)
            yield
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            os.kill(pid, signal.SIGKILL)  # its end is in_a_child's; stopped, it would not say bye


async def _until_stopped(pid: int) -> None:
    """Return when every thread of the process stands still: the signal alone takes its time."""
    async with asyncio.timeout(STOP_TIMEOUT_S):
        while any(state != "T" for state in _thread_states(pid)):  # noqa: ASYNC110 (no event)
            await asyncio.sleep(STOP_POLL_S)


def _thread_states(pid: int) -> list[str]:
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]


async def _keep_asking(session: Session, has_begun: asyncio.Event) -> None:
    while True:
        try:
            await session.read(CASE.ranges())
            has_begun.set()
        except TransferError:
            await asyncio.sleep(RETRY_S)
