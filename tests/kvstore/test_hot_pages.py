"""Which pages count as hot at a node, and what a client makes of what it is told."""

from __future__ import annotations

from kvstore.client import hot_keys
from kvstore.client.hot_keys import BELIEVED_S, HotKeys
from kvstore.page import PageKey
from kvstore.replication import heat
from kvstore.replication.heat import HALF_LIFE_S, HOLD_S, HotPages

KEY, OTHER = PageKey(b"k" * 32), PageKey(b"o" * 32)


def read(pages: HotPages, times: int, now_s: float = 0.0) -> list[int]:
    """Read one page again and again; the numbers of nodes that were asked for."""
    return [n for _ in range(times) for _, n in pages.note([KEY], 8, now_s)]


def test_each_doubling_of_reads_doubles_the_nodes_up_to_all() -> None:
    pages = HotPages(4, 1)
    assert read(pages, 3) == []
    assert read(pages, 1) == [2]
    assert read(pages, 4) == [4]
    assert read(pages, 100) == [8]


def test_readers_are_told_once_the_copies_are_there() -> None:
    pages = HotPages(4, 1)
    read(pages, 4)
    assert pages.num_nodes([KEY]) == b""
    pages.spread(KEY)
    assert pages.num_nodes([OTHER, KEY]) == b"\0\2"
    assert pages.num_nodes([OTHER]) == b""


def test_slow_reads_never_make_a_page_hot() -> None:
    pages = HotPages(4, 1)
    assert all(read(pages, 1, i * HALF_LIFE_S) == [] for i in range(50))
    assert len(pages) == 0


def test_a_page_stays_hot_for_a_while_after_its_reads_have_moved_elsewhere() -> None:
    pages = HotPages(4, 1)
    read(pages, 4)
    pages.spread(KEY)
    pages.note([OTHER], 8, HOLD_S - HALF_LIFE_S)
    assert pages.num_nodes([KEY]) == b"\2"
    pages.note([OTHER], 8, HOLD_S + HALF_LIFE_S)
    assert len(pages) == 0


def test_the_tables_are_bounded() -> None:
    pages = HotPages(2, 1)
    many = [PageKey(i.to_bytes(32, "little")) for i in range(2 * heat.TRACKED_MAX)]
    for _ in range(3):
        pages.note(many, 8, 0.0)
    assert len(pages) == heat.HOT_MAX
    assert len(pages._reads) == heat.TRACKED_MAX


def test_with_nowhere_to_spread_nothing_is_hot() -> None:
    pages = HotPages(2, 2)
    assert [n for _ in range(9) for _, n in pages.note([KEY], 2, 0.0)] == []


def test_reads_take_turns_and_what_was_told_is_forgotten_in_time() -> None:
    hot = HotKeys()
    hot.note(KEY, 3, 0.0)
    turns = [hot.turns([OTHER, KEY], 1.0) for _ in range(6)]
    assert [turn for ((_, turn),) in turns] == [1, 2, 0, 1, 2, 0]
    assert {position for ((position, _),) in turns} == {1}
    assert hot.turns([KEY], BELIEVED_S) == []
    assert len(hot) == 0


def test_a_client_remembers_a_bounded_number_of_hot_pages() -> None:
    hot = HotKeys()
    for i in range(hot_keys.HOT_KEYS_MAX + 10):
        hot.note(PageKey(i.to_bytes(32, "little")), 2, 0.0)
    assert len(hot) == hot_keys.HOT_KEYS_MAX
    assert hot.turns([PageKey(bytes(32))], 1.0) == [], "the oldest went"
