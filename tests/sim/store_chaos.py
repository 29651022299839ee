"""What strikes a simulated store cluster and what its clients do meanwhile, drawn from a seed.

Owns the acts of chaos (crash, restart, leave, pause, partition, one-way block, slow link, bit rot
on a disk) and the calls of one client. Knows no verdicts: the world's checkers have them.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from kvstore.store import PageIdentity
from tests.sim.book import TENANTS, namespace, prompt
from tests.sim.harness import NodeCrashed
from tests.sim.store_world import (
    CLIENTS,
    GRACE_S,
    LEASE_S,
    STORES,
    StoreWorld,
    drawn_policy,
)

NUM_CALLS = 8
CHAOS_EVERY_S = 0.4
SLOW_BYTES_PER_S = 900.0  # a batch of three pages takes longer than a lease
PAUSE_S_MAX = 2.5
CANCELLED = 0.15  # of the calls


class Chaos:
    """Strikes until told to stop; what it has begun (restarts, pauses) ends before ``stop`` does.

    Args:
        acts: kinds of trouble that this run knows, by name (see ``KINDS``).
    """

    KINDS = (
        "crash",
        "die",
        "leave",
        "pause",
        "block",
        "partition",
        "mend",
        "slow",
        "rot",
        "duel",
        "forget",
    )

    def __init__(self, world: StoreWorld, acts: list[str]) -> None:
        self._world = world
        self._cluster = world.cluster
        self._rng = world.cluster.derive_rng("chaos")
        self._acts = acts
        self._busy: dict[str, None] = {}  # nodes that are being restarted
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / CHAOS_EVERY_S))
            act = self._rng.choice(self._acts)
            name = self._rng.choice([*STORES, *STORES, *CLIENTS])
            if name not in self._busy:
                work = getattr(self, f"_{act}")(name)
                self._tasks.append(asyncio.get_running_loop().create_task(work, name=act))

    async def finish(self) -> None:
        """Return when everybody who was taken down is up again."""
        while tasks := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(tasks)
        for task in self._tasks:
            task.result()

    async def _crash(self, name: str) -> None:
        self._busy[name] = None
        await self._world.restart(name)
        del self._busy[name]

    async def _die(self, name: str) -> None:
        """Crash, and come back a while later: the others notice."""
        self._busy[name] = None
        self._world.crash(name)
        await asyncio.sleep(self._rng.uniform(0.5, 3.0))
        await self._world.restart(name)
        del self._busy[name]

    async def _leave(self, name: str) -> None:
        if name in STORES:
            self._busy[name] = None
            await self._world.leave(name)
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))
            await self._world.restart(name)
            del self._busy[name]

    async def _pause(self, name: str) -> None:
        self._busy[name] = None
        self._cluster.pause(name)
        await asyncio.sleep(self._rng.uniform(0.1, PAUSE_S_MAX))
        self._cluster.resume(name)
        del self._busy[name]

    async def _block(self, name: str) -> None:
        """One direction only."""
        other = self._rng.choice([n for n in (*STORES, *CLIENTS, "registry") if n != name])
        self._cluster.block(name, other)

    async def _partition(self, name: str) -> None:
        others = [n for n in (*STORES, *CLIENTS, "registry") if n != name]
        away = self._rng.sample(others, self._rng.randrange(1, len(others)))
        self._cluster.partition([name], away)

    async def _mend(self, name: str) -> None:
        self._cluster.fabric.unblock_all()

    async def _slow(self, name: str) -> None:
        self._cluster.slow_down(name, SLOW_BYTES_PER_S)
        await asyncio.sleep(self._rng.uniform(1.0, 3.0))
        self._cluster.fabric.bulk_limits.pop(name, None)

    async def _forget(self, name: str) -> None:
        """The registry restarts, and knows nobody."""
        if "registry" not in self._busy:
            self._busy["registry"] = None
            await self._world.restart("registry")
            del self._busy["registry"]

    async def _rot(self, name: str) -> None:
        if name in self._world.disks:
            self._world.disks[name].rot()

    async def _duel(self, name: str) -> None:
        """A slow writer stands still for longer than its reservation; a rival takes over."""
        first, second = self._rng.sample(CLIENTS, 2)
        if {first, second} & {*self._busy} or not self._world.is_up(first):
            return
        self._busy[first] = None
        pages = prompt("duel", tuple(range(self._rng.randrange(2), 12)))
        for client in (first, second):
            self._cluster.slow_down(client, SLOW_BYTES_PER_S)
        mine = asyncio.ensure_future(attempt(self._world, first, pages))
        await asyncio.sleep(0.3)
        self._cluster.pause(first)
        await asyncio.sleep(LEASE_S + GRACE_S + 0.5)
        theirs = asyncio.ensure_future(attempt(self._world, second, pages))
        await asyncio.sleep(self._rng.random())
        self._cluster.resume(first)
        del self._busy[first]
        await asyncio.gather(mine, theirs)
        for client in (first, second):
            self._cluster.fabric.bulk_limits.pop(client, None)


def drawn_acts(rng: random.Random) -> list[str]:
    """A few kinds of trouble, so that each also comes alone."""
    acts = rng.sample(Chaos.KINDS, rng.randrange(1, 6))
    return [*acts, "mend"] if {"block", "partition"} & {*acts} else acts


class Load:
    """What the clients of one run ask for: few prompts, or many, of one tenant or several."""

    def __init__(self, world: StoreWorld, rng: random.Random) -> None:
        self._world = world
        self._num_prefixes = rng.choice([1, 2, 4])
        self._tenants = TENANTS[: rng.randrange(1, len(TENANTS) + 1)]
        self._lengths = rng.choice([range(1, 28), range(20, 24), range(1, 80)])

    def prompt(self, name: str, rng: random.Random) -> list[PageIdentity]:
        """One of the prefixes, cut somewhere, and one of few tails."""
        first = rng.randrange(self._num_prefixes) * 100
        tokens = [*range(first, first + rng.choice(self._lengths)), *range(rng.randrange(2))]
        return prompt(rng.choice(self._tenants), tuple(tokens), self._world.spec_of(name))


async def one_call(world: StoreWorld, load: Load, name: str, rng: random.Random) -> None:
    """One call of one client, whatever comes of it."""
    pages = load.prompt(name, rng)
    root = pages[0].parent
    timeout_s = rng.choice([1.0, 3.0, 3.0, 8.0])
    match rng.choices(("put", "get", "wait", "match", "clear"), (45, 30, 12, 10, 3))[0]:
        case "put":
            policy = drawn_policy(rng, root)
            call: Any = world.put(name, pages, timeout_s=timeout_s, policy=policy)
        case "match":
            call = world.match(name, pages)
        case "clear":
            some = rng.choice([None, namespace(rng.choice(TENANTS), world.spec_of(name))])
            call = world.clear(name, some)
        case kind:
            wait = kind == "wait"
            timeout_s = min(timeout_s, 2.0) if wait else timeout_s
            call = world.get(name, pages, timeout_s=timeout_s, wait=wait)
    task = asyncio.ensure_future(call)
    if rng.random() < CANCELLED:
        await asyncio.wait([task], timeout=rng.random() * 0.05)
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def attempt(world: StoreWorld, name: str, pages: list[PageIdentity]) -> None:
    """Put pages, if the client lives so long."""
    if not world.is_up(name):
        return
    try:
        await world.cluster.node(name).run(world.put(name, pages, timeout_s=10.0))
    except NodeCrashed:
        return


async def use(world: StoreWorld, load: Load, name: str) -> None:
    """What one client does, one thing after the other; it goes on after a crash."""
    rng = world.cluster.derive_rng(f"use/{name}")
    for _ in range(NUM_CALLS):
        await asyncio.sleep(rng.expovariate(1 / 0.2))
        if not world.is_up(name):
            continue
        try:
            await world.cluster.node(name).run(one_call(world, load, name, rng))
        except NodeCrashed:
            continue
