"""Gives back to UCX what ucxx keeps: a worker that was cut with requests under way.

Owns the way around one defect of ucxx: a request that ``close_blocking`` cannot cancel at once, and
that completes a moment later, stays in the endpoint's set of cancelled requests. The set keeps the
request, the request the endpoint, the endpoint the worker and that the context: none of them is
ever destroyed, and their sockets and shared memory stay open. A peer that is frozen in the middle
of a read does that, and so may any connection that is cut. By then UCX itself is done with all of
them, so they are destroyed here by their handles, and the Python objects are kept for good, which
keeps ucxx's: nothing may destroy them again.

A worker that is given up while UCX holds a flight is not destroyed: UCX would call back into freed
memory. It is never progressed again (``ucx_stragglers``), and stays in ``kept_for_good``, with its
flights and their buffers.

Knows no peers. Costs a few kilobytes for each connection that is cut that way.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

from transfer.ucx_calls import LIBRARY

_LOG = logging.getLogger(__name__)
kept_for_good: list[object] = []  # workers; there is no limit, as there is no other safe place


class Handled(Protocol):
    """An object of ucxx that stands for one of UCX's."""

    @property
    def handle(self) -> int: ...


def destroy_worker(worker: Handled) -> None:
    """Destroy the worker; every request of it has completed, and its endpoint is closed."""
    _destroy("ucp_worker_destroy", worker)


def destroy_context(context: Handled) -> None:
    """Destroy the context; all of its workers are destroyed."""
    _destroy("ucp_cleanup", context)


def keep_for_good(worker: object) -> None:
    """Keep a worker with incomplete flights until the process ends, also while that ends.

    Idempotent. Its descriptors stay open. The reason is logged once for each process.
    """
    if any(each is worker for each in kept_for_good):
        return
    _never_free(worker)
    kept_for_good.append(worker)
    _LOG.log(
        logging.WARNING if len(kept_for_good) == 1 else logging.INFO,
        "a ucx worker and its buffers are kept until this process ends (%d so far): ucx has not "
        "completed its requests, and would touch it after its end",
        len(kept_for_good),
    )


def _destroy(function: str, owner: Handled) -> None:
    try:
        destroy = getattr(ctypes.CDLL(LIBRARY), function)
    except (OSError, AttributeError) as error:
        _LOG.warning("descriptors of ucx stay open, as %s is not reached: %s", function, error)
        return
    destroy.argtypes, destroy.restype = [ctypes.c_void_p], None
    _never_free(owner)
    destroy(owner.handle)


def _never_free(owner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
