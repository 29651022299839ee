"""Tokens are capabilities: rights, bounds, forgery, revocation. What is refused touches nothing."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
from msgspec.structs import replace

from tests.transfer.bulk_harness import pattern, soon, until, whole
from tests.transfer.contract.world import (
    BOTH_KINDS,
    IN_PIECES,
    NUM_PIECES,
    PIECE_NBYTES,
    Ends,
    Trait,
    World,
    filled,
    make_pair,
    needs,
    small_read_works,
)
from transfer.errors import FrameInvalid, RegionRevoked, Unauthorized
from transfer.interface import Range
from transfer.token import decode_token, encode_token


async def test_ranges_outside_negative_or_overlapping_are_refused(world: World) -> None:
    owner, user = await make_pair(world)
    token, local = filled(owner, 100).export("rw"), user.allocate(100)
    wrong = [
        [Range(50, 0, 51)],
        [Range(0, 50, 51)],
        [Range(-1, 0, 1)],
        [Range(0, -1, 1)],
        [Range(0, 0, -1)],
        [Range(1 << 64, 0, 1)],
        [Range(0, 0, 1 << 64)],
        [Range(0, 0, 10), Range(20, 9, 10)],
    ]
    for ranges in wrong:
        with pytest.raises(FrameInvalid):
            await user.read(token, ranges, into=local, deadline_s=soon())
    overlapping = [Range(0, 0, 10), Range(9, 20, 10)]
    with pytest.raises(FrameInvalid):
        await user.write(token, overlapping, source=local, deadline_s=soon())
    assert local.view == bytes(100)


async def test_the_owner_checks_bounds_that_a_forged_token_denies(world: World) -> None:
    owner, user = await make_pair(world)
    segment = filled(owner, 4096)
    region = owner.register(segment.view[1000:1100])  # with memory of others on both sides
    forged = encode_token(replace(decode_token(region.export("rw")), nbytes=3000))
    local = user.allocate(3000)
    for ranges in ([Range(0, 0, 101)], [Range(999, 0, 1)], [Range(100, 0, 1)]):
        with pytest.raises(FrameInvalid):
            await user.read(forged, ranges, into=local, deadline_s=soon())
        with pytest.raises(FrameInvalid):
            await user.write(forged, ranges, source=local, deadline_s=soon())
    assert local.view == bytes(3000)
    assert segment.view == pattern(4096).data


@pytest.mark.parametrize("change", ["capability", "region_id", "rights"])
async def test_a_forged_token_is_refused_and_touches_nothing(world: World, change: str) -> None:
    owner, user = await make_pair(world)
    region = filled(owner, 64)
    token = decode_token(region.export("r"))
    values = {"capability": bytes(16), "region_id": 1 << 40, "rights": "rw"}
    forged = encode_token(replace(token, **{change: values[change]}))
    local = user.allocate(64)
    with pytest.raises(Unauthorized):
        await user.write(forged, whole(64), source=local, deadline_s=soon())
    if change != "rights":
        with pytest.raises(Unauthorized):
            await user.read(forged, whole(64), into=local, deadline_s=soon())
    assert region.view == pattern(64).data
    assert local.view == bytes(64)


async def test_every_bit_of_a_capability_counts(world: World) -> None:
    owner, user = await make_pair(world)
    token = decode_token(filled(owner, 64).export("rw"))
    local = user.allocate(64)
    for bit in range(0, 128, 9):
        capability = bytearray(token.capability)
        capability[bit // 8] ^= 1 << bit % 8
        forged = encode_token(replace(token, capability=bytes(capability)))
        with pytest.raises(Unauthorized):
            await user.read(forged, whole(64), into=local, deadline_s=soon())
    assert local.view == bytes(64)


async def test_the_capability_of_one_region_opens_no_other(world: World) -> None:
    owner, user = await make_pair(world)
    one, two = filled(owner, 64, 1), filled(owner, 64, 2)
    first, second = decode_token(one.export("rw")), decode_token(two.export("rw"))
    assert first.capability != second.capability
    local = user.allocate(64)
    mixed = encode_token(replace(first, region_id=second.region_id))
    with pytest.raises(Unauthorized):
        await user.read(mixed, whole(64), into=local, deadline_s=soon())
    assert local.view == bytes(64)


async def test_rights_are_kept_apart(world: World) -> None:
    owner, user = await make_pair(world)
    region, local = filled(owner, 64), user.allocate(64)
    with pytest.raises(Unauthorized):
        await user.write(region.export("r"), whole(64), source=local, deadline_s=soon())
    with pytest.raises(Unauthorized):
        await user.read(region.export("w"), whole(64), into=local, deadline_s=soon())
    assert region.view == pattern(64).data
    assert local.view == bytes(64)


async def test_bytes_that_are_no_token_are_refused(world: World) -> None:
    user = await world.make()
    local = user.allocate(8)
    token = user.allocate(8).export("r")
    future = encode_token(replace(decode_token(token), version=99))
    for data in (b"", b"\x00", b"x" * 5000, token[:-3], secrets.token_bytes(90), future):
        with pytest.raises(FrameInvalid):
            await user.read(data, whole(8), into=local, deadline_s=soon())


async def test_a_revoked_region_is_refused_and_revoking_twice_is_fine(world: World) -> None:
    owner, user = await make_pair(world)
    region, local = filled(owner, 64), user.allocate(64)
    token = region.export("rw")
    await user.read(token, whole(64), into=local, deadline_s=soon())
    region.revoke()
    region.revoke()
    later = owner.allocate(64)  # takes the slot of the old one
    later.export("rw")
    for _ in range(2):
        with pytest.raises(RegionRevoked):
            await user.read(token, whole(64), into=local, deadline_s=soon())
        with pytest.raises(RegionRevoked):
            await user.write(token, whole(64), source=local, deadline_s=soon())
    assert later.view == bytes(64)
    with pytest.raises(RegionRevoked):
        region.export("r")


async def test_a_local_region_that_is_revoked_or_foreign_is_refused(world: World) -> None:
    owner, user = await make_pair(world)
    token, local = filled(owner, 64).export("r"), user.allocate(64)
    local.revoke()
    with pytest.raises(RegionRevoked):
        await user.read(token, whole(64), into=local, deadline_s=soon())
    with pytest.raises(FrameInvalid):
        await user.read(token, whole(64), into=owner.allocate(64), deadline_s=soon())


@BOTH_KINDS
async def test_revoking_during_an_operation_leaves_the_memory_quiet(
    world: World, kind: str
) -> None:
    """The owner goes on to use the memory for something else, while the operation is half-way."""
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    before = ends.last_piece(ends.target)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    ends.remote.revoke()
    ends.remote.view[:] = other = pattern(ends.nbytes, 99).tobytes()
    hold.release()
    with pytest.raises(RegionRevoked):
        await task
    await small_read_works((ends.owner, ends.user))
    assert ends.remote.view == other, "a byte of the peer came after the revocation"
    if kind == "read":
        assert ends.last_piece(ends.local) == before, "bytes of the next owner were read"


@BOTH_KINDS
async def test_memory_that_is_revoked_and_reused_at_once_serves_only_its_new_region(
    world: World, kind: str
) -> None:
    """The same bytes under a new region: the old operation fails, one with the new token works."""
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    ends.remote.revoke()
    reused = ends.owner.register(ends.remote.view)
    reused.view[:] = other = pattern(ends.nbytes, 99).tobytes()
    token, into = reused.export("r"), ends.user.allocate(ends.nbytes)
    hold.release()
    with pytest.raises(RegionRevoked):
        await task
    await ends.user.read(token, whole(ends.nbytes), into=into, deadline_s=soon())
    assert into.view == other
    assert reused.view == other


async def test_a_read_whose_memory_is_reused_under_its_last_piece_never_succeeds_with_that(
    world: World,
) -> None:
    """The owner revokes and reuses the memory while the last piece is being copied."""
    ends = Ends(await make_pair(world, **IN_PIECES), "read")
    original, other = bytes(ends.remote.view), pattern(ends.nbytes, 99).tobytes()
    await ends.connect()
    hold = world.hold(ends.user, ends.remote, passes=NUM_PIECES - 1, inside=True)
    task = ends.start()
    await hold.reached()

    def revoke_and_reuse() -> None:
        ends.remote.revoke()  # waits for the piece, where it can
        ends.remote.view[:] = other

    reusing = asyncio.get_running_loop().run_in_executor(None, revoke_and_reuse)
    if not world.revoking_waits:
        await reusing
    else:
        await until(lambda: ends.remote.revoked)
    hold.release()
    await reusing
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if outcome is None and world.revoking_waits:
        assert ends.local.view == original
    else:
        assert isinstance(outcome, RegionRevoked), outcome


async def test_revoking_one_region_disturbs_no_operation_on_another(world: World) -> None:
    pair = await make_pair(world, **IN_PIECES)
    ends, neighbour = Ends(pair, "read"), filled(pair.owner, PIECE_NBYTES)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    neighbour.revoke()
    hold.release()
    await task
    assert ends.local.view == ends.remote.view


@pytest.mark.parametrize("secret", [{"cluster_secret": "wrong"}, {}])
@needs(Trait.SECRET)
async def test_a_peer_with_another_secret_or_none_is_unauthorized(
    world: World, secret: dict[str, Any]
) -> None:
    owner = await world.make(cluster_secret="right")
    friend, stranger = await world.make(cluster_secret="right"), await world.make(**secret)
    await small_read_works((owner, friend))
    for pair in ((owner, stranger), (stranger, friend)):
        with pytest.raises(Unauthorized):
            await small_read_works(pair)
    await small_read_works((owner, friend))
