"""Killing any node at any stage costs time, never a token (kill -9, real processes)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import Answer, complete, stream, tokens_of
from tests.e2e.cluster import POLL_S, Cluster, Proc, running
from tests.e2e.reference import expected, prompt_of

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.shared_processes]

MAX_TOKENS = 60
PAGE = 16
_DELAYS = ["--fake-token-delay", "0.002", "--fake-step-delay", "0.02"]
SLOW = {"prefill": _DELAYS, "decode": _DELAYS}
ROLES = ["store", "prefill", "decode"]


TWO_OF_EACH = {"store": 2, "prefill": 2, "decode": 2}


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("pair"), **TWO_OF_EACH, options=SLOW) as cluster:
        yield cluster


@pytest.fixture
def pair(shared_pair: Cluster) -> Iterator[Cluster]:
    """Two of each role, a model slow enough to be killed in the middle of things. What a test
    killed is started again after it."""
    yield shared_pair
    shared_pair.heal()
    shared_pair.wait_for(TWO_OF_EACH)


def busy(cluster: Cluster, role: str) -> Proc:
    """The process of ``role`` that has work now (any store: pages are spread over all)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for member in httpx.get(f"{cluster.url}/admin/cluster", timeout=5).json()["members"]:
            gauges = member["gauges"]
            active = gauges.get("num_running", 0) + gauges.get("num_waiting", 0) > 0
            if member["role"] == role and (active or role == "store"):
                return cluster.proc_of(role, member["labels"]["pid"])
        time.sleep(POLL_S)
    raise AssertionError(f"no {role} node has work")


def ask(cluster: Cluster, prompt: list[int], answer: Answer) -> list[int]:
    return list(stream(cluster.url, prompt, MAX_TOKENS, answer))


@pytest.mark.parametrize("role", ROLES)
def test_kill_while_prefilling_changes_no_token(pair: Cluster, role: str) -> None:
    prompt = prompt_of(1200, seed=10 + ROLES.index(role))
    answer = Answer()
    with ThreadPoolExecutor(1) as pool:
        future: Future[list[int]] = pool.submit(ask, pair, prompt, answer)
        busy(pair, "prefill")
        busy(pair, role).kill()
        assert not answer.tokens, "the kill came after the first token; make the model slower"
        assert future.result(timeout=60) == expected(prompt, MAX_TOKENS)
    assert answer.done
    assert answer.error is None


@pytest.mark.parametrize("role", ROLES)
def test_kill_while_transferring_changes_no_token(pair: Cluster, role: str) -> None:
    prompt = prompt_of(900, seed=20 + ROLES.index(role))
    answer = Answer()
    tokens = []
    for token in stream(pair.url, prompt, MAX_TOKENS, answer):
        tokens.append(token)
        if len(tokens) == 1:  # the first token is out, the last pages are on their way
            victims = [p for p in pair.procs.values() if p.role == role]
            victims[0].kill()
    assert tokens == expected(prompt, MAX_TOKENS)
    assert answer.done


@pytest.mark.parametrize("role", ROLES)
def test_kill_while_decoding_changes_no_token(pair: Cluster, role: str) -> None:
    prompt = prompt_of(300, seed=30 + ROLES.index(role))
    answer = Answer()
    tokens = []
    for token in stream(pair.url, prompt, MAX_TOKENS, answer):
        tokens.append(token)
        if len(tokens) == 20:
            (
                busy(pair, role)
                if role == "decode"
                else next(p for p in pair.procs.values() if p.role == role)
            ).kill()
    assert tokens == expected(prompt, MAX_TOKENS)
    assert answer.done


def test_the_last_prefill_and_store_die_and_decode_serves_alone(tmp_path: Path) -> None:
    with running(tmp_path, options=SLOW) as cluster:
        for proc in [p for p in cluster.procs.values() if p.role in ("prefill", "store")]:
            proc.kill()
        prompt = prompt_of(120, seed=4)
        body = complete(cluster.url, prompt, 30)
        assert tokens_of(body) == expected(prompt, 30)


def test_the_only_decode_node_dies_and_the_stream_goes_on_after_its_restart(
    tmp_path: Path,
) -> None:
    with running(tmp_path, options=SLOW) as cluster:
        prompt = prompt_of(100, seed=5)
        answer = Answer()
        tokens = []
        for token in stream(cluster.url, prompt, MAX_TOKENS, answer):
            tokens.append(token)
            if len(tokens) == 10:
                proc = busy(cluster, "decode")
                proc.kill()
                cluster.restart(proc)
        assert tokens == expected(prompt, MAX_TOKENS)


def test_a_restarted_gateway_finds_its_nodes_and_answers_the_same(tmp_path: Path) -> None:
    with running(tmp_path, options=SLOW) as cluster:
        prompt = prompt_of(100, seed=6)
        before = tokens_of(complete(cluster.url, prompt, 20))
        gateway = next(p for p in cluster.procs.values() if p.role == "gateway")
        gateway.kill()
        cluster.restart(gateway)
        cluster.wait_for({"store": 1, "prefill": 1, "decode": 1})
        assert tokens_of(complete(cluster.url, prompt, 20)) == before == expected(prompt, 20)


@pytest.mark.parametrize("role", ["prefill", "store"])
def test_a_frozen_node_stops_nobody(pair: Cluster, role: str) -> None:
    """SIGSTOP: nothing is closed, the peer is just silent."""
    prompt = prompt_of(400, seed=70 + ROLES.index(role))
    victim = next(p for p in pair.procs.values() if p.role == role)
    victim.signal(signal.SIGSTOP)
    body = complete(pair.url, prompt, 20)
    assert tokens_of(body) == expected(prompt, 20)


def test_drained_nodes_fail_no_request(pair: Cluster) -> None:
    """SIGTERM to one node of each role while requests run: they finish or move."""
    prompts = [prompt_of(60 + 10 * i, seed=800 + i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, pair, prompt, Answer()) for prompt in prompts]
        leaving = [
            busy(pair, "decode"),
            pair.proc_of("prefill"),
            pair.proc_of("store"),
        ]
        for proc in leaving:
            proc.signal(signal.SIGTERM)
        answers = [future.result(timeout=90) for future in futures]
    assert answers == [expected(prompt, MAX_TOKENS) for prompt in prompts]
    assert [proc.popen.wait(timeout=60) for proc in leaving] == [0, 0, 0]


def test_a_conversation_that_moves_to_another_prefill_node_computes_nothing_twice(
    pair: Cluster,
) -> None:
    """The node that served a turn dies before the next one: the store has what it computed."""
    tokens = prompt_of(150, seed=90)
    previous = 0
    nodes = set()
    for turn in range(3):
        body = complete(pair.url, tokens, 20)
        answer = tokens_of(body)
        trace = body["kvferry"]
        assert answer == expected(tokens, 20)
        assert trace["computed_tokens"] <= len(tokens) - previous + PAGE, (turn, trace)
        nodes.add(trace["prefill_node"])
        pair.proc_of("prefill", pair.pid_of(trace["prefill_node"])).kill()
        pair.heal()
        pair.wait_for(TWO_OF_EACH)
        previous = len(tokens) + len(answer)
        tokens = tokens + answer + prompt_of(20, seed=900 + turn)
    assert len(nodes) == 3
