"""Children come back after a death, are told apart in the log, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch import restart_policy
from launch.supervisor import ChildSpec, Supervisor

pytestmark = pytest.mark.net

TIMEOUT_S = 20.0
SERVE = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: signal.pause()"
)


def spec(name: str, code: str, stop_order: int = 0) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", code], {}, stop_order)


class Lines:
    """Collects what children say and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))
        self._changed.set()

    async def until(self, condition: Callable[[list[tuple[str, str]]], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()


async def test_a_killed_child_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "DELAY_MIN_S", 0.01)
    lines = Lines()
    supervisor = Supervisor([spec("a", SERVE), spec("b", SERVE)], show=lines)
    supervisor.start()
    await lines.until(lambda seen: len(seen) == 2)
    supervisor.on_ready()
    first = supervisor.pids
    os.kill(first["a"], signal.SIGKILL)
    await lines.until(lambda seen: seen.count(("a", "up")) == 2)
    assert supervisor.pids["a"] != first["a"]
    assert supervisor.pids["b"] == first["b"]
    await supervisor.stop(1.0)
    assert supervisor.pids == {}


async def test_a_failed_start_is_told_in_the_childs_own_line() -> None:
    lines = Lines()
    code = "import sys; print('kvferry: error: --page-size 3: no'); sys.exit(2)"
    supervisor = Supervisor([spec("good", SERVE), spec("bad", code)], show=lines)
    supervisor.start()
    async with asyncio.timeout(TIMEOUT_S):
        error = await supervisor.failed()
    assert str(error) == "bad: --page-size 3: no"
    assert error.exit_code == 2
    await supervisor.stop(1.0)
    assert supervisor.pids == {}


async def test_a_child_that_cannot_be_spawned_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart_policy, "DELAY_MIN_S", 0.01)
    lines = Lines()
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    supervisor = Supervisor([ChildSpec("a", [str(program), "-c", SERVE])], show=lines)
    supervisor.start()
    await lines.until(lambda seen: ("a", "up") in seen)
    supervisor.on_ready()
    program.rename(tmp_path / "away")
    os.kill(supervisor.pids["a"], signal.SIGKILL)
    await asyncio.sleep(0.2)  # some attempts fail
    assert supervisor.pids == {}
    (tmp_path / "away").rename(program)
    await lines.until(lambda seen: seen.count(("a", "up")) == 2)
    await supervisor.stop(1.0)


async def test_a_program_that_is_not_there_fails_the_start() -> None:
    supervisor = Supervisor([ChildSpec("a", ["/does/not/exist"])], show=Lines())
    supervisor.start()
    async with asyncio.timeout(TIMEOUT_S):
        assert "cannot be started" in str(await supervisor.failed())
    await supervisor.stop(0.0)


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.supervisor.KILL_GRACE_S", 0.1)
    lines = Lines()
    supervisor = Supervisor([spec("deaf", STUBBORN)], show=lines)
    supervisor.start()
    await lines.until(bool)
    pid = supervisor.pids["deaf"]
    await supervisor.stop(0.1)
    assert not psutil.pid_exists(pid)


async def test_children_stop_in_their_order() -> None:
    lines = Lines()
    code = (
        "import signal, sys\n"
        "def end(*_): print('ending', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\n"
        "while True: signal.pause()"
    )
    names = ["gateway", "node", "store"]
    supervisor = Supervisor([spec(n, code, i) for i, n in enumerate(names)], show=lines)
    supervisor.start()
    await lines.until(lambda seen: len(seen) == 3)
    await supervisor.stop(TIMEOUT_S)
    assert [name for name, line in lines.seen if line == "ending"] == names


async def test_abort_leaves_nothing_at_once() -> None:
    lines = Lines()
    supervisor = Supervisor([spec("deaf", STUBBORN)], show=lines)
    supervisor.start()
    await lines.until(bool)
    supervisor.abort()
    await supervisor.stop(0.0)
    assert supervisor.pids == {}


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Whatever happens to the parent, the kernel tells the child."""
    child = "from launch.process_env import die_with_parent; die_with_parent(); " + SERVE
    parent = (
        "import asyncio, sys\n"
        "from launch.supervisor import ChildSpec, Supervisor\n"
        "async def main():\n"
        f"    spec = ChildSpec('c', [sys.executable, '-c', {child!r}])\n"
        "    s = Supervisor([spec], show=lambda n, l: print(s.pids['c'], flush=True))\n"
        "    s.start()\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        orphan = psutil.Process(pid)
        process.kill()
        orphan.wait(TIMEOUT_S)
