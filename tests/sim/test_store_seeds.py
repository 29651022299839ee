"""The distributed store under seeded faults: whole pages or none, and nothing is left behind.

Real store nodes, clients, replication, registry and protocol core on a virtual clock. Frames are
lost, late, doubled and corrupted; bulk bytes are flipped, break off and arrive after their writer
gave up; nodes crash, restart, leave, stand still and are cut off, one way or both; disks lose, tear
and flip what was on them. What must hold is in ``tests/sim/checkers.py``, what is drawn in
``tests/sim/store_seed.py``. Here are the seeds of the first half and the replays; the second half
is in ``test_store_seeds_more.py``, so that two workers share them.

``python -m tests.sim.store_seed SEED`` runs one seed again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.harness import run_sim, seeds
from tests.sim.store_seed import NUM_SEEDS, scenario

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", seeds(NUM_SEEDS // 2))
def test_under_faults_pages_are_whole_or_absent_and_nothing_is_left_behind(seed: int) -> None:
    run_sim(scenario, seed)


@pytest.mark.parametrize("seed", [1, 5, 8])
def test_a_seed_replays_to_the_identical_digest(seed: int) -> None:
    assert run_sim(scenario, seed) == run_sim(scenario, seed)


def test_a_seed_replays_to_the_identical_digest_in_fresh_processes() -> None:
    command = [sys.executable, "-m", "tests.sim.store_seed", "5"]
    printed = []
    for hash_seed in ("1", "20"):
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        printed.append(done.stdout.strip())
    assert printed == [str(run_sim(scenario, 5))] * 2


def test_different_seeds_have_different_histories() -> None:
    digests = [run_sim(scenario, seed).digest for seed in range(4)]
    assert len(set(digests)) == len(digests)
