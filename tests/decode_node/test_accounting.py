"""Where the KV of a prompt came from is said exactly, once, before the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from engine.request import DecodeEvent, PromptReady, TokensOut
from tests.decode_node.harness import GREEDY, S, pack, prompt_of, reference, rig


async def next_of(events: AsyncIterator[DecodeEvent]) -> DecodeEvent:
    return await anext(events)


LONG = msgspec.structs.replace(GREEDY, max_tokens=6 * S)


@pytest.mark.parametrize("expect_prefill", [False, True])
async def test_the_prompt_is_accounted_for_before_any_token_may_come(expect_prefill: bool) -> None:
    """Also while the first token is not known, or no step has ended since."""
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 3))
        prefill = r.prefill_of(request)
        await prefill.publish()
        r.runner.gate.clear()
        events = r.events(request, expect_prefill=expect_prefill)
        prompt = await anext(events)
        assert isinstance(prompt, PromptReady)
        assert (prompt.cached_store_tokens, prompt.pages_pulled) == (2 * S + 3, 3)
        assert (prompt.computed_tokens, prompt.cached_local_tokens) == (0, 0)
        r.runner.gate.set()
        if expect_prefill:
            await r.tell(prefill.says_first())
        assert isinstance(await anext(events), TokensOut)
        await events.aclose()  # type: ignore[attr-defined]


async def test_a_recomputed_prompt_is_accounted_for_without_a_first_token() -> None:
    async with rig() as r:
        request = r.request(prompt_of(2 * S + 3))
        prefill = r.prefill_of(request)
        await prefill.publish([0])
        events = r.events(request, expect_prefill=True)
        told: asyncio.Future[DecodeEvent] = asyncio.ensure_future(next_of(events))
        await r.until(lambda: r.gauge("num_pulling") == 1)
        await r.tell(prefill.says(published=False))
        prompt = await told
        assert isinstance(prompt, PromptReady)
        assert (prompt.computed_tokens, prompt.cached_store_tokens) == (S + 3, S)
        assert prompt.recomputed_pages == 2
        await events.aclose()  # type: ignore[attr-defined]


async def test_a_leg_that_goes_on_says_how_much_of_it_were_output_tokens() -> None:
    async with rig() as r:
        request = r.request(prompt_of(21), sampling=LONG)
        whole = [o.token for o in reference(request)]
        cut = 9
        rest = await r.answer(r.request(prompt_of(21), sampling=LONG, emitted=pack(whole[:cut])))
        assert rest.prompt is not None
        assert rest.prompt.computed_tokens == 21 + cut
        assert rest.prompt.computed_emitted_tokens == cut


async def test_what_a_leg_computed_before_a_retraction_is_not_cached_afterwards() -> None:
    """A prompt is half computed, pushed out, and pulled again: the leg computed it all the same."""
    async with rig(num_pages=11, head_room_tokens=0, step_tokens=S) as r:
        first = r.request(prompt_of(10), sampling=LONG)
        second = r.request(prompt_of(8 * S, seed=1))
        answers = await asyncio.gather(*(r.answer(request) for request in (first, second)))
        late = answers[1]
        assert late.prompt is not None
        assert late.finished.num_preemptions >= 1, "the scenario retracts it"
        assert late.prompt.cached_local_tokens + late.prompt.cached_store_tokens == 0
        assert late.prompt.computed_tokens == 8 * S
