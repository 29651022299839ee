"""What must hold in a simulated store cluster whatever happens, checked from outside.

Owns ``StoreChecks`` (verdicts over all nodes and calls); what one life of one node has promised is
watched by ``node_watch.py``. Both see messages and results only: a directory that keeps its books
wrongly and consistently is still found out. Each checker has a name; a broken one ends the run::

    integrity     what a reader was told it has READ are the bytes that belong to the key
    visibility    nothing is matched, leased, or said to be taken or present that was not committed
                  (or on the SSD), whole
    lease safety  memory promised to a reader or a writer is not granted to another meanwhile, nor
                  read into by the node when it has been granted to another
    fencing       a commit or abort by an old name changes nothing; a name is never used twice; what
                  is asked of another incarnation is refused
    conservation  the node's own books: free + writing + ready + owed = total
    completion    every call ends once, by its deadline, with one outcome for each page
    quiescence    when everybody has finished, no promise is left
    liveness      without faults everything works again
    replicas      what was stored on R nodes survives the loss of one
    soundness     no handler fails by an error of its own

Promises are counted as nodes state them, without the grace that nodes add for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.sim.loop import CURRENT_LIFE, SimLoop

CHECK_EVERY = 40  # deliveries between two checks of one node's own books
LATE_S = 0.5  # how much later than its deadline a call may end: it waits for its own clean-up


class Violation(AssertionError):
    """A checker was broken; ``checker`` is its name."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


def require(condition: bool, checker: str, what: str) -> None:
    """Raise ``Violation`` unless ``condition``."""
    if not condition:
        raise Violation(checker, what)


class StoreChecks:
    """The checkers of one run.

    Args:
        loop: a violation inside of a handler, which would answer it as an error, goes there.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.num_open = 0
        self.counts: Counter[str] = Counter()
        self._loop = loop
        self._nodes: dict[str, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._turn = 0

    def report(self, checker: str, what: str) -> None:
        """End the run, from where an exception would be answered or wrapped."""
        self._loop.failures.append(Violation(checker, what))

    # ---- conservation

    def follow(self, name: str, alive: Callable[[], bool], check: Callable[[], None]) -> None:
        """Check the books of this life of a node from now on."""
        self._nodes[name] = alive, check

    def check_next(self) -> None:
        """Check one node, each in its turn, once in ``CHECK_EVERY``: a broken book stays broken."""
        self._turn += 1
        if self._nodes:
            self._check(list(self._nodes)[self._turn % len(self._nodes)])

    def check_all(self) -> None:
        for name in self._nodes:
            self._check(name)

    def _check(self, name: str) -> None:
        alive, check = self._nodes[name]
        if not alive():
            return
        try:
            check()
        except AssertionError as error:
            raise Violation("conservation", f"{name}: {error!r}") from error

    # ---- integrity and completion

    @contextmanager
    def call(self, what: str, deadline_s: float) -> Iterator[None]:
        """One call of a client; it must end by its deadline, unless its process stood still."""
        life = CURRENT_LIFE.get()
        num_pauses = life.num_pauses if life is not None else 0
        self.num_open += 1
        self.counts[what] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            paused = life is not None and (life.num_pauses != num_pauses or life.paused)
            late_s = self._loop.time() - deadline_s
            if not paused and late_s > LATE_S:
                self.report("completion", f"{what} ended {late_s:.3f} s late")

    def finish(self) -> None:
        """The run is over: all calls have ended."""
        require(not self.num_open, "completion", f"{self.num_open} calls have not ended")
        self.check_all()


def check_quiet(name: str, numbers: dict[str, float], promises: Sequence[str]) -> None:
    """All work is done: nothing is promised to anybody."""
    for promise in promises:
        require(not numbers[promise], "quiescence", f"{name}: {promise}={numbers[promise]}")
