"""Which clears of the cluster this node has begun and done: so that no copy undoes one.

Owns a bounded memory of clears by id. A clear is told to every node, and reaches them one after the
other; until it has reached the last, that one may still copy what is to be forgotten to a node that
has forgotten it. So a node says with its copies which clears it had *done* before it looked for
them, and the receiver refuses pages that a clear covers which it has *begun* and the sender had not
done. What a node holds after a clear has then been put after it, here or at another node that had
done it, too.

::

    clear x ─▶ A: begun ── done                       A refuses: x is begun here, B had not done it
    B copies page (done: none) ──────▶ A
    clear x ──────────────▶ B: begun ── done
    B copies newer page (done: x) ────────────▶ A     A takes it

A refusal names what the sender has not done, and when it was begun (``Fence``): pages that a writer
put on the sender later than that are none of those to be forgotten, and are taken once it says so.
So a node that a clear did not reach, or that has restarted since, keeps getting its copies made.

Refused is only as long as whoever clears may still be telling nodes: a node that could not be told
by then keeps its pages (the caller knows), and its copies are as good as any.

Knows no pages. A clear without an id is not remembered.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

CLEARS_KEPT_MAX = 256
FENCE_S_MAX = 120.0  # that copies are refused for one clear
KEPT_S = 300.0  # senders remember longer than receivers ask


class Fence(NamedTuple):
    """A clear that the sender of a copy had not done.

    Attributes:
        age_s: since it was begun at the receiver.
        left_s: that copies are refused for it.
    """

    clear_id: str
    age_s: float
    left_s: float


@dataclass(slots=True)
class _Clear:
    namespace: bytes | None  # None: all
    begun_s: float
    until_s: float  # copies are refused
    done: bool = False


class Clears:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._clears: dict[str, _Clear] = {}  # oldest first

    def begin(
        self, clear_id: str, namespace: bytes | None, *, until_s: float, now_s: float
    ) -> None:
        """From here on copies of what is being forgotten are refused, ``until_s`` at most."""
        if not clear_id or clear_id in self._clears:
            return
        self._forget(now_s)
        self._clears[clear_id] = _Clear(namespace, now_s, min(until_s, now_s + FENCE_S_MAX))

    def end(self, clear_id: str) -> None:
        """What the clear covers has been forgotten here."""
        if clear_id in self._clears:
            self._clears[clear_id].done = True

    def _forget(self, now_s: float) -> None:
        for clear_id, clear in list(self._clears.items()):
            full = len(self._clears) >= CLEARS_KEPT_MAX
            if not full and clear.begun_s + KEPT_S > now_s:
                return
            del self._clears[clear_id]

    def done(self) -> tuple[str, ...]:
        """Ids of clears that are done here; to be taken before one looks for pages to send."""
        return tuple(clear_id for clear_id, clear in self._clears.items() if clear.done)

    def fences(
        self, namespace: bytes, done_there: Container[str], now_s: float
    ) -> tuple[Fence, ...]:
        """Why pages of ``namespace`` are refused: they may be what the sender has yet to forget."""
        return tuple(
            Fence(clear_id, now_s - clear.begun_s, clear.until_s - now_s)
            for clear_id, clear in self._clears.items()
            if clear.namespace in (None, namespace)
            and now_s < clear.until_s
            and clear_id not in done_there
        )
