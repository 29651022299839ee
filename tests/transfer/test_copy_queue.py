"""Turns on the copy threads: fair among equals, urgent first, nobody starved."""

from __future__ import annotations

import random

from transfer.copy_queue import BACKGROUND_TURN, CopyQueue
from transfer.interface import Priority

NOW, BACKGROUND = Priority.NOW, Priority.BACKGROUND


class Job:
    """A copy of so many pieces; ``take`` gives its name."""

    def __init__(self, name: str, pieces: int, *, max_threads: int = 99) -> None:
        self.name = name
        self.left = pieces
        self.running = 0
        self._max_threads = max_threads

    @property
    def wants_turn(self) -> bool:
        return self.left > 0 and self.running < self._max_threads

    def take(self) -> str:
        self.left -= 1
        self.running += 1
        return self.name


def turns(queue: CopyQueue[Job]) -> str:
    """Take everything there is."""
    order = ""
    while (name := queue.next(Job.take)) is not None:
        order += name
    return order


def test_copies_of_one_priority_take_turns() -> None:
    queue = CopyQueue[Job]()
    for name, pieces in (("a", 4), ("b", 1), ("c", 2)):
        queue.add(Job(name, pieces), NOW)
    assert turns(queue) == "abcacaa"
    assert len(queue) == 0


def test_an_urgent_copy_goes_before_those_that_waited_longer() -> None:
    queue = CopyQueue[Job]()
    queue.add(Job("b", 2), BACKGROUND)
    queue.add(Job("n", 2), NOW)
    assert turns(queue) == "nnbb"


def test_background_gets_one_turn_in_so_many() -> None:
    queue = CopyQueue[Job]()
    queue.add(Job("n", 100), NOW)
    queue.add(Job("b", 3), BACKGROUND)
    urgent = "n" * (BACKGROUND_TURN - 1)
    assert turns(queue).startswith(f"{urgent}b{urgent}b{urgent}bn")


def test_urgent_turns_while_nobody_waits_in_the_background_do_not_count() -> None:
    queue = CopyQueue[Job]()
    queue.add(Job("n", 100), NOW)
    for _ in range(50):
        queue.next(Job.take)
    queue.add(Job("b", 1), BACKGROUND)
    assert turns(queue).index("b") == BACKGROUND_TURN - 1


def test_a_copy_is_away_while_it_has_all_the_threads_that_it_may_have() -> None:
    queue, job, other = CopyQueue[Job](), Job("a", 3, max_threads=1), Job("b", 1)
    queue.add(job, NOW)
    queue.add(other, NOW)
    assert queue.next(Job.take) == "a"
    queue.add(job, NOW)
    assert turns(queue) == "b"
    job.running -= 1
    queue.add(job, NOW)
    queue.add(job, NOW)
    assert turns(queue) == "a"


def test_a_dropped_copy_gets_no_turn() -> None:
    queue, job = CopyQueue[Job](), Job("a", 3)
    queue.add(job, BACKGROUND)
    queue.drop(job)
    queue.drop(job)
    assert queue.next(Job.take) is None
    assert len(queue) == 0


def test_every_piece_of_random_copies_is_taken_once_and_the_bound_holds() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        queue, jobs = CopyQueue[Job](), dict[str, tuple[Job, Priority]]()
        wanted, taken, waited = 0, 0, 0
        for step in range(300):
            if rng.random() < 0.2:
                job = Job(str(step), rng.randint(1, 6))
                priority = rng.choice((NOW, BACKGROUND))
                jobs[job.name] = job, priority
                wanted += job.left
                queue.add(job, priority)
            background_waits = any(j.left and p is BACKGROUND for j, p in jobs.values())
            name = queue.next(Job.take)
            if name is not None:
                taken += 1
                waited = waited + 1 if background_waits and jobs[name][1] is NOW else 0
                assert waited < BACKGROUND_TURN
        while queue.next(Job.take) is not None:
            taken += 1
        assert taken == wanted


class Compared(Job):
    """Counts how often a copy is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_comparisons += 1
        return self is other

    __hash__ = object.__hash__


def test_dropping_thousands_of_copies_does_not_look_through_the_others() -> None:
    queue, jobs = CopyQueue[Job](), [Compared(str(number), 2) for number in range(1000)]
    for job in jobs:
        queue.add(job, NOW)
    for job in reversed(jobs):
        queue.drop(job)
    assert len(queue) == 0
    assert Compared.num_comparisons < len(jobs)
