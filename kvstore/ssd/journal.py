"""Changes of the index on their way to the disk.

Owns what is not in the index yet, and when it goes there: together, ``flush_s`` after the first
change, on a thread. Before rows are committed the page file is synced, so that after a power
loss hardly any row names a page that is not there; if one does, the page does not verify.

A later change of an offset replaces an earlier one: what waits is bounded by the slots.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial

from kvstore.ssd.config import FLUSH_PAGES_MAX
from kvstore.ssd.index import Index
from kvstore.ssd.page_file import PageFile
from transfer.blocking_calls import BlockingCalls

Changes = dict[int, bytes | None]


class Journal:
    """See the module's docstring.

    Args:
        calls: one thread: commits follow one another.
        on_outcome: told after every commit: None, or what went wrong. Failed changes are kept and
            tried again ``retry_s`` later. Told too when a commit takes longer than ``hung_s``.
    """

    def __init__(
        self,
        index: Index,
        file: PageFile,
        calls: BlockingCalls,
        *,
        flush_s: float,
        retry_s: float,
        hung_s: float,
        on_outcome: Callable[[str | None], None],
    ) -> None:
        self._index, self._file, self._calls = index, file, calls
        self._flush_s, self._retry_s, self._hung_s = flush_s, retry_s, hung_s
        self._on_outcome = on_outcome
        self._changes: Changes = {}
        self._stopped = False
        self._job: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None  # while a commit is under way

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def is_full(self) -> bool:
        """No more pages should be stored until the disk keeps up."""
        return len(self._changes) >= FLUSH_PAGES_MAX

    def put(self, offset: int, header: bytes | None) -> None:
        """The row of ``offset`` is to be ``header``, or gone."""
        if self._stopped:
            return
        self._changes[offset] = header
        if self._job is not None:
            return
        if len(self._changes) == FLUSH_PAGES_MAX // 2:
            self._start(durable=False)
        elif self._timer is None:
            self._later(self._flush_s)

    async def flush(self, *, durable: bool) -> bool:
        """Commit what waits now; False when the disk failed or hangs. When cancelled it goes on."""
        while self._job is not None:  # its callback has looked at the outcome when it is None
            done, _ = await asyncio.wait([self._job], timeout=self._hung_s)
            if not done:
                return False
        if not self._changes and not durable:
            return True
        job = self._start(durable=durable)
        done, _ = await asyncio.wait([job], timeout=self._hung_s)
        return bool(done) and job.exception() is None

    def stop(self) -> None:
        """No more changes and no more commits; one that hangs is not spoken of any more."""
        self._stopped = True
        self._cancel_timer()
        self._cancel_alarm()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._job is None and self._changes:
            self._start(durable=False)

    def _start(self, *, durable: bool) -> asyncio.Future[None]:
        self._cancel_timer()
        changes, self._changes = self._changes, {}
        self._job = job = self._calls.start(self._commit, changes, durable)
        job.add_done_callback(partial(self._committed, changes))
        self._alarm = asyncio.get_running_loop().call_later(self._hung_s, self._on_alarm)
        return job

    def _on_alarm(self) -> None:
        self._on_outcome(f"index: a commit did not end in {self._hung_s:g} s")

    def _commit(self, changes: Changes, durable: bool) -> None:
        self._file.sync()
        self._index.apply(changes, durable=durable)

    def _committed(self, changes: Changes, job: asyncio.Future[None]) -> None:
        self._job = None
        self._cancel_alarm()
        error = job.exception()
        if self._stopped:
            return
        if error is None:
            self._on_outcome(None)
            if self._changes:
                self._later(self._flush_s)
            return
        if not isinstance(error, OSError | sqlite3.Error):
            raise error
        self._changes = {**changes, **self._changes}
        self._on_outcome(f"index: {error}")
        self._later(self._retry_s)
