"""A large tier starts fast: the index is read, no page is."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ssd_tier import GIB, LARGE, fill_sparsely
from kvstore.page import PageKey
from kvstore.ssd import SsdConfig, SsdTier
from tests.kvstore.ssd.disks import FaultyDisk

START_CPU_S = 2.0  # a tenth of it was seen; processor time, so that a busy machine is no fault


@pytest.mark.slow
async def test_a_full_tier_of_10_gib_serves_its_first_page_within_two_seconds(
    tmp_path: Path,
) -> None:
    folder, disk = tmp_path / "tier", FaultyDisk()
    last = await fill_sparsely(folder, 10 * GIB, LARGE)
    began = time.process_time()
    tier = await SsdTier.open(SsdConfig(path=folder, nbytes=10 * GIB), disk=disk)
    num_found = sum(1 for _ in tier.contents())
    into = np.zeros(LARGE.page_nbytes, dtype=np.uint8)
    record = await tier.load(PageKey(last.to_bytes(32, "little")), into.data)
    spent_s = time.process_time() - began
    assert record is not None
    assert num_found == tier.num_pages == last + 1 > 28_000
    assert disk.read_ranges[0] == (0, 4096)
    assert len(disk.read_ranges) == 2, "a start reads the first block and no page"
    assert await tier.load(PageKey(bytes(32)), into.data) is None, "a hole in the file was served"
    await tier.close()
    assert spent_s < START_CPU_S
