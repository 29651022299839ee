"""The prefill node as others see it: handlers, heartbeat, life.

Owns the channel service, the node's seat in the membership and the checks on what a peer sent.
The work is ``PrefillLoop``'s. Knows no decode, no HTTP.

    start: loop ▸ listen ▸ join        drain: refuse new work, let legs end, fail the rest
    close: leave ▸ stop listening ▸ stop the loop ▸ give the memory back        abort: at once
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count

from engine.node_facts import contract_of, labels_of
from engine.request import ErrorCode, GenerateRequest, PrefillEvent, PrefillRequest
from engine.step import Runner
from kvstore.events import CacheCleared, ClearCache, GetStats, StatsReply, WatchKvEvents
from kvstore.keys import Namespace, namespace_of
from kvstore.store import PageStore
from prefill_node.config import KEYS_INLINE_TOKENS_MAX, PrefillConfig
from prefill_node.leg import Leg
from prefill_node.prefill_loop import PrefillLoop
from prefill_node.request_state import PrefillJob
from transfer.channel import Caller, Hello, Listener, Network, Service
from transfer.errors import RemoteFailed
from transfer.identity import Identity
from transfer.interface import Region, Transfer
from transfer.membership import Membership, NodeInfo, NodeStatus


class PrefillNode:
    """One process that computes the KV of prompts.

    ``network``, ``transfer``, ``store`` and ``membership`` are started by the caller and stay the
    caller's; the node joins and leaves the membership. ``region`` is the page pool as ``store``
    takes it, and is revoked by the node; by default a host pool is registered with ``transfer``,
    which must have been started. ``wall_clock`` gives the time that KV events carry.
    """

    def __init__(
        self,
        config: PrefillConfig,
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
        self._info = runner.info
        self._region = region or transfer.register(runner.pool.storage)
        self._loop = PrefillLoop(config, runner=runner, store=store, region=self._region)
        self._wall_clock = wall_clock
        self._serials = count()
        self._listener: Listener | None = None
        self._draining = False

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Run the loop, listen, join the membership (waits for the registry)."""
        self._loop.start()
        contract = contract_of(self._info)
        hello = Hello(identity=self.identity, contract=contract)
        self._listener = await self._network.listen(self.service(), hello, self._config.bind)
        events = self._loop.events.open(
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
        """Take no new work; let legs end, for at most ``timeout_s``; fail the rest.

        The gateway retries what was failed on another node. Published pages stay in the store.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.no_legs.wait()
        except TimeoutError:
            self._loop.fail_all(
                RemoteFailed(ErrorCode.DRAINING, "the node shuts down: retry elsewhere")
            )

    async def close(self) -> None:
        """Stop in order; idempotent. Returns when no page is being written or read any more."""
        self._draining = True
        await self._membership.leave()
        if self._listener is not None:
            await self._listener.close()
        await self._loop.close()
        self._loop.events.close()
        await asyncio.to_thread(self._region.revoke)  # may wait for a peer

    def abort(self) -> None:
        """Stop at once, as a crash would; idempotent. A step in the engine thread runs out.

        Peers are not waited for if ``transfer`` was aborted before.
        """
        self._draining = True
        self._loop.abort()
        self._loop.events.close()
        self._region.revoke()

    # ── what others read ────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        assert self._listener is not None, "start() first"
        return self._listener.address

    @property
    def healthy(self) -> bool:
        """The loop and the publishers run, and the engine's last steps did not all fail."""
        return self._loop.healthy

    def status(self) -> NodeStatus:
        """What the heartbeat says."""
        return NodeStatus(draining=self._draining, gauges=self.gauges())

    def gauges(self) -> dict[str, float]:
        evictable = self._loop.cache.num_evictable
        return {
            "num_running": float(self._loop.scheduler.num_active),
            "num_waiting": float(self._loop.scheduler.num_waiting),
            "num_tokens_waiting": float(self._loop.scheduler.num_tokens_waiting),
            "num_pages": float(self._loop.allocator.num_pages - 1),
            "num_free_pages": float(self._loop.allocator.num_free + evictable),
            "num_evictable_pages": float(evictable),
            "num_cached_pages": float(self._loop.cache.num_pages),
            "num_live": float(self._loop.scheduler.num_live),
            "restore_bytes_per_s": self._loop.model.restore_bytes_per_s,
            "compute_tokens_per_s": self._loop.model.compute_rate.per_s,
        }

    def counters(self) -> dict[str, float]:
        self._loop.stats.counters.pages_evicted = self._loop.cache.num_evicted_pages
        events = self._loop.events.counters()
        counts = {f"num_{name}": float(number) for name, number in events.items()}
        return {**self._loop.stats.as_dict(), **counts}

    def check(self) -> None:
        """Assert that every reference on every page is accounted for."""
        self._loop.check()

    # ── handlers ────────────────────────────────────────────────────────────────────────────────

    def service(self) -> Service:
        service = Service()
        service.on_stream(PrefillRequest, self.prefill)
        service.on_stream(WatchKvEvents, self._loop.events.watch)
        service.on(ClearCache, self.clear_cache)
        service.on(GetStats, self.get_stats)
        return service

    async def prefill(self, message: PrefillRequest, caller: Caller) -> AsyncIterator[PrefillEvent]:
        """Yield ``FirstToken``, then ``PrefillDone``. Leaving early aborts the request.

        Raises:
            RemoteFailed: invalid_request, too_long, overloaded, draining, closed, engine_failed,
                deadline_exceeded.
        """
        try:
            leg = await self._open(message.request)
        except RemoteFailed:
            self._loop.stats.counters.num_refused += 1
            raise
        try:
            while not leg.exhausted:
                yield await leg.next_event(caller.deadline_s)
        finally:
            self._loop.close_leg(leg)

    async def clear_cache(self, message: ClearCache, caller: Caller) -> CacheCleared:
        namespace = None if message.namespace is None else Namespace(message.namespace)
        return CacheCleared(num_pages=self._loop.clear_cache(namespace))

    async def get_stats(self, message: GetStats, caller: Caller) -> StatsReply:
        return StatsReply(counters=self.counters(), gauges=self.gauges(), healthy=self.healthy)

    async def _open(self, request: GenerateRequest) -> Leg:
        """Admit a request, or refuse it before anything is allocated for it."""
        self._refuse(request)
        build = partial(self._new_job, request, next(self._serials))
        if request.num_prompt_tokens > KEYS_INLINE_TOKENS_MAX:
            job = await asyncio.get_running_loop().run_in_executor(None, build)
            self._refuse(request)  # time has passed
        else:
            job = build()
        if not 0 <= int(job.tokens.min()) <= int(job.tokens.max()) < self._info.vocab_size:
            raise RemoteFailed(
                ErrorCode.INVALID_REQUEST,
                f"tokens {int(job.tokens.min())}..{int(job.tokens.max())} are not all below "
                f"vocab_size={self._info.vocab_size}",
            )
        return self._loop.open_leg(job)

    def _refuse(self, request: GenerateRequest) -> None:
        if self._draining or not self._loop.alive:
            word = ErrorCode.DRAINING if self._draining else ErrorCode.ENGINE_FAILED
            raise RemoteFailed(word, "this prefill node takes no new work: retry elsewhere")
        packed_nbytes = len(request.prompt) + len(request.emitted)
        if not request.prompt or len(request.prompt) % 4 or len(request.emitted) % 4:
            raise RemoteFailed(
                ErrorCode.INVALID_REQUEST,
                f"{packed_nbytes} bytes are not one or more packed int32 tokens",
            )
        self._loop.scheduler.refuse_if_unfit(packed_nbytes // 4)
        self._loop.scheduler.refuse_if_full()

    def _new_job(self, request: GenerateRequest, serial: int) -> PrefillJob:
        spec = self._info.spec
        namespace = namespace_of(self._info.fingerprint, spec, salt=request.cache_salt)
        return PrefillJob(serial, request, namespace, spec.page_size)
