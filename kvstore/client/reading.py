"""One ``get``: acquire, read into place, verify, release; from the next replica what has failed.

Owns the life of a single call. Nodes are worked on in parallel; on each, pages become usable batch
by batch. A page ends with exactly one outcome::

    ask ranks   acquire ──not there, other tokens, unreachable──▶ next in rank ──none left──▶ wait
                   ▼                                                                          │
                read ──broken──▶ again, at once; then next in rank                            │
                   ▼                                                                          │
                hash ──mismatch──▶ reported (the node checks and drops it), next in rank      │
                   └──▶ READ                                                                  │
    wait        long poll at the node where the page will be put, a while, then ask again ◀───┘
                   └──no time left, or not waiting──▶ CORRUPT, FAILED or ABSENT: the worst seen

When cancelled, reads in flight end before the call does, and leases are released in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.client.all_of import all_of
from kvstore.client.link import StoreLink
from kvstore.client.links import ClientParts, Course
from kvstore.client.pulling import Pull
from kvstore.store import GetOutcome, GetPage, GetResult, TransferCount
from transfer.errors import DeadlineExceeded, TransferError
from transfer.interface import Region

OnPage = Callable[[int, GetOutcome], None]
VIEWS_MAX = 3  # that one call without waiting asks by
POLL_MARGIN_S = 0.1  # a long poll ends this long before its caller's deadline, at the latest

_WORSE = {GetOutcome.ABSENT: 0, GetOutcome.FAILED: 1, GetOutcome.CORRUPT: 2}


class PageReader:
    """One call of ``StoreClient.get``."""

    def __init__(
        self,
        parts: ClientParts,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool,
        on_page: OnPage | None,
    ) -> None:
        self._parts = parts
        self._links = parts.links
        self._keys = [page.identity.key for page in pages]
        self._deadline_s = deadline_s
        self._wait = wait
        self._on_page = on_page
        self._outcomes: dict[int, GetOutcome] = {}
        self._worst: dict[int, GetOutcome] = {}
        self._pull = Pull(
            parts, pages, into=into, deadline_s=deadline_s, read=self._read, spoiled=self._note
        )

    async def run(self) -> GetResult:
        todo: list[int] = list(range(len(self._keys)))
        ask_ranks = not self._wait or self._links.num_answers > 1
        while todo and not self._late() and self._links.present:
            if ask_ranks:
                await self._ask_ranks(todo)
                todo = self._unfinished(todo)
                if not self._wait:
                    break
                todo = self._give_up_hopeless(todo)
            if self._closing():
                break
            polled = await self._poll(todo)
            todo = self._unfinished(todo)
            ask_ranks = not polled or bool(self._worst) or self._links.num_answers > 1
        for i in todo:
            self._finish(i, self._worst.get(i, GetOutcome.ABSENT))
        num_moved = self._pull.num_moved
        moved = TransferCount(num_moved, num_moved * self._parts.spec.page_nbytes)
        return GetResult([self._outcomes[i] for i in range(len(self._keys))], moved)

    # ---- asking every rank, without waiting

    async def _ask_ranks(self, todo: list[int]) -> None:
        """Ask; once more when the nodes have changed meanwhile: one may be another process now."""
        for _ in range(VIEWS_MAX):
            epoch = self._links.epoch
            await self._ask_by_view(todo)
            todo = self._unfinished(todo)
            if not todo or self._late() or epoch == self._links.epoch:
                return

    async def _ask_by_view(self, todo: list[int]) -> None:
        course = self._links.reading(self._keys, spread=True)
        asked: set[int] = set()
        left = todo
        while left and not self._late() and (groups := course.groups(left)):
            asked.update(i for group in groups for i in group.indexes)
            await all_of([self._visit(link, indexes, course) for link, indexes in groups])
            left = self._unfinished(left)
        self._note([i for i in todo if i not in asked], GetOutcome.FAILED)
        self._note(course.skipped(left), GetOutcome.FAILED)  # it may be where nobody was asked

    async def _visit(self, link: StoreLink, indexes: list[int], course: Course) -> None:
        todo = indexes
        try:
            while todo and not self._late():
                todo = await self._pull.once(link, todo, wait_s=0.0)
        except TransferError as error:
            left = self._unfinished(indexes)
            self._note(left, self._verdict(error))
            course.unreachable(left)
            return
        left = self._unfinished(indexes)
        for i in left:
            self._links.hot.forget(self._keys[i])
        course.answered(left)

    # ---- waiting

    async def _poll(self, todo: list[int]) -> bool:
        """Wait for pages where they will be put, for one poll's time; False when a node failed."""
        groups = self._links.writing(self._keys).groups(todo)
        until_s = min(_now_s() + self._parts.config.poll_s, self._deadline_s)
        async with asyncio.TaskGroup() as tasks:
            polls = [tasks.create_task(self._poll_at(g.link, g.indexes, until_s)) for g in groups]
        polled = {i for group in groups for i in group.indexes}
        self._note([i for i in todo if i not in polled], GetOutcome.FAILED)
        return len(polled) == len(todo) and all(poll.result() for poll in polls)

    async def _poll_at(self, link: StoreLink, todo: list[int], until_s: float) -> bool:
        epoch = self._links.epoch
        try:
            while todo and epoch == self._links.epoch and (wait_s := until_s - _now_s()) > 0:
                await self._pull.once(link, todo, wait_s=wait_s)
                todo = [i for i in self._unfinished(todo) if i not in self._worst]
        except TransferError as error:
            if epoch == self._links.epoch:
                self._note(self._unfinished(todo), self._verdict(error))
            return False
        return True

    def _give_up_hopeless(self, todo: list[int]) -> list[int]:
        """End pages that no replica can give, or that no node can be asked for."""
        groups = self._links.writing(self._keys).groups(todo)
        reachable = {i for group in groups for i in group.indexes}
        left = []
        for i in todo:
            worst = self._worst.pop(i, GetOutcome.ABSENT)
            hopeless = worst is GetOutcome.FAILED and i not in reachable
            if hopeless or worst is GetOutcome.CORRUPT:
                self._finish(i, worst)
            else:
                left.append(i)
        return left

    # ---- outcomes

    def _read(self, index: int) -> None:
        self._finish(index, GetOutcome.READ)

    def _note(self, indexes: Sequence[int], outcome: GetOutcome) -> None:
        """These pages did not come from one node."""
        for i in indexes:
            if _WORSE[outcome] > _WORSE[self._worst.get(i, GetOutcome.ABSENT)]:
                self._worst[i] = outcome

    def _verdict(self, error: TransferError) -> GetOutcome:
        """ABSENT when the caller's own deadline ended the call, FAILED when the node did."""
        late = isinstance(error, DeadlineExceeded) and self._late()
        return GetOutcome.ABSENT if late else GetOutcome.FAILED

    def _finish(self, index: int, outcome: GetOutcome) -> None:
        assert index not in self._outcomes, f"page {index} has an outcome already"
        self._outcomes[index] = outcome
        self._parts.counters[f"get_{outcome}"] += 1
        if self._on_page is not None:
            self._on_page(index, outcome)

    def _unfinished(self, indexes: Sequence[int]) -> list[int]:
        return [index for index in indexes if index not in self._outcomes]

    def _closing(self) -> bool:
        """True when the time left is too short for another long poll."""
        return self._deadline_s - _now_s() <= POLL_MARGIN_S

    def _late(self) -> bool:
        return _now_s() >= self._deadline_s


def _now_s() -> float:
    return asyncio.get_running_loop().time()
