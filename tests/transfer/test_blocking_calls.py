"""Blocking calls: bounded threads, outcomes on the loop, and a hang keeps nobody."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from transfer.blocking_calls import BlockingCalls

_HANGS = """
import asyncio, threading
from transfer.blocking_calls import BlockingCalls
async def main():
    calls = BlockingCalls("hung", 1)
    started = threading.Event()
    def hang():
        started.set()
        threading.Event().wait()
    calls.start(hang)
    while not started.is_set():
        await asyncio.sleep(0)
    assert not await calls.idle(0.0)
    calls.close()
asyncio.run(main())
print("ended")
"""


def fail() -> None:
    raise OSError(5, "broken")


async def test_a_call_ends_with_its_result_or_its_error() -> None:
    calls = BlockingCalls("test-calls", 2)
    assert await calls.start(divmod, 7, 2) == (3, 1)
    with pytest.raises(OSError, match="broken"):
        await calls.start(fail)
    assert await calls.idle(0.0)
    calls.close()
    calls.close()


async def test_no_more_threads_than_asked_for_and_none_left_after_close() -> None:
    calls, gate = BlockingCalls("test-calls", 2), threading.Event()
    held = [calls.start(gate.wait, 30) for _ in range(5)]
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("test-calls")]
    assert len(ours) == 2
    assert len(calls) == 5
    calls.close()
    gate.set()
    assert [await call for call in held] == [True] * 5, "a call that was given was not made"
    for thread in ours:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.net
def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"ended\n", b"")
