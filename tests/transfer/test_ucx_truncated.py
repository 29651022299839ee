"""A UCX that is set up in a way in which it loses bytes: an error, and never success.

Segments of shared memory of 64 KiB are such a setting of UCX 1.2x: the length of what lies in one
has 16 bits. In a process of its own, since UCX reads some of its settings once.
``python -m tests.transfer.test_ucx_truncated read|write`` prints what came of it.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tests.transfer.bulk_harness import LIMIT_S, MIB, ROOT, pattern, soon, whole
from tests.transfer.ucx_support import NEEDS_UCX
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import PeerLost

pytestmark = NEEDS_UCX
SETTING = {"UCX_TLS": "posix,self", "UCX_POSIX_SEG_SIZE": "65536"}
NBYTES = 4 * MIB


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_bytes_that_ucx_loses_are_an_error(kind: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transfer.test_ucx_truncated", kind),
        cwd=ROOT,
        env=os.environ | SETTING,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2000:]
    assert said in (b"lost\n", b"right\n")  # a UCX that does better may come


async def outcome(kind: str) -> str:
    owner, peer = (TransferEngine(TransferConfig(transport="ucx")) for _ in range(2))
    await owner.start()
    await peer.start()
    remote, local = owner.allocate(NBYTES), peer.allocate(NBYTES)
    source = remote if kind == "read" else local
    source.view[:] = pattern(NBYTES).data
    token = remote.export("rw")
    try:
        if kind == "read":
            await peer.read(token, whole(NBYTES), into=local, deadline_s=soon())
        else:
            await peer.write(token, whole(NBYTES), source=local, deadline_s=soon())
        return "right" if remote.view == local.view else "WRONG"
    except PeerLost:
        return "lost"
    finally:
        await peer.close()
        await owner.close()


if __name__ == "__main__":
    print(asyncio.run(outcome(*sys.argv[1:])))
