"""One background thread with an event loop of its own: where sockets are served.

Owns the thread. The application's loop is never blocked by a peer, and a peer is served while the
application computes. Idle, the thread sleeps in ``epoll``: it costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from transfer.errors import PeerClosed

T = TypeVar("T")


class IoThread:
    """Runs callbacks and coroutines on its own loop. Not restartable."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_tasks()
            self._loop.close()

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _check_runs(self) -> None:
        """Raise ``PeerClosed`` when the thread was stopped or has died. Call it under the lock."""
        if self._stopped or self._loop.is_closed():
            raise PeerClosed("this transfer engine is closed")

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run ``function(*args)`` on the I/O loop, soon.

        Raises:
            PeerClosed: the thread has been stopped, or has died.
        """
        with self._lock:
            self._check_runs()
            self._loop.call_soon_threadsafe(function, *args)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on the I/O loop; cancelling the caller cancels it there."""
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
            if self._stopped and (task is None or not task.cancelling()):
                raise PeerClosed("this transfer engine was closed") from None
            raise

    def stop(self, final: Callable[[], object] | None = None) -> None:
        """Run ``final`` on the loop, stop it and join the thread. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            if not self._thread.is_alive():
                if self._thread.ident is None:
                    self._loop.close()
                return
            self._loop.call_soon_threadsafe(self._finish, final)
        self._thread.join()

    def _finish(self, final: Callable[[], object] | None) -> None:
        try:
            if final is not None:
                final()
        finally:
            self._loop.stop()
