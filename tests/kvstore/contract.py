"""The contract of every page store back end. Subclass ``PageStoreContract`` and give ``stores``.

``stores`` yields a ``Stores``: a factory of clients that share one store, and a transfer to
allocate regions with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from kvstore.page import PageKey
from kvstore.store import (
    GetOutcome,
    GetPage,
    PageIdentity,
    PageState,
    PageStore,
    PutOutcome,
    PutPage,
)
from kvstore.verify import DEPTH_MAX
from tests.kvstore.pages import SPEC, empty, filled, holds, sequence
from transfer.interface import Transfer, deadline_after

NUM_CLIENT_OPS = 256
NO_PAGES: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": b""},
    "half a token": {"tokens": b"abc"},
    "more tokens than a page has": {"tokens": bytes(4 * (SPEC.page_size + 1))},
    "key too short": {"key": b"k" * 31},
    "key too long": {"key": b"k" * 33},
    "no parent": {"parent": b""},
    "before the first": {"depth": -1},
    "too deep": {"depth": DEPTH_MAX},
    "text for tokens": {"tokens": "abcd"},
    "text for a parent": {"parent": "p" * 32},
    "key of nothing": {"key": None},
    "half a depth": {"depth": 0.5},
    "its own parent": {"key": b"k" * 32, "parent": b"k" * 32},
}


class Stores(NamedTuple):
    """One store, as its users see it."""

    open: Callable[[], Awaitable[PageStore]]
    transfer: Transfer


async def _asking(
    stores: Stores, pages: list[PageIdentity], deadline_s: float
) -> list[Callable[[], Awaitable[Any]]]:
    """A put, a get, a get that waits, and a match of these pages."""
    store = await stores.open()
    region = stores.transfer.allocate(len(pages) * SPEC.page_nbytes)
    puts = [PutPage(page, i * SPEC.page_nbytes) for i, page in enumerate(pages)]
    gets = [GetPage(*page) for page in puts]
    return [
        lambda: store.put(puts, source=region, deadline_s=deadline_s),
        lambda: store.get(gets, into=region, deadline_s=deadline_s),
        lambda: store.get(gets, into=region, deadline_s=deadline_s, wait=True),
        lambda: store.match([page.key for page in pages], deadline_s=deadline_s),
    ]


async def put_all(stores: Stores, store: PageStore, tokens: list[int] | range) -> list[PutOutcome]:
    region, puts = filled(stores.transfer, sequence(tokens))
    result = await store.put(puts, source=region, deadline_s=deadline_after(20))
    return result.outcomes


class PageStoreContract:
    """Claims that hold for any back end."""

    async def test_an_empty_store_has_nothing(self, stores: Stores) -> None:
        store = await stores.open()
        pages = sequence(range(10))
        keys = [page.key for page in pages]
        assert await store.match(keys, deadline_s=deadline_after(5)) == [PageState.ABSENT] * 3
        region, gets = empty(stores.transfer, pages)
        result = await store.get(gets, into=region, deadline_s=deadline_after(5))
        assert result.outcomes == [GetOutcome.ABSENT] * 3
        assert result.moved == (0, 0)

    async def test_no_pages_is_no_work(self, stores: Stores) -> None:
        store = await stores.open()
        region, _ = empty(stores.transfer, [])
        assert await store.match([], deadline_s=deadline_after(5)) == []
        put = await store.put([], source=region, deadline_s=deadline_after(5))
        get = await store.get([], into=region, deadline_s=deadline_after(5), wait=True)
        assert (put.outcomes, get.outcomes) == ([], [])

    @pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 33, 64])
    async def test_what_was_put_comes_back_byte_for_byte(
        self, stores: Stores, num_tokens: int
    ) -> None:
        writer, reader = await stores.open(), await stores.open()
        pages = sequence(range(num_tokens))
        source, puts = filled(stores.transfer, pages)
        put = await writer.put(puts, source=source, deadline_s=deadline_after(5))
        assert put.outcomes == [PutOutcome.STORED] * len(pages)
        assert put.moved == (len(pages), len(pages) * SPEC.page_nbytes)
        into, gets = empty(stores.transfer, pages)
        seen: dict[int, GetOutcome] = {}
        get = await reader.get(
            gets, into=into, deadline_s=deadline_after(5), on_page=seen.__setitem__
        )
        assert get.outcomes == [GetOutcome.READ] * len(pages)
        assert get.moved == put.moved
        assert seen == dict(enumerate(get.outcomes))
        assert all(holds(into, page) for page in gets)

    async def test_pages_land_at_the_offsets_asked_for_and_nowhere_else(
        self, stores: Stores
    ) -> None:
        store = await stores.open()
        pages = sequence(range(12))
        await put_all(stores, store, range(12))
        region = stores.transfer.allocate(9 * SPEC.page_nbytes)
        region.view[:] = b"\xee" * region.nbytes
        _, gets = empty(stores.transfer, pages)
        places = [7, 1, 4]
        moved = [
            g._replace(local_offset=p * SPEC.page_nbytes) for g, p in zip(gets, places, strict=True)
        ]
        result = await store.get(moved, into=region, deadline_s=deadline_after(5))
        assert result.outcomes == [GetOutcome.READ] * 3
        assert all(holds(region, page) for page in moved)
        for place in range(9):
            if place not in places:
                start = place * SPEC.page_nbytes
                untouched = bytes(region.view[start : start + SPEC.page_nbytes])
                assert untouched == b"\xee" * SPEC.page_nbytes

    async def test_match_finds_exactly_the_prefix_that_is_there(self, stores: Stores) -> None:
        store = await stores.open()
        await put_all(stores, store, range(8))
        keys = [page.key for page in sequence([*range(8), 90, 91, 92, 93, 94])]
        states = await store.match(keys, deadline_s=deadline_after(5))
        assert states == [PageState.READY] * 2 + [PageState.ABSENT] * 2

    async def test_a_middle_page_does_not_match_without_its_prefix(self, stores: Stores) -> None:
        store = await stores.open()
        shared = [50, 51, 52, 53]
        await put_all(stores, store, [1, 2, 3, 4, *shared])
        keys = [page.key for page in sequence([9, 9, 9, 9, *shared])]
        assert await store.match(keys, deadline_s=deadline_after(5)) == [PageState.ABSENT] * 2

    async def test_a_present_page_moves_nothing(self, stores: Stores) -> None:
        store = await stores.open()
        await put_all(stores, store, range(8))
        source, puts = filled(stores.transfer, sequence(range(12)))
        result = await store.put(puts, source=source, deadline_s=deadline_after(5))
        assert result.outcomes == [PutOutcome.PRESENT, PutOutcome.PRESENT, PutOutcome.STORED]
        assert result.moved == (1, SPEC.page_nbytes)

    async def test_concurrent_writers_of_one_key_move_it_once(self, stores: Stores) -> None:
        writers = [await stores.open() for _ in range(4)]
        source, puts = filled(stores.transfer, sequence(range(12)))
        results = await asyncio.gather(
            *(w.put(puts, source=source, deadline_s=deadline_after(5)) for w in writers)
        )
        for i in range(3):
            outcomes = sorted(result.outcomes[i] for result in results)
            assert outcomes == [PutOutcome.PRESENT] * 3 + [PutOutcome.STORED]
        assert sum(result.moved.num_pages for result in results) == 3

    async def test_the_same_page_twice_in_one_put_is_written_once(self, stores: Stores) -> None:
        store = await stores.open()
        source, puts = filled(stores.transfer, sequence(range(4)))
        result = await store.put([*puts, *puts], source=source, deadline_s=deadline_after(5))
        assert result.outcomes[0] is PutOutcome.STORED
        assert result.outcomes[1] in (PutOutcome.PRESENT, PutOutcome.STORED)
        assert result.moved.num_pages == 1

    async def test_the_same_page_twice_in_one_get_is_read_twice(self, stores: Stores) -> None:
        store = await stores.open()
        await put_all(stores, store, range(4))
        pages = sequence(range(4)) * 2
        into, gets = empty(stores.transfer, pages)
        result = await store.get(gets, into=into, deadline_s=deadline_after(5), wait=True)
        assert result.outcomes == [GetOutcome.READ] * 2
        assert all(holds(into, page) for page in gets)

    async def test_a_waiting_get_is_answered_as_pages_are_committed(self, stores: Stores) -> None:
        writer, reader = await stores.open(), await stores.open()
        pages = sequence(range(12))
        into, gets = empty(stores.transfer, pages)
        arrived = [asyncio.Event() for _ in pages]
        order: list[int] = []

        def on_page(i: int, outcome: GetOutcome) -> None:
            assert outcome is GetOutcome.READ
            order.append(i)
            arrived[i].set()

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            getting = tasks.create_task(
                reader.get(
                    gets, into=into, deadline_s=deadline_after(9), wait=True, on_page=on_page
                )
            )
            for i in range(len(pages)):  # each page is seen before the next is written
                await put_all(stores, writer, range(4 * i + 4))
                await arrived[i].wait()
                assert holds(into, gets[i])
                assert getting.done() is False or i == len(pages) - 1
        assert order == [0, 1, 2]
        assert getting.result().outcomes == [GetOutcome.READ] * 3

    async def test_a_waiting_get_ends_at_its_deadline(self, stores: Stores) -> None:
        store = await stores.open()
        await put_all(stores, store, range(4))
        into, gets = empty(stores.transfer, sequence(range(8)))
        started_s = asyncio.get_running_loop().time()
        result = await store.get(gets, into=into, deadline_s=started_s + 0.3, wait=True)
        took_s = asyncio.get_running_loop().time() - started_s
        assert result.outcomes == [GetOutcome.READ, GetOutcome.ABSENT]
        assert 0.1 < took_s < 1.0

    async def test_a_deadline_that_has_passed_moves_nothing(self, stores: Stores) -> None:
        store = await stores.open()
        await put_all(stores, store, range(4))
        past_s = asyncio.get_running_loop().time() - 1
        pages = sequence(range(100, 104))
        source, puts = filled(stores.transfer, pages)
        put = await store.put(puts, source=source, deadline_s=past_s)
        assert put.outcomes == [PutOutcome.FAILED]
        into, gets = empty(stores.transfer, pages)
        get = await store.get(gets, into=into, deadline_s=past_s, wait=True)
        assert get.outcomes == [GetOutcome.ABSENT]

    async def test_a_cancelled_get_leaves_the_destination_alone(self, stores: Stores) -> None:
        writer, reader = await stores.open(), await stores.open()
        into, gets = empty(stores.transfer, sequence(range(8)))
        getting = asyncio.ensure_future(
            reader.get(gets, into=into, deadline_s=deadline_after(30), wait=True)
        )
        await asyncio.sleep(0.05)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        await put_all(stores, writer, range(8))
        assert bytes(into.view) == bytes(into.nbytes)
        result = await reader.get(gets, into=into, deadline_s=deadline_after(5))
        assert result.outcomes == [GetOutcome.READ] * 2

    async def test_a_page_of_other_tokens_under_the_same_key_is_a_miss(
        self, stores: Stores
    ) -> None:
        store = await stores.open()
        await put_all(stores, store, range(4))
        page = sequence(range(4))[0]
        forged = msgspec.structs.replace(page, tokens=b"\7\0\0\0" * 4)
        into, gets = empty(stores.transfer, [forged])
        got = await store.get(gets, into=into, deadline_s=deadline_after(5))
        assert got.outcomes == [GetOutcome.CORRUPT]
        source, puts = filled(stores.transfer, [forged])
        put = await store.put(puts, source=source, deadline_s=deadline_after(5))
        assert put.outcomes == [PutOutcome.REFUSED]
        into, gets = empty(stores.transfer, [page])
        got = await store.get(gets, into=into, deadline_s=deadline_after(5))
        assert got.outcomes == [GetOutcome.READ], "the collision harmed the page that was there"

    async def test_many_clients_at_once_never_get_each_others_bytes(self, stores: Stores) -> None:
        clients = [await stores.open() for _ in range(8)]

        async def use(number: int) -> None:
            mine = [number * 1000 + i for i in range(6)]
            writer, reader = clients[number % 8], clients[(number + 1) % 8]
            pages = sequence(mine)
            into, gets = empty(stores.transfer, pages)
            async with asyncio.TaskGroup() as tasks:
                putting = tasks.create_task(put_all(stores, writer, mine))
                getting = tasks.create_task(
                    reader.get(gets, into=into, deadline_s=deadline_after(20), wait=True)
                )
            assert putting.result() == [PutOutcome.STORED] * 2
            assert getting.result().outcomes == [GetOutcome.READ] * 2
            assert all(holds(into, page) for page in gets)

        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_CLIENT_OPS):
                tasks.create_task(use(number))

    @pytest.mark.parametrize("deadline_s", [math.nan, math.inf, -math.inf, None, "soon"])
    async def test_a_deadline_that_is_no_time_is_a_value_error(
        self, stores: Stores, deadline_s: Any
    ) -> None:
        with_it = await _asking(stores, sequence(range(8)), deadline_s)
        for call in with_it:
            with pytest.raises(ValueError, match=f"deadline_s={deadline_s!r}.*deadline_after"):
                await call()

    @pytest.mark.parametrize("num_good", [0, 1])
    @pytest.mark.parametrize("name", NO_PAGES)
    async def test_what_is_no_page_is_a_value_error_and_nothing_is_done(
        self, stores: Stores, name: str, num_good: int
    ) -> None:
        good, bad = sequence(range(8))
        pages = [*[good] * num_good, msgspec.structs.replace(bad, **NO_PAGES[name])]
        put, get, wait, match = await _asking(stores, pages, deadline_after(5))
        for call in put, get, wait:
            with pytest.raises(ValueError, match=rf"pages\[{num_good}\] is no page of .*key of"):
                await call()
        if name.startswith("key "):
            with pytest.raises(ValueError, match=rf"keys\[{num_good}\]="):
                await match()
        store = await stores.open()
        assert await store.match([good.key], deadline_s=deadline_after(5)) == [PageState.ABSENT]

    @pytest.mark.parametrize("offset", [0.5, None, "0"])
    async def test_a_place_that_is_no_int_is_a_value_error(
        self, stores: Stores, offset: Any
    ) -> None:
        store, page = await stores.open(), sequence(range(4))[0]
        region = stores.transfer.allocate(SPEC.page_nbytes)
        with pytest.raises(ValueError, match=f"at {offset!r}: must be an int"):
            await store.put([PutPage(page, offset)], source=region, deadline_s=deadline_after(5))
        with pytest.raises(ValueError, match=f"at {offset!r}: must be an int"):
            await store.get([GetPage(page, offset)], into=region, deadline_s=deadline_after(5))

    @pytest.mark.parametrize("num_good", [0, 1])
    @pytest.mark.parametrize("place", [-1, 1])
    async def test_a_place_outside_the_region_is_a_value_error(
        self, stores: Stores, place: int, num_good: int
    ) -> None:
        store, pages = await stores.open(), sequence(range(4 + 4 * num_good))
        source, puts = filled(stores.transfer, pages)
        into, gets = empty(stores.transfer, pages)
        offset = puts[-1].local_offset + 1 if place > 0 else place
        puts[-1] = puts[-1]._replace(local_offset=offset)
        gets[-1] = gets[-1]._replace(local_offset=offset)
        text = rf"pages\[{num_good}\] at {offset}.*the region has {source.nbytes} bytes"
        with pytest.raises(ValueError, match=text):
            await store.put(puts, source=source, deadline_s=deadline_after(5))
        with pytest.raises(ValueError, match=text):
            await store.get(gets, into=into, deadline_s=deadline_after(5))
        assert await store.match([pages[0].key], deadline_s=deadline_after(5)) == [PageState.ABSENT]

    async def test_close_may_be_repeated(self, stores: Stores) -> None:
        store = await stores.open()
        assert await store.match([PageKey(b"k" * 32)], deadline_s=deadline_after(5))
        await store.close()
        await store.close()
