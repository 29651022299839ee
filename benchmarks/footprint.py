"""What idle processes cost: CPU and resident memory of each role. Exit code 1 above a limit.

python -m benchmarks.footprint [--model smollm2-135m] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.client import complete
from launch import model_store
from launch.cluster import LocalCluster
from launch.config import UpOptions
from launch.runner_factory import CPU_KV_MEMORY
from launch.runtime import setup_logging
from launch.sizes import parse_size

CPU_PERCENT_MAX = 3.0
MB = 1e6
SETTLE_S = 3.0
PROMPT_TOKENS = 500  # one request first: what is loaded on first use counts too


def limits(options: UpOptions, weights_nbytes: int) -> dict[str, float]:
    """Resident bytes allowed by role."""
    pool = parse_size(options.kv_memory or CPU_KV_MEMORY, "--kv-memory")
    compute = weights_nbytes + pool + 700 * MB
    return {
        "gateway": 300 * MB,
        "store": parse_size(options.segment, "--segment") + 150 * MB,
        "prefill": compute,
        "decode": compute,
    }


async def measure(
    options: UpOptions, directory: Path, allowed: dict[str, float], seconds: float
) -> bool:
    """Start a cluster, serve one request, watch it idle; return whether all limits hold."""
    cluster = LocalCluster(options)
    table = Table(title=f"idle processes: {machine.describe()}", title_justify="left")
    for heading in ("process", "CPU of one core", "limit", "resident", "limit", ""):
        table.add_column(heading, justify="right")
    good = True
    try:
        await cluster.start()
        tokens = machine.text_tokens(directory, PROMPT_TOKENS)
        await asyncio.to_thread(complete, cluster.url, directory.name, tokens, 32)
        await asyncio.sleep(SETTLE_S)
        processes = {name: psutil.Process(pid) for name, pid in sorted(cluster.pids.items())}
        before = {name: _cpu_s(process) for name, process in processes.items()}
        await asyncio.sleep(seconds)
        for name, process in processes.items():
            percent = 100 * (_cpu_s(process) - before[name]) / seconds
            resident, limit = process.memory_info().rss, allowed[name.split("-")[0]]
            fits = percent < CPU_PERCENT_MAX and resident <= limit
            good &= fits
            table.add_row(
                name,
                f"{percent:.2f} %",
                f"{CPU_PERCENT_MAX:.0f} %",
                f"{resident / MB:.0f} MB",
                f"{limit / MB:.0f} MB",
                "ok" if fits else "ABOVE",
            )
    finally:
        await cluster.drain(5.0)
    Console().print(table)
    return good


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=model_store.DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    setup_logging("warning")
    resolved = model_store.resolve(arguments.model, pull_missing=True)
    assert resolved.directory is not None, "the fake model has no weights"
    options = UpOptions.of(model=str(resolved.directory), port=0, log_level="warning")
    weights = sum(path.stat().st_size for path in resolved.directory.glob("*.safetensors"))
    allowed = limits(options, weights)
    good = asyncio.run(measure(options, resolved.directory, allowed, arguments.seconds))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
