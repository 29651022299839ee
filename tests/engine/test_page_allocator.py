"""Claims about page ownership: a held page is never handed out, whoever holds it."""

from __future__ import annotations

import random

import pytest

from engine.page_allocator import SCRATCH_PAGE, PageAllocator
from kvstore.page import PageId


def test_the_scratch_page_is_never_allocated() -> None:
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(3) or ()) == [1, 2, 3]
    assert allocator.refs(SCRATCH_PAGE) == 0


def test_too_many_pages_take_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.retain(pages)
    allocator.release(pages)
    assert allocator.allocate(1) is None
    allocator.release(pages)
    assert allocator.allocate(1) == pages


def test_releasing_or_retaining_a_free_page_is_our_bug() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release([PageId(1)])
    with pytest.raises(AssertionError, match="is free"):
        allocator.retain([PageId(1)])


def test_a_pool_without_pages_is_refused_by_its_value() -> None:
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1)


def test_random_histories_agree_with_counting() -> None:
    rng = random.Random(2)
    allocator = PageAllocator(12)
    held: list[PageId] = []  # one entry per reference
    for _ in range(5000):
        choice = rng.random()
        if choice < 0.4:
            count = rng.randrange(4)
            free = 11 - len(set(held))
            pages = allocator.allocate(count)
            assert (pages is None) == (count > free)
            assert not set(pages or ()) & set(held), "a held page was handed out"
            held += pages or []
        elif held and choice < 0.6:
            page = rng.choice(held)
            allocator.retain([page])
            held.append(page)
        elif held:
            page = held.pop(rng.randrange(len(held)))
            allocator.release([page])
        allocator.check()
        assert allocator.num_held == len(set(held))
