"""The decode node: one process that pulls KV pages and generates tokens.

Owns the parts and their lives; each part decides or performs one thing. Knows no prefill node and
no HTTP.

    DecodeRequest ──▶ Legs ──▶ Scheduler ◀──────────────── StepLoop ──▶ runner (own thread)
    PrefillUpdate ──▶  │         │  ▲ pages there            │ tokens
                       │         ▼  │                        ▼
                       │       Fetcher ◀── store ◀── WriteBack
                       └──────────── OutputStream ──▶ PromptReady, TokensOut ..., Finished

One rule keeps pages safe: every holder (page table, page cache, pull, write-back) has its own
reference, and gives it back once, when it touches the page no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from itertools import count

from decode_node.config import DecodeConfig
from decode_node.fetcher import Fetcher
from decode_node.intake import new_sequence
from decode_node.leg_news import EarlyNews
from decode_node.legs import Legs
from decode_node.page_cache import PageCache
from decode_node.page_holds import PageHolds
from decode_node.scheduler import Admitted, Scheduler, StepResult, UnwrittenPages
from decode_node.sequence import SeqState, Sequence
from decode_node.step_loop import StepLoop
from decode_node.write_back import WriteBack
from engine.node_facts import contract_of, labels_of
from engine.page_allocator import PageAllocator
from engine.request import (
    Ack,
    DecodeEvent,
    DecodeRequest,
    ErrorCode,
    Finished,
    PrefillUpdate,
)
from engine.step import Runner
from kvstore.events import (
    CacheCleared,
    ClearCache,
    GetStats,
    KvEventLog,
    KvEventPublisher,
    StatsReply,
    WatchKvEvents,
)
from kvstore.keys import Namespace
from kvstore.store import PageStore, PutPolicy
from transfer.channel import Caller, Hello, Listener, Network, Service
from transfer.errors import RemoteFailed
from transfer.identity import Identity
from transfer.interface import Region, Transfer
from transfer.membership import Membership, NodeInfo, NodeStatus

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 0.5  # for open streams to deliver their last item when the node closes


class DecodeNode:
    """See the module.

    ``network``, ``transfer``, ``store`` and ``membership`` are started and closed by the caller;
    the node leaves the membership when it closes. ``region`` is the page pool as ``store`` takes
    it, and is revoked by the node; by default a host pool is registered with ``transfer``.
    ``wall_clock`` gives the time that KV events carry.
    """

    def __init__(
        self,
        config: DecodeConfig,
        *,
        identity: Identity,
        network: Network,
        transfer: Transfer,
        store: PageStore,
        membership: Membership,
        runner: Runner,
        region: Region | None = None,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self.identity = identity
        self._config = config
        self._network = network
        self._transfer = transfer
        self._membership = membership
        self._runner = runner
        self._info = info = runner.info
        self._wall_clock = wall_clock
        self._events = KvEventPublisher(KvEventLog())
        self._allocator = PageAllocator(runner.pool.num_pages)
        self._cache = PageCache(self._allocator, self._events.log)
        self._holds = PageHolds(self._allocator, self._on_pages_released)
        self._scheduler = Scheduler(
            config, info, self._allocator, self._cache, self._holds, outlet=self
        )
        self._region = region or transfer.register(runner.pool.storage)
        self._fetcher = Fetcher(
            store=store,
            region=self._region,
            spec=info.spec,
            scheduler=self._scheduler,
            holds=self._holds,
            pull_timeout_s=config.pull_timeout_s,
            on_ended=self._on_pulled,
        )
        self._write_back = WriteBack(
            store=store,
            region=self._region,
            spec=info.spec,
            holds=self._holds,
            num_workers=config.write_back_workers,
            num_pages_max=max(1, min(config.write_back_pages, self._allocator.num_pages // 4)),
            timeout_s=config.write_back_timeout_s,
        )
        self._early = EarlyNews(config.early_news_max, config.early_news_s)
        self._legs = Legs(
            self._scheduler, self._early, on_news=self._on_news, last_put_s=self._last_put_s
        )
        self._loop = StepLoop(
            self._scheduler,
            runner,
            on_admitted=self._on_admitted,
            on_result=self._on_result,
            on_failed=self._on_engine_failed,
            on_turn=self._events.flush,
        )
        self._arrivals = count()
        self._listener: Listener | None = None
        self._draining = False
        self._closed = False

    # ---- life

    async def start(self) -> None:
        """Run the step loop, listen, join the membership (waits for the registry)."""
        self._loop.start()
        contract = contract_of(self._info)
        hello = Hello(identity=self.identity, contract=contract)
        self._listener = await self._network.listen(self.service(), hello, self._config.bind)
        events = self._events.open(
            self._network, self.identity, bind=self._config.bind, wall_clock=self._wall_clock
        )
        info = NodeInfo(
            identity=self.identity,
            address=self._listener.address,
            transport=self._transfer.transport,
            contract=contract,
            labels={**labels_of(self._runner), **events},
        )
        await self._membership.join(info, self.status)

    async def drain(self, timeout_s: float) -> None:
        """Take no new work; let legs end, for at most ``timeout_s``; hand over the rest.

        What is handed over ends with ``Finished(ABORT)`` when its pages are in the store.
        """
        self._draining = True
        await self._legs.wait_empty(timeout_s)
        self._legs.hand_over()
        await self._legs.wait_empty(self._config.drain_write_back_s + CLOSE_GRACE_S)
        await self._write_back.flush(self._config.drain_write_back_s)

    async def close(self) -> None:
        """Stop in order; idempotent. Open legs are handed over, pages on their way are stored.

        When it returns no page is read or written any more.
        """
        if self._closed:
            return
        self._closed = self._draining = True
        await self._membership.leave()
        self._legs.hand_over()
        await self._legs.wait_empty(self._last_put_s() + CLOSE_GRACE_S)
        await self._loop.close()
        await self._fetcher.close()
        await self._write_back.flush(self._last_put_s())
        await self._write_back.close()
        await self._legs.join()
        self._legs.abort()
        if self._listener is not None:
            await self._listener.close()
        self._events.close()
        await asyncio.to_thread(self._region.revoke)  # may wait for a peer

    def abort(self) -> None:
        """Stop at once, as a crash would; idempotent. A step in the engine's thread runs out.

        Peers are not waited for if ``transfer`` was aborted before.
        """
        self._closed = self._draining = True
        self._loop.abort()
        self._fetcher.abort()
        self._write_back.abort()
        self._legs.abort()
        self._events.close()
        self._region.revoke()

    # ---- what others read

    @property
    def address(self) -> str:
        assert self._listener is not None, "start() first"
        return self._listener.address

    @property
    def healthy(self) -> bool:
        """The step loop runs, and the engine's last steps did not all fail."""
        return self._loop.healthy

    def status(self) -> NodeStatus:
        """What the heartbeat says."""
        return NodeStatus(draining=self._draining, gauges=self.gauges())

    def gauges(self) -> dict[str, float]:
        waiting, active = self._scheduler.waiting, self._scheduler.active
        missing = sum(s.num_tokens for s in waiting)
        missing += sum(s.num_tokens - s.num_kv for s in active if s.state is not SeqState.RUNNING)
        return {
            "num_running": float(len(active)),
            "num_waiting": float(len(waiting)),
            "num_tokens_waiting": float(missing),
            "num_pages": float(self._allocator.num_pages - 1),
            "num_free_pages": float(self._allocator.num_free + self._cache.num_evictable),
            "num_evictable_pages": float(self._cache.num_evictable),
            "num_cached_pages": float(len(self._cache)),
            "num_pulling": float(self._fetcher.num_pulling),
            "num_pages_in_transfer": float(self._holds.num_held),
        }

    def counters(self) -> dict[str, float]:
        """Counters since start, by name; they only rise."""
        counts = {
            "retracted": self._scheduler.num_retracted,
            "pages_evicted": self._cache.num_evicted,
            "early_news_dropped": self._early.num_dropped,
            **self._events.counters(),
            **self._legs.counters,
            **self._loop.counters,
            **{f"pull_{name}": n for name, n in self._fetcher.counters.items()},
            **{f"write_back_{name}": n for name, n in self._write_back.counters.items()},
        }
        return {f"num_{name}": float(n) for name, n in counts.items()}

    def check(self) -> None:
        """Assert that every reference on every page is accounted for."""
        self._scheduler.check()

    # ---- handlers

    def service(self) -> Service:
        service = Service()
        service.on_stream(DecodeRequest, self.decode)
        service.on(PrefillUpdate, self.prefill_update)
        service.on_stream(WatchKvEvents, self._events.watch)
        service.on(ClearCache, self.clear_cache)
        service.on(GetStats, self.get_stats)
        return service

    async def decode(self, message: DecodeRequest, caller: Caller) -> AsyncIterator[DecodeEvent]:
        """Yield ``PromptReady``, ``TokensOut`` items, then ``Finished``.

        Leaving early aborts the request; its full pages are stored all the same.

        Raises:
            RemoteFailed: invalid_request, too_long, overloaded, draining, superseded,
                engine_failed, deadline_exceeded, closed.
        """
        self._refuse_when_draining()
        seq = await new_sequence(message, self._info, next(self._arrivals))
        self._refuse_when_draining()
        leg = self._legs.open(seq, caller.deadline_s)
        self._loop.wake()
        try:
            item: DecodeEvent | None = None
            while not isinstance(item, Finished):
                try:
                    async with asyncio.timeout_at(caller.deadline_s):
                        item = await leg.stream.next()
                except TimeoutError:
                    text = "the request took too long"
                    raise RemoteFailed(ErrorCode.DEADLINE_EXCEEDED, text) from None
                yield item
        finally:
            self._legs.close(leg)
            self._loop.wake()

    async def prefill_update(self, message: PrefillUpdate, caller: Caller) -> Ack:
        """Take in news of a prefill leg, also before the request itself arrived."""
        return Ack(known=self._legs.update(message))

    async def clear_cache(self, message: ClearCache, caller: Caller) -> CacheCleared:
        namespace = None if message.namespace is None else Namespace(message.namespace)
        num_pages = self._scheduler.clear_cache(namespace)
        self._events.flush()
        self._loop.wake()
        return CacheCleared(num_pages=num_pages)

    async def get_stats(self, message: GetStats, caller: Caller) -> StatsReply:
        return StatsReply(counters=self.counters(), gauges=self.gauges(), healthy=self.healthy)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise RemoteFailed(ErrorCode.DRAINING, "the node shuts down: retry elsewhere")

    # ---- PageOutlet: what the scheduler lets go of

    def write_back(self, seq: Sequence, pages: UnwrittenPages, *, final: bool) -> None:
        policy = PutPolicy(namespace=seq.chain.namespace)
        ticket = self._write_back.submit(pages, seq.stats, policy)
        if final:
            self._legs.final_put(seq, ticket)

    def stop_pull(self, seq: Sequence) -> None:
        self._fetcher.stop(seq)

    # ---- what the parts tell each other

    def _on_admitted(self, admitted: Admitted) -> None:
        seq, plan = admitted
        if plan.complete:
            self._on_pulled(seq)
            return
        deadline_s = self._legs.deadline_of(seq)
        self._fetcher.start(seq, plan, deadline_s)

    def _on_pulled(self, seq: Sequence) -> None:
        seq.settle()
        self._legs.prompt_ready(seq)
        self._loop.wake()

    def _on_news(self, seq: Sequence) -> None:
        self._fetcher.news(seq)
        self._loop.wake()

    def _on_result(self, result: StepResult) -> None:
        for seq in result.prompts:
            self._legs.prompt_ready(seq)
        for seq, output in result.outputs:
            self._legs.output(seq, output)
        for seq in result.ended:
            self._legs.ended(seq)

    def _on_engine_failed(self, seqs: list[Sequence], error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        self._legs.fail(seqs, RemoteFailed(ErrorCode.ENGINE_FAILED, text))

    def _on_pages_released(self) -> None:
        self._loop.wake()

    def _last_put_s(self) -> float:
        config = self._config
        return config.drain_write_back_s if self._draining else config.final_write_back_s
