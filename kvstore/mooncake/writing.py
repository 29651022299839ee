"""One ``put``: reserve, copy and hash into a slab, transfer, commit; or join who writes already.

A batch is a job of its own, because its calls cannot be interrupted. When the put ends before it,
at its deadline or cancelled, the job goes on with the copy that it has: it commits late, or gives
its reservation back. The caller's pages are read only while the put is running::

    claim ─▶ reserve ─┬─▶ fill the slab ─▶ transfer ─▶ commit   STORED
                      ├─▶ taken: committed by another: compare the record   PRESENT, REFUSED
                      │          being written: wait, then reserve again
                      └─▶ no space   REFUSED
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.checksum import checksum_of
from kvstore.mooncake import record
from kvstore.mooncake.binding import (
    ABSENT_CODES,
    EXISTS,
    NO_SPACE,
    NOT_READY,
    NativeStore,
)
from kvstore.mooncake.calls import finished
from kvstore.mooncake.connection import Connection
from kvstore.mooncake.reading import read_headers, settle_when_done
from kvstore.mooncake.slabs import Slab
from kvstore.store import (
    PRIORITY_DEFAULT,
    PageRecord,
    PutOutcome,
    PutPage,
    PutPolicy,
    PutResult,
    TransferCount,
)
from kvstore.verify import same_identity
from transfer.interface import Region, deadline_after, remaining_s


class WriteJob:
    """One batch. ``outcomes`` holds what is decided; ``taken`` what another has or writes."""

    def __init__(
        self, connection: Connection, pages: dict[int, PutPage], source: Region, config: Any
    ) -> None:
        self._c = connection
        self._pages = pages
        self._source = source
        self._config = config
        self._filling: asyncio.Future[None] | None = None
        self._given_up = False
        self.outcomes: dict[int, PutOutcome] = {}
        self.taken: list[int] = []

    async def give_up(self) -> None:
        """Read the source no more; returns when nobody does."""
        self._given_up = True
        if self._filling is not None:
            await finished(self._filling)

    async def run(self, native: NativeStore, slab: Slab) -> None:
        try:
            await self._run(native, slab)
        finally:
            self._c.write_slabs.give_back(slab)
            for page in self._pages.values():
                self._c.writing.pop(page.identity.key).set_result(None)

    async def _run(self, native: NativeStore, slab: Slab) -> None:
        codes = await self._c.watch.follow(self._c.writes.start(self._reserve, native))
        mine = [i for i, code in zip(self._pages, codes, strict=True) if code == 0]
        for i, code in zip(self._pages, codes, strict=True):
            if code == EXISTS:
                self.taken.append(i)
            elif code != 0:
                failed = PutOutcome.REFUSED if code == NO_SPACE else PutOutcome.FAILED
                self.outcomes[i] = failed
        if not mine:
            return
        names = self._names(mine)
        if self._given_up:
            await self._c.writes.start(native.batch_put_session_revoke, names)
            return
        self._filling = self._c.copies.start(self._fill, slab, mine)
        try:
            await self._filling
        except BaseException:
            self._c.writes.start(native.batch_put_session_revoke, names)
            raise
        sending = self._c.writes.start(self._transfer, native, slab, names)
        written = await self._c.watch.follow(sending)
        for i, ok in zip(mine, written, strict=True):
            self.outcomes[i] = PutOutcome.STORED if ok else PutOutcome.FAILED

    def _names(self, indexes: Sequence[int]) -> list[str]:
        return [self._c.name_of(self._pages[i].identity.key) for i in indexes]

    def _reserve(self, native: NativeStore) -> list[int]:
        names = self._names(list(self._pages))
        sizes = [self._c.layout.object_nbytes] * len(names)
        return native.batch_put_session_start(names, sizes, self._config)

    def _fill(self, slab: Slab, mine: list[int]) -> None:
        """On a thread: copy, then hash what was copied."""
        spec = self._c.spec
        for place, i in enumerate(mine):
            identity, start = self._pages[i].identity, self._pages[i].local_offset
            page = slab.page(place)
            source = np.frombuffer(self._source.view[start : start + spec.page_nbytes], np.uint8)
            np.copyto(np.frombuffer(page, dtype=np.uint8), source)
            stated = PageRecord(
                key=identity.key,
                parent=identity.parent,
                depth=identity.depth,
                tokens=identity.tokens,
                checksum=checksum_of(spec, page, identity.num_tokens),
                page_nbytes=spec.page_nbytes,
            )
            record.encode(stated, slab.header(place))

    def _transfer(self, native: NativeStore, slab: Slab, names: list[str]) -> list[bool]:
        """On a thread: write all reserved objects and commit those that arrived whole."""
        if not slab.register(native):
            native.batch_put_session_revoke(names)
            return [False] * len(names)
        size = self._c.layout.object_nbytes
        addresses = [[slab.address_of(place)] for place in range(len(names))]
        sizes, zeros = [[size] for _ in names], [[0] for _ in names]
        sent = native.batch_put_from_multi_buffer_ranges(names, addresses, sizes, zeros)
        whole = [name for name, code in zip(names, sent, strict=True) if code == size]
        broken = [name for name, code in zip(names, sent, strict=True) if code != size]
        ended = native.batch_put_session_end(whole) if whole else []
        if broken:
            native.batch_put_session_revoke(broken)
        committed = {name for name, code in zip(whole, ended, strict=True) if code == 0}
        return [name in committed for name in names]


class PageWriting:
    """Use once."""

    def __init__(
        self,
        connection: Connection,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy,
    ) -> None:
        self._c = connection
        self._pages = pages
        self._source = source
        self._deadline_s = deadline_s
        self._config = connection.library.replicate_config(
            replicas=connection.config.replicas,
            pin=policy.priority > PRIORITY_DEFAULT,
            pin_s=policy.priority_s,
        )
        self._outcomes: dict[int, PutOutcome] = {}

    async def run(self) -> PutResult:
        todo = list(range(len(self._pages)))
        while todo and remaining_s(self._deadline_s) > 0 and self._c.native is not None:
            todo = await self._round(self._c.native, todo)
        outcomes = [self._outcomes.get(i, PutOutcome.FAILED) for i in range(len(self._pages))]
        stored = outcomes.count(PutOutcome.STORED)
        return PutResult(outcomes, TransferCount(stored, stored * self._c.spec.page_nbytes))

    async def _round(self, native: NativeStore, todo: list[int]) -> list[int]:
        """Write what nobody else does; return what has to be tried again."""
        mine, joined = self._split(todo)
        size = self._c.layout.batch_pages
        async with asyncio.TaskGroup() as tasks:
            batches = [
                tasks.create_task(self._batch(native, mine[start : start + size]))
                for start in range(0, len(mine), size)
            ]
        again = [i for batch in batches for i in batch.result()]
        writers = [self._c.writing.get(self._pages[i].identity.key) for i in joined]
        for writer in writers:
            if writer is not None:
                await self._c.watch.done_by(writer, self._deadline_s)
        return again + joined

    def _split(self, todo: list[int]) -> tuple[list[int], list[int]]:
        """Into pages that nobody in this process writes, each key once, and the others."""
        mine: list[int] = []
        joined: list[int] = []
        keys: set[bytes] = set()
        for i in todo:
            key = self._pages[i].identity.key
            others = joined if key in self._c.writing or key in keys else mine
            others.append(i)
            keys.add(key)
        return mine, joined

    async def _batch(self, native: NativeStore, indexes: list[int]) -> list[int]:
        """Write one slab full; return what another writer took."""
        slab = await self._c.slab_of(self._c.write_slabs, self._deadline_s)
        if slab is None:
            return []
        if not self._c.still(native):
            self._c.write_slabs.give_back(slab)
            return []
        unclaimed = [i for i in indexes if self._pages[i].identity.key not in self._c.writing]
        late = [i for i in indexes if i not in unclaimed]  # claimed while this waited for a slab
        if not unclaimed:
            self._c.write_slabs.give_back(slab)
            return late
        loop = asyncio.get_running_loop()
        for i in unclaimed:
            self._c.writing[self._pages[i].identity.key] = loop.create_future()
        pages = {i: self._pages[i] for i in unclaimed}
        job = WriteJob(self._c, pages, self._source, self._config)
        task = self._c.spawn(loop.create_task(job.run(native, slab)))
        try:
            if not await self._c.watch.done_by(task, self._deadline_s):
                self._c.counters["late_calls"] += 1
                return []
        finally:
            await job.give_up()
        if task.cancelled():  # closed meanwhile
            return []
        task.result()
        self._outcomes.update(job.outcomes)
        return late + await self._meet(native, job.taken)

    async def _meet(self, native: NativeStore, taken: list[int]) -> list[int]:
        """Compare with what others have put; wait for what they are writing. Returns the rest."""
        if not taken:
            return []
        names = [self._c.name_of(self._pages[i].identity.key) for i in taken]
        slab = await self._c.slab_of(self._c.read_slabs, self._deadline_s)
        if slab is None:
            return []
        if not self._c.still(native):
            self._c.read_slabs.give_back(slab)
            return []
        started_s = asyncio.get_running_loop().time()
        call = self._c.reads.start(read_headers, native, slab, names, self._c)
        self._c.watch.follow(call)
        try:
            if not await self._c.watch.done_by(call, self._deadline_s):
                self._c.counters["late_calls"] += 1
                return []
            codes = call.result()
            again = [i for place, i in enumerate(taken) if self._compare(slab, place, i, codes)]
        finally:
            settle_when_done(self._c, call, slab, started_s)
        under_way = [n for n, code in zip(names, codes, strict=True) if code == NOT_READY]
        if under_way:
            until_s = min(self._deadline_s, deadline_after(self._c.config.join_retry_s))
            await self._c.appearances.any_of(under_way, deadline_s=until_s)
        elif again:
            await asyncio.sleep(self._c.config.poll_s)
        return again

    def _compare(self, slab: Slab, place: int, i: int, codes: list[int]) -> bool:
        """Decide the outcome by the record that is there; True when it must be tried again."""
        identity, code = self._pages[i].identity, codes[place]
        if code in ABSENT_CODES:
            return True
        if code != self._c.layout.header_nbytes:
            self._outcomes[i] = PutOutcome.FAILED
            return False
        found = record.decode(slab.header(place))
        if found is None or found.key != identity.key:
            self._c.counters["pages_corrupt"] += 1
            self._c.remove([self._c.name_of(identity.key)])
            return True
        same = same_identity(found, identity)
        self._outcomes[i] = PutOutcome.PRESENT if same else PutOutcome.REFUSED
        return False
