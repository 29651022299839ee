"""How many operations one peer may have under way: the bound on every queue behind it.

Owns the count for each peer. Knows no transport. What is beyond the limit is refused at once, not
queued: memory stays bounded whatever the load, and the caller learns that the peer is too slow.
"""

from __future__ import annotations

from transfer.errors import PeerUnreachable


class OperationLimit:
    """Used on the application's loop only. A peer with nothing under way leaves no trace."""

    def __init__(self, max_per_peer: int) -> None:
        self._max_per_peer = max_per_peer
        self._under_way: dict[str, int] = {}

    @property
    def num_peers(self) -> int:
        """Peers with at least one operation under way."""
        return len(self._under_way)

    def admit(self, incarnation: str) -> Admission:
        """Count one operation for as long as the body of the ``with`` runs.

        Raises:
            PeerUnreachable: as many as allowed are under way with this peer already.
        """
        count = self._under_way.get(incarnation, 0)
        if count >= self._max_per_peer:
            raise PeerUnreachable(
                f"{count} operations are under way with {incarnation}, the most that "
                "max_operations_per_peer allows; wait for some to end"
            )
        self._under_way[incarnation] = count + 1
        return Admission(self._under_way, incarnation)


class Admission:
    """One operation that was counted. A class: ``contextmanager`` takes three times as long."""

    __slots__ = ("_incarnation", "_under_way")

    def __init__(self, under_way: dict[str, int], incarnation: str) -> None:
        self._under_way = under_way
        self._incarnation = incarnation

    def __enter__(self) -> None:
        """It was counted when it was made."""

    def __exit__(self, *_: object) -> None:
        left = self._under_way[self._incarnation] - 1
        if left:
            self._under_way[self._incarnation] = left
        else:
            del self._under_way[self._incarnation]
