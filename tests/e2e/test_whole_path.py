"""Claims about the whole path, with real processes and the fake model.

Every token of the fake model is a function of every KV byte before it: one wrong, stale or
misplaced byte anywhere between the prefill node, the store and the decode node changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, complete, stream, tokens_of
from tests.e2e.cluster import Cluster, running
from tests.e2e.reference import expected, prompt_of

pytestmark = [pytest.mark.net, pytest.mark.slow]

PAGE = 16
CHUNK = 512
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100, CHUNK - 1, CHUNK, CHUNK + 1, 1500]
# Slow enough that restoring a page is always cheaper than computing it, as with a real model.
DELAYS = ["--fake-token-delay", "0.0005"]
SHAPES = [("tcp", 1), ("shm", 1), ("tcp", 2), ("shm", 2)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda p: f"{p[1]}P{p[1]}D{p[1]}S-{p[0]}")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    transport, count = request.param
    directory = tmp_path_factory.mktemp("cluster")
    with running(
        directory,
        prefill=count,
        decode=count,
        store=count,
        transport=transport,
        options={"prefill": DELAYS},
    ) as started:
        yield started


def test_tokens_equal_the_reference_for_every_length(cluster: Cluster) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        assert tokens_of(complete(cluster.url, prompt, 40)) == expected(prompt, 40), length


def test_every_page_crossed_the_store(cluster: Cluster) -> None:
    prompt = prompt_of(300, seed=1)
    trace = complete(cluster.url, prompt, 8)["kvferry"]
    num_pages = -(-300 // PAGE)
    assert trace["computed_tokens"] == 300
    assert trace["pages_pulled"] == num_pages
    assert trace["pages_pushed"] >= num_pages
    assert trace["prefill_node"] != trace["decode_node"]
    assert trace["transport"] == cluster.transport


def test_a_second_time_nothing_is_computed_but_the_tail(cluster: Cluster) -> None:
    prompt = prompt_of(200, seed=2)
    first = complete(cluster.url, prompt, 8)
    again = complete(cluster.url, prompt, 8)
    assert tokens_of(again) == tokens_of(first)
    assert again["kvferry"]["computed_tokens"] <= PAGE
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 200 - again["kvferry"]["computed_tokens"]


def test_many_at_once_never_mix(cluster: Cluster) -> None:
    prompts = [prompt_of(5 + 7 * i, seed=1000 + i) for i in range(24)]

    def ask(prompt: list[int]) -> list[int]:
        return tokens_of(complete(cluster.url, prompt, 24))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [expected(prompt, 24) for prompt in prompts]


def test_sampling_depends_on_the_seed_only(cluster: Cluster) -> None:
    prompt = prompt_of(50, seed=3)
    params: dict[str, Any] = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
    answers = [tokens_of(complete(cluster.url, prompt, 30, **params)) for _ in range(2)]
    assert answers[0] == answers[1] == expected(prompt, 30, **params)


def test_a_conversation_computes_each_token_once(cluster: Cluster) -> None:
    tokens = prompt_of(70, seed=4)
    previous = 0
    for turn in range(5):
        body = complete(cluster.url, tokens, 40)
        answer = tokens_of(body)
        assert answer == expected(tokens, 40)
        new = len(tokens) - previous
        assert body["kvferry"]["computed_tokens"] <= new + PAGE, turn
        previous = len(tokens) + len(answer)
        tokens = tokens + answer + prompt_of(25, seed=400 + turn)


def test_a_stream_says_the_same_as_a_plain_answer(cluster: Cluster) -> None:
    prompt = prompt_of(64, seed=5)
    answer = Answer()
    streamed = list(stream(cluster.url, prompt, 20, answer))
    assert streamed == expected(prompt, 20)
    assert answer.done
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage["prompt_tokens"] == 64
    assert answer.usage["completion_tokens"] == 20


def test_other_salts_share_nothing(cluster: Cluster, tmp_path: Path) -> None:
    prompt = prompt_of(160, seed=6)
    for salt in ("a", "b", None):
        extra = {} if salt is None else {"cache_salt": salt}
        body = complete(cluster.url, prompt, 4, **extra)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, salt
        assert tokens_of(body) == expected(prompt, 4)
