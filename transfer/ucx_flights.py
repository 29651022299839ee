"""What UCX has under way for one connection, and who is told when it has landed.

Owns the list of flights with the freight that each belongs to. Knows no peers and no tags; the
connection (``UcxLink``) posts flights and asks which have completed.

Invariant: whoever waits for a flight is told once: when it has completed, or when it is given up;
of one that has failed, when the connection has been cut for it. So nobody answers for it on a
connection that is broken, as if the failure were something else.
"""

from __future__ import annotations

from collections.abc import Callable

from transfer.errors import TransferError
from transfer.ucx_binding import Flight, Worker
from transfer.ucx_freight import Freight

Settle = Callable[[TransferError | None], None]


# A plain tuple: there is one for each piece that moves.
_Aboard = tuple[Flight, Freight | None, Settle]


class Flights:
    """Those of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._aboard: list[_Aboard] = []

    def __len__(self) -> int:
        return len(self._aboard)

    @property
    def unwanted(self) -> bool:
        """True while a piece that was called off is under way."""
        return any(freight is not None and freight.unwanted for _, freight, _ in self._aboard)

    def post(self, flight: Flight, freight: Freight | None, settle: Settle) -> None:
        """Remember a flight.

        Args:
            settle: called once, with why its connection was cut; it may post others.
        """
        self._aboard.append((flight, freight, settle))

    def settle(self) -> bool:
        """Let go of the flights that have moved every byte; False if none has.

        Raises:
            TransferError: the first failure, of a flight or of who was told. The connection is to
                be cut: flights that have failed stay until then.
        """
        done: list[_Aboard] = []
        left: list[_Aboard] = []
        failure: TransferError | None = None
        for each in self._aboard:
            flight = each[0]
            if not flight.completed:
                left.append(each)
            elif (error := flight.error()) is None:
                done.append(each)
            else:
                left.append(each)
                failure = failure or error
        self._aboard = left
        for _, _, settle in done:  # also after a failure: somebody may wait for its memory
            try:
                settle(None)
            except TransferError as broken:
                failure = failure or broken
        if failure is not None:
            raise failure
        return bool(done)

    def settle_cut(self, error: TransferError) -> None:
        """The worker was broken off: let go of the flights that have completed."""
        aboard, self._aboard = self._aboard, []
        for each in aboard:
            flight, _, settle = each
            if flight.completed:
                settle(error)
            else:
                self._aboard.append(each)

    def give_up(self, error: TransferError) -> None:
        """Let go of all. The worker is quiet, or progressed no more; if that does not stop it, the
        memory of what it still holds is not used again."""
        aboard, self._aboard = self._aboard, []
        for flight, freight, settle in aboard:
            stopped = flight.completed or self._worker.moves_only_in_progress
            if not stopped and freight is not None:
                freight.quarantine()
            settle(error)
