"""One request for slots, answered at once or, if it may wait, when there is room.

Owns what was granted so far. A request of which anything has been granted is answered, LATER for
the others: its writer goes on, and asks again for these. So nobody holds slots while waiting for
more: two such requests would wait for one another, and a chain longer than memory for itself, as
its pages cannot leave before the one that is being written has.

Only absent pages wait: what exists, or is being written, is answered whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.messages import PagesReserved, ReservePages, ReserveStatus, WriteGrant
from kvstore.server.directory import Directory
from kvstore.server.entry import Reservation
from kvstore.server.polls import now_s, poll_end_s
from kvstore.server.room import Room, Want
from kvstore.store import PageState
from transfer.channel import Caller


class Reserving:
    """See the module's docstring.

    Args:
        caller: who asks, and until when.
        room: who makes some, if there is an SSD.
        admit: raises when the node takes no pages any more; asked anew at every try.
    """

    def __init__(
        self,
        directory: Directory,
        message: ReservePages,
        caller: Caller,
        room: Room | None,
        admit: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._message = message
        self._caller = caller
        self._room = room
        self._admit = admit
        self._want = Want(self._attempt, message.spec.page_nbytes, self._fits)
        self._out: list[Reservation] = [Reservation(ReserveStatus.LATER)] * len(message.pages)

    def at_once(self) -> list[Reservation] | None:
        """The answers in the order of the pages; None: ``later`` has them."""
        if self._room is None:
            self._attempt(False)
        elif not self._room.now(self._want):
            self._ask([i for i in self._left() if not self._absent(i)], patient=True)
            if self._left() and self._message.wait_s > 0:
                return None
        return self._out

    async def later(self) -> list[Reservation]:
        """Likewise, when there is room for any, or the time is over.

        Raises:
            RemoteFailed: the node came to take no pages any more; nothing was granted.
        """
        assert self._room is not None, "without it everything is answered at once"
        until_s = poll_end_s(self._message.wait_s, self._caller)
        await self._room.wait(self._want, until_s - now_s())
        return self._out

    def _left(self) -> list[int]:
        """The positions of pages without an answer."""
        return [i for i, one in enumerate(self._out) if one.status is ReserveStatus.LATER]

    def _absent(self, position: int) -> bool:
        key = self._message.pages[position].key
        return self._directory.state(key) is PageState.ABSENT

    def _fits(self) -> bool:
        """All that is absent can be granted, and nothing need go for it."""
        num_absent = sum(self._absent(i) for i in self._left())
        return self._directory.segment.num_free_slots(self._want.page_nbytes) >= num_absent

    def _attempt(self, patient: bool) -> bool:
        """Ask for what has no answer yet; True when the request is to be answered now."""
        self._admit()
        self._ask(self._left(), patient=patient)
        statuses = [one.status for one in self._out]
        return ReserveStatus.GRANTED in statuses or ReserveStatus.LATER not in statuses

    def _ask(self, positions: list[int], *, patient: bool) -> None:
        message, pages = self._message, self._message.pages
        answers = self._directory.reserve(
            [pages[i] for i in positions],
            message.spec,
            now_s(),
            message.policy,
            self._caller.peer.incarnation,
            patient=patient,
        )
        for i, answer in zip(positions, answers, strict=True):
            self._out[i] = answer


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
