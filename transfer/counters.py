"""Counts of one transfer engine, for metrics. Owns the numbers, knows no transport."""

from __future__ import annotations

import threading
from typing import NamedTuple


class TransferCounters(NamedTuple):
    """A snapshot. All counts only grow.

    Attributes:
        bytes_read: payload of own reads that succeeded.
        bytes_written: payload of own writes that succeeded.
        bytes_served: payload moved for peers (shm peers copy themselves: not in here).
        operations: own reads and writes that ended, with or without success.
        errors: those that raised a ``TransferError`` or were cancelled.
        ranges_asked: ranges the callers passed.
        ranges_sent: contiguous runs left after merging: descriptors that were put to use.
        fallbacks: peers for which a slower path than the chosen one had to be used.
        faults_injected: own reads and writes that fault injection hit.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_served: int = 0
    operations: int = 0
    errors: int = 0
    ranges_asked: int = 0
    ranges_sent: int = 0
    fallbacks: int = 0
    faults_injected: int = 0


class CounterBoard:
    """Thread-safe accumulation of ``TransferCounters``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(TransferCounters._fields, 0)

    def add(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def snapshot(self) -> TransferCounters:
        with self._lock:
            return TransferCounters(**self._values)
