"""The pages that go next, in the order in which they go.

Owns the line, by tenant and priority, and how much stands in it. A page in line is in memory and
readable like any other; it was chosen ahead of time, so that the SSD could take a copy of it, and
leaves the line when it is used, held or gone. Decides nothing.

::

    candidate ──chosen, copied──▶ in line ──its turn──▶ out of memory
        ▲                            │
        └────── used meanwhile ──────┘

To choose one page is to look at memory as if the page had left it: its parent is a candidate as
soon as all its children are in line. So whole chains are copied before the first page of them goes.

A place is valid while the page is in line under the same grant and stamp; others are skipped.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstore.server.page_table import IN_LINE, PageTable
from kvstore.server.tenants import Tenants

_PLACES_SLACK = 1024  # places of pages that have left the line, kept before it is cleaned


class Place(NamedTuple):
    """Where a page stands: good for one grant of its slot and one use."""

    row: int
    generation: int
    stamp: int


class Line:
    """See the module's docstring."""

    def __init__(self, table: PageTable, tenants: Tenants) -> None:
        self._table = table
        self._tenants = tenants
        self._places: dict[int, dict[int, deque[Place]]] = {}
        self._num_places = 0
        self._num = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, row: int) -> bool:
        return bool(self._table.queued[row] == IN_LINE)

    def add(self, row: int) -> None:
        """Let a page in memory that is in no queue stand at the end."""
        self._enter(row).append(self._place(row))

    def add_first(self, row: int) -> None:
        """Likewise, ahead of all others of its tenant and priority."""
        self._enter(row).appendleft(self._place(row))

    def _place(self, row: int) -> Place:
        return Place(row, self._table.generation[row], self._table.stamp[row])

    def _enter(self, row: int) -> deque[Place]:
        table = self._table
        assert not table.queued[row], row
        table.queued[row] = IN_LINE
        table.trunks.num_staying[table.trunk[row]] -= 1
        tenant = self._count(row, 1)
        if self._num_places > 2 * self._num + _PLACES_SLACK:
            self._clean()
        self._num_places += 1
        places = self._places.setdefault(tenant, {})
        return places.setdefault(table.priority[row], deque())

    def remove(self, row: int) -> None:
        """The page stays for now, or is gone; its place means nothing any more."""
        table = self._table
        table.queued[row] = 0
        table.trunks.num_staying[table.trunk[row]] += 1
        self._count(row, -1)

    def _count(self, row: int, num: int) -> int:
        nbytes = num * self._table.page_nbytes(row)
        tenant = self._tenants.tenant_of(self._table.namespace[row])
        self._num += num
        self.nbytes += nbytes
        self._tenants.stand(tenant, nbytes)
        return tenant

    def _clean(self) -> None:
        for lines in self._places.values():
            for priority, places in lines.items():
                lines[priority] = deque(place for place in places if self._in_line(place))
        self._num_places = sum(
            len(places) for lines in self._places.values() for places in lines.values()
        )

    def _in_line(self, place: Place) -> bool:
        table = self._table
        same = table.generation[place.row] == place.generation
        return bool(same and table.queued[place.row] == IN_LINE)

    def first(self, tenant: int) -> Place | None:
        """The first of the lowest priority; it keeps its place. Its stamp may have changed."""
        lines = self._places.get(tenant, {})
        while lines:
            priority = min(lines)
            places = lines[priority]
            while places:
                if self._in_line(places[0]) and self._table.priority[places[0].row] == priority:
                    return places[0]
                places.popleft()
                self._num_places -= 1
            del lines[priority]
        self._places.pop(tenant, None)
        return None

    def check(self) -> None:
        """Assert that who is in line has a place, and that the counts agree; O(rows)."""
        table = self._table
        rows = [row for row in table.used_rows() if row in self]
        assert len(rows) == self._num
        assert self.nbytes == sum(table.page_nbytes(row) for row in rows)
        assert self.nbytes == sum(self._tenants.in_line().values())
        places = [p for lines in self._places.values() for some in lines.values() for p in some]
        assert len(places) == self._num_places
        assert {place.row for place in places if self._in_line(place)} == set(rows)
