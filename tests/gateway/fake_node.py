"""Prefill and decode nodes by script: the real protocol, from one *reply* function.

A reply maps prompt tokens to output tokens. Nodes check what the gateway tells them. Faults are
scripted per node; ``kill`` breaks every channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engine.request import (
    Ack,
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    GenerateRequest,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    PrefillUpdate,
    PromptReady,
    SamplingParams,
    TokenOut,
    TokensOut,
)
from kvstore.events import (
    CacheCleared,
    ClearCache,
    KvEventLog,
    KvEventPublisher,
    WatchKvEvents,
)
from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageKey, PageSpec
from tests.hub import Hub, HubNetwork
from transfer.channel import Caller
from transfer.identity import NodeId, Role, new_identity
from transfer.membership import Member, NodeInfo, NodeStatus

SPEC = PageSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype="uint8")
CONTRACT = {**SPEC.describe(), "fingerprint": "fake", "model": "fake"}
MAX_MODEL_LEN = 2048
EOS = 257

Reply = Callable[[list[int]], list[int]]


def packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpacked(raw: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(raw, dtype="<i4")]


def keys_of(tokens: Sequence[int], salt: str | None = None) -> list[PageKey]:
    return page_keys(namespace_of("fake", SPEC, salt=salt), tokens, SPEC.page_size)


def alphabet_reply(prompt: list[int]) -> list[int]:
    """An endless-looking answer that depends on the prompt."""
    start = sum(prompt) % 26
    return [ord("a") + (start + at) % 26 for at in range(2000)]


def text_reply(text: str) -> Reply:
    """Always ``text``, then EOS."""
    return lambda prompt: [*text.encode(), EOS]


@dataclass
class Fault:
    """Raise ``error`` in the ``at``-th yield of the next stream (0: before the first)."""

    at: int
    error: Exception


def stop_of(params: SamplingParams, index: int, token: int) -> FinishReason | None:
    """Why the token at ``index`` ends the request, by the rules that nodes follow."""
    may_stop = index + 1 > params.min_tokens
    ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
    if ends and may_stop:
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= params.max_tokens else None


def output_at(request: GenerateRequest, reply: list[int], index: int) -> TokenOut:
    params = request.sampling
    token = reply[min(index, len(reply) - 1)]
    wanted = params.logprobs
    return TokenOut(
        index=index,
        token=token,
        logprob=None if wanted is None else -0.5,
        top_logprobs=tuple((token + i, -0.5 - i) for i in range(wanted or 0)),
        stop=stop_of(params, index, token),
    )


class FakeNode:
    """One prefill or decode node."""

    def __init__(self, role: Role, name: str, reply: Reply, hub: Hub) -> None:
        self.identity = new_identity(role, name)
        self.reply = reply
        self.address = f"fake://{name}/{self.identity.incarnation}"
        self.dead = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.push_gate = asyncio.Event()
        self.push_gate.set()
        self.token_gate: asyncio.Semaphore | None = None
        self.faults: list[Fault] = []
        self.refuse_connects = 0
        self.draining = False
        self.gauges: dict[str, float] = {}
        self.counters: dict[str, float] = {}
        self.requests: list[GenerateRequest] = []
        self.decode_requests: list[DecodeRequest] = []
        self.updates: list[PrefillUpdate] = []
        self.open_streams: list[str] = []
        self.log = KvEventLog()
        self.events = KvEventPublisher(self.log)
        self.event_labels = self.events.open(
            HubNetwork(hub), self.identity, bind="tcp://127.0.0.1:0", wall_clock=lambda: 0.0
        )
        self.caches = False
        self._news: dict[str, list[PrefillUpdate]] = {}
        self._news_event = asyncio.Event()
        self.cached_local = 0
        self.cached_store = 0
        self.bad_acks = 0
        self.cleared: list[bytes | None] = []

    @property
    def name(self) -> NodeId:
        return self.identity.node_id

    @property
    def member(self) -> Member:
        labels = {"max_model_len": str(MAX_MODEL_LEN), "vocab_size": "259", "eos_token_ids": "257"}
        labels |= self.event_labels
        info = NodeInfo(
            identity=self.identity,
            address=self.address,
            transport="fake",
            contract=CONTRACT,
            labels=labels,
        )
        return Member(
            info=info,
            status=NodeStatus(draining=self.draining, gauges=self.gauges, counters=self.counters),
        )

    def kill(self) -> None:
        self.dead.set()
        self.events.close()

    def publish(self, stored: Sequence[PageKey] = (), removed: Sequence[PageKey] = ()) -> None:
        """Announce what of this is news."""
        new = [key for key in dict.fromkeys(stored) if key not in self.log.held()]
        self.log.removed([key for key in removed if key in self.log.held()])
        self.log.stored(new, parent=None, tokens=bytes(4 * SPEC.page_size * len(new)))
        self.events.flush()

    def handle(self, message: msgspec.Struct) -> AsyncIterator[Any]:
        if isinstance(message, PrefillRequest):
            return self._prefill(message.request)
        if isinstance(message, DecodeRequest):
            return self._decode(message)
        assert isinstance(message, WatchKvEvents)
        return self.events.watch(message, Caller(peer=self.identity, deadline_s=0.0))

    def update(self, update: PrefillUpdate) -> Ack:
        if self.bad_acks:
            self.bad_acks -= 1
            return Ack(known=False)
        assert not (update.failed and update.first_token), "contradictory news"
        self.updates.append(update)
        self._news.setdefault(update.request_id, []).append(update)
        self._news_event.set()
        return Ack(known=update.request_id in self.open_streams)

    def clear(self, message: ClearCache) -> CacheCleared:
        self.cleared.append(message.namespace)
        return CacheCleared(num_pages=3)

    def _fault(self, at: int) -> None:
        if self.faults and self.faults[0].at == at:
            raise self.faults.pop(0).error

    async def _prefill(self, request: GenerateRequest) -> AsyncIterator[PrefillEvent]:
        self.requests.append(request)
        self.open_streams.append(request.request_id)
        try:
            self._fault(0)
            await self.gate.wait()
            prompt = unpacked(request.prompt)
            if self.caches:
                self.publish(stored=keys_of(prompt)[: len(prompt) // SPEC.page_size])
            yield FirstToken(
                output=output_at(request, self.reply(prompt), 0),
                computed_tokens=len(prompt) - self.cached_local - self.cached_store,
                cached_local_tokens=self.cached_local,
                cached_store_tokens=self.cached_store,
                pages_pulled=0,
                bytes_pulled=0,
                queue_s=0.001,
                prefill_s=0.002,
            )
            self._fault(1)
            await self.push_gate.wait()
            yield PrefillDone(published=True, pages_pushed=2, bytes_pushed=200, push_s=0.003)
        finally:
            self.open_streams.remove(request.request_id)

    async def _decode(self, message: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        request = message.request
        self.requests.append(request)
        self.decode_requests.append(message)
        self.open_streams.append(request.request_id)
        try:
            self._fault(0)
            await self.gate.wait()
            index = request.num_emitted_tokens
            if message.expect_prefill:
                assert index == 0
                index = await self._first_token_news(request)
            reply = self.reply(unpacked(request.prompt))
            yield self._prompt_ready(message)
            yielded = 0
            while True:
                yielded += 1
                self._fault(yielded)
                if self.token_gate is not None:
                    await self.token_gate.acquire()
                output = output_at(request, reply, index)
                yield TokensOut(outputs=(output,))
                if output.stop is not None:
                    break
                index += 1
                await asyncio.sleep(0)
            yield self._finished(message, output.stop)
        finally:
            self.open_streams.remove(request.request_id)
            self._news.pop(request.request_id, None)

    async def _first_token_news(self, request: GenerateRequest) -> int:
        """Wait for news; return the index of the first token that is ours to make."""
        while True:
            for update in self._news.get(request.request_id, []):
                if update.failed:
                    return 0
                if update.first_token is not None:
                    return 1
            self._news_event.clear()
            await self._news_event.wait()

    def _prompt_ready(self, message: DecodeRequest) -> PromptReady:
        """A leg that goes on finds all that was emitted, but for the last token's KV."""
        num_emitted = message.request.num_emitted_tokens
        num_tokens = message.request.num_prompt_tokens + num_emitted
        pulled = num_tokens if message.expect_prefill else self.cached_store + num_emitted
        pulled -= 1 if num_emitted else 0
        return PromptReady(
            computed_tokens=num_tokens - pulled,
            computed_emitted_tokens=1 if num_emitted else 0,
            cached_local_tokens=0,
            cached_store_tokens=pulled,
            pages_pulled=3,
            bytes_pulled=300,
            recomputed_pages=0 if message.expect_prefill else 1,
            pull_s=0.004,
        )

    def _finished(self, message: DecodeRequest, reason: FinishReason) -> Finished:
        told = msgspec.structs.asdict(self._prompt_ready(message))
        return Finished(reason=reason, pages_pushed=1, bytes_pushed=100, num_preemptions=0, **told)


def request_of(
    prompt: Sequence[int], max_tokens: int = 8, request_id: str = "r", **sampling: Any
) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(
        request_id=request_id,  # type: ignore[arg-type]
        prompt=packed(prompt),
        sampling=params,
    )
