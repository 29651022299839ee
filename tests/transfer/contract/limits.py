"""At the limits of the configuration, and one beyond: split, queued or refused, never wrong."""

from __future__ import annotations

import asyncio

import pytest

from tests.transfer.bulk_harness import pattern, soon, whole
from tests.transfer.contract.world import (
    BOTH_KINDS,
    IN_PIECES,
    Ends,
    World,
    filled,
    make_pair,
    small_read_works,
)
from transfer.errors import FrameInvalid, PeerUnreachable
from transfer.interface import Range

REQUEST_NBYTES = 16 * 1024
WINDOW_NBYTES = 64 * 1024
MAX_RANGES = 8
MAX_OPERATIONS = 3
SMALL_LIMITS = IN_PIECES | {
    "request_nbytes": REQUEST_NBYTES,
    "window_nbytes": WINDOW_NBYTES,
    "max_ranges_per_request": MAX_RANGES,
}


@BOTH_KINDS
@pytest.mark.parametrize("limit_nbytes", [REQUEST_NBYTES, WINDOW_NBYTES])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_operations_around_a_limit_in_bytes_move_every_byte(
    world: World, kind: str, limit_nbytes: int, beyond: int
) -> None:
    ends = Ends(await make_pair(world, **SMALL_LIMITS), kind, limit_nbytes + beyond)
    await ends.move()
    assert ends.target.view == ends.source.view


@BOTH_KINDS
async def test_an_operation_of_many_windows_moves_every_byte(world: World, kind: str) -> None:
    ends = Ends(await make_pair(world, **SMALL_LIMITS), kind, 9 * WINDOW_NBYTES + 5)
    await ends.move()
    assert ends.target.view == ends.source.view


@pytest.mark.parametrize("num_ranges", [MAX_RANGES, MAX_RANGES + 1, 10 * MAX_RANGES + 3])
async def test_operations_around_the_limit_in_ranges_move_every_byte(
    world: World, num_ranges: int
) -> None:
    owner, user = await make_pair(world, **SMALL_LIMITS)
    step, size = 64, 40
    remote, local = filled(owner, num_ranges * step, 1), filled(user, num_ranges * step, 2)
    ranges = [Range(i * step, (num_ranges - 1 - i) * step, size) for i in range(num_ranges)]
    model = bytearray(local.view)
    for there, here, nbytes in ranges:
        model[here : here + nbytes] = remote.view[there : there + nbytes]
    await user.read(remote.export("r"), ranges, into=local, deadline_s=soon())
    assert local.view == model
    assert user.counters().ranges_sent == num_ranges


async def test_an_operation_of_the_size_of_its_region_moves_and_one_byte_more_is_refused(
    world: World,
) -> None:
    owner, user = await make_pair(world)
    remote, local = filled(owner, 5000), user.allocate(5001)
    token = remote.export("rw")
    await user.read(token, whole(5000), into=local, deadline_s=soon())
    assert local.view[:5000] == remote.view
    with pytest.raises(FrameInvalid, match="5001"):
        await user.read(token, whole(5001), into=local, deadline_s=soon())
    with pytest.raises(FrameInvalid, match="5001"):
        await user.write(token, whole(5001), source=local, deadline_s=soon())
    assert remote.view == pattern(5000).data


@BOTH_KINDS
async def test_as_many_operations_as_allowed_wait_and_one_more_is_refused(
    world: World, kind: str
) -> None:
    """What is refused is refused at once, touches nothing, and does not disturb the others."""
    pair = await make_pair(world, max_operations_per_peer=MAX_OPERATIONS, **SMALL_LIMITS)
    ends = Ends(pair, kind, REQUEST_NBYTES)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote, passes=0)
    accepted = [ends.start() for _ in range(MAX_OPERATIONS)]
    await hold.reached()
    other = Ends(pair, kind, 64)
    before = bytes(other.target.view)
    with pytest.raises(PeerUnreachable, match=str(MAX_OPERATIONS)):
        await other.move()
    assert other.target.view == before
    hold.release()
    await asyncio.gather(*accepted)
    assert ends.target.view == ends.source.view
    await small_read_works(pair)
