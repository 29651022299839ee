"""One store node as a process of its own, until its standard input closes.

    python -m benchmarks.store.node --transfer tcp --segment-nbytes 2147483648

Prints what it says of itself as one line of JSON, then serves. ``rss`` on its standard input is
answered with the resident bytes of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import psutil
import uvloop

from benchmarks.store.members import FixedMembership
from kvstore.config import StoreConfig
from kvstore.server.node import StoreNode
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import Role, new_identity
from transfer.zmq_network import ZmqNetwork


async def serve(transport: str, segment_nbytes: int) -> None:
    network = ZmqNetwork()
    transfer = TransferEngine(TransferConfig(transport=transport))
    await transfer.start()
    node = StoreNode(
        StoreConfig(segment_nbytes=segment_nbytes),
        identity=new_identity(Role.STORE),
        network=network,
        transfer=transfer,
        membership=FixedMembership(),
    )
    await node.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        assert line == "rss\n", line
        print(psutil.Process().memory_info().rss, flush=True)
    await node.close()
    await transfer.close()
    await network.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transfer", required=True)
    parser.add_argument("--segment-nbytes", type=int, required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.transfer, args.segment_nbytes))


if __name__ == "__main__":
    main()
