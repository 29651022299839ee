"""The columnar page table: index, growth, tokens, trunks, and what a million pages cost."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import pytest

from kvstore.page import PAGE_SIZE_MAX, PageKey, PageSpec
from kvstore.server.candidates import Candidates
from kvstore.server.columns import NUM_ROWS_FIRST, Columns
from kvstore.server.directory import Directory
from kvstore.server.key_index import KeyIndex
from kvstore.server.names import Names
from kvstore.server.page_table import READY, PageTable
from kvstore.server.policies import policy_named
from kvstore.server.segment import Segment
from kvstore.server.tier import TierPage
from kvstore.store import PageIdentity, PageRecord
from tests.kvstore.pages import SPEC, sequence


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


@pytest.mark.parametrize("style", ["hashed", "little", "big"])
def test_the_index_agrees_with_a_dict_whatever_the_keys_look_like(style: str) -> None:
    rng = random.Random(style)
    index, naive, free = KeyIndex(), dict[bytes, int](), list(range(1, 600))
    index.grow(1200, 1)
    for _ in range(6000):
        number = rng.randrange(800)
        order: Any = style
        key = key_of(number) if style == "hashed" else number.to_bytes(32, order)
        if key in naive:
            index.remove(naive[key])
            free.append(naive.pop(key))
        elif free:
            naive[key] = free.pop(rng.randrange(len(free)))
            index.insert(naive[key], key)
            assert index.key(naive[key]) == key
    index.check()
    keys = [*naive, *(key_of(10_000 + i) for i in range(50))]
    assert [index.find(key) for key in keys] == [naive.get(key, 0) for key in keys]
    assert index.find_many(b"".join(keys)).tolist() == [naive.get(key, 0) for key in keys]
    assert index.find_many(b"").tolist() == []
    assert index.find(b"short") == 0


def alike(number: int, style: str) -> bytes:
    """Keys that a client might choose to make the index slow."""
    if style == "folded":  # words that cancel out
        word = number.to_bytes(8, "little")
        return word + word + bytes(16)
    if style == "high bits":
        bits = [(number >> i & 1) << 7 for i in range(32)]
        return bytes(bits)
    return number.to_bytes(32, "little") if style == "low" else number.to_bytes(32, "big")


@pytest.mark.parametrize("style", ["folded", "high bits", "low", "high"])
def test_keys_that_were_chosen_to_be_alike_do_not_share_a_run(style: str) -> None:
    index = KeyIndex(seed=b"unknown to whoever chose them")
    index.grow(4096, 1)
    for row in range(1, 4096):
        index.insert(row, alike(row, style))
    assert index.longest_run() < 64


def test_what_is_found_does_not_depend_on_the_seed() -> None:
    indexes = [KeyIndex(seed) for seed in (b"", b"a", b"b")]
    for row in range(1, 500):
        for index in indexes:
            index.insert(row, key_of(row))
    packed = b"".join(key_of(row) for row in range(1000))
    found = [index.find_many(packed).tolist() for index in indexes]
    assert found == [[row if 0 < row < 500 else 0 for row in range(1000)]] * 3


def test_a_node_that_knows_its_capacity_never_stops_to_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Directory(Segment(2000 * SPEC.page_nbytes), lease_s=1.0, high=1, low=1)
    directory.expect(2000 * SPEC.page_nbytes)
    grown: list[int] = []
    grow = Columns.grow

    def counted(columns: Columns, num_rows: int, used: int) -> None:
        grown.append(num_rows)
        grow(columns, num_rows, used)

    monkeypatch.setattr(Columns, "grow", counted)
    pages = sequence(range(4 * 4000))
    for number, page in enumerate(pages):
        record = PageRecord(
            key=page.key,
            parent=page.parent,
            depth=page.depth,
            tokens=page.tokens,
            checksum=bytes(16),
            page_nbytes=SPEC.page_nbytes,
        )
        assert directory.spilling.adopt(TierPage(record, SPEC, b"", 35, float(number)))
    assert grown == [4001, 4002], "once for pages and once for trunks, before the first"


def test_pages_that_go_by_other_ways_leave_no_candidates_behind() -> None:
    table = PageTable()
    spec_id = table.spec_id(SPEC)
    assert spec_id is not None
    rows = [table.add(page, spec_id, b"") for page in sequence(range(4 * 100))]
    candidates = Candidates(table, policy_named("lru", table), lambda row: True)
    for _ in range(200):
        for row in rows:
            candidates.offer(row)
            table.queued[row] = 0
        assert len(candidates) <= 2048
    for row in rows:
        candidates.offer(row)
    taken = [candidates.pop(lambda row: True, 1) for _ in range(101)]
    assert sorted(row for row in taken if row is not None) == rows


def test_the_index_keeps_its_keys_when_it_grows() -> None:
    index = KeyIndex()
    for row in range(1, NUM_ROWS_FIRST):
        index.insert(row, key_of(row))
    index.grow(5 * NUM_ROWS_FIRST, NUM_ROWS_FIRST)
    index.check()
    assert all(index.find(key_of(row)) == row for row in range(1, NUM_ROWS_FIRST))


def test_records_come_back_as_they_went_in_also_after_growing() -> None:
    table = PageTable()
    pages = sequence(range(4 * 3 * NUM_ROWS_FIRST + 2))  # the last page is a tail
    spec_id = table.spec_id(SPEC)
    assert spec_id is not None
    for page in pages:
        row = table.add(page, spec_id, b"")
        table.state[row] = READY
        table.set_checksum(row, page.key[:16])
    for page in pages:
        record = table.record(table.find(page.key))
        assert (record.key, record.parent, record.depth) == (page.key, page.parent, page.depth)
        assert (record.tokens, record.checksum) == (page.tokens, page.key[:16])
    assert table.find(PageKey(bytes(32))) == 0


@pytest.mark.parametrize("page_size", [1, 3, 16, PAGE_SIZE_MAX])
def test_tokens_of_any_page_size_are_kept(page_size: int) -> None:
    table = PageTable()
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=page_size, dtype="uint8")
    spec_id = table.spec_id(spec)
    assert spec_id is not None
    pages = sequence(range(1, 5 * page_size + 1), spec=spec)
    pages += sequence([7] * max(1, page_size - 1), spec=spec)
    rows = [table.add(page, spec_id, b"") for page in pages]
    assert [table.tokens(row) for row in rows] == [page.tokens for page in pages]
    assert all(table.is_page(row, page, spec_id) for row, page in zip(rows, pages, strict=True))
    other = msgspec.structs.replace(pages[0], tokens=b"\xff" * len(pages[0].tokens))
    assert not table.is_page(rows[0], other, spec_id)
    assert not table.is_page(rows[0], pages[0], None)


def test_a_parent_that_comes_late_finds_its_children() -> None:
    table = PageTable()
    spec_id = table.spec_id(SPEC)
    assert spec_id is not None
    parent, first = sequence(range(8))
    second = sequence([0, 1, 2, 3, 9])[1]
    rows = [table.add(page, spec_id, b"") for page in (first, second)]
    assert [table.parent_row(row) for row in rows] == [0, 0]
    row = table.add(parent, spec_id, b"")
    assert [table.parent_row(child) for child in rows] == [row, row]
    table.unlink(row)
    table.free(row)
    assert [table.parent_row(child) for child in rows] == [0, 0]


def test_names_are_numbered_again_once_nobody_uses_them() -> None:
    names = Names()
    a = names.join(b"a" * 32)
    assert names.join(b"a" * 32) == a
    assert names.find(b"b" * 32) is None
    names.leave(a)
    names.leave(a)
    assert names.find(b"a" * 32) is None
    assert names.join(b"b" * 32) == a
    assert names.name(a) == b"b" * 32
    assert len(names) == 1


def rss_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def chain_page(number: int, chain: int) -> PageIdentity:
    """A page of 16 tokens, in chains of ``chain`` pages."""
    parent = key_of(number - 1) if number % chain else b"n" * 32
    key = PageKey(key_of(number))
    return PageIdentity(key=key, parent=parent, depth=number % chain, tokens=key + key)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chain", [1, 100])
def test_a_million_page_records_take_less_than_400_mb(chain: int) -> None:
    spec = PageSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=16, dtype="uint8")
    num = 250_000  # in proportion; the whole million is measured by the benchmark
    nbytes = num * spec.page_nbytes
    d = Directory(Segment(nbytes), lease_s=5.0, high=nbytes, low=nbytes)
    before = rss_nbytes()
    for number in range(num):
        page = chain_page(number, chain)
        slot = d.reserve([page], spec, 0.0)[0].slot
        assert slot is not None
        assert d.commit(page.key, slot.generation, b"c" * 16)
    assert d.num_pages == num
    assert rss_nbytes() - before < num * 400
