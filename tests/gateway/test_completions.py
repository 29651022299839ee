"""Claims about ``/v1/completions``: every option, streamed or not, as OpenAI clients expect."""

from __future__ import annotations

import asyncio

import pytest

from engine.request import TokenOut
from tests.gateway.fake_node import EOS, Fault, alphabet_reply, text_reply
from tests.gateway.fakes import FakeCluster, wait_for
from tests.gateway.http import COMPLETIONS, door
from transfer.errors import PeerLost, RemoteFailed


def text_of(prompt: str, count: int) -> str:
    return bytes(alphabet_reply([256, *prompt.encode()])[:count]).decode()


async def test_the_default_is_sixteen_tokens() -> None:
    async with door() as d:
        body = await d.complete("hello")
        (choice,) = body["choices"]
        assert choice["text"] == text_of("hello", 16)
        assert choice["finish_reason"] == "length"
        assert body["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 16,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert (body["object"], body["model"], body["created"]) == (
            "text_completion",
            "fake",
            1_700_000_000,
        )


async def test_a_stream_says_the_same_and_ends_with_done() -> None:
    async with door() as d:
        whole = await d.complete("hello")
        events = await d.stream(COMPLETIONS, {"prompt": "hello"})
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons == [None] * 15 + ["length"]
        assert len({c["id"] for c in chunks}) == 1
        assert all("usage" not in c and "kvferry" not in c for c in chunks)


async def test_include_usage_adds_one_last_chunk_without_choices() -> None:
    async with door() as d:
        d.cluster.p().cached_local = 4
        body = {"prompt": "hello", "max_tokens": 3, "stream_options": {"include_usage": True}}
        events = await d.stream(COMPLETIONS, body)
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 3
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert all(c["usage"] is None for c in events[:-2])


async def test_max_tokens_one_gives_exactly_one_token() -> None:
    async with door() as d:
        body = await d.complete("hello", max_tokens=1)
        assert body["choices"][0]["text"] == text_of("hello", 1)
        assert body["usage"]["completion_tokens"] == 1
        events = await d.stream(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == ["length"]
        assert d.cluster.d().requests == []


async def test_first_token_eos_is_one_finish_chunk_with_empty_text() -> None:
    async with door(FakeCluster(reply=lambda prompt: [EOS])) as d:
        events = await d.stream(COMPLETIONS, {"prompt": "hello"})
        assert len(events) == 2
        assert events[0]["choices"][0]["text"] == ""
        assert events[0]["choices"][0]["finish_reason"] == "stop"
        assert events[1] == "[DONE]"
        body = await d.complete("hello")
        assert body["choices"][0]["text"] == ""
        assert body["usage"]["completion_tokens"] == 1


async def test_ignore_eos_continues() -> None:
    async with door(FakeCluster(reply=lambda prompt: [EOS, 65, 66, 67])) as d:
        body = await d.complete("hello", ignore_eos=True, max_tokens=4)
        assert body["choices"][0]["text"] == "ABC"
        assert body["choices"][0]["finish_reason"] == "length"


async def test_stop_token_ids_end_without_their_text() -> None:
    async with door(FakeCluster(reply=text_reply("abcdef"))) as d:
        body = await d.complete("x", stop_token_ids=[ord("c")])
        assert body["choices"][0]["text"] == "ab"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == ord("c")
        body = await d.complete("x", stop_token_ids=[ord("c")], include_stop_str_in_output=True)
        assert body["choices"][0]["text"] == "abc"


async def test_a_stop_string_cuts_the_text_and_stops_decode() -> None:
    async with door(FakeCluster(reply=text_reply("one two three four"))) as d:
        body = await d.complete("x", max_tokens=100, stop=["three", "zzz"])
        assert body["choices"][0]["text"] == "one two "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == "three"
        await asyncio.sleep(0)
        assert d.cluster.d().open_streams == []
        events = await d.stream(COMPLETIONS, {"prompt": "x", "max_tokens": 100, "stop": "three"})
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "one two "


async def test_cached_tokens_are_known_when_a_stop_string_ends_the_text() -> None:
    cluster = FakeCluster(num_prefill=0, reply=text_reply("one two three four"))
    cluster.d().cached_store = 1
    async with door(cluster) as d:
        body = await d.complete("x", max_tokens=100, stop="two")
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        fields = {"stop": "two", "max_tokens": 100, "stream_options": {"include_usage": True}}
        events = await d.stream(COMPLETIONS, {"prompt": "x", **fields})
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert d.cluster.dispatcher.stats.finished == 2, "a stop string is an end like any other"
        assert d.cluster.dispatcher.stats.cancelled == 0


async def test_a_stop_string_does_not_cut_the_pages_that_prefill_pushes() -> None:
    async with door(FakeCluster(reply=text_reply("one two three four"))) as d:
        prefill, decode = d.cluster.p(), d.cluster.d()
        prefill.push_gate.clear()
        body = await d.complete("x", max_tokens=100, stop="two")
        assert body["choices"][0]["stop_reason"] == "two"
        assert body["usage"]["completion_tokens"] == len("one two")
        await wait_for(lambda: not decode.open_streams)
        assert len(prefill.open_streams) == 1, "the push goes on without the client"
        prefill.push_gate.set()
        await wait_for(lambda: not prefill.open_streams)


async def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    async with door(FakeCluster(reply=text_reply("one tw"))) as d:
        body = await d.complete("x", max_tokens=50, stop="two")
        assert body["choices"][0]["text"] == "one tw"
        assert body["choices"][0]["stop_reason"] is None
        body = await d.complete("x", max_tokens=5, stop="two")
        assert body["choices"][0]["text"] == "one t"
        events = await d.stream(COMPLETIONS, {"prompt": "x", "stop": "two"})
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "one tw"


async def test_the_stop_string_is_shown_on_request() -> None:
    async with door(FakeCluster(reply=text_reply("one two three"))) as d:
        body = await d.complete("x", max_tokens=50, stop="two", include_stop_str_in_output=True)
        assert body["choices"][0]["text"] == "one two"


async def test_multi_byte_characters_are_never_broken_in_a_stream() -> None:
    text = "naïve 日本 🎉 ok"
    async with door(FakeCluster(reply=text_reply(text))) as d:
        events = await d.stream(COMPLETIONS, {"prompt": "x", "max_tokens": 100})
        pieces = [e["choices"][0]["text"] for e in events[:-1]]
        assert "".join(pieces) == text
        assert not any("�" in piece for piece in pieces)


async def test_n_gives_n_choices_with_server_ids_and_seeds_in_a_row() -> None:
    async with door() as d:
        body = await d.complete("hello", n=3, seed=40, max_tokens=4)
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        requests = d.cluster.p().requests
        assert sorted(r.sampling.seed for r in requests) == [40, 41, 42]
        assert len({r.request_id for r in requests}) == 3
        assert all(r.request_id.startswith(body["id"]) for r in requests)
        assert body["usage"]["prompt_tokens"] == 6
        assert body["usage"]["completion_tokens"] == 12


async def test_cached_tokens_of_n_choices_count_the_prompt_once() -> None:
    async with door() as d:
        d.cluster.p().cached_local, d.cluster.p().cached_store = 3, 2
        body = await d.complete("hello", n=3)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


async def test_cached_tokens_never_exceed_the_prompt() -> None:
    async with door(FakeCluster(num_prefill=0)) as d:
        d.cluster.d().cached_store = 1000
        body = await d.complete("hello")
        usage = body["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


async def test_a_list_of_prompts_gives_choices_in_prompt_order() -> None:
    async with door() as d:
        body = await d.complete(["a", "bc", "d"], n=2, max_tokens=3)
        assert [c["index"] for c in body["choices"]] == list(range(6))
        expected = [text_of(p, 3) for p in ("a", "a", "bc", "bc", "d", "d")]
        assert [c["text"] for c in body["choices"]] == expected
        assert body["usage"]["prompt_tokens"] == 2 + 3 + 2


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4]]])
async def test_token_prompts_are_taken_as_they_are(prompt: list[int]) -> None:
    async with door() as d:
        body = await d.complete(prompt, max_tokens=2, return_token_ids=True)
        first = body["choices"][0]
        assert first["prompt_token_ids"] == [1, 2, 3]
        assert first["token_ids"] == alphabet_reply([1, 2, 3])[:2]


async def test_token_ids_of_a_stream_are_complete() -> None:
    async with door(FakeCluster(reply=text_reply("日本"))) as d:
        events = await d.stream(
            COMPLETIONS, {"prompt": [1, 2], "max_tokens": 50, "return_token_ids": True}
        )
        ids = [t for e in events[:-1] for t in e["choices"][0]["token_ids"]]
        assert ids == [*"日本".encode(), EOS]
        assert events[0]["choices"][0]["prompt_token_ids"] == [1, 2]
        assert "prompt_token_ids" not in events[1]["choices"][0]


async def test_logprobs_have_one_entry_per_token() -> None:
    async with door(FakeCluster(reply=text_reply("abc"))) as d:
        body = await d.complete("x", logprobs=2, max_tokens=3)
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c"]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["text_offset"] == [0, 1, 2]
        assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
        events = await d.stream(COMPLETIONS, {"prompt": "x", "logprobs": 0, "max_tokens": 3})
        assert [t for e in events[:-1] for t in e["choices"][0]["logprobs"]["tokens"]] == [
            "a",
            "b",
            "c",
        ]


@pytest.mark.parametrize("prompt", ["hello", [104, 105]])
async def test_echo_puts_the_prompt_before_the_text(prompt: str | list[int]) -> None:
    shown = prompt if isinstance(prompt, str) else "hi"
    async with door(FakeCluster(reply=text_reply("!"))) as d:
        body = await d.complete(prompt, echo=True)
        assert body["choices"][0]["text"] == shown + "!"
        events = await d.stream(COMPLETIONS, {"prompt": prompt, "echo": True})
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == shown + "!"


async def test_every_sampling_field_reaches_the_nodes() -> None:
    async with door() as d:
        await d.complete(
            "x",
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            seed=3,
            min_tokens=2,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logit_bias={"65": 2},
            stop_token_ids=[1],
            cache_salt="tenant",
        )
        (request,) = d.cluster.p().requests
        params = request.sampling
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
        assert (params.seed, params.min_tokens, params.stop_token_ids) == (3, 2, (1,))
        assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
        assert (params.repetition_penalty, params.logit_bias) == (1.1, {65: 2.0})
        assert request.cache_salt == "tenant"


async def test_without_a_seed_each_request_gets_its_own() -> None:
    async with door() as d:
        await d.complete("x")
        await d.complete("x")
        first, second = d.cluster.p().requests
        assert first.sampling.seed != second.sampling.seed
        assert first.request_id != second.request_id


async def test_harmless_fields_and_nulls_are_accepted() -> None:
    async with door() as d:
        await d.complete("x", user="me", metadata={"a": "b"}, store=True, top_k=-1, stop=None)
        await d.complete("x", best_of=1, n=1, temperature=None, suffix=None)


async def test_the_trace_is_in_the_response_and_in_the_last_chunk() -> None:
    async with door() as d:
        d.cluster.p().cached_store = 2
        response = await d.post(COMPLETIONS, {"prompt": "hello"}, **{"x-kvferry-trace": "1"})
        trace = response.json()["kvferry"]
        assert (trace["prefill_node"], trace["decode_node"]) == ("p0", "d0")
        assert trace["cached_tokens"] == {"local": 0, "store": 2}
        assert trace["computed_tokens"] == 4
        assert (trace["pages_pushed"], trace["pages_pulled"]) == (3, 3)
        assert trace["ttft_s"] > 0
        assert {"transport", "bytes_pushed", "bytes_pulled", "transfer_s"} <= trace.keys()
        events = await d.stream(COMPLETIONS, {"prompt": "hello"}, **{"x-kvferry-trace": "1"})
        assert events[-2]["kvferry"]["prefill_node"] == "p0"
        assert events[-2]["choices"] == []


async def test_prefill_and_decode_failures_do_not_show() -> None:
    async with door(FakeCluster(num_prefill=2, num_decode=2)) as d:
        for node in d.cluster.nodes.values():
            node.faults = [Fault(0, PeerLost("gone"))]
        body = await d.complete("hello")
        assert body["choices"][0]["text"] == text_of("hello", 16)


async def test_an_error_after_the_start_is_an_error_event() -> None:
    async with door() as d:
        bug = RemoteFailed("internal", "bug")
        d.cluster.d().faults = [Fault(3, bug)] + [Fault(1, bug)] * 20
        events = await d.stream(COMPLETIONS, {"prompt": "hello"})
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "generation_failed"
        assert "".join(e["choices"][0]["text"] for e in events[:-2]) == text_of("hello", 3)


async def test_tokens_that_arrive_are_not_mixed_between_256_concurrent_requests() -> None:
    async with door(FakeCluster(num_prefill=2, num_decode=2)) as d:
        prompts = [f"marker {at}" for at in range(256)]
        bodies = await asyncio.gather(*(d.complete(p, max_tokens=6) for p in prompts))
        assert [b["choices"][0]["text"] for b in bodies] == [text_of(p, 6) for p in prompts]


async def test_top_logprobs_never_lack_the_chosen_token() -> None:
    from gateway.completions import LogprobsBuilder
    from gateway.tokenizer import ByteTokenizer

    output = TokenOut(index=0, token=65, logprob=-3.0, top_logprobs=((66, -0.1),))
    built = LogprobsBuilder(ByteTokenizer(), 5).build([output])
    assert built.top_logprobs == [{"B": -0.1, "A": -3.0}]
    assert built.text_offset == [5]
