"""A peer in a process of its own that stands still in the middle of a piece, inside of the memory.

``python -m tests.transfer.shm_holder``. Reads a write token in hex from its standard input, begins
to write 0xEE all over the region, and says ``inside`` when it is about to move the first byte. On
``go`` it moves on, and says how the operation ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from transfer.config import TransferConfig
from transfer.copy_pieces import Mover
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.interface import Range, deadline_after
from transfer.token import decode_token

LIMIT_S = 60.0
MARK = 0xEE


def hold_first_piece() -> None:
    move = Mover.move

    def held(self: Mover, piece: Sequence[Range]) -> None:
        Mover.move = move  # type: ignore[method-assign]
        print("inside", flush=True)
        assert sys.stdin.readline().strip() == "go"
        move(self, piece)

    Mover.move = held  # type: ignore[method-assign]


async def main() -> None:
    token = bytes.fromhex(sys.stdin.readline())
    engine = TransferEngine(TransferConfig(transport="shm", inline_copy_nbytes=0))
    await engine.start()
    nbytes = decode_token(token).nbytes
    local = engine.allocate(nbytes)
    local.view[:] = bytes([MARK]) * nbytes
    hold_first_piece()
    try:
        whole = [Range(0, 0, nbytes)]
        await engine.write(token, whole, source=local, deadline_s=deadline_after(LIMIT_S))
        print("written", flush=True)
    except TransferError as error:
        print(type(error).__name__, flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
