"""Claims about handlers that answer at once, without a task, in the simulator and over sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, run_sim
from tests.transfer.bulk_harness import until
from tests.transfer.channel_contract import Ask, Fail, Told, hello, soon, talking
from transfer.channel import Caller, Channel, Hello, Network, Service
from transfer.errors import RemoteFailed
from transfer.identity import Role
from transfer.rpc_frames import (
    LONG_NBYTES,
    MAX_FRAME_NBYTES,
    AnyFrame,
    Cancel,
    Failed,
    HelloFrame,
    Reply,
    Request,
    decode_frame,
    encode_frame,
    encode_message,
)
from transfer.rpc_handlers import RpcServer
from transfer.zmq_network import ZmqNetwork


class PromptService(Service):
    """Answers at once; "later" when it is let go; or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[object] | None] = []
        self.on_prompt(Ask, self.tell)
        self.on_prompt(Fail, self.fail)

    def tell(self, message: Ask, caller: Caller) -> Told | Awaitable[Told]:
        self.tasks.append(asyncio.current_task())
        if message.text == "later":
            return self.later(message, caller)
        return Told(message.text, caller.peer.node_id)

    async def later(self, message: Ask, caller: Caller) -> Told:
        await self.go.wait()
        return Told(message.text, caller.peer.node_id)

    def fail(self, message: Fail, caller: Caller) -> Told:
        if message.how == "named":
            raise RemoteFailed("full", "no page is free")
        if message.how == "huge":
            return Told("x" * MAX_FRAME_NBYTES)
        raise ValueError("a bug in the handler")


async def check_prompt(server: Network, client: Network) -> None:
    """Answers, answers that take a while, and errors arrive as those of other handlers do."""
    service = PromptService()
    async with talking(server, client, service) as (_, channel):

        async def ask(text: str) -> str:
            return (await channel.request(Ask(text), Told, deadline_s=soon())).text

        assert await ask("now") == "now"
        assert service.tasks == [None]
        later = asyncio.ensure_future(ask("later"))
        assert await asyncio.gather(*(ask(str(i)) for i in range(20))) == [
            str(i) for i in range(20)
        ]
        assert not later.done()
        service.go.set()
        assert await later == "later"
        await check_errors(channel)
        assert await ask("still") == "still"


async def check_errors(channel: Channel) -> None:
    codes = []
    for how in ("named", "bug", "huge"):
        with pytest.raises(RemoteFailed) as failed:
            await channel.request(Fail(how), Told, deadline_s=soon())
        codes.append(failed.value.code)
    assert codes == ["full", "internal", "internal"]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "transfer.rpc_handlers")


@pytest.mark.usefixtures("quiet")
def test_prompt_handlers_answer_in_the_simulator() -> None:
    async def scenario(cluster: SimCluster) -> None:
        node = cluster.node("a")
        await node.run(check_prompt(node.network, node.network))  # type: ignore[arg-type]
        await node.run(node.network.close())

    run_sim(scenario, 1, FaultPlan())


@pytest.mark.usefixtures("quiet")
async def test_prompt_handlers_answer_over_sockets() -> None:
    network = ZmqNetwork()
    await check_prompt(network, network)
    await network.close()


async def test_whoever_calls_a_handler_directly_may_await_a_prompt_one() -> None:
    service = PromptService()
    service.go.set()
    caller = Caller(hello(Role.DECODE).identity, soon())
    for text in ("now", "later"):
        told = await service.requests[Ask](Ask(text), caller)
        assert isinstance(told, Told)
        assert told.text == text


class Talk:
    """A server without a wire, and one client of it."""

    def __init__(self, service: Service) -> None:
        self.said: list[AnyFrame] = []
        self.num_calls = 0
        self.server = RpcServer(service, hello(Role.STORE), self._send, on_call=self._called)
        self.say(HelloFrame(hello(Role.DECODE)))
        self.said.clear()

    def _send(self, key: bytes, frame: bytes) -> None:
        self.said.append(decode_frame(frame))

    def _called(self) -> None:
        self.num_calls += 1

    def say(self, frame: HelloFrame | Request | Cancel) -> None:
        self.server.on_frame(b"key", encode_frame(frame))

    def ask(self, id_: int, text: str) -> None:
        self.say(Request(id_, "contract.ask", encode_message(Ask(text)), 5.0, 0))


@asynccontextmanager
async def a_talk(service: Service) -> AsyncIterator[Talk]:
    talk = Talk(service)
    yield talk
    await talk.server.close()


async def test_a_prompt_answer_is_sent_before_the_loop_turns() -> None:
    async with a_talk(PromptService()) as talk:
        talk.ask(1, "now")
        (reply,) = talk.said
        assert isinstance(reply, Reply)
        assert talk.server.num_running == 0


async def test_a_repeated_request_is_not_answered_twice() -> None:
    async with a_talk(PromptService()) as talk:
        talk.ask(1, "now")
        talk.ask(1, "now")
        assert len(talk.said) == 1


async def test_only_calls_are_told_not_what_belongs_to_them() -> None:
    async with a_talk(PromptService()) as talk:
        assert talk.num_calls == 0
        talk.ask(1, "now")
        talk.say(Cancel(1))
        assert talk.num_calls == 1


async def test_a_prompt_handler_s_awaitable_that_is_cancelled_before_it_began_is_closed() -> None:
    """Request and cancel often arrive together."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with a_talk(PromptService()) as talk:
            talk.ask(1, "later")
            talk.say(Cancel(1))
            await until(lambda: talk.server.num_running == 0)
            assert not any(isinstance(frame, Reply) for frame in talk.said)
        gc.collect()
    assert not warned


async def test_a_prompt_handler_gets_no_message_that_does_not_decode() -> None:
    service = PromptService()
    async with a_talk(service) as talk:
        talk.say(Request(1, "contract.ask", b"\xc1", 5.0, 0))
        (answer,) = talk.said
        assert isinstance(answer, Failed)
        assert answer.code == "bad_message"
        assert service.tasks == []


@pytest.mark.parametrize("nbytes", [0, 1, LONG_NBYTES - 1, LONG_NBYTES, 300_000, 3 << 20])
def test_payloads_of_any_length_survive_frames(nbytes: int) -> None:
    payload = bytes(range(256)) * (nbytes // 256) + b"\x01" * (nbytes % 256)
    for frame in (Request(1, "n", payload, 5.0, 0), Reply(1, payload)):
        again = decode_frame(memoryview(encode_frame(frame)))
        assert isinstance(again, type(frame))
        assert again.payload == payload
        assert again.id == 1


def test_a_frame_is_its_own_though_the_next_one_is_made_in_the_same_memory() -> None:
    first = encode_frame(Reply(1, b"a" * 100_000))
    second = encode_frame(Reply(2, b"b" * 50_000))
    frames = [decode_frame(frame) for frame in (first, second)]
    assert [bytes(f.payload[:1]) for f in frames if isinstance(f, Reply)] == [b"a", b"b"]


def test_hello_is_not_mistaken_in_a_long_frame() -> None:
    facts = {f"{i:0100}": "x" * 200 for i in range(60)}
    ours = hello(Role.STORE, **facts)
    again = decode_frame(encode_frame(HelloFrame(ours)))
    assert isinstance(again, HelloFrame)
    assert again.hello == Hello(identity=ours.identity, contract=facts)
