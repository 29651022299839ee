"""Tagged messages by UCX's own functions, for a worker and an endpoint that ``ucxx`` opened.

Owns the calls into ``libucp`` (which ucxx has loaded) and what a request of UCX is: a number that
is asked whether it has completed, and freed once. ``ucxx`` itself sends and receives one piece of
contiguous memory with each message; here a message may be several of them, on either side, so that
many pages cost one. And a message costs less than with an object of ucxx around each of its parts.

The functions are those of UCX 1.11 and later; their parameters are part of its stable interface.
Knows no peers and no tags of ours. All calls are short and keep the GIL: nothing here waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

LIBRARY = "libucp.so.0"  # loaded already, by ucxx

STATUS = ctypes.c_int8  # ucs_status_t is a packed enum: whoever reads more finds 240 for -16
IN_PROGRESS = 1
NO_RESOURCE = -2
TRUNCATED = -9
_FIRST_ERROR = (1 << 64) - 100  # a pointer from here on is an error, UCS_PTR_IS_ERR
_FIELD_DATATYPE, _FIELD_MEMORY_TYPE = 1 << 3, 1 << 6
_BYTES, _RUNS = 1 << 3, 2  # ucp_dt_make_contig(1), ucp_dt_make_iov()
_HOST_MEMORY = 0


class _Parameters(ctypes.Structure):
    """``ucp_request_param_t``."""

    _fields_ = (
        ("op_attr_mask", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("request", ctypes.c_void_p),
        ("callback", ctypes.c_void_p),
        ("datatype", ctypes.c_uint64),
        ("user_data", ctypes.c_void_p),
        ("reply_buffer", ctypes.c_void_p),
        ("memory_type", ctypes.c_int),
        ("recv_info", ctypes.c_void_p),
        ("memh", ctypes.c_void_p),
    )


class _Found(ctypes.Structure):
    """``ucp_tag_recv_info_t``."""

    _fields_ = (("tag", ctypes.c_uint64), ("nbytes", ctypes.c_size_t))


_ANY_BYTES = _Parameters(op_attr_mask=_FIELD_DATATYPE, datatype=_BYTES)
_HOST_RUNS = _Parameters(
    op_attr_mask=_FIELD_DATATYPE | _FIELD_MEMORY_TYPE, datatype=_RUNS, memory_type=_HOST_MEMORY
)


class Place(NamedTuple):
    """Where the bytes of a message are, as UCX is told. ``keeps`` lives until it has completed."""

    address: int
    length: int  # in bytes, or in runs
    parameters: int
    keeps: object


def place_of(address: int, nbytes: int, keeps: object) -> Place:
    """Return contiguous memory, of the host or of a device."""
    return Place(address, nbytes, ctypes.addressof(_ANY_BYTES), keeps)


def place_of_runs(runs: Sequence[tuple[int, int]], keeps: object) -> Place:
    """Return memory of the host in several runs of (address, nbytes)."""
    array = (ctypes.c_uint64 * (2 * len(runs)))(*[number for run in runs for number in run])
    return Place(ctypes.addressof(array), len(runs), ctypes.addressof(_HOST_RUNS), (array, keeps))


class Refused(Exception):
    """UCX has not begun; ``status`` says why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Calls:
    """The functions, for one thread at a time.

    Raises ``OSError`` or ``AttributeError`` if there are none.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL(LIBRARY)
        pointer, number, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        self._send = library.ucp_tag_send_nbx
        self._send.argtypes = [pointer, pointer, size, number, pointer]
        self._probe = library.ucp_tag_probe_nb
        self._probe.argtypes = [pointer, number, number, ctypes.c_int, pointer]
        self._receive = library.ucp_tag_msg_recv_nbx
        self._receive.argtypes = [pointer, pointer, size, pointer, pointer]
        self._send.restype = self._probe.restype = self._receive.restype = pointer
        self._found = _Found()
        self._found_at = ctypes.addressof(self._found)
        self.status = library.ucp_request_check_status
        self.status.argtypes, self.status.restype = [pointer], STATUS
        self.free = library.ucp_request_free
        self.free.argtypes, self.free.restype = [pointer], None

        self.cancel = library.ucp_request_cancel
        self.cancel.argtypes, self.cancel.restype = [pointer, pointer], None

    def send(self, endpoint: int, place: Place, tag: int) -> int | None:
        """Return the request; None when the message has left. Raises ``Refused``."""
        return _checked(self._send(endpoint, place[0], place[1], tag, place[2]))

    def probe(self, worker: int) -> tuple[int, int, int] | None:
        """Take a message that has arrived, of any tag: its tag, its length, and itself."""
        message = self._probe(worker, 0, 0, 1, self._found_at)
        return None if message is None else (self._found.tag, self._found.nbytes, message)

    def receive(self, worker: int, place: Place, message: int) -> int | None:
        """Return the request; None when the message has arrived. Raises ``Refused``."""
        return _checked(self._receive(worker, place[0], place[1], message, place[2]))


def _checked(request: int | None) -> int | None:
    if request is not None and request >= _FIRST_ERROR:
        raise Refused(request - (1 << 64))
    return request
