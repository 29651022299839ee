"""Quotas: nobody loses pages to others while at or below its share."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.config import StoreConfig
from kvstore.messages import ReserveStatus
from kvstore.server.directory import Directory
from kvstore.server.tenants import Tenants
from kvstore.store import PutPolicy
from tests.kvstore.directories import directory, present, reserve, single, store
from tests.kvstore.pages import SPEC

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def put(d: Directory, tenant: bytes, numbers: range, priority: int = 35) -> None:
    for i in numbers:
        store(d, [single(i)], policy=PutPolicy(namespace=tenant, priority=priority))


def held(d: Directory) -> dict[bytes, int]:
    return {name: n // SPEC.page_nbytes for name, n in d.namespace_nbytes().items()}


def test_a_tenant_below_its_share_loses_nothing_to_a_greedy_one() -> None:
    d = directory(20, quotas={A: 0.5})
    put(d, A, range(10))
    put(d, B, range(100, 200))
    assert present(d, [single(i) for i in range(10)]) == [True] * 10
    assert held(d) == {A: 10, B: 10}
    d.check()


def test_free_memory_may_be_used_by_anybody_until_its_owner_comes() -> None:
    d = directory(20, quotas={A: 0.5})
    put(d, B, range(100, 120))
    assert held(d) == {B: 20}
    put(d, A, range(10))
    assert held(d) == {A: 10, B: 10}
    assert d.counters["evicted_quota"] == 10
    d.check()


def test_who_is_farthest_above_its_share_gives_first() -> None:
    d = directory(30, quotas={A: 0.1, B: 0.1, C: 0.8})
    put(d, A, range(18))
    put(d, B, range(100, 112))
    put(d, C, range(200, 206))
    assert held(d) == {A: 12, B: 12, C: 6}


def test_high_priority_does_not_protect_from_a_quota() -> None:
    d = directory(10, quotas={A: 0.5})
    put(d, B, range(100, 110), priority=100)
    put(d, A, range(5), priority=0)
    assert held(d) == {A: 5, B: 5}


def test_unnamed_tenants_share_the_rest_equally() -> None:
    tenants = Tenants({A: 0.4}, 1000)
    tenants.hold(1, A, 10)
    tenants.hold(2, B, 10)
    assert (tenants.share(1), tenants.share(2)) == (400, 600)
    tenants.hold(3, C, 10)
    assert (tenants.share(2), tenants.share(3)) == (300, 300)
    tenants.give(3, 10)
    assert tenants.share(2) == 600


def test_a_tenant_that_fills_its_share_with_leased_pages_is_refused_not_served_by_others() -> None:
    d = directory(10, quotas={A: 0.5, B: 0.5})
    put(d, A, range(5))
    put(d, B, range(100, 105))
    assert d.acquire([single(i).key for i in range(100, 105)], 0.0) is not None
    refused = reserve(d, single(300), policy=PutPolicy(namespace=B))
    assert refused.status is ReserveStatus.REFUSED
    assert held(d) == {A: 5, B: 5}


def test_without_quotas_the_coldest_page_goes_whoever_stored_it() -> None:
    d = directory(10)
    put(d, A, range(5))
    put(d, B, range(100, 110))
    assert held(d) == {b"": 10}
    assert present(d, [single(i) for i in range(5)]) == [False] * 5


@pytest.mark.parametrize(
    "quotas", [{"xyz": 0.5}, {"ab" * 32: 0.0}, {"ab" * 32: 0.6, "cd" * 32: 0.6}]
)
def test_quotas_that_make_no_sense_are_refused(quotas: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="quotas"):
        StoreConfig(quotas=quotas)


def test_who_has_most_is_found_among_many_tenants_whatever_has_changed() -> None:
    rng = random.Random(1)
    tenants = Tenants({A: 0.2, B: 0.1}, 10_000)
    names = {1: A, 2: B} | {number: b"%032d" % number for number in range(3, 300)}
    held: Counter[int] = Counter()
    in_line: Counter[int] = Counter()
    for _ in range(5000):
        tenant = rng.choice(list(names)[: rng.choice([5, 300])])
        nbytes = rng.randrange(1, 100)
        action = rng.random()
        if action < 0.5:
            tenants.hold(tenant, names[tenant], nbytes)
            held[tenant] += nbytes
        elif action < 0.7 and held[tenant] - in_line[tenant] >= nbytes:
            tenants.give(tenant, nbytes)
            held[tenant] -= nbytes
        elif action < 0.9 and held[tenant] - in_line[tenant] >= nbytes:
            tenants.stand(tenant, nbytes)
            in_line[tenant] += nbytes
        elif in_line[tenant]:
            tenants.stand(tenant, -in_line.pop(tenant))
        over = {t: excess for t in names if (excess := tenants.excess(t)) > 0 and held[t]}
        left = {t: held[t] - in_line[t] - tenants.share(t) for t in held if held[t] > in_line[t]}
        given = list(tenants.givers(None))
        assert sorted(set(given)) == sorted(over)
        assert [over[t] for t in given[-len(over) :]] == sorted(over.values(), reverse=True)
        chosen = tenants.next_giver()
        assert left[chosen] == max(left.values()) if chosen is not None else not left
