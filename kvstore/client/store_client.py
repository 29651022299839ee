"""The distributed page store, as a node uses it: ``PageStore`` over all live store nodes.

Owns one client's links, background work and counters; the calls themselves are ``PageMatcher``,
``PageReader`` and ``PageWriter``. The network, transfer and membership objects are the caller's.

Guarantees, beyond ``PageStore``: a call is bounded by its deadline; a node that does not answer is
skipped for a back-off time; no exception of the world reaches the caller, only outcomes. What no
store could do is a ``ValueError`` at once. Regions handed in must be host memory (``Region.view``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.asking import check_keys, check_pages
from kvstore.client.background import Background
from kvstore.client.link import StoreLink
from kvstore.client.links import ClientParts, StoreLinks
from kvstore.client.matching import PageMatcher
from kvstore.client.reading import PageReader
from kvstore.client.releases import Releases
from kvstore.client.single import get_one, put_one
from kvstore.client.writing import PageWriter
from kvstore.config import StoreClientConfig
from kvstore.messages import ClearStore, ReadStats, StoreDone, StoreStats
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
from transfer.channel import Hello, Network
from transfer.errors import TransferError
from transfer.identity import Identity, NodeId
from transfer.interface import Region, Transfer
from transfer.membership import Membership

CLOSE_S = 1.0  # grace for releases under way


class StoreClient:
    """``PageStore`` over store nodes found by membership. Make it inside a running loop."""

    def __init__(
        self,
        *,
        identity: Identity,
        network: Network,
        transfer: Transfer,
        membership: Membership,
        spec: PageSpec,
        config: StoreClientConfig | None = None,
    ) -> None:
        self.spec = spec
        self._counters: Counter[str] = Counter()
        config = config or StoreClientConfig()
        self.links = StoreLinks(
            network=network,
            hello=Hello(identity=identity),
            config=config,
            counters=self._counters,
        )
        self._incarnation = identity.incarnation
        self._num_clears = 0
        self._background = Background()
        self._parts = ClientParts(
            spec=spec,
            config=config,
            transfer=transfer,
            links=self.links,
            background=self._background,
            releases=Releases(self._background, self._counters, config.op_timeout_s),
            counters=self._counters,
        )
        self._closed = False
        membership.subscribe(self.links.follow)

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]:
        check_keys(keys, deadline_s)
        matcher = PageMatcher(self._parts, keys, deadline_s=deadline_s)
        return await matcher.run()

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        check_pages(pages, self.spec, source, deadline_s)
        result = None
        if len(pages) == 1:
            result = await put_one(
                self._parts, pages[0], source=source, policy=policy, deadline_s=deadline_s
            )
        if result is None:
            writer = PageWriter(
                self._parts, pages, source=source, deadline_s=deadline_s, policy=policy
            )
            result = await writer.run()
        self._counters["pages_pushed"] += result.moved.num_pages
        self._counters["bytes_pushed"] += result.moved.nbytes
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
        result = None
        if len(pages) == 1:
            result = await get_one(
                self._parts, pages[0], into=into, deadline_s=deadline_s, wait=wait
            )
        if result is None:
            reader = PageReader(
                self._parts, pages, into=into, deadline_s=deadline_s, wait=wait, on_page=on_page
            )
            result = await reader.run()
        elif on_page is not None:
            on_page(0, result.outcomes[0])
        self._counters["pages_pulled"] += result.moved.num_pages
        self._counters["bytes_pulled"] += result.moved.nbytes
        return result

    async def stats(self, *, deadline_s: float) -> dict[NodeId, dict[str, float]]:
        """Numbers of every store node that answers."""
        numbers: dict[NodeId, dict[str, float]] = {}

        async def ask(link: StoreLink) -> None:
            try:
                reply = await link.call(ReadStats(), StoreStats, deadline_s=deadline_s)
            except TransferError:
                return
            numbers[link.node_id] = reply.numbers

        await asyncio.gather(*(ask(link) for link in self.links.all()))
        return dict(sorted(numbers.items()))

    async def clear(self, *, deadline_s: float, namespace: bytes | None = None) -> int:
        """Make every node forget its ready pages, or those of one namespace; returns how many.

        Raises:
            TransferError: a node could not be told; its pages may still be there.
        """
        self._num_clears += 1
        clear_id = f"{self._incarnation}/{self._num_clears}"
        calls = [
            link.call(ClearStore(namespace, clear_id), StoreDone, deadline_s=deadline_s)
            for link in self.links.all()
        ]
        done = await asyncio.gather(*calls, return_exceptions=True)
        count = 0
        for reply in done:
            if isinstance(reply, BaseException):
                raise reply
            count += reply.count
        return count

    def counters(self) -> dict[str, int]:
        """A snapshot for metrics: outcomes, bytes, connects, back-offs, collisions."""
        return {**self._counters, "dropped_background": self._background.num_dropped}

    async def quiet(self) -> None:
        """Return when all releases and aborts of finished calls have been sent."""
        await self._background.idle()

    async def close(self) -> None:
        """Send what is left of releases, then close the channels. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._background.close(CLOSE_S)
        await self.links.close()

    def abort(self) -> None:
        """Drop everything at once; leases end by themselves. Idempotent."""
        self._closed = True
        self._background.abort()
        self.links.abort()
