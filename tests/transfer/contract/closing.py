"""Peers that close, abort, break off and return, and what their operations end with."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.transfer.bulk_harness import soon, whole
from tests.transfer.contract.world import (
    BOTH_KINDS,
    GONE,
    IN_PIECES,
    Ends,
    Engine,
    Pair,
    World,
    assert_nothing_reused,
    becomes_stale,
    filled,
    make_pair,
    small_read_works,
)
from transfer.errors import PeerClosed, PeerLost

HOWS = pytest.mark.parametrize("how", ["close", "abort"])


async def end(engine: Engine, how: str) -> None:
    """Close the engine in order, or stop it at once."""
    if how == "close":
        await engine.close()
    else:
        engine.abort()


@HOWS
async def test_a_peer_that_is_gone_is_gone_and_its_own_calls_say_closed(
    world: World, how: str
) -> None:
    owner, user = await make_pair(world)
    region, local = filled(owner, 64), user.allocate(64)
    token = region.export("r")
    await user.read(token, whole(64), into=local, deadline_s=soon())
    await end(owner, how)
    for _ in range(2):
        with pytest.raises(GONE):
            await user.read(token, whole(64), into=local, deadline_s=soon())
    with pytest.raises(PeerClosed):
        owner.allocate(64)
    with pytest.raises(PeerClosed):
        owner.register(bytearray(8))
    with pytest.raises(PeerClosed):
        await owner.read(token, whole(64), into=region, deadline_s=soon())


@HOWS
@BOTH_KINDS
async def test_an_owner_that_ends_during_an_operation_ends_it(
    world: World, how: str, kind: str
) -> None:
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    before = ends.last_piece(ends.target)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    await end(ends.owner, how)
    ends.remote.view[:] = reused = b"\xee" * ends.nbytes
    hold.release()
    with pytest.raises(PeerClosed if how == "close" else PeerLost):
        await task
    assert ends.remote.view == reused
    if kind == "read":
        assert ends.last_piece(ends.local) == before


@HOWS
@BOTH_KINDS
async def test_a_user_that_ends_during_an_operation_ends_it(
    world: World, how: str, kind: str
) -> None:
    """After ``close`` or ``abort`` has returned, no memory of that engine is touched."""
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    sent, before = bytes(ends.source.view), bytes(ends.target.view)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    await end(ends.user, how)
    ends.local.view[:] = reused = b"\xee" * ends.nbytes
    hold.release()
    with pytest.raises(PeerClosed):
        await task
    await small_read_works(Pair(ends.owner, await world.make()))
    assert ends.local.view == reused
    if kind == "write":
        assert_nothing_reused(ends.remote.view, before, sent)


@HOWS
async def test_every_operation_under_way_ends_exactly_once(world: World, how: str) -> None:
    pair = await make_pair(world, **IN_PIECES)
    held = Ends(pair, "read")
    await held.connect()
    hold = world.hold(pair.user, held.remote, passes=0)
    tasks = [held.start() for _ in range(5)]
    await hold.reached()
    await world.asked(pair.user)
    await end(pair.owner, how)
    hold.release()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, PeerClosed | PeerLost) for each in outcomes), outcomes
    counted = pair.user.counters()
    assert (counted.operations, counted.errors) == (6, 5)


async def test_a_restart_on_the_same_address_makes_old_tokens_stale(world: World) -> None:
    first, user = await make_pair(world)
    region, local = filled(first, 64), filled(user, 64, 2)
    token = region.export("rw")
    await user.write(token, whole(64), source=local, deadline_s=soon())
    await first.close()
    second = await world.restart(first)
    region = second.allocate(64)
    fresh = region.export("rw")
    every, deadline_s = whole(64), soon()
    await becomes_stale(lambda: user.write(token, every, source=local, deadline_s=deadline_s))
    await becomes_stale(lambda: user.read(token, every, into=local, deadline_s=deadline_s))
    assert region.view == bytes(64)
    await user.write(fresh, whole(64), source=local, deadline_s=soon())
    assert region.view == local.view


@HOWS
async def test_twenty_restarts_on_one_address_leave_no_old_state(world: World, how: str) -> None:
    owner, user = await make_pair(world)
    old = [owner.allocate(64).export("rw")]
    for _ in range(20):
        await end(owner, how)
        owner = await world.restart(owner)
        await small_read_works(Pair(owner, user))
        old.append(owner.allocate(64).export("rw"))
    local = user.allocate(64)
    for token in old[:-1]:
        move = partial(user.read, token, whole(64), into=local, deadline_s=soon())
        await becomes_stale(move)
    await user.read(old[-1], whole(64), into=local, deadline_s=soon())


async def test_a_broken_connection_is_made_again(world: World) -> None:
    pair = await make_pair(world)
    ends = Ends(pair, "read", 1000)
    for _ in range(3):
        await ends.move()
        assert ends.local.view == ends.remote.view
        world.disrupt(ends.user, ends.token)
        ends.local.view[:] = bytes(1000)


@BOTH_KINDS
async def test_an_operation_whose_connection_breaks_is_lost_or_whole(
    world: World, kind: str
) -> None:
    ends = Ends(await make_pair(world, **IN_PIECES), kind)
    await ends.connect()
    hold = world.hold(ends.user, ends.remote)
    task = ends.start()
    await hold.reached()
    world.disrupt(ends.user, ends.token)
    hold.release()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if outcome is None:  # loopback has no connection, shm needs none for what it has mapped
        assert ends.target.view == ends.source.view
    else:
        assert isinstance(outcome, PeerLost)
        if kind == "read":  # of a write, everything may have left before
            assert ends.last_piece(ends.target) != ends.last_piece(ends.source)
    await ends.move()
    assert ends.target.view == ends.source.view


@HOWS
async def test_closing_and_aborting_twice_in_any_order_is_harmless(world: World, how: str) -> None:
    engine, other = await make_pair(world)
    await small_read_works(Pair(engine, other))
    await end(engine, how)
    await engine.close()
    engine.abort()
    await engine.close()
