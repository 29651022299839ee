"""News of the prefill leg: any order, any number of times, also before the request."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from decode_node.leg_news import EarlyNews, LegNews
from engine.request import FinishReason, PrefillUpdate, RequestId, TokenOut
from tests.decode_node.harness import GREEDY, S, prompt_of, rig


def update(name: str = "a", **fields: object) -> PrefillUpdate:
    return PrefillUpdate(request_id=RequestId(name), **fields)  # type: ignore[arg-type]


def yes(token: TokenOut) -> bool:
    return True


def test_repeats_are_no_news() -> None:
    news = LegNews(expected=True)
    first = update(first_token=TokenOut(index=0, token=5))
    assert news.apply(first, 1.0, yes)
    assert not news.apply(first, 2.0, yes)
    assert not news.apply(update(first_token=TokenOut(index=0, token=6)), 3.0, yes)
    assert news.first_token == TokenOut(index=0, token=5)


def test_published_counts_from_when_it_was_said_first() -> None:
    news = LegNews(expected=True)
    news.apply(update(published=True), 1.0, yes)
    news.apply(update(published=False), 2.0, yes)
    assert news.published is True
    assert news.published_s == 1.0


def test_a_first_token_after_failed_is_ignored() -> None:
    news = LegNews(expected=True)
    news.apply(update(failed=True), 1.0, yes)
    assert news.may_sample_first
    news.apply(update(first_token=TokenOut(index=0, token=5)), 2.0, yes)
    assert news.first_token is None


def test_failed_after_a_first_token_only_ends_the_pages() -> None:
    news = LegNews(expected=True)
    news.apply(update(first_token=TokenOut(index=0, token=5)), 1.0, yes)
    assert news.more_pages
    news.apply(update(failed=True), 2.0, yes)
    assert not news.more_pages
    assert not news.may_sample_first


def test_early_news_is_kept_in_order_and_given_once() -> None:
    early = EarlyNews(limit=10, ttl_s=5.0)
    sent = [update(published=True), update(failed=True), update(published=True)]
    for each in sent:
        early.add(each, 0.0)
    assert early.take(RequestId("a"), 1.0) == sent[:2]
    assert early.take(RequestId("a"), 1.0) == []
    assert len(early) == 0


def test_early_news_is_bounded_in_number_and_age() -> None:
    early = EarlyNews(limit=3, ttl_s=5.0)
    for i in range(6):
        early.add(update(f"r{i}", failed=True), float(i) / 10)
    assert len(early) == 3
    assert early.num_dropped == 3
    assert early.take(RequestId("r0"), 1.0) == []
    assert len(early.take(RequestId("r5"), 1.0)) == 1
    early.add(update("late", failed=True), 100.0)
    assert len(early) == 1
    assert early.take(RequestId("late"), 200.0) == []


def test_news_of_an_ended_leg_is_not_kept_until_another_leg_begins() -> None:
    early = EarlyNews(limit=2, ttl_s=5.0)
    early.ended(RequestId("a"), 0.0)
    assert not early.add(update(failed=True), 1.0)
    assert early.take(RequestId("a"), 1.0) == []  # a new leg begins
    assert early.add(update(failed=True), 1.0)
    assert len(early.take(RequestId("a"), 2.0)) == 1


def test_ended_legs_are_remembered_briefly_and_few() -> None:
    early = EarlyNews(limit=2, ttl_s=5.0)
    for at, name in enumerate("abc"):
        early.ended(RequestId(name), float(at))
    assert early.add(update("a"), 3.0), "the oldest went"
    assert not early.add(update("b"), 3.0)
    assert early.add(update("b"), 6.5), "too long ago"
    assert not early.add(update("c"), 6.5)


async def test_late_news_does_not_poison_a_later_leg_of_the_request() -> None:
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 5))
        prefill = r.prefill_of(request)
        events = r.events(request, expect_prefill=True)
        begun = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        await r.until(lambda: r.gauge("num_pulling") == 1)
        begun.cancel()
        await asyncio.wait([begun])
        await r.settled()
        assert not await r.tell(prefill.says(failed=True))  # of a prefill leg that was given up
        assert r.counter("num_news_late") == 1
        task = r.start(request)
        await prefill.publish()
        await r.until(lambda: r.gauge("num_pulling") == 0)
        await asyncio.sleep(0.01)
        assert not r.runner.steps, "the first token is not this leg's to make"
        await r.tell(prefill.says_first())
        assert (await task).outputs[0].index == 1


@pytest.mark.parametrize("order", list(itertools.permutations(["pages", "first", "published"])))
@pytest.mark.parametrize("num_before", [0, 1, 3])
async def test_news_may_come_in_any_order_and_before_the_request(
    order: tuple[str, ...], num_before: int
) -> None:
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 5))
        prefill = r.prefill_of(request)
        task: asyncio.Task[object] | None = None
        for i, what in enumerate(order):
            if i == num_before:
                task = r.start(request)
                await asyncio.sleep(0.01)
            if what == "pages":
                await prefill.publish()
            else:
                said = prefill.says_first() if what == "first" else prefill.says(published=True)
                assert await r.tell(said) is (task is not None)
                assert await r.tell(said) is (task is not None)
        answer = await (task or r.start(request))
        assert answer.outputs[0].index == 1  # type: ignore[attr-defined]
        assert answer.finished.computed_tokens == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("early", [True, False])
async def test_a_first_token_that_ends_the_request_finishes_it(
    given: FinishReason, early: bool
) -> None:
    async with rig() as r:
        request = r.request(prompt_of(20))
        said = update(request.request_id, first_token=TokenOut(index=0, token=65, stop=given))
        if early:
            await r.tell(said)
        task = r.start(request)
        if not early:
            await r.until(lambda: r.gauge("num_pulling") == 1)
            await r.tell(said)
        answer = await task
        assert answer.outputs == []
        assert answer.finished.reason is given
        assert not r.runner.steps


async def test_a_first_token_at_max_tokens_finishes_without_being_told() -> None:
    async with rig() as r:
        request = r.request(prompt_of(20), sampling=msgspec.structs.replace(GREEDY, max_tokens=1))
        task = r.start(request)
        await r.tell(update(request.request_id, first_token=TokenOut(index=0, token=65)))
        answer = await task
        assert answer.finished.reason is FinishReason.LENGTH


async def test_a_foreign_first_token_is_not_taken() -> None:
    async with rig() as r:
        request = r.request(prompt_of(20))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await prefill.publish()
        for wrong in (TokenOut(index=3, token=65), TokenOut(index=0, token=99999)):
            await r.tell(update(request.request_id, first_token=wrong))
        await r.tell(prefill.says_first())
        assert (await task).outputs[0].index == 1


async def test_the_node_never_makes_the_first_token_of_a_living_leg() -> None:
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 5))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await r.tell(prefill.says(published=False))  # no pages will come, but a token may
        await r.until(lambda: r.runner.num_tokens_run == 2 * S + 5)
        await asyncio.sleep(0.02)
        assert all(s.sample is None for steps in r.runner.steps for s in steps)
        await r.tell(prefill.says_first())
        answer = await task
        assert answer.outputs[0].index == 1
        assert answer.finished.computed_tokens == 2 * S + 5


@pytest.mark.parametrize("length", [S, 2 * S + 5])
async def test_a_failed_leg_lets_the_node_make_the_first_token(length: int) -> None:
    async with rig() as r:
        request = r.request(prompt_of(length))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await prefill.publish()
        await r.until(lambda: r.gauge("num_pulling") == 0)
        await asyncio.sleep(0.01)
        assert not r.runner.steps
        await r.tell(prefill.says(failed=True))
        await r.tell(prefill.says_first())  # too late: ignored
        answer = await task
        assert answer.outputs[0].index == 0
        assert answer.finished.cached_store_tokens == length
