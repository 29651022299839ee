"""UCX through ``ucxx``: the one place that knows its classes and its errors.

Uses the low-level half (``ucxx._lib.libucxx``): ``ucxx.core`` keeps one context, one event loop and
its own handshake for the whole process, and progresses it from a thread or a task of its own.
Python futures are off: completion is looked at after each progress, on the thread that made it.

One worker for each connection. That makes "everything of this peer" something UCX can cut off: a
single receive cannot be cancelled, and tags of one peer cannot meet those of another. Host memory
is registered by UCX itself: once for each buffer, kept in its registration cache until unmapped.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from transfer.errors import PeerClosed, PeerLost, TransferError
from transfer.ucx_binding import (
    INSTALL,
    Context,
    Flight,
    Message,
    Runs,
    UcxUnavailable,
    Worker,
    moves_only_in_progress,
    without_idle_cma,
)
from transfer.ucx_calls import (
    IN_PROGRESS,
    NO_RESOURCE,
    TRUNCATED,
    Calls,
    Place,
    Refused,
    place_of,
    place_of_runs,
)
from transfer.ucx_orphans import destroy_context, destroy_worker, keep_for_good

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx itself sets some
os.environ.setdefault("UCX_LOG_LEVEL", "error")  # it warns of what a cut connection leaves unread

import ucxx
import ucxx._lib.libucxx as api
from ucxx._lib.arr import Array

DIALECT = "matched"
# Older libraries do not know all options; each of these can be missing.
OPTIONAL = ("POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING")
SWEEP_AT = 64  # flights remembered; beyond, those that have completed are forgotten
MAX_BREAK_ROUNDS = 1000  # of progress, until everything cut off has completed
_RESOURCE = re.compile(r"^#.*resource.*md.*dev.*flags.*?(\S+/\S+)\s*$", re.MULTILINE)
_PERMISSION = "; see UCX_TLS and, for RDMA, the limit on locked memory (ulimit -l unlimited)"


def _failure(error: object) -> TransferError:
    """Translate an error of an established connection."""
    return PeerLost(f"the ucx connection broke: {error}")


class UcxxFlight:
    """One request of UCX; holds the buffer until it has completed, and no longer."""

    __slots__ = ("_calls", "_error", "_keeps", "_request")
    takes_nothing = False

    def __init__(self, calls: Calls, request: int | None, keeps: object) -> None:
        """Args:
        request: None if it completed at once.
        keeps: what must live until then.
        """
        self._calls = calls
        self._request = request
        self._keeps = None if request is None else keeps
        self._error: TransferError | None = None

    @property
    def completed(self) -> bool:
        request = self._request
        if request is None:
            return True
        status = self._calls.status(request)
        if status == IN_PROGRESS:
            return False
        self._calls.free(request)
        self._request = self._keeps = None
        if status < 0 and not (status == TRUNCATED and self.takes_nothing):
            self._error = _failure(f"status {status}")
        return True

    def cancel(self, worker: int) -> None:
        """Ask UCX to end it; it has ended when ``completed`` says so."""
        if self._request is not None:
            self._calls.cancel(worker, self._request)

    def error(self) -> TransferError | None:
        return self._error


class _Dropped(UcxxFlight):
    """A message of which nothing is taken."""

    __slots__ = ()
    takes_nothing = True


class UcxxWorker:
    """One ``ucp_worker`` with one endpoint. Made by ``UcxxContext``."""

    def __init__(self, context: UcxxContext, worker: api.UCXWorker) -> None:
        self._context = context
        self._worker: api.UCXWorker | None = worker
        self._handle: int = worker.handle
        self._calls = context.calls
        self._endpoint: api.UCXEndpoint | None = None
        self._receives: list[UcxxFlight] = []
        self._sends: list[UcxxFlight] = []
        self._orphaned = False
        worker.init_blocking_progress_mode()
        self._fd = int(worker.epoll_file_descriptor)

    @property
    def _open(self) -> api.UCXWorker:
        assert self._worker is not None, "a worker that was closed"
        return self._worker

    @property
    def moves_only_in_progress(self) -> bool:
        return moves_only_in_progress(self._context.resources)

    @property
    def takes_runs(self) -> bool:
        return self.moves_only_in_progress  # a device would get them piecemeal, by copies

    @property
    def address(self) -> bytes:
        return bytes(self._open.address)

    def fileno(self) -> int:
        return self._fd

    def progress(self) -> None:
        self._open.progress()

    def arm(self) -> bool:
        return bool(self._open.arm())

    def connect(self, address: bytes) -> None:
        try:
            there = api.UCXAddress.create_from_buffer(address)
            self._endpoint = api.UCXEndpoint.create_from_worker_address(
                self._open, there, endpoint_error_handling=True
            )
        except (api.UCXError, ValueError) as error:
            raise UcxUnavailable(
                f"ucx finds no transport that both sides have: {error}; set the same UCX_TLS on "
                "both, including one that crosses hosts"
            ) from error

    def send(self, buffer: object, tag: int) -> Flight:
        assert self._endpoint is not None, "send() before connect()"
        place = _place(buffer)
        try:
            request = self._calls.send(self._endpoint.handle, place, tag)
        except Refused as refused:
            raise _translated(refused) from refused
        return _keep(self._sends, UcxxFlight(self._calls, request, place))

    def probe(self) -> Message | None:
        found = self._calls.probe(self._handle)
        return None if found is None else Message(*found)

    def receive(self, message: Message, buffer: object) -> Flight:
        place = _place(buffer)
        return _keep(self._receives, UcxxFlight(self._calls, self._take(message, place), place))

    def drop(self, message: Message) -> Flight:
        place = place_of(0, 0, None)
        request = self._take(message, place, nothing=True)
        return _keep(self._receives, _Dropped(self._calls, request, place))

    def _take(self, message: Message, place: Place, *, nothing: bool = False) -> int | None:
        assert isinstance(message.handle, int), "a message of another binding"
        try:
            return self._calls.receive(self._handle, place, message.handle)
        except Refused as refused:
            if nothing and refused.status == TRUNCATED:  # it is gone, as was asked for
                return None
            raise _translated(refused) from refused

    def break_off(self) -> bool:
        if self._endpoint is None:
            return True
        while (message := self.probe()) is not None:
            with suppress(TransferError, BlockingIOError):  # it goes with the worker
                self.drop(message)
        self._orphaned = not self.quiet
        self._endpoint.close_blocking()  # by force: the endpoint has error handling
        for flight in (*self._sends, *self._receives):
            flight.cancel(self._handle)
        for _ in range(MAX_BREAK_ROUNDS):
            if self.quiet:
                return True
            self._open.progress()
        return False

    @property
    def quiet(self) -> bool:
        return all(flight.completed for flight in (*self._sends, *self._receives))

    def close(self) -> None:
        if not self.quiet:
            keep_for_good(self)
            return
        if self._worker is not None:
            self._sends.clear()
            self._receives.clear()
            if self._orphaned:
                destroy_worker(self._worker)
                os.close(self._fd)  # ucxx's own, around that of UCX
            self._context.on_closed(orphaned=self._orphaned)
        self._worker = self._endpoint = None


def _place(buffer: object) -> Place:
    """Return where the bytes of a message are: in ``Runs``, or in one buffer of any kind."""
    if isinstance(buffer, Runs):
        return place_of_runs(buffer.runs, buffer.memory)
    array = Array(buffer)
    return place_of(array.ptr, array.nbytes, buffer)


def _translated(refused: Refused) -> Exception:
    """Return what the interface says is raised when UCX does not begin."""
    return BlockingIOError(str(refused)) if refused.status == NO_RESOURCE else _failure(refused)


def _keep(flights: list[UcxxFlight], flight: UcxxFlight) -> UcxxFlight:
    """Remember a flight until it has completed, or a little longer: looking costs, keeping not."""
    if len(flights) >= SWEEP_AT:
        flights[:] = [each for each in flights if not each.completed]
    flights.append(flight)
    return flight


class UcxxContext:
    """One ``ucp_context``."""

    dialect = DIALECT

    def __init__(self, context: api.UCXContext, calls: Calls) -> None:
        self.calls = calls
        self._context: api.UCXContext | None = context
        self._num_open = 0
        self._orphaned = False
        found = _RESOURCE.findall(context.info)
        self.resources: tuple[str, ...] = without_idle_cma(dict.fromkeys(found))
        number = ".".join(map(str, ucxx.get_ucx_version()))
        self.version = f"ucx {number} (ucxx {ucxx.__version__})"

    def open_worker(self) -> Worker:
        if self._context is None:
            raise PeerClosed("this transfer engine is closed")
        try:
            worker = UcxxWorker(self, api.UCXWorker(self._context, False, False))
        except api.UCXError as error:
            raise UcxUnavailable(f"ucx opens no worker: {error}{_PERMISSION}") from error
        self._num_open += 1
        return worker

    def on_closed(self, *, orphaned: bool) -> None:
        """One worker was closed."""
        self._num_open -= 1
        self._orphaned |= orphaned

    def close(self) -> None:
        if self._context is not None and self._orphaned and self._num_open == 0:
            destroy_context(self._context)
        self._context = None


def _found_calls() -> Calls:
    try:
        return Calls()
    except (OSError, AttributeError) as error:
        raise UcxUnavailable(
            f"ucx needs the library of UCX 1.11 or later: {error}; {INSTALL} brings one"
        ) from error


def open_context(options: dict[str, str]) -> Context:
    """See ``ucx_binding.Binding``."""
    features = (api.Feature.TAG, api.Feature.WAKEUP)
    asked, calls = dict(options), _found_calls()
    while True:
        try:
            return UcxxContext(api.UCXContext(asked, features), calls)
        except (api.UCXConfigError, api.UCXInvalidParamError):
            unknown = next((name for name in OPTIONAL if name in asked), None)
            if unknown is None:
                raise UcxUnavailable(f"ucx refuses the options {asked}{_PERMISSION}") from None
            del asked[unknown]
        except api.UCXError as error:
            raise UcxUnavailable(f"ucx does not open: {error}{_PERMISSION}") from error
