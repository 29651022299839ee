"""Many operations at once, with one peer and with many: every byte, and nobody in the way."""

from __future__ import annotations

import asyncio
import random

from tests.transfer.bulk_harness import MIB, pattern, soon, whole
from tests.transfer.contract.world import (
    BOTH_KINDS,
    IN_PIECES,
    Ends,
    Pair,
    World,
    make_pair,
    small_read_works,
)
from transfer.interface import Priority, Range, Region


async def test_16_mib_move_in_both_directions_at_once(world: World) -> None:
    """Two engines read from, and write to, each other in the same moment."""
    one, two = await make_pair(world)
    four = [
        Ends(Pair(a, b), k, 4 * MIB) for a, b in ((one, two), (two, one)) for k in ("read", "write")
    ]
    async with asyncio.TaskGroup() as group:
        for ends in four:
            group.create_task(ends.move())
    for ends in four:
        assert ends.target.view == ends.source.view


@BOTH_KINDS
async def test_operations_with_one_peer_do_not_mix(world: World, kind: str) -> None:
    pair = await make_pair(world)
    many = [Ends(pair, kind, nbytes) for nbytes in (1, 100, 5000, 70_001, 300_000, 2 * MIB) * 4]
    for seed, ends in enumerate(many):
        ends.source.view[:] = pattern(ends.nbytes, seed).data
    async with asyncio.TaskGroup() as group:
        for ends in many:
            group.create_task(ends.move())
    for seed, ends in enumerate(many):
        assert ends.target.view == pattern(ends.nbytes, seed).data


async def test_one_engine_serves_and_uses_several(world: World) -> None:
    nbytes, hub = 2 * MIB, await world.make()
    others = [await world.make() for _ in range(3)]
    pulled = [Ends(Pair(other, hub), "read", nbytes) for other in others]
    pushed = [Ends(Pair(hub, other), "write", nbytes) for other in others]
    for seed, ends in enumerate((*pulled, *pushed)):
        ends.source.view[:] = pattern(nbytes, seed).data
    async with asyncio.TaskGroup() as group:
        for ends in (*pulled, *pushed):
            group.create_task(ends.move())
    for seed, ends in enumerate((*pulled, *pushed)):
        assert ends.target.view == pattern(nbytes, seed).data


@BOTH_KINDS
async def test_a_slow_peer_holds_up_only_itself(world: World, kind: str) -> None:
    slow = Ends(await make_pair(world, **IN_PIECES), kind)
    fast = Pair(await world.make(), slow.user)
    await slow.connect()
    hold = world.hold(slow.user, slow.remote)
    task = slow.start()
    await hold.reached()
    for _ in range(5):
        await small_read_works(fast, 100_000)
    assert not task.done()
    hold.release()
    await task
    assert slow.target.view == slow.source.view


async def test_background_work_is_not_starved_by_urgent_work(world: World) -> None:
    pair = await make_pair(world, **IN_PIECES)
    pushed, pulled = Ends(pair, "write", MIB), Ends(pair, "read", 50_000)
    push = pushed.start()
    token, every = pulled.token, whole(50_000)
    while not push.done():
        into, now = pulled.local, Priority.NOW
        await pair.user.read(token, every, into=into, deadline_s=soon(), priority=now)
    await push
    assert pushed.target.view == pushed.source.view
    assert pulled.target.view == pulled.source.view


async def test_32_tasks_with_random_ranges_keep_every_byte(world: World) -> None:
    """Each task owns a slice of the remote region and a model of what must be in it."""
    share, num_tasks, num_steps = 96 * 1024, 32, 12
    owner, user = await make_pair(world)
    remote = owner.allocate(share * num_tasks)
    token = remote.export("rw")

    async def work(index: int) -> None:
        slice_ = Slice(remote, index * share, user.allocate(share), random.Random(index))
        for step in range(num_steps):
            spans = slice_.spans()
            if slice_.rng.random() < 0.5:
                ranges = slice_.fill(spans, seed=index * 1000 + step)
                await user.write(token, ranges, source=slice_.local, deadline_s=soon())
            else:
                ranges = slice_.clear(spans)
                await user.read(token, ranges, into=slice_.local, deadline_s=soon())
                slice_.check(ranges)
        assert remote.view[slice_.base : slice_.base + share] == slice_.model

    async with asyncio.TaskGroup() as group:
        for index in range(num_tasks):
            group.create_task(work(index))


class Slice:
    """One task's part of a remote region: local memory, and a model of the remote bytes."""

    def __init__(self, remote: Region, base: int, local: Region, rng: random.Random) -> None:
        self.base = base
        self.local = local
        self.rng = rng
        self.nbytes = local.nbytes
        self.model = bytearray(remote.view[base : base + self.nbytes])

    def spans(self) -> list[tuple[int, int]]:
        cuts = sorted(self.rng.sample(range(self.nbytes), 8))
        return list(zip(cuts[::2], cuts[1::2], strict=True))

    def fill(self, spans: list[tuple[int, int]], seed: int) -> list[Range]:
        """New bytes here, and the ranges that write ``spans`` of them."""
        data = pattern(self.nbytes, seed)
        self.local.view[:] = data.data
        for a, b in spans:
            self.model[a:b] = data[a:b].tobytes()
        return [Range(self.base + a, a, b - a) for a, b in spans]

    def clear(self, spans: list[tuple[int, int]]) -> list[Range]:
        """Other bytes here, and the ranges that read ``spans`` into the mirrored places."""
        self.local.view[:] = b"\xaa" * self.nbytes
        return [Range(self.base + a, self.nbytes - b, b - a) for a, b in spans]

    def check(self, ranges: list[Range]) -> None:
        """The ranges hold the model's bytes; everything between them was left alone."""
        expected = bytearray(b"\xaa" * self.nbytes)
        for there, here, nbytes in ranges:
            start = there - self.base
            expected[here : here + nbytes] = self.model[start : start + nbytes]
        assert self.local.view == expected
