"""The dispatcher: takes a generation request and serves it with the cluster.

Owns the links, routers and running generations of one gateway process. Knows no HTTP and no text;
the simulator drives it as it is. ``launch`` (or a test) builds, starts and closes it; the HTTP app
only uses it.

Deadline: every ``deadline_s`` is absolute on the running loop's clock. Cancelling ``generate``
(or closing it early) closes both legs before it returns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import numpy as np

from engine.request import GenerateRequest, RequestId, TokenOut
from gateway.clearing import ClearedNode, clear_links, clear_stores, other_engines
from gateway.cluster import ModelFacts, model_facts
from gateway.config import DispatcherConfig
from gateway.errors import GatewayError, NoCapacity, TooManyRequests
from gateway.generation import Generation
from gateway.placement import Placement
from gateway.router import Candidate, Query
from gateway.stats import DispatchStats
from gateway.trace import GenerationDone, GenerationTrace
from kvstore.page import PageKey
from transfer.channel import Network
from transfer.identity import Identity, Role
from transfer.membership import Membership, MembershipView

Tokens = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]

KEYS_INLINE_TOKENS_MAX = 8192  # longer prompts are hashed off the loop (about 1 ms)
SEED_BITS = 63


class Dispatcher:
    """Serves generations with routing and failover."""

    def __init__(
        self,
        config: DispatcherConfig,
        *,
        identity: Identity,
        network: Network,
        membership: Membership,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._identity = identity
        self._network = network
        self._membership = membership
        self._rng = rng
        self._placement: Placement | None = None
        self._facts: ModelFacts | None = None
        self._running: dict[Generation, None] = {}
        self._lingering: dict[asyncio.Task[None], asyncio.TimerHandle] = {}
        self._closed = False
        self.stats = DispatchStats()

    async def start(self) -> None:
        """Follow the membership view and open channels; returns at once."""
        assert self._placement is None, "started twice"
        self._placement = Placement(self._config, self._identity, self._network)
        self._membership.subscribe(self._on_view)

    async def close(self) -> None:
        """End running generations with ``NoCapacity``, close every channel; idempotent."""
        self._closed = True
        for generation in list(self._running):
            generation.fail(NoCapacity("the gateway is shutting down", retry_after_s=1))
        lingering = list(self._lingering)
        for task in lingering:
            task.cancel()
        if lingering:
            await asyncio.wait(lingering)
        if self._placement is not None:
            await self._placement.links.close()

    def abort(self) -> None:
        """Cancel every leg and channel at once; idempotent."""
        self._closed = True
        for generation in list(self._running):
            generation.abort()
        for task in list(self._lingering):
            task.cancel()
        if self._placement is not None:
            self._placement.links.abort()

    @property
    def config(self) -> DispatcherConfig:
        return self._config

    @property
    def placement(self) -> Placement:
        assert self._placement is not None, "start() first"
        return self._placement

    @property
    def facts(self) -> ModelFacts | None:
        """Facts of the model; None until the first serving node was seen."""
        return self._facts

    @property
    def healthy(self) -> bool:
        """False when a task of ours ended that should not."""
        return self._placement is not None and self._placement.links.alive

    def new_request_id(self, prefix: str) -> RequestId:
        return RequestId(f"{prefix}-{self._rng.getrandbits(128):032x}")

    def new_seed(self) -> int:
        return self._rng.getrandbits(SEED_BITS)

    def check_room(self, count: int) -> None:
        """Raise ``TooManyRequests`` unless ``count`` more generations may start."""
        if self.stats.num_in_flight + count > self._config.requests_max:
            self.stats.refused_busy += 1
            raise TooManyRequests(
                f"{self.stats.num_in_flight} generations are in flight, "
                f"at most {self._config.requests_max} may be",
                retry_after_s=self._config.retry_after_s,
            )

    async def generate(
        self,
        request: GenerateRequest,
        *,
        deadline_s: float,
        trace: GenerationTrace | None = None,
        text_ended: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[TokenOut | GenerationDone]:
        """Yield the tokens of ``request`` in order, each once, then ``GenerationDone``.

        ``trace`` is filled as reports come in and stays readable after an early close.
        ``text_ended`` is asked after every token: True (a stop string was found) is the end, with
        ``FinishReason.STOP``. Unlike an early close, it lets prefill finish its pushes.

        Raises:
            GatewayError: see ``gateway/errors.py``.
        """
        self.check_room(1)
        trace = trace or GenerationTrace()
        self.stats.num_in_flight += 1
        self.stats.requests += 1
        self.stats.prompt_tokens += request.num_prompt_tokens
        try:
            query = await self._query(request)
            generation = self._begin(request, query, trace, deadline_s, text_ended)
        except BaseException:
            self.stats.num_in_flight -= 1
            raise
        finished = False
        try:
            async with aclosing(generation.items()) as items:
                async for item in items:
                    if isinstance(item, GenerationDone):
                        finished = True
                        self._finished(trace)
                    yield item
        except GatewayError as error:
            self.stats.failed += 1
            self.stats.refused_no_capacity += isinstance(error, NoCapacity)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.stats.cancelled += not finished
            raise
        finally:
            self.stats.num_in_flight -= 1
            del self._running[generation]
            for task in await generation.close():
                self._linger(task)

    async def explain(
        self, tokens: Sequence[int], cache_salt: str | None = None
    ) -> dict[str, list[Candidate]]:
        """Return every candidate node with the terms of its score, best first, by role."""
        query = self._make_query(tokens, self._keys(tokens, cache_salt))
        return {
            role.value: self.placement.explain(role, query) for role in (Role.PREFILL, Role.DECODE)
        }

    async def clear_caches(
        self, namespace: bytes | None, *, deadline_s: float
    ) -> list[ClearedNode]:
        """Have every node forget its cached pages, or those of one namespace; see ``clearing``."""
        links = self.placement.links
        compute = [*links.of_role(Role.PREFILL), *links.of_role(Role.DECODE)]
        told = await clear_links(compute, namespace, deadline_s=deadline_s)
        view = self._membership.view
        told += await clear_stores(
            view.with_role(Role.STORE, include_draining=True),
            namespace,
            network=self._network,
            identity=self._identity,
            deadline_s=deadline_s,
        )
        return told + other_engines(view)

    def _begin(
        self,
        request: GenerateRequest,
        query: Query,
        trace: GenerationTrace,
        deadline_s: float,
        text_ended: Callable[[], bool],
    ) -> Generation:
        if self._closed:
            raise NoCapacity("the gateway is shutting down", retry_after_s=1)
        generation = Generation(
            request,
            query,
            placement=self.placement,
            config=self._config,
            stats=self.stats,
            trace=trace,
            deadline_s=deadline_s,
            text_ended=text_ended,
        )
        self._running[generation] = None
        return generation

    async def _query(self, request: GenerateRequest) -> Query:
        tokens = np.frombuffer(request.prompt, dtype="<i4")
        if len(tokens) <= KEYS_INLINE_TOKENS_MAX:
            keys = self._keys(tokens, request.cache_salt)
        else:
            loop = asyncio.get_running_loop()
            keys = await loop.run_in_executor(None, self._keys, tokens, request.cache_salt)
        return self._make_query(tokens, keys)

    def _keys(self, tokens: Tokens, salt: str | None) -> list[PageKey]:
        return [] if self._facts is None else self._facts.keys(tokens, salt)

    def _make_query(
        self,
        tokens: Tokens,
        keys: list[PageKey],
    ) -> Query:
        page_size = self._facts.spec.page_size if self._facts else 1
        return Query(keys=keys, num_tokens=len(tokens), page_size=page_size)

    def _on_view(self, view: MembershipView) -> None:
        if self._closed:
            return
        self._facts = model_facts(view) or self._facts
        self.placement.follow(view)

    def _finished(self, trace: GenerationTrace) -> None:
        self.stats.finished += 1
        self.stats.prefill_fallbacks += trace.prefill_node is None
        self.stats.cached_tokens_expected += trace.expected_cached_tokens
        self.stats.cached_tokens_local += trace.cached_local or 0
        self.stats.cached_tokens_store += trace.cached_store or 0
        self.stats.computed_tokens += trace.computed_tokens
        self.stats.recomputed_tokens += trace.recomputed_tokens

    def _linger(self, task: asyncio.Task[None]) -> None:
        """Let the leg of a finished generation go on for a while; past the cap the oldest goes."""
        if self._closed:
            task.cancel()
        loop = asyncio.get_running_loop()
        while len(self._lingering) >= self._config.linger_max:
            oldest = next(iter(self._lingering))
            self._lingering.pop(oldest).cancel()
            oldest.cancel()
        self._lingering[task] = loop.call_later(self._config.linger_s, task.cancel)
        self.stats.num_lingering = len(self._lingering)
        task.add_done_callback(self._lingered)

    def _lingered(self, task: asyncio.Task[None]) -> None:
        timer = self._lingering.pop(task, None)
        if timer is not None:
            timer.cancel()
        self.stats.num_lingering = len(self._lingering)
