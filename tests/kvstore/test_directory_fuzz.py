"""The directory against a naive model, over random histories.

The model keeps every page, lease and reservation in plain dicts and says what must hold; the
directory alone decides *which* page to evict, and the model checks that it was allowed to.
"""

from __future__ import annotations

import random

import pytest

from kvstore.messages import ReserveStatus
from kvstore.server.directory import Directory
from kvstore.server.segment import Segment
from kvstore.store import PageIdentity, PageState
from tests.kvstore.pages import SPEC, sequence

LEASE_S = 5.0
NUM_SLOTS = 12


def tree() -> list[PageIdentity]:
    """Pages of four prompts that share prefixes, each page once."""
    prompts = [
        [*range(16), 1, 2],
        [*range(8), *range(40, 60)],
        [*range(8), *range(40, 48), *range(70, 80)],
        list(range(100, 125)),
    ]
    return list({page.key: page for tokens in prompts for page in sequence(tokens)}.values())


class Model:
    """What must hold, by key."""

    def __init__(self) -> None:
        self.d = Directory(
            Segment(NUM_SLOTS * SPEC.page_nbytes),
            lease_s=LEASE_S,
            high=int(NUM_SLOTS * SPEC.page_nbytes * 0.9),
            low=int(NUM_SLOTS * SPEC.page_nbytes * 0.6),
        )
        self.pages = tree()
        self.now_s = 0.0
        self.writing: dict[bytes, tuple[int, float]] = {}
        self.ready: dict[bytes, int] = {}
        self.stale: list[tuple[PageIdentity, int]] = []
        self.leases: dict[int, tuple[dict[bytes, int], float]] = {}
        self.ended: list[int] = []
        self.touched: dict[bytes, int] = {}
        self.step = 0

    def leased(self, key: bytes) -> bool:
        return any(held.get(key) == self.ready.get(key) for held, _ in self.leases.values())

    def observe(self) -> list[PageIdentity]:
        """Compare all states; returns the pages the directory evicted, having checked each."""
        self.d.check()
        evicted = []
        for page in self.pages:
            state = self.d.state(page.key)
            if page.key in self.writing:
                assert state is PageState.WRITING
            elif page.key not in self.ready:
                assert state is PageState.ABSENT
            elif state is not PageState.READY:
                assert state is PageState.ABSENT
                assert not self.leased(page.key), "a leased page was evicted"
                evicted.append(page)
        for page in evicted:
            del self.ready[page.key]
        here = self.ready.keys() | self.writing.keys()
        for page in self.pages:
            if page.key in here:
                assert all(page.parent != gone.key for gone in evicted), "a trunk went first"
        return evicted

    def touch(self, page: PageIdentity) -> None:
        by_key = {p.key: p for p in self.pages}
        at: PageIdentity | None = page
        while at is not None and (at.key in self.ready or at.key in self.writing):
            self.touched[at.key] = self.step
            at = by_key.get(at.parent)  # type: ignore[call-overload]

    def check_coldest(self, evicted: list[PageIdentity], before: dict[bytes, int]) -> None:
        """Every evicted page was at most as recent as any leaf that stays and was free to go."""
        for gone in evicted:
            for page in self.pages:
                stays = page.key in self.ready and page.key in before
                leaf = not any(
                    p.parent == page.key for p in self.pages if p.key in self.ready or p in evicted
                )
                writing_child = any(
                    p.parent == page.key for p in self.pages if p.key in self.writing
                )
                if stays and leaf and not writing_child and not self.leased(page.key):
                    assert before[gone.key] <= before[page.key], "a warmer leaf was evicted"


def reserve(m: Model, rng: random.Random) -> None:
    page = rng.choice(m.pages)
    before = dict(m.touched)
    reservation = m.d.reserve([page], SPEC, m.now_s)[0]
    if page.key in m.writing:
        assert reservation.status is ReserveStatus.WRITING
    elif page.key in m.ready:
        assert reservation.status is ReserveStatus.PRESENT
    elif reservation.slot is not None:
        m.writing[page.key] = (reservation.slot.generation, m.now_s + LEASE_S)
    else:
        assert reservation.status is ReserveStatus.REFUSED
        assert m.d.segment.num_used == NUM_SLOTS
    m.touch(page)
    by_key = {p.key: p for p in m.pages}
    if page.parent in by_key:
        m.touch(by_key[page.parent])  # type: ignore[index]
    evicted = m.observe()
    assert len(evicted) <= 1
    m.check_coldest(evicted, before)


def finish(m: Model, rng: random.Random) -> None:
    if not m.writing:
        return
    key = rng.choice(list(m.writing))
    generation, _ = m.writing.pop(key)
    page = next(p for p in m.pages if p.key == key)
    action = rng.random()
    if action < 0.7:
        assert m.d.commit(page.key, generation, b"c" * 16)
        m.ready[key] = generation
    else:
        assert m.d.abort(page.key, generation, quiet=action < 0.85)
        m.stale.append((page, generation))
    assert m.observe() == []


def repeat_old(m: Model, rng: random.Random) -> None:
    """Messages about grants and leases that have ended change nothing."""
    if m.stale:
        page, generation = rng.choice(m.stale)
        assert not m.d.commit(page.key, generation, b"x" * 16)
        assert not m.d.abort(page.key, generation, quiet=True)
        assert not m.d.drop(page.key, generation)
    if m.ended:
        assert not m.d.release(rng.choice(m.ended))
    assert m.observe() == []


def look(m: Model, rng: random.Random) -> None:
    pages = rng.sample(m.pages, rng.randrange(1, 6))
    if rng.random() < 0.5:
        m.d.match([page.key for page in pages])
    else:
        lease = m.d.acquire([page.key for page in pages], m.now_s)
        wanted: dict[bytes, int] = {
            page.key: m.ready[page.key] for page in pages if page.key in m.ready
        }
        assert (lease is not None) == bool(wanted)
        if lease is not None:
            assert {e.key: e.slot.generation for e in lease.entries} == wanted
            m.leases[lease.lease_id] = (wanted, m.now_s + LEASE_S)
    for page in pages:
        m.touch(page)
    assert m.observe() == []


def release(m: Model, rng: random.Random) -> None:
    if m.leases:
        lease_id = rng.choice(list(m.leases))
        del m.leases[lease_id]
        m.ended.append(lease_id)
        assert m.d.release(lease_id)
        assert m.observe() == []


def drop(m: Model, rng: random.Random) -> None:
    if m.ready:
        key = rng.choice(list(m.ready))
        page = next(p for p in m.pages if p.key == key)
        generation = m.ready.pop(key)
        assert m.d.drop(page.key, generation)
        m.stale.append((page, generation))
        assert m.observe() == []


def pass_time(m: Model, rng: random.Random) -> None:
    m.now_s += rng.choice([0.0, 0.3, 2.0])
    by_key = {page.key: page for page in m.pages}
    for key, (generation, end_s) in list(m.writing.items()):
        if end_s <= m.now_s:
            del m.writing[key]
            m.stale.append((by_key[key], generation))  # type: ignore[index]
    for lease_id, (_, end_s) in list(m.leases.items()):
        if end_s <= m.now_s:
            del m.leases[lease_id]
            m.ended.append(lease_id)
    before = dict(m.touched)
    num_max = rng.randrange(4)
    m.d.tick(m.now_s, num_max)
    evicted = m.observe()
    assert len(evicted) <= num_max
    m.check_coldest(evicted, before)


def clear(m: Model, rng: random.Random) -> None:
    if rng.random() < 0.1:
        assert m.d.clear() == len(m.ready)
        m.ready.clear()
        assert m.observe() == []


ACTIONS = [reserve, reserve, reserve, finish, finish, repeat_old, look, release, drop, pass_time]


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_agree_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    m = Model()
    for _ in range(300):
        m.step += 1
        rng.choice([*ACTIONS, pass_time, clear])(m, rng)
    m.now_s += 2 * LEASE_S
    m.d.tick(m.now_s, 0)
    m.d.clear()
    m.d.check()
    assert m.d.segment.num_used == 0, "a slot leaked"
