"""The two protocol state machines against each other, without a loop: fuzz, limits, frames."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.channel_contract import Ask, Fail, hello
from transfer.channel import LIVENESS_S, PING_INTERVAL_S
from transfer.errors import FrameInvalid, PeerLost, RemoteFailed
from transfer.identity import Role
from transfer.rpc_client import ClientCore, Closed, Ended, Errored, ItemArrived, Replied
from transfer.rpc_frames import (
    MAX_OUTSTANDING,
    Cancel,
    Failed,
    HelloFrame,
    Item,
    Request,
    decode_frame,
    encode_frame,
    type_name,
)
from transfer.rpc_server import Called, Credited, Dropped, Gone, ServerCore

STEP_S = 0.01


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    with pytest.raises(FrameInvalid):
        decode_frame(data)


@given(st.integers(min_value=0), st.data())
def test_one_flipped_bit_anywhere_is_noticed(seed: int, data: st.DataObject) -> None:
    frame = encode_frame(Request(1, "contract.ask", random.Random(seed).randbytes(40), 1.5, 0))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    broken = bytearray(frame)
    broken[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameInvalid):
        decode_frame(bytes(broken))


def test_messages_travel_under_their_tag_or_class_name() -> None:
    class ByTrue(msgspec.Struct, tag=True):
        pass

    class ByNumber(msgspec.Struct, tag=7):
        pass

    assert [type_name(t) for t in (Ask, Fail, ByTrue, ByNumber)] == [
        "contract.ask",
        "Fail",
        "ByTrue",
        "ByNumber",
    ]


class Pair:
    """A client and a server joined by two queues that a test may tamper with."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.client = ClientCore(hello(Role.DECODE), "the server")
        self.server = ServerCore(hello(Role.STORE))
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.client.start(0.0)
        self.collect()

    def collect(self) -> None:
        self.up += self.client.outbox
        self.down += self.server.outbox
        self.client.outbox.clear()
        self.server.outbox.clear()

    def greet(self) -> None:
        while self.client.peer is None:
            self.server.on_frame(self.now_s, self.up.popleft())
            self.collect()
            self.client.on_frame(self.now_s, self.down.popleft())


def open_pair() -> Pair:
    pair = Pair()
    pair.greet()
    return pair


def test_an_idle_open_channel_wants_no_timer() -> None:
    pair = open_pair()
    assert pair.client.next_timer_s() is None
    assert pair.server.next_timer_s() is None
    id_ = pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=False)
    assert pair.client.next_timer_s() == PING_INTERVAL_S
    pair.client.cancel(id_)
    assert pair.client.next_timer_s() is None


def test_outstanding_requests_are_bounded_on_both_sides() -> None:
    pair = open_pair()
    for _ in range(MAX_OUTSTANDING):
        pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=False)
    with pytest.raises(RemoteFailed, match="overloaded"):
        pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=False)
    for id_ in range(1, MAX_OUTSTANDING + 2):
        events = pair.server.on_frame(0.0, encode_frame(Request(id_, "x", b"", 1, 0)))
        assert len(events) == (1 if id_ <= MAX_OUTSTANDING else 0)
    assert pair.server.num_running == MAX_OUTSTANDING


def test_a_peer_that_sends_items_without_a_grant_fails_only_that_stream() -> None:
    pair = open_pair()
    id_ = pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=True)
    other = pair.client.open(0.0, Ask("y"), timeout_s=1, is_stream=False)
    pair.client.outbox.clear()
    (event,) = pair.client.on_frame(0.0, encode_frame(Item(id_, 10_000, b"")))
    assert isinstance(event, Errored)
    assert isinstance(event.error, FrameInvalid)
    assert decode_frame(pair.client.outbox[0]) == Cancel(id_)
    (event,) = pair.client.on_frame(0.0, encode_frame(Item(other, 0, b"")))
    assert isinstance(event, Errored)
    assert pair.client.closed_by is None


def test_late_and_repeated_completions_are_counted_and_ignored() -> None:
    pair = open_pair()
    id_ = pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=False)
    pair.collect()
    pair.server.on_frame(0.0, pair.up[0])
    pair.server.on_frame(0.0, pair.up[0])
    assert pair.server.counters["duplicate_request"] == 1
    pair.server.reply(id_, b"1")
    pair.server.reply(id_, b"2")
    (reply,) = pair.server.outbox
    assert pair.client.on_frame(0.0, reply) == [Replied(id_, b"1")]
    assert pair.client.on_frame(0.0, reply) == []
    assert pair.client.counters["unknown_completion"] == 1


class Model:
    """What must be true of every call, told naively."""

    def __init__(self) -> None:
        self.num_items: dict[int, int | None] = {}  # None: a request
        self.arrived: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.called: set[int] = set()

    def note(self, event: object) -> None:
        if isinstance(event, ItemArrived):
            assert event.id not in self.ended
            assert event.payload == f"{event.id}/{self.arrived[event.id]}".encode()
            self.arrived[event.id] += 1
        elif isinstance(event, Replied):
            assert self.num_items[event.id] is None
            assert event.payload == f"{event.id}".encode()
            self.end(event.id, "replied")
        elif isinstance(event, Ended):
            assert self.arrived[event.id] == self.num_items[event.id]
            self.end(event.id, "ended")
        elif isinstance(event, Errored):
            self.end(event.id, type(event.error).__name__)

    def end(self, id_: int, how: str) -> None:
        assert id_ not in self.ended, f"{id_} ended twice"
        self.ended[id_] = how


class Fuzz(Pair):
    """Random calls, cancels, losses, repeats and corruption."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.model = Model()
        self.loss = self.rng.choice([0.0, 0.02, 0.2])
        self.repeat = self.rng.choice([0.0, 0.1])
        self.serving: dict[int, int | None] = {}  # id -> items sent so far, None for requests

    def tamper(self, frame: bytes) -> list[bytes]:
        if self.rng.random() < self.loss:
            return []
        if self.rng.random() < self.loss / 4:
            return [frame[:-1] + bytes([frame[-1] ^ 1])]
        return [frame] * (2 if self.rng.random() < self.repeat else 1)

    def deliver(self) -> None:
        self.collect()
        for _ in range(self.rng.randrange(len(self.up) + 1)):
            for frame in self.tamper(self.up.popleft()):
                for event in self.server.on_frame(self.now_s, frame):
                    self.serve(event)
        for _ in range(self.rng.randrange(len(self.down) + 1)):
            for frame in self.tamper(self.down.popleft()):
                for event in self.client.on_frame(self.now_s, frame):
                    self.model.note(event)

    def serve(self, event: object) -> None:
        if isinstance(event, Called):
            assert event.id not in self.model.called, "a handler ran twice"
            self.model.called.add(event.id)
            self.serving[event.id] = 0 if event.is_stream else None
        elif isinstance(event, Dropped):
            del self.serving[event.id]
        else:
            assert isinstance(event, Credited | Gone)

    def work(self) -> None:
        """Let some handlers make a step."""
        for id_ in list(self.serving):
            num_sent = self.serving[id_]
            if self.rng.random() < 0.5:
                continue
            if num_sent is None:
                self.server.reply(id_, f"{id_}".encode())
                del self.serving[id_]
            elif num_sent == self.model.num_items[id_]:
                self.server.end(id_)
                del self.serving[id_]
            elif self.server.may_send(id_):
                self.server.item(id_, f"{id_}/{num_sent}".encode())
                self.serving[id_] = num_sent + 1

    def call(self) -> None:
        is_stream = self.rng.random() < 0.5
        id_ = self.client.open(self.now_s, Ask("x"), timeout_s=9, is_stream=is_stream)
        self.model.num_items[id_] = self.rng.randrange(200) if is_stream else None
        self.model.arrived[id_] = 0

    def consume(self) -> None:
        for id_ in self.model.arrived:
            if id_ not in self.model.ended and self.rng.random() < 0.7:
                consumed = getattr(self.client._open.get(id_), "num_consumed", 0)
                if consumed < self.model.arrived[id_]:
                    self.client.consume(id_)

    def step(self, *, may_call: bool) -> None:
        self.now_s += STEP_S
        if may_call and self.client.closed_by is None and self.client.peer is not None:
            if self.rng.random() < 0.2:
                self.call()
            if self.rng.random() < 0.05 and self.model.num_items:
                id_ = self.rng.choice(list(self.model.num_items))
                if id_ not in self.model.ended:
                    self.client.cancel(id_)
                    self.model.end(id_, "cancelled")
        self.deliver()
        self.work()
        self.consume()
        for event in self.client.tick(self.now_s):
            self.model.note(event)
        for server_event in self.server.tick(self.now_s):
            self.serve(server_event)


@pytest.mark.parametrize("seed", range(60))
def test_every_call_ends_once_and_right_over_lossy_wires(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(250):
        fuzz.step(may_call=True)
    fuzz.loss = 0.0
    for _ in range(int(2 * LIVENESS_S / STEP_S) + 1500):
        fuzz.step(may_call=False)
        if not fuzz.serving and len(fuzz.model.ended) == len(fuzz.model.num_items):
            break
    assert fuzz.model.ended.keys() == fuzz.model.num_items.keys()
    assert not fuzz.serving, "handlers that nobody waits for must end"
    assert fuzz.client.num_outstanding == fuzz.server.num_running == 0


def test_a_wire_without_losses_loses_nothing() -> None:
    for seed in range(10):
        fuzz = Fuzz(seed)
        fuzz.loss = 0.0
        for number in range(2500):
            fuzz.step(may_call=number < 250)
        assert set(fuzz.model.ended.values()) == {"replied", "ended", "cancelled"}


def test_closing_fails_everything_outstanding_exactly_once() -> None:
    pair = open_pair()
    ids = [pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=n % 2 == 0) for n in range(5)]
    events = pair.client.close(PeerLost("gone"), goodbye=True)
    assert [event.id for event in events if isinstance(event, Errored)] == ids
    assert isinstance(events[-1], Closed)
    assert pair.client.close(PeerLost("again"), goodbye=True) == []
    with pytest.raises(PeerLost, match="gone"):
        pair.client.open(0.0, Ask("x"), timeout_s=1, is_stream=False)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf")])
def test_a_timeout_that_no_timer_can_hold_is_refused(timeout_s: float) -> None:
    server = ServerCore(hello(Role.DECODE))
    server.on_frame(0.0, encode_frame(HelloFrame(hello(Role.GATEWAY))))
    server.outbox.clear()
    assert server.on_frame(0.0, encode_frame(Request(1, "ask", b"", timeout_s, 0))) == []
    (answer,) = server.outbox
    assert isinstance(decode_frame(answer), Failed)
    assert server.num_running == 0
