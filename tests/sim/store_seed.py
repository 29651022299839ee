"""One seed of the store cluster: a world, a load and a swarm of faults, all drawn from it.

python -m tests.sim.store_seed SEED     runs one seed again and prints its digest

Owns the random scenario: what varies between seeds, and what must hold after healing.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Sequence

from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.page import PageSpec
from kvstore.store import GetOutcome, PageIdentity, PutOutcome
from tests.sim.book import BIG_SPEC, TENANTS, namespace, prompt
from tests.sim.checkers import Violation, require
from tests.sim.harness import SimCluster, run_sim
from tests.sim.store_chaos import Chaos, Load, drawn_acts, use
from tests.sim.store_world import CLIENT_CONFIG, CLIENTS, CONFIG, STORES, StoreWorld

NUM_SEEDS = 500  # that the tests run
WORK_S_MAX = 200.0  # virtual: everything that clients do, with all its time limits
SEEN_S = 1.0  # after a change of nodes: everybody has noticed, and repair has begun
QUIET_S_MAX = 40.0  # every lease and reservation has ended, and repair found what it lacked
NUM_FULL = 8  # pages put when all nodes may be full
NUM_EMPTY = 5  # pages put when all are empty: with their copies below every low watermark
SLOW_BYTES_PER_S = 600.0


def drawn_config(rng: random.Random) -> StoreConfig:
    """What differs between the clusters of two seeds."""
    quotas = {namespace(TENANTS[0]).hex(): 0.4, namespace(TENANTS[1]).hex(): 0.3}
    return CONFIG.model_copy(
        update={
            "replicas": rng.choice([1, 1, 2, 2, 3]),
            "eviction": rng.choice(["lru", "lfu", "slru", "fifo", "heat"]),
            "hot_reads": rng.choice([None, 2, 256]),
            "quotas": rng.choice([{}, {}, quotas]),
            "high_watermark": rng.choice([0.8, 0.95, 1.0]),
            "low_watermark": rng.choice([0.5, 0.75]),
        }
    )


def drawn_client_config(rng: random.Random) -> StoreClientConfig:
    """Pages go by three steps, or few of them by one."""
    update = {"offer_nbytes_max": rng.choice([0, 0, 1024, 8192])}
    return CLIENT_CONFIG.model_copy(update=update)


def drawn_specs(rng: random.Random) -> dict[str, PageSpec]:
    return {CLIENTS[2]: BIG_SPEC} if rng.random() < 0.3 else {}


async def scenario(cluster: SimCluster) -> None:
    rng = cluster.rng
    world = StoreWorld(
        cluster,
        drawn_config(rng),
        ssd=rng.random() < 0.5,
        specs=drawn_specs(rng),
        client_config=drawn_client_config(rng),
    )
    acts, load = drawn_acts(rng), Load(world, rng)
    await world.start()
    chaos = Chaos(world, acts)
    striking = asyncio.ensure_future(chaos.run())
    await within(WORK_S_MAX, "clients", *(use(world, load, name) for name in CLIENTS))
    striking.cancel()
    await asyncio.wait([striking])
    if not striking.cancelled():
        striking.result()
    cluster.heal()  # first: who was taken down may not be able to return before
    await within(WORK_S_MAX, "returning nodes", chaos.finish())
    await after_healing(world)
    await world.close()
    world.checks.finish()


async def within(limit_s: float, who: str, *work: Awaitable[None]) -> None:
    """Await ``work``; it must not hang."""
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*work)
    except TimeoutError:
        raise Violation("completion", f"{who} are still at work after {limit_s} s") from None


async def after_healing(world: StoreWorld) -> None:
    """Every promise ends, and everything works on every node."""
    cluster = world.cluster
    cluster.heal()
    for name in (*STORES, *CLIENTS):
        if not world.is_up(name):
            await world.restart(name)
    await world.settle()
    await quiesce(world)
    await everything_works(world)
    await quiesce(world)


async def quiesce(world: StoreWorld) -> None:
    """Wait until nobody is owed anything, and no longer than that may take."""
    await asyncio.sleep(SEEN_S)
    until_s = world.cluster.now_s + QUIET_S_MAX
    while True:
        try:
            world.check_quiet()
        except Violation:
            if world.cluster.now_s >= until_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def everything_works(world: StoreWorld) -> None:
    """Liveness: what one client puts another reads, in full stores and in empty ones."""
    writer, reader = CLIENTS[0], CLIENTS[1]
    # with quotas, others' shares of a full store are not to be had
    allowed = [PutOutcome.REFUSED] if world.config.quotas else []
    pages = await put_all(world, writer, 7000, NUM_FULL, allowed)
    read = await world.cluster.node(reader).run(world.get(reader, pages))
    fine = {*read} <= {GetOutcome.READ, GetOutcome.ABSENT}  # full stores: some may have gone
    require(fine, "liveness", f"without faults a get gives {read}")
    await world.cluster.node(writer).run(world.clear(writer))
    pages = await put_all(world, writer, 8000, NUM_EMPTY)
    if world.cluster.rng.random() < 0.5:
        world.cluster.slow_down(reader, SLOW_BYTES_PER_S)
    await read_all(world, reader, pages, "liveness")
    world.cluster.fabric.bulk_limits.clear()
    if world.config.replicas > 1:
        await lose_one(world, pages)


async def put_all(
    world: StoreWorld,
    name: str,
    first: int,
    num_pages: int,
    allowed: Sequence[PutOutcome] = (),
) -> list[PageIdentity]:
    """Put new pages; all of them are stored, or have an outcome that is ``allowed``."""
    tenant, size = world.cluster.rng.choice(TENANTS), world.spec_of(name).page_size
    pages = prompt(tenant, tuple(range(first, first + num_pages * size)))
    stored = await world.cluster.node(name).run(world.put(name, pages, timeout_s=10))
    fine = {*stored} <= {PutOutcome.STORED, *allowed}
    require(fine, "liveness", f"without faults a put gives {stored}")
    return pages


async def lose_one(world: StoreWorld, pages: list[PageIdentity]) -> None:
    """The loss of one node loses no page, and the copies are made again."""
    lost = world.cluster.rng.choice(STORES)
    world.crash(lost)
    await read_all(world, CLIENTS[1], pages, "replicas")
    seen = world.clients[CLIENTS[1]].links
    await world.cluster.until(lambda: len(seen.all()) < len(STORES), timeout_s=10)
    await world.restart(lost)
    await world.settle()


async def read_all(world: StoreWorld, name: str, pages: list[PageIdentity], checker: str) -> None:
    read = await world.cluster.node(name).run(world.get(name, pages, timeout_s=30))
    fine = all(outcome is GetOutcome.READ for outcome in read)
    require(fine, checker, f"{name}: without faults a get gives {read}")


if __name__ == "__main__":
    print(run_sim(scenario, int(sys.argv[1])))
