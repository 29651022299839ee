"""Claims about bad requests: a 4xx with an OpenAI error object, and nothing reaches a node."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.fakes import FAST, FakeCluster
from tests.gateway.http import CHAT, COMPLETIONS, RawCall, app_of, door

BAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("prompt missing", {"prompt": None}, "prompt"),
    ("prompt empty", {"prompt": ""}, "prompt"),
    ("prompt empty list", {"prompt": []}, "prompt"),
    ("prompt list of empty", {"prompt": [""]}, "prompt"),
    ("prompt list of empty list", {"prompt": [[]]}, "prompt"),
    ("prompt number", {"prompt": 5}, "prompt"),
    ("prompt mixed", {"prompt": ["a", 1]}, "prompt"),
    ("prompt bools", {"prompt": [True, False]}, "prompt"),
    ("prompt floats", {"prompt": [1.5]}, "prompt"),
    ("token too large", {"prompt": [1, 259]}, "prompt"),
    ("token negative", {"prompt": [-1]}, "prompt"),
    ("token huge", {"prompt": [[2**40]]}, "prompt"),
    ("prompt too long", {"prompt": "x" * 2048}, "prompt"),
    ("no room", {"prompt": "x" * 100, "max_tokens": 2000}, "max_tokens"),
    ("max_tokens negative", {"max_tokens": -1}, "max_tokens"),
    ("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
    ("max_tokens string", {"max_tokens": "5"}, "max_tokens"),
    ("max_tokens bool", {"max_tokens": True}, "max_tokens"),
    ("max_tokens float", {"max_tokens": 1.5}, "max_tokens"),
    ("n zero", {"n": 0}, "n"),
    ("n too large", {"n": 1000}, "n"),
    ("choices too many", {"prompt": ["a", "b"], "n": 100}, "n"),
    ("temperature negative", {"temperature": -0.1}, "temperature"),
    ("temperature string", {"temperature": "hot"}, "temperature"),
    ("top_p zero", {"top_p": 0}, "top_p"),
    ("top_p above one", {"top_p": 1.1}, "top_p"),
    ("top_k", {"top_k": -2}, "top_k"),
    ("min_p", {"min_p": 2}, "min_p"),
    ("seed float", {"seed": 0.5}, "seed"),
    ("seed too large", {"seed": 2**64}, "seed"),
    ("stop number", {"stop": 5}, "stop"),
    ("stop empty string", {"stop": ["a", ""]}, "stop"),
    ("stop too many", {"stop": ["a"] * 17}, "stop"),
    ("stop long", {"stop": "a" * 2000}, "stop"),
    ("stop ids", {"stop_token_ids": [999]}, "stop_token_ids"),
    ("logprobs many", {"logprobs": 100}, "logprobs"),
    ("logprobs bool", {"logprobs": True}, "logprobs"),
    ("echo logprobs", {"echo": True, "logprobs": 1}, "echo"),
    ("penalty", {"presence_penalty": 3}, "presence_penalty"),
    ("repetition", {"repetition_penalty": 0}, "repetition_penalty"),
    ("bias key", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("bias token", {"logit_bias": {"999": 1}}, "logit_bias"),
    ("bias value", {"logit_bias": {"1": 101}}, "logit_bias"),
    ("bias type", {"logit_bias": {"1": "a"}}, "logit_bias.1"),
    ("min above max", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("best_of", {"best_of": 3}, "best_of"),
    ("stream string", {"stream": "yes"}, "stream"),
    ("stream options", {"stream_options": {"x": 1}}, "stream_options.x"),
    ("internal id", {"request_id": "mine"}, "request_id"),
    ("internal emitted", {"emitted": [1]}, "emitted"),
    ("internal priority", {"priority": 3}, "priority"),
    ("unknown", {"frobnicate": 1}, "frobnicate"),
    ("suffix", {"suffix": "end"}, "suffix"),
    ("model type", {"model": 5}, "model"),
    ("salt empty", {"cache_salt": ""}, "cache_salt"),
]


async def check_refused(response: Any, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    return error


async def test_bad_fields_are_refused_by_name_and_reach_no_node() -> None:
    async with door() as d:
        for name, fields, param in BAD:
            for stream in (False, True):
                body = {"prompt": "hello", "stream": stream, **fields}
                response = await d.post(COMPLETIONS, body)
                error = await check_refused(response, 400, param)
                assert error["type"] == "invalid_request_error", name
                assert error["code"], name
        assert d.cluster.p().requests == d.cluster.d().requests == []
        assert d.cluster.dispatcher.stats.requests == 0


BAD_JSON = [
    b"",
    b"{",
    b"[1]",
    b'"x"',
    b"\xff\xfe",
    b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    b'{"model": "fake", "prompt": "x", "temperature": Infinity}',
    b'{"model": "fake", "prompt": "\\ud800"}',
    b"[" * 100_000,
]


async def test_bad_json_is_400() -> None:
    async with door() as d:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/admin/explain"):
            for raw in BAD_JSON:
                response = await d.client.post(path, content=raw)
                error = await check_refused(response, 400, None)
                assert error["code"] == "invalid_json", (path, raw)


async def test_numbers_beyond_floats_are_refused() -> None:
    async with door() as d:
        raw = b'{"model": "fake", "prompt": "x", "temperature": 1e999}'
        response = await d.client.post(COMPLETIONS, content=raw)
        assert response.status_code == 400


async def test_an_unknown_model_is_404_and_names_the_served_one() -> None:
    async with door(aliases=("alias",)) as d:
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{}]})):
            response = await d.post(path, {"model": "gpt-9", **body})
            error = await check_refused(response, 404, "model")
            assert error["code"] == "model_not_found"
            assert "'fake'" in error["message"]
        response = await d.client.get("/v1/models/gpt-9")
        await check_refused(response, 404, "model")
        await d.complete("x", model="alias")


async def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    async with door() as d:
        await check_refused(await d.client.get("/nowhere"), 404, None)
        await check_refused(await d.client.get(COMPLETIONS), 405, None)
        await check_refused(await d.client.post("/v1/models"), 405, None)
        await check_refused(await d.client.post(COMPLETIONS + "/"), 404, None)


async def test_a_large_body_is_413_by_its_stated_length() -> None:
    async with door(max_body_nbytes=1000) as d:
        response = await d.post(COMPLETIONS, {"prompt": "x" * 2000})
        error = await check_refused(response, 413, None)
        assert error["code"] == "body_too_large"
        assert d.cluster.p().requests == []


async def test_a_large_body_is_refused_while_it_arrives() -> None:
    cluster = FakeCluster()
    async with cluster.running():
        call = RawCall(app_of(cluster, max_body_nbytes=1000), COMPLETIONS, b"x" * 10_000, chunk=100)
        await call.run()
        assert call.status == 413
        assert call.num_parts_read == 11, "the rest is not read"


async def test_no_decode_node_is_503_with_retry_after() -> None:
    async with door(FakeCluster(num_decode=0)) as d:
        for stream in (False, True):
            response = await d.post(COMPLETIONS, {"prompt": "x", "stream": stream})
            error = await check_refused(response, 503, None)
            assert error["code"] == "no_capacity"
            assert int(response.headers["retry-after"]) >= 1


async def test_beyond_the_limit_is_429_with_retry_after() -> None:

    cluster = FakeCluster(config=FAST.model_copy(update={"requests_max": 2}))
    async with door(cluster) as d:
        response = await d.post(COMPLETIONS, {"prompt": "x", "n": 3})
        error = await check_refused(response, 429, None)
        assert error["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        assert cluster.p().requests == []


async def test_a_request_that_takes_too_long_is_504() -> None:
    async with door(request_timeout_s=0.05) as d:
        d.cluster.p().gate.clear()
        response = await d.post(COMPLETIONS, {"prompt": "x"})
        error = await check_refused(response, 504, None)
        assert error["code"] == "timeout"
        await asyncio.sleep(0)
        assert d.cluster.p().open_streams == d.cluster.d().open_streams == []


async def test_a_bug_is_500_in_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as d:

        def broken(prefix: str) -> str:
            raise RuntimeError("bug")

        monkeypatch.setattr(d.cluster.dispatcher, "new_request_id", broken)
        response = await d.post(COMPLETIONS, {"prompt": "x"})
        error = await check_refused(response, 500, None)
        assert error["code"] == "internal"
        assert "bug" not in json.dumps(error)
