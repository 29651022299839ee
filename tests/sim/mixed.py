"""A scenario that uses everything the simulator has: for tests of the simulator itself.

python -m tests.sim.mixed SEED     prints the digest of one run
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec

from tests.sim.harness import NodeCrashed, SimCluster, SimNode, run_sim
from transfer.channel import Caller, Hello, Service
from transfer.errors import TransferError
from transfer.identity import Role
from transfer.interface import Range, deadline_after

NBYTES = 8192
BIND = "tcp://127.0.0.1:7000"


class WhereIsIt(msgspec.Struct, tag="mixed.where"):
    pass


class Here(msgspec.Struct, tag="mixed.here"):
    token: bytes


class Tick(msgspec.Struct, tag="mixed.tick"):
    num_items: int


class Tock(msgspec.Struct, tag="mixed.tock"):
    number: int


async def serve(node: SimNode) -> None:
    region = node.transfer.register(bytearray(NBYTES))
    token = region.export("rw")

    async def where(message: WhereIsIt, caller: Caller) -> Here:
        await asyncio.get_running_loop().run_in_executor(None, len, "work")
        return Here(token)

    async def tick(message: Tick, caller: Caller) -> AsyncIterator[Tock]:
        for number in range(message.num_items):
            await asyncio.sleep(0.001)
            yield Tock(number)

    service = Service()
    service.on(WhereIsIt, where)
    service.on_stream(Tick, tick)
    await node.network.listen(service, Hello(identity=node.identity(Role.STORE)), BIND)


async def use(node: SimNode, server: str) -> None:
    hello = Hello(identity=node.identity(Role.DECODE))
    local = node.transfer.register(bytearray(node.rng.randbytes(NBYTES)))
    for _ in range(6):
        try:
            address = f"sim://{server}:7000"
            channel = await node.network.connect(address, hello, deadline_s=deadline_after(1))
            here = await channel.request(WhereIsIt(), Here, deadline_s=deadline_after(1))
            ranges = [Range(0, 0, NBYTES)]
            deadline_s = deadline_after(1)
            await node.transfer.write(here.token, ranges, source=local, deadline_s=deadline_s)
            await node.transfer.read(here.token, ranges, into=local, deadline_s=deadline_s)
            async with asyncio.TaskGroup() as group:
                for num_items in (5, 100):
                    group.create_task(_follow(channel, num_items))
            await channel.close()
        except* TransferError:
            await asyncio.sleep(0.1)


async def _follow(channel: object, num_items: int) -> None:
    stream = channel.stream(Tick(num_items), Tock, deadline_s=deadline_after(2))  # type: ignore
    assert [tock.number async for tock in stream] == list(range(num_items))


async def mixed_scenario(cluster: SimCluster) -> None:
    servers = ["s0", "s1"]
    for name in servers:
        await cluster.node(name).run(serve(cluster.node(name)))
    users = [
        asyncio.ensure_future(cluster.node(f"u{n}").run(use(cluster.node(f"u{n}"), servers[n % 2])))
        for n in range(4)
    ]
    for _ in range(6):
        await asyncio.sleep(cluster.rng.uniform(0.0, 0.4))
        match cluster.rng.randrange(4):
            case 0:
                node = cluster.restart(cluster.rng.choice(servers))
                await node.run(serve(node))
            case 1:
                cluster.crash(f"u{cluster.rng.randrange(4)}")
            case 2:
                cluster.block(cluster.rng.choice(servers), f"u{cluster.rng.randrange(4)}")
            case _:
                cluster.pause(servers[0])
    cluster.heal()
    for ended in await asyncio.gather(*users, return_exceptions=True):
        assert ended is None or isinstance(ended, NodeCrashed), ended
    cluster.crash_all()


if __name__ == "__main__":
    print(run_sim(mixed_scenario, int(sys.argv[1])).digest)
