"""Measuring one transport: for each case the limit, a read and a write, round after round.

Owns the order of the rounds, so that whatever slows the machine slows a transport and its limit
alike. Medians and rows are ``rows``'s; a single timed operation is ``session``'s.

::

    verify ─▶ (limit, read, limit, write, read with checksum, checksum) × rounds ─▶ verify ─▶ rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from kvstore.checksum import checksums
from launch.doctor.grid import LATENCY, Case
from launch.doctor.limits import Limit, Memcpy, NoLimit, Perftest, Socket
from launch.doctor.memory import GONE, TransportUnavailable, remedy_of
from launch.doctor.options import DoctorOptions
from launch.doctor.peer import Link, answers
from launch.doctor.perftest import find_program
from launch.doctor.rows import (
    Bound,
    Finding,
    Op,
    Row,
    Unavailable,
    latency_row,
    throughput_row,
)
from launch.doctor.session import Session, Verified, open_session
from transfer.errors import RemoteFailed, TransferError

CHECKSUM = "xxh3-128"
OPS: tuple[Op, ...] = ("read", "write")
LATENCIES_PER_ROUND = 200

Times = defaultdict[str, list[float]]


async def measure(
    transport: str,
    link: Link,
    cases: Sequence[Case],
    options: DoctorOptions,
    secret: str | None,
) -> AsyncGenerator[Finding, None]:
    """Measure one transport; one finding as soon as it is known.

    What breaks on the way is a finding too (``failed``): nothing more is known from there on.
    """
    nbytes = max(case.nbytes for case in (*cases, LATENCY))
    try:
        async with (
            open_session(link, transport, nbytes, options, secret) as session,
            _limit_of(transport, session, link, nbytes) as limit,
        ):
            for case in cases:
                for row in await _measure_case(transport, session, limit, case, options.rounds):
                    yield row
            yield await _measure_latency(transport, session, limit, options.rounds)
    except TransportUnavailable as error:
        yield unavailable(transport, str(error))
    except (TransferError, OSError) as error:
        yield broken(transport, error, gone=not await answers(link))


def unavailable(transport: str, reason: str) -> Unavailable:
    """Return the finding with its remedy."""
    return Unavailable(
        transport=transport, reason=" ".join(reason.split()), remedy=remedy_of(transport, reason)
    )


def broken(transport: str, error: Exception, *, gone: bool) -> Unavailable:
    """Return the finding of what failed while it was measured; ``gone``: so is the other side."""
    found = unavailable(transport, f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(found, failed=True, remedy=GONE if gone else found.remedy)


@asynccontextmanager
async def _limit_of(
    transport: str, session: Session, link: Link, nbytes: int
) -> AsyncIterator[Limit]:
    limit = await _make_limit(transport, session, link, nbytes)
    try:
        yield limit
    finally:
        limit.close()


async def _make_limit(transport: str, session: Session, link: Link, nbytes: int) -> Limit:
    scratch = memoryview(bytearray(nbytes))
    if transport in ("loopback", "shm"):
        return Memcpy(session.memory.view[:nbytes], scratch)
    if transport == "tcp":
        try:
            return Socket(await session.plain_socket(), scratch)
        except (OSError, RemoteFailed) as error:
            return NoLimit(f"no plain socket to the other side: {error}")
    if link.is_remote:
        return NoLimit("ucx_perftest is run between processes of one machine only")
    program = find_program()
    if program is None:
        return NoLimit("ucx_perftest is not installed: pip install libucx-cu12 ships it")
    return Perftest(program)


async def _measure_case(
    transport: str, session: Session, limit: Limit, case: Case, rounds: int
) -> list[Row]:
    verified = await session.verify(case)
    digests = await checksums(session.pages(case))
    times: Times = defaultdict(list)
    digests_right = True
    for _ in range(rounds):
        for op in OPS:
            await _sample_limit(limit, op, case, times)
            times[op].append(await session.timed(op, case))
        seconds, right = await session.timed_with_checksum(case, digests)
        digests_right = digests_right and right
        times["checked"].append(seconds)
        times["hash"].append(await session.timed_checksum(case))
    wrong = await session.still_verified(case)
    if not digests_right:
        wrong = wrong or "a checksum differs"
    verified = Verified(verified.read or wrong, verified.write or wrong)
    return _rows(transport, limit, case, times, verified, session.via)


async def _sample_limit(limit: Limit, op: Op, case: Case, times: Times) -> None:
    if op in limit.ops:
        seconds = await limit.sample(op, case)
        if seconds is not None:
            times[f"limit {op}"].append(seconds)


def _rows(
    transport: str, limit: Limit, case: Case, times: Times, verified: Verified, via: str
) -> list[Row]:
    one_way = times["limit read"]
    with_hash = [sum(pair) for pair in zip(one_way, times["hash"], strict=False)]
    bounds = {
        "read": Bound(limit.name, one_way),
        "checked": Bound(f"{limit.name} + {CHECKSUM}", with_hash),
        "write": Bound(limit.name, times["limit write"] or one_way),
    }

    def row(what: str, op: Op, wrong: str, checksum: str | None = None) -> Row:
        more = {"checksum": checksum, "via": via, "note": limit.note}
        return throughput_row(transport, op, case, times[what], bounds[what], wrong=wrong, **more)

    return [
        row("read", "read", verified.read),
        row("checked", "read", verified.read, CHECKSUM),
        row("write", "write", verified.write),
    ]


async def _measure_latency(transport: str, session: Session, limit: Limit, rounds: int) -> Row:
    verified = await session.verify(LATENCY)
    seconds: list[float] = []
    bound: list[float] = []
    for _ in range(rounds):
        bound += await limit.latencies(LATENCY, LATENCIES_PER_ROUND)
        seconds += await session.latencies(LATENCY, LATENCIES_PER_ROUND)
    wrong = verified.read or await session.still_verified(LATENCY)
    more = {"wrong": wrong, "via": session.via, "note": limit.note}
    return latency_row(transport, LATENCY, seconds, Bound(limit.name, bound), **more)
