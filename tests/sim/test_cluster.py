"""The whole cluster under seeded faults: right tokens or an error, and everything given back.

Real code from the dispatcher down (channels' protocol core, registry, store nodes and clients,
prefill and decode node) on a virtual clock. Checked after every delivery: page conservation and
lease safety of every node. Checked at the end: integrity (tokens equal the fake model's
reference), exactly-once completion, liveness after healing, and quiescence.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.fake import fake_generate
from engine.request import GenerateRequest, RequestId, SamplingParams
from gateway.errors import GatewayError
from tests.sim.cluster_nodes import NUM_PAGES, PAGE_SIZE, World
from tests.sim.faults import FaultPlan
from tests.sim.harness import SimCluster, run_sim, seeds

NUM_SEEDS = 100
NUM_REQUESTS = 8
FAULTY_TIMEOUT_S = 20.0
HEALED_TIMEOUT_S = 60.0
QUIET_S = 20.0  # longer than every lease, put deadline and linger of the nodes
NAMES = ["store-1", "store-2", "prefill-1", "decode-1"]
CHAOS_EVERY_S = 0.7
MODEL_LEN = (NUM_PAGES - 4) * PAGE_SIZE // 2


def make_request(rng: random.Random, number: int, prefixes: list[list[int]]) -> GenerateRequest:
    """A prompt that shares one of a few prefixes, of any length; greedy or sampled."""
    prefix = rng.choice(prefixes)[: rng.randrange(1, 200)]
    prompt = prefix + [rng.randrange(256) for _ in range(rng.randrange(0, 60))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.getrandbits(32),
        max_tokens=rng.choice([1, 2, 17, 40]),
        ignore_eos=rng.random() < 0.7,
    )
    return GenerateRequest(
        request_id=RequestId(f"r-{number}"),
        prompt=np.asarray(prompt[:MODEL_LEN], dtype="<i4").tobytes(),
        sampling=params,
    )


def reference(request: GenerateRequest) -> list[int]:
    prompt = np.frombuffer(request.prompt, dtype="<i4").tolist()
    return [out.token for out in fake_generate(prompt, request.sampling)]


async def start_all(world: World) -> None:
    await world.start_gateway()
    for name in NAMES:
        await world.start(name)


async def serve(world: World, number: int, rng: random.Random, prefixes: list[list[int]]) -> bool:
    """Send one request in the faulty phase; True when it was answered, False on an error."""
    request = make_request(rng, number, prefixes)
    await asyncio.sleep(rng.uniform(0.0, 3.0))
    try:
        tokens = await world.answer(request, FAULTY_TIMEOUT_S)
    except GatewayError:
        return False
    assert tokens == reference(request), f"wrong tokens for {request.request_id}"
    return True


async def quiesce(world: World) -> None:
    """After all work every page is free or cached, every reservation and lease is over."""
    await asyncio.sleep(QUIET_S)
    world.check_all()
    for name, node in world.nodes.items():
        if name.startswith("store"):
            numbers = node.numbers()  # type: ignore[attr-defined]
            assert numbers["num_writing"] == numbers["num_owed"] == 0, (name, numbers)
            assert numbers["num_leases"] == numbers["num_waits"] == 0, (name, numbers)
            continue
        gauges = node.gauges()  # type: ignore[attr-defined]
        assert gauges["num_running"] == gauges["num_waiting"] == 0, (name, gauges)
        assert gauges["num_free_pages"] == gauges["num_pages"], (name, gauges)


def strike(world: World, tasks: dict[str, asyncio.Task[None]]) -> Callable[[SimCluster], None]:
    """One act of chaos: a crash and restart, a pause, a one-way or full partition."""

    def act(cluster: SimCluster) -> None:
        name = cluster.rng.choice(NAMES)
        what = cluster.rng.random()
        if what < 0.45 and (name not in tasks or tasks[name].done()):
            tasks[name] = asyncio.get_running_loop().create_task(world.restart(name))
        elif what < 0.6:
            cluster.pause(name)
            asyncio.get_running_loop().call_later(
                cluster.rng.uniform(0.2, 4.0), cluster.resume, name
            )
        elif what < 0.75:
            other = cluster.rng.choice([n for n in [*NAMES, "gateway"] if n != name])
            cluster.block(name, other)
        else:
            cluster.fabric.unblock_all()

    return act


async def chaos_scenario(cluster: SimCluster) -> None:
    world = World(cluster)
    await start_all(world)
    rng = cluster.derive_rng("requests")
    prefixes = [[rng.randrange(256) for _ in range(200)] for _ in range(3)]
    restarts: dict[str, asyncio.Task[None]] = {}
    async with (
        cluster.chaos(strike(world, restarts), every_s=CHAOS_EVERY_S),
        asyncio.TaskGroup() as group,
    ):
        for number in range(NUM_REQUESTS):
            child = random.Random(rng.getrandbits(64))
            group.create_task(serve(world, number, child, prefixes))
    cluster.heal()
    await asyncio.gather(*restarts.values())
    for number in range(3):  # liveness: once healed, every request is answered
        request = make_request(rng, 1000 + number, prefixes)
        assert await world.answer(request, HEALED_TIMEOUT_S) == reference(request)
    await quiesce(world)
    await world.close()


async def calm_scenario(cluster: SimCluster) -> None:
    """Without faults every request is answered, and each prompt page is computed once."""
    world = World(cluster)
    await start_all(world)
    await cluster.until(lambda: len(world_view(world)) == len(NAMES), timeout_s=10)
    rng = cluster.derive_rng("requests")
    prefixes = [[rng.randrange(256) for _ in range(200)] for _ in range(3)]
    answered: list[Awaitable[bool]] = [
        serve(world, number, random.Random(rng.getrandbits(64)), prefixes)
        for number in range(NUM_REQUESTS)
    ]
    assert all(await asyncio.gather(*answered))
    await quiesce(world)
    await world.close()


def world_view(world: World) -> tuple[object, ...]:
    assert world.dispatcher is not None
    return world.dispatcher._membership.view.members


@pytest.mark.parametrize("seed", seeds(NUM_SEEDS))
def test_chaos_gives_right_tokens_or_errors_and_heals(seed: int) -> None:
    run_sim(chaos_scenario, seed)


@pytest.mark.parametrize("seed", seeds(5))
def test_calm_weather_answers_everything(seed: int) -> None:
    run_sim(calm_scenario, seed, FaultPlan())


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = (run_sim(chaos_scenario, 7) for _ in range(2))
    assert first == second
