"""The directory against a naive model, over random histories, in every variant."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.messages import ReserveStatus, pack_keys
from kvstore.page import PageKey
from kvstore.server.policies import POLICIES
from tests.kvstore.directory_model import LEASE_S, NUM_SLOTS, TENANTS, Model, Setup
from tests.kvstore.pages import SPEC

WRITERS = ("", "writer-1", "writer-2")


def reserve(m: Model, rng: random.Random) -> None:
    page = m.drawn(rng)
    before, writer = dict(m.touched), rng.choice(WRITERS)
    here = page.key in m.writing or page.key in m.ready or page.key in m.spilled
    priority = rng.choice([0, 35, 35, 80]) if m.setup.priorities else 35
    lasts_s = rng.choice([None, 1.0, 4.0]) if m.setup.priorities else None
    before_policy = m.priority.get(page.key), m.lapses.get(page.key)
    policy = m.put_policy(page, priority, lasts_s)
    patient = rng.random() < 0.4
    copied = {*m.on_ssd, *m.unwanted}
    reservation = m.d.reserve([page], SPEC, m.now_s, policy, writer, patient=patient)[0]
    if here:  # the policy is that of the first put
        m.lapses.pop(page.key, None)
        if before_policy[0] is not None:
            m.priority[page.key] = before_policy[0]
        if before_policy[1] is not None:
            m.lapses[page.key] = before_policy[1]
    if page.key in m.writing:
        assert reservation.status is ReserveStatus.WRITING
    elif here:
        assert reservation.status is ReserveStatus.PRESENT
    elif reservation.slot is not None:
        m.writing[page.key] = (reservation.slot.generation, m.now_s + LEASE_S, writer)
    else:
        later = patient and m.working
        assert reservation.status is (ReserveStatus.LATER if later else ReserveStatus.REFUSED)
        m.num_later += later
        assert m.d.segment.num_used == NUM_SLOTS
    m.touch(page)
    m.touch(m.by_key.get(PageKey(page.parent)))
    granted = reservation.status is ReserveStatus.GRANTED
    evicted = m.observe(page if patient and granted else None)
    assert len(evicted) <= 2
    if patient and m.working:
        assert {gone.key for gone in evicted} <= copied, "a page went that the SSD was not offered"
    m.check_order(evicted, before, policy.namespace)


def finish(m: Model, rng: random.Random) -> None:
    if not m.writing:
        return
    key = rng.choice(list(m.writing))
    generation, _, _ = m.writing.pop(key)
    action = rng.random()
    if action < 0.7:
        assert m.d.commit(key, generation, b"c" * 16)
        m.ready[key] = generation
    else:
        assert m.d.abort(key, generation, quiet=action < 0.85)
        m.stale.append((m.by_key[key], generation))
        m.forget(key)
    assert m.observe() == []


def bury(m: Model, rng: random.Random) -> None:
    if rng.random() < 0.3:
        writer = rng.choice(WRITERS[1:])
        mine = [key for key, (_, _, who) in m.writing.items() if who == writer]
        assert m.d.bury(writer, m.now_s) == len(mine)
        for key in mine:
            m.stale.append((m.by_key[key], m.writing.pop(key)[0]))
            m.forget(key)
        assert m.observe() == []


def renew(m: Model, rng: random.Random) -> None:
    if m.writing:
        key = rng.choice(list(m.writing))
        generation, _, writer = m.writing[key]
        assert m.d.renew_write(key, generation, m.now_s)
        m.writing[key] = (generation, m.now_s + LEASE_S, writer)
    if m.leases:
        lease_id = rng.choice(list(m.leases))
        assert m.d.renew_lease(lease_id, m.now_s)
        m.leases[lease_id] = (m.leases[lease_id][0], m.now_s + LEASE_S)


def repeat_old(m: Model, rng: random.Random) -> None:
    """Messages about grants and leases that have ended change nothing."""
    if m.stale:
        page, generation = rng.choice(m.stale)
        assert not m.d.commit(page.key, generation, b"x" * 16)
        assert not m.d.abort(page.key, generation, quiet=True)
        assert not m.d.drop(page.key, generation)
        assert not m.d.renew_write(page.key, generation, m.now_s)
    if m.ended:
        assert not m.d.release(rng.choice(m.ended))
        assert not m.d.renew_lease(rng.choice(m.ended), m.now_s)
    assert m.observe() == []


def look(m: Model, rng: random.Random) -> None:
    pages = rng.sample(m.pages, rng.randrange(1, 6))
    if rng.random() < 0.5:
        m.d.match(pack_keys([page.key for page in pages]), m.now_s)
    else:
        lease = m.d.acquire([page.key for page in pages], m.now_s)
        wanted = {page.key: m.ready[page.key] for page in pages if page.key in m.ready}
        assert (lease is not None) == bool(wanted)
        if lease is not None:
            leased = m.d.leased(lease)
            assert {page.record.key: page.generation for page in leased} == wanted
            assert all(page.record.tokens == m.by_key[page.record.key].tokens for page in leased)
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
        generation = m.ready[key]
        assert m.d.drop(key, generation)
        m.stale.append((m.by_key[key], generation))
        m.forget(key)
        assert m.observe() == []


def pin(m: Model, rng: random.Random) -> None:
    page = rng.choice(m.pages)
    if rng.random() < 0.5:
        done = m.d.pin([page.key])[0]
        fits = page.key in m.pinned or len(m.pinned) < NUM_SLOTS // 4
        assert done == (page.key in m.ready and fits)
        if done:
            m.pinned[page.key] = None
    else:
        assert m.d.unpin([page.key])[0] == (page.key in m.pinned)
        m.pinned.pop(page.key, None)
    assert m.observe() == []


def pass_time(m: Model, rng: random.Random) -> None:
    m.pass_time(rng.choice([0.0, 0.3, 2.0]))
    before, num_max = dict(m.touched), rng.randrange(4)
    assert m.d.tick(m.now_s, num_max) <= num_max
    evicted = m.observe()
    assert len(evicted) <= num_max
    m.check_order(evicted, before)


def clear(m: Model, rng: random.Random) -> None:
    if rng.random() < 0.1:
        tenant = rng.choice([None, *TENANTS])
        gone = [k for k in (*m.ready, *m.spilled) if tenant in (None, m.tenant[k])]
        assert m.d.clear(tenant) == len(gone)
        for key in gone:
            m.forget(key)
        assert m.observe() == []


def spill(m: Model, rng: random.Random) -> None:
    """Begin or end a copy to the SSD; a full one gives up a colder page first."""
    if m.setup.ssd_pages and rng.random() < 0.6:
        job = m.d.spilling.begin_spill(m.now_s)
        if job is not None:
            assert job.page.record.key in m.ready
            assert not m.kept(job.page.record.key), "a held page was chosen to be spilled"
            m.spills.append(job)
    elif m.setup.ssd_pages and rng.random() < 0.1:
        unwritten = m.d.spilling.unwritten()
        list(unwritten.steps())
        left = list(unwritten.keys())
        assert len(left) == m.d.spilling.num_unwritten
        assert set(left) == m.ready.keys() - m.on_ssd.keys()
        under_way = {job.page.record.key for job in m.spills}
        for key in [key for key in left if key not in under_way][:1]:
            job = m.d.spilling.begin_copy(key, m.now_s)
            assert job is not None
            m.spills.append(job)
    elif m.spills:
        job = m.spills.pop(rng.randrange(len(m.spills)))
        key = job.page.record.key
        store = rng.random() < 0.8
        if store and m.on_ssd and m.d.spilling.num_on_ssd >= m.setup.ssd_pages:
            victim = rng.choice(list(m.on_ssd))
            m.d.spilling.displaced(victim)
            del m.on_ssd[victim]
            m.unwanted[victim] = None
            if m.spilled.pop(victim, m) is None:
                m.forget(victim)
        alive = m.ready.get(key) == job.slot.generation
        failed = not store and rng.random() < 0.5
        if not store and not failed:
            m.unwanted[key] = None
        assert m.d.spilling.end_spill(job, stored=store, failed=failed) == (alive or not store)
        if alive and store:
            m.on_ssd[key] = None
    assert m.observe() == []


def promote(m: Model, rng: random.Random) -> None:
    """Begin or end a promotion of a page that is only on the SSD."""
    if m.spilled and rng.random() < 0.6:
        key = rng.choice(list(m.spilled))
        before = dict(m.touched)
        job = m.d.spilling.begin_promote(key, m.now_s)
        if job is not None:
            m.promotions.append(job)
        m.check_order(m.observe(), before, m.tenant[key])
    elif m.promotions:
        job = m.promotions.pop(rng.randrange(len(m.promotions)))
        loaded = rng.random() < 0.8
        alive = m.d.spilling.promoting(job.key)
        assert m.d.spilling.end_promote(job, loaded=loaded) == (alive and loaded)
        if alive and loaded:
            del m.spilled[job.key]
            m.ready[job.key] = job.slot.generation
            m.touched.setdefault(job.key, 0)
        assert m.observe() == []


ACTIONS = [reserve, reserve, reserve, finish, finish, repeat_old, look, release, drop, pass_time]
MORE = [pass_time, clear, bury, renew, pin, spill, spill, promote]
GROWING = [*[reserve] * 3, *[finish] * 3, *[spill] * 12, look, release, pass_time, promote]


def go_on(m: Model, rng: random.Random, num_steps: int) -> None:
    actions = GROWING if m.setup.chain else [*ACTIONS, *MORE]
    for _ in range(num_steps):
        m.step += 1
        rng.choice(actions)(m, rng)


def play(setup: Setup, seed: int) -> None:
    rng = random.Random(seed)
    m = Model(setup)
    m.set_working(working=bool(setup.ssd_pages) and seed % 4 != 3)
    go_on(m, rng, 300)
    for spill_job in m.spills:
        m.d.spilling.end_spill(spill_job, stored=False)
    for job in m.promotions:
        m.d.spilling.end_promote(job, loaded=False)
    m.now_s += 2 * LEASE_S
    m.d.tick(m.now_s, 0)
    m.d.clear()
    m.d.spilling.take_removals(1000)
    m.d.check()
    assert m.d.segment.num_used == 0, "a slot leaked"
    assert m.d.namespace_nbytes() == {}


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_agree_with_the_model(seed: int) -> None:
    play(Setup("lru"), seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_keeps_the_rules(policy: str, seed: int) -> None:
    play(Setup(policy, priorities=True), seed)


@pytest.mark.parametrize("seed", range(8))
def test_quotas_hold_in_random_histories(seed: int) -> None:
    play(Setup("lru", quotas=True, priorities=seed % 2 == 1), seed)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ssd_pages", [2, 1000])
def test_spilling_and_promoting_agree_with_the_model(ssd_pages: int, seed: int) -> None:
    policy = list(POLICIES)[seed % len(POLICIES)]
    setup = Setup(policy, ssd_pages=ssd_pages, quotas=seed % 3 == 0, priorities=seed % 4 == 0)
    play(setup, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_prompt_longer_than_memory_gives_up_its_own_pages_only_to_who_is_patient(
    seed: int,
) -> None:
    play(Setup("lru", ssd_pages=1000, chain=True), seed)


def test_the_model_is_not_vacuous() -> None:
    """Random histories really evict, refuse for good and for now, spill and promote."""
    seen: Counter[str] = Counter()
    tree, chain = Setup("lru", ssd_pages=2), Setup("lru", ssd_pages=1000, chain=True)
    for seed, setup in enumerate([*[chain] * 3, *[tree] * 4], 1):
        m = Model(setup)
        m.set_working(working=True)
        go_on(m, random.Random(seed), 300 if setup.chain else 900)
        seen += m.d.counters
        seen.update(later=m.num_later, own=m.num_own)
    for name in (
        "evicted",
        "refused",
        "later",
        "own",
        "spilled",
        "promoted",
        "ssd_displaced",
        "buried_writes",
        "cleared",
    ):
        assert seen[name] > 0, name
