"""Runs a scenario under a seed: the cluster, its nodes, crashes, partitions, and the verdict.

Owns ``SimCluster``/``SimNode`` and ``run_sim``. Scenarios look like this::

    async def scenario(cluster: SimCluster) -> None:
        store = cluster.node("store")
        node = StoreNode(config, identity=store.identity(Role.STORE), network=store.network, ...)
        await store.run(node.start())          # inside of the life of that node
        cluster.checkers.append(node.check)    # runs after every ``fabric.check_every`` deliveries
        cluster.crash("store")
        store = cluster.restart("store")       # another life: build the node again
        cluster.heal()                         # no faults from here on

    result = run_sim(scenario, seed)

Whatever a scenario raises carries its seed and the last events. A run also fails on errors that
no one awaited, on a deadlock, and on tasks that are left at its end. The same seed gives the same
digest, in any process. Not simulated: real threads, sockets, files, GPU time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from tests.sim.bulk import SimBulk
from tests.sim.faults import FaultPlan, Trace
from tests.sim.loop import CURRENT_LIFE, Life, SimLoop, SimTask
from tests.sim.network import SimFabric, SimNetwork, life_context
from tests.sim.transfer import SimTransfer
from transfer.identity import Identity, Incarnation, NodeId, Role

T = TypeVar("T")

GRACE_S = 5.0  # virtual: how long cancelled tasks may take to end
LINES_IN_NOTE = 25


class NodeCrashed(Exception):
    """What was run in a node's life ended with that life."""


class LeakedTasks(AssertionError):
    """Tasks were left when the scenario had ended."""


class SimNode:
    """One life of one node: what a process would have."""

    def __init__(self, cluster: SimCluster, name: str, generation: int) -> None:
        self.name = name
        self.rng = cluster.derive_rng(f"node/{name}/{generation}")
        self.life = Life(name, self.rng.uniform(0.0, cluster.plan.clock_skew_s))
        self.network = SimNetwork(cluster.fabric, name, self.life)
        self.transfer = SimTransfer(cluster.bulk, name, self.life, self.rng)
        self._loop = cluster.loop

    @property
    def alive(self) -> bool:
        return self.life.alive

    def identity(self, role: Role, node_id: str | None = None) -> Identity:
        """Return a new identity; the node id defaults to the node's name."""
        incarnation = Incarnation(self.rng.randbytes(8).hex())
        return Identity(node_id=NodeId(node_id or self.name), role=role, incarnation=incarnation)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start a task in this life. A crash cancels it."""
        assert self.life.alive, f"{self.name} has crashed"
        context = life_context(self.life)
        return self._loop.create_task(coroutine, name=name, context=context)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` in this life.

        Raises:
            NodeCrashed: the node crashed meanwhile.
        """
        task = self.spawn(coroutine)
        try:
            return await task
        except asyncio.CancelledError:
            if self.life.alive or not task.cancelled():
                task.cancel()
                raise
            raise NodeCrashed(f"{self.name} crashed") from None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a synchronous function in this life (a constructor that makes timers, ``abort``)."""
        return life_context(self.life).run(function, *args)

    def time(self) -> float:
        """Return what this node's clock shows."""
        return self._loop.now_s + self.life.clock_skew_s


class SimCluster:
    """All nodes of one simulation and what happens to them."""

    def __init__(self, loop: SimLoop, seed: int, plan: FaultPlan) -> None:
        self.loop = loop
        self.seed = seed
        self.rng = self.derive_rng("scenario")
        self.trace = Trace()
        self.fabric = SimFabric(loop, self.derive_rng("fabric"), plan, self.trace)
        self.bulk = SimBulk(self.fabric)
        self._nodes: dict[str, SimNode] = {}
        self._generations: dict[str, int] = {}

    @property
    def checkers(self) -> list[Callable[[], None]]:
        """Called after every ``fabric.check_every``-th delivery or piece of a bulk transfer; raise
        to fail the run."""
        return self.fabric.checkers

    @property
    def plan(self) -> FaultPlan:
        return self.fabric.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self.fabric.plan = plan

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    def derive_rng(self, purpose: str) -> random.Random:
        """Return a generator of its own for one purpose, so that one draw more here changes
        nothing there."""
        return random.Random(f"{self.seed}/{purpose}")

    def node(self, name: str) -> SimNode:
        """Return the present life of ``name``, the first one if there was none."""
        if name not in self._nodes:
            self._start_life(name)
        return self._nodes[name]

    def crash(self, name: str) -> None:
        """kill -9: all tasks of the node end, nothing of it is sent any more."""
        node = self._nodes[name]
        if not node.life.alive:
            return
        self._note(f"crash {name}")
        silent = self.rng.random() < self.plan.silent_crash
        node.life.alive = False
        node.life.died_silently = silent
        self.fabric.cut_off(node.life, silent=silent)
        self.loop.resume(node.life)  # a stopped process dies, too
        for task in list(node.life.tasks.values()):
            task.cancel()
        node.call(node.transfer.abort)
        node.call(node.network.abort)

    def restart(self, name: str) -> SimNode:
        """Start another life of ``name`` (crashing the present one). Its addresses are the same;
        its memory, ports and tasks are new."""
        self.crash(name)
        self._start_life(name)
        self._note(f"restart {name}")
        return self._nodes[name]

    def pause(self, name: str) -> None:
        """SIGSTOP: nothing of the node runs; what it is sent waits."""
        self._note(f"pause {name}")
        self.loop.pause(self._nodes[name].life)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self._note(f"resume {name}")
        self.loop.resume(self._nodes[name].life)

    def block(self, source: str, target: str) -> None:
        """Cut one direction between two nodes, silently."""
        self._note(f"block {source}>{target}")
        self.fabric.block(source, target)

    def partition(self, group_a: list[str], group_b: list[str]) -> None:
        """Cut both directions between two groups."""
        for a in group_a:
            for b in group_b:
                self.block(a, b)
                self.block(b, a)

    def slow_down(self, name: str, bulk_bytes_per_s: float) -> None:
        """Bulk transfers from and to a node are no faster than this, until ``heal``."""
        self._note(f"slow {name} {bulk_bytes_per_s}")
        self.fabric.bulk_limits[name] = bulk_bytes_per_s

    def heal(self) -> None:
        """Liveness mode: from here on no partitions, no pauses and no random faults."""
        self._note("heal")
        self.fabric.unblock_all()
        self.fabric.bulk_limits.clear()
        self.fabric.plan = FaultPlan(clock_skew_s=self.plan.clock_skew_s)
        for node in self._nodes.values():
            if node.life.paused:
                self.loop.resume(node.life)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait in virtual time until ``condition()``; AssertionError after ``timeout_s``."""
        deadline_s = self.loop.now_s + timeout_s
        while not condition():
            assert self.loop.now_s < deadline_s, f"not reached within {timeout_s} virtual seconds"
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def chaos(
        self, step: Callable[[SimCluster], None], *, every_s: float
    ) -> AsyncIterator[None]:
        """Call ``step`` again and again, at seeded moments, while the body runs."""

        async def strike() -> None:
            while True:
                await asyncio.sleep(self.rng.expovariate(1 / every_s))
                step(self)

        task = asyncio.get_running_loop().create_task(strike(), name="chaos")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def crash_all(self) -> None:
        for name in self._nodes:
            self.crash(name)

    def _start_life(self, name: str) -> None:
        generation = self._generations.get(name, 0) + 1
        self._generations[name] = generation
        self._nodes[name] = SimNode(self, name, generation)

    def _note(self, what: str) -> None:
        self.trace.add(self.loop.now_s, what)


class SimResult(NamedTuple):
    """What a run came to. Equal seeds give equal results."""

    seed: int
    digest: str
    virtual_s: float
    num_events: int


Scenario = Callable[[SimCluster], Coroutine[Any, Any, None]]


def run_sim(scenario: Scenario, seed: int, plan: FaultPlan | None = None) -> SimResult:
    """Run one scenario under one seed; ``plan`` defaults to a drawn one."""
    loop = SimLoop(random.Random(f"{seed}/loop"))
    plan = plan or FaultPlan.swarm(random.Random(f"{seed}/plan"))
    cluster = SimCluster(loop, seed, plan)
    with _determinism(cluster):
        try:
            loop.run_until_complete(scenario(cluster))
            _check_nothing_left(loop)
        except BaseException as error:
            lines = "\n  ".join(cluster.trace.last(LINES_IN_NOTE))
            error.add_note(f"reproduce: SIM_SEED={seed}  plan={plan}\nlast events:\n  {lines}")
            raise
        finally:
            _dispose(cluster)
    return SimResult(seed, cluster.trace.digest, loop.now_s, cluster.trace.num_lines)


def seeds(end: int, first: int = 0) -> list[int]:
    """Return the seeds to run: first..end-1, or the one in the environment variable SIM_SEED."""
    wanted = os.environ.get("SIM_SEED")
    return [int(wanted)] if wanted else list(range(first, end))


@contextmanager
def _determinism(cluster: SimCluster) -> Iterator[None]:
    """Keep garbage collection and the system's randomness out of a run."""
    rng = cluster.derive_rng("secrets")
    was_enabled = gc.isenabled()
    gc.disable()  # a cycle found earlier or later would close async generators at another moment
    try:
        with (
            mock.patch("secrets.token_hex", lambda n=32: rng.randbytes(n).hex()),
            mock.patch("secrets.token_bytes", lambda n=32: rng.randbytes(n)),
            mock.patch("os.getpid", return_value=1),  # nodes tell the registry theirs
        ):
            yield
    finally:
        if was_enabled:
            gc.enable()


def _pending(loop: SimLoop) -> list[SimTask]:
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, SimTask)]
    return sorted(tasks, key=lambda task: task._sim_id)


def _check_nothing_left(loop: SimLoop) -> None:
    """Let cancelled tasks end, then report what is still there."""
    deadline_s = loop.now_s + GRACE_S
    while (pending := _pending(loop)) and loop.now_s < deadline_s:
        loop.run_until_complete(asyncio.sleep(0.01))
    if pending:
        listed = "\n  ".join(_describe(task) for task in pending)
        raise LeakedTasks(f"{len(pending)} tasks were left:\n  {listed}")


def _describe(task: SimTask) -> str:
    life = task.get_context().get(CURRENT_LIFE) if hasattr(task, "get_context") else None
    where = task.get_stack(limit=1)
    line = f"{where[0].f_code.co_filename}:{where[0].f_lineno}" if where else "?"
    return f"{task.get_name()} {life or ''} {task.get_coro()} at {line}"


def _dispose(cluster: SimCluster) -> None:
    """End everything, also after a failure, so that nothing reaches the next test."""
    loop = cluster.loop
    loop.stops_at_failure = False
    cluster.checkers.clear()
    cluster.crash_all()
    for _ in range(3):
        pending = _pending(loop)
        for task in pending:
            task.cancel()
        if pending:
            waiting = asyncio.wait(pending, timeout=GRACE_S)
            loop.run_until_complete(waiting)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
