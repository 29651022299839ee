"""One of three store nodes is killed, or stands still, under a load of puts and gets.

    python -m benchmarks.store_faults [kill | stop] [--seconds 20] [--transfer tcp] [--json]

Real processes, two replicas. Every byte that is read is checked. *Committed* means: a put of the
page has returned STORED or PRESENT. A put waits until both copies are there, so that is when the
page survives the loss of a node; ``without_copies`` counts pages whose second copy could not be
made at that moment, because its node did not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

import uvloop

from benchmarks.faults.cluster import FaultCluster
from benchmarks.faults.load import NUM_PAGES, Done, Load
from kvstore.page import PageSpec

SPEC = PageSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="uint8")  # 16 KiB
SEGMENT_NBYTES = 512 << 20
WARM_S = 3.0
AFTER_S = 8.0  # of load after a node has been killed
REPAIR_S = 60.0  # limit for the repair to finish
VICTIM = "store-1"
NUM_PUTTERS, NUM_GETTERS = 3, 3
PAUSE_S = 0.01


async def measure(
    scenario: str,
    seconds: float,
    transfer: str,
    *,
    warm_s: float = WARM_S,
    after_s: float = AFTER_S,
) -> dict[str, object]:
    """Run one scenario; ``seconds`` is how long the node stands still."""
    async with FaultCluster(
        replicas=2, transfer=transfer, spec=SPEC, segment_nbytes=SEGMENT_NBYTES
    ) as cluster:
        load = Load(cluster.client, cluster.transfer, SPEC, seed=1, pause_s=PAUSE_S)
        running = asyncio.create_task(load.run(NUM_PUTTERS, NUM_GETTERS))
        await asyncio.sleep(warm_s)
        struck_s = load.now_s
        cluster.signal(VICTIM, signal.SIGKILL if scenario == "kill" else signal.SIGSTOP)
        if scenario == "stop":
            await asyncio.sleep(seconds)
            cluster.signal(VICTIM, signal.SIGCONT)
        await asyncio.sleep(after_s)
        load.stop()
        await running
        repair_s = await _repaired(cluster)
        num_lost = await load.get_all()
        return {
            "scenario": scenario if scenario == "kill" else f"stop {seconds:g} s",
            "transfer": transfer,
            **_summary(load, struck_s),
            "without_copies": cluster.client.counters().get("puts_without_copies", 0),
            "repaired_within_s": repair_s,
            "pages_lost": num_lost,
            "nodes": await _copies(cluster),
        }


def _summary(load: Load, struck_s: float) -> dict[str, object]:
    ledger = load.ledger
    late = [done for done in ledger.puts if done.ended_s > struck_s + 1.0]
    return {
        "pages_committed": NUM_PAGES * len(load.committed),
        "pages_read": sum(done.num_pages - done.num_failed for done in ledger.gets),
        "wrong_bytes": ledger.num_wrong,
        "failed_reads": len(ledger.failures),
        "failures": ledger.failures[:10],
        "puts": sum(done.num_pages for done in ledger.puts),
        "failed_puts": sum(done.num_failed for done in ledger.puts),
        "failed_puts_after_1_s": sum(done.num_failed for done in late),
        "failed_puts_after_1_s_share": _share(late),
        "longest_get_s": round(max(done.ended_s - done.began_s for done in ledger.gets), 3),
        "longest_put_s": round(max(done.ended_s - done.began_s for done in ledger.puts), 3),
    }


def _share(calls: list[Done]) -> float:
    num_pages = sum(done.num_pages for done in calls)
    return sum(done.num_failed for done in calls) / num_pages if num_pages else 0.0


async def _repaired(cluster: FaultCluster) -> float | None:
    """Wait until no node owes copies; seconds from the end of the load, None: not in time."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    while loop.time() < started_s + REPAIR_S:
        numbers = await cluster.numbers()
        owing = [n["replicas_missing"] or n["repairing"] for n in numbers.values()]
        if len(numbers) >= 2 and not any(owing):
            return round(loop.time() - started_s, 2)
        await asyncio.sleep(0.1)
    return None


async def _copies(cluster: FaultCluster) -> dict[str, dict[str, float]]:
    names = ("num_pages", "copies_received", "copied_nbytes", "repairs", "repair_s", "evicted")
    numbers = await cluster.numbers()
    return {node_id: {name: n[name] for name in names} for node_id, n in numbers.items()}


def is_good(figures: dict[str, object]) -> bool:
    """What the store promises about losing one node of three."""
    share = figures["failed_puts_after_1_s_share"]
    assert isinstance(share, float)
    zero = ("wrong_bytes", "failed_reads", "pages_lost")
    repaired = figures["repaired_within_s"] is not None
    return repaired and share < 0.01 and not any(figures[name] for name in zero)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", nargs="?", choices=("kill", "stop"), default="kill")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it stands still")
    parser.add_argument("--transfer", default="tcp", choices=("tcp", "shm"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = uvloop.run(measure(args.scenario, args.seconds, args.transfer))
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    sys.exit(0 if is_good(figures) else 1)


if __name__ == "__main__":
    main()
