"""Tokens equal the reference, wherever the KV comes from and however long the prompt is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.fake import FAKE_EOS
from engine.request import FinishReason, SamplingParams
from tests.decode_node.harness import GREEDY, S, keys_of, pack, prompt_of, reference, rig, unpack

LENGTHS = [1, 2, S - 1, S, S + 1, 2 * S - 1, 2 * S, 2 * S + 1, 5 * S, 5 * S + 7]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("length", LENGTHS)
async def test_without_prefill_the_node_computes_everything(length: int) -> None:
    async with rig() as r:
        answer = await r.answer(r.request(prompt_of(length)))
        assert answer.outputs[0].index == 0
        assert answer.finished.computed_tokens == length
        assert answer.finished.recomputed_pages == r.store.spec.num_pages_for(length)
        assert answer.finished.cached_local_tokens == answer.finished.cached_store_tokens == 0


@pytest.mark.parametrize("length", LENGTHS)
async def test_with_prefill_nothing_is_computed_twice(length: int) -> None:
    async with rig() as r:
        request = r.request(prompt_of(length))
        prefill = r.prefill_of(request)
        task = r.start(request)
        await prefill.publish()
        await r.tell(prefill.says_first())
        await r.tell(prefill.says(published=True))
        answer = await task
        assert [o.index for o in answer.outputs] == list(range(1, GREEDY.max_tokens))
        assert answer.finished.cached_store_tokens == length
        assert answer.finished.computed_tokens == answer.finished.recomputed_pages == 0
        assert r.runner.num_tokens_run == GREEDY.max_tokens - 1


@pytest.mark.parametrize("length", [1, S, 3 * S, 3 * S + 5])
async def test_pages_in_the_store_serve_a_leg_without_prefill(length: int) -> None:
    async with rig() as r:
        request = r.request(prompt_of(length))
        await r.prefill_of(request).publish()
        answer = await r.answer(request)
        assert answer.outputs[0].index == 0
        assert answer.finished.cached_store_tokens == length
        assert answer.finished.computed_tokens == 0
        assert answer.finished.pages_pulled == r.store.spec.num_pages_for(length)
        # the last token was run again for its logits only, and not one more
        assert r.runner.num_tokens_run == GREEDY.max_tokens - 1


async def test_many_different_requests_run_in_one_batch() -> None:
    async with rig(num_pages=600) as r:
        requests = [
            r.request(
                prompt_of(1 + 7 * i, seed=i),
                sampling=msgspec.structs.replace(SAMPLED, seed=i, max_tokens=3 + i),
            )
            for i in range(40)
        ]
        await asyncio.gather(*(r.answer(request) for request in requests))
        assert max(len(steps) for steps in r.runner.steps) > 20


async def test_256_requests_keep_their_own_tokens() -> None:
    async with rig(num_pages=1200) as r:
        tasks = []
        for i in range(256):
            prompt = [*f"marker {i:04d} ".encode(), *prompt_of(i % 40, seed=i)]
            request = r.request(prompt)
            prefill = r.prefill_of(request)
            tasks.append(r.start(request))
            if i % 2:
                await r.tell(prefill.says_first())
            await prefill.publish()
            if not i % 2:
                await r.tell(prefill.says_first())
            await r.tell(prefill.says(published=True))
        answers = await asyncio.gather(*tasks)
        assert sum(a.finished.computed_tokens for a in answers) == 0


@pytest.mark.parametrize("cut", [1, 5, S, 20, 39])
@pytest.mark.parametrize("sampling", [SAMPLED, msgspec.structs.replace(SAMPLED, temperature=0.0)])
async def test_a_migrated_request_goes_on_with_the_same_tokens(
    cut: int, sampling: SamplingParams
) -> None:
    async with rig() as r:
        request = r.request(prompt_of(21), sampling=sampling)
        whole = [o.token for o in reference(request)]
        rest = r.request(prompt_of(21), sampling=sampling, emitted=pack(whole[:cut]))
        answer = await r.answer(rest)
        assert answer.outputs[0].index == cut
        assert whole[:cut] + answer.tokens == whole
        assert answer.finished.computed_tokens == 21 + cut


async def test_the_next_turn_finds_the_last_one_in_the_store() -> None:
    async with rig() as first:
        request = first.request(prompt_of(3 * S + 3))
        answer = await first.answer(request)
        assert answer.finished.pages_pushed == first.store.spec.num_pages_for(3 * S + 3 + 7)
        store = first.store
    known = unpack(request.prompt) + answer.tokens[:-1]
    async with rig(store=store) as second:
        later = await second.answer(second.request(known))
        assert later.finished.cached_store_tokens == len(known)
        assert later.finished.computed_tokens == 0


async def test_no_page_is_stored_twice() -> None:
    async with rig() as r:
        sampling = msgspec.structs.replace(GREEDY, max_tokens=3 * S)
        for _ in range(3):
            request = r.request(prompt_of(2 * S + 3), sampling=sampling)
            await r.answer(request)
        await r.settled()
        assert set(r.store.put_counts.values()) == {1}
        tokens = [*prompt_of(2 * S + 3), *(o.token for o in reference(request))][:-1]
        full = keys_of(r.store.spec, tokens)
        assert all(key in r.store.pages for key in full)


async def test_eos_stops_and_ignore_eos_does_not() -> None:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=400)
    async with rig() as r:
        request = r.request(prompt_of(5), sampling=sampling)
        answer = await r.answer(request)
        assert answer.finished.reason is FinishReason.STOP
        assert answer.tokens[-1] == FAKE_EOS
        ignoring = msgspec.structs.replace(sampling, ignore_eos=True)
        longer = await r.answer(r.request(prompt_of(5), sampling=ignoring))
        assert longer.finished.reason is FinishReason.LENGTH
        assert len(longer.outputs) == 400


async def test_the_model_length_ends_a_request() -> None:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=1000)
    async with rig(max_model_len=40) as r:
        outputs = []
        async for event in r.events(r.request(prompt_of(30), sampling=sampling)):
            outputs += getattr(event, "outputs", ())
        assert len(outputs) == 10
        assert outputs[-1].stop is FinishReason.LENGTH


async def test_one_token_is_one_token() -> None:
    async with rig() as r:
        sampling = msgspec.structs.replace(GREEDY, max_tokens=1)
        answer = await r.answer(r.request(prompt_of(2 * S), sampling=sampling))
        assert len(answer.outputs) == 1
        assert answer.finished.reason is FinishReason.LENGTH


async def test_salted_requests_share_nothing() -> None:
    async with rig() as r:
        await r.answer(r.request(prompt_of(4 * S), cache_salt="a"))
        answer = await r.answer(r.request(prompt_of(4 * S), cache_salt="b"))
        assert answer.finished.computed_tokens == 4 * S


async def test_a_step_stays_within_its_token_budget() -> None:
    async with rig(num_pages=300, step_tokens=32) as r:
        requests = [r.request(prompt_of(100 + 13 * i, seed=i)) for i in range(8)]
        await asyncio.gather(*(r.answer(request) for request in requests))
        assert max(sum(len(s.tokens) for s in steps) for steps in r.runner.steps) <= 32
