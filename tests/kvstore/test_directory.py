"""The directory core: states, leases, fencing, eviction order."""

from __future__ import annotations

import msgspec

from kvstore.messages import ReserveStatus
from kvstore.store import PageState
from tests.kvstore.directories import (
    CHECKSUM,
    LEASE_S,
    directory,
    grant,
    match,
    present,
    reserve,
    store,
)
from tests.kvstore.pages import BIG_SPEC, SPEC, sequence


def test_a_page_is_visible_only_after_its_commit() -> None:
    d = directory(4)
    page = sequence(range(4))[0]
    slot = grant(d, page)
    assert match(d, [page]) == [PageState.WRITING]
    assert d.acquire([page.key], 0.0) is None
    assert d.commit(page.key, slot.generation, CHECKSUM)
    assert match(d, [page]) == [PageState.READY]
    assert d.acquire([page.key], 0.0) is not None
    d.check()


def test_a_second_writer_is_told_of_the_first() -> None:
    d = directory(4)
    page = sequence(range(4))[0]
    slot = grant(d, page)
    assert reserve(d, page).status is ReserveStatus.WRITING
    d.commit(page.key, slot.generation, CHECKSUM)
    assert reserve(d, page).status is ReserveStatus.PRESENT


def test_a_key_of_other_tokens_is_a_collision() -> None:
    d = directory(4)
    page = sequence(range(4))[0]
    store(d, [page])
    other = msgspec.structs.replace(page, tokens=b"\7\0\0\0" * 4)
    assert reserve(d, other).status is ReserveStatus.COLLISION
    assert d.counters["collisions"] == 1


def test_a_writer_that_dies_loses_its_reservation_when_the_lease_ends() -> None:
    d = directory(1)
    page = sequence(range(4))[0]
    old = grant(d, page, now_s=0.0)
    d.tick(LEASE_S - 0.01, 10)
    assert reserve(d, page, LEASE_S - 0.01).status is ReserveStatus.WRITING
    d.tick(LEASE_S, 10)
    new = grant(d, page, LEASE_S)
    assert not d.commit(page.key, old.generation, CHECKSUM), "the old writer is fenced"
    assert d.commit(page.key, new.generation, CHECKSUM)
    assert d.counters["stale_commits"] == 1
    d.check()


def test_a_slot_that_may_still_be_written_to_is_not_reused_before_the_lease_ends() -> None:
    d = directory(1)
    first, second = sequence(range(4))[0], sequence(range(4, 8))[0]
    old = grant(d, first)
    assert d.abort(first.key, old.generation, quiet=False)
    assert d.state(first.key) is PageState.ABSENT
    assert reserve(d, second).status is ReserveStatus.REFUSED
    d.check()
    d.tick(LEASE_S, 10)
    grant(d, second, LEASE_S)
    d.check()


def test_a_quiet_abort_frees_the_slot_at_once() -> None:
    d = directory(1)
    first, second = sequence(range(4))[0], sequence(range(4, 8))[0]
    d.abort(first.key, grant(d, first).generation, quiet=True)
    grant(d, second)
    d.check()


def test_repeated_and_late_messages_are_counted_and_change_nothing() -> None:
    d = directory(2)
    page = sequence(range(4))[0]
    slot = grant(d, page)
    d.commit(page.key, slot.generation, CHECKSUM)
    assert not d.commit(page.key, slot.generation, CHECKSUM)
    assert not d.abort(page.key, slot.generation, quiet=True), "a ready page cannot be aborted"
    lease = d.acquire([page.key], 0.0)
    assert lease is not None
    assert d.release(lease.lease_id)
    assert not d.release(lease.lease_id)
    assert not d.release(999)
    assert not d.drop(page.key, slot.generation + 1)
    assert d.counters["late_releases"] == 2
    assert present(d, [page]) == [True]
    d.check()


def test_evict_never_frees_a_leased_page() -> None:
    d = directory(2)
    a, b, c = (sequence(range(i, i + 4))[0] for i in (0, 10, 20))
    store(d, [a, b])
    lease = d.acquire([a.key], 0.0)
    assert lease is not None
    store(d, [c])
    assert present(d, [a, b, c]) == [True, False, True]
    d.acquire([c.key], 0.0)
    assert reserve(d, b).status is ReserveStatus.REFUSED
    assert present(d, [a, c]) == [True, True]
    d.check()


def test_a_trunk_stays_while_its_only_leaf_is_leased_or_being_written() -> None:
    d = directory(2)
    chain = sequence(range(12))
    store(d, chain[:2])
    assert d.acquire([chain[1].key], 0.0) is not None
    assert reserve(d, sequence([9])[0]).status is ReserveStatus.REFUSED
    assert present(d, chain[:2]) == [True, True]
    d.tick(LEASE_S, 0)
    d.clear()
    store(d, chain[:1])
    grant(d, chain[1])
    assert reserve(d, sequence([9])[0]).status is ReserveStatus.REFUSED
    assert present(d, chain[:1]) == [True]


def test_a_reader_that_never_releases_does_not_stop_eviction() -> None:
    d = directory(1)
    a, b = sequence(range(4))[0], sequence(range(4, 8))[0]
    store(d, [a])
    d.acquire([a.key], 0.0)
    assert reserve(d, b, 1.0).status is ReserveStatus.REFUSED
    d.tick(LEASE_S, 10)
    assert d.counters["expired_leases"] == 1
    grant(d, b, LEASE_S)
    d.check()


def test_leaves_go_before_trunks_whatever_the_order_of_use() -> None:
    d = directory(4)
    chain = sequence(range(16))
    store(d, chain)
    match(d, [chain[3]])
    match(d, [chain[0]])
    others = [sequence(range(100 + i, 104 + i))[0] for i in range(0, 12, 4)]
    for i, other in enumerate(others):
        store(d, [other])
        assert present(d, chain) == [True] * (3 - i) + [False] * (i + 1)
        match(d, others)
        d.check()


def test_touching_a_page_keeps_its_ancestors() -> None:
    d = directory(4)
    chain, other = sequence(range(12)), sequence(range(50, 54))
    store(d, [*chain, *other])
    match(d, [chain[2]])  # only the last page of the chain was asked for
    store(d, sequence(range(60, 64)))
    assert present(d, [*chain, *other]) == [True, True, True, False]
    d.check()


def test_one_request_never_evicts_its_own_pages() -> None:
    d = directory(3)
    chain = sequence(range(20))
    statuses = [r.status for r in d.reserve(chain, SPEC, 0.0)]
    assert statuses == [ReserveStatus.GRANTED] * 3 + [ReserveStatus.REFUSED] * 2


def test_a_page_is_not_evicted_for_its_own_descendant() -> None:
    d = directory(3)
    chain = sequence(range(16))
    store(d, chain[:3])
    assert reserve(d, chain[3]).status is ReserveStatus.REFUSED
    assert present(d, chain) == [True, True, True, False]
    d.check()


def test_a_tick_evicts_between_the_watermarks_a_few_at_a_time() -> None:
    d = directory(20, high=0.9, low=0.5)
    store(d, [sequence(range(i * 10, i * 10 + 4))[0] for i in range(19)])
    d.tick(0.0, 4)
    assert d.num_pages == 15
    d.tick(0.0, 4)
    d.tick(0.0, 4)
    assert d.num_pages == 10
    d.tick(0.0, 4)
    assert d.num_pages == 10
    d.check()


def test_a_corrupt_page_under_lease_is_gone_by_key_but_its_slot_stays() -> None:
    d = directory(1)
    a, b = sequence(range(4))[0], sequence(range(4, 8))[0]
    slot = grant(d, a)
    d.commit(a.key, slot.generation, CHECKSUM)
    lease = d.acquire([a.key], 0.0)
    assert lease is not None
    assert d.drop(a.key, slot.generation)
    assert d.state(a.key) is PageState.ABSENT
    assert reserve(d, b).status is ReserveStatus.REFUSED
    d.check()
    d.release(lease.lease_id)
    grant(d, b)
    d.check()


def test_clear_forgets_ready_pages_and_lets_writers_finish() -> None:
    d = directory(4)
    chain = sequence(range(12))
    store(d, chain[:2])
    slot = grant(d, chain[2])
    assert d.clear() == 2
    assert d.commit(chain[2].key, slot.generation, CHECKSUM)
    assert present(d, chain) == [False, False, True]
    d.check()


def test_watchers_hear_once_of_commit_abort_expiry_and_eviction() -> None:
    d = directory(1)
    a, b = sequence(range(4))[0], sequence(range(4, 8))[0]
    heard: list[str] = []
    d.watches.add([a.key, b.key], lambda: heard.append("either"))
    slot = grant(d, a)
    gone = d.watches.add([a.key], lambda: heard.append("removed"))
    d.watches.remove(gone)
    assert heard == []
    d.commit(a.key, slot.generation, CHECKSUM)
    assert heard == ["either"]
    d.watches.add([a.key], lambda: heard.append("evicted"))
    grant(d, b)
    assert heard == ["either", "evicted"]
    d.watches.add([b.key], lambda: heard.append("expired"))
    d.tick(LEASE_S, 1)
    assert heard == ["either", "evicted", "expired"]
    assert len(d.watches) == 0
    assert d.watches.num_keys == 0


def test_pages_of_another_size_get_room_in_a_full_store() -> None:
    d = directory(32)
    small = [sequence(range(i * 10, i * 10 + 4))[0] for i in range(32)]
    store(d, small)
    big = sequence(range(8), spec=BIG_SPEC)[0]
    reservation = d.reserve([big], BIG_SPEC, 0.0)[0]
    assert reservation.status is ReserveStatus.GRANTED
    d.check()
    assert sum(present(d, small)) >= 28, "only what was needed is evicted"


def test_a_page_larger_than_the_segment_evicts_nothing() -> None:
    d = directory(1)
    page = sequence(range(4))[0]
    store(d, [page])
    big = sequence(range(8), spec=BIG_SPEC)[0]
    assert d.reserve([big], BIG_SPEC, 0.0)[0].status is ReserveStatus.REFUSED
    assert present(d, [page]) == [True]
