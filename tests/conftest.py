"""Fixtures of all tests: nothing may be left behind.

Every test fails that leaves a task, a thread that is not a daemon, a child process, or an error
that nobody awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from hypothesis import settings

THREAD_GRACE_S = 2.0

settings.register_profile("kvferry", deadline=None)  # no test depends on how busy the machine is
settings.load_profile("kvferry")


@pytest_asyncio.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fail when the test's tasks outlive it."""
    yield
    current = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() if task is not current and not task.done()]
    assert not left, f"tasks left behind: {left}"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail when threads or processes (and, in async tests, tasks) outlive the test."""
    threads = set(threading.enumerate())
    children = {child.pid for child in _children()}
    function = getattr(request, "function", None)
    if inspect.iscoroutinefunction(function):
        request.getfixturevalue("no_task_left")
    yield
    _check_threads(threads)
    if request.node.get_closest_marker("shared_processes") is None:
        _check_children(children)


class _Unawaited(logging.Handler):
    """What event loops say of callbacks that raised and futures that nobody asked."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What event loops report while the body runs."""
    handler = _Unawaited()
    asyncio_logger = logging.getLogger("asyncio")
    asyncio_logger.addHandler(handler)
    try:
        yield handler.said
    finally:
        asyncio_logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def no_error_unawaited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail when an event loop has reported an error, unless the test is marked ``loop_errors``."""
    with _heard() as said:
        yield
    if request.node.get_closest_marker("loop_errors") is None:
        assert not said, f"an event loop has reported errors: {said}"


@pytest.fixture(autouse=True, scope="package")
def no_error_in_cycles() -> Iterator[None]:
    """The same for what reference cycles kept alive: whose it was, the message may tell."""
    yield
    with _heard() as said:
        gc.collect()
    assert not said, f"an event loop has reported errors of some test of this package: {said}"


def _check_threads(before: set[threading.Thread]) -> None:
    for thread in threading.enumerate():
        if thread in before or thread.daemon or thread.name.startswith("asyncio_"):
            continue  # the loop's own executor ends with the loop
        thread.join(THREAD_GRACE_S)
        assert not thread.is_alive(), f"thread left behind: {thread.name}"


def _check_children(before: set[int]) -> None:
    left = [child for child in _children() if child.pid not in before]
    left = [child for child in left if _lives(child)]
    assert not left, f"processes left behind: {left}"


def _children() -> list[psutil.Process]:
    """Our child processes. ``psutil`` looks at every process of the machine: milliseconds."""
    lists = list(Path("/proc/self/task").glob("*/children"))  # where the kernel keeps them
    if not lists:
        return psutil.Process().children()
    pids: list[str] = []
    for path in lists:
        with contextlib.suppress(OSError):  # a thread has ended
            pids += path.read_text().split()
    children = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.append(psutil.Process(int(pid)))
    return children


def _lives(process: psutil.Process) -> bool:
    try:
        if "resource_tracker" in " ".join(process.cmdline()):
            return False  # multiprocessing's, one per interpreter
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
