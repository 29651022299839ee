"""One established tcp connection on the I/O loop: the shell around reader and writer.

Owns the socket and its registration with the loop. Knows frames only as what reader and writer
make of them. Runs on the I/O thread only. ``on_lost`` is called exactly once, after which neither
socket nor any memory is touched by this link.

It reads when bytes arrive, except while the handler has enough to do (``saturated``) or memory has
no room yet; then TCP's own flow control stops the peer, and nothing piles up here. In the middle of
a long frame the kernel is asked to wake us for many bytes at a time (SO_RCVLOWAT).

::

    open ──finish()──▶ saying goodbye ──flushed / limit──▶ closed
      └──── close(error), error of the socket, end of stream, broken protocol ────▶ closed
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from transfer.cursor import FileRun
from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.tcp_codec import Op, control_frame
from transfer.tcp_cores import MANY_NBYTES, ReceiverCore
from transfer.tcp_liveness import LIVENESS_CHECK_S, Liveness, tcp_info
from transfer.tcp_reader import FrameHandler, FrameReader
from transfer.tcp_sockets import is_same_host, lost
from transfer.tcp_writer import FrameWriter, Source

_LOG = logging.getLogger(__name__)

TURN_NBYTES = 4 << 20  # moved for one connection before the others get their turn
GOODBYE_LIMIT_S = 0.25
# Control frames that wait for a peer to read. One full window of requests takes a quarter of it.
MAX_CONTROL_QUEUED_NBYTES = 64 << 20
_LOWAT = getattr(socket, "SO_RCVLOWAT", None)


class LinkHandler(FrameHandler, Protocol):
    """What a connection is used for."""

    @property
    def busy(self) -> bool:
        """True while an answer of the peer is awaited."""
        ...

    @property
    def saturated(self) -> bool:
        """True while the handler takes no more frames; the end of a source may change that."""
        ...

    def on_lost(self, error: TransferError) -> None: ...


class Link:
    """Reads and writes without blocking, fairly towards other links."""

    def __init__(
        self,
        sock: socket.socket,
        handler: LinkHandler,
        *,
        piece_nbytes: int,
        name: str,
        core: ReceiverCore | None = None,
    ) -> None:
        """Args:
        core: where the thread runs that receives; None: wherever the kernel likes.
        """
        self._sock = sock
        self._handler = handler
        self._core = core if core is not None and is_same_host(sock) else None
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(handler)
        self._writer = FrameWriter(piece_nbytes, self._transmit_file)
        self._pumping = False
        self._waits_writable = False
        self._reading = True
        self._lowat_nbytes = 1
        self._liveness = Liveness()
        self._watch: asyncio.TimerHandle | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.num_received = 0
        self.peer_said_goodbye = False
        self.peer_closed = False  # its socket is gone with what lay in it, or it takes no more
        self.finishing = False
        self.closed = False
        self.name = name
        self._loop.add_reader(sock, self._on_readable)

    def send(self, frame: bytes) -> None:
        """Queue a control frame and start sending; a peer that never reads is dropped."""
        if not self.closed:
            self._writer.put(frame)
            if self._writer.control_nbytes > MAX_CONTROL_QUEUED_NBYTES:
                self.close(PeerLost(f"{self.name} asks and does not read the answers"))
                return
            self._pump()

    @property
    def control_nbytes(self) -> int:
        """Control frames that wait for the peer to read."""
        return self._writer.control_nbytes

    @property
    def listens(self) -> bool:
        """True while nothing but bytes that arrive makes this link work."""
        return self._reading and not self._waits_writable and not self.closed

    def fileno(self) -> int:
        return self._sock.fileno()

    def look(self) -> bool:
        """Take what has arrived, though the loop has not said that something has; was there any?"""
        before = self.num_received
        self._on_readable()
        return self.num_received > before

    def trust(self) -> None:
        """The peer has proven who it is."""
        self._reader.trust()

    def add(self, source: Source) -> None:
        """Queue payload and start sending."""
        if self.closed:
            return
        if source.cursor.ready_nbytes < source.cursor.remaining:
            source.cursor.wake = partial(self._on_source_woken, source)
        self._writer.add(source)
        self._pump()

    def drop(self, source: Source) -> None:
        """Send no more of ``source`` than the rest of the frame that is on its way."""
        source.dropped = True
        self._on_source_woken(source)

    def _on_source_woken(self, source: Source) -> None:
        if not self.closed:
            self._writer.unpark(source)
            self._pump()

    def resume(self) -> None:
        """Read on if nothing is in the way any more. A sink that wakes calls it."""
        if not self._reading and not self.closed and not self._must_pause:
            self._reading = True
            self._loop.add_reader(self._sock, self._on_readable)
            self._go_on()

    @property
    def _must_pause(self) -> bool:
        return self._handler.saturated or self._reader.stalled

    def _pause(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._sock)

    def _await_batch(self) -> None:
        """Tell the kernel how many bytes are worth waking us for."""
        nbytes = self._reader.batch_nbytes
        if nbytes != self._lowat_nbytes and _LOWAT is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, _LOWAT, nbytes)
            self._lowat_nbytes = nbytes

    def _receive(self, buffers: Sequence[memoryview]) -> int:
        count: int = self._sock.recvmsg_into(buffers)[0]
        self.num_received += count
        return count

    def _transmit(self, buffers: Sequence[memoryview | bytes]) -> int:
        return self._sock.sendmsg(buffers)

    def _transmit_file(self, head: memoryview, run: FileRun) -> int:
        """Send ``head`` and, in the same segment, bytes of a file."""
        count = 0
        if head:
            count = self._sock.send(head, socket.MSG_MORE)
            if count < len(head):
                return count
        try:
            return count + os.sendfile(self._sock.fileno(), run.fd, run.offset, run.nbytes)
        except BlockingIOError:
            if not count:
                raise
            return count

    def _on_readable(self) -> None:
        if self.closed or not self._reading:
            return
        if self._core is not None and self._reader.left_nbytes >= MANY_NBYTES:
            self._core.receiving(self._sock)
        self._fill()
        if not self.closed:
            self._await_batch()
            self._go_on()

    def _go_on(self) -> None:
        """What was read ahead does not make the socket readable."""
        if self._reading and self._reader.buffered:
            self._loop.call_soon(self._on_readable)

    def _fill(self) -> None:
        budget = TURN_NBYTES
        try:
            while budget > 0 and not self.closed:
                if self._must_pause:
                    self._pause()
                    break
                count = self._reader.fill(self._receive)
                if count == 0:
                    self.close(self._gone(None))
                elif self._reader.drained and not self._reader.buffered:
                    break  # asking again would only say so
                budget -= count
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(self._gone(error))
        except TransferError as error:
            if not self.closed:
                _LOG.warning("dropping the connection to %s: %s", self.name, error)
            self.close(error)
        except Exception:
            self.close(_our_bug())
            raise  # the loop logs it; left open, the socket would spin, or the peer wait in vain

    def _gone(self, error: OSError | None) -> TransferError:
        """Return what the end of the stream, or an error of the socket, says about the peer."""
        if error is None or isinstance(error, ConnectionResetError | BrokenPipeError):
            self.peer_closed = True
        if self.peer_said_goodbye and not self._reader.mid_frame:
            return PeerClosed(f"{self.name} closed in order")
        if error is not None:
            return lost(error, self.name)
        return PeerLost(f"{self.name} closed the connection without a goodbye")

    def _pump(self) -> None:
        """Send until the socket takes no more, nothing is left, or the turn is over."""
        if self._pumping or self.closed:
            return
        self._pumping = True
        try:
            budget = TURN_NBYTES
            while budget > 0 and not (self.closed or self._writer.idle):
                budget -= self._writer.pump(self._transmit)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(self._gone(error))
        except Exception:
            self.close(_our_bug())
            raise
        finally:
            self._pumping = False
        if self.closed:
            return
        self._await_writable(not self._writer.idle)
        self.resume()
        self.watch()

    def _await_writable(self, wanted: bool) -> None:
        if wanted and not self._waits_writable:
            self._loop.add_writer(self._sock, self._pump)
        elif not wanted and self._waits_writable:
            self._loop.remove_writer(self._sock)
        self._waits_writable = wanted
        if not wanted and self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    def watch(self) -> None:
        """Check the peer's liveness while something is outstanding; costs nothing when idle."""
        if self._watch is None and not self.closed and self._outstanding:
            self._watch = self._loop.call_later(LIVENESS_CHECK_S, self._check_liveness)

    @property
    def _outstanding(self) -> bool:
        return self._handler.busy or not self._writer.idle

    def _check_liveness(self) -> None:
        self._watch = None
        info = tcp_info(self._sock)
        if info is not None and self._liveness.has_vanished(info, self._loop.time()):
            self.close(PeerLost(f"{self.name} does not acknowledge any more"))
        self.watch()

    async def finish(self) -> None:
        """Complete the frame that is on its way, say goodbye, close. At most GOODBYE_LIMIT_S.

        The socket is closed only after the peer has closed its side: unread bytes would make the
        kernel send a reset, which can overtake the goodbye.
        """
        if self.closed:
            return
        self.finishing = True
        self._writer.drop_all()
        self._flushed = self._loop.create_future()
        self.send(control_frame(Op.GOODBYE))
        try:
            async with asyncio.timeout(GOODBYE_LIMIT_S):
                await self._flushed
                if not self.closed:
                    self._sock.shutdown(socket.SHUT_WR)
                    await self._ended
        except TimeoutError:
            _LOG.info("%s did not take the goodbye in time", self.name)
        except OSError as error:
            _LOG.info("%s was gone before the goodbye: %s", self.name, error)
        self.close(PeerClosed("this transfer engine was closed"))

    def close(self, error: TransferError) -> None:
        """Close at once; the handler is told ``error``. Idempotent."""
        if self.closed:
            return
        if self.finishing:
            error = PeerClosed("this transfer engine was closed")
        self.closed = True
        self._reader.stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._reading:
            self._loop.remove_reader(self._sock)
        if self._waits_writable:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        for waiter in (self._flushed, self._ended):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._handler.on_lost(error)


def _our_bug() -> PeerLost:
    return PeerLost("a bug on this side broke the connection")
