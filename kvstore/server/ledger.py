"""Who is owed which slot: the state of every page of a directory, and what follows from a change.

Owns the moves between states and the counts that hang on them; the one place where a slot becomes
free. Knows no messages, no leases by id and no watermarks (``admission``, ``reading``, ``evictor``,
``spilling`` decide, and call these moves).

::

    WRITING ──publish──▶ READY ◀──────restore──── SPILLED       (indexed: found by key)
       │                  │ └────────vacate──────────▲ │
       │ unindex          │ unindex                    │ unindex
       ▼                  ▼                            ▼
    FENCED             DROPPED ──no holds──▶ free     free      (slot owed to a writer, readers)
"""

from __future__ import annotations

from kvstore.page import PageKey
from kvstore.server.announcer import Announcer
from kvstore.server.entry import Counters
from kvstore.server.heat import HeatMeter
from kvstore.server.key_index import Rows
from kvstore.server.line import Line
from kvstore.server.page_table import ABSENT, DROPPED, FENCED, READY, SPILLED, WRITING, PageTable
from kvstore.server.policies import EvictionPolicy
from kvstore.server.queues import Queues
from kvstore.server.segment import Segment, Slab, Slot
from kvstore.server.slab_stamps import SlabStamps
from kvstore.server.tenants import Tenants
from kvstore.server.watches import Watches
from kvstore.store import PageIdentity, PageRecord, PutPolicy


class Ledger:
    """See the module's docstring.

    Attributes:
        capacity_nbytes: of all tiers; growing to that many pages costs no pause.
        now: logical time: one per request. now_s: the latest time that was passed in.
        line: pages chosen to go next.
        num_on_ssd: pages with a copy on the SSD, in memory or not.
        removals: keys whose copy on the SSD must go; vacated: rows of pages that are only there
            now. The shell takes both.
        announcer: is told of every move of an indexed page.
        reclaim_s_max, reclaim_s_sum: time from a slot being given up to its being free.
    """

    def __init__(
        self,
        segment: Segment,
        table: PageTable,
        *,
        policy: EvictionPolicy,
        tenants: Tenants,
        heat: HeatMeter,
    ) -> None:
        self.segment = segment
        self.table = table
        self.policy = policy
        self.tenants = tenants
        self.heat = heat
        self.queues = Queues(table, policy, tenants)
        self.line = Line(table, tenants)
        self.watches = Watches()
        self.counters: Counters = Counters()
        self.slabs = SlabStamps()
        self.now = 1
        self.now_s = 0.0
        self.capacity_nbytes = segment.nbytes
        self.num_on_ssd = 0
        self.removals: dict[PageKey, None] = {}
        self.vacated: list[int] = []
        self.announcer = Announcer(table)
        self.num_pinned_nbytes = 0
        self.reclaim_s_max = 0.0
        self.reclaim_s_sum = 0.0
        self._num = [0] * (DROPPED + 1)  # rows by state
        self._owed_since: dict[int, float] = {}  # rows that wait for their slot to be free

    def begin(self, now_s: float) -> None:
        """A request is served from here on."""
        self.now += 1
        self.now_s = max(self.now_s, now_s)

    def num_in(self, state: int) -> int:
        return self._num[state]

    @property
    def oldest_owed_s(self) -> float:
        """How long the oldest slot that nobody can reach has waited to be free."""
        first = next(iter(self._owed_since.values()), None)
        return 0.0 if first is None else self.now_s - first

    # ---- use

    def protect(self, row: int) -> None:
        """Keep a page for the time of this request; no use of it."""
        self.table.stamp[row] = self.now
        self.slabs.touch(self.table.slab[row], self.now)

    def touch(self, row: int) -> None:
        """A page is used; once per request."""
        table = self.table
        if table.stamp[row] == self.now:
            return
        table.stamp[row] = self.now
        self.slabs.touch(table.slab[row], self.now)
        self.heat.add(row, self.now_s)
        if table.state[row] != SPILLED:
            self.policy.touched(row, self.now)

    def touch_many(self, rows: Rows) -> None:
        """Likewise for the rows of one request; none of them null."""
        table = self.table
        table.stamps[rows] = self.now
        self.slabs.touch_many(table.slabs[rows], self.now)
        self.heat.add_many(rows, self.now_s)
        if self._num[SPILLED]:
            rows = rows[table.states[rows] != SPILLED]
        self.policy.touched_many(rows, self.now)

    # ---- coming

    def admit(self, page: PageIdentity, spec_id: int, policy: PutPolicy, slot: Slot) -> int:
        """Index an absent page as being written to ``slot``; returns its row."""
        row = self._index(page, spec_id, policy)
        self._move(row, WRITING)
        self.give_slot(row, slot)
        self._enter_memory(row)
        return row

    def adopt(self, page: PageRecord, spec_id: int, policy: PutPolicy) -> int:
        """Index an absent page that was found on the SSD."""
        row = self._index(page, spec_id, policy)
        self.announcer.found(page, self.table.specs[spec_id].page_size)
        self._move(row, SPILLED)
        self.note_copy(row, on_ssd=True)
        self.table.set_checksum(row, page.checksum)
        return row

    def note_copy(self, row: int, *, on_ssd: bool) -> None:
        """The SSD has the page now, or has it no more."""
        self.num_on_ssd += on_ssd - self.table.on_ssd[row]
        self.table.on_ssd[row] = on_ssd

    def _index(self, page: PageIdentity | PageRecord, spec_id: int, policy: PutPolicy) -> int:
        if not len(self.table):
            self.table.reserve(self.capacity_nbytes // self.table.specs[spec_id].page_nbytes)
        row = self.table.add(page, spec_id, policy.namespace)
        lasts_s = policy.priority_s
        until_s = None if lasts_s is None else self.now_s + lasts_s
        self.queues.set_priority(row, policy.priority, until_s)
        self.table.stamp[row] = self.now
        self.heat.first(row, self.now_s)
        return row

    def give_slot(self, row: int, slot: Slot) -> Slab:
        """Put ``row`` into a slot; it is charged to its tenant."""
        table, slab = self.table, self.segment.slab_of(slot)
        slab.owners[slab.number_of(slot.offset)] = row
        table.offset[row], table.generation[row] = slot.offset, slot.generation
        table.slab[row] = slab.slab_id + 1
        self.slabs.opened(slab.slab_id + 1, self.now)
        number = table.namespace[row]
        tenant, name = self.tenants.tenant_of(number), table.namespaces.name(number)
        self.tenants.hold(tenant, name, slot.nbytes)
        return slab

    def slot(self, row: int) -> Slot:
        table = self.table
        return Slot(table.offset[row], table.page_nbytes(row), table.generation[row])

    def take_slot(self, row: int) -> None:
        """Free the slot of a row."""
        table, slot = self.table, self.slot(row)
        self.segment.free(slot)
        self.tenants.give(self.tenants.tenant_of(table.namespace[row]), slot.nbytes)
        table.offset[row] = table.generation[row] = table.slab[row] = 0

    def _enter_memory(self, row: int) -> None:
        trunk = self.table.trunk[row]
        self.table.trunks.num_resident[trunk] += 1
        self.table.trunks.num_staying[trunk] += 1
        self.policy.admitted(row, self.now)

    def _leave_memory(self, row: int) -> None:
        self.dequeue(row)
        trunk = self.table.trunk[row]
        self.table.trunks.num_resident[trunk] -= 1
        self.table.trunks.num_staying[trunk] -= 1
        self._bequeath(row)
        self.policy.left(row)

    def _bequeath(self, row: int) -> None:
        """The page goes before its parent, which takes over what it was worth."""
        table = self.table
        parent = table.parent_row(row)
        if parent and table.state[parent] in (WRITING, READY):
            table.stamp[parent] = max(table.stamp[parent], table.stamp[row])
            table.heat[parent] = max(table.heat[parent], table.heat[row])
            self.slabs.raise_to(table.slab[parent], table.stamp[parent])
            self.policy.inherit(parent, row)
            self.offer(parent)

    # ---- moves

    def _move(self, row: int, state: int) -> None:
        self._num[self.table.state[row]] -= 1  # of state 0 for a new row: not looked at
        self._num[state] += 1
        self.table.state[row] = state

    def publish(self, row: int, key: PageKey, checksum: bytes) -> None:
        """WRITING to READY."""
        self.table.set_checksum(row, checksum)
        self.announcer.moving(row, READY)
        self._move(row, READY)
        self.offer(row)
        self.watches.fire(key)

    def restore(self, row: int) -> None:
        """SPILLED to READY: the page's bytes are in its slot again."""
        self.announcer.moving(row, READY)
        self._move(row, READY)
        self._enter_memory(row)
        self.offer(row)
        self.watches.fire(self.table.key(row))

    def vacate(self, row: int) -> None:
        """READY to SPILLED: the slot is free, the SSD has the page."""
        assert self.table.on_ssd[row], row
        self.announcer.moving(row, SPILLED)
        self._leave_memory(row)
        self.unpin(row)
        self._move(row, SPILLED)
        self.take_slot(row)
        self.vacated.append(row)

    def unindex(self, row: int, *, fenced: bool = False) -> None:
        """Make the key absent; the slot becomes free now, or when nobody is owed it any more."""
        table = self.table
        key, state = table.key(row), table.state[row]
        self.announcer.moving(row, ABSENT)
        if state != SPILLED:
            self._leave_memory(row)
        if table.on_ssd[row]:
            self.removals[key] = None
            self.note_copy(row, on_ssd=False)
        self.unpin(row)
        table.unlink(row)
        self.queues.forget(row)
        if fenced or table.num_holds[row]:
            self._move(row, FENCED if fenced else DROPPED)
            self._owed_since[row] = self.now_s
        else:
            self._free(row)
        self.watches.fire(key)

    def unfence(self, row: int) -> None:
        """FENCED to free: nothing of the writer is on the wire any more."""
        self._move(row, DROPPED)
        self.settle(row)

    def settle(self, row: int) -> None:
        """Free an unreachable row that nobody is owed; offer a reachable one."""
        state = self.table.state[row]
        if state == READY:
            self.offer(row)
        elif state == DROPPED and not self.table.num_holds[row]:
            waited_s = self.now_s - self._owed_since.pop(row)
            self.reclaim_s_max = max(self.reclaim_s_max, waited_s)
            self.reclaim_s_sum += waited_s
            self.counters["reclaimed"] += 1
            self._free(row)

    def _free(self, row: int) -> None:
        if self.table.generation[row]:
            self.take_slot(row)
        self._num[self.table.state[row]] -= 1
        self.table.free(row)

    # ---- holding

    def hold(self, row: int) -> None:
        """Keep the slot as it is until ``unhold``."""
        self.table.num_holds[row] += 1

    def unhold(self, row: int) -> None:
        self.table.num_holds[row] -= 1
        if not self.table.num_holds[row]:
            self.settle(row)

    def pin(self, row: int) -> None:
        if not self.table.pinned[row]:
            self.table.pinned[row] = 1
            self.num_pinned_nbytes += self.table.page_nbytes(row)

    def unpin(self, row: int) -> bool:
        """False when it was not pinned."""
        if not self.table.pinned[row]:
            return False
        self.table.pinned[row] = 0
        self.num_pinned_nbytes -= self.table.page_nbytes(row)
        return True

    def policy_of(self, row: int) -> PutPolicy:
        """As the page was put, with what is left of its priority's time."""
        table = self.table
        lapse_s = self.queues.lapses_s(row)
        left_s = None if lapse_s is None else max(1e-3, lapse_s - self.now_s)
        name = table.namespaces.name(table.namespace[row])
        return PutPolicy(namespace=name, priority=table.priority[row], priority_s=left_s)

    # ---- candidates

    def eligible(self, row: int) -> bool:
        """A page may be chosen to go: all its children in memory are in line before it."""
        table = self.table
        return (
            table.state[row] == READY
            and not table.num_holds[row]
            and not table.pinned[row]
            and not table.trunks.num_staying[table.children[row]]
        )

    def evictable(self, row: int) -> bool:
        """A page may go now: it has no children in memory."""
        return self.eligible(row) and not self.table.num_resident_children(row)

    def offer(self, row: int) -> None:
        """Make a page a candidate if it may be chosen."""
        if not self.table.queued[row] and self.eligible(row):
            self.queues.offer(row)

    def line_up(self, row: int) -> None:
        """An eligible page that is in no queue goes next; its parent may be chosen after it."""
        self.line.add(row)
        self._bequeath(row)

    def line_up_first(self, row: int) -> None:
        """Likewise, ahead of all others of its tenant and priority."""
        self.line.add_first(row)
        self._bequeath(row)

    def dequeue(self, row: int) -> None:
        """Take a page out of the queue or line that it is in."""
        if row in self.line:
            self.line.remove(row)
        self.table.queued[row] = 0

    def requeue(self, row: int) -> None:
        """The order of a page has changed, downwards or in class."""
        self.dequeue(row)
        self.offer(row)

    # ---- proof

    def check(self) -> None:
        """Assert that states, slots, tenants and candidates agree; O(rows)."""
        table, held = self.table, dict[int, int]()
        num = [0] * len(self._num)
        num_slots = 0
        for row in table.used_rows():
            state = table.state[row]
            num[state] += 1
            if table.generation[row]:
                num_slots += 1
                slot = self.slot(row)
                slab = self.segment.slab_of(slot)
                assert slab.owners[slab.number_of(slot.offset)] == row
                assert table.slab[row] == slab.slab_id + 1, row
                tenant = self.queues.tenant_of(row)
                held[tenant] = held.get(tenant, 0) + slot.nbytes
            assert state != DROPPED or table.num_holds[row], f"row {row} is owed to nobody"
            assert (state in (FENCED, DROPPED)) == (row in self._owed_since), row
            assert not self.eligible(row) or table.queued[row], f"row {row} is no candidate"
            assert state == READY or not table.queued[row], row
        assert num[1:] == self._num[1:], (num, self._num)
        assert num_slots == self.segment.num_used
        assert held == self.tenants.held()
        assert self.num_on_ssd == sum(bool(table.on_ssd[row]) for row in table.used_rows())
        self.line.check()
