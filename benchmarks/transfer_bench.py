"""Times every bulk transfer path between two processes beside its physical limit.

Moves ``--pages`` pages of ``--page-nbytes`` bytes, scattered on both sides, over each transport,
and in the same run copies the same pages within one process (numpy) and sends the same bytes
through a plain blocking socket. The last column is the ratio that counts: tcp to the plain socket,
shm to the copy.

    python benchmarks/transfer_bench.py --pages 125 --page-nbytes 1500000
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.interface import Range, deadline_after

LIMIT_S = 120.0
Array = np.ndarray[Any, np.dtype[np.uint8]]


class Row(NamedTuple):
    """One line of the table."""

    name: str
    gigabytes_per_s: float
    limit: str | None  # name of the row that bounds this one


def scattered(num_pages: int, page_nbytes: int) -> list[Range]:
    """Return pages that are contiguous on neither side: nothing can be merged."""
    order = np.random.default_rng(1).permutation(num_pages)
    return [
        Range(int(there) * page_nbytes, here * page_nbytes, page_nbytes)
        for here, there in enumerate(order)
    ]


def best_of(repeats: int, run: Callable[[], None]) -> float:
    """Return the least of the seconds of ``repeats`` runs, after one that warms up."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def time_memcpy(ranges: list[Range], nbytes: int, repeats: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def run() -> None:
        for there, here, count in ranges:
            np.copyto(target[here : here + count], source[there : there + count])

    return best_of(repeats, run)


def serve_plain(port_to: Connection, nbytes: int, piece_nbytes: int) -> None:
    """Send ``nbytes`` for each byte that arrives."""
    data = memoryview(np.ones(nbytes, np.uint8))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port_to.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                for start in range(0, nbytes, piece_nbytes):
                    connection.sendall(data[start : start + piece_nbytes])


def time_plain_socket(nbytes: int, piece_nbytes: int, repeats: int) -> float:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_plain, args=(there, nbytes, piece_nbytes)
    )
    process.start()
    target = memoryview(np.zeros(nbytes, np.uint8))  # type: ignore[arg-type]
    with socket.create_connection(("127.0.0.1", here.recv())) as connection:

        def run() -> None:
            connection.sendall(b"x")
            got = 0
            while got < nbytes:
                got += connection.recv_into(target[got:])

        seconds = best_of(repeats, run)
    process.join()
    return seconds


def serve_engine(pipe: Connection, settings: dict[str, Any], nbytes: int) -> None:
    """Own a region until the pipe says stop."""

    async def main() -> None:
        engine = TransferEngine(TransferConfig(**settings))
        await engine.start()
        region = engine.allocate(nbytes)
        region.view[:] = b"\x01" * nbytes
        pipe.send(region.export("rw"))
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await engine.close()

    asyncio.run(main())


def time_engine(
    settings: dict[str, Any], ranges: list[Range], nbytes: int, repeats: int
) -> tuple[float, float]:
    """Return the seconds of a read and of a write of all ranges."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_engine, args=(there, settings, nbytes)
    )
    process.start()
    token = here.recv()
    with asyncio.Runner() as runner:
        engine = TransferEngine(TransferConfig(**settings))
        runner.run(engine.start())
        local = engine.register(np.zeros(nbytes, np.uint8))

        async def read() -> None:
            await engine.read(token, ranges, into=local, deadline_s=deadline_after(LIMIT_S))

        async def write() -> None:
            await engine.write(token, ranges, source=local, deadline_s=deadline_after(LIMIT_S))

        seconds = (
            best_of(repeats, lambda: runner.run(read())),
            best_of(repeats, lambda: runner.run(write())),
        )
        here.send("stop")
        runner.run(engine.close())
    process.join()
    return seconds


def measure(options: argparse.Namespace) -> list[Row]:
    nbytes = options.pages * options.page_nbytes
    ranges = scattered(options.pages, options.page_nbytes)

    def rate(seconds: float) -> float:
        return float(nbytes / seconds / 1e9)

    rows = [
        Row("memcpy", rate(time_memcpy(ranges, nbytes, options.repeats)), None),
        Row(
            "plain socket",
            rate(time_plain_socket(nbytes, options.piece_nbytes, options.repeats)),
            None,
        ),
    ]
    for transport, limit in (("shm", "memcpy"), ("tcp", "plain socket")):
        settings = {
            "transport": transport,
            "piece_nbytes": options.piece_nbytes,
            "connections_per_peer": options.connections,
            "copy_threads": options.copy_threads,
        }
        read_s, write_s = time_engine(settings, ranges, nbytes, options.repeats)
        rows.append(Row(f"{transport} read", rate(read_s), limit))
        rows.append(Row(f"{transport} write", rate(write_s), limit))
    return rows


def print_table(rows: list[Row]) -> None:
    rates = {row.name: row.gigabytes_per_s for row in rows}
    print(f"{'path':<14} {'GB/s':>8}  {'ratio':>6}  of")
    for row in rows:
        ratio = f"{row.gigabytes_per_s / rates[row.limit]:6.2f}" if row.limit else "     -"
        print(f"{row.name:<14} {row.gigabytes_per_s:8.2f}  {ratio}  {row.limit or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", type=int, default=125)
    parser.add_argument("--page-nbytes", type=int, default=1_500_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--piece-nbytes", type=int, default=1 << 20)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--copy-threads", type=int, default=1)
    print_table(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
