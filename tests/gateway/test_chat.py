"""Claims about ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.fake_node import EOS, MAX_MODEL_LEN, text_reply, unpacked
from tests.gateway.fakes import FakeCluster
from tests.gateway.http import CHAT, door

USER = [{"role": "user", "content": "hi"}]


async def test_the_answer_is_a_message_of_the_assistant() -> None:
    async with door(FakeCluster(reply=text_reply("fine, thanks"))) as d:
        body = await d.chat("how are you?")
        (choice,) = body["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "fine, thanks",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        assert body["object"] == "chat.completion"
        prompt = bytes(unpacked(d.cluster.p().requests[0].prompt)).decode()
        assert prompt == "user: how are you?\nassistant:"


async def test_a_stream_is_role_content_finish_done() -> None:
    async with door(FakeCluster(reply=text_reply("abc"))) as d:
        events = await d.stream(CHAT, {"messages": USER})
        deltas = [e["choices"][0]["delta"] for e in events[:-1]]
        assert deltas == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
            {"content": "b"},
            {"content": "c"},
            {},
        ]
        reasons = [e["choices"][0]["finish_reason"] for e in events[:-1]]
        assert reasons == [None] * 4 + ["stop"]
        assert events[-1] == "[DONE]"
        assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}


async def test_first_token_eos_is_one_finish_chunk() -> None:
    async with door(FakeCluster(reply=lambda prompt: [EOS])) as d:
        events = await d.stream(CHAT, {"messages": USER})
        assert [e["choices"][0]["delta"] for e in events[:-1]] == [
            {"role": "assistant", "content": ""},
            {},
        ]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_usage_and_trace_come_last() -> None:
    async with door() as d:
        body = {"messages": USER, "max_tokens": 2, "stream_options": {"include_usage": True}}
        events = await d.stream(CHAT, body, **{"x-kvferry-trace": "1"})
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 2
        assert events[-2]["kvferry"]["decode_node"] == "d0"
        assert all(e["usage"] is None for e in events[:-2])


async def test_the_default_length_is_the_room_that_is_left() -> None:
    async with door(FakeCluster(reply=text_reply("x"))) as d:
        body = await d.chat("hi")
        sampling = d.cluster.p().requests[0].sampling
        assert sampling.max_tokens == MAX_MODEL_LEN - body["usage"]["prompt_tokens"]
        await d.chat("hi", max_tokens=5)
        await d.chat("hi", max_completion_tokens=6, max_tokens=5)
        assert [r.sampling.max_tokens for r in d.cluster.p().requests[1:]] == [5, 6]


async def test_text_parts_are_joined() -> None:
    async with door() as d:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await d.chat(parts, max_tokens=1)
        prompt = bytes(unpacked(d.cluster.p().requests[0].prompt)).decode()
        assert prompt == "user: a\nb\nassistant:"


async def test_logprobs_carry_bytes_and_alternatives() -> None:
    async with door(FakeCluster(reply=text_reply("é"))) as d:
        body = await d.chat(logprobs=True, top_logprobs=1, max_tokens=2)
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
        assert content[0]["top_logprobs"][0]["logprob"] == -0.5
        events = await d.stream(CHAT, {"messages": USER, "logprobs": True, "max_tokens": 2})
        streamed = [
            entry
            for e in events[:-1]
            for entry in (e["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert [entry["bytes"] for entry in streamed] == [[0xC3], [0xA9]]
        assert streamed[0]["top_logprobs"] == []


async def test_token_ids_are_at_the_places_vllm_puts_them() -> None:
    async with door(FakeCluster(reply=text_reply("ab"))) as d:
        body = await d.chat("hi", return_token_ids=True)
        assert body["choices"][0]["token_ids"] == [97, 98, EOS]
        assert bytes(body["prompt_token_ids"]).decode() == "user: hi\nassistant:"
        events = await d.stream(CHAT, {"messages": USER, "return_token_ids": True})
        assert "prompt_token_ids" in events[0]
        ids = [t for e in events[:-1] for t in e["choices"][0].get("token_ids", [])]
        assert ids == [97, 98, EOS]


async def test_n_choices_each_begin_and_end_once_in_a_stream() -> None:
    async with door(FakeCluster(reply=text_reply("abc"))) as d:
        events = await d.stream(CHAT, {"messages": USER, "n": 3})
        for index in range(3):
            own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in own) == "abc"
            assert [c["finish_reason"] for c in own].count("stop") == 1


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": ["x"]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
    ),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
async def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with door() as d:
        response = await d.post(CHAT, {"messages": USER, **fields})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert d.cluster.p().requests == d.cluster.d().requests == []


async def test_fields_without_effect_are_accepted() -> None:
    async with door() as d:
        await d.chat(
            "hi",
            max_tokens=2,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            modalities=["text"],
            parallel_tool_calls=True,
            reasoning_effort="low",
            user="me",
        )


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    async with door() as d:
        response = await d.post(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "messages"
