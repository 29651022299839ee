"""One background thread with an event loop of its own: where sockets are served.

Owns the thread. The application's loop is never blocked by a peer, and a peer is served while the
application computes. Idle, the thread sleeps in ``epoll``: it costs nothing. Where small requests
come one after the other it stays awake a little longer (``vigil``), with the turn given away.

While it sleeps, its loop can be *lent*: another thread runs a short function in its place, which
spares waking it (a fifth of a small read's time). ``_Selector.turn`` is held by whoever may touch
what lives on the loop::

    I/O thread   [turn: callbacks ...] ──select──▶ asleep ──woken──▶ waits ──▶ [turn: callbacks ...]
    borrower                                        [turn: one function]

Why it is sound. Callbacks, tasks, timers and selector are touched under the turn only; a function
of a borrower is thus one more callback. There are two exceptions, both of the I/O thread on its way
into or out of ``epoll``. In the kernel it knows no Python objects, and takes descriptors that come
or go meanwhile. Out of it, it looks up who waits for what happened: when the borrower has changed
that since, the event is dropped, and reported again by the next ``select`` if it still holds
(``epoll`` is level-triggered). And what a borrower leaves to be called later, a sleeping loop would
not notice: so it is woken.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from transfer.errors import PeerClosed
from transfer.vigil import Vigil

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


Events = list[tuple[selectors.SelectorKey, int]]


class _Selector(selectors.DefaultSelector):
    """Gives the turn away for as long as it waits."""

    def __init__(self, lock: threading.Lock, clock: Callable[[], float], vigil: Vigil) -> None:
        super().__init__()
        self.vigil = vigil  # of the I/O thread alone
        self.clock = clock
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))  # the same one: for ``mute``
        self.turn = threading.Lock()
        self.has_calls = False  # put on the loop from outside; it has not woken for them yet
        self.was_lent = False  # since the I/O thread last had the turn
        self._lock = lock  # guards ``has_calls``; nobody who holds it waits for the turn

    def select(self, timeout: float | None = None) -> Events:
        self.turn.release()
        try:
            events = self._stay_awake(timeout) or super().select(timeout)
        finally:
            self.turn.acquire()
            with self._lock:
                self.has_calls = False
        if self.was_lent:
            self.was_lent = False
            return self._still_registered(events)
        return events

    def _stay_awake(self, timeout: float | None) -> Events:
        """Look again and again while more is expected; not if a timer is due before that ends."""
        if timeout is not None and self.vigil.look_from(self.clock() + timeout):
            return []
        lasts = self.vigil.look_from(self.clock())
        while lasts:
            os.sched_yield()  # the GIL and the core, to whoever waits for one
            lasts = self.vigil.lasts(self.clock())
            if events := super().select(0):
                self.vigil.paid()
                return events
        return []

    def mute(self, fd: int) -> None:
        """Hear of nothing but the end of ``fd``, whatever it is registered for."""
        self._epoll.modify(fd, 0)

    def unmute(self, fd: int) -> None:
        """Hear again of what ``fd`` is registered for, which may be something else by now."""
        key = self.get_map().get(fd)
        if key is not None:
            reads = select.EPOLLIN if key.events & selectors.EVENT_READ else 0
            writes = select.EPOLLOUT if key.events & selectors.EVENT_WRITE else 0
            self._epoll.modify(fd, reads | writes)

    def close(self) -> None:
        self._epoll.close()
        super().close()

    def _still_registered(self, events: Events) -> Events:
        """Return the events that nobody has unregistered, nor registered anew, meanwhile."""
        keys = self.get_map()
        return [(key, mask) for key, mask in events if keys.get(key.fd) is key]


class _Loop(asyncio.SelectorEventLoop):
    """Knows whether something was put on it that a sleeping loop would not notice."""

    put_to_work = False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self.put_to_work = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.put_to_work = True
        return super().call_at(when, callback, *args, context=context)


class IoThread:
    """Runs callbacks and coroutines on its own loop. Not restartable."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        vigil: Vigil | None = None,
    ) -> None:
        """Args:
        vigil: how long to stay awake after what ``expect_more`` was told of.
        """
        self._lock = threading.Lock()
        self._selector = _Selector(self._lock, clock, vigil or Vigil())
        self._loop = _Loop(self._selector)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = False
        self._ended = False

    def start(self) -> None:
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def native_id(self) -> int:
        """The kernel's name of the thread. Started ones have one."""
        assert self._thread.native_id is not None, "the thread was not started"
        return self._thread.native_id

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with self._selector.turn:
            try:
                self._loop.run_forever()
            finally:
                with self._lock:
                    self._ended = True  # also by a bug: nothing is put on a loop that ends
                self._loop.run_until_complete(_cancel_tasks())
                self._loop.close()

    def _check_runs(self) -> None:
        """Raise ``PeerClosed`` when the thread was stopped or has died. Call it under the lock."""
        if self._stopped or self._ended:
            raise PeerClosed("this transfer engine is closed")

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the I/O loop, soon.

        Raises:
            PeerClosed: the thread has been stopped, or has died.
        """
        with self._lock:
            self._check_runs()
            self._loop.call_soon_threadsafe(function, *args)
            self._selector.has_calls = True

    def try_now(self, function: Callable[..., bool], *args: object) -> bool:
        """Run ``function(*args)`` on the calling thread, as if on the I/O loop, if that sleeps.

        Return what the function did; False when the loop was awake, or is about to be: nothing
        overtakes what was given to ``call`` before. The function must be short, must not come back
        to this object, and must not ask asyncio for the running loop: that is the caller's.

        Raises:
            PeerClosed: the thread has been stopped, or has died.
        """
        with self._lock:
            self._check_runs()
            if self._loop.get_debug() or not self._selector.turn.acquire(blocking=False):
                return False  # asyncio's debug mode checks threads
            if self._selector.has_calls:
                self._selector.turn.release()
                return False
            try:
                self._selector.was_lent = True
                self._loop.put_to_work = False
                return function(*args)
            finally:
                if self._loop.put_to_work:
                    self._loop.call_soon_threadsafe(_wake_up)
                self._selector.turn.release()

    def expect_more(self) -> None:
        """Something small was done, the like of which may come again at once. On the I/O thread."""
        self._selector.vigil.event(self._selector.clock())

    def mute(self, fd: int) -> None:
        """Do not wake for what arrives at ``fd``: the borrower looks. On the lent loop."""
        self._selector.mute(fd)

    def unmute(self, fd: int) -> None:
        """Wake again for what ``fd`` is registered for. On the I/O loop, or lent."""
        self._selector.unmute(fd)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the I/O loop; cancelling the caller cancels it there.

        Raises:
            PeerClosed: the thread has been stopped, or has died, before or meanwhile.
        """
        with self._lock:
            try:
                self._check_runs()
            except PeerClosed:
                coroutine.close()
                raise
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            ended = self._stopped or self._ended
            if ended and (task is None or not task.cancelling()):
                raise PeerClosed("this transfer engine was closed") from None
            raise

    def stop(self, final: Callable[[], object] | None = None) -> None:
        """Run ``final`` on the loop, stop it and join the thread. Idempotent.

        A thread that has died by itself runs nothing any more.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            if self._thread.ident is None:
                self._loop.close()
                return
            if not self._ended:
                self._loop.call_soon_threadsafe(self._finish, final)
        self._thread.join()

    def _finish(self, final: Callable[[], object] | None) -> None:
        try:
            if final is not None:
                final()
        finally:
            self._loop.stop()


async def _cancel_tasks() -> None:
    """Begin what was put on the loop before it ended, so that whoever waits for it hears of it."""
    await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _wake_up() -> None:
    """The loop looks at what is to be done before it sleeps again."""
