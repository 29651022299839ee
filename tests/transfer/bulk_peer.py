"""A peer in a process of its own.

``python -m tests.transfer.bulk_peer TRANSPORT NBYTES [KIND] [SETTINGS]``. KIND ``registered`` uses
plain memory; SETTINGS is JSON for ``TransferConfig``. Prints a token, then obeys lines: ``sum``
prints a checksum of the region, ``close`` ends in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import numpy as np

from tests.transfer.bulk_harness import pattern
from transfer.config import TransferConfig
from transfer.engine import TransferEngine


async def main(transport: str, nbytes: int, kind: str = "", settings: str = "{}") -> None:
    engine = TransferEngine(TransferConfig(transport=transport, **json.loads(settings)))
    await engine.start()
    if kind == "registered":
        region = engine.register(np.zeros(nbytes, np.uint8))
    else:
        region = engine.allocate(nbytes)
    region.view[:] = pattern(nbytes, seed=7).data
    print(region.export("rw").hex(), flush=True)
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        if line == "sum":
            print(hashlib.sha256(region.view).hexdigest(), flush=True)
        elif line == "close":
            await engine.close()
            print("closed", flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
