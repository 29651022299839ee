"""Claims about the grouping of decode sequences."""

from __future__ import annotations

import numpy as np
import pytest

from engine.attention.decode_groups import GROUP_KV_NBYTES_MAX, PADDING_MAX, group_by_pages


@pytest.mark.parametrize("seed", range(20))
def test_groups_partition_the_members_within_their_limits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    pages = rng.integers(1, rng.integers(2, 300), count).tolist()
    members = (rng.permutation(100)[:count]).tolist()
    page_nbytes = int(rng.integers(1, 1 << 20))
    groups = group_by_pages(members, pages, page_nbytes)
    assert sorted(m for g in groups for m in g.members) == sorted(members)
    of = dict(zip(members, pages, strict=True))
    for group in groups:
        own = [of[m] for m in group.members]
        assert group.num_pages == max(own)
        assert len(own) * group.num_pages <= sum(own) * (1 + PADDING_MAX)
        if len(own) > 1:
            assert len(own) * group.num_pages * page_nbytes <= GROUP_KV_NBYTES_MAX


def test_equal_lengths_share_one_group_and_outliers_stay_alone() -> None:
    groups = group_by_pages(range(17), [20] * 16 + [500], 1536)
    assert [len(g.members) for g in groups] == [16, 1]
    assert group_by_pages([], [], 1) == []
