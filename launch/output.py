"""Lines for people, also when nobody reads them, or not now.

Owns what happens when standard output or error cannot be written: the line is lost, and nothing
else. ``kvferry up | head`` ends its reader while the cluster serves; a process that supervises
others must not die of that, nor let them die. A closed pipe is replaced by the null device, so that
neither a later line, nor another library, nor the flush at the end of the interpreter meets it
again. A full disk is left as it is: it may have room for the next line.

A reader that stands still (``kvferry up 2>&1 | less``) is worse: whoever writes waits for it. So
the lines of a role are written by a thread (``write_behind``): the role goes on serving, a
supervisor goes on reading what its children say, and both can be stopped. Lines that find the
queue full are lost; a line says how many, at the place where they are missing.

A descriptor that some other process has made non-blocking (it is shared with whoever inherited it)
is waited for as a blocking one is: no line is cut short.

Knows no commands and no children.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import sys
import threading
from typing import TextIO

LINES_MAX = 4096  # that wait for a reader; more are lost, and counted
FLUSH_S = 1.0  # for what still waits when the process ends
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # reader, terminal or descriptor are gone for good
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # in the order of descriptors


class _Behind:
    """A thread that writes lines to stderr, and waits there for whoever reads them.

    It writes to the descriptor: a thread that waits inside of a stream's own buffer would keep the
    interpreter from ending.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._descriptor = stream.fileno()
        self._lines: queue.Queue[str] = queue.Queue(LINES_MAX)
        self._lock = threading.Lock()
        self._num_lost = 0  # since the last line that was accepted; under the lock
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def put(self, line: str) -> None:
        """Have a line written; it is lost when too many wait already.

        The note about lost ones and the first line after them are one entry of the queue.
        """
        with self._lock:
            note = self._note()
            try:
                self._lines.put_nowait(f"{note}\n{line}" if note else line)
            except queue.Full:
                self._num_lost += 1
            else:
                self._num_lost = 0

    def flush(self, timeout_s: float) -> None:
        """Return when everything is written, or after ``timeout_s``."""
        done = self._lines.all_tasks_done
        with done:
            done.wait_for(lambda: not self._lines.unfinished_tasks, timeout_s)

    def _run(self) -> None:
        while True:
            self._write(self._lines.get())
            if (note := self._last_note()) is not None:
                self._write(note)
            self._lines.task_done()

    def _note(self) -> str | None:
        if not self._num_lost:
            return None
        return f"({self._num_lost} lines are missing here: they were not read in time)"

    def _last_note(self) -> str | None:
        """The note that no accepted line will bring: nothing waits, so lines were lost last."""
        with self._lock:
            if not self._lines.empty():
                return None
            note, self._num_lost = self._note(), 0
            return note

    def _write(self, line: str) -> None:
        try:
            _write_whole(self._descriptor, f"{line}\n".encode(errors="replace"))
        except OSError as error:
            _give_up(self._descriptor, error)


_behind: _Behind | None = None


def write_behind() -> None:
    """From now on lines for stderr are written by a thread, in the order in which they came."""
    global _behind
    if _behind is None and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            _behind = _Behind(sys.stderr)


def write_line(line: str, stream: TextIO | None) -> bool:
    """Write one line to ``stream``; False when it could not be written. Raises nothing for that."""
    if stream is None:  # it was closed before the interpreter began
        return False
    if _behind is not None and stream is _behind.stream:
        _behind.put(line)
        return True
    try:
        _print(line, stream)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            _give_up(stream.fileno(), error)
        return False
    return True


def show_result(text: str) -> None:
    """Write what a command was asked for to stdout; to stderr when nobody reads that."""
    if not write_line(text, sys.stdout):
        write_line(text, sys.stderr)


def hold_standard_streams() -> None:
    """Open the null device for each standard stream that was closed when the process began.

    Otherwise the next socket gets its number, and receives what some library prints.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            assert opened == descriptor, "a lower standard stream was closed meanwhile"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


class LineHandler(logging.StreamHandler[TextIO]):
    """Log lines on a stream; one that cannot be written is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 (a wrong call of the log: told as logging tells it)
            self.handleError(record)
        else:
            write_line(line, self.stream)

    def flush(self) -> None:
        """Also at the end of the process, by ``logging.shutdown``."""
        if _behind is not None and self.stream is _behind.stream:
            _behind.flush(FLUSH_S)


def _print(line: str, stream: TextIO) -> None:
    """Write one line, after what the stream holds already."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # it has none: it is in memory
        print(line, file=stream, flush=True)
        return
    data = f"{line}\n".encode(stream.encoding or "utf-8", stream.errors or "strict")
    while True:
        try:
            stream.flush()
            break
        except BlockingIOError:
            _wait_for_room(descriptor)
    _write_whole(descriptor, data)


def _write_whole(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            _wait_for_room(descriptor)


def _wait_for_room(descriptor: int) -> None:
    """Return when a non-blocking descriptor takes bytes, or is broken: the next write says so."""
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    room.poll()


def _give_up(descriptor: int, error: OSError) -> None:
    """Lose what could not be written; write to nothing from now on if it can never be."""
    if error.errno not in _GONE:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
