"""Plays scripted scenarios on a simulated store cluster, and what scripts have in common.

Owns ``play`` and the means to stop the world at a moment: bulk pieces that wait, messages that are
not handled. A script is followed by the same verdict as a random seed: quiescence and liveness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.store import PageIdentity
from tests.sim.book import SPEC, prompt
from tests.sim.faults import FaultPlan
from tests.sim.harness import Scenario, SimCluster, SimResult, run_sim
from tests.sim.store_seed import after_healing
from tests.sim.store_world import CLIENT_CONFIG, CONFIG, STORES, StoreWorld

T = TypeVar("T")

CALM = FaultPlan(silent_crash=0.0)
ROOMY = CONFIG.model_copy(update={"segment_nbytes": 64 * SPEC.page_nbytes})
PAIRS = ROOMY.model_copy(update={"replicas": 2})
STEPS = CLIENT_CONFIG.model_copy(update={"offer_nbytes_max": 0})  # reserve, write, commit
OFFERS = CLIENT_CONFIG  # few pages go in one message
ONE_BY_ONE = STEPS.model_copy(update={"batch_nbytes": SPEC.page_nbytes, "num_batches": 1})

Script = Callable[[StoreWorld], Awaitable[None]]


def play(
    script: Script,
    config: StoreConfig = ROOMY,
    *,
    plan: FaultPlan = CALM,
    ssd: bool = False,
    client_config: StoreClientConfig = STEPS,
) -> SimResult:
    """Run ``script`` in a cluster of its own, then heal it and check that all is well."""
    return run_sim(scenario_of(script, config, ssd=ssd, client_config=client_config), 1, plan)


def scenario_of(
    script: Script,
    config: StoreConfig = ROOMY,
    *,
    ssd: bool = False,
    client_config: StoreClientConfig = STEPS,
) -> Scenario:
    """What ``play`` runs."""

    async def scenario(cluster: SimCluster) -> None:
        world = StoreWorld(cluster, config, ssd=ssd, client_config=client_config)
        await world.start()
        await script(world)
        world.hooks.clear()
        await after_healing(world)
        await world.close()
        world.checks.finish()

    return scenario


class Held:
    """Bulk pieces that wait until ``let_go`` is set."""

    def __init__(self, world: StoreWorld, *stores: str) -> None:
        self.let_go = False
        for name in stores or STORES:
            world.cluster.bulk.holds[world.nodes[name].region] = self

    def admits(self) -> bool:
        return self.let_go


def begin(world: StoreWorld, name: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call of a client."""
    return world.cluster.node(name).spawn(call)


async def done(world: StoreWorld, name: str, call: Coroutine[Any, Any, T]) -> T:
    """A call of a client, from start to end."""
    return await world.cluster.node(name).run(call)


def some_pages(num_pages: int, first: int = 0) -> list[PageIdentity]:
    """One prompt of whole pages."""
    return prompt("script", tuple(range(first, first + num_pages * SPEC.page_size)))


def node_of(world: StoreWorld, page: PageIdentity) -> str:
    """The store where a page is put, and asked for first."""
    placement = next(iter(world.clients.values())).links._all.placement
    return str(placement.place([page.key])[0])


def belongs_on(world: StoreWorld, page: PageIdentity) -> set[str]:
    """The stores that should hold a page."""
    placement = next(iter(world.clients.values())).links._all.placement
    ranks = placement.ranks([page.key], world.config.replicas)[0].tolist()
    return {str(placement.node_ids[rank]) for rank in ranks}


def pages_on(world: StoreWorld, store: str, num_pages: int) -> list[PageIdentity]:
    """First pages of different prompts, all placed on one store."""
    found: list[PageIdentity] = []
    first = 0
    while len(found) < num_pages:
        page = some_pages(1, first)[0]
        if node_of(world, page) == store:
            found.append(page)
        first += 100
    return found


def holders(world: StoreWorld, page: PageIdentity) -> list[str]:
    """The stores that hold a page now."""
    return [n for n, node in world.nodes.items() if node._directory.state(page.key).present]


def total(world: StoreWorld, number: str) -> float:
    """One number over all stores."""
    return sum(node.numbers().get(number, 0.0) for node in world.nodes.values())
