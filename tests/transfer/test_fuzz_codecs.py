"""Bytes of strangers against the codecs and handshakes, without a network: thousands of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.transfer.fuzzing import (
    BOUNDED,
    EDGES,
    KIB,
    NESTED,
    allocates_at_most,
    examples,
    mutated,
    shuffled,
)
from transfer.cursor import Cursor
from transfer.decoding import MAX_REASON_NCHARS, decode_foreign
from transfer.error_codes import MAX_TEXT_NBYTES, STATUS_ERRORS, error_of
from transfer.errors import FrameInvalid, RegionRevoked, TransferError, Unauthorized
from transfer.gate import Gate
from transfer.interface import Rights
from transfer.region import RegionTable, RegisteredRegion, check_spans
from transfer.tcp_codec import (
    HEADER_NBYTES,
    MAX_CONTROL_NBYTES,
    TCP_PROTOCOL_VERSION,
    Header,
    HelloBody,
    Op,
    ProofBody,
    RequestBody,
    control_frame,
    decode_body,
    decode_header,
    encode_header,
    pack_spans,
)
from transfer.tcp_handshake import ClientHandshake, ServerHandshake
from transfer.tcp_reader import FrameReader, Sink
from transfer.token import TOKEN_VERSION, Endpoint, Token, decode_token, encode_token

BODIES: list[msgspec.Struct] = [
    HelloBody(TCP_PROTOCOL_VERSION, "life", b"n" * 16, "other", b"p" * 32),
    ProofBody(b"p" * 32),
    RequestBody(65536, b"c" * 16, pack_spans([(0, 4096), (8192, 1)])),
]
REQUEST_FIELDS = msgspec.msgpack.encode(BODIES[2])[1:]
TOKEN = Token(
    version=TOKEN_VERSION,
    endpoint=Endpoint("life", "process", "host", "local-1", "kvferry/x", "127.0.0.1:1"),
    region_id=65536,
    nbytes=4096,
    rights="r",
    capability=bytes(range(16)),
    in_shared_memory=True,
)


# ── every decoder: a value or FrameInvalid ──────────────────────────────────────────────────────


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_mutated_body_decodes_or_is_invalid(body: msgspec.Struct) -> None:
    valid = msgspec.msgpack.encode(body)
    for example in examples(1500):
        with example as rng, suppress(FrameInvalid):
            decoded = decode_body(mutated(rng, valid), type(body))
            if isinstance(decoded, RequestBody):
                decoded.unpack()


@BOUNDED
@given(st.binary(max_size=300), st.sampled_from([HelloBody, ProofBody, RequestBody]))
def test_any_bytes_are_a_body_or_invalid(data: bytes, kind: type[msgspec.Struct]) -> None:
    with suppress(FrameInvalid):
        decode_body(data, kind)


@pytest.mark.parametrize(
    "decode",
    [
        lambda: decode_body(b"\x81\xa1x" + NESTED, HelloBody),
        lambda: decode_body(b"\xdc\x01\x00" + REQUEST_FIELDS + NESTED, RequestBody),
        lambda: decode_foreign(b"\x91" + NESTED, msgspec.msgpack.decode, "anything"),
    ],
)
def test_nesting_beyond_the_recursion_limit_is_invalid(decode: Callable[[], object]) -> None:
    with pytest.raises(FrameInvalid, match="recursion"):
        decode()


def test_the_reason_does_not_quote_a_megabyte_that_was_sent() -> None:
    data = msgspec.msgpack.encode({"type": "x" * (1 << 20)})

    class Known(msgspec.Struct, tag="known"):
        pass

    with pytest.raises(FrameInvalid) as caught:
        decode_foreign(data, msgspec.msgpack.Decoder(Known).decode, "a thing")
    assert len(str(caught.value)) <= MAX_REASON_NCHARS + 100


@BOUNDED
@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_any_24_bytes_are_a_header_or_invalid(data: bytes) -> None:
    for candidate in (data, b"KVF1" + data[4:]):
        with suppress(FrameInvalid):
            decode_header(candidate)


@BOUNDED
@given(st.integers(-(1 << 63), (1 << 64) - 1), st.binary(max_size=5 * KIB))
def test_any_status_is_success_or_an_error_with_a_short_text(status: int, text: bytes) -> None:
    error = error_of(status, text)
    assert (error is None) == (status == 0)
    assert len(str(error)) <= MAX_TEXT_NBYTES + 50
    if not 0 <= status <= len(STATUS_ERRORS):
        assert isinstance(error, FrameInvalid)


# ── the reader: any stream, cut anywhere ────────────────────────────────────────────────────────


class Asker:
    """Expects the payload of request 1 and takes any control frame."""

    def __init__(self) -> None:
        self.target = bytearray(256)
        view = memoryview(self.target)[64:192]
        self.sink = Sink(1, Cursor(view, [(0, 128)]), Gate(), 128)
        self.num_frames = 0

    def on_frame(self, header: Header, body: bytes) -> None:
        assert len(body) == header.body_nbytes <= MAX_CONTROL_NBYTES
        self.num_frames += 1

    def sink_for(self, header: Header) -> Sink:
        if header.request_id != 1:
            raise FrameInvalid("DATA for a request that does not read")
        return self.sink

    def on_data_end(self, sink: Sink) -> None:
        assert sink is self.sink


def feed(reader: FrameReader, rng: random.Random, stream: bytes) -> None:
    """Give ``stream`` to the reader in random amounts, then the end of the stream."""
    left = memoryview(stream)

    def receive(buffers: Sequence[memoryview]) -> int:
        nonlocal left
        room = sum(buffer.nbytes for buffer in buffers)
        assert room > 0, "asks for nothing: would spin"
        taken = done = min(len(left), rng.randint(1, room))
        for buffer in buffers:
            part = min(buffer.nbytes, done)
            buffer[:part] = left[:part]
            left, done = left[part:], done - part
        return taken

    for _ in range(2 * len(stream) + 2):
        if reader.fill(receive) == 0:
            return
    raise AssertionError("the reader does not come to an end")


ANSWERS = [
    encode_header(Op.DATA, 1, 64) + b"a" * 64,
    control_frame(Op.DONE, 9, b"no such region", 2),
    encode_header(Op.DATA, 1, 64) + b"b" * 64,
    control_frame(Op.DONE, 1),
    control_frame(Op.GOODBYE),
]


def test_any_stream_is_taken_apart_or_refused_and_stays_inside_of_its_sink() -> None:
    with allocates_at_most(4 * MAX_CONTROL_NBYTES):
        for example in examples(1500):
            with example as rng:
                asker = Asker()
                stream = b"".join(shuffled(rng, ANSWERS))
                if rng.random() < 0.3:
                    stream = mutated(rng, stream)
                with suppress(FrameInvalid):
                    feed(FrameReader(asker), rng, stream)
                assert asker.target[:64] == asker.target[192:] == bytes(64)


@pytest.mark.parametrize("op", list(Op))
def test_a_claimed_length_costs_no_more_than_the_limit_of_its_frame(op: Op) -> None:
    with allocates_at_most(2 * MAX_CONTROL_NBYTES):
        for edge in (*EDGES, MAX_CONTROL_NBYTES, MAX_CONTROL_NBYTES + 1):
            with suppress(FrameInvalid):
                feed(FrameReader(Asker()), random.Random(0), encode_header(op, 1, edge))


# ── the handshake: nobody is let in who does not hold the secret ────────────────────────────────


def conversation(secret: bytes, other: bytes) -> tuple[list[bytes], list[bytes], bool]:
    """Return what a client and a server say to one another, and whether both became ready."""
    client = ClientHandshake(secret, "cli", "srv", b"c" * 16)
    server = ServerHandshake(other, "srv", b"s" * 16)
    said, answered = [client.first()], list[bytes]()
    with suppress(TransferError):
        while not client.ready:
            answered.append(server.receive(*split(said[-1])))
            said.append(client.receive(*split(answered[-1])))
    return said, answered, client.ready and server.ready


def split(frame: bytes) -> tuple[Header, bytes]:
    return decode_header(frame[:HEADER_NBYTES]), frame[HEADER_NBYTES:]


@pytest.mark.parametrize("nonce", [b"s" * 16, b"t" * 16], ids=["same nonce", "replay"])
def test_a_server_lets_nobody_in_by_chance(nonce: bytes) -> None:
    secret = b"a long cluster secret"
    said, _, agreed = conversation(secret, secret)
    assert agreed
    proof = said[1][HEADER_NBYTES:]
    for example in examples(1500):
        with example as rng, suppress(TransferError):
            server = ServerHandshake(secret, "srv", nonce)
            for frame in shuffled(rng, said[:2]):
                if len(frame) < HEADER_NBYTES or server.ready:
                    break
                server.receive(*split(frame))
                if server.ready:
                    assert nonce == b"s" * 16, "a recorded proof was taken for a fresh one"
                    assert decode_body(frame[HEADER_NBYTES:], ProofBody) == decode_body(
                        proof, ProofBody
                    )


def test_a_client_believes_no_server_by_chance() -> None:
    secret = b"a long cluster secret"
    _, answered, agreed = conversation(secret, secret)
    assert agreed
    for example in examples(1500):
        with example as rng:
            client = ClientHandshake(secret, "cli", "srv", b"c" * 16)
            with suppress(TransferError):
                for frame in shuffled(rng, answered):
                    if len(frame) < HEADER_NBYTES:
                        break
                    client.receive(*split(frame))
                    if client.ready:
                        assert split(frame)[0].op is Op.READY
                        break


# ── tokens and the check of the owner ───────────────────────────────────────────────────────────


def test_a_mutated_token_is_invalid_or_another_token() -> None:
    valid = encode_token(TOKEN)
    for example in examples(2000):
        with example as rng:
            data = mutated(rng, valid)
            with suppress(FrameInvalid):
                token = decode_token(data)
                assert token != TOKEN or msgspec.msgpack.decode(data) is not None


def test_no_single_bit_of_a_capability_or_region_id_is_without_meaning() -> None:
    table = RegionTable(lambda region, rights, capability: capability)
    regions = [table.register(bytearray(64)) for _ in range(3)]
    capability = regions[1].export("r")
    known = {region.region_id for region in regions}
    assert table.authorize(regions[1].region_id, capability, "r") is regions[1]
    for bit in range(128):
        forged = (int.from_bytes(capability, "big") ^ 1 << bit).to_bytes(16, "big")
        with pytest.raises(Unauthorized):
            table.authorize(regions[1].region_id, forged, "r")
    for region_id in {regions[1].region_id ^ 1 << bit for bit in range(64)} | known:
        if region_id != regions[1].region_id:
            with pytest.raises((Unauthorized, RegionRevoked)):
                table.authorize(region_id, capability, "r")


numbers = st.one_of(st.sampled_from(EDGES), st.integers(-(1 << 63), (1 << 64) - 1))


@BOUNDED
@given(numbers, st.binary(max_size=40), st.sampled_from(["r", "w", "rw", None]))
def test_random_capabilities_open_nothing(region_id: int, guess: bytes, right: Any) -> None:
    table = RegionTable(lambda region, rights, capability: capability)
    region: RegisteredRegion = table.register(bytearray(64))
    wanted: Rights | None = right
    region.export("rw")
    for id_ in (region_id, region.region_id):
        with pytest.raises((Unauthorized, RegionRevoked)):
            table.authorize(id_, guess, wanted)


@BOUNDED
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), st.integers(0, 1 << 20))
def test_spans_that_pass_the_check_lie_inside_of_the_region(
    spans: list[tuple[int, int]], region_nbytes: int
) -> None:
    with suppress(FrameInvalid):
        check_spans(spans, region_nbytes)
        assert all(0 <= offset < offset + nbytes <= region_nbytes for offset, nbytes in spans)


def test_endpoints_of_a_token_may_be_any_text() -> None:
    for example in examples(300):
        with example as rng:
            text = "".join(chr(rng.choice((0, 10, 58, 91, 0x20AC, 0x1F600, 37))) for _ in range(20))
            endpoint = replace(TOKEN.endpoint, tcp=text, shm=text, loopback=text, ucx=text)
            token = replace(TOKEN, endpoint=endpoint)
            assert decode_token(encode_token(token)) == token
