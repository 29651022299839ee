"""Other processes that run seeds for the test session, on cores that would be idle.

python -m tests.sim.helpers     is such a process: it reads ``module:function seed`` lines

Owns the processes and which test is whose. A seeded test is a function of its seed alone, so where
it runs makes no difference; the session goes through them from the front, helpers from the back.
Knows no simulation.

What a helper says of a test, and what becomes of it:

    passed      nothing is left to do
    failed      it is run again in the session, for its traceback there; when it passes, it has
                failed all the same: it is no function of its seed
    nothing     the helper has died: the test is run in the session, and ``report`` says so
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
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[2]
READ_NBYTES = 65_536
END_S = 5.0  # for a helper that says nothing any more to have ended
AHEAD = 8  # tests that one helper has been given and has not answered


class Answer(msgspec.Struct):
    """What became of one test in a helper; a line of JSON.

    Attributes:
        failure: its traceback; None when it has passed.
    """

    failure: str | None = None


class _Helper:
    """One process; answers in the order in which it was asked."""

    def __init__(self) -> None:
        self.asked: deque[str] = deque()
        self.death: str | None = None
        self._heard = b""  # of an answer that is not complete
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

    def answers(self, *, wait: bool) -> Iterator[tuple[str, Answer]]:
        """Tests that have ended, and how; with ``wait``, at least one, or its ``death``."""
        assert self._process.stdout is not None
        while self.asked and select.select([self._process.stdout], [], [], None if wait else 0)[0]:
            heard = self._process.stdout.read(READ_NBYTES)
            if not heard:
                self._died()
            *lines, self._heard = (self._heard + heard).split(b"\n")
            for line in lines:
                yield self.asked.popleft(), msgspec.json.decode(line, type=Answer)
                wait = False

    def _died(self) -> None:
        """Nobody answers what it was asked."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        tests = ", ".join(self.asked)
        self.death = f"a helper process died (exit code {code}); run in the session: {tests}"
        self.asked.clear()

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
        self._answers: dict[str, Answer] = {}
        self._helpers = [_Helper() for _ in range(num_helpers)]
        self.feed()

    def has_run(self, test: str, run: Callable[[], object]) -> bool:
        """True: it has passed, elsewhere. False: it is to be run here.

        Args:
            run: runs it here, if it has failed elsewhere.

        Raises:
            Exception: it has failed; whatever ``run`` raises, or that it passes here.
        """
        answer = self.answer(test)
        if answer is None or answer.failure is None:
            return answer is not None
        run()
        pytest.fail(
            f"{test} has failed in another process and passes here: it is not a function of its "
            f"seed alone. There it said:\n{answer.failure}",
            pytrace=False,
        )

    def answer(self, test: str) -> Answer | None:
        """What became of the test elsewhere; None: it was not run to its end there."""
        if test in self._tests:
            self._tests.remove(test)
        for helper in self._helpers:
            while test in helper.asked:
                self._answers.update(helper.answers(wait=True))
        self.feed()
        return self._answers.get(test)

    def feed(self) -> None:
        """See to it that no helper is idle."""
        for helper in self._helpers:
            self._answers.update(helper.answers(wait=False))
            while helper.death is None and self._tests and len(helper.asked) < AHEAD:
                helper.ask(self._tests.pop())

    def report(self) -> list[str]:
        """What a person should know of helpers that did not do their work."""
        return [helper.death for helper in self._helpers if helper.death is not None]

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


def num_idle_cores() -> int:
    """Cores that this session does not use itself; none when it shares them with others."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return 0
    return len(os.sched_getaffinity(0)) - 1


def serve() -> None:
    """Run what is asked for, until there is no more."""
    logging.disable(logging.CRITICAL)
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what tests print is no answer
    for line in sys.stdin:
        name, seed = line.split()
        module, function = name.split(":")
        answer = Answer()
        try:
            getattr(_module(module), function)(int(seed))
        except KeyboardInterrupt:  # the session ends too
            return
        except BaseException:  # noqa: BLE001 - told, and it fails the test
            answer.failure = traceback.format_exc()
        answers.write(msgspec.json.encode(answer) + b"\n")
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
