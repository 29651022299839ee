"""One request for slots, answered at once or, if it may wait, when there is room.

Owns what was granted so far. A request of which anything has been granted is answered, LATER for
the others: its writer goes on, and asks again for these. So nobody holds slots while waiting for
more: two such requests would wait for one another, and a chain longer than memory for itself, as
its pages cannot leave before the one that is being written has.
"""

from __future__ import annotations

from kvstore.messages import PagesReserved, ReservePages, ReserveStatus, WriteGrant
from kvstore.server.directory import Directory
from kvstore.server.entry import Reservation
from kvstore.server.polls import now_s, poll_end_s
from kvstore.server.room import Room
from transfer.channel import Caller


class Reserving:
    """See the module's docstring.

    Args:
        caller: who asks, and until when.
        room: who makes some, if there is an SSD.
    """

    def __init__(
        self, directory: Directory, message: ReservePages, caller: Caller, room: Room | None
    ) -> None:
        self._directory = directory
        self._message = message
        self._caller = caller
        self._room = room
        self._out: list[Reservation] = [Reservation(ReserveStatus.LATER)] * len(message.pages)

    def at_once(self) -> list[Reservation] | None:
        """The answers in the order of the pages; None: ``later`` has them."""
        if self._room is None:
            self._attempt(False)
        elif not self._room.now(self._attempt) and self._message.wait_s > 0:
            return None
        return self._out

    async def later(self) -> list[Reservation]:
        """Likewise, when there is room for any, or the time is over."""
        assert self._room is not None, "without it everything is answered at once"
        until_s = poll_end_s(self._message.wait_s, self._caller)
        await self._room.wait(self._attempt, until_s)
        return self._out

    def _attempt(self, patient: bool) -> bool:
        """Ask for what has no answer yet."""
        later = ReserveStatus.LATER
        left = [i for i, one in enumerate(self._out) if one.status is later]
        message, pages = self._message, self._message.pages
        answers = self._directory.reserve(
            [pages[i] for i in left],
            message.spec,
            now_s(),
            message.policy,
            self._caller.peer.incarnation,
            patient=patient,
        )
        for i, answer in zip(left, answers, strict=True):
            self._out[i] = answer
        statuses = [one.status for one in self._out]
        return ReserveStatus.GRANTED in statuses or later not in statuses


def answered(reserved: list[Reservation], incarnation: str, lease_s: float) -> PagesReserved:
    """What the writer is told."""
    return PagesReserved(
        incarnation=incarnation,
        lease_s=lease_s,
        grants=tuple(
            WriteGrant(one.status)
            if one.slot is None
            else WriteGrant(one.status, one.slot.offset, one.slot.generation)
            for one in reserved
        ),
    )
