"""Waits for the answer to one small read on the application's thread, without waking another.

Owns the watch: at most one for each engine. While it lasts the I/O thread is not told of bytes on
that connection (``mute``); the application's loop, in turns with all its other work, borrows the
I/O loop and looks by itself. That spares waking the I/O thread, and waking the application by it.
Knows no frames, and nothing of how the read was sent.

::

    read sent ──begin──▶ watched ──answered, SPIN_S over, others send──▶ the I/O thread's again
                            └── not looked for LOOK_LIMIT_S: the application is busy ──▶ the same

Invariants: whatever ends a watch unmutes the connection; what has arrived meanwhile then wakes the
I/O thread (``epoll`` is level-triggered). An answer that the owner may have lent, and whose end it
waits for when it revokes, is watched for under an alarm only: however long the application computes
without coming back to its loop, the I/O thread takes it from ``LOOK_LIMIT_S`` on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import PeerClosed
from transfer.io_thread import IoThread
from transfer.tcp_client import ClientLink
from transfer.tcp_codec import COPIED_NBYTES
from transfer.tcp_link import Link
from transfer.tcp_operation import SMALL_NBYTES, TcpOperation
from transfer.tcp_timer import KernelTimer
from transfer.vigil import OFTEN_S, Vigil

MOVED_PER_S = 0.5e9  # bytes that an answer takes its time for
LOOK_LIMIT_S = 0.002  # after the last look at what may be lent


class AnswerWatch:
    """One per engine. Made for operations that were sent on a connection nobody else uses."""

    def __init__(self, io: IoThread, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: in seconds; that of the application's loop may be too coarse (uvloop's: 1 ms).
        """
        self._io = io
        self._clock = clock
        self._vigil = Vigil()
        self._progressed = False  # bytes came at the last look
        self._operation: TcpOperation | None = None
        self._link: Link | None = None
        self._looked_s = 0.0
        self._alarm: KernelTimer | None = None  # set at most once in LOOK_LIMIT_S

    def open(self) -> None:
        """Watch for answers that may be lent as well, where there is an alarm. On the I/O loop."""
        with suppress(OSError):
            self._alarm = KernelTimer(self._io.loop, self._on_alarm)

    def close(self) -> None:
        """On the I/O loop."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def begin(self, operation: TcpOperation, client: ClientLink) -> None:
        """Watch for the answer to ``operation``, if it is expected soon. On the lent I/O loop."""
        if self._operation is not None or operation.nbytes > SMALL_NBYTES:
            return
        link = client.link
        soon_s = OFTEN_S + operation.nbytes / MOVED_PER_S
        if client.answer_s > soon_s or not link.listens:  # a peer that is far, or busy
            return
        may_be_lent = operation.nbytes > COPIED_NBYTES
        if may_be_lent and self._alarm is None:
            return
        self._looked_s = self._clock()
        if self._vigil.begin(self._looked_s):
            self._operation, self._link = operation, link
            self._io.mute(link.fileno())
            if may_be_lent and self._alarm is not None:
                self._alarm.set(LOOK_LIMIT_S)

    def end(self, link: Link) -> None:
        """The I/O thread listens to ``link`` itself again. On the I/O loop, or lent; idempotent."""
        if link is self._link:
            self._link = None
            if not link.closed:
                self._io.unmute(link.fileno())

    def _on_alarm(self) -> None:
        link = self._link
        if link is None or self._alarm is None:
            return
        left_s = self._looked_s + LOOK_LIMIT_S - self._clock()
        if left_s > 0:
            self._alarm.set(left_s)
        else:
            self.end(link)

    async def wait(self, operation: TcpOperation) -> None:
        """Return when ``operation`` is over or its watch is, which may be at once.

        Raises:
            PeerClosed: the engine was stopped. Cancelled, it ends the watch as well.
        """
        if operation is not self._operation:
            return
        try:
            lasts = self._vigil.look_from(self._clock())
            while self._io.try_now(self._look_once, operation) and not operation.finished:
                if not lasts or operation.is_late:
                    return
                os.sched_yield()  # to whoever waits for this core, perhaps the peer
                await asyncio.sleep(0)
                lasts = self._goes_on()
            if lasts and operation.finished:
                self._vigil.paid()
        finally:
            self._operation = None
            self._give_back()

    def _give_back(self) -> None:
        link = self._link
        if link is not None:
            with suppress(PeerClosed):  # then every connection is closed, too
                if not self._io.try_now(self._end_now, link):
                    self._io.call(self.end, link)

    def _end_now(self, link: Link) -> bool:
        self.end(link)
        return True

    def _goes_on(self) -> bool:
        """Whether to look again: bytes that come are a reason, and took their time."""
        now_s = self._looked_s = self._clock()
        if self._progressed:
            self._vigil.begin(now_s)
            return True
        return self._vigil.lasts(now_s)

    def _look_once(self, operation: TcpOperation) -> bool:
        """Take what has arrived; False when the watch was over before."""
        link = self._link
        if link is None:
            return False
        self._progressed = link.look()
        if operation.finished:
            self.end(link)
        return True
