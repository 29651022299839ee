"""The publisher's side of KV events, sans-I/O: what happened, numbered batches, the last of them.

Owns the queue of events, the sequence number and the replay window. Knows no sockets, no clock.

::

    stored, removed, clear ──▶ queue ──flush──▶ batches: seq, seq + 1 ... ──▶ who sends them
                                 │                 └──▶ window (the last of them) ──▶ replay
                                 └─ too long: forgotten, and one number is skipped

Everything is bounded. What does not fit is lost as on the wire: a hole in the numbers, which every
consumer notices and mends by a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from kvstore.events.control import packed_chunks
from kvstore.events.wire import (
    TOKEN_NBYTES,
    AllPagesCleared,
    Encoding,
    KvEvent,
    Medium,
    PagesRemoved,
    PagesStored,
    encode_batch,
)
from kvstore.page import PageKey

BATCH_PAGES_MAX = 256  # of one batch: about 30 KiB at 16 tokens a page
QUEUED_PAGES_MAX = 65_536  # in events that no flush has taken yet
WINDOW_BATCHES_MAX = 4096  # kept for replay
WINDOW_NBYTES_MAX = 32 << 20


class Batch(NamedTuple):
    """One message's worth of events."""

    seq: int
    payload: bytes


class KvEventLog:
    """What one cache announces.

    Args:
        medium: where pages lie unless an event says otherwise.
        encoding: how events are written.
        held: gives the packed keys of all pages that are there, in chunks made as they are read,
            where the owner has them at hand; by default the log keeps its own books, and asserts
            that events fit them.
    """

    def __init__(
        self,
        *,
        medium: Medium = Medium.GPU,
        encoding: Encoding = Encoding.ARRAY,
        held: Callable[[], Iterator[bytes]] | None = None,
    ) -> None:
        self._medium = medium
        self._encoding = encoding
        self._books: dict[PageKey, None] | None = {} if held is None else None
        self._held = held
        self._queue: deque[KvEvent] = deque()
        self._num_queued_pages = 0
        self._window: dict[int, bytes] = {}
        self._window_nbytes = 0
        self._next_seq = 0
        self.num_overflows = 0

    @property
    def next_seq(self) -> int:
        """Number of the next batch."""
        return self._next_seq

    @property
    def pending(self) -> bool:
        """Something has happened that no batch says yet."""
        return bool(self._queue)

    @property
    def num_held(self) -> int:
        return len(self.held())

    def held(self) -> Collection[PageKey]:
        """Keys of all pages that are there, by the log's own books. Not to be kept: copy it."""
        assert self._books is not None, "the owner has the books"
        return self._books

    def snapshot(self) -> Iterator[bytes]:
        """Packed keys of all pages that are there, ``SNAPSHOT_PART_KEYS`` at most in one chunk.

        Chunks may be made as they are read: what happens meanwhile is in them or not, and in a
        batch from the present ``next_seq`` on in any case.
        """
        return packed_chunks(b"".join(self.held())) if self._held is None else self._held()

    # ── what happened ───────────────────────────────────────────────────────────────────────────

    def stored(
        self,
        keys: Sequence[PageKey],
        *,
        parent: PageKey | None,
        tokens: bytes,
        medium: Medium | None = None,
    ) -> None:
        """Full pages have come: a chain below ``parent`` (None: below the root).

        ``tokens`` are those of all pages, int32 little-endian.
        """
        if not keys:
            return
        assert tokens, "a page has tokens"
        assert len(tokens) % (len(keys) * TOKEN_NBYTES) == 0, (len(tokens), len(keys))
        if self._books is not None:
            for key in keys:
                assert key not in self._books, "a page came twice"
                self._books[key] = None
        stride = len(tokens) // len(keys)
        for start in range(0, len(keys), BATCH_PAGES_MAX):
            part = keys[start : start + BATCH_PAGES_MAX]
            part_tokens = tokens[start * stride : (start + len(part)) * stride]
            self._enqueue(PagesStored(part, medium or self._medium, parent, part_tokens))
            parent = part[-1]

    def removed(self, keys: Sequence[PageKey], *, medium: Medium | None = None) -> None:
        """Full pages have gone, in any order."""
        if self._books is not None:
            for key in keys:
                assert key in self._books, "a page went that had not come"
                del self._books[key]
        for start in range(0, len(keys), BATCH_PAGES_MAX):
            part = keys[start : start + BATCH_PAGES_MAX]
            self._enqueue(PagesRemoved(part, medium or self._medium))

    def clear(self) -> None:
        """All pages have gone."""
        if self._books is not None:
            self._books.clear()
        self._enqueue(AllPagesCleared())

    def stored_page(
        self, key: PageKey, *, parent: PageKey | None, tokens: bytes, medium: Medium
    ) -> None:
        """``stored`` of one page, by an owner that has the books."""
        assert self._books is None
        self._enqueue(PagesStored((key,), medium, parent, tokens))

    def removed_page(self, key: PageKey, *, medium: Medium) -> None:
        """``removed`` of one page, by an owner that has the books."""
        assert self._books is None
        self._enqueue(PagesRemoved((key,), medium))

    def _enqueue(self, event: KvEvent) -> None:
        num_pages = _num_pages(event)
        if self._num_queued_pages + num_pages > QUEUED_PAGES_MAX:
            self.num_overflows += 1
            self._next_seq += 1  # a batch that nobody will ever see
            self._queue.clear()
            self._num_queued_pages = 0
        self._queue.append(event)
        self._num_queued_pages += num_pages

    # ── what is sent ────────────────────────────────────────────────────────────────────────────

    def flush(self, ts: float, num_batches_max: int | None = None) -> list[Batch]:
        """Number what has happened since the last flush, in batches; no change, no batch.

        ``ts`` is the wall-clock time that they carry. What ``num_batches_max`` leaves behind is
        ``pending``.
        """
        batches: list[Batch] = []
        while self._queue and (num_batches_max is None or len(batches) < num_batches_max):
            batch = Batch(self._next_seq, encode_batch(ts, self._next_group(), self._encoding))
            self._next_seq += 1
            self._remember(batch)
            batches.append(batch)
        return batches

    def _next_group(self) -> list[KvEvent]:
        """Take events of up to ``BATCH_PAGES_MAX`` pages, at least one, off the queue.

        Events are joined here, and not as they come: pages come one by one, on the way of a put.
        """
        events = [self._queue.popleft()]
        num_pages = _num_pages(events[0])
        while self._queue and num_pages + _num_pages(self._queue[0]) <= BATCH_PAGES_MAX:
            event = self._queue.popleft()
            num_pages += _num_pages(event)
            events.append(event)
        self._num_queued_pages -= num_pages
        return joined(events)

    def _remember(self, batch: Batch) -> None:
        self._window[batch.seq] = batch.payload
        self._window_nbytes += len(batch.payload)
        while len(self._window) > WINDOW_BATCHES_MAX or self._window_nbytes > WINDOW_NBYTES_MAX:
            self._window_nbytes -= len(self._window.pop(next(iter(self._window))))

    def replay(self, start: int) -> Iterator[Batch]:
        """Yield what is left of the batches from number ``start`` on, to the last one.

        Made as it is read: batches that come or are forgotten meanwhile come, or are missing.
        """
        seq = max(start, next(iter(self._window), 0))
        while seq < self._next_seq:
            payload = self._window.get(seq)
            if payload is not None:
                yield Batch(seq, payload)
            seq += 1


def joined(events: Sequence[KvEvent]) -> list[KvEvent]:
    """Chains in one event, and removals that follow one another; the order stays."""
    out: list[KvEvent] = []
    run: list[KvEvent] = []
    for event in events:
        if run and not _goes_on(run[-1], event):
            out.append(_one(run))
            run = []
        run.append(event)
    if run:
        out.append(_one(run))
    return out


def _goes_on(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(event, PagesRemoved):
        return isinstance(last, PagesRemoved) and last.medium == event.medium
    return (
        isinstance(event, PagesStored)
        and isinstance(last, PagesStored)
        and last.keys[-1] == event.parent
        and last.medium == event.medium
        and len(last.tokens) * len(event.keys) == len(event.tokens) * len(last.keys)
    )


def _one(run: Sequence[KvEvent]) -> KvEvent:
    """The event that says what a run of events says."""
    first = run[0]
    if len(run) == 1 or isinstance(first, AllPagesCleared):
        return first
    keys = [key for event in run if not isinstance(event, AllPagesCleared) for key in event.keys]
    if isinstance(first, PagesRemoved):
        return first._replace(keys=keys)
    tokens = b"".join(event.tokens for event in run if isinstance(event, PagesStored))
    return first._replace(keys=keys, tokens=tokens)


def _num_pages(event: KvEvent) -> int:
    """What an event counts for where events are bounded."""
    return 1 if isinstance(event, AllPagesCleared) else len(event.keys)
