"""Ends ucx connections under load, again and again: a process of its own, as it may crash.

``python -m tests.transfer.ucx_endings close``: an owner closes while four processes read from it.
``... together``: the same with four engines of this process, which read and write.
``... kill``: this process has 400 operations pending when their owner is killed.
``... read TOKEN`` and ``... own`` are what the others start. Each prints ``survived`` at its end.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.interface import Range, deadline_after

NBYTES = 8 << 20
SHORT, LONG = 300_000, 3 << 20  # one piece; pieces that UCX registers and announces
NUM_READERS = 4
NUM_OPERATIONS = 50  # of one reader
NUM_PENDING = 400
NUM_KILLS = 6
DEADLINE_S = 5.0


async def engine() -> TransferEngine:
    made = TransferEngine(TransferConfig(transport="ucx"))
    await made.start()
    return made


async def child(*arguments: str) -> Process:
    module = "tests.transfer.ucx_endings"
    command = (sys.executable, "-m", module, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE)


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def use(peer: TransferEngine, token: bytes, under_way: asyncio.Event, writes: bool) -> None:
    """Keep the connection full until it ends; ``under_way`` is set when every operation moves."""
    local = peer.allocate(2 * NBYTES)
    moving: set[int] = set()

    async def operate(number: int) -> None:
        ranges = [Range(0, 0, (SHORT, LONG)[number % 2])]
        try:
            while True:
                deadline_s = deadline_after(DEADLINE_S)
                if writes and number % 4 < 2:
                    await peer.write(token, ranges, source=local, deadline_s=deadline_s)
                else:
                    await peer.read(token, ranges, into=local, deadline_s=deadline_s)
                moving.add(number)
                if len(moving) == NUM_OPERATIONS:
                    under_way.set()
        except TransferError:
            return  # the owner is gone

    await asyncio.gather(*(operate(number) for number in range(NUM_OPERATIONS)))


async def read(token: bytes) -> None:
    peer, under_way = await engine(), asyncio.Event()
    user = asyncio.create_task(use(peer, token, under_way, writes=False))
    await under_way.wait()
    print("under way", flush=True)
    await user
    await peer.close()


async def close() -> None:
    owner = await engine()
    token = owner.allocate(NBYTES).export("r")
    readers = [await child("read", token.hex()) for _ in range(NUM_READERS)]
    for reader in readers:
        assert await line(reader) == "under way"
    await owner.close()
    for reader in readers:
        assert await line(reader) == "survived"
        assert await reader.wait() == 0


async def together() -> None:
    owner = await engine()
    token = owner.allocate(NBYTES).export("rw")
    peers = [await engine() for _ in range(NUM_READERS)]
    ready = [asyncio.Event() for _ in peers]
    pairs = zip(peers, ready, strict=True)
    users = [asyncio.create_task(use(peer, token, each, writes=True)) for peer, each in pairs]
    for each in ready:
        await each.wait()
    await owner.close()
    await asyncio.gather(*users)
    await asyncio.gather(*(peer.close() for peer in peers))


async def own() -> None:
    owner = await engine()
    print(owner.allocate(NBYTES).export("rw").hex(), flush=True)
    await asyncio.Event().wait()


async def kill() -> None:
    peer = await engine()
    local = peer.allocate(NBYTES)
    for _ in range(NUM_KILLS):
        owner = await child("own")
        token = bytes.fromhex(await line(owner))
        first = asyncio.Event()

        async def operate(number: int, token: bytes = token, first: asyncio.Event = first) -> None:
            ranges = [Range(0, 0, (SHORT, LONG)[number % 2])]
            deadline_s = deadline_after(DEADLINE_S)
            try:
                if number % 4 < 2:
                    await peer.write(token, ranges, source=local, deadline_s=deadline_s)
                else:
                    await peer.read(token, ranges, into=local, deadline_s=deadline_s)
            except TransferError:
                return  # its owner is gone
            finally:
                first.set()

        pending = [asyncio.create_task(operate(number)) for number in range(NUM_PENDING)]
        await first.wait()
        owner.kill()
        await owner.wait()
        await asyncio.gather(*pending)
    await peer.close()


async def main(what: str, *arguments: str) -> None:
    if what == "read":
        await read(bytes.fromhex(*arguments))
    else:
        await {"close": close, "together": together, "kill": kill, "own": own}[what]()
    print("survived", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
