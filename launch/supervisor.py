"""Child processes that live and end with this one: the shell around ``RestartPolicy``.

Owns the processes, their output and their signals. Knows command lines, not what they do.

* Each child's lines go to stderr with its name before them; its last ``kvferry: error:`` line is
  kept, so that a failed start can be told in that one line.
* A line that cannot be shown (nobody reads this process's output any more) is lost: the children
  do not notice. A child's pipe is read to its end, whatever becomes of the lines.
* A child is its own session: Ctrl-C reaches this process only, which then stops them in order.
* Whatever happens here, no child is left: ``stop`` terminates, then kills; should this process be
  killed, the kernel tells the children (``process_env.die_with_parent``).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from launch.errors import EXIT_FAILED, StartError
from launch.process_env import child_environment
from launch.progress import say
from launch.restart_policy import ChildState, Done, Fail, Restart, RestartPolicy

logger = logging.getLogger(__name__)

LINE_NBYTES_MAX = 1 << 16
KILL_GRACE_S = 5.0  # from the end of the drain to SIGKILL
ERROR_PREFIX = "kvferry: error: "


class ChildSpec(NamedTuple):
    """What to run. Children of a lower ``stop_order`` are stopped first."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = {}
    stop_order: int = 0


class Child:
    """One supervised child over all its lives."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.policy = RestartPolicy()
        self.process: asyncio.subprocess.Process | None = None
        self.error: str | None = None
        self.ended = asyncio.Event()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    """Runs children until ``stop``.

    Use as: ``start()``; wait for readiness together with ``failed``; ``on_ready()``; ``stop()``.
    """

    def __init__(
        self, specs: Sequence[ChildSpec], *, show: Callable[[str, str], None] | None = None
    ) -> None:
        self._children = [Child(spec) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []
        self._show = show or _show_line
        self._failed: asyncio.Future[StartError] | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that are alive."""
        return {
            child.spec.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.returncode is None
        }

    def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._supervise(child), name=f"supervise-{child.spec.name}")
            for child in self._children
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def failed(self) -> StartError:
        """Return when the cluster cannot start, or when no child is left; with the reason."""
        assert self._failed is not None, "start() first"
        return await asyncio.shield(self._failed)

    def on_ready(self) -> None:
        for child in self._children:
            child.policy.on_cluster_ready()

    async def stop(self, drain_s: float) -> None:
        """Terminate the children in their order, kill those that take too long; idempotent."""
        for child in self._children:
            child.policy.on_stopping()
        for order in sorted({child.spec.stop_order for child in self._children}):
            group = [child for child in self._children if child.spec.stop_order == order]
            await self._stop_group(group, drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children:
            if child.process is not None:  # killed where nobody was left to wait for its end
                await child.process.wait()

    def abort(self) -> None:
        """Kill all children now."""
        for child in self._children:
            child.policy.on_stopping()
            child.signal(signal.SIGKILL)

    async def _stop_group(self, group: list[Child], drain_s: float) -> None:
        waiting = [child for child in group if child.process and child.process.returncode is None]
        if not waiting:
            return
        for child in waiting:
            child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s + KILL_GRACE_S):
                for child in waiting:
                    await child.ended.wait()
        except TimeoutError:
            for child in waiting:
                if not child.ended.is_set():
                    logger.warning("%s did not stop in time: killed", child.spec.name)
                    child.signal(signal.SIGKILL)
            for child in waiting:
                await child.ended.wait()

    async def _supervise(self, child: Child) -> None:
        """One child's lives, one after the other."""
        loop = asyncio.get_running_loop()
        while True:
            code = await self._run_once(child)
            decision = child.policy.on_exit(code, loop.time())
            match decision:
                case Done():
                    return
                case Fail(fatal=fatal):
                    self._report_failure(child, code, fatal=fatal)
                    return
                case Restart(delay_s=delay_s):
                    logger.warning(
                        "%s ended (%s): starting it again in %.1f s",
                        child.spec.name,
                        _describe(code),
                        delay_s,
                    )
                    await asyncio.sleep(delay_s)

    async def _run_once(self, child: Child) -> int:
        child.ended.clear()
        child.error = None
        child.policy.on_started(asyncio.get_running_loop().time())
        try:
            process = await _spawn(child.spec)
        except OSError as error:  # no memory, no file descriptors: a death like any other
            child.process, child.error = None, f"cannot be started: {error}"
            logger.warning("%s %s", child.spec.name, child.error)
            child.ended.set()
            return EXIT_FAILED
        child.process = process
        try:
            assert process.stdout is not None
            await self._forward(child, process.stdout)
            return await process.wait()
        finally:
            if process.returncode is None:  # cancelled
                process.kill()
            child.ended.set()

    async def _forward(self, child: Child, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than LINE_NBYTES_MAX: dropped by the reader
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text.startswith(ERROR_PREFIX):
                child.error = text.removeprefix(ERROR_PREFIX)
            self._show(child.spec.name, text)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A child that nobody supervises any more ends the cluster: it must not go unnoticed."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        logger.error("%s failed", task.get_name(), exc_info=error)
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_result(StartError(f"{task.get_name()}: {error!r}"))

    def _report_failure(self, child: Child, code: int, *, fatal: bool) -> None:
        reason = child.error or f"it ended ({_describe(code)}): see its lines above"
        message = f"{child.spec.name}: {reason}"
        if not fatal:
            logger.error("%s is not started again: %s", child.spec.name, reason)
        assert self._failed is not None
        last = all(child.policy.state is ChildState.FAILED for child in self._children)
        if (fatal or last) and not self._failed.done():
            failure = StartError(message)
            failure.exit_code = code if code > 0 else StartError.exit_code
            self._failed.set_result(failure)


async def _spawn(spec: ChildSpec) -> asyncio.subprocess.Process:
    """Start one child: its own session, both outputs in one pipe."""
    return await asyncio.create_subprocess_exec(
        *spec.argv,
        env=child_environment(spec.env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=LINE_NBYTES_MAX,
    )


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _show_line(name: str, line: str) -> None:
    say(f"[{name}] {line}")
