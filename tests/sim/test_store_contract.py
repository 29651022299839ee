"""The distributed store keeps the contract in a simulated cluster, and nothing of it is left out.

The suite's own tests, each inside of one simulated process that uses the store: the real nodes,
clients, registry and protocol core on a virtual clock, over the simulated network and transfers,
under the checkers that random seeds run under.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest

from kvstore.client.matching import PageMatcher
from kvstore.client.store_client import StoreClient
from kvstore.store import PageState
from tests.kvstore import contract
from tests.kvstore.contract import PageStoreContract, Stores
from tests.sim.book import SPEC
from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, SimNode, run_sim
from tests.sim.store_seed import quiesce
from tests.sim.store_world import CONFIG, REGISTRY, STORES, StoreWorld
from transfer.identity import Role
from transfer.interface import deadline_after
from transfer.registry_client import RegistryMembership

USER = "client-of-the-suite"
NUM_PAGES = 2048  # of each node: nothing need be evicted
SEED = 1

C = TypeVar("C", bound=type)

PLANS = {
    "calm": FaultPlan(),
    "slow, skewed and repeated": FaultPlan(
        delay_s_mean=5e-3, duplicate=0.5, clock_skew_s=3600.0, bulk_bytes_per_s=1e7
    ),
}


class Simulation(NamedTuple):
    """What a test of the suite runs in."""

    num_nodes: int
    plan: FaultPlan

    def run(self, test: Callable[[Stores], Any]) -> None:
        run_sim(lambda cluster: self._scenario(cluster, test), SEED, self.plan)

    async def _scenario(self, cluster: SimCluster, test: Callable[[Stores], Any]) -> None:
        config = CONFIG.model_copy(update={"segment_nbytes": NUM_PAGES * SPEC.page_nbytes})
        world = StoreWorld(cluster, config)
        names = STORES[: self.num_nodes]
        for name in ("registry", *names):
            await world.start_one(name)
        user = cluster.node(USER)
        await user.run(_use(user, self.num_nodes, test))
        await quiesce(world)
        for name in (*names, "registry"):
            await world.close_one(name)
        world.checks.finish()


async def _use(user: SimNode, num_nodes: int, test: Callable[[Stores], Any]) -> None:
    """The life of the process that the suite's clients live in."""
    identity = user.identity(Role.OBSERVER)
    membership = RegistryMembership(user.network, REGISTRY, identity)
    await membership.watch_only(deadline_s=deadline_after(5))
    await user.transfer.start()
    clients: list[StoreClient] = []

    async def open_client() -> StoreClient:
        client = StoreClient(
            identity=user.identity(Role.DECODE, f"client-{len(clients)}"),
            network=user.network,
            transfer=user.transfer,
            membership=membership,
            spec=SPEC,
        )
        clients.append(client)
        assert len(client.links.all()) == num_nodes
        return client

    await test(Stores(open_client, user.transfer))
    for client in clients:
        await client.close()
    await membership.leave()
    await user.transfer.close()
    await user.network.close()


def simulated(suite: C) -> C:
    """Make every test of ``suite`` one that runs in the ``Simulation`` that is its fixture."""
    for name, test in inspect.getmembers(suite, inspect.iscoroutinefunction):
        if name.startswith("test_"):
            setattr(suite, name, _in_simulation(test))
    return suite


def _in_simulation(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(self: object, stores: Simulation, **parameters: object) -> None:
        stores.run(lambda real: test(self, stores=real, **parameters))

    return run


@simulated
@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
class TestSimulated(PageStoreContract):
    """Nothing of the suite is left out."""

    @pytest.fixture
    def stores(self, num_nodes: int, plan: str) -> Simulation:
        return Simulation(num_nodes, PLANS[plan])


def test_a_store_that_breaks_the_contract_is_found_out_in_the_simulation() -> None:
    test = TestSimulated().test_match_finds_exactly_the_prefix_that_is_there
    test(stores=Simulation(1, FaultPlan()))  # type: ignore[arg-type]
    with (
        mock.patch.object(PageMatcher, "run", return_value=[PageState.READY] * 4),
        pytest.raises(AssertionError) as found,
    ):
        test(stores=Simulation(1, FaultPlan()))  # type: ignore[arg-type]
    said = found.traceback[-1]
    assert type(found.value) is AssertionError, "no checker of the simulation"
    assert (said.path, said.name) == (Path(contract.__file__), test.__name__), "but the suite"
    assert "states == [PageState.READY] * 2" in str(said.statement)


def test_every_test_of_the_suite_runs_in_the_simulation() -> None:
    asked = inspect.getmembers(PageStoreContract, inspect.iscoroutinefunction)
    assert asked
    for name, test in asked:
        simulated_test = getattr(TestSimulated, name)
        assert not inspect.iscoroutinefunction(simulated_test), name
        assert simulated_test.__wrapped__ is test, name
