"""UCX through ``ucp`` (ucx-py): the one place that knows its classes and its errors.

For machines where the archived binding is what is installed. It has no matched probe, so every
message is announced by an *envelope*, for which a receive is always posted; the payload follows
under a tag of its own, its number. Peers with ``ucxx`` speak another dialect and are refused.

::

    tag 0   | tag of the message u64 | nbytes u64 |     the n-th envelope, little-endian
    tag n   | payload                              |     received when the caller says where to
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from itertools import count

import ucp
import ucp._libs.ucx_api as api
from ucp._libs.arr import Array

from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.ucx_binding import (
    Context,
    Flight,
    Message,
    UcxUnavailable,
    Worker,
    moves_only_in_progress,
)
from transfer.ucx_orphans import keep_for_good

DIALECT = "envelope"
MAX_BREAK_ROUNDS = 1000  # of progress, until everything cut off has completed
ENVELOPE_TAG = 0
_ENVELOPE = struct.Struct("<QQ")
_ANSWER = "; see UCX_TLS and, for RDMA, the limit on locked memory (ulimit -l unlimited)"

Callback = Callable[[object, "api.UCXError | None"], None]


class UcpFlight:
    """One request of ucp, which tells its end by a callback, also before it has returned."""

    def __init__(self, buffer: object) -> None:
        self.buffer: object = buffer
        self.completed = False
        self._error: TransferError | None = None

    def on_done(self, _request: object, exception: api.UCXError | None) -> None:
        self.completed, self.buffer = True, None
        if exception is not None:
            self._error = PeerLost(f"the ucx connection broke: {exception}")

    def error(self) -> TransferError | None:
        return self._error


class UcpWorker:
    """One ``ucp_worker`` with one endpoint."""

    takes_runs = False

    def __init__(self, context: api.UCXContext, *, moves_only_in_progress: bool = False) -> None:
        self.moves_only_in_progress = moves_only_in_progress
        self._worker: api.UCXWorker | None = api.UCXWorker(context)
        self._fd = int(self._worker.init_blocking_progress_mode())
        self._endpoint: api.UCXEndpoint | None = None
        self._numbers = count(1)
        self._sent = count(1)
        self._arrived: deque[Message] = deque()
        self._under_way: dict[UcpFlight, object] = {}
        self._closing = False
        self._await_envelope()

    @property
    def _open(self) -> api.UCXWorker:
        assert self._worker is not None, "a worker that was closed"
        return self._worker

    @property
    def address(self) -> bytes:
        return bytes(self._open.get_address())

    def fileno(self) -> int:
        return self._fd

    def progress(self) -> None:
        while self._open.progress():
            pass

    def arm(self) -> bool:
        return bool(self._open.arm())

    def connect(self, address: bytes) -> None:
        try:
            there = api.UCXAddress.from_buffer(address)
            self._endpoint = self._open.ep_create_from_worker_address(there, True)
        except api.UCXError as error:
            raise UcxUnavailable(
                f"ucx finds no transport that both sides have: {error}; set the same UCX_TLS"
            ) from error

    def _await_envelope(self) -> None:
        data = bytearray(_ENVELOPE.size)

        def arrived(flight: UcpFlight) -> None:
            if flight.error() is None and not self._closing:
                tag, nbytes = _ENVELOPE.unpack(data)
                self._arrived.append(Message(tag, nbytes, next(self._numbers)))
                self._await_envelope()

        self._receive(data, _ENVELOPE.size, ENVELOPE_TAG, arrived)

    def send(self, buffer: object, tag: int) -> Flight:
        data = Array(buffer)
        self._send(_ENVELOPE.pack(tag, data.nbytes), ENVELOPE_TAG)
        return self._send(buffer, next(self._sent))

    def _send(self, buffer: object, tag: int) -> UcpFlight:
        data, flight = Array(buffer), UcpFlight(buffer)
        self._start(
            flight, lambda done: api.tag_send_nb(self._endpoint, data, data.nbytes, tag, done)
        )
        return flight

    def probe(self) -> Message | None:
        return self._arrived.popleft() if self._arrived else None

    def receive(self, message: Message, buffer: object) -> Flight:
        assert isinstance(message.handle, int), "a message of another binding"
        return self._receive(buffer, message.nbytes, message.handle, None)

    def drop(self, message: Message) -> Flight:
        return self.receive(message, bytearray(message.nbytes))

    def _receive(
        self, buffer: object, nbytes: int, tag: int, then: Callable[[UcpFlight], None] | None
    ) -> UcpFlight:
        data, flight = Array(buffer), UcpFlight(buffer)
        self._start(flight, lambda done: api.tag_recv_nb(self._open, data, nbytes, tag, done), then)
        return flight

    def _start(
        self,
        flight: UcpFlight,
        call: Callable[[Callback], object],
        then: Callable[[UcpFlight], None] | None = None,
    ) -> None:
        def done(request: object, exception: api.UCXError | None) -> None:
            flight.on_done(request, exception)
            self._under_way.pop(flight, None)
            if then is not None:
                then(flight)

        try:
            request = call(done)
        except api.UCXError as error:
            raise PeerLost(f"the ucx connection broke: {error}") from error
        if request is None and not flight.completed:  # at once, and without the callback
            done(None, None)
        if not flight.completed:
            self._under_way[flight] = request

    def break_off(self) -> bool:
        self._closing = True
        if self._endpoint is not None:
            self._endpoint.abort()
        for _ in range(MAX_BREAK_ROUNDS):
            for request in list(self._under_way.values()):
                self._open.request_cancel(request)
            self.progress()
            if not self._under_way:
                return True
        return False

    @property
    def quiet(self) -> bool:
        return not self._under_way

    def close(self) -> None:
        may_break_off = not self._closing  # else it was, and may have been given up since
        if self._worker is not None and not (self.quiet or (may_break_off and self.break_off())):
            keep_for_good(self)
            return
        self._arrived.clear()
        self._worker = self._endpoint = None


class UcpContext:
    """One ``ucp_context``."""

    dialect = DIALECT

    def __init__(self, context: api.UCXContext) -> None:
        self._context: api.UCXContext | None = context
        self.version = f"ucx {'.'.join(map(str, ucp.get_ucx_version()))} (ucp {ucp.__version__})"
        names = context.get_config().get("TLS", "all")
        self.resources: tuple[str, ...] = (f"UCX_TLS={names}",)
        self._moves_only_in_progress = moves_only_in_progress(names.split(","))

    def open_worker(self) -> Worker:
        if self._context is None:
            raise PeerClosed("this transfer engine is closed")
        try:
            return UcpWorker(self._context, moves_only_in_progress=self._moves_only_in_progress)
        except api.UCXError as error:
            raise UcxUnavailable(f"ucx opens no worker: {error}{_ANSWER}") from error

    def close(self) -> None:
        self._context = None


def open_context(options: dict[str, str]) -> Context:
    """See ``ucx_binding.Binding``."""
    try:
        return UcpContext(api.UCXContext(options, (api.Feature.TAG, api.Feature.WAKEUP)))
    except api.UCXError as error:
        raise UcxUnavailable(f"ucx does not open: {error}{_ANSWER}") from error
