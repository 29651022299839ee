"""A peer on a control channel that says anything: the two state machines and the server's shell."""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter

import msgspec
import pytest
import xxhash

from tests.transfer.channel_contract import Ask, Count, TestService, Told, hello
from tests.transfer.fuzzing import EDGES, NESTED, allocates_at_most, examples, mutated, no_alarm
from transfer.channel import MAX_FACTS, Hello
from transfer.errors import FrameInvalid, PeerClosed
from transfer.identity import MAX_NAME_NCHARS, Identity, Incarnation, NodeId, Role, new_identity
from transfer.membership import NodeInfo
from transfer.rpc import RpcChannel
from transfer.rpc_client import (
    ClientCore,
    ClientEvent,
    Ended,
    Errored,
    ItemArrived,
    Opened,
    Replied,
)
from transfer.rpc_frames import (
    FRAME_VERSION,
    MAX_FRAME_NBYTES,
    MAX_HELLO_NBYTES,
    MAX_OUTSTANDING,
    MAX_TEXT_NCHARS,
    STREAM_WINDOW,
    AnyFrame,
    Cancel,
    Credit,
    End,
    Failed,
    Frame,
    Goodbye,
    HelloAccepted,
    HelloFrame,
    HelloRefusedFrame,
    Item,
    Ping,
    Pong,
    Reply,
    Request,
    decode_frame,
    encode_frame,
    encode_message,
)
from transfer.rpc_handlers import RpcServer
from transfer.rpc_server import ServerCore

OURS, THEIRS = hello(Role.STORE), hello(Role.DECODE)
MIB = 1 << 20


def framed(body: bytes) -> bytes:
    """Return a frame whose checksum is right, whatever is in it."""
    return struct.pack("<BQ", FRAME_VERSION, xxhash.xxh3_64_intdigest(body)) + body


def number(rng: random.Random) -> int:
    edge = rng.choice(EDGES)
    return rng.choice((edge, rng.randint(0, 5), rng.randint(0, 5), -min(edge, 1 << 62)))


def any_frame(rng: random.Random) -> bytes:
    """Return a frame of any kind with any numbers in it, now and then broken inside."""
    payload = rng.choice((encode_message(Ask("x")), encode_message(Count(3)), b"", NESTED, b"\xc1"))
    name = rng.choice(("contract.ask", "contract.count", "contract.hang", "nobody's", "\0" * 3000))
    timeout_s, window = rng.choice((1.0, -1.0, 1e308)), rng.choice((0, 5, 1 << 60))
    frame: Frame = rng.choice(
        (
            HelloFrame(rng.choice((THEIRS, OURS))),
            HelloAccepted(OURS),
            HelloRefusedFrame("no"),
            Request(number(rng), name, payload, timeout_s, window),
            Reply(number(rng), payload),
            Item(number(rng), number(rng), payload),
            End(number(rng), number(rng)),
            Failed(number(rng), name, name),
            Cancel(number(rng)),
            Credit(number(rng), number(rng)),
            Ping(number(rng), [(number(rng), number(rng)) for _ in range(rng.randint(0, 5))]),
            Pong(number(rng), [number(rng) for _ in range(rng.randint(0, 5))]),
            Goodbye(name, rng.random() < 0.5),
        )
    )
    data = encode_frame(frame)
    if rng.random() < 0.3:
        data = framed(mutated(rng, data[9:]))
    return mutated(rng, data) if rng.random() < 0.05 else data


def greeted() -> ServerCore:
    core = ServerCore(OURS)
    core.on_frame(0.0, encode_frame(HelloFrame(THEIRS)))
    core.outbox.clear()
    return core


def said(core: ServerCore | ClientCore) -> list[AnyFrame]:
    frames = [decode_frame(data) for data in core.outbox]
    core.outbox.clear()
    return frames


# ── the state machines ──────────────────────────────────────────────────────────────────────────


def test_a_server_answers_any_frames_with_frames() -> None:
    for example in examples(600):
        with example as rng:
            core = greeted() if rng.random() < 0.8 else ServerCore(OURS)
            for step in range(30):
                core.on_frame(step * 0.1, any_frame(rng))
                said(core)
                core.tick(step * 0.1 + 0.01)
                assert core.num_running <= MAX_OUTSTANDING
            core.leave("over")
            assert core.num_running == 0


def test_a_client_ends_each_call_at_most_once_whatever_the_server_says() -> None:
    for example in examples(600):
        with example as rng:
            core = ClientCore(THEIRS, "there")
            core.start(0.0)
            events = core.on_frame(0.0, encode_frame(HelloAccepted(OURS)))
            assert events == [Opened(OURS)]
            for is_stream in (False, True, False):
                core.open(0.0, Ask("x"), timeout_s=9.0, is_stream=is_stream)
            ends: Counter[int] = Counter()
            items: Counter[int] = Counter()
            for step in range(30):
                for event in core.on_frame(step * 0.01, any_frame(rng)):
                    count(event, ends, items)
                said(core)
            for event in core.close(PeerClosed("over"), goodbye=False):
                count(event, ends, items)
            assert set(ends) == {1, 2, 3}
            assert set(ends.values()) == {1}
            assert set(items) <= {2}
            assert items[2] <= STREAM_WINDOW


def count(event: ClientEvent, ends: Counter[int], items: Counter[int]) -> None:
    match event:
        case Replied() | Ended() | Errored():
            ends[event.id] += 1
        case ItemArrived():
            items[event.id] += 1
        case _:
            pass


@pytest.mark.parametrize("window", [1, STREAM_WINDOW, 1 << 20, (1 << 64) - 1])
def test_a_stream_is_never_further_ahead_than_the_window_whatever_is_granted(window: int) -> None:
    core = greeted()
    core.on_frame(0.0, encode_frame(Request(1, "any", b"", 9.0, window)))
    for grant in (0, window, (1 << 64) - 1):
        core.on_frame(0.0, encode_frame(Credit(1, grant)))
        core.on_frame(0.0, encode_frame(Ping(1, [(1, grant)])))
        num_sent = 0
        while core.may_send(1):
            core.item(1, b"")
            num_sent += 1
            assert num_sent <= STREAM_WINDOW


def test_a_channel_keeps_the_identity_of_its_first_hello() -> None:
    core = greeted()
    core.on_frame(0.0, encode_frame(HelloFrame(hello(Role.PREFILL))))
    assert core.gone
    assert [type(frame) for frame in said(core)] == [Goodbye]


# ── what one frame may cost ─────────────────────────────────────────────────────────────────────


def test_lists_in_frames_are_refused_by_their_length_before_they_are_built() -> None:
    num_pairs = MAX_FRAME_NBYTES // 3 - 100
    pairs = b"\xdd" + num_pairs.to_bytes(4, "big") + b"\x92\x01\x01" * num_pairs
    ping, pong = framed(b"\x93\x0b\x01" + pairs), framed(b"\x93\x0c\x01" + pairs)
    assert len(ping) <= MAX_FRAME_NBYTES
    with allocates_at_most(MIB):
        for data in (ping, pong):
            with pytest.raises(FrameInvalid, match="length <= 4096"):
                decode_frame(data)


def test_every_frame_is_decoded_or_invalid_however_deep_it_is_nested() -> None:
    with pytest.raises(FrameInvalid, match="recursion"):
        decode_frame(framed(b"\x94\x09\x01\xc0" + NESTED))


def long_name(num_chars: int) -> Hello:
    """Return a hello that cannot be made here, as somebody else would send it."""
    identity = Identity(node_id=NodeId("n"), role=Role.STORE, incarnation=Incarnation("i"))
    told = msgspec.to_builtins(Hello(identity=identity))
    told["identity"]["node_id"] = "n" * num_chars
    return msgspec.convert(told, Hello)


def test_a_node_id_has_a_maximum_here_and_at_the_other_side() -> None:
    assert long_name(MAX_NAME_NCHARS)
    with pytest.raises(msgspec.ValidationError, match="at most"):
        long_name(MAX_NAME_NCHARS + 1)
    with pytest.raises(ValueError, match="at most"):
        Identity(node_id=NodeId("n" * 300), role=Role.STORE, incarnation=Incarnation("i"))


@pytest.mark.parametrize("name", ["", "bad id/../x", "a@b", "a\n", "a/b", 'a"', "\xe9"])
def test_a_node_id_that_keys_topics_or_labels_could_misread_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters"):
        Identity(node_id=NodeId(name), role=Role.STORE, incarnation=Incarnation("i"))


@pytest.mark.parametrize("role", list(Role))
def test_generated_and_usual_node_ids_are_taken(role: Role) -> None:
    assert new_identity(role).node_id.startswith(role.value)
    assert new_identity(role, "Store_1.rack-2").node_id == "Store_1.rack-2"


@pytest.mark.parametrize(
    "contract",
    [
        {f"fact {i}": "x" for i in range(MAX_FACTS + 1)},
        {"x" * 200: "y"},
        {"x": "y" * 2000},
    ],
    ids=["many facts", "long name", "long value"],
)
def test_facts_that_a_peer_states_are_few_and_short(contract: dict[str, str]) -> None:
    info = NodeInfo(identity=THEIRS.identity, address="tcp://127.0.0.1:1", labels=contract)
    for stated in (Hello(identity=THEIRS.identity, contract=contract), info):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(encode_message(stated), type=type(stated))


def test_a_long_frame_before_the_hello_is_not_even_decoded() -> None:
    core = ServerCore(OURS)
    facts = {f"{number:0120}": "x" * 1000 for number in range(MAX_FACTS)}
    long_hello = encode_frame(HelloFrame(Hello(identity=THEIRS.identity, contract=facts)))
    assert len(long_hello) > MAX_HELLO_NBYTES
    core.on_frame(0.0, long_hello)
    assert core.counters["invalid"] == 1
    assert core.outbox == []


# ── the shell of the server ─────────────────────────────────────────────────────────────────────


class Network:
    """An ``RpcServer`` whose clients are lists of frames."""

    def __init__(self) -> None:
        self.sent: dict[bytes, list[bytes]] = {}
        self.channels: dict[bytes, RpcChannel] = {}
        self.service = TestService()
        self.server = RpcServer(self.service, OURS, self._send)

    def _send(self, key: bytes, frame: bytes) -> None:
        if (channel := self.channels.get(key)) is not None:
            asyncio.get_running_loop().call_soon(channel.on_frame, frame)
        else:
            self.sent.setdefault(key, []).append(frame)

    async def works(self) -> None:
        """An honest client is served."""
        key = b"honest"
        network = self

        class Wire:
            def send(self, frame: bytes) -> None:
                network.server.on_frame(key, frame)

            def close(self, *, flush: bool) -> None:
                network.server.on_gone(key, "closed")

        channel = self.channels[key] = RpcChannel(THEIRS, Wire(), "there")
        deadline_s = asyncio.get_running_loop().time() + 20
        if not channel.closed:
            await channel.open(deadline_s)
        assert (await channel.request(Ask("x"), Told, deadline_s=deadline_s)).text == "x"


async def test_a_server_serves_others_whatever_one_client_sends() -> None:
    network = Network()
    with no_alarm(), allocates_at_most(16 * MIB):
        for example in examples(150):
            with example as rng:
                key = rng.randbytes(5)
                if rng.random() < 0.9:
                    network.server.on_frame(key, encode_frame(HelloFrame(THEIRS)))
                for _ in range(20):
                    network.server.on_frame(key, any_frame(rng))
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                network.server.on_gone(key, "left")
                network.sent.clear()
        await network.works()
        await network.server.close()
    assert network.server.num_running == 0


ENDLESS = Request(1, "\0" * (MAX_FRAME_NBYTES // 2), b"", 1.0, 0)
VALUE = Request(1, "contract.ask", b"\x81\xa4type" + msgspec.msgpack.encode("\1" * MIB), 1.0, 0)
DEEP = Request(1, "contract.ask", b"\x82\xa4type\xaccontract.ask\xa1x" + NESTED, 1.0, 0)


@pytest.mark.parametrize("request_", [ENDLESS, VALUE, DEEP], ids=["name", "value", "nested arrays"])
async def test_what_is_quoted_in_a_refusal_is_short(request_: Request) -> None:
    network = Network()
    with no_alarm():
        network.server.on_frame(b"k", encode_frame(HelloFrame(THEIRS)))
        network.server.on_frame(b"k", encode_frame(request_))
        answer = decode_frame(network.sent[b"k"][-1])
        assert isinstance(answer, Failed)
        assert len(answer.message) <= MAX_TEXT_NCHARS + 3
        await network.server.close()


async def test_an_answer_that_does_not_decode_is_an_error_of_the_tree() -> None:
    for payload in (b"\x81\xa4text\xa1\xff", b"\x82\xa1x" + NESTED, b"\xc1", b""):
        sent: list[bytes] = []

        class Wire:
            def send(self, frame: bytes) -> None:
                sent.append(frame)  # noqa: B023

            def close(self, *, flush: bool) -> None:
                pass

        channel = RpcChannel(THEIRS, Wire(), "there")
        deadline_s = asyncio.get_running_loop().time() + 20
        opening = asyncio.ensure_future(channel.open(deadline_s))
        await asyncio.sleep(0)
        channel.on_frame(encode_frame(HelloAccepted(OURS)))
        await opening
        asking = asyncio.ensure_future(channel.request(Ask("x"), Told, deadline_s=deadline_s))
        await asyncio.sleep(0)
        asked = decode_frame(sent[-1])
        assert isinstance(asked, Request)
        channel.on_frame(encode_frame(Reply(asked.id, payload)))
        with pytest.raises(FrameInvalid):
            await asking
        channel.abort()
