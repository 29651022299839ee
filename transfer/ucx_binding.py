"""What the ucx transport asks of a Python binding of UCX, and which binding there is.

Owns the interface (``Context``, ``Worker``, ``Message``, ``Flight``) and the choice: ``ucxx``, the
maintained one, else ``ucp`` (ucx-py, archived, on machines where it is what is installed). Knows no
protocol of ours. Binding modules are imported only when the transport is used; each translates the
errors of its library, so that nothing foreign leaves this layer.

Messages are taken by *matched probe* (MPI 3's ``Mprobe``): a message, or the announcement of a
large one, is first seen with its tag and size, and only then told where its bytes go. Memory of a
caller is therefore never promised to bytes that may not come, which no binding could take back.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transfer.errors import PeerUnreachable, TransferError

RDMA_DEVICES = Path("/sys/class/infiniband")
LOOPBACK_DEVICE = "lo"
BINDINGS = {"ucxx": "transfer.ucx_ucxx", "ucp": "transfer.ucx_ucp"}  # in the order of preference
# Transports whose bytes are copied by this process, in ``progress`` of the worker, and never by a
# device or by the peer: of its own segments, sockets and queues.
HOST_TRANSPORTS = frozenset({"self", "tcp", "posix", "sysv"})
CMA_SWITCH = "UCX_CMA_MEMORY_INVALIDATE"
INSTALL = "pip install 'ucxx-cu12>=0.40'"


class UcxUnavailable(PeerUnreachable):
    """UCX does not reach this peer, or is not usable here; another transport may do."""


class Message(NamedTuple):
    """A message that has arrived or was announced. Must be received or dropped, once."""

    tag: int
    nbytes: int
    handle: object


class Runs(NamedTuple):
    """Several runs of memory of the host, the bytes of one message in this order."""

    memory: object  # that the runs lie in: kept until the message has moved
    runs: Sequence[tuple[int, int]]  # (address, nbytes)


class Flight(Protocol):
    """A send or receive under way. Its buffer must live until it has completed."""

    @property
    def completed(self) -> bool: ...

    def error(self) -> TransferError | None:
        """Return what a completed one failed with; None if every byte has moved."""
        ...


class Worker(Protocol):
    """The end of one connection. Used on the ucx loop, or while that is lent: by one at a time.

    ``send`` and ``receive`` raise ``BlockingIOError`` when UCX is out of resources for the moment.

    After ``break_off``, no memory is touched for this worker once it is ``quiet``; or, if it
    ``moves_only_in_progress``, once it is not progressed any more.
    """

    @property
    def moves_only_in_progress(self) -> bool:
        """Whether memory is touched for this worker within its own calls only."""
        ...

    @property
    def takes_runs(self) -> bool:
        """Whether ``send`` and ``receive`` take ``Runs`` for a buffer, at no loss of speed."""
        ...

    @property
    def address(self) -> bytes:
        """What the other end passes to ``connect``."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``progress`` has something to do."""
        ...

    def progress(self) -> None: ...

    def arm(self) -> bool:
        """Prepare to sleep on ``fileno``; False if there is something to do first."""
        ...

    def connect(self, address: bytes) -> None:
        """Reach the worker with ``address``; raises ``UcxUnavailable``."""
        ...

    def send(self, buffer: object, tag: int) -> Flight: ...

    def probe(self) -> Message | None: ...

    def receive(self, message: Message, buffer: object) -> Flight:
        """Take a message into ``buffer``, which has exactly its size."""
        ...

    def drop(self, message: Message) -> Flight:
        """Take a message and forget its bytes."""
        ...

    def break_off(self) -> bool:
        """Cut the connection at once; return whether it is ``quiet`` by now."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether every flight has completed; after ``break_off``, ``progress`` brings it about."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent; ``break_off`` comes first.

        A worker that is not ``quiet`` is kept for the life of the process, with its buffers.
        """
        ...


class Context(Protocol):
    """UCX opened for this process with one set of options."""

    @property
    def resources(self) -> tuple[str, ...]:
        """``transport/device`` of everything that UCX may use, such as ``tcp/lo``."""
        ...

    @property
    def version(self) -> str:
        """Name and version of library and binding, for people."""
        ...

    @property
    def dialect(self) -> str:
        """How messages are framed; both ends of a connection must agree."""
        ...

    def open_worker(self) -> Worker: ...

    def close(self) -> None:
        """Give everything back, once its workers are closed. Idempotent."""
        ...


class Binding(Protocol):
    """A module in ``BINDINGS``."""

    def open_context(self, options: dict[str, str]) -> Context:
        """Open UCX.

        Raises:
            UcxUnavailable: no device, or no permission; the message says what to set.
        """
        ...


def moves_only_in_progress(resources: Sequence[str]) -> bool:
    """Return whether all of ``resources`` are known to leave memory alone between calls."""
    return bool(resources) and all(name.split("/")[0] in HOST_TRANSPORTS for name in resources)


def without_idle_cma(resources: Iterable[str]) -> tuple[str, ...]:
    """Return what UCX uses of ``resources``: cma only where it was asked for (``options_for``)."""
    if os.environ.get(CMA_SWITCH, "n").lower() in ("y", "yes", "1", "on"):
        return tuple(resources)
    return tuple(name for name in resources if not name.startswith("cma/"))


def installed_binding() -> str | None:
    """Return the name of the binding that would be used; None if none is installed."""
    return next((name for name in BINDINGS if importlib.util.find_spec(name)), None)


def has_rdma_device() -> bool:
    """Return whether the kernel knows an RDMA device."""
    try:
        return any(RDMA_DEVICES.iterdir())
    except OSError:
        return False


def open_context(*, only_this_host: bool) -> Context:
    """Open UCX by the binding that is installed.

    Args:
        only_this_host: listen on the loopback device only, whatever else there is.

    Raises:
        UcxUnavailable: nothing is installed, or UCX finds no device or no permission.
    """
    name = installed_binding()
    if name is None:
        raise UcxUnavailable(f"transport 'ucx' needs the library ucxx: {INSTALL}")
    try:
        binding: Binding = importlib.import_module(BINDINGS[name])
    except (ImportError, OSError) as error:
        raise UcxUnavailable(f"{name} is installed but does not load: {error}") from error
    return binding.open_context(options_for(only_this_host=only_this_host))


def options_for(*, only_this_host: bool) -> dict[str, str]:
    """Return UCX options; what the environment says (``UCX_...``) is left as it is.

    Without error handling in the shared-memory transports UCX would not use them for connections
    that can fail. With it, payload passes through UCX's own segments, not by cma: there the peer
    copies from this process's memory by itself, and cannot be stopped. A write that was given up
    would go on with whatever its source holds by then (seen under injected resets).
    ``UCX_CMA_MEMORY_INVALIDATE=y`` takes that risk, for an even speed on busy cores.
    """
    options = {
        "POSIX_ERROR_HANDLING": "y",
        "SYSV_ERROR_HANDLING": "y",
        "POSIX_USE_PROC_LINK": "y",  # segments have no name that could be left in /dev/shm
    }
    if only_this_host:
        options["NET_DEVICES"] = LOOPBACK_DEVICE
    return {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}
