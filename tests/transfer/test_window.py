"""The window of one peer against a naive model, and the promises it makes to both classes."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.interface import Priority
from transfer.window import BACKGROUND_SHARE, NOW_RESERVE, RequestWindow

NOW, BACKGROUND = Priority.NOW, Priority.BACKGROUND
LIMIT_NBYTES = 100
LIMIT_REQUESTS = 8


class Part(NamedTuple):
    """One request."""

    job: int
    index: int
    nbytes: int
    priority: Priority


class Parts:
    """A job of parts of given sizes."""

    def __init__(self, *sizes: int, job: int = 0, priority: Priority = NOW) -> None:
        self.parts = deque(Part(job, i, size, priority) for i, size in enumerate(sizes))

    def take(self) -> Part | None:
        return self.parts.popleft() if self.parts else None


class Model:
    """The rules word by word: lists, exact fractions, everything counted anew each time."""

    def __init__(self) -> None:
        self.waiting: dict[Priority, list[list[Part]]] = {NOW: [], BACKGROUND: []}
        self.in_flight: list[Part] = []
        self.credit = Fraction(0)

    def _head(self, priority: Priority) -> Part | None:
        jobs = self.waiting[priority]
        while jobs and not jobs[0]:
            jobs.pop(0)
        return jobs[0][0] if jobs else None

    def _fits(self, part: Part) -> bool:
        if not self.in_flight:
            return True
        nbytes = sum(p.nbytes for p in self.in_flight) + part.nbytes
        return nbytes <= LIMIT_NBYTES and len(self.in_flight) < LIMIT_REQUESTS

    def _leaves_reserve(self, part: Part) -> bool:
        own = [p for p in self.in_flight if p.priority is BACKGROUND]
        open_part = 1 - Fraction(1, NOW_RESERVE)
        nbytes = sum(p.nbytes for p in own) + part.nbytes
        few = nbytes <= LIMIT_NBYTES * open_part and len(own) < LIMIT_REQUESTS * open_part
        return not own or few

    def next(self) -> Part | None:
        urgent, background = self._head(NOW), self._head(BACKGROUND)
        due = background and (urgent is None or self.credit >= background.nbytes)
        if background and due and self._leaves_reserve(background):
            return self._start(background) if self._fits(background) else None
        return self._start(urgent) if urgent and self._fits(urgent) else None

    def _start(self, part: Part) -> Part:
        if not (self._head(NOW) and self._head(BACKGROUND)):
            self.credit = Fraction(0)
        elif part.priority is NOW:
            self.credit += Fraction(part.nbytes, BACKGROUND_SHARE - 1)
        else:
            self.credit = max(Fraction(0), self.credit - part.nbytes)
        jobs = self.waiting[part.priority]
        jobs.append(jobs.pop(0)[1:])
        self.in_flight.append(part)
        return part


# Powers of two times (BACKGROUND_SHARE - 1): credits are then exact in floating point as well.
part_sizes = st.lists(st.sampled_from([7, 14, 28, 56, 112]), min_size=1, max_size=6)


class WindowMachine(RuleBasedStateMachine):
    """Adds, starts, ends and drops in any order; model and window must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.window: RequestWindow[Part] = RequestWindow(LIMIT_NBYTES, LIMIT_REQUESTS)
        self.model = Model()
        self.jobs: dict[int, Parts] = {}

    @rule(sizes=part_sizes, priority=st.sampled_from(list(Priority)))
    def add(self, sizes: list[int], priority: Priority) -> None:
        number = len(self.jobs)
        job = self.jobs[number] = Parts(*sizes, job=number, priority=priority)
        self.model.waiting[priority].append(list(job.parts))
        self.window.add(job, priority)

    @rule()
    def start(self) -> None:
        assert self.window.next() == self.model.next()

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.model.in_flight) - 1))
        part = self.model.in_flight.pop(at)
        self.window.done(part.nbytes, part.priority)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.jobs)))
        self.window.drop(self.jobs[number])
        for jobs in self.model.waiting.values():
            jobs[:] = [parts for parts in jobs if not parts or parts[0].job != number]

    @invariant()
    def what_is_in_flight_is_counted_and_bounded(self) -> None:
        in_flight = self.model.in_flight
        assert self.window.nbytes == sum(p.nbytes for p in in_flight)
        assert self.window.num_requests == len(in_flight)
        assert len(in_flight) <= 1 or self.window.nbytes <= LIMIT_NBYTES

    def teardown(self) -> None:
        """Whatever was added comes out once everything in flight ends, and then nothing is left."""
        while (part := self.window.next()) is not None or self.model.in_flight:
            if part is None:
                ended = self.model.in_flight.pop()
                self.window.done(ended.nbytes, ended.priority)
            else:
                self.model.in_flight.append(part)
        assert self.window.next() is None
        assert self.window.nbytes == self.window.num_requests == self.window.num_jobs == 0


TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


def started(window: RequestWindow[Part]) -> list[Part]:
    found = []
    while (part := window.next()) is not None:
        found.append(part)
    return found


def test_operations_of_one_class_take_turns() -> None:
    window: RequestWindow[Part] = RequestWindow(10)
    window.add(Parts(4, 4, 4))
    window.add(Parts(3))
    assert [part.nbytes for part in started(window)] == [4, 3]
    window.done(4)
    assert [part.nbytes for part in started(window)] == [4]


def test_a_request_larger_than_the_window_goes_alone() -> None:
    window: RequestWindow[Part] = RequestWindow(10)
    window.add(Parts(50, 1))
    assert [part.nbytes for part in started(window)] == [50]
    window.done(50)
    assert [part.nbytes for part in started(window)] == [1]


def test_urgent_work_goes_first_whoever_came_first() -> None:
    window: RequestWindow[Part] = RequestWindow(30)
    window.add(Parts(10, 10, priority=BACKGROUND), BACKGROUND)
    window.add(Parts(10, 10), NOW)
    assert [part.priority for part in started(window)] == [NOW, NOW, BACKGROUND]


def test_pushes_leave_room_for_an_urgent_read() -> None:
    window: RequestWindow[Part] = RequestWindow(100)
    window.add(Parts(*[5] * 40, priority=BACKGROUND), BACKGROUND)
    assert sum(part.nbytes for part in started(window)) == 100 - 100 // NOW_RESERVE
    window.add(Parts(5))
    assert [part.priority for part in started(window)] == [NOW]


def test_pushes_leave_room_for_the_number_of_urgent_reads_as_well() -> None:
    window: RequestWindow[Part] = RequestWindow(1000, 8)
    window.add(Parts(*[1] * 40, priority=BACKGROUND), BACKGROUND)
    assert len(started(window)) == 6
    window.add(Parts(1))
    assert [part.priority for part in started(window)] == [NOW]


class Endless:
    """A job that never runs out."""

    def __init__(self, nbytes: int, priority: Priority) -> None:
        self._part = Part(0, 0, nbytes, priority)

    def take(self) -> Part:
        return self._part


@given(st.integers(1, 60), st.integers(1, 60))
def test_background_gets_its_share_of_the_bytes_and_no_more(urgent: int, background: int) -> None:
    window: RequestWindow[Part] = RequestWindow(100)
    window.add(Endless(urgent, NOW), NOW)
    window.add(Endless(background, BACKGROUND), BACKGROUND)
    in_flight: deque[Part] = deque()
    moved = {NOW: 0, BACKGROUND: 0}
    while sum(moved.values()) < 20 * BACKGROUND_SHARE * 60:
        in_flight.extend(started(window))
        part = in_flight.popleft()
        moved[part.priority] += part.nbytes
        window.done(part.nbytes, part.priority)
    share = moved[BACKGROUND] / sum(moved.values())
    assert 0.8 / BACKGROUND_SHARE < share < 1.2 / BACKGROUND_SHARE


def test_a_background_request_as_large_as_the_window_gets_its_turn() -> None:
    window: RequestWindow[Part] = RequestWindow(100)
    window.add(Parts(*[20] * 200), NOW)
    window.add(Parts(100, priority=BACKGROUND), BACKGROUND)
    in_flight: deque[Part] = deque()
    for _ in range(200):
        in_flight.extend(started(window))
        part = in_flight.popleft()
        if part.priority is BACKGROUND:
            return
        window.done(part.nbytes, part.priority)
    raise AssertionError("background starved")


class Compared(Parts):
    """Counts how often a job is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_comparisons += 1
        return self is other

    __hash__ = object.__hash__


def test_dropping_thousands_of_jobs_does_not_look_through_the_others() -> None:
    """A peer with thousands of operations is lost: the I/O loop must not stand still for it."""
    window: RequestWindow[Part] = RequestWindow(100)
    jobs = [Compared(50, 50) for _ in range(1000)]
    for job in jobs:
        window.add(job)
    started(window)
    for job in reversed(jobs):
        window.drop(job)
    assert window.num_jobs == 0
    assert Compared.num_comparisons < len(jobs)
