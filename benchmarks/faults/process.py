"""One process of the store under test: a registry, or a store node. Runs until its stdin closes.

    python -m benchmarks.faults.process registry
    python -m benchmarks.faults.process store-0 --join tcp://127.0.0.1:4321 --replicas 2

Prints one line when it is ready: the registry its address, a node its id.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop

from kvstore.config import StoreConfig
from kvstore.server.node import StoreNode
from transfer.channel import Hello, Service
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.identity import Role, new_identity
from transfer.registry import Registry, RegistryService
from transfer.registry_client import RegistryMembership
from transfer.zmq_network import ZmqNetwork


async def run_registry() -> None:
    network, service = ZmqNetwork(), Service()
    registry = RegistryService(Registry(), service)
    hello = Hello(identity=new_identity(Role.GATEWAY))
    listener = await network.listen(service, hello, "tcp://127.0.0.1:0")
    print(listener.address, flush=True)
    await stdin_closes()
    registry.close()
    await listener.close()
    await network.close()


async def run_store(name: str, args: argparse.Namespace) -> None:
    identity = new_identity(Role.STORE, name)
    network = ZmqNetwork()
    transfer = TransferEngine(TransferConfig(transport=args.transfer))
    await transfer.start()
    node = StoreNode(
        StoreConfig(segment_nbytes=args.segment_nbytes, replicas=args.replicas),
        identity=identity,
        network=network,
        transfer=transfer,
        membership=RegistryMembership(network, args.join, identity),
    )
    await node.start()
    print(name, flush=True)
    await stdin_closes()
    await node.close()
    await transfer.close()
    await network.close()


async def stdin_closes() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--join", default="")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--transfer", default="tcp")
    parser.add_argument("--segment-nbytes", type=int, default=256 << 20)
    args = parser.parse_args()
    uvloop.run(run_registry() if args.name == "registry" else run_store(args.name, args))


if __name__ == "__main__":
    main()
