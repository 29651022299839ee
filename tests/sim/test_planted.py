"""The simulation finds bugs that were planted on purpose, and says of which kind they are."""

from __future__ import annotations

import pytest

from tests.sim.planted import BUGS, find
from tests.sim.store_seed import scenario


@pytest.mark.parametrize("name", BUGS)
def test_the_checkers_find_and_name_the_planted_bug(name: str) -> None:
    bug = BUGS[name]
    found = find(bug, scenario)
    assert found is not None, f"not found in {bug.num_seeds} seeds"
    assert found.checker in bug.found_by, found
