"""Random operations under injected resets and truncations: every byte right, nothing left.

A shorter version of ``python -m tests.transfer.soak``, which says what is checked.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.transfer.soak import OK, Report, soak_one

NUM_OPERATIONS = 3000
RSS_SLACK_NBYTES = 24 << 20  # an allocator's noise; a leaked piece for each operation is 90 MiB
NO_UCX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
UCX = pytest.param("ucx", marks=NO_UCX)


def check(report: Report) -> None:
    """Fail for wrong bytes, hangs, unprovoked errors, and for anything that has grown."""
    assert report.wrong == []
    assert sum(report.outcomes.values()) == report.operations
    assert report.faults_injected > report.operations // 20
    assert report.outcomes[OK] > report.operations // 3
    for warm, end in ((report.warm, report.end), (report.owner_warm, report.owner_end)):
        assert end.num_fds <= warm.num_fds
        assert end.num_threads <= warm.num_threads
        assert end.shm_files == warm.shm_files
        assert end.rss_nbytes < warm.rss_nbytes + RSS_SLACK_NBYTES


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp", UCX])
async def test_random_operations_survive_resets_and_truncations(transport: str) -> None:
    check(await soak_one(transport, 1, NUM_OPERATIONS, seed=1))


@pytest.mark.net
@pytest.mark.parametrize("transport", ["shm", "tcp", UCX])
async def test_random_operations_between_processes_survive_resets(transport: str) -> None:
    check(await soak_one(transport, 2, NUM_OPERATIONS, seed=2))
