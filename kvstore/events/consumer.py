"""The consumer's side of KV events, sans-I/O: is this batch the next one, and if not, what now?

Owns the position in one publisher's stream: epoch, next number, batches that came too early. Knows
no sockets and no time; who holds it asks for what it wants (``Want``) and feeds what arrives.

::

                         gap: the range is asked for, once
            IN_SYNC ───────────────────────────────▶ REPLAYING
               ▲  ▲                                     │  │
               │  └───────── end of the replay ─────────┘  │ no answer, or the range is gone
      snapshot │                                           ▼
               └─────────────────────────────────────── LOST ◀── start; new epoch; number goes back

While not in sync, batches are kept (bounded) and applied in order afterwards, so that one gap makes
one request, whatever arrives meanwhile. What the sink holds is kept during a replay, and dropped at
once when the publisher has restarted.

A gap at the very end shows only with the next batch; hence ``probe``: ask for what follows, when
nothing has been heard for a while. A probe that finds nothing costs two small messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from kvstore.events.wire import KvEvent
from kvstore.page import PageKey

EARLY_BATCHES_MAX = 1024  # kept while a replay or a snapshot is awaited


class KvEventSink(Protocol):
    """What a consumer keeps in step: the content of one node's cache."""

    def replace(self, keys: Sequence[PageKey]) -> None:
        """The node holds exactly ``keys``."""
        ...

    def apply(self, events: Sequence[KvEvent]) -> None: ...

    def forget(self) -> None:
        """What was known is not true any more; a ``replace`` follows some day."""
        ...


class Want(Enum):
    """What a consumer needs next."""

    NOTHING = "nothing"  # in sync
    REPLAY = "replay"  # the batches from ``next_seq`` on
    SNAPSHOT = "snapshot"


@dataclass(slots=True)
class EventCounters:
    """What consumers have met; shared by all of them."""

    num_batches: int = 0  # applied
    num_gaps: int = 0  # each asked for once
    num_restarts: int = 0  # of publishers: another epoch, or numbers that go back
    num_replayed: int = 0  # batches that a replay brought
    num_snapshots: int = 0
    num_repeats: int = 0  # batches that were known already
    num_unanswered: int = 0  # requests for a range
    num_invalid: int = 0  # messages that are not of the format


class _Early(NamedTuple):
    epoch: str
    seq: int
    events: Sequence[KvEvent]


class KvEventConsumer:
    """Follows one publisher. See the module."""

    def __init__(self, sink: KvEventSink, counters: EventCounters) -> None:
        self._sink = sink
        self._counters = counters
        self._want = Want.SNAPSHOT
        self._epoch: str | None = None
        self._next_seq = 0
        self._live_seq: int | None = None  # last number on the live stream of this epoch
        self._gap_end: int | None = None  # the batch that showed the gap; None for a probe
        self._early: deque[_Early] = deque()

    @property
    def want(self) -> Want:
        return self._want

    @property
    def next_seq(self) -> int:
        """Number of the first batch that has not been applied."""
        return self._next_seq

    @property
    def epoch(self) -> str | None:
        return self._epoch

    def live(self, epoch: str, seq: int, events: Sequence[KvEvent]) -> None:
        """A batch was published."""
        went_back = self._live_seq is not None and seq <= self._live_seq
        if self._epoch is not None and (epoch != self._epoch or went_back):
            self._counters.num_restarts += 1
            self._restarted(epoch)
        self._live_seq = seq
        if self._want is not Want.NOTHING:
            self._keep(_Early(epoch, seq, events))
        elif seq > self._next_seq:
            self._begin_replay(seq)
            self._keep(_Early(epoch, seq, events))
        else:
            self._take(seq, events)

    def replayed(self, epoch: str, seq: int, events: Sequence[KvEvent]) -> None:
        """A batch that was asked for."""
        if self._want is not Want.REPLAY:
            return
        if epoch != self._epoch:
            self._counters.num_restarts += 1
            self._restarted(epoch)
        elif seq > self._next_seq:
            self._want = Want.SNAPSHOT  # the publisher has forgotten what is between
        else:
            self._counters.num_replayed += self._take(seq, events)

    def replay_ended(self, epoch: str) -> None:
        """The publisher has nothing more than what it has replayed."""
        if self._want is not Want.REPLAY:
            return
        if epoch != self._epoch:
            self._counters.num_restarts += 1
            self._restarted(epoch)
            return
        if self._gap_end is not None and self._next_seq < self._gap_end:
            self._want = Want.SNAPSHOT  # it did not have what we lack
            return
        self._want = Want.NOTHING
        self._catch_up()

    def unanswered(self) -> None:
        """The replay that was asked for does not come, or not all of it."""
        if self._want is Want.REPLAY:
            self._counters.num_unanswered += 1
            self._want = Want.SNAPSHOT

    def snapshot(self, epoch: str, next_seq: int, keys: Sequence[PageKey]) -> None:
        """The publisher's cache held ``keys`` before its batch ``next_seq``."""
        self._counters.num_snapshots += 1
        self._sink.replace(keys)
        if epoch != self._epoch:
            self._live_seq = None
        self._epoch, self._next_seq, self._want = epoch, next_seq, Want.NOTHING
        self._catch_up()

    def lost(self) -> None:
        """Nothing is known any more: a snapshot failed."""
        self._sink.forget()
        self._want = Want.SNAPSHOT

    def probe(self) -> None:
        """Nothing was heard for a while: is there anything we lack?"""
        if self._want is Want.NOTHING:
            self._want, self._gap_end = Want.REPLAY, None

    def _begin_replay(self, gap_end: int) -> None:
        self._counters.num_gaps += 1
        self._want, self._gap_end = Want.REPLAY, gap_end

    def _take(self, seq: int, events: Sequence[KvEvent]) -> bool:
        """Apply the next batch; False for one that was applied before."""
        if seq < self._next_seq:
            self._counters.num_repeats += 1
            return False
        self._sink.apply(events)
        self._counters.num_batches += 1
        self._next_seq = seq + 1
        return True

    def _keep(self, early: _Early) -> None:
        if len(self._early) >= EARLY_BATCHES_MAX:
            self._early.clear()  # that is a gap of our own making: the next batch shows it
        self._early.append(early)

    def _catch_up(self) -> None:
        """Apply what came too early; a hole in it is a gap like any other."""
        early, self._early = self._early, deque()
        for item in early:
            if item.epoch != self._epoch:
                continue  # of another life: before the snapshot, or told by the next live batch
            if self._want is not Want.NOTHING:
                self._keep(item)
            elif item.seq > self._next_seq:
                self._begin_replay(item.seq)
                self._keep(item)
            else:
                self._take(item.seq, item.events)

    def _restarted(self, epoch: str) -> None:
        self._sink.forget()
        self._epoch, self._live_seq = epoch, None
        self._early.clear()
        self._want = Want.SNAPSHOT
