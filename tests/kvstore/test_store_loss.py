"""Three store nodes as real processes, two replicas, a load of puts and gets; one is lost.

The measurement (``benchmarks/store_faults.py``) with less time; every byte that is read is checked.
"""

from __future__ import annotations

import pytest

from benchmarks.store_faults import is_good, measure

pytestmark = [pytest.mark.net, pytest.mark.slow]


@pytest.mark.parametrize("transfer", ["tcp", "shm"])
async def test_killing_one_store_node_of_three_loses_no_committed_page_and_repair_finishes(
    transfer: str,
) -> None:
    figures = await measure("kill", 0.0, transfer, warm_s=1.5, after_s=4.0)
    assert is_good(figures), figures
    assert figures["pages_committed"], figures
    nodes = figures["nodes"]
    assert isinstance(nodes, dict)
    assert len(nodes) == 2, figures
    held = {numbers["num_pages"] for numbers in nodes.values()}
    assert held == {figures["pages_committed"]}, figures


async def test_a_store_node_that_stood_still_serves_nothing_stale() -> None:
    figures = await measure("stop", 3.0, "tcp", warm_s=1.5, after_s=2.0)
    assert is_good(figures), figures
    nodes = figures["nodes"]
    assert isinstance(nodes, dict)
    assert len(nodes) == 3, "it is a member again"
