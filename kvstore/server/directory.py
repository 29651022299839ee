"""The directory of one store node: which page is in which slot, and who may rely on it.

Owns keys, reservations, read leases, recency and eviction for one segment. A synchronous core: no
clock (``now_s`` is passed in), no socket, no bytes. The shell (``kvstore/server/node.py``) moves
messages and checks checksums.

::

              reserve                     commit (generation fits, bytes verified)
    absent ─────────────▶ writing ──────────────────────────────▶ ready ◀─┐ acquire: lease + 1
      ▲                   │     │                                 │  │ └──┘ release / lease ends
      │   abort, quiet    │     │ abort, not quiet; lease ends    │  │
      ├───────────────────┘     ▼                          evict  │  │ drop (corrupt), clear
      │   quarantine ends    fenced                               │  │ while leased
      ├─────────────────────────┘          (leaf, no lease,       │  ▼
      ├─────────────────────────────────── coldest first) ────────┘ dropped
      └── last lease released or ended ───────────────────────────────┘

*Fenced* and *dropped* slots are not reachable by key but still owed: a writer's bytes may be on the
wire, a reader may be reading. They become free by timer or with the last lease.

Invariants (``check``): slots free + writing + ready + fenced + dropped = total; a slot under a
lease is never freed; a page's stamp is at least that of its descendants in this directory; every
ready page that is a leaf without leases is a candidate for eviction.

Fencing: a grant is named by its generation, which is never used again. A commit, abort or report
that names another generation than the present one changes nothing and is counted.

A page is evicted before its ancestors. The one exception: when pages of another size need a slab
and none can be had, the coldest slab that nobody holds is emptied whole (``_empty_slabs``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.messages import ReserveStatus
from kvstore.page import PageKey, PageSpec
from kvstore.server.entry import Counters, Entry, Lease, Reservation
from kvstore.server.eviction import EvictionQueue
from kvstore.server.leases import Leases
from kvstore.server.segment import Segment, Slab
from kvstore.server.watches import Watches
from kvstore.store import PageIdentity, PageRecord, PageState
from kvstore.verify import same_identity

EVICT_ON_DEMAND_MAX = 64  # pages evicted to make room for one page of another size
EMPTY_SLABS_MAX = 4  # slabs emptied after that


class Directory:
    """See the module's docstring.

    Args:
        segment: the slots to manage; nobody else allocates from it.
        lease_s: length of reservations and read leases, the grace included.
        high, low: used bytes between which ``tick`` evicts.
    """

    def __init__(self, segment: Segment, *, lease_s: float, high: int, low: int) -> None:
        assert low <= high, (low, high)
        self.segment = segment
        self.counters: Counters = Counters()
        self.watches = Watches()
        self._lease_s = lease_s
        self._high = high
        self._low = low
        self._by_key: dict[PageKey, Entry] = {}
        self._by_generation: dict[int, Entry] = {}  # also fenced and dropped ones
        self._num_children: dict[bytes, int] = {}  # by parent key, of indexed entries
        self._leases = Leases(lease_s)
        self._slot_ends: list[tuple[float, int]] = []  # of reservations, by generation
        self._queue = EvictionQueue()
        self._now = 1  # logical time of recency: one per request
        self._evicting = False  # between the watermarks, on the way down
        self._num_ready = 0
        self.last_page_nbytes = 0  # page size reserved last, for gauges

    # ---- looking

    def state(self, key: PageKey) -> PageState:
        entry = self._by_key.get(key)
        if entry is None:
            return PageState.ABSENT
        return PageState.READY if entry.ready else PageState.WRITING

    def match(self, keys: Sequence[PageKey]) -> list[PageState]:
        """Return the state of every key and touch the pages found."""
        self._now += 1
        for key in keys:
            self._touch(self._by_key.get(key))
        states = [self.state(key) for key in keys]
        num_ready = states.count(PageState.READY)
        self.counters["hits"] += num_ready
        self.counters["misses"] += len(keys) - num_ready
        return states

    def find(self, key: PageKey, generation: int) -> Entry | None:
        """The entry of ``key`` if it is still the grant ``generation``."""
        entry = self._by_key.get(key)
        return entry if entry is not None and entry.slot.generation == generation else None

    @property
    def num_pages(self) -> int:
        """Ready pages."""
        return self._num_ready

    @property
    def num_writing(self) -> int:
        return len(self._by_key) - self._num_ready

    @property
    def num_owed(self) -> int:
        """Slots that are fenced or dropped and not free yet."""
        return len(self._by_generation) - len(self._by_key)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_held(self) -> int:
        """Promises to writers and readers that have not ended."""
        return self.num_writing + self.num_owed + self.num_leases

    # ---- writing

    def reserve(
        self, pages: Sequence[PageIdentity], spec: PageSpec, now_s: float
    ) -> list[Reservation]:
        """Grant slots for absent pages; the writer must commit each before its lease ends."""
        self._now += 1
        for page in pages:  # first all ancestors, so that none is evicted for its descendants
            self._touch(self._by_key.get(PageKey(page.parent)))
        out: list[Reservation] = []
        evict = spec.page_nbytes <= self.segment.nbytes
        self.last_page_nbytes = spec.page_nbytes
        for page in pages:
            out.append(self._reserve(page, spec, now_s, evict=evict))
            evict = evict and out[-1].status is not ReserveStatus.REFUSED
        return out

    def _reserve(
        self, page: PageIdentity, spec: PageSpec, now_s: float, *, evict: bool
    ) -> Reservation:
        present = self._by_key.get(page.key)
        if present is not None:
            return self._joined(present, page, spec)
        if evict:
            self._make_room(spec.page_nbytes)
        slot = self.segment.allocate(spec.page_nbytes)
        if slot is None:
            self.counters["refused"] += 1
            return Reservation(ReserveStatus.REFUSED)
        slab = self.segment.slab_of(slot)
        entry = Entry(page, spec, slot, slab, now_s + self._lease_s, self._now)
        slab.stamp = self._now
        self._by_key[page.key] = self._by_generation[slot.generation] = entry
        self._num_children[page.parent] = self._num_children.get(page.parent, 0) + 1
        self._touch(self._by_key.get(PageKey(page.parent)))
        heapq.heappush(self._slot_ends, (entry.expires_s, slot.generation))
        self.counters["reserved"] += 1
        return Reservation(ReserveStatus.GRANTED, slot)

    def _joined(self, present: Entry, page: PageIdentity, spec: PageSpec) -> Reservation:
        self._touch(present)
        if not same_identity(present.identity, page) or present.spec != spec:
            self.counters["collisions"] += 1
            return Reservation(ReserveStatus.COLLISION)
        return Reservation(ReserveStatus.PRESENT if present.ready else ReserveStatus.WRITING)

    def commit(self, key: PageKey, generation: int, checksum: bytes) -> bool:
        """Make a written page visible; False when the reservation is gone."""
        entry = self.find(key, generation)
        if entry is None or entry.ready:
            self.counters["stale_commits"] += 1
            return False
        entry.record = PageRecord(
            key=key,
            parent=entry.identity.parent,
            depth=entry.identity.depth,
            tokens=entry.identity.tokens,
            checksum=checksum,
            page_nbytes=entry.spec.page_nbytes,
        )
        self._num_ready += 1
        self.counters["committed"] += 1
        self._offer(entry)
        self.watches.fire(key)
        return True

    def abort(self, key: PageKey, generation: int, *, quiet: bool) -> bool:
        """Give a reservation up; False when it is gone already.

        ``quiet`` says that no bytes of the writer can arrive any more; else the slot stays fenced
        until the reservation would have ended.
        """
        entry = self.find(key, generation)
        if entry is None or entry.ready:
            self.counters["late_aborts"] += 1
            return False
        self.counters["aborted"] += 1
        entry.fenced = not quiet
        self._unindex(entry)
        return True

    # ---- reading

    def acquire(self, keys: Sequence[PageKey], now_s: float) -> Lease | None:
        """Lease those of ``keys`` that are ready; None when none is."""
        self._now += 1
        entries = []
        for key in dict.fromkeys(keys):
            entry = self._by_key.get(key)
            self._touch(entry)
            if entry is not None and entry.ready:
                entries.append(entry)
        if not entries:
            return None
        self.counters["leased_pages"] += len(entries)
        return self._leases.grant(entries, now_s)

    def release(self, lease_id: int) -> bool:
        """End a lease; unknown, ended and repeated ones are counted and ignored."""
        lease = self._leases.end(lease_id)
        if lease is None:
            self.counters["late_releases"] += 1
            return False
        for entry in lease.entries:
            self._settle(entry)
        return True

    def drop(self, key: PageKey, generation: int) -> bool:
        """Forget a ready page that turned out to be corrupt."""
        entry = self.find(key, generation)
        if entry is None or not entry.ready:
            return False
        self.counters["dropped"] += 1
        self._unindex(entry)
        return True

    def clear(self) -> int:
        """Forget all ready pages; writers in flight go on. Returns how many were forgotten."""
        ready = [entry for entry in self._by_key.values() if entry.ready]
        for entry in ready:
            self._unindex(entry)
        self._queue.clear()
        self.counters["cleared"] += len(ready)
        return len(ready)

    # ---- time

    def tick(self, now_s: float, num_evict_max: int) -> None:
        """End what has expired; evict a bounded number of pages between the watermarks.

        Costs three comparisons when there is nothing to do.
        """
        self._now += 1
        for lease in self._leases.expire(now_s):
            self.counters["expired_leases"] += 1
            for entry in lease.entries:
                self._settle(entry)
        while self._slot_ends and self._slot_ends[0][0] <= now_s:
            self._end_slot(heapq.heappop(self._slot_ends)[1])
        if self.segment.used_nbytes > self._high:
            self._evicting = True
        while self._evicting and num_evict_max > 0:
            num_evict_max -= 1
            self._evicting = self.segment.used_nbytes > self._low and self._evict_one()

    def _end_slot(self, generation: int) -> None:
        entry = self._by_generation.get(generation)
        if entry is None or entry.ready:
            return
        if entry.indexed:  # the lease included the grace: nothing of the writer is on the wire
            self.counters["expired_writes"] += 1
            self._unindex(entry)
        elif entry.fenced:
            entry.fenced = False
            self._settle(entry)

    # ---- freeing

    def _unindex(self, entry: Entry) -> None:
        """Make the key absent; the slot becomes free now, or when nobody is owed it any more."""
        del self._by_key[entry.key]
        entry.indexed = False
        self._num_ready -= entry.ready
        parent = PageKey(entry.identity.parent)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._by_key:
                self._offer(self._by_key[parent])
        self._settle(entry)
        self.watches.fire(entry.key)

    def _settle(self, entry: Entry) -> None:
        """Free the slot of an unreachable entry nobody is owed; offer a reachable one."""
        if entry.indexed:
            self._offer(entry)
        elif not entry.num_leases and not entry.fenced:
            del self._by_generation[entry.slot.generation]
            self.segment.free(entry.slot)

    def _touch(self, entry: Entry | None) -> None:
        """Stamp a page and its ancestors; stops where the chain is stamped already."""
        while entry is not None and entry.stamp != self._now:
            entry.stamp = entry.slab.stamp = self._now
            entry = self._by_key.get(PageKey(entry.identity.parent))

    # ---- evicting

    def _evictable(self, entry: Entry) -> bool:
        return (
            entry.indexed
            and entry.ready
            and not entry.num_leases
            and entry.key not in self._num_children
        )

    def _offer(self, entry: Entry) -> None:
        if self._evictable(entry):
            self._queue.offer(entry)

    def _evict_one(self) -> bool:
        """Evict the coldest leaf, unless it belongs to the request being served."""
        entry = self._queue.pop(self._evictable)
        if entry is None:
            return False
        if entry.stamp == self._now:
            self._queue.offer(entry)
            return False
        self.counters["evicted"] += 1
        self._unindex(entry)
        return True

    def _make_room(self, page_nbytes: int) -> None:
        """Evict until a page of this size fits, within named bounds."""
        for _ in range(EVICT_ON_DEMAND_MAX):
            if self.segment.can_allocate(page_nbytes) or not self._evict_one():
                break
        if not self.segment.can_allocate(page_nbytes):
            self._empty_slabs(page_nbytes)

    def _empty_slabs(self, page_nbytes: int) -> None:
        """Evict the coldest idle slabs of other sizes whole, until a page of this size fits."""
        others = (slab for slab in self.segment.slabs() if slab.page_nbytes != page_nbytes)
        cold = sorted(others, key=lambda slab: (slab.stamp, slab.offset))
        num_emptied = 0
        for slab in cold:
            entries = self._idle_entries(slab)
            if entries is None:
                continue
            self.counters["evicted"] += len(entries)
            for entry in entries:
                self._unindex(entry)
            num_emptied += 1
            if self.segment.can_allocate(page_nbytes) or num_emptied == EMPTY_SLABS_MAX:
                return

    def _idle_entries(self, slab: Slab) -> list[Entry] | None:
        """All entries of a slab, or None when one is held or belongs to this request."""
        entries = [self._by_generation[generation] for generation in slab.used.values()]
        idle = all(
            e.indexed and e.ready and not e.num_leases and e.stamp != self._now for e in entries
        )
        return entries if idle else None

    # ---- proof

    def check(self) -> None:
        """Assert the invariants; O(pages)."""
        self.segment.check()
        assert self.segment.num_used == len(self._by_generation)
        children: dict[bytes, int] = {}
        leases = self._leases.counts()
        for generation, entry in self._by_generation.items():
            assert entry.slot.generation == generation
            assert entry.slab.used.get(entry.slot.offset) == generation
            assert entry.num_leases == leases.pop(generation, 0), generation
            assert entry.indexed == (self._by_key.get(entry.key) is entry)
            assert entry.indexed or entry.num_leases or entry.fenced, generation
            assert not self._evictable(entry) or entry.queued, generation
        assert not leases, "a leased slot was freed"
        for key, entry in self._by_key.items():
            assert entry.key == key
            parent = self._by_key.get(PageKey(entry.identity.parent))
            assert parent is None or parent.stamp >= entry.stamp, key
            children[entry.identity.parent] = children.get(entry.identity.parent, 0) + 1
        assert children == self._num_children
        assert self._num_ready == sum(entry.ready for entry in self._by_key.values())
