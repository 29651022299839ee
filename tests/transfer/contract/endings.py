"""Deadlines and cancellation: before, during, after. Each operation ends once, and is then quiet.

PITFALLS of this kind of system: memory is freed by a timeout or an abort and reused while bytes are
still on their way, in either direction.
"""

from __future__ import annotations

import asyncio
import math
import random
import weakref
from typing import Any

import numpy as np
import pytest

from tests.transfer.bulk_harness import (
    LIMIT_S,
    MIB,
    old_objects_set_aside,
    soon,
    until_freed,
    whole,
)
from tests.transfer.contract.world import (
    BOTH_KINDS,
    HELD_NBYTES,
    IN_PIECES,
    Ends,
    Hold,
    Pair,
    World,
    assert_nothing_reused,
    filled,
    make_pair,
    small_read_works,
)
from transfer.errors import DeadlineExceeded
from transfer.interface import deadline_after

SHORT_S = 0.1
ENDINGS = pytest.mark.parametrize("ending", ["deadline", "cancel"])
GARBAGE = 0xEE
BEYOND_ALL_BUFFERS_NBYTES = 12 * MIB  # what was sent already cannot show that more is read


@BOTH_KINDS
@pytest.mark.parametrize("late_s", [0.0, 1e-9, 5.0, math.nan])
async def test_a_deadline_that_has_passed_moves_nothing(
    world: World, kind: str, late_s: float
) -> None:
    ends = Ends(await make_pair(world), kind)
    before = bytes(ends.target.view)
    with pytest.raises(DeadlineExceeded):
        await ends.move(deadline_after(-late_s))
    assert ends.target.view == before
    await ends.move()
    assert ends.target.view == ends.source.view


async def stop_half_way(ends: Ends, hold: Hold, ending: str) -> None:
    """Start the operation and end it while it stands still behind its first piece."""
    task = ends.start(deadline_after(SHORT_S) if ending == "deadline" else None)
    if ending == "deadline":
        with pytest.raises(DeadlineExceeded):
            await task
        return
    await hold.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@BOTH_KINDS
@ENDINGS
async def test_an_operation_that_ended_half_way_does_not_touch_its_memory_again(
    world: World, kind: str, ending: str
) -> None:
    """The local memory is reused at once, while the peer is still about to move the rest: no late
    byte lands in it, and none of its new bytes reaches the peer."""
    ends = Ends(await make_pair(world, **IN_PIECES), kind, BEYOND_ALL_BUFFERS_NBYTES)
    sent, before = bytes(ends.source.view), bytes(ends.target.view)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    await stop_half_way(ends, hold, ending)
    if kind == "read":
        assert ends.local.view[-1] == before[-1], "it had moved everything: nothing was tested"
    ends.local.view[:] = reused = bytes([GARBAGE]) * ends.nbytes
    hold.release()
    await small_read_works((ends.owner, ends.user))
    assert ends.local.view == reused
    if kind == "write":
        assert_nothing_reused(ends.remote.view, before, sent)


@BOTH_KINDS
@ENDINGS
async def test_memory_of_an_operation_that_ended_half_way_serves_the_next_one(
    world: World, kind: str, ending: str
) -> None:
    """What a decode node does after an abort: the same pages, for another request, at once."""
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    await stop_half_way(ends, hold, ending)
    token, other = filled(ends.owner, HELD_NBYTES // 2, 77), whole(HELD_NBYTES // 2)
    read = asyncio.get_running_loop().create_task(
        ends.user.read(token.export("r"), other, into=ends.local, deadline_s=soon())
    )
    hold.release()
    await read
    assert ends.local.view[: HELD_NBYTES // 2] == token.view
    await small_read_works((ends.owner, ends.user))
    assert ends.local.view[: HELD_NBYTES // 2] == token.view


@BOTH_KINDS
async def test_a_deadline_is_kept_while_the_peer_is_slow(world: World, kind: str) -> None:
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    with pytest.raises(DeadlineExceeded):
        await ends.move(deadline_after(SHORT_S))
    took_s = loop.time() - start_s
    hold.release()
    assert SHORT_S <= took_s < LIMIT_S / 4, "not at the deadline, whatever the machine does"
    await ends.move()
    assert ends.target.view == ends.source.view


async def test_cancelling_before_the_first_step_and_after_the_end_is_harmless(
    world: World,
) -> None:
    ends = Ends(await make_pair(world), "read", 4 * MIB)
    before = bytes(ends.local.view)
    task = ends.start()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends.local.view == before
    task = ends.start()
    await task
    assert not task.cancel()
    assert ends.local.view == ends.remote.view


async def test_cancelling_at_any_moment_never_touches_the_destination_later(
    world: World,
) -> None:
    nbytes, rng = 300_000, random.Random(11)
    pair = await make_pair(world, **IN_PIECES)
    for _ in range(25):
        ends = Ends(pair, "read", nbytes)
        task = ends.start()
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        before = bytes(ends.local.view)
        if not task.cancelled():
            assert before == ends.remote.view
        await small_read_works(pair, nbytes)
        assert ends.local.view == before
        ends.local.revoke()
        ends.remote.revoke()


async def test_cancelling_one_of_many_disturbs_no_other(world: World) -> None:
    pair = await make_pair(world, **IN_PIECES)
    many = [Ends(pair, kind, HELD_NBYTES + i) for i, kind in enumerate(["read", "write"] * 4)]
    await many[0].connect()
    hold = world.hold(pair.user, many[0].remote)
    doomed = many[0].start()
    await hold.reached()
    others = [ends.start() for ends in many[1:]]
    doomed.cancel()
    await asyncio.wait([doomed])
    hold.release()
    await asyncio.gather(*others)
    assert doomed.cancelled()
    for ends in many[1:]:
        assert ends.target.view == ends.source.view


@BOTH_KINDS
async def test_ten_operations_that_ended_half_way_leave_the_pair_as_it_was(
    world: World, kind: str
) -> None:
    """Neither window nor credits leak away, also while the peer is still held up by a read."""
    settings = {"window_nbytes": 2 * HELD_NBYTES, "max_operations_per_peer": 2}
    pair = await make_pair(world, **IN_PIECES, **settings)
    ends = Ends(pair, kind)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    for _ in range(10):
        await stop_half_way(ends, hold, "cancel")
        if kind == "write":
            hold.release()  # bytes that were sent before must be taken from the wire
        await small_read_works(pair, 2 * HELD_NBYTES + 1)
        if kind == "write":
            hold = world.hold(ends.user, ends.remote)
    hold.release()
    both = Ends(pair, kind), Ends(pair, kind)
    await asyncio.gather(*(each.move() for each in both))
    assert all(each.target.view == each.source.view for each in both)


@ENDINGS
async def test_a_dead_operation_lets_go_of_its_memory_without_a_new_one(
    world: World, ending: str
) -> None:
    """Nothing has to ask for the clean-up: no further request is made, on either side."""
    with old_objects_set_aside():
        pair = await make_pair(world, **IN_PIECES)
        await Ends(pair, "read", 8).move()
        await until_freed(*await die_half_way(world, pair, ending))


async def die_half_way(world: World, pair: Pair, ending: str) -> list[weakref.ref[Any]]:
    """Return the memory of a read that was ended while it stood still, and its regions revoked."""
    here, there = np.zeros(HELD_NBYTES, np.uint8), np.zeros(HELD_NBYTES, np.uint8)
    ends = Ends(pair, "read")
    ends.local = pair.user.register(here)
    if world.serves_registered_memory:
        ends.remote = pair.owner.register(there)
        ends.token = ends.remote.export("r")
    hold = world.hold(ends.user, ends.remote)
    await stop_half_way(ends, hold, ending)
    ends.local.revoke()
    ends.remote.revoke()
    hold.release()
    return [weakref.ref(here), weakref.ref(there)]
