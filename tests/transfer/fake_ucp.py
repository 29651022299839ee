"""A stand-in for ``ucp`` (ucx-py), which cannot be installed any more: messages within a process.

Keeps what ``transfer.ucx_ucp`` relies on: signatures, callbacks that come only from ``progress``,
``None`` without a callback for what is done at once, tag matching in order with receives before or
after the message, long messages that are done only when they are received, a descriptor that
becomes readable, ``arm`` that refuses while there is something to do, truncation as an error.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

EAGER_NBYTES = 8192
Callback = Callable[[object, "UCXError | None"], None]
_WORKERS: dict[bytes, UCXWorker] = {}
_NUMBERS = itertools.count(1)
_ARRIVED = threading.Lock()  # a worker is cut off on the thread of another


class UCXError(Exception):
    pass


class UCXCanceled(UCXError):
    pass


class UCXConnectionReset(UCXError):
    pass


class UCXMsgTruncated(UCXError):
    pass


class Array:
    def __init__(self, buffer: Any) -> None:
        self.view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"")
        self.nbytes = self.view.nbytes


class Feature:
    TAG, WAKEUP = 1, 2


class UCXContext:
    def __init__(self, config_dict: dict[str, str], feature_flags: tuple[int, ...]) -> None:
        if config_dict.get("TLS") == "none":
            raise UCXError("No such device")
        assert feature_flags == (Feature.TAG, Feature.WAKEUP)

    def get_config(self) -> dict[str, str]:
        return {"TLS": "fake"}


class UCXAddress(bytes):
    @classmethod
    def from_buffer(cls, data: bytes) -> UCXAddress:
        return cls(data)


class Request:
    """A send or receive that was not done at once."""

    def __init__(self, done: Callback) -> None:
        self.done = done


class Message:
    def __init__(self, tag: int, data: memoryview, request: Request | None, sender: Any) -> None:
        self.tag, self.data, self.request, self.sender = tag, data, request, sender


class UCXWorker:
    def __init__(self, context: UCXContext) -> None:
        self._address = b"worker-%d" % next(_NUMBERS)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.arrived: deque[Message] = deque()
        self.expected: list[tuple[int, Array, int, Request]] = []
        self.finished: deque[tuple[Request, UCXError | None]] = deque()
        _WORKERS[self._address] = self

    def __del__(self) -> None:
        os.close(self._fd)

    def init_blocking_progress_mode(self) -> int:
        return self._fd

    def get_address(self) -> UCXAddress:
        return UCXAddress(self._address)

    def ep_create_from_worker_address(
        self, address: UCXAddress, endpoint_error_handling: bool
    ) -> UCXEndpoint:
        assert endpoint_error_handling
        if bytes(address) not in _WORKERS:
            raise UCXError("Destination is unreachable")
        return UCXEndpoint(self, _WORKERS[bytes(address)])

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def arm(self) -> bool:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return True
        return False

    def progress(self) -> int:
        self._match()
        count = len(self.finished)
        for _ in range(count):
            request, error = self.finished.popleft()
            request.done(request, error)
        return count

    def _match(self) -> None:
        with _ARRIVED:
            for message in list(self.arrived):
                for entry in self.expected:
                    tag, array, nbytes, request = entry
                    if tag == message.tag:
                        self.arrived.remove(message)
                        self.expected.remove(entry)
                        self._deliver(message, array, nbytes, request)
                        break

    def _deliver(self, message: Message, array: Array, nbytes: int, request: Request) -> None:
        error = None
        if message.data.nbytes == nbytes:
            array.view[:nbytes] = message.data
        else:
            error = UCXMsgTruncated("length mismatch")
        self.finished.append((request, error))
        if message.request is not None:
            message.sender.finished.append((message.request, None))
            message.sender.wake()

    def request_cancel(self, request: Request) -> None:
        for entry in list(self.expected):
            if entry[3] is request:
                self.expected.remove(entry)
                self.finished.append((request, UCXCanceled("cancelled")))

    def cut(self, from_worker: UCXWorker) -> None:
        """The connection to ``from_worker`` is gone: what it wants to send fails."""
        with _ARRIVED:
            for message in list(self.arrived):
                if message.sender is from_worker and message.request is not None:
                    self.arrived.remove(message)
                    from_worker.finished.append((message.request, UCXConnectionReset("reset")))


class UCXEndpoint:
    def __init__(self, worker: UCXWorker, peer: UCXWorker) -> None:
        self.worker, self.peer = worker, peer

    def abort(self) -> None:
        self.peer.cut(self.worker)
        self.worker.cut(self.peer)
        _WORKERS.pop(bytes(self.worker.get_address()), None)


def tag_send_nb(
    ep: UCXEndpoint, buffer: Array, nbytes: int, tag: int, cb_func: Callback
) -> Request | None:
    eager = nbytes <= EAGER_NBYTES
    request = None if eager else Request(cb_func)
    data = memoryview(bytes(buffer.view)) if eager else buffer.view
    ep.peer.arrived.append(Message(tag, data, request, ep.worker))
    ep.peer.wake()
    return request


def tag_recv_nb(
    worker: UCXWorker, buffer: Array, nbytes: int, tag: int, cb_func: Callback
) -> Request:
    request = Request(cb_func)
    worker.expected.append((tag, buffer, nbytes, request))
    worker.wake()
    return request


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import ucp`` find this module, and the transport use it."""
    names = ("ucp", "ucp._libs", "ucp._libs.ucx_api", "ucp._libs.arr")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    here = sys.modules[__name__]
    modules["ucp._libs.arr"].Array = Array  # type: ignore[attr-defined]
    api = ("Feature", "UCXAddress", "UCXContext", "UCXEndpoint", "UCXError", "UCXWorker")
    for name in (*api, "tag_recv_nb", "tag_send_nb"):
        setattr(modules["ucp._libs.ucx_api"], name, getattr(here, name))
    modules["ucp"].get_ucx_version = lambda: (1, 15, 0)  # type: ignore[attr-defined]
    modules["ucp"].__version__ = "0.37"  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "transfer.ucx_ucp", raising=False)
    monkeypatch.setattr("transfer.ucx_binding.BINDINGS", {"ucp": "transfer.ucx_ucp"})
