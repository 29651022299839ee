"""kill -9 while a process spills as fast as it can; 50 rounds: ``tests/kvstore/ssd/kills.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.ssd.kills import rounds

NUM_ROUNDS = 5


@pytest.mark.net
@pytest.mark.slow
async def test_every_page_found_after_a_kill_verifies(tmp_path: Path) -> None:
    results = await rounds(tmp_path / "tier", NUM_ROUNDS, seed=1)  # asserts the bytes
    assert sum(result.verified for result in results) > 0
    assert results[-1].found > 0
