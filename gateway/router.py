"""Which node serves a leg: cached prefix against queue, with a guard for balance.

Owns the load book of one role and the choice. Sans-I/O: time is passed in. Knows no channels.

::

    score = alpha * cached / total  -  beta * queue_delay

    prefill  queue_delay = (uncached tokens waiting + floor * requests) / max(total, floor)
             both terms are in units of this prompt's own prefill, so the highest score is the
             earliest first token
    decode   queue_delay = requests / decode_slots

Load is what this gateway dispatched (counted at dispatch, exact) plus what others did: a node's
heartbeat minus our own share at that moment.

Balance guard: a node with more than ``ratio * least + slack`` requests (in flight, plus recently
finished ones, decaying) is passed over whatever it caches. So one hot prefix is copied to every
node instead of melting one of them, while a chat that comes back every few seconds stays put.
Ties go round in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.config import RouterConfig
from gateway.prefix_index import PrefixIndex
from kvstore.page import PageKey
from transfer.identity import NodeId

Load = Literal["prefill", "decode"]


class Query(NamedTuple):
    """A prompt to place: its page keys (tail included) and its length."""

    keys: Sequence[PageKey]
    num_tokens: int
    page_size: int

    def tokens_in(self, num_pages: int) -> int:
        return min(self.num_tokens, num_pages * self.page_size)


class Candidate(NamedTuple):
    """One node with every term of its score."""

    node_id: NodeId
    cached_tokens: int
    cached_term: float
    queue_delay: float
    queue_term: float
    num_requests: int
    num_tokens_waiting: int
    balance_load: float
    passed_over: bool
    score: float


@dataclass(slots=True)
class _Book:
    """Load of one node."""

    requests: int = 0
    tokens: int = 0
    foreign_requests: int = 0
    foreign_tokens: int = 0
    recent: float = 0.0
    recent_at_s: float = 0.0


@dataclass(slots=True, eq=False)
class Dispatch:
    """One leg on one node; ended exactly once (repeats do nothing)."""

    node_id: NodeId
    uncached_tokens: int
    cached_tokens: int
    keys: Sequence[PageKey]
    computing: bool = True
    open: bool = True
    book: _Book = field(default_factory=_Book)


class Router:
    """Chooses among the nodes of one role."""

    def __init__(self, config: RouterConfig, index: PrefixIndex, load: Load) -> None:
        self._config = config
        self._index = index
        self._load = load
        self._books: dict[NodeId, _Book] = {}
        self._turn = 0

    def report(self, node: NodeId, *, num_requests: float, num_tokens: float) -> None:
        """Take in a heartbeat; what exceeds our own share is other gateways' work."""
        book = self._books.setdefault(node, _Book())
        book.foreign_requests = max(0, int(num_requests) - book.requests)
        book.foreign_tokens = max(0, int(num_tokens) - book.tokens)

    def forget(self, node: NodeId) -> None:
        """The node is gone; legs that were on it may still be ended."""
        self._books.pop(node, None)

    def num_requests(self, node: NodeId) -> int:
        """Legs of this gateway in flight on ``node``."""
        book = self._books.get(node)
        return book.requests if book else 0

    @property
    def num_in_flight(self) -> int:
        return sum(book.requests for book in self._books.values())

    def explain(self, query: Query, nodes: Sequence[NodeId], now_s: float) -> list[Candidate]:
        """Return every candidate, best first; ties in the order of their turn."""
        if not nodes:
            return []
        loads = [self._balance_load(node, now_s) for node in nodes]
        limit = min(loads) * self._config.balance_ratio + self._config.balance_slack
        start = self._turn % len(nodes)
        scored = [
            self._score(query, node, load, load > limit)
            for node, load in zip(nodes, loads, strict=True)
        ]
        turned = scored[start:] + scored[:start]
        return sorted(turned, key=lambda c: (c.passed_over, -c.score))

    def pick(self, query: Query, nodes: Sequence[NodeId], now_s: float) -> Dispatch | None:
        """Choose a node and count the leg on it; None without nodes."""
        ranking = self.explain(query, nodes, now_s)
        if not ranking:
            return None
        self._turn += 1
        best = ranking[0]
        dispatch = Dispatch(
            node_id=best.node_id,
            uncached_tokens=query.num_tokens - best.cached_tokens,
            cached_tokens=best.cached_tokens,
            keys=query.keys,
            book=self._books.setdefault(best.node_id, _Book()),
        )
        dispatch.book.requests += 1
        dispatch.book.tokens += dispatch.uncached_tokens
        self._index.touch(best.node_id, query.keys)
        self._index.expect(best.node_id, query.keys)
        return dispatch

    def computed(self, dispatch: Dispatch) -> None:
        """The prompt of this leg is computed: its tokens wait no longer."""
        if dispatch.computing:
            dispatch.computing = False
            dispatch.book.tokens -= dispatch.uncached_tokens

    def ended(self, dispatch: Dispatch, now_s: float) -> None:
        """The leg is over, however it ended."""
        if not dispatch.open:
            return
        self.computed(dispatch)
        dispatch.open = False
        book = dispatch.book
        book.requests -= 1
        book.recent = self._decayed(book, now_s) + 1.0
        book.recent_at_s = now_s
        if self._books.get(dispatch.node_id) is book:
            self._index.unexpect(dispatch.node_id, dispatch.keys)

    def _score(self, query: Query, node: NodeId, load: float, passed_over: bool) -> Candidate:
        book = self._books.get(node) or _Book()
        cached = query.tokens_in(self._index.match(node, query.keys))
        requests = book.requests + book.foreign_requests
        tokens = book.tokens + book.foreign_tokens
        delay = self._queue_delay(query, requests, tokens)
        cached_term = self._config.alpha * cached / max(1, query.num_tokens)
        queue_term = self._config.beta * delay
        return Candidate(
            node_id=node,
            cached_tokens=cached,
            cached_term=cached_term,
            queue_delay=delay,
            queue_term=queue_term,
            num_requests=requests,
            num_tokens_waiting=tokens,
            balance_load=load,
            passed_over=passed_over,
            score=cached_term - queue_term,
        )

    def _queue_delay(self, query: Query, requests: int, tokens: int) -> float:
        if self._load == "decode":
            return requests / self._config.decode_slots
        floor = self._config.request_floor_tokens
        return (tokens + floor * requests) / max(query.num_tokens, floor)

    def _balance_load(self, node: NodeId, now_s: float) -> float:
        book = self._books.get(node)
        if book is None:
            return 0.0
        return book.requests + book.foreign_requests + self._decayed(book, now_s)

    def _decayed(self, book: _Book, now_s: float) -> float:
        age_s = max(0.0, now_s - book.recent_at_s)
        return float(book.recent * 0.5 ** (age_s / self._config.recent_half_life_s))
