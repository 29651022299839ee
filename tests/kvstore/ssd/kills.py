"""kill -9 in the middle of heavy spilling, again and again, on one tier.

``python -m tests.kvstore.ssd.kills --rounds 50`` prints a line a round: pages found, verified,
dropped. It fails when a page comes back with other bytes than were stored.

The child stores, displaces and removes pages of two sizes as fast as it can and says how far it is.
The parent kills it somewhere, opens the tier itself and loads every page it finds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.checksum import checksum_of
from kvstore.page import PageSpec
from kvstore.ssd import SsdConfig, SsdTier
from tests.kvstore.ssd.ssd_pages import DEEP, LARGE, page

NBYTES = 64 << 20
STORES_AT_ONCE = 16
REPORT_EVERY = 16
BASE = np.random.default_rng(0).integers(0, 256, DEEP.page_nbytes, dtype=np.uint8)


class Round(NamedTuple):
    found: int
    verified: int
    dropped: int


def spec_of(number: int) -> PageSpec:
    return DEEP if number % 4 else LARGE


def content(number: int) -> npt.NDArray[np.uint8]:
    """Bytes that differ in every sector from those of every other page."""
    data = BASE[: spec_of(number).page_nbytes].copy()
    for shift in range(4):
        data[shift::512] = number >> 8 * shift & 255
    return data


def config(folder: Path) -> SsdConfig:
    return SsdConfig(path=folder, nbytes=NBYTES, flush_s=0.01, num_writers=2)


async def spill(folder: Path, first: int) -> None:
    """Store pages until killed."""
    tier = await SsdTier.open(config(folder))
    tier.displace(lambda _: None)
    stored, done = iter(range(first, 1 << 31)), 0
    keys = [p.record.key for p in tier.contents()]

    async def store_on() -> None:
        nonlocal done
        for number in stored:
            data, spec = content(number), spec_of(number)
            checksum = checksum_of(spec, data.data, spec.page_size)
            made = page(number, spec=spec, heat=float(number), checksum=checksum)
            if await tier.store(made, data.data):
                keys.append(made.record.key)
            done += 1
            if number % 7 == 0:
                tier.remove([keys.pop(number % len(keys))])
            if done % REPORT_EVERY == 0:
                print(number, flush=True)

    await asyncio.gather(*(store_on() for _ in range(STORES_AT_ONCE)))


async def examine(folder: Path) -> Round:
    """Load every page found; raises AssertionError for wrong bytes."""
    tier = await SsdTier.open(config(folder))
    pages, verified = list(tier.contents()), 0
    for found in pages:
        into = np.zeros(found.record.page_nbytes, dtype=np.uint8)
        record = await tier.load(found.record.key, into.data)
        if record is not None:
            assert record == found.record
            assert (into == content(record.depth)).all(), f"page {record.depth}: other bytes"
            verified += 1
    numbers = tier.numbers()
    tier.check()
    await tier.close()
    dropped = sum(int(n) for name, n in numbers.items() if name.startswith("ssd_dropped"))
    assert verified + dropped == len(pages)
    return Round(len(pages), verified, dropped)


def run_and_kill(folder: Path, first: int, reports: int) -> int:
    """Run a child until it has reported so often, kill it; returns the next page's number."""
    command = [sys.executable, "-m", __spec__.name, "--spill", str(folder), "--first", str(first)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    last = first
    try:
        for _ in range(reports):
            line = child.stdout.readline()
            assert line, "the child ended by itself"
            last = int(line)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    return last + 4096


async def rounds(folder: Path, num_rounds: int, seed: int) -> list[Round]:
    rng, first, results = random.Random(seed), 0, []
    for number in range(num_rounds):
        first = await asyncio.to_thread(run_and_kill, folder, first, rng.randrange(1, 40))
        results.append(await examine(folder))
        print(f"round {number}: {results[-1]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spill", type=Path)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("kvstore.ssd").setLevel(logging.ERROR)  # dropped pages are counted
    if given.spill is not None:
        asyncio.run(spill(given.spill, given.first))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(rounds(Path(folder) / "tier", given.rounds, given.seed))
    totals = Round(*(sum(column) for column in zip(*results, strict=True)))
    print(f"{given.rounds} kills: {totals}; every page found verified or was dropped")


if __name__ == "__main__":
    main()
