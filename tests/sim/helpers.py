"""Other processes that run seeds for the test session, on cores that would be idle.

python -m tests.sim.helpers     is such a process: it reads ``module:function seed`` lines

Owns the processes and which test is whose. A seeded test is a function of its seed alone, so where
it runs makes no difference; the session goes through them from the front, helpers from the back.
What fails in a helper is run again in the session, with its traceback. Knows no simulation.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = b"+", b"-"
AHEAD = 8  # tests that one helper has been given and has not answered


class _Helper:
    """One process; answers in the order in which it was asked."""

    def __init__(self) -> None:
        self.asked: deque[str] = deque()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sim.helpers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def ask(self, test: str) -> None:
        assert self._process.stdin is not None
        self.asked.append(test)
        with contextlib.suppress(BrokenPipeError):  # it has died, and answers nothing any more
            self._process.stdin.write(f"{test}\n".encode())

    def answers(self, *, wait: bool) -> Iterator[tuple[str, bool]]:
        """Tests that have ended, and whether they passed; with ``wait``, at least one.

        A process that has died answers that none has passed.
        """
        assert self._process.stdout is not None
        timeout_s = None if wait else 0
        while self.asked and select.select([self._process.stdout], [], [], timeout_s)[0]:
            for passed in self._process.stdout.read(len(self.asked)) or bytes(len(self.asked)):
                yield self.asked.popleft(), passed == PASSED[0]
            timeout_s = 0

    def close(self) -> None:
        self.asked.clear()
        self._process.terminate()
        self._process.communicate()


class Helpers:
    """All helpers of one session.

    Args:
        tests: all seeded tests of the session, in its order.
    """

    def __init__(self, tests: Sequence[str], num_helpers: int) -> None:
        self._tests = deque(tests)  # neither run nor given away
        self._passed: dict[str, bool] = {}
        self._helpers = [_Helper() for _ in range(num_helpers)]
        self.feed()

    def has_passed(self, test: str) -> bool:
        """True: it has, elsewhere. False: it is to be run here."""
        if test in self._tests:
            self._tests.remove(test)
        for helper in self._helpers:
            while test in helper.asked:
                self._passed.update(helper.answers(wait=True))
        self.feed()
        return self._passed.get(test, False)

    def feed(self) -> None:
        """See to it that no helper is idle."""
        for helper in self._helpers:
            self._passed.update(helper.answers(wait=False))
            while self._tests and len(helper.asked) < AHEAD:
                helper.ask(self._tests.pop())

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


def num_idle_cores() -> int:
    """Cores that this session does not use itself; none when it shares them with others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return 0
    return (os.cpu_count() or 1) - 1


def serve() -> None:
    """Run what is asked for, until there is no more."""
    logging.disable(logging.CRITICAL)
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what tests print is no answer
    for line in sys.stdin:
        name, seed = line.split()
        module, function = name.split(":")
        try:
            getattr(_module(module), function)(int(seed))
        except BaseException:  # noqa: BLE001 - the session runs it again, and reports
            answers.write(FAILED)
        else:
            answers.write(PASSED)
        answers.flush()


def _module(name: str) -> ModuleType:
    """Import it; what is imported stays, and need not be looked at after every run."""
    if name not in sys.modules:
        importlib.import_module(name)
        gc.collect()
        gc.freeze()
    return sys.modules[name]


if __name__ == "__main__":
    serve()
