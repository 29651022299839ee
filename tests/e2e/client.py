"""A streaming completions client that yields token ids as they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """Everything that one streamed completion said."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False


def body_of(
    prompt: list[int], max_tokens: int, model: str = "fake", **extra: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **extra,
    }


def complete(url: str, prompt: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
    """One completion without streaming; the whole response body."""
    response = httpx.post(
        f"{url}/v1/completions",
        json=body_of(prompt, max_tokens, **extra),
        headers={"x-kvferry-trace": "1"},
        timeout=TIMEOUT_S,
    )
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def tokens_of(body: dict[str, Any]) -> list[int]:
    tokens: list[int] = body["choices"][0]["token_ids"]
    return tokens


def stream(
    url: str, prompt: list[int], max_tokens: int, answer: Answer, **extra: Any
) -> Iterator[int]:
    """Yield token ids one by one, filling ``answer`` on the way."""
    body = body_of(prompt, max_tokens, stream=True, stream_options={"include_usage": True}, **extra)
    headers = {"x-kvferry-trace": "1"}
    with (
        httpx.Client(timeout=TIMEOUT_S) as client,
        client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.done = True
                return
            chunk = json.loads(line.removeprefix("data: "))
            answer.error = chunk.get("error") or answer.error
            answer.usage = chunk.get("usage") or answer.usage
            answer.trace = chunk.get("kvferry") or answer.trace
            for choice in chunk.get("choices", ()):
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                for token in choice.get("token_ids") or ():
                    answer.tokens.append(token)
                    yield token
