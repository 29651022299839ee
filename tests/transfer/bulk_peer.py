"""A peer in a process of its own.

``python -m tests.transfer.bulk_peer TRANSPORT NBYTES [KIND] [SETTINGS]``. KIND ``registered`` uses
plain memory; SETTINGS is JSON for ``TransferConfig``. Prints a token of its region, then obeys
lines and answers each with one line::

    sum              a checksum of the region
    fill SEED        put pattern(NBYTES, SEED) into the region
    push TOKEN       write the whole region to a token (hex); "ok" or the name of the error
    pull TOKEN       read a token into the whole region; the same answers
    flood TOKEN      "flooding", then push again and again for as long as it succeeds
    close            end in order
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import numpy as np

from tests.transfer.bulk_harness import pattern, soon, whole
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.region import HostRegion


class Peer:
    """One engine with one region that does what it is told."""

    def __init__(self, engine: TransferEngine, region: HostRegion) -> None:
        self._engine = engine
        self._region = region

    async def obey(self, command: str, argument: str) -> str:
        match command:
            case "sum":
                return hashlib.sha256(self._region.view).hexdigest()
            case "fill":
                self._region.view[:] = pattern(self._region.nbytes, int(argument)).data
            case "push" | "pull":
                return await self._move(command, bytes.fromhex(argument))
            case "flood":
                print("flooding", flush=True)
                while await self._move("push", bytes.fromhex(argument)) == "ok":
                    pass
            case "close":
                await self._engine.close()
                return "closed"
        return "ok"

    async def _move(self, command: str, token: bytes) -> str:
        region, every = self._region, whole(self._region.nbytes)
        try:
            if command == "push":
                await self._engine.write(token, every, source=region, deadline_s=soon())
            else:
                await self._engine.read(token, every, into=region, deadline_s=soon())
        except TransferError as error:
            return type(error).__name__
        return "ok"


async def main(transport: str, nbytes: int, kind: str = "", settings: str = "{}") -> None:
    engine = TransferEngine(TransferConfig(transport=transport, **json.loads(settings)))
    await engine.start()
    if kind == "registered":
        region = engine.register(np.zeros(nbytes, np.uint8))
    else:
        region = engine.allocate(nbytes)
    region.view[:] = pattern(nbytes, seed=7).data
    print(region.export("rw").hex(), flush=True)
    peer, loop = Peer(engine, region), asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        command, _, argument = line.partition(" ")
        print(await peer.obey(command, argument), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
