"""Claims about how the work of a command is run, and what Ctrl-C does to it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from launch.runtime import run_command


def test_what_the_work_returns_or_raises_comes_out() -> None:
    async def work(number: int) -> int:
        if number < 0:
            raise ValueError(number)
        return number

    assert run_command(work(3)) == 3
    with pytest.raises(ValueError, match="-3"):
        run_command(work(-3))


def test_ctrl_c_ends_the_work_which_may_clean_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    with pytest.raises(KeyboardInterrupt):
        run_command(work())
    assert cleaned == ["up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_command_may_have_sigterm_taken_as_ctrl_c_is() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_command(work(), signals=(signal.SIGINT, signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_does_not_cancel_in_the_middle_of_a_callback() -> None:
    """The event loop has nothing to report (``conftest``)."""
    was_done: list[bool] = []

    async def work() -> None:
        future = asyncio.get_running_loop().create_future()

        def settle() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            was_done.append(future.done())
            future.set_result(None)

        asyncio.get_running_loop().call_soon(settle)
        await future
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_command(work())
    assert was_done == [False]


def test_a_second_ctrl_c_ends_work_that_does_not_come_back_to_its_loop() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on after the second one")

    with pytest.raises(KeyboardInterrupt):
        run_command(work())
