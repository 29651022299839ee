"""What a decode leg knows of its prefill leg, in whatever order the news comes.

Owns ``LegNews`` (one request) and ``EarlyNews`` (news that came before its request, bounded in
number and age). Sans-I/O: the time is passed in.

News that comes *after* its leg ended looks like early news, and would be given to a later leg of
the same request, whose prefill leg it is not about. So ids of ended legs are remembered as long as
news is kept, and their news is not: the gateway tells a new leg again until that leg knows.

Rules: each field is news once, repeats change nothing. ``failed`` after a first token only says
that no more pages will come. A first token after ``failed`` is ignored: the gateway ignores that
leg too, and this node may have made another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import PrefillUpdate, RequestId, TokenOut


@dataclass(slots=True)
class LegNews:
    """The prefill leg as this node knows it.

    Attributes:
        expected: there is a leg, which makes the first token.
        first_token: made by the leg, already with the client.
        published: all pages are in the store (True), some never will be (False), not known.
        published_s: when ``published`` became known.
        failed: the leg is over and made no first token.
    """

    expected: bool
    first_token: TokenOut | None = None
    published: bool | None = None
    published_s: float = 0.0
    failed: bool = False

    @property
    def may_sample_first(self) -> bool:
        """True when the first token is this node's to make."""
        return self.first_token is None and (not self.expected or self.failed)

    @property
    def more_pages(self) -> bool:
        """True while pages that are not in the store may still come."""
        return self.expected and not self.failed and self.published is not False

    def apply(self, update: PrefillUpdate, now: float, accepts: Callable[[TokenOut], bool]) -> bool:
        """Take in one update; True if it said something new.

        Args:
            update: the message.
            now: time on the loop's clock.
            accepts: whether a first token fits to the request (index, vocabulary).
        """
        changed = False
        token = update.first_token
        wanted = self.expected and self.first_token is None and not self.failed
        if token is not None and wanted and accepts(token):
            self.first_token = token
            changed = True
        if update.published is not None and self.published is None:
            self.published, self.published_s = update.published, now
            changed = True
        if update.failed and not self.failed:
            self.failed = changed = True
        return changed


class EarlyNews:
    """Updates for requests that are not here yet, oldest first out.

    Args:
        limit: updates kept; and ids of ended legs remembered.
        ttl_s: how long, both.
    """

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._updates: dict[RequestId, list[PrefillUpdate]] = {}
        self._arrived_s: dict[RequestId, float] = {}
        self._count = 0
        self._ended_s: dict[RequestId, float] = {}
        self.num_dropped = 0

    def __len__(self) -> int:
        return self._count

    def add(self, update: PrefillUpdate, now: float) -> bool:
        """Keep ``update``; expired and surplus ones go. False: not kept, its leg ended."""
        self._expire(now)
        if update.request_id in self._ended_s:
            return False
        kept = self._updates.setdefault(update.request_id, [])
        self._arrived_s.setdefault(update.request_id, now)
        if update in kept:
            return True
        kept.append(update)
        self._count += 1
        while len(self) > self._limit:
            self._drop(next(iter(self._updates)))
        return True

    def ended(self, request_id: RequestId, now: float) -> None:
        """The leg of ``request_id`` is over: do not keep its late news."""
        self._expire(now)
        self._ended_s.pop(request_id, None)  # the newest last
        self._ended_s[request_id] = now
        if len(self._ended_s) > self._limit:
            del self._ended_s[next(iter(self._ended_s))]

    def take(self, request_id: RequestId, now: float) -> list[PrefillUpdate]:
        """A leg of ``request_id`` begins: return and forget what was kept, in order of arrival."""
        self._expire(now)
        self._ended_s.pop(request_id, None)
        self._arrived_s.pop(request_id, None)
        kept = self._updates.pop(request_id, [])
        self._count -= len(kept)
        return kept

    def _expire(self, now: float) -> None:
        while self._ended_s and now - next(iter(self._ended_s.values())) >= self._ttl_s:
            del self._ended_s[next(iter(self._ended_s))]
        while self._arrived_s:
            oldest, arrived_s = next(iter(self._arrived_s.items()))
            if now - arrived_s < self._ttl_s:
                return
            self._drop(oldest)

    def _drop(self, request_id: RequestId) -> None:
        dropped = len(self._updates.pop(request_id))
        self._count -= dropped
        self.num_dropped += dropped
        del self._arrived_s[request_id]
