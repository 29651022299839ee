"""How an operation over ucx is made to stand still: the owner's link moves no piece of its region.

Owns what a link of the owner loads and takes in a turn, for as long as a test runs. Pieces to send
are set aside for the turn; all else goes out. Pieces to receive stay with UCX, and with them what
stands behind them on the same link, as on any wire that is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakSet

from tests.transfer.contract.holds import SLICE_S, HeldGate
from transfer import ucx_link
from transfer.ucx_binding import Message
from transfer.ucx_freight import Freight
from transfer.ucx_link import UcxLink

_LOAD, _TAKE = UcxLink._load, UcxLink._take
_WAITING: WeakSet[UcxLink] = WeakSet()  # will look again whether the hold was released


@contextmanager
def links_that_can_be_held() -> Iterator[None]:
    """Every link of ucx in the body obeys the holds of ``hold_at_gate``."""
    with mock.patch.object(UcxLink, "_load", _load), mock.patch.object(UcxLink, "_take", _take):
        yield


def _load(link: UcxLink) -> bool:
    held = [shipment for shipment in link._shipments if _is_held(shipment, link)]
    for shipment in held:
        link._shipments.remove(shipment)
    if any(isinstance(shipment._access, HeldGate) for shipment in link._shipments):
        with mock.patch.object(ucx_link, "MAX_SENDS", 1):  # ask again before the next piece
            loaded = _LOAD(link)
    else:
        loaded = _LOAD(link)
    link._shipments.extend(held)
    return loaded


def _take(link: UcxLink) -> bool:
    worker = link._worker
    probe = worker.probe

    def probe_unless_held() -> Message | None:
        stopped = any(_is_held(delivery, link) for delivery in link._deliveries.values())
        return None if stopped else probe()

    worker.probe = probe_unless_held  # type: ignore[method-assign]
    try:
        return _TAKE(link)
    finally:
        worker.probe = probe  # type: ignore[method-assign]


def _is_held(freight: Freight, link: UcxLink) -> bool:
    gate = freight._access
    if freight.unwanted or not isinstance(gate, HeldGate) or not gate.hold.stops():
        return False
    if link not in _WAITING:
        _WAITING.add(link)
        link._loop.call_later(SLICE_S, _look_again, link)
    return True


def _look_again(link: UcxLink) -> None:
    _WAITING.discard(link)
    link.kick()
