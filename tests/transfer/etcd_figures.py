"""How fast membership on etcd is: ``python -m tests.transfer.etcd_figures``.

Starts an etcd of its own and prints medians and worst cases, in milliseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.transfer.etcd_server import EtcdServer, running_etcd
from transfer.etcd import EtcdMembership
from transfer.identity import Role, new_identity
from transfer.membership import MembershipView, NodeInfo, NodeStatus

NUM_MEMBERS = 8
NUM_ROUNDS = 20
NUM_DEATHS = 5


class Watcher:
    """Says when a view satisfied a condition."""

    def __init__(self, seat: EtcdMembership) -> None:
        self._seat = seat
        self._wanted: Callable[[MembershipView], bool] = lambda view: False
        self._seen: asyncio.Future[float] | None = None
        seat.subscribe(self._on_view)

    def when(self, wanted: Callable[[MembershipView], bool]) -> asyncio.Future[float]:
        self._wanted, self._seen = wanted, asyncio.get_running_loop().create_future()
        return self._seen

    def _on_view(self, view: MembershipView) -> None:
        if self._seen is not None and not self._seen.done() and self._wanted(view):
            self._seen.set_result(time.perf_counter())


async def joined(etcd: EtcdServer, name: str) -> EtcdMembership:
    identity = new_identity(Role.STORE, name)
    seat = EtcdMembership(etcd.address, identity)
    await seat.join(NodeInfo(identity=identity, address="tcp://x:1"), NodeStatus)
    return seat


def report(what: str, seconds: list[float]) -> None:
    ms = [1000 * s for s in seconds]
    print(f"{what:<44} median {statistics.median(ms):7.1f} ms   worst {max(ms):7.1f} ms")


async def main(etcd: EtcdServer) -> None:
    seats = [await joined(etcd, f"member-{n}") for n in range(NUM_MEMBERS)]
    watcher = Watcher(seats[0])
    joins, views, leaves, deaths = [], [], [], []
    for _ in range(NUM_ROUNDS):
        seen = watcher.when(lambda view: len(view.members) > NUM_MEMBERS)
        start = time.perf_counter()
        guest = await joined(etcd, "guest")
        joins.append(time.perf_counter() - start)
        views.append(await seen - start)
        seen = watcher.when(lambda view: len(view.members) == NUM_MEMBERS)
        start = time.perf_counter()
        await guest.leave()
        leaves.append(await seen - start)
    for n in range(NUM_DEATHS):
        guest = await joined(etcd, "guest")
        await asyncio.sleep(0.2 * n)  # at several moments between renewals
        seen = watcher.when(lambda view: len(view.members) == NUM_MEMBERS)
        start = time.perf_counter()
        guest.abort()
        deaths.append(await seen - start)
    report("join, until the node itself has its view", joins)
    report("join, until another member sees it", views)
    report("leave, until another member sees it", leaves)
    report("death without a word, until it is gone", deaths)
    await asyncio.gather(*(seat.leave() for seat in seats))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running_etcd(Path(folder)) as server:
        asyncio.run(main(server))
