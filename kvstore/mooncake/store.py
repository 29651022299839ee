"""``PageStore`` on a Mooncake cluster: for whoever outgrows kvferry's own store.

Owns the life of one client. Differs from the distributed store where Mooncake does: ``match`` says
ABSENT of pages that are being written, readers that wait are answered by a poller, ``clear``
cannot choose a namespace, and leases, eviction, replicas and tiers are Mooncake's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.asking import check_keys, check_pages
from kvstore.mooncake.binding import Library
from kvstore.mooncake.config import MATCHES_MAX, PROBE_KEYS_MAX, MooncakeConfig
from kvstore.mooncake.connection import Connection
from kvstore.mooncake.reading import PageReading
from kvstore.mooncake.writing import PageWriting
from kvstore.page import PageKey, PageSpec
from kvstore.store import (
    DEFAULT_POLICY,
    GetOutcome,
    GetPage,
    GetResult,
    PageState,
    PutPage,
    PutPolicy,
    PutResult,
)
from transfer.interface import Region


class MooncakeStore:
    """One client. Make it inside a running loop; it connects in the background.

    Raises:
        MooncakeUnavailable: the library or one of its system libraries is missing.
    """

    def __init__(
        self, config: MooncakeConfig, *, spec: PageSpec, library: Library | None = None
    ) -> None:
        self.spec = spec
        self.config = config
        self._connection = Connection(config, spec, library or Library())
        self._matches = asyncio.Semaphore(MATCHES_MAX)
        self._closing: asyncio.Future[None] | None = None

    async def connected(self, *, deadline_s: float) -> bool:
        """Wait for the master until the deadline; True when this is a client of it."""
        return await self._connection.wait_until_connected(deadline_s)

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]:
        check_keys(keys, deadline_s)
        states = [PageState.ABSENT] * len(keys)
        if not keys or (
            await self._connection.watch.within(self._matches.acquire(), deadline_s) is None
        ):
            return states
        try:
            for start in range(0, len(keys), PROBE_KEYS_MAX):
                names = [self._connection.name_of(k) for k in keys[start : start + PROBE_KEYS_MAX]]
                there = await self._connection.are_there(names, deadline_s)
                for i, is_there in enumerate(there, start):
                    states[i] = PageState.READY if is_there else PageState.ABSENT
        finally:
            self._matches.release()
        return states

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        """As promised by ``PageStore``. Above the default priority a page is soft-pinned: Mooncake
        evicts it after all others, for ``priority_s`` or the master's own time."""
        check_pages(pages, self.spec, source, deadline_s)
        writing = PageWriting(
            self._connection, pages, source=source, deadline_s=deadline_s, policy=policy
        )
        result = await writing.run()
        self._connection.counters["pages_pushed"] += result.moved.num_pages
        self._connection.counters["bytes_pushed"] += result.moved.nbytes
        return result

    async def get(
        self,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool = False,
        on_page: Callable[[int, GetOutcome], None] | None = None,
    ) -> GetResult:
        check_pages(pages, self.spec, into, deadline_s)
        reading = PageReading(
            self._connection, pages, into=into, deadline_s=deadline_s, on_page=on_page
        )
        result = await reading.run(wait=wait)
        self._connection.counters["pages_pulled"] += result.moved.num_pages
        self._connection.counters["bytes_pulled"] += result.moved.nbytes
        return result

    async def clear(self, *, deadline_s: float, namespace: bytes | None = None) -> int:
        """Remove kvferry's pages from the cluster; returns how many.

        Mooncake cannot tell namespaces apart: with ``namespace``, too, all of them go.

        Raises:
            TimeoutError: the master did not confirm it until the deadline.
        """
        native = self._connection.native
        if native is None:
            raise TimeoutError(f"{self._connection.config.master}: no Mooncake master answers")
        pattern = f"^{self._connection.config.prefix}/.*"
        watch = self._connection.watch
        call = watch.follow(self._connection.questions.start(native.remove_by_regex, pattern, True))
        if not await watch.done_by(call, deadline_s) or call.result() < 0:
            raise TimeoutError(f"{self._connection.config.master}: the pages may still be there")
        return call.result()

    @property
    def num_calls_under_way(self) -> int:
        """Reads and writes that Mooncake has not ended, those included that nobody waits for."""
        return len(self._connection.reads) + len(self._connection.writes)

    @property
    def is_lost(self) -> bool:
        """The master does not answer: nothing is found or kept until it does."""
        return self._connection.watch.is_lost

    def counters(self) -> dict[str, int]:
        """What this client has moved and what broke, by name."""
        abandoned = self._connection.read_slabs.num_abandoned
        return {**self._connection.counters, "slabs_abandoned": abandoned}

    async def close(self) -> None:
        """Idempotent. Waits at most a few seconds for calls under way."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._connection.close())
        await asyncio.shield(self._closing)
