"""Who waits for a flight is told once, and of a failure when the connection is cut. No UCX."""

from __future__ import annotations

from typing import cast

import pytest

from transfer.errors import FrameInvalid, PeerLost, TransferError
from transfer.ucx_binding import Worker
from transfer.ucx_flights import Flights

BROKEN, CUT = PeerLost("broken"), PeerLost("cut")


class _Flight:
    def __init__(self, *, completed: bool = True, error: TransferError | None = None) -> None:
        self.completed = completed
        self._error = error

    def error(self) -> TransferError | None:
        return self._error


class Bed:
    def __init__(self, **flights: _Flight) -> None:
        self.flights = Flights(cast("Worker", None))
        self.told: list[tuple[str, TransferError | None]] = []
        for name, flight in flights.items():
            self.flights.post(flight, None, lambda error, name=name: self.tell(name, error))

    def tell(self, name: str, error: TransferError | None) -> None:
        self.told.append((name, error))


def test_what_has_moved_is_told_before_the_connection_is_cut_and_what_has_failed_then() -> None:
    bed = Bed(bad=_Flight(error=BROKEN), good=_Flight(), slow=_Flight(completed=False))
    with pytest.raises(PeerLost, match="broken"):
        bed.flights.settle()
    assert bed.told == [("good", None)]
    bed.flights.settle_cut(CUT)
    assert bed.told == [("good", None), ("bad", CUT)]
    assert len(bed.flights) == 1, "what is under way is waited for"


def test_all_that_has_moved_is_told_also_if_who_is_told_first_fails() -> None:
    bed = Bed()

    def fail(_error: TransferError | None) -> None:
        raise FrameInvalid("nonsense")

    bed.flights.post(_Flight(), None, fail)
    bed.flights.post(_Flight(), None, lambda error: bed.tell("good", error))
    with pytest.raises(FrameInvalid):
        bed.flights.settle()
    assert bed.told == [("good", None)]


def test_nothing_is_settled_while_all_are_under_way() -> None:
    bed = Bed(slow=_Flight(completed=False))
    assert not bed.flights.settle()
    assert len(bed.flights) == 1
