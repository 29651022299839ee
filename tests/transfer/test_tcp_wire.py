"""The tcp framing without a network: writer to reader through arbitrary cuts of the stream."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from transfer.cursor import Cursor
from transfer.error_codes import STATUS_ERRORS, error_of, status_of
from transfer.errors import FrameInvalid, HelloRefused, RegionRevoked, Stale, Unauthorized
from transfer.gate import Gate
from transfer.tcp_codec import (
    HEADER_NBYTES,
    TCP_PROTOCOL_VERSION,
    Header,
    HelloBody,
    Op,
    RequestBody,
    control_frame,
    decode_body,
    decode_header,
    done_frame,
    encode_header,
    pack_spans,
)
from transfer.tcp_handshake import ClientHandshake, ServerHandshake
from transfer.tcp_reader import FrameReader, Sink
from transfer.tcp_writer import FrameWriter, Source


class Pipe:
    """A byte stream that takes and gives random amounts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.data = bytearray()

    def send(self, buffers: Sequence[memoryview]) -> int:
        whole = b"".join(buffers)
        count = self.rng.randint(1, len(whole))
        self.data += whole[:count]
        return count

    def receive(self, buffers: Sequence[memoryview]) -> int:
        room = sum(len(b) for b in buffers)
        count = self.rng.randint(1, min(room, len(self.data)))
        got, self.data = self.data[:count], self.data[count:]
        for buffer in buffers:
            part, got = got[: len(buffer)], got[len(buffer) :]
            buffer[: len(part)] = part
        return count


class Collector:
    """Keeps what a reader reports."""

    def __init__(self, sinks: dict[int, Sink]) -> None:
        self.sinks = sinks
        self.frames: list[tuple[Header, bytes]] = []
        self.ended: list[int] = []

    def on_frame(self, header: Header, body: bytes) -> None:
        self.frames.append((header, body))

    def sink_for(self, header: Header) -> Sink:
        return self.sinks[header.request_id]

    def on_data_end(self, sink: Sink) -> None:
        self.ended.append(sink.request_id)


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_of_frames_arrives_whatever_the_cuts(seed: int) -> None:
    rng = random.Random(seed)
    pipe, writer = Pipe(seed), FrameWriter(piece_nbytes=64)
    memories = {i: memoryview(bytearray(rng.randbytes(400))) for i in range(1, 5)}
    targets = {i: memoryview(bytearray(400)) for i in memories}
    spans = [(0, 100), (200, 1), (250, 149)]
    complete: list[int] = []

    def ender(request_id: int) -> Source:
        def on_end(done: bool) -> None:
            assert done
            complete.append(request_id)
            writer.put(done_frame(request_id, None))

        return Source(request_id, Cursor(memories[request_id], spans), Gate(), on_end)

    sinks = {i: Sink(i, Cursor(targets[i], spans), Gate(), 250) for i in memories}
    collector = Collector(sinks)
    reader = FrameReader(collector)
    for request_id in memories:
        writer.put(control_frame(Op.CANCEL, request_id, rng.randbytes(rng.randrange(50))))
        writer.add(ender(request_id))
    while not writer.idle or pipe.data:
        if not writer.idle and (rng.random() < 0.5 or not pipe.data):
            writer.pump(pipe.send)
        else:
            reader.fill(pipe.receive)
    assert sorted(complete) == [1, 2, 3, 4]
    assert not reader.mid_frame
    for request_id, target in targets.items():
        for offset, nbytes in spans:
            assert (
                target[offset : offset + nbytes] == memories[request_id][offset : offset + nbytes]
            )
        assert target[100:200] == bytes(100)
        assert sinks[request_id].remaining == 0
    assert [h.request_id for h, _ in collector.frames if h.op is Op.DONE] == complete


def test_sources_take_turns_piece_by_piece() -> None:
    writer, sent = FrameWriter(piece_nbytes=10), bytearray()

    def send(buffers: Sequence[memoryview]) -> int:
        data = b"".join(buffers)
        sent.extend(data)
        return len(data)

    for request_id in (1, 2):
        cursor = Cursor(memoryview(bytes(30)), [(0, 30)])
        writer.add(Source(request_id, cursor, Gate(), lambda _done: None))
    while writer.pump(send):
        pass
    step = HEADER_NBYTES + 10
    order = [
        decode_header(sent[at : at + HEADER_NBYTES]).request_id for at in range(0, 6 * step, step)
    ]
    assert order == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("how", ["gate", "drop"])
def test_a_source_that_ends_in_mid_frame_keeps_the_stream_in_step(how: str) -> None:
    writer, sent, ends = FrameWriter(piece_nbytes=100), bytearray(), list[bool]()
    source = Source(9, Cursor(memoryview(b"\x01" * 300), [(0, 300)]), Gate(), ends.append)
    writer.add(source)

    def send(buffers: Sequence[memoryview]) -> int:
        data = b"".join(buffers)[:40]
        sent.extend(data)
        return len(data)

    writer.pump(send)
    if how == "gate":
        source.gate.close()
    else:
        source.dropped = True
    while writer.pump(send):
        pass
    assert len(sent) == HEADER_NBYTES + 100
    assert sent[HEADER_NBYTES:] == b"\x01" * 16 + bytes(84)
    assert ends == [False]
    assert writer.idle


def test_a_sink_whose_gate_closes_in_mid_frame_is_not_touched_again() -> None:
    target = memoryview(bytearray(100))
    sink = Sink(1, Cursor(target, [(0, 100)]), Gate(), 100)
    collector = Collector({1: sink})
    reader = FrameReader(collector)
    stream = bytearray(encode_header(Op.DATA, 1, 100) + b"\x01" * 100 + done_frame(1, None))

    def receive(buffers: Sequence[memoryview]) -> int:
        left = min(40, len(stream))
        for buffer in buffers:
            count = min(len(buffer), left)
            buffer[:count] = stream[:count]
            del stream[:count]
            left -= count
        return 40 - left

    while sink.remaining > 60:
        reader.fill(receive)
    before = bytes(target)
    assert 0 < before.count(1) < 100
    sink.gate.close()
    while stream or reader.buffered:
        reader.fill(receive)
    assert target == before
    assert sink.remaining == 0
    assert [header.op for header, _ in collector.frames] == [Op.DONE]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nServer",
        encode_header(Op.READ, 1, 1 << 40),
        encode_header(Op.DATA, 1, 1 << 40),
        encode_header(Op.DATA, 1, 0),
        encode_header(Op.READ)[:4] + b"\xff" + encode_header(Op.READ)[5:],
    ],
)
def test_headers_that_break_the_protocol_are_refused(data: bytes) -> None:
    with pytest.raises(FrameInvalid):
        decode_header(data[:HEADER_NBYTES].ljust(HEADER_NBYTES))


def test_more_data_than_the_request_expects_is_refused() -> None:
    sink = Sink(1, Cursor(memoryview(bytearray(10)), [(0, 10)]), Gate(), 10)
    reader = FrameReader(Collector({1: sink}))

    def receive(buffers: Sequence[memoryview]) -> int:
        buffers[0][:HEADER_NBYTES] = encode_header(Op.DATA, 1, 11)
        return HEADER_NBYTES

    with pytest.raises(FrameInvalid, match="expects 10"):
        reader.fill(receive)


def test_every_error_survives_the_wire() -> None:
    for kind in STATUS_ERRORS:
        raised = error_of(status_of(kind("why")), b"why")
        assert type(raised) is kind
        assert str(raised) == "why"
    assert error_of(0, b"") is None
    assert isinstance(error_of(999, b""), FrameInvalid)
    assert status_of(RegionRevoked("x")) == 3, "the numbers are the wire format"


@pytest.mark.parametrize("spans", [b"", b"x" * 15])
def test_spans_of_a_wrong_length_are_refused(spans: bytes) -> None:
    with pytest.raises(FrameInvalid):
        RequestBody(1, b"", spans).unpack()


def test_bodies_that_do_not_decode_are_refused() -> None:
    with pytest.raises(FrameInvalid):
        decode_body(b"\xc1", RequestBody)
    body = RequestBody(5, b"c" * 16, pack_spans([(1, 2), (3, 4)]))
    assert body.unpack() == [(1, 2), (3, 4)]


def shake(client: ClientHandshake, server: ServerHandshake) -> None:
    """Carry frames between the two until both are ready."""
    frame = client.first()
    for _ in range(4):
        frame = server.receive(decode_header(frame[:HEADER_NBYTES]), frame[HEADER_NBYTES:])
        frame = client.receive(decode_header(frame[:HEADER_NBYTES]), frame[HEADER_NBYTES:])
        if client.ready and server.ready:
            return
    raise AssertionError("no end of the hello")


def sides(
    client_secret: bytes = b"", server_secret: bytes = b"", expected: str = "srv"
) -> tuple[ClientHandshake, ServerHandshake]:
    return (
        ClientHandshake(client_secret, "cli", expected, b"c" * 16),
        ServerHandshake(server_secret, "srv", b"s" * 16),
    )


def test_equal_secrets_and_no_secrets_shake_hands() -> None:
    shake(*sides())
    shake(*sides(b"secret", b"secret"))


@pytest.mark.parametrize(("ours", "theirs"), [(b"a", b"b"), (b"a", b""), (b"", b"b")])
def test_the_client_refuses_a_server_without_its_secret(ours: bytes, theirs: bytes) -> None:
    with pytest.raises(Unauthorized):
        shake(*sides(ours, theirs))


@pytest.mark.parametrize(("ours", "theirs"), [(b"a", b"b"), (b"", b"b")])
def test_the_server_refuses_a_client_that_cannot_prove_the_secret(
    ours: bytes, theirs: bytes
) -> None:
    client, server = sides(ours, theirs)
    _, impostor = sides(ours, ours)
    hello = client.first()
    split = (decode_header(hello[:HEADER_NBYTES]), hello[HEADER_NBYTES:])
    server.receive(*split)
    answer = impostor.receive(*split)
    proof = client.receive(decode_header(answer[:HEADER_NBYTES]), answer[HEADER_NBYTES:])
    with pytest.raises(Unauthorized):
        server.receive(decode_header(proof[:HEADER_NBYTES]), proof[HEADER_NBYTES:])


def test_another_incarnation_is_stale_and_another_version_is_refused_with_both_sides() -> None:
    with pytest.raises(Stale, match=r"srv.*other"):
        shake(*sides(expected="other"))
    _, server = sides()
    frame = control_frame(Op.HELLO, body=HelloBody(99, "old", b"c" * 16))
    with pytest.raises(HelloRefused, match=rf"srv.*{TCP_PROTOCOL_VERSION}.*old.*99"):
        server.receive(decode_header(frame[:HEADER_NBYTES]), frame[HEADER_NBYTES:])


def test_hello_frames_out_of_order_are_refused() -> None:
    client, server = sides()
    with pytest.raises(FrameInvalid):
        server.receive(Header(Op.READ, 0, 1, 0), b"")
    _, server = sides()
    with pytest.raises(FrameInvalid):
        server.receive(Header(Op.PROOF, 0, 0, 0), b"")
    with pytest.raises(FrameInvalid):
        client.receive(Header(Op.READY, 0, 0, 0), b"")
