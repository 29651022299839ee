"""A tcp peer that says anything: to the server as a client, to the client as a server.

Whatever it says, the engine goes on serving its honest peers; nothing escapes, nothing is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.transfer.bulk_harness import MIB, checked_engines, pattern, soon, whole
from tests.transfer.fuzzing import (
    EXAMPLE_LIMIT_S,
    NESTED,
    allocates_at_most,
    descriptors_return_to,
    examples,
    mutated,
    no_alarm,
    num_descriptors,
    shuffled,
)
from tests.transfer.raw_tcp import INCARNATION, RawClient, RawServer, lend, request_frame
from transfer.engine import TransferEngine
from transfer.errors import (
    DeadlineExceeded,
    FrameInvalid,
    PeerClosed,
    PeerLost,
    TransferError,
    Unauthorized,
)
from transfer.interface import Range, deadline_after
from transfer.tcp_codec import (
    MAX_CONTROL_NBYTES,
    MAX_DATA_NBYTES,
    TCP_PROTOCOL_VERSION,
    Header,
    HelloBody,
    Op,
    ProofBody,
    RequestBody,
    control_frame,
    decode_body,
    done_frame,
    encode_header,
)
from transfer.tcp_handshake import ClientHandshake

SECRET = "a cluster secret of some length"
# What examples may make an engine hold, one after the other: frames, scratch, log records.
ENGINE_NBYTES = 8 * MIB
ASKED_NBYTES = 256


async def small_read_works(owner: TransferEngine, user: TransferEngine) -> None:
    region, local = owner.allocate(1000), user.allocate(1000)
    region.view[:] = pattern(1000).data
    await user.read(region.export("r"), whole(1000), into=local, deadline_s=soon())
    assert local.view == region.view
    region.revoke()
    local.revoke()


# ── the server, fed by a client ─────────────────────────────────────────────────────────────────


async def attack(rng: random.Random, raw: RawClient, secret: bytes, frames: list[bytes]) -> None:
    """Send a broken conversation, from the first byte or after a correct hello, and leave."""
    hello = ClientHandshake(secret, "raw", "nobody", b"n" * 16).first()
    if rng.random() < 0.4:
        proof = control_frame(Op.PROOF, body=ProofBody(rng.randbytes(32)))
        frames = [hello, proof, *frames]
    else:
        await raw.hello(secret)
    await raw.send(b"".join(shuffled(rng, frames)))
    match rng.randrange(3):
        case 0:
            raw.reset()
        case 1:
            raw.end_sending()
            await raw.until_cut_off()
        case _:
            pass  # simply gone


@pytest.mark.parametrize("secret", ["", SECRET])
async def test_a_server_survives_any_client(secret: str) -> None:
    settings: dict[str, Any] = {"cluster_secret": secret or None}
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(**settings), await engines.make(**settings)
        open_, guarded = lend(owner, 4096, 1), lend(owner, 4096, 7)
        token = open_.export("rw")
        frames = [
            request_frame(Op.READ, token, [(0, 1000), (2000, 96)], 1),
            request_frame(Op.WRITE, token, [(0, 64)], 2),
            encode_header(Op.DATA, 2, 64) + b"w" * 64,
            request_frame(Op.READ, guarded.export("r")[:-20] + token[-20:], [(0, 10)], 3),
            control_frame(Op.CANCEL, 1),
            request_frame(Op.READ, token, [(1 << 63, 1)], 4),
            control_frame(Op.READ, 5, NESTED),
            control_frame(Op.GOODBYE),
        ]
        await small_read_works(owner, user)
        before = num_descriptors()
        with no_alarm(), allocates_at_most(ENGINE_NBYTES):
            for example in examples(120):
                with example as rng:
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        async with RawClient(owner) as raw:
                            with suppress(ConnectionError):
                                await attack(rng, raw, secret.encode(), frames)
                        await small_read_works(owner, user)
                    assert guarded.view == bytes([7]) * 4096
        await descriptors_return_to(before)


# ── the client, answered by a server ────────────────────────────────────────────────────────────

Writer = asyncio.StreamWriter
Answers = Callable[[Header, RequestBody], list[bytes]]


def data(request_id: int, nbytes: int) -> bytes:
    return encode_header(Op.DATA, request_id, nbytes) + b"d" * nbytes


def whole_answer(header: Header) -> list[bytes]:
    if header.op is Op.WRITE:
        return [done_frame(header.request_id, None)]
    return [data(header.request_id, ASKED_NBYTES), done_frame(header.request_id, None)]


BROKEN_READS: dict[str, tuple[Answers, type[TransferError]]] = {
    "data of another request": (lambda h, _: [data(h.request_id + 7, 16)], FrameInvalid),
    "done before any byte": (lambda h, _: [done_frame(h.request_id, None)], FrameInvalid),
    "done before the last byte": (
        lambda h, _: [data(h.request_id, ASKED_NBYTES - 1), done_frame(h.request_id, None)],
        FrameInvalid,
    ),
    "more than was asked for": (lambda h, _: [data(h.request_id, ASKED_NBYTES + 1)], FrameInvalid),
    "a byte after the last": (
        lambda h, _: [data(h.request_id, ASKED_NBYTES), data(h.request_id, 1)],
        FrameInvalid,
    ),
    "the longest data": (
        lambda h, _: [encode_header(Op.DATA, h.request_id, MAX_DATA_NBYTES)],
        FrameInvalid,
    ),
    "an impossible length": (
        lambda h, _: [encode_header(Op.DONE, h.request_id, 1 << 63)],
        FrameInvalid,
    ),
    "empty data": (lambda h, _: [encode_header(Op.DATA, h.request_id, 0)], FrameInvalid),
    "an unknown status": (
        lambda h, _: [control_frame(Op.DONE, h.request_id, b"?", 60_000)],
        FrameInvalid,
    ),
    "a reason that is no text": (
        lambda h, _: [control_frame(Op.DONE, h.request_id, b"\xff" * MAX_CONTROL_NBYTES, 2)],
        Unauthorized,
    ),
    "another hello": (lambda _h, _b: [control_frame(Op.HELLO, 0, NESTED)], FrameInvalid),
    "a question": (lambda h, _: [control_frame(Op.READ, h.request_id)], FrameInvalid),
    "http": (lambda _h, _b: [b"HTTP/1.1 400 Bad Request\r\n\r\n"], FrameInvalid),
    "a goodbye": (lambda _h, _b: [control_frame(Op.GOODBYE), b""], PeerClosed),
    "half of the data, then the end": (lambda h, _: [data(h.request_id, 99)[:60], b""], PeerLost),
    "half of a header, then the end": (lambda h, _: [data(h.request_id, 9)[:11], b""], PeerLost),
}


def server(answers: Answers, **options: Any) -> RawServer:
    """Return a server that answers each request with ``answers``; an empty piece ends it."""

    async def reply(
        _: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes
    ) -> None:
        if header.op not in (Op.READ, Op.WRITE):
            return
        for piece in answers(header, decode_body(body, RequestBody)):
            if not piece:
                writer.close()
            else:
                writer.write(piece)

    return RawServer(reply, **options)


async def ask(user: TransferEngine, token: bytes, deadline_s: float) -> bytes:
    """Read the first bytes into the middle of a region; return it, guards checked."""
    local = lend(user, 3 * ASKED_NBYTES, 9)
    ranges = [Range(0, ASKED_NBYTES, ASKED_NBYTES)]
    try:
        await user.read(token, ranges, into=local, deadline_s=deadline_s)
    finally:
        held = bytes(local.view)
        local.revoke()
        guard = b"\x09" * ASKED_NBYTES
        assert held[:ASKED_NBYTES] == held[2 * ASKED_NBYTES :] == guard, "wrote beyond its range"
    return held[ASKED_NBYTES : 2 * ASKED_NBYTES]


@pytest.mark.parametrize("name", BROKEN_READS)
async def test_a_reader_refuses_what_it_did_not_ask_for(name: str) -> None:
    answers, expected = BROKEN_READS[name]
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        with no_alarm(), allocates_at_most(ENGINE_NBYTES):
            async with server(answers) as evil:
                with pytest.raises(expected) as caught:
                    await ask(user, evil.token(4096), soon())
                assert len(str(caught.value)) < 2000
                await small_read_works(owner, user)


async def test_a_writer_refuses_done_before_its_bytes_and_data_it_did_not_ask_for() -> None:
    def early(header: Header, _: RequestBody) -> list[bytes]:
        return [done_frame(header.request_id, None)] if header.op is Op.WRITE else []

    def backwards(header: Header, _: RequestBody) -> list[bytes]:
        return [data(header.request_id, 8)]

    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        local = lend(user, 64 * MIB, 3)
        with no_alarm():
            for answers in (early, backwards):
                async with server(answers) as evil:
                    with pytest.raises(FrameInvalid):
                        await user.write(
                            evil.token(64 * MIB), whole(64 * MIB), source=local, deadline_s=soon()
                        )
                    await small_read_works(owner, user)


async def test_answers_in_another_order_are_taken_by_their_ids() -> None:
    kept: list[Header] = []

    def in_pairs_backwards(header: Header, _: RequestBody) -> list[bytes]:
        kept.append(header)
        if len(kept) < 2:
            return []
        late, early = kept
        return [*whole_answer(early), *whole_answer(late), *whole_answer(late)]

    async with checked_engines("tcp") as engines:
        user = await engines.make()
        async with server(in_pairs_backwards) as evil:
            token = evil.token(4096)
            first, second = await asyncio.gather(ask(user, token, soon()), ask(user, token, soon()))
            assert first == second == b"d" * ASKED_NBYTES


async def test_silence_after_the_hello_ends_with_the_deadline() -> None:
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(), await engines.make()
        async with server(lambda _h, _b: []) as evil:
            for _ in range(3):
                with pytest.raises(DeadlineExceeded):
                    await ask(user, evil.token(4096), deadline_after(0.05))
            await small_read_works(owner, user)


@pytest.mark.parametrize("secret", ["", SECRET])
async def test_a_client_survives_any_server(secret: str) -> None:
    settings: dict[str, Any] = {"cluster_secret": secret or None}
    async with checked_engines("tcp") as engines:
        owner, user = await engines.make(**settings), await engines.make(**settings)
        await small_read_works(owner, user)
        before = num_descriptors()
        with no_alarm(), allocates_at_most(ENGINE_NBYTES):
            for example in examples(20):
                with example as rng:
                    async with asyncio.timeout(EXAMPLE_LIMIT_S):
                        await meet(rng, user, secret.encode())
                        await small_read_works(owner, user)
        await descriptors_return_to(before)


async def meet(rng: random.Random, user: TransferEngine, secret: bytes) -> None:
    """Let ``user`` read from a server that misbehaves, in the hello or after it."""

    def answers(header: Header, _: RequestBody) -> list[bytes]:
        known = rng.choice(list(BROKEN_READS.values()))[0](header, _)
        frames = [*whole_answer(header), *known]
        return [piece or control_frame(Op.GOODBYE) for piece in shuffled(rng, frames)] + [b""]

    async def reply(
        _: RawServer, writer: asyncio.StreamWriter, header: Header, body: bytes
    ) -> None:
        raise AssertionError("a greeting that is no handshake was believed")

    if rng.random() < 0.4:
        name, proof = rng.choice((INCARNATION, "x")), rng.randbytes(32)
        hello = HelloBody(TCP_PROTOCOL_VERSION, name, rng.randbytes(16), "", proof)
        frames = [control_frame(Op.HELLO, body=hello), control_frame(Op.READY)]
        evil = RawServer(reply, greeting=mutated(rng, b"".join(shuffled(rng, frames))))
    else:
        evil = server(answers, secret=secret)
    async with evil:
        with suppress(TransferError):
            await ask(user, evil.token(4096), deadline_after(0.2))
