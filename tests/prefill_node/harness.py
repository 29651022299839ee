"""What the tests of the prefill node share: a node with fakes around it, and ways to drive it.

The handlers are called directly; the network and membership fakes only record.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.fake import FakeRunner, fake_generate
from engine.request import (
    FirstToken,
    GenerateRequest,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    RequestId,
    SamplingParams,
    TokenOut,
)
from engine.step import SeqStep
from kvstore.store import PageStore
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from tests.hub import HubNetwork
from tests.kvstore.memory import MemoryStore
from tests.sim.loop import SimLoop
from transfer.channel import Caller, Channel, Hello, Listener, Service
from transfer.identity import Role, new_identity
from transfer.interface import Priority, Range, Region
from transfer.membership import MembershipView, NodeInfo, NodeStatus, ViewCallback

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=4)
FAR_S = 60.0


class LocalRegion:
    """A region that only this process reaches."""

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer.numpy()).cast("B")
        self.revoked = False

    @property
    def nbytes(self) -> int:
        return len(self._view)

    @property
    def view(self) -> memoryview:
        return self._view

    def export(self, rights: str) -> bytes:
        return b""

    def revoke(self) -> None:
        self.revoked = True


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
    address = "local://prefill"

    async def close(self) -> None: ...


class LocalNetwork(HubNetwork):
    """Keeps what was listened with."""

    def __init__(self) -> None:
        super().__init__()
        self.service: Service | None = None
        self.hello: Hello | None = None

    async def listen(self, service: Service, hello: Hello, bind: str) -> Listener:
        self.service, self.hello = service, hello
        return LocalListener()

    async def connect(self, address: str, hello: Hello, *, deadline_s: float) -> Channel:
        raise NotImplementedError

    async def close(self) -> None: ...


class LocalMembership:
    """Keeps what was joined with."""

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

    def step(self, steps: Sequence[SeqStep]) -> list[TokenOut | None]:
        self.steps.append(list(steps))
        if self.failures:
            raise self.failures.pop(0)
        return super().step(steps)

    @property
    def num_tokens_run(self) -> int:
        """Tokens whose KV was computed."""
        return sum(len(s.tokens) for steps in self.steps for s in steps if s.write_kv)


class Answer(NamedTuple):
    first: FirstToken
    done: PrefillDone


@dataclass
class Rig:
    """One node and all that is around it."""

    node: PrefillNode
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

    def stream(self, prompt: Sequence[int], **changes: Any) -> AsyncIterator[PrefillEvent]:
        message = PrefillRequest(self.request(prompt, **changes))
        return self.node.prefill(message, caller())

    async def prefill(self, prompt: Sequence[int], **changes: Any) -> Answer:
        """Run one request to its end; check its tokens and its accounting."""
        events = [event async for event in self.stream(prompt, **changes)]
        first, done = events
        assert isinstance(first, FirstToken)
        assert isinstance(done, PrefillDone)
        emitted = np.frombuffer(changes.get("emitted", b""), dtype="<i4").tolist()
        sampling = changes.get("sampling", GREEDY)
        assert first.output == fake_generate(prompt, sampling, emitted)[0]
        cached = first.cached_local_tokens + first.cached_store_tokens
        assert first.computed_tokens + cached == len(prompt) + len(emitted)
        return Answer(first, done)

    def free_pages(self) -> int:
        """Pages that are free or that only the cache holds."""
        return int(self.node.gauges()["num_free_pages"])

    async def settled(self) -> None:
        """Wait until no request is live and no push is in flight; then check the books."""
        num_pages = self.node.gauges()["num_pages"]
        await until(lambda: not self.node.gauges()["num_live"] and self.free_pages() == num_pages)
        self.node.check()


@contextlib.asynccontextmanager
async def rig(
    *,
    num_pages: int = 64,
    page_size: int = PAGE_SIZE,
    store: MemoryStore | None = None,
    wrap: Callable[[MemoryStore], PageStore] = lambda store: store,
    fingerprint: str = "fake",
    step_delay_s: float = 0.0,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A started node; on exit its books are checked and everything is closed."""
    runner = GatedRunner(
        num_pages=num_pages,
        page_size=page_size,
        fingerprint=fingerprint,
        step_delay_s=step_delay_s,
    )
    store = store or MemoryStore(runner.info.spec)
    network, membership = LocalNetwork(), LocalMembership()
    node = PrefillNode(
        PrefillConfig(**config),
        identity=new_identity(Role.PREFILL, "p0"),
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
        await node.close()
    node.check()


def caller(timeout_s: float = FAR_S) -> Caller:
    peer = new_identity(Role.GATEWAY)
    return Caller(peer, asyncio.get_running_loop().time() + timeout_s)


def virtual(
    step_s: float = 0.001,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test on the simulator's clock; a step takes ``step_s`` on average."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            loop = SimLoop(random.Random(1))
            loop.executor_delay_s_mean = step_s
            try:
                loop.run_until_complete(test(*args, **kwargs))
            finally:
                loop.close()

        return run

    return decorate


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of other threads have no event
            await asyncio.sleep(1e-6)


def pack(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """``length`` printable tokens, different for every seed."""
    return np.random.default_rng([seed, 41]).integers(32, 127, length).tolist()
