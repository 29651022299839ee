"""A ucx connection that ends under load takes nothing else with it: no crash, no hang.

In a process of its own, in the background: a crash of UCX is then a failed test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from tests.transfer.bulk_harness import ROOT
from tests.transfer.ucx_support import NEEDS_UCX

pytestmark = [NEEDS_UCX, pytest.mark.net]
LIMIT_S = 60.0  # of a run that takes a few seconds: hanging is for ever


@pytest.mark.parametrize("what", ["close", "together", "kill"])
async def test_connections_that_end_under_load_leave_every_engine_able_to_close(what: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transfer.ucx_endings",
        what,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, errors = await process.communicate()
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # it, if it hangs, and what it has started
        except ProcessLookupError:
            pass  # all have ended
    assert (process.returncode, said) == (0, b"survived\n"), errors.decode()[-2000:]
