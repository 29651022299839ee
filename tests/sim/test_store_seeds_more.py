"""The second half of the seeds of ``test_store_seeds.py``."""

from __future__ import annotations

import pytest

from tests.sim.harness import run_sim, seeds
from tests.sim.store_seed import NUM_SEEDS, scenario


@pytest.mark.parametrize("seed", seeds(NUM_SEEDS, first=NUM_SEEDS // 2))
def test_under_faults_pages_are_whole_or_absent_and_nothing_is_left_behind(seed: int) -> None:
    run_sim(scenario, seed)
