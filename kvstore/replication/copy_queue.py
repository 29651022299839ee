"""The copies that one node owes to others: what goes to whom next, and who waits for it.

Owns the order, the bounds and the waiters. A synchronous core: knows no clock, no network, no
placement. Two classes per target: *fresh* pages, which a writer may be waiting for, and *repair*.

::

    add ──▶ queued ──take──▶ flying ──settle──▶ gone (made or given up)
              ▲  ▲ ▲            │
              │  │ └─ put_back ─┤ not tried, or there is no room for it yet: it is the next again
              │  └───── retry ──┤ (given up after ``COPY_TRIES_MAX``)
              ├──────── park ───┤ the target does not answer: nobody waits for it any more
              └─resume─ later ◀─┘ defer: not now; nobody waits for it, and it is still owed

A copy that was given up, or does not fit into the queue, is not forgotten: its target is *lacking*,
and what it lacks is found by comparing holdings (``kvstore/replication/repair.py``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.page import PageKey
from transfer.identity import NodeId

COPIES_OWED_MAX = 65_536  # queued, flying or deferred, over all targets
COPY_TRIES_MAX = 3
UNMADE_MAX = 4096  # pages remembered whose copy was not made, for a writer who asks a little later


@dataclass(slots=True, eq=False)
class CopyWait:
    """Somebody who waits until no copies of some keys are owed.

    Attributes:
        num_left: keys still owed.
        unmade: keys of which a copy was given up.
    """

    callback: Callable[[], None]
    keys: tuple[PageKey, ...]
    num_left: int = 0
    unmade: dict[PageKey, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Target:
    fresh: OrderedDict[PageKey, None] = field(default_factory=OrderedDict)
    repair: OrderedDict[PageKey, None] = field(default_factory=OrderedDict)
    flying: dict[PageKey, bool] = field(default_factory=dict)  # whether it was fresh
    later: dict[PageKey, None] = field(default_factory=dict)
    tries: dict[PageKey, int] = field(default_factory=dict)
    parked: bool = False

    def __len__(self) -> int:
        return len(self.fresh) + len(self.repair) + len(self.flying) + len(self.later)

    def __contains__(self, key: PageKey) -> bool:
        waits = key in self.fresh or key in self.repair
        return waits or key in self.flying or key in self.later


class CopyQueue:
    """See the module's docstring."""

    def __init__(self, num_max: int = COPIES_OWED_MAX) -> None:
        self.counters: Counter[str] = Counter()
        self.lacking: dict[NodeId, None] = {}  # targets that something was left out for
        self._num_max = num_max
        self._targets: dict[NodeId, _Target] = {}
        self._num_owed = 0
        self._awaited: dict[PageKey, int] = {}  # copies owed to targets that answer, by key
        self._unmade: dict[PageKey, None] = {}
        self._waits: dict[PageKey, dict[CopyWait, None]] = {}

    def __len__(self) -> int:
        """Copies owed."""
        return self._num_owed

    @property
    def crowded(self) -> bool:
        """More than half full: repair should add nothing now."""
        return self._num_owed > self._num_max // 2

    # ---- work

    def add(
        self,
        target: NodeId,
        keys: Sequence[PageKey],
        *,
        fresh: bool,
        covered: Container[PageKey] = (),
    ) -> None:
        """Owe ``keys`` to ``target``; those owed already stay where they are.

        ``covered`` pages are owed to somebody else in place of a target that is parked. A fresh
        page is no longer deferred: it has been put anew.
        """
        state = self._targets.setdefault(target, _Target())
        if fresh and state.later:
            self._num_owed -= sum(state.later.pop(key, key) is None for key in keys)
        queue = state.fresh if fresh else state.repair
        for key in keys:
            if key in state:
                continue
            if self._num_owed >= self._num_max:
                self.counters["copies_overflowed"] += 1
                self.lacking[target] = None
                self._note_unmade(key)
                continue
            queue[key] = None
            self._num_owed += 1
            if state.parked:
                if key not in covered:
                    self._note_unmade(key)
            else:
                self._awaited[key] = self._awaited.get(key, 0) + 1

    def take(self, target: NodeId, num_max: int, *, fresh_first: bool) -> list[PageKey]:
        """Take out up to ``num_max`` keys to send now."""
        state = self._targets.get(target)
        if state is None:
            return []
        queues = [state.fresh, state.repair]
        taken: list[PageKey] = []
        for queue in queues if fresh_first else reversed(queues):
            for key in list(islice(queue, num_max - len(taken))):
                del queue[key]
                state.flying[key] = queue is state.fresh
                taken.append(key)
            if taken:  # one class at a time: fresh pages do not wait for a batch of repair
                break
        return taken

    def settle(self, target: NodeId, keys: Sequence[PageKey], *, made: bool) -> None:
        """Copies that were flying are there now, or are given up."""
        state = self._targets.get(target)
        if state is None:
            return
        for key in keys:
            if key in state.flying:
                del state.flying[key]
                state.tries.pop(key, None)
                self._num_owed -= 1
                if not state.parked:
                    self._end_await(key, made=made)
                elif made:
                    self._unmade.pop(key, None)

    def retry(self, target: NodeId, keys: Sequence[PageKey]) -> None:
        """Queue flying copies again; one that failed too often is given up."""
        state = self._targets.get(target)
        if state is None:
            return
        for key in keys:
            tries = state.tries.get(key, 0) + 1
            if tries >= COPY_TRIES_MAX:
                self.counters["copies_given_up"] += 1
                self.lacking[target] = None
                self.settle(target, [key], made=False)
            elif key in state.flying:
                state.tries[key] = tries
                del state.flying[key]
                state.repair[key] = None

    def put_back(self, target: NodeId, keys: Sequence[PageKey]) -> None:
        """Queue flying copies again, before others of their class and in this order.

        No try is counted: they did not fit into the batch, or the target has yet to make room.
        """
        state = self._targets.get(target)
        if state is None:
            return
        for key in reversed(keys):
            if key in state.flying:
                queue = state.fresh if state.flying.pop(key) else state.repair
                queue[key] = None
                queue.move_to_end(key, last=False)

    def defer(self, target: NodeId, keys: Sequence[PageKey]) -> None:
        """Flying copies that the target does not take now: owed till ``resume``, unawaited."""
        state = self._targets.get(target)
        if state is None:
            return
        for key in keys:
            if key in state.flying:
                del state.flying[key]
                state.later[key] = None
                if not state.parked:
                    self._end_await(key, made=False)

    def resume(self, target: NodeId) -> None:
        """Queue again what was deferred."""
        state = self._targets.get(target)
        if state is None:
            return
        for key in state.later:
            state.repair[key] = None
            if not state.parked:
                self._awaited[key] = self._awaited.get(key, 0) + 1
        state.later.clear()

    def fresh_keys(self, target: NodeId) -> list[PageKey]:
        """What a writer may be waiting for: fresh pages, and all that fly."""
        state = self._targets.get(target)
        return [] if state is None else [*state.flying, *state.fresh]

    def parked(self) -> list[NodeId]:
        """Targets that do not answer."""
        return [target for target, state in self._targets.items() if state.parked]

    def park(self, target: NodeId, covered: Container[PageKey] = ()) -> None:
        """The target does not answer: what flies goes back, nobody waits for it any more.

        ``covered`` pages are owed to somebody else in its place.
        """
        state = self._targets.setdefault(target, _Target())
        state.repair.update(dict.fromkeys(state.flying))
        state.flying.clear()
        if not state.parked:
            state.parked = True
            for key in [*state.fresh, *state.repair]:
                self._end_await(key, made=key in covered)

    def unpark(self, target: NodeId) -> None:
        """The target answers again."""
        state = self._targets.get(target)
        if state is None or not state.parked:
            return
        state.parked = False
        for key in [*state.fresh, *state.repair, *state.flying]:
            self._awaited[key] = self._awaited.get(key, 0) + 1

    def forget(self, target: NodeId, covered: Container[PageKey] = ()) -> None:
        """The target is gone for good, or holds other memory now: owe it nothing."""
        self.park(target, covered)
        self._num_owed -= len(self._targets.pop(target))
        self.lacking.pop(target, None)

    def num_owed(self, target: NodeId) -> int:
        state = self._targets.get(target)
        return 0 if state is None else len(state)

    def num_waiting(self, target: NodeId) -> int:
        """Copies of ``target`` that wait to be sent."""
        state = self._targets.get(target)
        return 0 if state is None else len(state.fresh) + len(state.repair)

    # ---- waiting

    def wait(self, keys: Sequence[PageKey], callback: Callable[[], None]) -> CopyWait:
        """Call ``callback`` once no copy of any of ``keys`` is owed.

        Nobody is called when none is owed now (``num_left`` is 0).
        """
        wait = CopyWait(callback, tuple(dict.fromkeys(keys)))
        for key in wait.keys:
            if key in self._unmade:
                wait.unmade[key] = None
            if key in self._awaited:
                wait.num_left += 1
                self._waits.setdefault(key, {})[wait] = None
        return wait

    def stop_waiting(self, wait: CopyWait) -> None:
        """Forget a wait; one that is over is ignored. Keys still owed count as unmade."""
        for key in wait.keys:
            waits = self._waits.get(key, {})
            if waits.pop(wait, wait) is None:
                wait.unmade[key] = None
            if not waits:
                self._waits.pop(key, None)

    def _end_await(self, key: PageKey, *, made: bool) -> None:
        left = self._awaited.pop(key) - 1
        waits = self._waits.get(key, {})
        if made:
            self._unmade.pop(key, None)
        else:
            self._note_unmade(key)
            for wait in waits:
                wait.unmade[key] = None
        if left:
            self._awaited[key] = left
            return
        self._waits.pop(key, None)
        for wait in waits:
            wait.num_left -= 1
            if not wait.num_left:
                wait.callback()

    def _note_unmade(self, key: PageKey) -> None:
        self._unmade[key] = None
        if len(self._unmade) > UNMADE_MAX:
            del self._unmade[next(iter(self._unmade))]

    @property
    def num_waits(self) -> int:
        """Keys x waits held."""
        return sum(len(waits) for waits in self._waits.values())

    def check(self) -> None:
        """Assert the invariants; O(copies owed)."""
        awaited: Counter[PageKey] = Counter()
        for state in self._targets.values():
            assert not (state.fresh.keys() & state.repair.keys())
            assert not (state.flying.keys() & (state.fresh.keys() | state.repair.keys()))
            queued = state.fresh.keys() | state.repair.keys() | state.flying.keys()
            assert not (state.later.keys() & queued)
            if not state.parked:
                awaited.update([*state.fresh, *state.repair, *state.flying])
        assert dict(awaited) == self._awaited
        assert self._num_owed == sum(len(state) for state in self._targets.values())
        assert self._num_owed <= self._num_max
        assert self._waits.keys() <= self._awaited.keys()
