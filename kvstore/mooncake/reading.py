"""One ``get``: pages from Mooncake into a slab, verified there, copied to where they are wanted.

Owns the passes over what is still missing. Nothing but the copy of a verified page, a fraction of
a millisecond, ever touches the destination, so a call that hangs or was cancelled cannot.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.mooncake import record
from kvstore.mooncake.binding import (
    ABSENT_CODES,
    INVALID,
    RPC_FAILED,
    NativeStore,
)
from kvstore.mooncake.calls import finished, when_done
from kvstore.mooncake.connection import Connection
from kvstore.mooncake.slabs import Slab
from kvstore.page import PageSpec
from kvstore.store import GetOutcome, GetPage, GetResult, PageIdentity, TransferCount
from kvstore.verify import believable, verify
from transfer.interface import Region, remaining_s


class _Landed(NamedTuple):
    """What became of one object in a slab."""

    outcome: GetOutcome
    is_damaged: bool = False  # to be removed


class PageReading:
    """Use once."""

    def __init__(
        self,
        connection: Connection,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        on_page: Callable[[int, GetOutcome], None] | None,
    ) -> None:
        self._c = connection
        self._pages = pages
        self._names = [connection.name_of(page.identity.key) for page in pages]
        self._into = into
        self._deadline_s = deadline_s
        self._on_page = on_page
        self._outcomes: dict[int, GetOutcome] = {}
        self._num_moved = 0

    async def run(self, *, wait: bool) -> GetResult:
        todo = list(range(len(self._pages)))
        waiting: list[int] = []
        while todo and remaining_s(self._deadline_s) > 0:
            waiting += await self._pass(todo)
            todo = []
            if wait and waiting:
                names = [self._names[i] for i in waiting]
                coming = self._c.appearances.any_of(names, deadline_s=self._deadline_s)
                found = await self._c.watch.within(coming, self._deadline_s) or set()
                todo = [i for i in waiting if self._names[i] in found]
                waiting = [i for i in waiting if self._names[i] not in found]
        for i in todo + waiting:
            self._finish(i, GetOutcome.ABSENT)
        count = TransferCount(self._num_moved, self._num_moved * self._c.spec.page_nbytes)
        return GetResult([self._outcomes[i] for i in range(len(self._pages))], count)

    def _finish(self, i: int, outcome: GetOutcome) -> None:
        self._outcomes[i] = outcome
        if self._on_page is not None:
            self._on_page(i, outcome)

    async def _pass(self, todo: list[int]) -> list[int]:
        """Read what is there; return the rest."""
        native = self._c.native
        if native is None:
            return todo
        async with asyncio.TaskGroup() as tasks:
            batches = [
                tasks.create_task(self._batch(native, indexes)) for indexes in self._batches(todo)
            ]
        return [i for batch in batches for i in batch.result()]

    def _batches(self, todo: list[int]) -> list[list[int]]:
        """Split into calls; the library answers only once for a key that a call names twice."""
        layers: list[list[int]] = []
        times_seen: Counter[str] = Counter()
        for i in todo:
            layer = times_seen[self._names[i]]
            times_seen[self._names[i]] += 1
            if layer == len(layers):
                layers.append([])
            layers[layer].append(i)
        size = self._c.layout.batch_pages
        return [
            layer[start : start + size] for layer in layers for start in range(0, len(layer), size)
        ]

    async def _batch(self, native: NativeStore, indexes: list[int]) -> list[int]:
        """Read one slab full; return the pages that are not there, or not in time."""
        slab = await self._c.slab_of(self._c.read_slabs, self._deadline_s)
        if slab is None:
            return indexes
        if not self._c.still(native):
            self._c.read_slabs.give_back(slab)
            return indexes
        started_s = asyncio.get_running_loop().time()
        names = [self._names[i] for i in indexes]
        call = self._c.reads.start(read_objects, native, slab, names, self._c)
        self._c.watch.follow(call)
        try:
            if not await self._c.watch.done_by(call, self._deadline_s):
                self._c.counters["late_calls"] += 1
                return indexes
            if not self._c.still(native):
                return indexes
            return await self._land(slab, indexes, call.result())
        finally:
            settle_when_done(self._c, call, slab, started_s)

    async def _land(self, slab: Slab, indexes: list[int], codes: list[int]) -> list[int]:
        """Verify and copy what arrived; return what was absent."""
        arrived = [(place, i) for place, i in enumerate(indexes) if codes[place] > 0]
        landing = self._c.copies.start(self._land_all, slab, arrived, codes)
        verdicts = await finished(landing)
        landed = dict(zip((i for _, i in arrived), verdicts, strict=True))
        self._num_moved += len(arrived)
        absent = []
        for i, code in zip(indexes, codes, strict=True):
            if code in ABSENT_CODES:
                absent.append(i)
                continue
            if i not in landed:
                too_large = _Landed(GetOutcome.CORRUPT, is_damaged=True)
                landed[i] = too_large if code == INVALID else _Landed(GetOutcome.FAILED)
            self._count(i, landed[i])
            self._finish(i, landed[i].outcome)
        return absent

    def _count(self, i: int, landed: _Landed) -> None:
        self._c.counters["pages_corrupt"] += landed.outcome is GetOutcome.CORRUPT
        self._c.counters["pages_failed"] += landed.outcome is GetOutcome.FAILED
        if landed.is_damaged:
            self._c.remove([self._names[i]])

    def _land_all(
        self, slab: Slab, arrived: list[tuple[int, int]], codes: list[int]
    ) -> list[_Landed]:
        """On a thread: copy and verify each page whose record is the expected one."""
        landed = []
        for place, i in arrived:
            page = self._pages[i]
            if codes[place] != self._c.layout.object_nbytes:
                landed.append(_Landed(GetOutcome.CORRUPT, is_damaged=True))
                continue
            end = page.local_offset + self._c.spec.page_nbytes
            target = self._into.view[page.local_offset : end]
            landed.append(land(slab, place, page.identity, self._c.spec, target))
        return landed


def land(
    slab: Slab, place: int, identity: PageIdentity, spec: PageSpec, target: memoryview
) -> _Landed:
    """Copy one page to where it is wanted, and compare what is there then with what it should be.

    A page that is sound but about other tokens touches nothing and stays in the store.
    """
    found, page = record.decode(slab.header(place)), slab.page(place)
    if found is None:
        return _Landed(GetOutcome.CORRUPT, is_damaged=True)
    if not believable(found, identity, spec):
        intact = record.is_intact(found, identity.key, spec, page)
        return _Landed(GetOutcome.CORRUPT, is_damaged=not intact)
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(page, dtype=np.uint8))
    outcome = verify(found, identity, spec, target)
    return _Landed(outcome, is_damaged=outcome is GetOutcome.CORRUPT)


def settle_when_done(
    connection: Connection, call: asyncio.Future[list[int]], slab: Slab, started_s: float
) -> None:
    """Take the slab of a read back when the library has ended it, which may be a minute later."""
    loop = asyncio.get_running_loop()

    def settle(done: asyncio.Future[list[int]]) -> None:
        connection.read_slabs.settle(slab, done.result(), loop.time() - started_s)

    when_done(call, settle)


def read_objects(
    native: NativeStore, slab: Slab, names: list[str], connection: Connection
) -> list[int]:
    """On a thread: read whole objects; return the bytes of each, or its code."""
    if not slab.register(native):
        return [RPC_FAILED] * len(names)
    places = range(len(names))
    sizes = [connection.layout.object_nbytes] * len(names)
    return native.batch_get_into(names, [slab.address_of(place) for place in places], sizes)


def read_headers(
    native: NativeStore, slab: Slab, names: list[str], connection: Connection
) -> list[int]:
    """On a thread: read the headers of objects; return the bytes of each, or its code."""
    if not slab.register(native):
        return [RPC_FAILED] * len(names)
    stride, nbytes = connection.layout.stride, connection.layout.header_nbytes
    places = [[place * stride] for place in range(len(names))]
    zeros, sizes = [[0] for _ in names], [[nbytes] for _ in names]
    [codes] = native.get_into_ranges([slab.address], [names], [places], [zeros], [sizes])
    return [code for [code] in codes]
