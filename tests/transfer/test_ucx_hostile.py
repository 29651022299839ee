"""What an owner does with a ucx peer that says what it likes: nothing worse than hang up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.transfer.bulk_harness import Engines, checked_engines, pattern, soon, whole
from tests.transfer.ucx_support import NEEDS_UCX, RawPeer
from transfer.error_codes import error_of
from transfer.errors import DeadlineExceeded, FrameInvalid, RegionRevoked, Unauthorized
from transfer.region import HostRegion
from transfer.tcp_codec import pack_spans
from transfer.token import decode_token
from transfer.ucx_codec import MAX_CONTROL_NBYTES, Ask, Cancel, Done

pytestmark = NEEDS_UCX
NBYTES = 64 * 1024
PIECE_NBYTES = 16 * 1024
LONG_NBYTES = 32 << 20  # many fragments: it is seen before all of them have come


class Scene:
    """An owner, one region of it, and a raw peer that has met the owner."""

    def __init__(self, engines: Engines, region: HostRegion, raw: RawPeer, token: bytes) -> None:
        self.engines = engines
        self.region = region
        self.raw = raw
        self.token = token

    def ask(self, right: str, nbytes: int = NBYTES, number: int = 5) -> Ask:
        token = decode_token(self.token)
        spans = pack_spans([(0, nbytes)])
        return Ask(
            number,
            right,  # type: ignore[arg-type]
            token.region_id,
            token.capability,
            PIECE_NBYTES,
            True,
            False,
            spans,
        )

    async def refused_with(self, ask: Ask, kind: type[Exception]) -> None:
        self.raw.say(ask)
        done = await self.raw.answer()
        assert isinstance(done, Done)
        assert done.request == ask.request
        assert isinstance(error_of(done.status, done.text.encode()), kind), done

    async def still_serves(self) -> None:
        """An honest peer reads the region."""
        peer = await self.engines.make()
        local = peer.allocate(NBYTES)
        await peer.read(self.token, whole(NBYTES), into=local, deadline_s=soon())
        assert local.view == self.region.view


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with checked_engines("ucx") as engines:
        owner = await engines.make()
        region = owner.allocate(NBYTES)
        region.view[:] = pattern(NBYTES).data
        token = region.export("rw")
        raw = await RawPeer.meet(decode_token(token).endpoint)
        try:
            yield Scene(engines, region, raw, token)
        finally:
            raw.close()


async def test_a_request_gets_its_pieces_and_then_one_answer() -> None:
    async with scene() as it:
        it.raw.say(it.ask("r"))
        for index in range(NBYTES // PIECE_NBYTES):
            tag, data = await it.raw.hear()
            assert (tag.request, tag.piece) == (5, index)
            assert data == it.region.view[index * PIECE_NBYTES : (index + 1) * PIECE_NBYTES]
        assert await it.raw.answer() == Done(5)


async def test_what_is_not_granted_is_refused_and_the_connection_stays() -> None:
    async with scene() as it:
        ask = it.ask("r")
        replace = msgspec.structs.replace
        await it.refused_with(replace(ask, capability=bytes(16)), Unauthorized)
        await it.refused_with(replace(ask, region_id=1 << 40), Unauthorized)
        await it.refused_with(replace(ask, spans=pack_spans([(1, NBYTES)])), FrameInvalid)
        await it.refused_with(replace(ask, spans=pack_spans([(0, 0)])), FrameInvalid)
        await it.refused_with(replace(ask, spans=b"short"), FrameInvalid)
        await it.refused_with(replace(ask, piece_nbytes=1), FrameInvalid)
        await it.refused_with(replace(ask, piece_nbytes=1 << 40), FrameInvalid)
        it.region.revoke()
        await it.refused_with(ask, RegionRevoked)


async def test_a_write_that_is_cancelled_half_way_is_answered_and_its_late_pieces_dropped() -> None:
    async with scene() as it:
        it.raw.say(it.ask("w"))
        await it.raw.settled(it.raw.send(b"a" * PIECE_NBYTES, 5, 0))
        it.raw.say(Cancel(5))
        late = it.raw.send(b"b" * PIECE_NBYTES, 5, 1)
        done = await it.raw.answer()
        assert isinstance(done, Done)
        assert isinstance(error_of(done.status, b""), DeadlineExceeded)
        await it.raw.settled(late)
        assert it.region.view[PIECE_NBYTES:] == pattern(NBYTES).data[PIECE_NBYTES:]
        await it.still_serves()


async def test_messages_under_a_key_that_is_not_ours_are_dropped() -> None:
    """Whoever finds the worker without having met us knows no key."""
    async with scene() as it:
        before = bytes(it.region.view)
        it.raw.say(it.ask("w"))
        for number in (0, 5):
            await it.raw.settled(it.raw.send(b"x" * PIECE_NBYTES, number, 0, it.raw.key ^ 1))
        it.raw.say(Cancel(5))
        assert isinstance(await it.raw.answer(), Done)
        assert it.region.view == before


async def test_long_messages_that_are_dropped_in_fragments_cut_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To UCX each of them is one that was cut short, and it says so when the last has come."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
    async with scene() as it:
        for number in range(3):
            await it.raw.settled(it.raw.send(bytes(LONG_NBYTES), 9, number))  # no such request
        it.raw.say(it.ask("w"))
        it.raw.say(Cancel(5))
        assert isinstance(await it.raw.answer(), Done)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x93\x01", b"x" * (MAX_CONTROL_NBYTES + 1), msgspec.msgpack.encode([9, 1])],
    ids=["empty", "garbage", "cut", "too long", "unknown"],
)
async def test_what_is_no_control_message_ends_the_connection_and_no_other(data: bytes) -> None:
    async with scene() as it:
        it.raw.send(data)
        await it.raw.hung_up()
        await it.still_serves()


async def test_a_message_of_the_wrong_side_ends_the_connection() -> None:
    async with scene() as it:
        it.raw.say(Done(5))
        await it.raw.hung_up()
        await it.still_serves()


async def test_a_number_in_use_ends_the_connection() -> None:
    async with scene() as it:
        it.raw.say(it.ask("w"))
        it.raw.say(it.ask("w"))
        await it.raw.hung_up()
        await it.still_serves()


@pytest.mark.parametrize(
    ("piece", "nbytes"),
    [(4, PIECE_NBYTES), (0, PIECE_NBYTES + 1), (0, PIECE_NBYTES - 1)],
    ids=["no such piece", "too long", "too short"],
)
async def test_a_piece_that_does_not_fit_touches_nothing_and_ends_the_connection(
    piece: int, nbytes: int
) -> None:
    async with scene() as it:
        before = bytes(it.region.view)
        it.raw.say(it.ask("w"))
        it.raw.send(b"x" * nbytes, 5, piece)
        await it.raw.hung_up()
        assert it.region.view == before
        await it.still_serves()


async def test_a_piece_that_comes_twice_ends_the_connection() -> None:
    async with scene() as it:
        it.raw.say(it.ask("w"))
        for _ in range(2):
            it.raw.send(b"x" * PIECE_NBYTES, 5, 0)
        await it.raw.hung_up()
        await it.still_serves()
