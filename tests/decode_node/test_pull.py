"""Pages that come late, partly, never or broken cost time, not tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from engine.request import FinishReason
from kvstore.page import PageKey
from kvstore.store import (
    DEFAULT_POLICY,
    GetOutcome,
    GetPage,
    GetResult,
    PageState,
    PutPage,
    PutPolicy,
    PutResult,
)
from tests.decode_node.harness import S, prompt_of, rig
from tests.kvstore.memory import MemoryStore
from transfer.interface import Region

PAGES = 5
LENGTH = (PAGES - 1) * S + 5


@pytest.mark.parametrize("expect_prefill", [True, False])
@pytest.mark.parametrize("fault", ["absent", "fail", "corrupt"])
@pytest.mark.parametrize("k", range(PAGES))
async def test_a_bad_page_k_is_recomputed_with_all_behind_it(
    k: int, fault: str, expect_prefill: bool
) -> None:
    async with rig(pull_timeout_s=0.1) as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        await prefill.publish()
        getattr(r.store.faults, f"{fault}_depths").add(k)
        task = r.start(request, expect_prefill=expect_prefill)
        if expect_prefill:
            await r.tell(prefill.says_first())
            await r.tell(prefill.says(published=True))
        answer = await task
        assert answer.finished.cached_store_tokens == k * S
        assert answer.finished.computed_tokens == LENGTH - k * S
        assert answer.finished.recomputed_pages == PAGES - k


@pytest.mark.parametrize("k", range(PAGES + 1))
async def test_a_leg_that_dies_after_k_pages_leaves_those(k: int) -> None:
    async with rig() as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await prefill.publish(range(k))
        await r.until(lambda: r.counter("num_pull_read") == k)
        await r.tell(prefill.says(failed=True))
        answer = await task
        assert answer.outputs[0].index == 0
        assert answer.finished.cached_store_tokens == min(k * S, LENGTH)


async def test_pages_published_in_reverse_order_are_all_used() -> None:
    async with rig() as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await r.tell(prefill.says_first())
        for index in reversed(range(PAGES)):
            await prefill.publish([index])
            await asyncio.sleep(0.002)
        assert (await task).finished.cached_store_tokens == LENGTH


async def test_a_page_behind_a_hole_is_not_relied_on() -> None:
    async with rig() as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        await prefill.publish([0, 2, 3, 4])
        task = r.start(request)
        await r.until(lambda: r.counter("num_pull_read") == 4)
        await r.tell(prefill.says(published=False))
        await r.tell(prefill.says_first())
        answer = await task
        assert answer.finished.cached_store_tokens == S


async def test_a_living_leg_is_waited_for_and_its_silence_ends_at_the_deadline() -> None:
    async with rig(pull_timeout_s=0.01) as r:
        request = r.request(prompt_of(LENGTH))
        stream = r.events(request, expect_prefill=True, timeout_s=0.2)
        with pytest.raises(Exception, match="deadline_exceeded"):
            async for _ in stream:
                pass
        assert not r.runner.steps, "it must not compute what a living leg computes"


async def test_published_pages_that_do_not_come_are_recomputed_after_the_timeout() -> None:
    async with rig(pull_timeout_s=0.05) as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await r.until(lambda: r.gauge("num_pulling") == 1)
        await r.tell(prefill.says_first())
        await r.tell(prefill.says(published=True))
        answer = await task
        assert answer.finished.computed_tokens == LENGTH
        assert answer.finished.pull_s >= 0.04


async def test_pages_that_were_published_long_ago_are_pulled_all_the_same() -> None:
    async with rig(num_pages=16, max_running=1, pull_timeout_s=0.2) as r:
        r.runner.gate.clear()
        first = r.start(r.request(prompt_of(S, seed=1)), expect_prefill=False)
        await r.until(r.runner.entered.is_set)
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        await prefill.publish()
        second = r.start(request)
        await r.until(lambda: r.gauge("num_waiting") == 1)
        await r.tell(prefill.says_first())
        await r.tell(prefill.says(published=True))
        await asyncio.sleep(0.25)  # in the queue for longer than pages may take
        r.runner.gate.set()
        await first
        assert (await second).finished.cached_store_tokens == LENGTH


@pytest.mark.parametrize("expect_prefill", [True, False])
async def test_without_any_store_requests_are_served(expect_prefill: bool) -> None:
    async with rig() as r:
        r.store.faults.unreachable = True
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        task = r.start(request, expect_prefill=expect_prefill)
        if expect_prefill:
            await r.tell(prefill.says_first())
        answer = await task
        assert answer.finished.computed_tokens == LENGTH
        assert answer.finished.pages_pushed == 0
        assert answer.finished.reason is FinishReason.LENGTH


async def test_recomputed_prompt_pages_go_to_the_store() -> None:
    async with rig() as r:
        request = r.request(prompt_of(LENGTH))
        prefill = r.prefill_of(request)
        await prefill.publish([0, 1])
        await r.answer(request)
        await r.settled()
        full = [identity.key for identity in prefill.identities[:-1]]
        assert [r.store.put_counts[key] for key in full] == [1] * (PAGES - 1)


async def test_requests_with_one_prompt_pull_each_full_page_once() -> None:
    async with rig() as r:
        requests = [r.request(prompt_of(LENGTH)) for _ in range(6)]
        prefills = [r.prefill_of(request) for request in requests]
        tasks = [r.start(request) for request in requests]
        await r.until(lambda: r.gauge("num_pulling") == 6)
        await prefills[0].publish()
        for prefill in prefills:
            await r.tell(prefill.says_first())
            await r.tell(prefill.says(published=True))
        answers = await asyncio.gather(*tasks)
        assert r.counter("num_pull_read") == PAGES - 1 + 6  # each its own tail page
        assert sum(a.finished.computed_tokens for a in answers) == 0
        assert sum(a.finished.pages_pulled for a in answers) == PAGES - 1 + 6


async def test_followers_take_over_when_the_one_that_pulls_is_aborted() -> None:
    async with rig() as r:
        first, second = (r.request(prompt_of(LENGTH)) for _ in range(2))
        prefill = r.prefill_of(second)
        leader = r.start(first)
        await r.until(lambda: r.gauge("num_pulling") == 1)
        follower = r.start(second)
        await r.until(lambda: r.gauge("num_pulling") == 2)
        await prefill.publish([0])
        await r.until(lambda: r.counter("num_pull_read") == 1)
        leader.cancel()
        await asyncio.wait({leader})
        await prefill.publish()
        await r.tell(prefill.says_first())
        answer = await follower
        assert answer.finished.cached_local_tokens + answer.finished.cached_store_tokens == LENGTH


async def test_a_leg_without_prefill_does_not_wait_for_the_leg_of_another() -> None:
    async with rig() as r:
        waiting, hurried = (r.request(prompt_of(LENGTH)) for _ in range(2))
        prefill = r.prefill_of(waiting)
        task = r.start(waiting)
        await r.until(lambda: r.gauge("num_pulling") == 1)
        async with asyncio.timeout(5):
            answer = await r.answer(hurried)
        assert answer.finished.computed_tokens == LENGTH
        await r.tell(prefill.says_first())
        await r.tell(prefill.says(published=False))
        await task


async def test_one_prompt_missing_everywhere_is_computed_once() -> None:
    async with rig(num_pages=200, step_tokens=32) as r:
        answers = await asyncio.gather(*(r.answer(r.request(prompt_of(8 * S))) for _ in range(5)))
        assert sum(a.finished.computed_tokens for a in answers) == 8 * S
        assert sum(a.finished.cached_local_tokens for a in answers) == 4 * 8 * S


async def test_pages_in_the_pool_are_shared_by_key() -> None:
    async with rig() as r:
        await r.answer(r.request(prompt_of(4 * S)))
        store_reads = r.counter("num_pull_read")
        longer = [*prompt_of(4 * S), *prompt_of(10, seed=9)]
        answer = await r.answer(r.request(longer))
        assert answer.finished.cached_local_tokens == 4 * S
        assert answer.finished.computed_tokens == 10
        assert r.counter("num_pull_read") == store_reads


class Stubborn:
    """Its first get delivers rubbish after it was cancelled, until it is let go."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.scribbling = asyncio.Event()
        self.let_go = asyncio.Event()
        self._armed = True

    async def match(self, keys: Sequence[PageKey], *, deadline_s: float) -> list[PageState]:
        return await self._store.match(keys, deadline_s=deadline_s)

    async def put(
        self,
        pages: Sequence[PutPage],
        *,
        source: Region,
        deadline_s: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> PutResult:
        return await self._store.put(pages, source=source, deadline_s=deadline_s, policy=policy)

    async def get(
        self,
        pages: Sequence[GetPage],
        *,
        into: Region,
        deadline_s: float,
        wait: bool = False,
        on_page: Callable[[int, GetOutcome], None] | None = None,
    ) -> GetResult:
        if self._armed:
            self._armed = False
            await self._scribble(pages, into)
        return await self._store.get(
            pages, into=into, deadline_s=deadline_s, wait=wait, on_page=on_page
        )

    async def _scribble(self, pages: Sequence[GetPage], into: Region) -> None:
        nbytes = self._store.spec.page_nbytes
        try:
            await asyncio.Event().wait()
        finally:
            self.scribbling.set()
            while not self.let_go.is_set():
                for page in pages:
                    into.view[page.local_offset : page.local_offset + nbytes] = b"\xa5" * nbytes
                await asyncio.sleep(0.001)

    async def close(self) -> None: ...


async def test_an_aborted_pull_keeps_its_pages_until_the_bytes_have_stopped() -> None:
    """A writer that is slow to stop writes into pages of an aborted request: nobody gets them."""
    made: list[Stubborn] = []

    def wrap(store: MemoryStore) -> Stubborn:
        made.append(Stubborn(store))
        return made[0]

    async with rig(num_pages=2 * PAGES + 3, wrap=wrap) as r:
        doomed = r.start(r.request(prompt_of(LENGTH)))
        await r.until(lambda: r.gauge("num_pages_in_transfer") == PAGES)
        doomed.cancel()
        await asyncio.wait({doomed})
        await made[0].scribbling.wait()
        assert r.gauge("num_pages_in_transfer") == PAGES
        await asyncio.gather(*(r.answer(r.request(prompt_of(40 + i, seed=i))) for i in range(4)))
        made[0].let_go.set()
        await r.settled()
