"""When writers have put pages on this node: which pages are younger than a clear.

Owns the moments of the last ``PUTS_KEPT_MAX`` pages put, for as long as a clear may be asked about.
Pages that came as copies are not noted: the page may be older than its copy. A page that is not
known is not known to be young.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.page import PageKey
from kvstore.replication.clears import FENCE_S_MAX

PUTS_KEPT_MAX = 65_536


class PutTimes:
    """See the module's docstring."""

    def __init__(self, num_max: int = PUTS_KEPT_MAX) -> None:
        self._num_max = num_max
        self._put_s: dict[PageKey, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._put_s)

    def note(self, keys: Sequence[PageKey], now_s: float) -> None:
        """A writer has put these pages: they have just become visible here."""
        for key in keys:
            self._put_s.pop(key, None)
            self._put_s[key] = now_s
        while self._put_s:
            oldest = next(iter(self._put_s))
            full = len(self._put_s) > self._num_max
            if not full and self._put_s[oldest] + FENCE_S_MAX > now_s:
                return
            del self._put_s[oldest]

    def is_after(self, key: PageKey, moment_s: float) -> bool:
        """The page is known to have been put after ``moment_s``."""
        put_s = self._put_s.get(key)
        return put_s is not None and put_s > moment_s
