"""Payload that is not there at once: the connection serves others, and goes on when it wakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transfer.cursor import Cursor, FileSource, Payload
from transfer.errors import PeerLost, TransferError
from transfer.gate import Gate
from transfer.interface import Priority
from transfer.tcp_codec import HEADER_NBYTES, Header, Op, decode_header, done_frame, encode_header
from transfer.tcp_reader import FrameReader, Sink
from transfer.tcp_writer import FrameWriter, Source

NOW, BACKGROUND = Priority.NOW, Priority.BACKGROUND


class SlowPayload:
    """Host memory of which only the part that was ``release``d is ready."""

    def __init__(self, view: memoryview) -> None:
        self._cursor = Cursor(view, [(0, view.nbytes)])
        self._ready = 0
        self.wake: Callable[[], None] = lambda: None
        self.error: TransferError | None = None
        self.file: FileSource | None = None
        self.settled = False

    @property
    def remaining(self) -> int:
        return self._cursor.remaining

    @property
    def ready_nbytes(self) -> int:
        return self._ready

    def begin(self, nbytes: int) -> None:
        """Room comes when the test says so."""

    def release(self, nbytes: int) -> None:
        self._ready += nbytes
        self.wake()

    def buffers(self, limit_nbytes: int) -> list[memoryview]:
        return self._cursor.buffers(min(limit_nbytes, self._ready))

    def next_run(self, limit_nbytes: int) -> tuple[int, int]:
        raise AssertionError("asked of what lies in no file")

    def advance(self, nbytes: int) -> None:
        assert nbytes <= self._ready, "passed over what was not ready"
        self._ready -= nbytes
        self._cursor.advance(nbytes)

    def close(self) -> None: ...


class Wire:
    """Takes everything a writer sends."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        data = b"".join(buffers)
        self.data += data
        return len(data)

    def frames(self) -> list[tuple[Op, int, int]]:
        found, rest = [], self.data
        while rest:
            header = decode_header(rest[:HEADER_NBYTES])
            found.append((header.op, header.request_id, header.body_nbytes))
            rest = rest[HEADER_NBYTES + header.body_nbytes :]
        return found


def pump_all(writer: FrameWriter, wire: Wire) -> None:
    while writer.pump(wire.send):
        pass


def source(
    request_id: int,
    payload: Payload,
    priority: Priority = NOW,
    ends: list[bool] | None = None,
    tail: bytes = b"",
) -> Source:
    on_end = (ends if ends is not None else []).append
    return Source(request_id, payload, Gate(), on_end, priority, tail)


def host(nbytes: int, fill: int = 1) -> Cursor:
    return Cursor(memoryview(bytes([fill]) * nbytes), [(0, nbytes)])


def test_a_source_that_has_nothing_ready_lets_others_go_and_is_sent_as_it_gets_ready() -> None:
    writer, wire, ends = FrameWriter(piece_nbytes=10), Wire(), list[bool]()
    payload = SlowPayload(memoryview(bytes(25)))
    slow = source(1, payload, ends=ends)
    payload.wake = lambda: writer.unpark(slow)
    writer.add(slow)
    writer.add(source(2, host(10)))
    pump_all(writer, wire)
    assert wire.frames() == [(Op.DATA, 2, 10)]
    assert writer.idle, "waits for a socket with nothing to send"
    wire.data.clear()
    payload.release(4)
    pump_all(writer, wire)
    payload.release(21)
    pump_all(writer, wire)
    assert [nbytes for _, _, nbytes in wire.frames()] == [4, 10, 10, 1]
    assert ends == [True]


def test_a_parked_source_that_is_dropped_or_fails_ends_without_a_byte() -> None:
    for how in ("drop_all", "error"):
        writer, wire, ends = FrameWriter(piece_nbytes=10), Wire(), list[bool]()
        payload = SlowPayload(memoryview(bytes(25)))
        slow = source(1, payload, ends=ends)
        writer.add(slow)
        if how == "drop_all":
            writer.drop_all()
        else:
            payload.error = PeerLost("the device is gone")
            writer.unpark(slow)
        pump_all(writer, wire)
        assert ends == [False]
        assert not wire.data


def test_urgent_frames_go_before_background_ones_which_keep_a_share() -> None:
    writer, wire = FrameWriter(piece_nbytes=10), Wire()
    writer.add(source(1, host(200), BACKGROUND))
    writer.add(source(2, host(200), NOW))
    pump_all(writer, wire)
    order = [request_id for _, request_id, _ in wire.frames()]
    assert order[:7] == [2] * 7
    assert order[:20].count(1) == 2, "background got another share than one in eight"
    assert order[-18:] == [1] * 18


def test_the_tail_follows_the_last_byte_whatever_the_socket_takes() -> None:
    tail = done_frame(1, None)
    for room in range(1, 60):
        writer, ends, data = FrameWriter(piece_nbytes=10), list[bool](), bytearray()

        def send(
            buffers: Sequence[memoryview | bytes], data: bytearray = data, room: int = room
        ) -> int:
            taken = b"".join(buffers)[:room]
            data += taken
            return len(taken)

        writer.add(source(1, host(15), ends=ends, tail=tail))
        while writer.pump(send):
            pass
        first = encode_header(Op.DATA, 1, 10) + b"\x01" * 10
        assert data == first + encode_header(Op.DATA, 1, 5) + b"\x01" * 5 + tail
        assert ends == [True]


def test_a_source_that_is_dropped_has_no_tail() -> None:
    writer, wire, ends = FrameWriter(piece_nbytes=10), Wire(), list[bool]()
    dropped = source(1, host(15), ends=ends, tail=done_frame(1, None))
    writer.add(dropped)
    writer.pump(wire.send)
    dropped.dropped = True
    pump_all(writer, wire)
    assert wire.frames() == [(Op.DATA, 1, 10)]
    assert ends == [False]


class OneSink:
    """Takes one request's payload, and remembers the frames beside it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.frames: list[Op] = []
        self.num_ended = 0

    def on_frame(self, header: Header, body: bytes) -> None:
        self.frames.append(header.op)

    def sink_for(self, header: Header) -> Sink:
        return self.sink

    def on_data_end(self, sink: Sink) -> None:
        self.num_ended += 1


class Stream:
    """Gives everything that is asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def receive(self, buffers: Sequence[memoryview]) -> int:
        before = len(self.data)
        for buffer in buffers:
            part, self.data = self.data[: len(buffer)], self.data[len(buffer) :]
            buffer[: len(part)] = part
        return before - len(self.data)


def read_on(reader: FrameReader, stream: Stream) -> None:
    while not reader.stalled and (stream.data or reader.buffered):
        reader.fill(stream.receive)


def test_a_sink_without_room_stalls_the_stream_until_it_has_room() -> None:
    target = memoryview(bytearray(30))
    payload = SlowPayload(target)
    handler = OneSink(Sink(1, payload, Gate(), 30))
    reader = FrameReader(handler)
    data = bytes(range(30))
    stream = Stream(encode_header(Op.DATA, 1, 30) + data + done_frame(2, None))
    read_on(reader, stream)
    assert reader.stalled
    payload.release(13)
    read_on(reader, stream)
    assert reader.stalled
    assert target == data[:13] + bytes(17)
    payload.release(17)
    read_on(reader, stream)
    assert target == data
    assert (handler.num_ended, handler.frames) == (1, [Op.DONE])


def test_a_sink_that_fails_while_it_stalls_lets_the_stream_go_on() -> None:
    target = memoryview(bytearray(30))
    payload = SlowPayload(target)
    handler = OneSink(Sink(1, payload, Gate(), 30))
    reader = FrameReader(handler)
    stream = Stream(encode_header(Op.DATA, 1, 30) + b"\x01" * 30 + done_frame(2, None))
    read_on(reader, stream)
    payload.error = PeerLost("the device is gone")
    read_on(reader, stream)
    assert target == bytes(30)
    assert handler.frames == [Op.DONE]
