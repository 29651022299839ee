"""What ``up``, the demo and the benchmarks stand on: a cluster started and watched from Python."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.client import complete_all
from benchmarks.parity import BORDERS, CHUNK_BORDERS, LENGTH_MAX, differences, lengths
from engine.fake import fake_generate
from engine.request import SamplingParams
from launch.cluster import LocalCluster
from launch.config import JoinOptions, UpOptions
from launch.demo import Turn, check, report
from launch.errors import LaunchError
from launch.status import describe, fetch, plain, table
from transfer.membership import MembershipView

pytestmark = [pytest.mark.net, pytest.mark.slow]

NUM_TOKENS = 12


async def test_a_local_cluster_answers_exactly_and_can_be_looked_at() -> None:
    options = UpOptions.of(
        model="fake", port=0, decode=2, threads=1, segment="16MiB", log_level="warning"
    )
    cluster = LocalCluster(options)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 16, 33, 100)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        await cluster.start()
        assert set(cluster.pids) == {"gateway", "store-1", "prefill-1", "decode-1", "decode-2"}
        answers = await asyncio.to_thread(complete_all, cluster.url, "fake", prompts, NUM_TOKENS, 2)
        join = f"tcp://127.0.0.1:{cluster.options.join_port}"
        view = await fetch(JoinOptions.of(join=join), timeout_s=10.0)
    finally:
        await cluster.drain(5.0)
    assert cluster.pids == {}
    expected = [[out.token for out in fake_generate(prompt, params)] for prompt in prompts]
    assert differences(prompts, expected, [answer.tokens for answer in answers]) == []
    assert [answer.trace["computed_tokens"] for answer in answers] == [1, 16, 33, 100]
    _check_status(view)


def _check_status(view: MembershipView) -> None:
    members = {str(member.node_id): describe(member) for member in view.members}
    assert list(members) == ["decode-1", "decode-2", "gateway", "prefill-1", "store-1"]
    assert members["prefill-1"]["contract"]["page_size"] == "16"
    assert members["store-1"]["gauges"]["segment_nbytes"] == 16 << 20
    assert all(member["heartbeat_age_s"] < 2.0 for member in members.values())
    lines = plain(view).splitlines()
    assert len(lines) == 7, "the contract, the headings, five members"
    for name, line in zip(members, lines[2:], strict=True):
        assert line.startswith(f"{name} ")
        assert line[lines[1].index("role") :].startswith(members[name]["role"]), "aligned"
    shown = table(view)
    assert shown.row_count == 5
    assert "model fake" in str(shown.title)


def test_parity_covers_every_border_with_forty_prompts() -> None:
    chosen = lengths(40)
    assert len(chosen) == 40
    assert set(BORDERS) | {n for n in CHUNK_BORDERS if n <= LENGTH_MAX} <= set(chosen)
    assert max(chosen) == LENGTH_MAX
    assert min(chosen) == 1


def test_parity_names_the_first_token_that_differs() -> None:
    assert differences([[1]], [[5, 6, 7]], [[5, 6, 7]]) == []
    assert "index 1 on" in differences([[1]], [[5, 6, 7]], [[5, 9, 7]])[0]
    assert "index 2 on" in differences([[1]], [[5, 6, 7]], [[5, 6]])[0]


def turn(**changes: object) -> Turn:
    trace = {
        "prefill_node": "prefill-1",
        "decode_node": "decode-1",
        "transport": "shm",
        "computed_tokens": 9,
        "cached_tokens": {"local": 32, "store": 1},
        "pages_pushed": 3,
        "pages_pulled": 2,
        "bytes_pushed": 3 << 20,
        "bytes_pulled": 2 << 20,
    }
    usage = {"prompt_tokens": 42, "completion_tokens": 8}
    return Turn("text", trace | changes, usage, 0.25, 20.0)


def test_the_demo_reports_who_computed_what() -> None:
    text = report(2, turn())
    for fact in ("prefill-1 computed 9", "32 from its radix cache", "1 from the store"):
        assert fact in text
    for fact in ("decode-1 generated 8", "3.0 MiB", "2.0 MiB", "250 ms", "20.0 tokens/s"):
        assert fact in text


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_node": "prefill-1"},
        {"prefill_node": None},
        {"pages_pulled": 0},
        {"cached_tokens": {"local": 0, "store": 0}},
    ],
)
def test_the_demo_fails_when_it_does_not_show_what_it_is_for(changes: dict[str, object]) -> None:
    check([turn(), turn()])
    with pytest.raises(LaunchError):
        check([turn(), turn(**changes)])
