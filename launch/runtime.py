"""How a role process runs: event loop, signals, logging, and the one order of starting and ending.

Owns the loop and the signal handlers. Knows no roles: a role is anything with the four methods of
``Role``.

::

    start ──▶ serving ──1st signal──▶ drain(timeout) ──▶ close ──▶ exit 0
      │          │                        │ 2nd signal
      │ error    │ failed                 ▼
      ▼          ▼                      abort ──▶ exit 130
    close ──▶ exit 1 or 2

A signal while ``start`` runs cancels it and closes what was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from launch.errors import EXIT_ABORTED, ConfigError, LaunchError, StartError
from launch.option_words import reason_of
from launch.output import LineHandler, write_behind
from transfer.errors import HelloRefused, TransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_POLL_S = 0.5
FAILED_CLOSE_S = 3.0  # a role that failed may not close in order: then it is aborted


class Stopped(Exception):
    """A signal came before the wanted thing happened."""


class Role(Protocol):
    """What a process is for."""

    async def start(self) -> None: ...

    async def failed(self) -> LaunchError:
        """Return when the role cannot go on; never, as long as it can."""
        ...

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...

    def abort(self) -> None: ...


class StopSignal:
    """SIGTERM and SIGINT: the first one sets ``wait``, the second one aborts the process."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._role: Role | None = None

    def install(self, role: Role) -> None:
        self._role = role
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._event.is_set():
            logger.info("stopping: finishing what runs (a second signal stops at once)")
            self._event.set()
            return
        logger.warning("stopped at once")
        assert self._role is not None
        self._role.abort()
        logging.shutdown()
        os._exit(EXIT_ABORTED)

    async def wait(self) -> None:
        await self._event.wait()

    async def before(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which a signal cancels.

        Raises:
            Stopped: the signal came first.
        """
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            for future in (task, waiter):
                future.cancel()
            await asyncio.gather(task, waiter, return_exceptions=True)


def setup_logging(level: str) -> None:
    """Log lines for people, on stderr; work goes on where nobody reads them any more."""
    logging.basicConfig(
        handlers=[LineHandler(sys.stderr)],
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.captureWarnings(True)
    for noisy in ("urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def run_command(
    work: Coroutine[Any, Any, T], *, signals: Collection[signal.Signals] = (signal.SIGINT,)
) -> T:
    """Run what a command does to its end, and return what that is.

    Ctrl-C ends it by a callback of the loop: the handler that ``asyncio`` installs cancels in the
    middle of whatever runs, also between a future's check and its result. A second one ends a
    command that does not come back to its loop. ``signals``: which of them are taken so.

    Raises:
        KeyboardInterrupt: a signal came first; ``work`` has been cancelled and has ended.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_interruptible(work, signals))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _interruptible(work: Coroutine[Any, Any, T], signals: Collection[signal.Signals]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return await work  # signals go elsewhere
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def as_before() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def interrupt() -> None:
        as_before()
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        return await work
    finally:
        as_before()


def run_role(role: Role, *, drain_timeout_s: float) -> None:
    """Run one role to its end.

    Raises:
        LaunchError: it could not start, or could not go on.
    """
    import uvloop

    write_behind()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(role, drain_timeout_s))


async def _serve(role: Role, drain_timeout_s: float) -> None:
    stop = StopSignal()
    stop.install(role)
    failure: LaunchError | None = None
    try:
        await stop.before(role.start())
        failure = await stop.before(role.failed())
        logger.error("cannot go on: %s", failure)
        raise failure
    except Stopped:
        await role.drain(drain_timeout_s)
    except HelloRefused as error:
        raise ConfigError(f"refused by the cluster: {error}") from error
    except TransferError as error:
        raise StartError(f"{type(error).__name__}: {error}") from error
    finally:
        await (role.close() if failure is None else _close_failed(role))
    logger.info("stopped")


async def broken(
    checks: Mapping[str, Callable[[], bool]],
    refused: Callable[[], LaunchError | None] = lambda: None,
) -> LaunchError:
    """The ``failed`` of a role: return when a check, by what its failure means, is False.

    ``refused`` comes first: why the cluster has no place for this process, or None.
    """
    while True:
        if (error := refused()) is not None:
            return error
        for meaning, alive in checks.items():
            if not alive():
                return StartError(f"{meaning}: see the tracebacks above")
        await asyncio.sleep(HEALTH_POLL_S)


async def _close_failed(role: Role) -> None:
    """Close what is half dead, for a bounded time; then stop it at once.

    Whatever closing raises is said and nothing more: the process ends for the first failure.
    """
    try:
        async with asyncio.timeout(FAILED_CLOSE_S):
            await role.close()
    except Exception:
        logger.warning("the failed role did not close in order: stopped at once", exc_info=True)
        role.abort()


@contextlib.contextmanager
def config_errors(option: str) -> Any:
    """Translate the ``ValueError`` of a config class (pydantic's included) to one line."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{option}: {reason_of(error)}") from error
