"""What the tests of the decode node share: a node with fakes around it, and a prefill leg.

Handlers are called directly; network and membership only record. ``Prefill`` computes the pages of
a prompt with the same fake model and puts them into the store one by one, as told.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode
from engine.fake import FakeRunner, fake_generate
from engine.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillUpdate,
    PromptReady,
    RequestId,
    SamplingParams,
    TokenOut,
)
from engine.step import SampleInput, SeqStep
from kvstore.keys import namespace_of, page_keys
from kvstore.page import PageId, PageKey, PageSpec
from kvstore.store import PageIdentity, PageStore, PutPage, identities
from tests.hub import HubNetwork
from tests.kvstore.memory import MemoryStore
from transfer.channel import Caller, Channel, Hello, Listener, Service
from transfer.errors import RemoteFailed
from transfer.identity import Role, new_identity
from transfer.interface import Priority, Range, Region
from transfer.membership import MembershipView, NodeInfo, NodeStatus, ViewCallback

S = 16
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=8, ignore_eos=True)
FAR_S = 60.0


class LocalRegion:
    """A region that only this process reaches."""

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer.numpy()).cast("B")

    @property
    def nbytes(self) -> int:
        return len(self._view)

    @property
    def view(self) -> memoryview:
        return self._view

    def export(self, rights: str) -> bytes:
        return b""

    def revoke(self) -> None: ...


class LocalTransfer:
    """Registers memory; moves nothing (``MemoryStore`` copies)."""

    transport = "local"

    async def start(self) -> None: ...

    def register(self, buffer: object) -> Region:
        return LocalRegion(buffer)

    def allocate(self, nbytes: int) -> Region:
        raise NotImplementedError

    async def read(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        into: Region,
        deadline_s: float,
        priority: Priority = Priority.NOW,
    ) -> None:
        raise NotImplementedError

    async def write(
        self,
        token: bytes,
        ranges: Sequence[Range],
        *,
        source: Region,
        deadline_s: float,
        priority: Priority = Priority.BACKGROUND,
    ) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...

    def abort(self) -> None: ...


class LocalListener:
    address = "local://decode"

    async def close(self) -> None: ...


class LocalNetwork(HubNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.hello: Hello | None = None

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        self.hello = hello
        return LocalListener()

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        raise NotImplementedError

    async def close(self) -> None: ...


class LocalMembership:
    def __init__(self) -> None:
        self.info: NodeInfo | None = None
        self.status: Callable[[], NodeStatus] | None = None

    view = MembershipView()
    connected = True
    superseded = False

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        self.info, self.status = info, status

    def subscribe(self, callback: ViewCallback) -> None: ...

    async def leave(self) -> None:
        self.info = None


class GatedRunner(FakeRunner):
    """A fake engine that records its steps and can hold or break them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps: list[list[SeqStep]] = []
        self.failures: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def step(self, steps: Sequence[SeqStep]) -> list[TokenOut | None]:
        self.steps.append([s._replace(page_ids=list(s.page_ids)) for s in steps])
        self.entered.set()
        assert self.gate.wait(20), "a test forgot to open the gate"
        if self.failures:
            raise self.failures.pop(0)
        return super().step(steps)

    @property
    def num_tokens_run(self) -> int:
        """Tokens whose KV was computed."""
        return sum(len(s.tokens) for steps in self.steps for s in steps if s.write_kv)


class Prefill:
    """The pages of one context, computed, and put into a store when told."""

    def __init__(self, store: MemoryStore, request: GenerateRequest, fingerprint: str) -> None:
        context = np.frombuffer(request.prompt + request.emitted, dtype="<i4")
        prompt = np.frombuffer(request.prompt, dtype="<i4")
        spec = store.spec
        self._store = store
        self._num_pages = spec.num_pages_for(len(context))
        runner = FakeRunner(num_pages=self._num_pages + 1, page_size=spec.page_size)
        output = context[len(prompt) :]
        step = SeqStep(
            tokens=context,
            start=0,
            page_ids=[PageId(i + 1) for i in range(self._num_pages)],
            sample=SampleInput(request.sampling, prompt, output),
        )
        (first,) = runner.step([step])
        assert first is not None
        self.first: TokenOut = first
        self._region = LocalRegion(runner.pool.storage)
        self._nbytes = spec.page_nbytes
        namespace = namespace_of(fingerprint, spec, salt=request.cache_salt)
        keys = page_keys(namespace, context.tolist(), spec.page_size)
        self.identities: list[PageIdentity] = identities(
            namespace, keys, context.tobytes(), spec.page_size
        )
        self._request_id = request.request_id

    async def publish(self, pages: Iterable[int] | None = None) -> None:
        todo = range(self._num_pages) if pages is None else pages
        puts = [PutPage(self.identities[i], (i + 1) * self._nbytes) for i in todo]
        deadline_s = asyncio.get_running_loop().time() + FAR_S
        await self._store.put(puts, source=self._region, deadline_s=deadline_s)

    def says(self, **fields: Any) -> PrefillUpdate:
        return PrefillUpdate(request_id=self._request_id, **fields)

    def says_first(self) -> PrefillUpdate:
        return self.says(first_token=self.first)


class Answer(NamedTuple):
    outputs: list[TokenOut]
    finished: Finished
    prompt: PromptReady | None = None

    @property
    def tokens(self) -> list[int]:
        return [output.token for output in self.outputs]


@dataclass
class Rig:
    """One node and all that is around it."""

    node: DecodeNode
    store: MemoryStore
    runner: GatedRunner
    network: LocalNetwork
    membership: LocalMembership
    _count: int = field(default=0)

    def request(self, prompt: Sequence[int], **changes: Any) -> GenerateRequest:
        self._count += 1
        request = GenerateRequest(
            request_id=RequestId(f"r{self._count}"), prompt=pack(prompt), sampling=GREEDY
        )
        return msgspec.structs.replace(request, **changes)

    def prefill_of(self, request: GenerateRequest) -> Prefill:
        return Prefill(self.store, request, self.runner.info.fingerprint)

    async def events(
        self, request: GenerateRequest, *, expect_prefill: bool = False, timeout_s: float = FAR_S
    ) -> AsyncIterator[DecodeEvent]:
        message = DecodeRequest(request=request, expect_prefill=expect_prefill)
        stream = self.node.decode(message, caller(timeout_s))
        async with contextlib.aclosing(stream) as items:  # type: ignore[type-var]
            async for event in items:
                yield event

    async def answer(self, request: GenerateRequest, *, expect_prefill: bool = False) -> Answer:
        """Run one request to its end; check order, and equality with the reference.

        The first token of an expected prefill leg is the client's already: the reference counts on.
        """
        outputs: list[TokenOut] = []
        finished: Finished | None = None
        prompt: PromptReady | None = None
        async for event in self.events(request, expect_prefill=expect_prefill):
            assert finished is None, "something came after Finished"
            if isinstance(event, Finished):
                finished = event
            elif isinstance(event, PromptReady):
                assert prompt is None
                assert not outputs, "the prompt is accounted for before the first token"
                prompt = event
            else:
                assert prompt is not None, "a token before the accounting of its prompt"
                outputs.extend(event.outputs)
        assert finished is not None
        if prompt is not None:
            check_accounting(request, prompt, finished)
        expected = reference(request)
        if outputs and outputs[0].index > request.num_emitted_tokens:
            expected = expected[1:]
        if finished.reason is FinishReason.ABORT:
            expected = expected[: len(outputs)]
        elif outputs or not expect_prefill:
            assert finished.reason == expected[-1].stop
        if outputs:
            assert outputs == expected
        return Answer(outputs, finished, prompt)

    def start(
        self, request: GenerateRequest, *, expect_prefill: bool = True
    ) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.answer(request, expect_prefill=expect_prefill))

    async def tell(self, update: PrefillUpdate) -> bool:
        return (await self.node.prefill_update(update, caller())).known

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - conditions are gauges, not events
                await asyncio.sleep(0.0005)

    def gauge(self, name: str) -> int:
        return int(self.node.gauges()[name])

    def counter(self, name: str) -> int:
        return int(self.node.counters()[name])

    async def settled(self) -> None:
        """Wait until nothing is open or in transfer; then every page is free or just cached."""
        names = ("num_running", "num_waiting", "num_pulling", "num_pages_in_transfer")
        await self.until(lambda: not any(self.gauge(name) for name in names))
        self.node.check()
        assert self.gauge("num_free_pages") == self.gauge("num_pages")


@contextlib.asynccontextmanager
async def rig(
    *,
    num_pages: int = 64,
    page_size: int = S,
    store: MemoryStore | None = None,
    wrap: Callable[[MemoryStore], PageStore] = lambda store: store,
    max_model_len: int = 8192,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A started node; on exit its books are checked and everything is closed."""
    runner = GatedRunner(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len)
    store = store or MemoryStore(runner.info.spec)
    network, membership = LocalNetwork(), LocalMembership()
    node = DecodeNode(
        DecodeConfig(**config),
        identity=new_identity(Role.DECODE, "d0"),
        network=network,
        transfer=LocalTransfer(),
        store=wrap(store),
        membership=membership,
        runner=runner,
    )
    await node.start()
    made = Rig(node, store, runner, network, membership)
    try:
        yield made
        await made.settled()
    finally:
        runner.gate.set()
        await node.close()
    node.check()


def check_accounting(request: GenerateRequest, prompt: PromptReady, finished: Finished) -> None:
    """Every token of the context was computed or found, and the end says the same."""
    computed, emitted = prompt.computed_tokens, prompt.computed_emitted_tokens
    cached = (prompt.cached_local_tokens, prompt.cached_store_tokens)
    context = request.num_prompt_tokens + request.num_emitted_tokens
    assert computed + sum(cached) == context
    assert 0 <= emitted <= min(computed, request.num_emitted_tokens)
    assert (finished.computed_tokens, finished.computed_emitted_tokens) == (computed, emitted)
    assert (finished.cached_local_tokens, finished.cached_store_tokens) == cached


def caller(timeout_s: float = FAR_S) -> Caller:
    return Caller(new_identity(Role.GATEWAY), asyncio.get_running_loop().time() + timeout_s)


def pack(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack(tokens: bytes) -> list[int]:
    return [int(t) for t in np.frombuffer(tokens, dtype="<i4")]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """``length`` printable tokens, different for every seed."""
    return [int(t) for t in np.random.default_rng([seed, 43]).integers(32, 127, length)]


def reference(request: GenerateRequest) -> list[TokenOut]:
    return fake_generate(unpack(request.prompt), request.sampling, unpack(request.emitted))


def keys_of(spec: PageSpec, tokens: Sequence[int]) -> list[PageKey]:
    return page_keys(namespace_of("fake", spec), tokens, spec.page_size)


async def failure_of(stream: AsyncIterator[DecodeEvent]) -> RemoteFailed:
    """Run a stream that must end with ``RemoteFailed``."""
    try:
        async for _ in stream:
            pass
    except RemoteFailed as error:
        return error
    raise AssertionError("the stream ended in order")
