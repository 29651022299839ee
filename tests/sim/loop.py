"""An asyncio loop with a virtual clock, whose every choice follows from a seed.

Owns time, the order of callbacks, and which *life* (one process life of one simulated node) each
callback belongs to. Knows no network. Time jumps to the next timer when nothing is ready.

* A life's context variable is inherited by every task, timer and callback made while it runs, so
  ``pause`` can hold all of them back (SIGSTOP) and ``clock_skew_s`` can shift its clock.
* Tasks and futures hash by creation order: ``TaskGroup`` and ``asyncio.wait`` iterate over sets,
  and the default hash is a memory address.
* Errors that can only be bugs end the run when they end a node's task, even if nobody awaits it.
* ``run_in_executor`` runs the function inline at a seeded moment and completes at a later one, so
  that a crash, a cancel or another event can fall before, between or after.

Works by replacing ``BaseEventLoop._run_once`` (stable from CPython 3.11 to 3.14).
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import random
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EXECUTOR_DELAY_S_MEAN = 1e-3
MAX_CALLBACKS = 50_000_000  # a scenario that spins without moving the clock ends here
MAX_CALLBACKS_AT_ONE_TIME = 1_000_000
OUR_ERRORS = (AssertionError, TypeError, AttributeError, NameError, LookupError, ArithmeticError)


class SimDeadlock(AssertionError):
    """Every task is blocked and no timer is pending: the scenario can never make progress."""


class Life:
    """One process life of one node, as far as the loop is concerned."""

    def __init__(self, name: str, clock_skew_s: float = 0.0) -> None:
        self.name = name
        self.alive = True
        self.died_silently = False
        self.paused = False
        self.num_pauses = 0
        self.clock_skew_s = clock_skew_s
        self.tasks: dict[int, SimTask] = {}
        self.held_back: deque[asyncio.Handle] = deque()

    def __repr__(self) -> str:
        return f"Life({self.name})"


CURRENT_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
_current_life = CURRENT_LIFE.get


class SimTask(asyncio.Task[Any]):
    """A task that hashes by creation order and is listed in its life."""

    _sim_id: int

    def __new__(cls, coro: Any, *, loop: SimLoop, **kwargs: Any) -> SimTask:
        self = super().__new__(cls)
        loop._ids = self._sim_id = loop._ids + 1  # before __init__, which already needs the hash
        return self

    def __init__(self, coro: Any, *, loop: SimLoop, **kwargs: Any) -> None:
        super().__init__(coro, loop=loop, **kwargs)
        context = kwargs.get("context")
        life = CURRENT_LIFE.get() if context is None else context.get(CURRENT_LIFE)
        if life is not None:
            life.tasks[self._sim_id] = self
            self.add_done_callback(lambda task: loop.task_ended(life, task))

    def __hash__(self) -> int:
        return self._sim_id


class SimFuture(asyncio.Future[Any]):
    """A future that hashes by creation order."""

    _sim_id: int

    def __new__(cls, *, loop: SimLoop) -> SimFuture:
        self = super().__new__(cls)
        loop._ids = self._sim_id = loop._ids + 1
        return self

    def __hash__(self) -> int:
        return self._sim_id


class SimHandle(events.Handle):
    """A handle that asks the loop for nothing when it is made: a simulation makes millions."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class SimTimer(events.TimerHandle):
    """Likewise. Timers are compared by the loop's queue, not with one another."""

    __slots__ = ()

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: contextvars.Context | None,
    ) -> None:
        SimHandle.__init__(self, callback, args, loop, context)  # type: ignore[arg-type]
        self._when = when_s
        self._scheduled = True


class SimLoop(base_events.BaseEventLoop):
    """Event loop with a virtual clock, in seconds since the start of the simulation."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._now_s = 0.0
        self._ids = 0
        self._num_callbacks = 0
        self._num_callbacks_now = 0
        self._queue: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._clock_resolution = 1e-9
        self.executor_delay_s_mean = EXECUTOR_DELAY_S_MEAN
        self.failures: list[BaseException] = []  # errors that nobody awaits, checkers' included
        self.stops_at_failure = True
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_failure)

    @property
    def now_s(self) -> float:
        """The true virtual time, whatever the clock of the current life says."""
        return self._now_s

    def time(self) -> float:
        life = _current_life()
        return self._now_s if life is None else self._now_s + life.clock_skew_s

    def call_soon(
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """As the base class does, without its checks: a simulation makes these by the million."""
        handle = SimHandle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule at ``when`` on the clock of the life that calls."""
        life = _current_life()
        true_s = when
        if life is not None and (skew_s := life.clock_skew_s):
            true_s = when - skew_s
            while true_s + skew_s < when:
                true_s = math.nextafter(true_s, math.inf)  # rounding must not make a timer early
        return self.call_at_true_time(true_s, callback, *args, context=context)

    def call_at_true_time(
        self,
        when_s: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = SimTimer(when_s, callback, args, self, context)
        self._ids = number = self._ids + 1
        heapq.heappush(self._queue, (when_s, number, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        """Run ``func`` inline at a seeded moment; a cancelled caller does not stop it, a crash
        does."""
        future = self.create_future()
        life = CURRENT_LIFE.get()
        first_s, second_s = (
            self._rng.expovariate(2 / self.executor_delay_s_mean) for _ in range(2)
        )

        def work() -> None:
            if life is not None and not life.alive:
                return
            try:
                result: Any = func(*args)
            except Exception as error:  # noqa: BLE001 - handed to the caller, like a real executor
                self.call_later(second_s, self._complete, future, None, error)
            else:
                self.call_later(second_s, self._complete, future, result, None)

        self.call_later(first_s, work)
        return future

    def pause(self, life: Life) -> None:
        """Hold back every callback of ``life``, like SIGSTOP."""
        life.paused = True
        life.num_pauses += 1

    def resume(self, life: Life) -> None:
        """Let a paused life go on, with everything that was held back, in order."""
        life.paused = False
        self._ready.extend(life.held_back)  # type: ignore[attr-defined]
        life.held_back.clear()

    @staticmethod
    def _complete(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> SimTask:
        return SimTask(coro, loop=self, **kwargs)

    def task_ended(self, life: Life, task: SimTask) -> None:
        """A node's task that ended with an error of ours ends the run, awaited or not."""
        del life.tasks[task._sim_id]
        error = task._exception  # type: ignore[attr-defined]  # `exception()` would count as heard
        if isinstance(error, OUR_ERRORS):
            error.add_note(f"ended {task.get_name()} of {life.name}")
            self.failures.append(error)

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        error.add_note(f"reported to the loop: {context['message']}")
        self.failures.append(error)

    def _run_once(self) -> None:
        """Run what is ready; when nothing is, move the clock to the next timer.

        Once for the base class, again and again until the loop is stopped.
        """
        ready: deque[Any] = self._ready  # type: ignore[attr-defined]
        queue, pop, failures = self._queue, heapq.heappop, self.failures
        while True:
            while queue and queue[0][2]._cancelled:  # type: ignore[attr-defined]
                pop(queue)
            if not ready and not self._stopping:  # type: ignore[attr-defined]
                if not queue:
                    raise SimDeadlock(f"no runnable task and no timer at t={self._now_s:.6f} s")
                self._move_clock(queue[0][0])
            now_s = self._now_s
            while queue and queue[0][0] <= now_s:
                ready.append(pop(queue)[2])
            num_ready = len(ready)
            for _ in range(num_ready):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                life = handle._context.get(CURRENT_LIFE)
                if life is not None and life.paused:
                    life.held_back.append(handle)
                    continue
                try:  # as ``Handle._run`` does
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - ends the run
                    what = f"Exception in callback {handle!r}"
                    self.call_exception_handler({"message": what, "exception": error})
                if failures and self.stops_at_failure:
                    raise failures[0]
            self._num_callbacks_now += num_ready
            if self._num_callbacks_now > MAX_CALLBACKS_AT_ONE_TIME:
                raise AssertionError(f"a task spins at t={now_s:.6f} s: {handle!r}")
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _move_clock(self, when_s: float) -> None:
        if when_s > self._now_s:
            self._now_s = when_s
            self._num_callbacks += self._num_callbacks_now
            self._num_callbacks_now = 0
            assert self._num_callbacks < MAX_CALLBACKS, "the scenario does not end"

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave the queue when they come up."""

    def _write_to_self(self) -> None:
        """Nothing to wake: there is no selector and no other thread."""

    def _process_events(self, event_list: list[object]) -> None:
        assert event_list == []
