"""Claims about routing: spread, hot prefixes, cache affinity, ties, load accounting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.config import RouterConfig
from gateway.prefix_index import PrefixIndex
from gateway.router import Dispatch, Load, Query, Router
from kvstore.events import PagesStored
from kvstore.page import PageKey
from transfer.identity import NodeId

S = 16
NODES = [NodeId(f"n{i}") for i in range(4)]


def query(name: str, num_tokens: int) -> Query:
    """A prompt of its own; prompts of one name share all pages."""
    num_pages = -(-num_tokens // S)
    keys = [PageKey(f"{name}/{page}".encode()) for page in range(num_pages)]
    return Query(keys, num_tokens, S)


def shared(hot: int, own: str, num_tokens: int) -> Query:
    """``hot`` pages shared by all, the rest of its own."""
    prompt = query(own, num_tokens)
    keys = [PageKey(f"hot/{page}".encode()) for page in range(hot)]
    return Query([*keys, *list(prompt.keys)[hot:]], num_tokens, S)


def make(load: Load = "prefill") -> tuple[Router, PrefixIndex]:
    index = PrefixIndex(100_000)
    return Router(RouterConfig(), index, load), index


def holds(index: PrefixIndex, node: NodeId, prompt: Query) -> None:
    index.replace(node, prompt.keys)


@pytest.mark.parametrize("load", ["prefill", "decode"])
@pytest.mark.parametrize("num_tokens", [1, 100, 4000])
@pytest.mark.parametrize("same", [False, True])
def test_64_simultaneous_arrivals_spread_over_four_idle_nodes(
    load: Load, num_tokens: int, same: bool
) -> None:
    router, _ = make(load)
    counts: Counter[NodeId] = Counter()
    for at in range(64):
        dispatch = router.pick(query("x" if same else f"q{at}", num_tokens), NODES, 0.0)
        assert dispatch is not None
        counts[dispatch.node_id] += 1
    assert max(counts.values()) <= 1.5 * min(counts[node] for node in NODES)


@pytest.mark.parametrize("load", ["prefill", "decode"])
@pytest.mark.parametrize("in_flight", [1, 8, 64])
@pytest.mark.parametrize("pages", [4, 100])
def test_one_hot_prefix_loads_four_nodes_evenly(load: Load, in_flight: int, pages: int) -> None:
    """Open-loop simulation: each request runs 0.2 s, its pages are cached where it ran."""
    router, index = make(load)
    for node in NODES:
        holds(index, node, Query([], 0, S))
    holds(index, NODES[0], shared(pages, "first", pages * S))
    running: list[tuple[float, Dispatch]] = []
    counts: Counter[NodeId] = Counter()
    now_s = 0.0
    for at in range(400):
        now_s += 0.2 / in_flight
        for ends_s, done in [entry for entry in running if entry[0] <= now_s]:
            running.remove((ends_s, done))
            router.ended(done, now_s)
            index.apply(done.node_id, [PagesStored(done.keys)])
        dispatch = router.pick(shared(pages, f"q{at}", pages * S + 20), NODES, now_s)
        assert dispatch is not None
        counts[dispatch.node_id] += 1
        running.append((now_s + 0.2, dispatch))
    assert max(counts.values()) <= 1.5 * min(counts[node] for node in NODES), counts


def test_a_cached_prefix_attracts() -> None:
    router, index = make()
    prompt = query("x", 400)
    holds(index, NODES[2], prompt)
    dispatch = router.pick(prompt, NODES, 0.0)
    assert dispatch is not None
    assert dispatch.node_id == NODES[2]
    assert (dispatch.cached_tokens, dispatch.uncached_tokens) == (400, 0)


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    router, index = make()
    prompt = query("x", 400)
    holds(index, NODES[2], prompt)
    router.report(NODES[2], num_requests=2, num_tokens=1000)
    dispatch = router.pick(prompt, NODES, 0.0)
    assert dispatch is not None
    assert dispatch.node_id != NODES[2]


def test_a_chat_that_returns_every_few_seconds_stays_on_its_node() -> None:
    router, index = make("decode")
    nodes = set()
    for turn in range(12):
        now_s = 6.0 * turn
        dispatch = router.pick(query("chat", 200 + 32 * turn), NODES, now_s)
        assert dispatch is not None
        nodes.add(dispatch.node_id)
        holds(index, dispatch.node_id, query("chat", 200 + 32 * turn))
        router.ended(dispatch, now_s + 1.0)
    assert len(nodes) == 1


def test_a_prompt_being_computed_attracts_its_twin() -> None:
    router, _ = make()
    first = router.pick(query("x", 2000), NODES, 0.0)
    twin = router.pick(query("x", 2000), NODES, 0.0)
    other = router.pick(query("y", 2000), NODES, 0.0)
    assert first is not None
    assert twin is not None
    assert other is not None
    assert twin.node_id != other.node_id != first.node_id


def test_ties_go_round() -> None:
    router, _ = make()
    seen = []
    for _ in range(8):
        dispatch = router.pick(query("x", 10), NODES, 0.0)
        assert dispatch is not None
        seen.append(dispatch.node_id)
        router.ended(dispatch, 0.0)
        router.forget(dispatch.node_id)  # no memory: all nodes stay equal
    assert seen == NODES + NODES


def test_explain_is_what_pick_does_and_changes_nothing() -> None:
    router, index = make()
    prompt = query("x", 400)
    holds(index, NODES[1], query("x", 200))
    before = router.explain(prompt, NODES, 0.0)
    assert before == router.explain(prompt, NODES, 0.0)
    best = before[0]
    assert best.score == pytest.approx(best.cached_term - best.queue_term)
    dispatch = router.pick(prompt, NODES, 0.0)
    assert dispatch is not None
    assert dispatch.node_id == best.node_id == NODES[1]
    assert best.cached_tokens == 208


def test_without_nodes_there_is_no_choice() -> None:
    router, _ = make()
    assert router.pick(query("x", 10), [], 0.0) is None


def test_a_heartbeat_counts_only_the_work_of_others() -> None:
    router, _ = make("decode")
    ours = [router.pick(query(f"q{i}", 10), NODES[:1], 0.0) for i in range(3)]
    router.report(NODES[0], num_requests=3, num_tokens=30)
    assert router.explain(query("z", 10), NODES[:1], 0.0)[0].num_requests == 3
    router.report(NODES[0], num_requests=5, num_tokens=50)
    assert router.explain(query("z", 10), NODES[:1], 0.0)[0].num_requests == 5
    for dispatch in ours:
        assert dispatch is not None
        router.ended(dispatch, 0.0)
    assert router.num_requests(NODES[0]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_load_returns_to_zero_after_any_order_of_ends(seed: int) -> None:
    rng = random.Random(seed)
    router, index = make()
    running: list[Dispatch] = []
    for at in range(400):
        action = rng.random()
        if action < 0.5:
            dispatch = router.pick(query(f"q{rng.randrange(9)}", 100), NODES, float(at))
            assert dispatch is not None
            running.append(dispatch)
        elif running:
            dispatch = rng.choice(running)
            if action < 0.7:
                router.computed(dispatch)
            elif action < 0.97:
                router.ended(dispatch, float(at))
                router.ended(dispatch, float(at))
            else:
                router.forget(dispatch.node_id)
                index.remove(dispatch.node_id)
    for dispatch in running:
        router.ended(dispatch, 400.0)
    assert router.num_in_flight == 0
    for candidate in router.explain(query("z", 10), NODES, 400.0):
        assert candidate.num_tokens_waiting == candidate.num_requests == 0
    assert all(index.num_expected(node) == 0 for node in NODES)
