"""The index of one node with a million pages: how fast ``match`` is, and what a record costs."""

from __future__ import annotations

import hashlib
from statistics import median
from time import perf_counter

from benchmarks.store.mooncake import MooncakeRival
from benchmarks.store.ours import OP_S, KvferryStore
from benchmarks.store.rows import Figure
from kvstore.page import PageKey
from kvstore.store import PageIdentity, PageState, PutOutcome, PutPage
from transfer.interface import deadline_after

NUM_PAGES = 1_000_000
NUM_KEYS = 8192
PAGE_NBYTES = 32  # 16 tokens of one byte for K and for V: the index is what is measured
BATCH = 8192
SEGMENT_NBYTES = 64 << 20
RIVAL_BATCH = 64
MATCH_US = 0.6
RECORD_MB = 400.0


def chain(count: int, length: int = 1000) -> list[PageIdentity]:
    """``count`` pages of 16 tokens in prompts of ``length`` pages, keys as good as hashed."""
    pages = []
    parent = bytes(32)
    for i in range(count):
        depth = i % length
        parent = bytes(32) if not depth else parent
        key = PageKey(hashlib.sha256(b"page %d" % i).digest())
        tokens = i.to_bytes(4, "little") * 16
        pages.append(PageIdentity(key=key, parent=parent, depth=depth, tokens=tokens))
        parent = key
    return pages


async def measure_index(rounds: int) -> list[Figure]:
    """Fill one node over its real protocol, then ask."""
    store = KvferryStore("shm", PAGE_NBYTES, BATCH, SEGMENT_NBYTES)
    await store.start()
    try:
        figures = [await _fill(store), await _match(store, rounds)]
    finally:
        await store.close()
    missing = MooncakeRival.missing()
    if missing is None:
        theirs = await _rival_match(rounds)
        ahead = Figure(
            name="match, times Mooncake's batch_is_exist",
            subject="kvferry shm",
            unit="x",
            value=(theirs.value or 0.0) / (figures[1].value or 1.0),
            target=1.0,
        )
        figures += [theirs, ahead]
    return figures


async def _fill(store: KvferryStore) -> Figure:
    before = await store.rss_nbytes()
    pages = chain(NUM_PAGES)
    for start in range(0, NUM_PAGES, BATCH):
        batch = pages[start : start + BATCH]
        puts = [PutPage(page, i * PAGE_NBYTES) for i, page in enumerate(batch)]
        result = await store.client.put(puts, source=store.source, deadline_s=deadline_after(OP_S))
        assert set(result.outcomes) == {PutOutcome.STORED}, set(result.outcomes)
    grown = await store.rss_nbytes() - before - NUM_PAGES * PAGE_NBYTES
    return Figure(
        name="memory per million page records",
        subject=store.name,
        unit="MB",
        value=grown / 1e6 * (1_000_000 / NUM_PAGES),
        target=RECORD_MB,
        at_least=False,
        detail="resident, the segment's bytes taken off",
    )


async def _match(store: KvferryStore, rounds: int) -> Figure:
    samples = []
    for number in range(4 * rounds + 1):
        first = number * 37 * NUM_KEYS % (NUM_PAGES - NUM_KEYS)
        keys = [
            PageKey(hashlib.sha256(b"page %d" % i).digest()) for i in range(first, first + NUM_KEYS)
        ]
        started_s = perf_counter()
        states = await store.client.match(keys, deadline_s=deadline_after(OP_S))
        taken_s = perf_counter() - started_s
        assert set(states) == {PageState.READY}, set(states)
        if number:  # the first one warms up
            samples.append(taken_s / NUM_KEYS * 1e6)
    return Figure(
        name=f"match of {NUM_KEYS} keys among {NUM_PAGES} pages",
        subject=store.name,
        unit="us a key",
        value=median(samples),
        samples=tuple(samples),
        target=MATCH_US,
        at_least=False,
    )


async def _rival_match(rounds: int) -> Figure:
    rival = MooncakeRival(4096, RIVAL_BATCH, 512 << 20)
    await rival.start()
    try:
        keys = [hashlib.sha256(b"page %d" % i).digest() for i in range(NUM_KEYS)]
        for start in range(0, NUM_KEYS, RIVAL_BATCH):  # a million would take it seven minutes
            await rival.put(keys[start : start + RIVAL_BATCH])
        samples = [await rival.match_s(keys) / NUM_KEYS * 1e6 for _ in range(4 * rounds)]
    finally:
        await rival.close()
    return Figure(
        name=f"batch_is_exist of {NUM_KEYS} keys among {NUM_KEYS} objects",
        subject=rival.name,
        unit="us a key",
        value=median(samples),
        samples=tuple(samples),
    )
