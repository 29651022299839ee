"""A store that is filled to ten times its capacity at full speed.

Measures what a writer feels when every put must push other pages out: failures, the 99th
percentile of a put beside the same percentile while the store was empty, and whether the high
watermark is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from time import perf_counter

from benchmarks.store.ours import OP_S, KvferryStore, identity_of
from benchmarks.store.rows import Figure
from kvstore.config import StoreConfig
from kvstore.store import PutOutcome, PutPage
from transfer.interface import deadline_after

PAGE_NBYTES = 368_640
BATCH = 16
NUM_BATCHES = 64  # of capacity
TIMES = 10
FAILURES = 0.001
SLOWER = 3.0


async def measure_pressure() -> list[Figure]:
    """Fill, and go on filling; the node's own numbers say how full it is."""
    capacity = NUM_BATCHES * BATCH
    store = KvferryStore("tcp", PAGE_NBYTES, BATCH, capacity * PAGE_NBYTES)
    await store.start()
    store.pages()
    try:
        outcomes: Counter[PutOutcome] = Counter()
        taken_s: list[float] = []
        fullest = 0.0
        for number in range(TIMES * NUM_BATCHES):
            keys = [hashlib.sha256(b"%d/%d" % (number, i)).digest() for i in range(BATCH)]
            puts = [PutPage(identity_of(key), i * PAGE_NBYTES) for i, key in enumerate(keys)]
            started_s = perf_counter()
            result = await store.client.put(
                puts, source=store.source, deadline_s=deadline_after(OP_S)
            )
            taken_s.append(perf_counter() - started_s)
            outcomes.update(result.outcomes)
            if number % NUM_BATCHES == NUM_BATCHES - 1:
                fullest = max(fullest, await _used_fraction(store))
    finally:
        await store.close()
    return list(_figures(store.name, outcomes, taken_s, fullest))


async def _used_fraction(store: KvferryStore) -> float:
    (numbers,) = (await store.client.stats(deadline_s=deadline_after(OP_S))).values()
    return 1.0 - numbers["free_nbytes"] / numbers["segment_nbytes"]


def _figures(
    subject: str, outcomes: Counter[PutOutcome], taken_s: list[float], fullest: float
) -> list[Figure]:
    total = sum(outcomes.values())
    failed = total - outcomes[PutOutcome.STORED] - outcomes[PutOutcome.PRESENT]
    empty = taken_s[: int(NUM_BATCHES * 0.8)]
    full = taken_s[NUM_BATCHES:]
    watermark = StoreConfig(segment_nbytes=1 << 20).high_watermark
    slack = BATCH / (NUM_BATCHES * BATCH)  # what one put may add before the next tick
    return [
        Figure(
            name=f"puts failed while filling to {TIMES} x capacity",
            subject=subject,
            unit="of all",
            value=failed / total,
            target=FAILURES,
            at_least=False,
            detail=", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()),
        ),
        Figure(
            name=f"put of {BATCH} pages, p99 full, times p99 empty",
            subject=subject,
            unit="x",
            value=_p99(full) / _p99(empty),
            target=SLOWER,
            at_least=False,
            detail=f"{_p99(full) * 1e3:.1f} ms, {_p99(empty) * 1e3:.1f} ms",
        ),
        Figure(
            name="fullest after a round",
            subject=subject,
            unit="of the segment",
            value=fullest,
            target=watermark + slack,
            at_least=False,
        ),
    ]


def _p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]
