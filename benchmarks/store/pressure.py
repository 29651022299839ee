"""A store that is filled to ten times its capacity at full speed.

Measures what a writer feels when every put must push other pages out: failures, the 99th
percentile of a put beside the same percentile while the store was empty, and whether the high
watermark is kept.
"""

from __future__ import annotations

import hashlib
import itertools
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
EMPTY_ROUNDS = 8
EMPTY = 0.8  # of the capacity: below every watermark
FAILURES = 0.001
SLOWER = 3.0


class _Filler:
    """Puts batch after batch of new pages and keeps count."""

    def __init__(self, store: KvferryStore) -> None:
        self._store = store
        self._serial = itertools.count()
        self.outcomes: Counter[PutOutcome] = Counter()

    async def put(self, num_batches: int) -> list[float]:
        """Returns what each batch took, in seconds."""
        taken_s = []
        for number in itertools.islice(self._serial, num_batches):
            keys = [hashlib.sha256(b"%d/%d" % (number, i)).digest() for i in range(BATCH)]
            puts = [PutPage(identity_of(key), i * PAGE_NBYTES) for i, key in enumerate(keys)]
            started_s = perf_counter()
            result = await self._store.client.put(
                puts, source=self._store.source, deadline_s=deadline_after(OP_S)
            )
            taken_s.append(perf_counter() - started_s)
            self.outcomes.update(result.outcomes)
        return taken_s


async def measure_pressure() -> list[Figure]:
    """Fill, and go on filling; the node's own numbers say how full it is.

    The store is filled once before, so that all of its memory has been touched: else the system's
    page faults would count for the empty store. Then a store that is emptied again and again, as
    one filling gives too few samples for a percentile.
    """
    capacity = NUM_BATCHES * BATCH
    store = KvferryStore("tcp", PAGE_NBYTES, BATCH, capacity * PAGE_NBYTES)
    await store.start()
    store.pages()
    try:
        await _Filler(store).put(NUM_BATCHES)
        filler, empty_s, full_s, fullest = _Filler(store), list[float](), list[float](), 0.0
        for _ in range(EMPTY_ROUNDS):
            await store.clear()
            empty_s += await filler.put(int(NUM_BATCHES * EMPTY))
        for _ in range(TIMES):
            full_s += await filler.put(NUM_BATCHES)
            fullest = max(fullest, await _used_fraction(store))
    finally:
        await store.close()
    return _figures(store.name, filler.outcomes, empty_s, full_s[NUM_BATCHES:], fullest)


async def _used_fraction(store: KvferryStore) -> float:
    (numbers,) = (await store.client.stats(deadline_s=deadline_after(OP_S))).values()
    return 1.0 - numbers["free_nbytes"] / numbers["segment_nbytes"]


def _figures(
    subject: str,
    outcomes: Counter[PutOutcome],
    empty: list[float],
    full: list[float],
    fullest: float,
) -> list[Figure]:
    total = sum(outcomes.values())
    failed = total - outcomes[PutOutcome.STORED] - outcomes[PutOutcome.PRESENT]
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
