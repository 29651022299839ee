"""kvferry's page store beside Redis and Mooncake Store, in one run on one machine.

    python -m benchmarks.page_store [--json] [--rounds 5] [--only throughput --only match ...]

Every store runs in a process of its own; this process is its only client. Rounds are interleaved:
each round puts and gets one batch of new pages with every store, so that what else the machine
does meets all of them. kvferry's gets verify a checksum of every page, the others' do not. The
command exits with 1 when a figure falls short of its target.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Protocol

import msgspec
import uvloop

from benchmarks.machine import describe
from benchmarks.store.index import measure_index
from benchmarks.store.mooncake import MooncakeRival
from benchmarks.store.ours import KvferryStore
from benchmarks.store.pressure import measure_pressure
from benchmarks.store.redis import RedisStore
from benchmarks.store.rows import Figure, of_samples, show
from benchmarks.store.subject import Pages, Subject
from benchmarks.store.wire import PlainStream

PAGE_NBYTES = 368_640  # 16 tokens of SmolLM2-135M
BATCH = 64
SEGMENT_NBYTES = 1 << 30
NUM_SINGLES = 200
PARTS = ("throughput", "latency", "match", "pressure")
AHEAD = 1.5  # of every rival, tcp against tcp
SINGLE_US = 150.0


class WithPages(Subject, Protocol):
    """A subject and the memory it works on."""

    def pages(self) -> Pages: ...


def new_keys(serial: Iterator[int], count: int) -> list[bytes]:
    """Keys that no store has seen."""
    return [hashlib.sha256(b"%d" % next(serial)).digest() for _ in range(count)]


async def seconds(action: Callable[[], Awaitable[None]]) -> float:
    """How long ``action`` takes."""
    started_s = perf_counter()
    await action()
    return perf_counter() - started_s


class Timings:
    """Seconds of every operation, by subject."""

    def __init__(self, subjects: Sequence[WithPages]) -> None:
        self.put: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        self.get: dict[str, list[float]] = {subject.name: [] for subject in subjects}

    async def take(self, subject: WithPages, pages: Pages, keys: list[bytes]) -> None:
        """One put and one get of ``keys``; the bytes that came back are compared."""
        pages.wipe(len(keys))
        self.put[subject.name].append(await seconds(lambda: subject.put(keys)))
        self.get[subject.name].append(await seconds(lambda: subject.get(keys)))
        pages.verify(len(keys))


async def throughput(subjects: Sequence[WithPages], rounds: int) -> list[Figure]:
    """Batches of pages: GB/s of every subject, and kvferry over tcp against each rival."""
    serial = itertools.count()
    timings = Timings(subjects)
    memory = {subject.name: subject.pages() for subject in subjects}
    for number in range(rounds + 1):  # the first one warms up
        if number == 1:
            timings = Timings(subjects)
        for subject in subjects:
            pages = memory[subject.name]
            await timings.take(subject, pages, new_keys(serial, pages.batch))
            await subject.clear()
    nbytes = BATCH * PAGE_NBYTES
    figures = []
    for op, taken in (("put", timings.put), ("get", timings.get)):
        name = f"{op}, {BATCH} x {PAGE_NBYTES} B"
        for subject, times in taken.items():
            rates = [nbytes / 1e9 / time_s for time_s in times]
            figures.append(of_samples(name, subject, "GB/s", rates))
        figures += _against_rivals(op, taken)
    return figures


def _against_rivals(op: str, taken: dict[str, list[float]]) -> Iterator[Figure]:
    """kvferry over tcp in units of each rival: the median of the ratios of each round."""
    ours = taken.get("kvferry tcp")
    for rival, times in taken.items():
        if ours is None or rival.startswith(("kvferry", "plain")):
            continue
        ratios = tuple(theirs / mine for theirs, mine in zip(times, ours, strict=True))
        yield Figure(
            name=f"{op}, times {rival}",
            subject="kvferry tcp",
            unit="x",
            value=median(ratios),
            samples=ratios,
            target=AHEAD,
        )


async def latency(subjects: Sequence[WithPages], rounds: int) -> list[Figure]:
    """One page at a time: median put and get in microseconds."""
    serial = itertools.count(1 << 32)
    timings = Timings(subjects)
    for number in range(rounds + 1):
        if number == 1:
            timings = Timings(subjects)
        for subject in subjects:
            pages = subject.pages()
            for _ in range(NUM_SINGLES // rounds if number else 10):
                await timings.take(subject, pages, new_keys(serial, 1))
            await subject.clear()
    figures = []
    for op, taken in (("put", timings.put), ("get", timings.get)):
        for subject, times in taken.items():
            ours = subject.startswith("kvferry")
            figure = Figure(
                name=f"{op} of one page, p50",
                subject=subject,
                unit="us",
                value=median(times) * 1e6,
                target=SINGLE_US if ours else None,
                at_least=False,
                detail=f"p99 {sorted(times)[int(len(times) * 0.99)] * 1e6:.0f} us",
            )
            figures.append(figure)
    return figures


def rivals() -> Iterator[tuple[str, Callable[[], WithPages], str | None]]:
    """Name, factory and what is missing of every other store."""
    yield "Redis", lambda: RedisStore(PAGE_NBYTES, BATCH), RedisStore.missing()
    yield (
        "Mooncake Store",
        lambda: MooncakeRival(PAGE_NBYTES, BATCH, SEGMENT_NBYTES),
        MooncakeRival.missing(),
    )


async def moving(parts: Sequence[str], rounds: int) -> list[Figure]:
    """The parts that move pages, with every store that is there."""
    subjects: list[WithPages] = [PlainStream(PAGE_NBYTES, BATCH)]
    subjects += [
        KvferryStore(transport, PAGE_NBYTES, BATCH, SEGMENT_NBYTES) for transport in ("tcp", "shm")
    ]
    figures = []
    for name, make, missing in rivals():
        if missing is None:
            subjects.append(make())
            continue
        figures.append(
            Figure(name="is there", subject=name, unit="", value=None, target=1, detail=missing)
        )
    started: list[WithPages] = []
    try:
        for subject in subjects:
            await subject.start()
            started.append(subject)
        if "throughput" in parts:
            figures += await throughput(subjects, rounds)
        if "latency" in parts:
            figures += await latency(subjects, rounds)
    finally:
        for subject in reversed(started):
            await subject.close()
    return figures


async def measure(parts: Sequence[str], rounds: int) -> list[Figure]:
    """All parts asked for, in order."""
    figures: list[Figure] = []
    if {"throughput", "latency"} & set(parts):
        figures += await moving(parts, rounds)
    if "match" in parts:
        figures += await measure_index(rounds)
    if "pressure" in parts:
        figures += await measure_pressure()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object a figure")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], choices=PARTS, help="repeatable (default: all)"
    )
    args = parser.parse_args()
    figures = uvloop.run(measure(args.only or PARTS, args.rounds))
    if args.json:
        for figure in figures:
            print(msgspec.json.encode(figure).decode())
    else:
        print(f"{describe()}\n\n{show(figures)}")
    return int(any(figure.passed is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
