"""A naive model of the store node's directory: plain dicts that say what must hold.

The directory alone decides *which* page to evict; the model checks that it was allowed to, and by
the rules: quotas, priorities, leaves, pins, leases, and for ``lru`` the order of use.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from kvstore.page import PageKey
from kvstore.server.directory import Directory
from kvstore.server.segment import Segment
from kvstore.server.spilling import Promotion, Spill
from kvstore.store import PageIdentity, PageState, PutPolicy
from tests.kvstore.pages import SPEC, sequence

LEASE_S = 5.0
NUM_SLOTS = 12
CHAIN_PAGES = 40  # of one prompt that is longer than memory
LOW = 0.6
SPILL = 0.3
QUOTA = 0.5
TENANTS = (b"a" * 32, b"b" * 32)


class Setup(NamedTuple):
    """One variant of the directory."""

    policy: str
    quotas: bool = False
    ssd_pages: int = 0  # 0: no SSD
    priorities: bool = False
    chain: bool = False  # one prompt, longer than memory, mostly put in order


def tree() -> list[PageIdentity]:
    """Pages of four prompts that share prefixes, each page once."""
    prompts = [
        [*range(16), 1, 2],
        [*range(8), *range(40, 60)],
        [*range(8), *range(40, 48), *range(70, 80)],
        list(range(100, 125)),
    ]
    return list({page.key: page for tokens in prompts for page in sequence(tokens)}.values())


def chain() -> list[PageIdentity]:
    """The pages of one prompt."""
    return sequence(range(CHAIN_PAGES * SPEC.page_size))


class Model:
    """What must hold, by key."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        nbytes = NUM_SLOTS * SPEC.page_nbytes
        self.d = Directory(
            Segment(nbytes),
            lease_s=LEASE_S,
            high=int(nbytes * 0.9),
            low=int(nbytes * LOW),
            spill=int(nbytes * SPILL),
            policy=setup.policy,
            quotas={TENANTS[0]: QUOTA} if setup.quotas else None,
            half_life_s=4.0,
        )
        self.pages = chain() if setup.chain else tree()
        self.by_key = {page.key: page for page in self.pages}
        self.now_s = 0.0
        self.writing: dict[PageKey, tuple[int, float, str]] = {}
        self.ready: dict[PageKey, int] = {}
        self.spilled: dict[PageKey, None] = {}
        self.on_ssd: dict[PageKey, None] = {}
        self.unwanted: dict[PageKey, None] = {}  # the SSD was offered it, and has it no more
        self.pinned: dict[PageKey, None] = {}
        self.priority: dict[PageKey, int] = {}
        self.lapses: dict[PageKey, float] = {}
        self.tenant: dict[PageKey, bytes] = {}
        self.stale: list[tuple[PageIdentity, int]] = []
        self.leases: dict[int, tuple[dict[PageKey, int], float]] = {}
        self.ended: list[int] = []
        self.touched: dict[PageKey, int] = {}
        self.spills: list[Spill] = []
        self.promotions: list[Promotion] = []
        self.step = 0
        self.num_later = 0  # pages that were refused for now
        self.num_own = 0  # pages that went for their own child
        self.working = False

    def set_working(self, *, working: bool) -> None:
        """The SSD takes copies, or does not."""
        self.working = working
        self.d.spilling.set_working(working=working)

    def drawn(self, rng: random.Random) -> PageIdentity:
        """A page to reserve."""
        if self.setup.chain and rng.random() < 0.95:
            here = self.ready.keys() | self.writing.keys() | self.spilled.keys()
            return next((p for p in reversed(self.pages) if p.parent in here), self.pages[0])
        return rng.choice(self.pages)

    # ---- what is held

    def leased(self, key: PageKey) -> bool:
        return any(held.get(key) == self.ready.get(key) for held, _ in self.leases.values())

    def kept(self, key: PageKey) -> bool:
        """The page must not leave memory now."""
        held = [spill.slot.generation for spill in self.spills]
        spilling = self.ready.get(key) in held
        return self.leased(key) or key in self.pinned or spilling

    def leaf(self, key: PageKey, gone: list[PageIdentity]) -> bool:
        """No child was in memory, the pages that just went included."""
        here = self.ready.keys() | self.writing.keys() | {page.key for page in gone}
        return not any(page.parent == key and page.key in here for page in self.pages)

    def touch(self, page: PageIdentity | None) -> None:
        while page is not None and page.key in self.ready.keys() | self.writing.keys():
            self.touched[page.key] = self.step
            page = self.by_key.get(PageKey(page.parent))

    def forget(self, key: PageKey) -> None:
        """A page is gone altogether."""
        for held in (self.ready, self.spilled, self.on_ssd, self.pinned, self.lapses):
            held.pop(key, None)

    # ---- comparing

    def observe(self, own: PageIdentity | None = None) -> list[PageIdentity]:
        """Compare all states; returns the pages that left memory, having checked each.

        ``own``: who is patient has just reserved it: its parent, which has a copy, may have gone
        for it, as all of memory may be one prompt's.
        """
        assert self.d.spilling.sparing == self.working
        self.d.check()
        for key in self.d.spilling.take_removals(1000):
            assert key not in self.on_ssd, "a page that is there lost its copy"
        evicted = []
        for page in self.pages:
            state = self.d.state(page.key)
            if page.key in self.writing:
                assert state is PageState.WRITING
            elif page.key in self.ready and state is not PageState.READY:
                assert not self.kept(page.key), "a held page was evicted"
                kept_on_ssd = page.key in self.on_ssd
                assert state is (PageState.SPILLED if kept_on_ssd else PageState.ABSENT)
                evicted.append(page)
            elif page.key in self.ready:
                assert state is PageState.READY
            else:
                assert state is (
                    PageState.SPILLED if page.key in self.spilled else PageState.ABSENT
                )
        for page in evicted:
            del self.ready[page.key]
            if page.key in self.on_ssd:
                self.spilled[page.key] = None
            else:
                self.forget(page.key)
        here = self.ready.keys() | self.writing.keys()
        for page in self.pages:
            if page.key in here:
                allowed = page == own and page.parent in self.spilled
                num_gone = sum(page.parent == p.key for p in evicted)
                assert allowed or not num_gone, "a trunk went first"
                self.num_own += num_gone
        return evicted

    def free_leaves(self, gone: list[PageIdentity], before: dict[PageKey, int]) -> list[PageKey]:
        """Pages that stay although they might have gone."""
        return [
            key
            for key in self.ready
            if key in before and self.leaf(key, gone) and not self.kept(key)
        ]

    def check_order(
        self, evicted: list[PageIdentity], before: dict[PageKey, int], asking: bytes | None = None
    ) -> None:
        """Nobody with a better claim to go has stayed."""
        stays = self.free_leaves(evicted, before) if evicted else []
        for gone in evicted:
            self._check_quota(gone, asking)
            if self.setup.ssd_pages:  # pages with a copy were chosen earlier, and go ahead
                continue
            for key in stays:
                if self.setup.quotas and self.tenant[key] != self.tenant[gone.key]:
                    continue
                mine, other = self.priority[gone.key], self.priority[key]
                assert mine <= other, "a page of higher priority went first"
                if self.setup.policy == "lru" and mine == other:
                    assert before[gone.key] <= before[key], "a warmer leaf was evicted"

    def _check_quota(self, gone: PageIdentity, asking: bytes | None) -> None:
        tenant = self.tenant[gone.key]
        if not self.setup.quotas or asking == tenant:
            return
        held = self.d.namespace_nbytes().get(tenant, 0) + SPEC.page_nbytes
        share = QUOTA * int(NUM_SLOTS * SPEC.page_nbytes * LOW)  # of either of the two
        assert held > share, "a tenant below its share lost a page to another"

    def put_policy(self, page: PageIdentity, priority: int, lasts_s: float | None) -> PutPolicy:
        tenant = TENANTS[page.tokens[0] >= 100]
        self.tenant[page.key] = tenant
        self.priority[page.key] = priority
        self.lapses.pop(page.key, None)
        if lasts_s is not None and priority > 35:
            self.lapses[page.key] = self.now_s + lasts_s
        return PutPolicy(namespace=tenant, priority=priority, priority_s=lasts_s)

    def pass_time(self, seconds: float) -> None:
        """Move on; ends what must have ended by then."""
        self.now_s += seconds
        for key, (generation, end_s, _) in list(self.writing.items()):
            if end_s <= self.now_s:
                del self.writing[key]
                self.stale.append((self.by_key[key], generation))
        for lease_id, (_, end_s) in list(self.leases.items()):
            if end_s <= self.now_s:
                del self.leases[lease_id]
                self.ended.append(lease_id)
        for key, end_s in list(self.lapses.items()):
            if end_s <= self.now_s:
                del self.lapses[key]
                self.priority[key] = 35
