"""Thousands of random operations under injected faults, with every byte checked.

``python -m tests.transfer.soak [--operations 10000] [--transport NAME] [--seed N]`` prints one line
of JSON for each transport, within one process and between two.

Every worker owns one piece of local memory and one zone of the owner's. It checks, for each
operation: the destination holds the right bytes after success; after failure, each byte is the old
or the new one; nothing outside of the ranges has changed; nothing is touched after the end (the
local memory is filled anew at once, and looked at again before it is used next); it ends by its
deadline, and fails only in the ways that were provoked. A zone whose write failed is renewed first:
bytes of a failed write may be on their way until the owner revokes the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from tests.transfer.bulk_harness import Engines, checked_engines, pattern
from tests.transfer.soak_memory import ZONE_NBYTES, Bytes, Expectation, random_ranges
from tests.transfer.soak_owner import (
    READ_NBYTES,
    READ_SEED,
    SETTINGS,
    LocalOwner,
    Owner,
    ProcessOwner,
    Usage,
    own_usage,
)
from transfer.engine import TransferEngine
from transfer.errors import DeadlineExceeded, PeerLost, TransferError
from transfer.interface import Range, Rights, deadline_after, remaining_s
from transfer.region import HostRegion

TRANSPORTS = ("loopback", "shm", "tcp", "ucx")
RULES = "any p=0.06 reset; any p=0.06 truncate; seed="
NUM_WORKERS = 16
CANCELLED_SHARE = 0.1
SHORT_DEADLINE_SHARE = 0.1
SHORT_DEADLINE_S = 0.004
LONG_DEADLINE_S = 60.0  # nothing takes that long: reaching it is a hang
GRACE_S = 5.0  # how late an operation may end after its deadline on a busy machine
WARM_SHARE = 0.25
OK = "ok"
MAX_SETTLE_ROUNDS = 200
MAX_USAGE_POLLS = 100
USAGE_POLL_S = 0.05


class Report(NamedTuple):
    """What one soak did and found. ``wrong`` is empty if all was right."""

    transport: str
    num_processes: int
    operations: int
    outcomes: dict[str, int]
    faults_injected: int
    bytes_moved: int
    seconds: float
    warm: Usage
    end: Usage
    owner_warm: Usage
    owner_end: Usage
    wrong: list[str]

    def summary(self) -> dict[str, Any]:
        """For people and machines: figures, without the lists."""
        mib = 1 << 20
        return {
            "transport": self.transport,
            "processes": self.num_processes,
            "operations": self.operations,
            **self.outcomes,
            "faults_injected": self.faults_injected,
            "gib_moved": round(self.bytes_moved / (1 << 30), 2),
            "seconds": round(self.seconds, 1),
            "wrong": len(self.wrong),
            "rss_mib": [round(u.rss_nbytes / mib, 1) for u in (self.warm, self.end)],
            "owner_rss_mib": [
                round(u.rss_nbytes / mib, 1) for u in (self.owner_warm, self.owner_end)
            ],
            "fds": [self.warm.num_fds, self.end.num_fds],
            "owner_fds": [self.owner_warm.num_fds, self.owner_end.num_fds],
            "threads": [self.warm.num_threads, self.end.num_threads],
        }


def outcome_of(
    task: asyncio.Task[TransferError | None], *, cancelled: bool, short: bool
) -> tuple[str, bool]:
    """Return how an operation ended, and whether that was provoked.

    Args:
        task: the operation; it has ended.
        cancelled: it was cancelled on the way.
        short: it had a deadline that it may have missed.
    """
    if task.cancelled():
        return "cancelled", cancelled
    error = task.result()
    if error is None:
        return OK, True
    provoked = isinstance(error, PeerLost) or (short and isinstance(error, DeadlineExceeded))
    return type(error).__name__, provoked


class Worker:
    """One task's memory and its checks."""

    def __init__(self, number: int, soak: Soak) -> None:
        self._zone = number
        self._soak = soak
        self._rng = random.Random(f"{soak.seed}/{number}")
        self._noise = np.random.default_rng([soak.seed, number])
        engine = soak.faulty
        private = number % 2
        region = engine.register(np.zeros(ZONE_NBYTES, np.uint8)) if private else None
        self._local = region if isinstance(region, HostRegion) else engine.allocate(ZONE_NBYTES)
        self._memory: Bytes = np.frombuffer(self._local.view, np.uint8)
        self._model: Bytes = np.zeros(ZONE_NBYTES, np.uint8)  # of the remote zone
        self._back = soak.checker.allocate(ZONE_NBYTES)
        self._refill()

    def _refill(self) -> None:
        """Fill the local memory with something new; nobody else may change it from now on."""
        self._memory[:] = self._noise.integers(0, 256, ZONE_NBYTES, dtype=np.uint8)
        self._kept = self._memory.copy()

    async def step(self) -> None:
        """One operation, with its checks."""
        if not np.array_equal(self._memory, self._kept):
            self._soak.say("the local memory was touched after its operation had ended")
        right: Rights = self._rng.choice(["r", "w"])
        source_nbytes = READ_NBYTES if right == "r" else ZONE_NBYTES
        ranges = random_ranges(self._rng, right=right, source_nbytes=source_nbytes)
        outcome = await self._run(right, ranges)
        if right == "r":
            expected = Expectation(self._kept)
            expected.add(ranges, self._soak.readable, right="r")
            self._judge(expected, self._memory, "read", outcome)
            self._refill()
            return
        expected = Expectation(self._model)
        expected.add(ranges, self._kept, right="w")
        self._refill()  # at once: a write that still sends from here is caught
        if outcome != OK:
            await self._soak.owner.renew(self._zone)
        found = await self._read_back()
        self._judge(expected, found, "write", outcome)
        self._model = found

    def _judge(self, expected: Expectation, found: Bytes, what: str, outcome: str) -> None:
        if problem := expected.wrong(found, succeeded=outcome == OK):
            self._soak.say(f"{what} that ended with {outcome}: {problem}")

    async def _read_back(self) -> Bytes:
        """Return the remote zone, read by an engine without faults."""
        token = self._soak.owner.zone_tokens[self._zone]
        whole = [Range(0, 0, ZONE_NBYTES)]
        deadline_s = deadline_after(LONG_DEADLINE_S)
        await self._soak.checker.read(token, whole, into=self._back, deadline_s=deadline_s)
        return np.array(np.frombuffer(self._back.view, np.uint8))

    async def _run(self, right: Rights, ranges: list[Range]) -> str:
        """Run one operation, perhaps with a short deadline or a cancel; return how it ended."""
        rng = self._rng
        short = rng.random() < SHORT_DEADLINE_SHARE
        deadline_s = deadline_after(rng.uniform(0, SHORT_DEADLINE_S) if short else LONG_DEADLINE_S)
        cancels = rng.random() < CANCELLED_SHARE
        async with asyncio.TaskGroup() as group:  # if this worker is stopped, so is the task
            task = group.create_task(self._move(right, ranges, deadline_s))
            if cancels:
                await asyncio.sleep(rng.choice([0.0, 0.0001, 0.001, 0.003]))
                task.cancel()
            done, _ = await asyncio.wait([task], timeout=remaining_s(deadline_s) + GRACE_S)
            assert done, f"{right} of {ranges} hangs: its deadline was {GRACE_S} s ago"
        outcome, provoked = outcome_of(task, cancelled=cancels, short=short)
        if not provoked:
            self._soak.say(f"{outcome} that nothing provoked: {task}")
        self._soak.outcomes[outcome] += 1
        return outcome

    async def _move(
        self, right: Rights, ranges: list[Range], deadline_s: float
    ) -> TransferError | None:
        """Run one operation; return its error, None for success."""
        soak, local = self._soak, self._local
        try:
            if right == "r":
                token = soak.owner.read_token
                await soak.faulty.read(token, ranges, into=local, deadline_s=deadline_s)
            else:
                token = soak.owner.zone_tokens[self._zone]
                await soak.faulty.write(token, ranges, source=local, deadline_s=deadline_s)
        except TransferError as error:
            return error
        return None


class Soak:
    """All workers of one run."""

    def __init__(
        self, owner: Owner, faulty: TransferEngine, checker: TransferEngine, seed: int
    ) -> None:
        self.owner = owner
        self.faulty = faulty
        self.checker = checker
        self.seed = seed
        self.readable = pattern(READ_NBYTES, READ_SEED)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._left = 0
        self._workers = [Worker(number, self) for number in range(NUM_WORKERS)]

    def say(self, problem: str) -> None:
        self.wrong.append(f"operation {self.outcomes.total()}: {problem}")

    async def settle(self) -> None:
        """Leave the faulty engine connected, with all memory mapped: that can be compared."""
        byte, local = [Range(0, 0, 1)], self.faulty.allocate(1)
        for _ in range(MAX_SETTLE_ROUNDS):
            with suppress(PeerLost):
                deadline_s = deadline_after(LONG_DEADLINE_S)
                for token in (self.owner.read_token, *self.owner.zone_tokens):
                    await self.faulty.read(token, byte, into=local, deadline_s=deadline_s)
                break
        local.revoke()

    async def run(self, num_operations: int) -> None:
        self._left = num_operations
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(self._work(worker))

    async def _work(self, worker: Worker) -> None:
        while self._left > 0:
            self._left -= 1
            await worker.step()


async def run_soak(engines: Engines, owner: Owner, num_operations: int, seed: int) -> Report:
    """Run ``num_operations`` on new engines; the first quarter of them warms up."""
    loop = asyncio.get_running_loop()
    faulty = await engines.make(inject=RULES + str(seed), **SETTINGS)
    checker = await engines.make(**SETTINGS)
    soak = Soak(owner, faulty, checker, seed)
    start = loop.time()
    num_warm = int(num_operations * WARM_SHARE)
    await soak.run(num_warm)
    await soak.settle()
    warm, owner_warm = own_usage(), await owner.usage()
    await soak.run(num_operations - num_warm)
    await soak.settle()
    owner_end = await usage_like(owner.usage, owner_warm)
    counted = faulty.counters()
    if counted.fallbacks or checker.counters().fallbacks:
        soak.say("an engine fell back to another transport")
    return Report(
        engines.transport,
        1 if isinstance(owner, LocalOwner) else 2,
        num_operations,
        dict(soak.outcomes),
        counted.faults_injected,
        counted.bytes_read + counted.bytes_written,
        loop.time() - start,
        warm,
        own_usage(),
        owner_warm,
        owner_end,
        soak.wrong,
    )


async def usage_like(measure: Callable[[], Awaitable[Usage]], warm: Usage) -> Usage:
    """Return what is in use once it is no more than before; the last measure if it stays more.

    A side notices in its own time that the other one has closed a connection.
    """
    usage = await measure()
    for _ in range(MAX_USAGE_POLLS):
        if usage.num_fds <= warm.num_fds and usage.num_threads <= warm.num_threads:
            break
        await asyncio.sleep(USAGE_POLL_S)
        usage = await measure()
    return usage


@asynccontextmanager
async def owner_of(engines: Engines, *, num_processes: int) -> AsyncIterator[Owner]:
    async with AsyncExitStack() as stack:
        if num_processes == 1:
            yield LocalOwner(await engines.make(**SETTINGS), NUM_WORKERS)
        else:
            process = ProcessOwner(engines.transport, NUM_WORKERS)
            yield await stack.enter_async_context(process)


async def soak_one(transport: str, num_processes: int, num_operations: int, seed: int) -> Report:
    async with (
        checked_engines(transport) as engines,
        owner_of(engines, num_processes=num_processes) as owner,
    ):
        return await run_soak(engines, owner, num_operations, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random operations under injected faults.")
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    num_wrong = 0
    for transport in (options.transport,) if options.transport else TRANSPORTS:
        if transport == "ucx" and find_spec("ucxx") is None:
            print("ucx: ucxx is not installed", file=sys.stderr)
            continue
        for num_processes in (1,) if transport == "loopback" else (1, 2):
            work = soak_one(transport, num_processes, options.operations, options.seed)
            report = asyncio.run(work)
            print(json.dumps(report.summary()), flush=True)
            print(*report.wrong[:20], sep="\n", end="", file=sys.stderr)
            num_wrong += len(report.wrong)
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
