"""Indexes what the SSD kept from a life before, while the node serves already.

Owns the walk over the tier's pages, in slices of well under a millisecond, the hottest first. What
has been put, or is being written, in this life wins: the tier's older copy of it goes.

::

    tier's page ──▶ on its way down, or forgotten already   left alone: that has its own end
                 ├▶ indexed, its copy was made in this life  left alone
                 ├▶ indexed, no copy                         the older one goes
                 ├▶ no page at all                           goes
                 └▶ unknown                                  SPILLED from here on

Until the walk has ended the tier may hold copies that nobody knows of: ``over`` says so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Container

from kvstore.page import PageKey
from kvstore.server.spilling import Spilling
from kvstore.server.tier import Tier

ADOPT_BATCH = 32  # pages indexed between looks at the loop


class Adoption:
    """See the module's docstring.

    Args:
        storing: pages of which a copy is being made now.

    Attributes:
        over: every page that the tier had at start is indexed, or gone.
    """

    def __init__(self, spilling: Spilling, tier: Tier, storing: Container[PageKey]) -> None:
        self.over = not tier.num_pages
        self._spilling = spilling
        self._tier = tier
        self._storing = storing
        self._num_found = tier.num_pages
        self._num_seen = 0

    @property
    def num_left(self) -> int:
        """Pages that are still to be looked at, at most; 0 when it is over, and only then."""
        return 0 if self.over else max(1, self._num_found - self._num_seen)

    async def run(self) -> int:
        """Index what is there; returns how many pages. Once."""
        num_adopted = 0
        contents = self._tier.contents()
        while pages := list(itertools.islice(contents, ADOPT_BATCH)):
            self._num_seen += len(pages)
            found = [page for page in pages if page.record.key not in self._storing]
            adopted = self._spilling.adopt_many(found)
            self._tier.remove(adopted.strange)
            num_adopted += adopted.num_adopted
            await asyncio.sleep(0)
        self.over = True
        return num_adopted
