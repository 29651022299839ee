"""Who may use the bounce slots of one device, and who is next. Pure: knows no memory, no loop.

Owns the numbers of the slots and the line of those who wait for one. Slots are made as they are
needed and never more than ``max_slots``. No peer holds more than ``max_per_peer``: one that stalls
keeps its own slots and nobody else's. Urgent work goes first; every ``BACKGROUND_TURN``-th grant
while both wait goes to background work, which is thus slowed and never starved.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable

from transfer.interface import Priority

BACKGROUND_TURN = 4


class Ticket:
    """A wish for one slot. ``slot`` is set when it is granted."""

    __slots__ = ("granted", "peer", "priority", "slot")

    def __init__(self, peer: Hashable, priority: Priority, granted: Callable[[], None]) -> None:
        self.peer = peer
        self.priority = priority
        self.granted = granted
        self.slot: int | None = None


class BounceRing:
    """Grants slots ``0 .. max_slots - 1``. Lives on one event loop."""

    def __init__(self, *, max_slots: int, max_per_peer: int) -> None:
        self._max_per_peer = max_per_peer
        self._free = list(range(max_slots - 1, -1, -1))  # the lowest, made first, on top
        self._held: Counter[Hashable] = Counter()
        self._lines: dict[Priority, deque[Ticket]] = {each: deque() for each in Priority}
        self._num_urgent = 0  # urgent grants in a row while background work waited

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def ask(self, peer: Hashable, priority: Priority, granted: Callable[[], None]) -> Ticket:
        """Stand in line; ``granted`` is called when the slot is there, at once if one is free."""
        ticket = Ticket(peer, priority, granted)
        self._lines[priority].append(ticket)
        self._grant()
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Return the slot, or leave the line. Exactly once for each ticket."""
        if ticket.slot is None:
            self._lines[ticket.priority].remove(ticket)
            return
        self._free.append(ticket.slot)
        self._held[ticket.peer] -= 1
        if self._held[ticket.peer] == 0:
            del self._held[ticket.peer]
        self._grant()

    def _grant(self) -> None:
        while self._free:
            ticket = self._next()
            if ticket is None:
                return
            self._lines[ticket.priority].remove(ticket)
            ticket.slot = self._free.pop()
            self._held[ticket.peer] += 1
            ticket.granted()

    def _next(self) -> Ticket | None:
        urgent = self._first(Priority.NOW)
        background = self._first(Priority.BACKGROUND)
        if urgent is None or background is None:
            self._num_urgent = 0
            return urgent or background
        if self._num_urgent + 1 < BACKGROUND_TURN:
            self._num_urgent += 1
            return urgent
        self._num_urgent = 0
        return background

    def _first(self, priority: Priority) -> Ticket | None:
        for ticket in self._lines[priority]:
            if self._held[ticket.peer] < self._max_per_peer:
                return ticket
        return None
