"""``docs/faults.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "faults.md"


def test_every_test_that_the_document_names_exists() -> None:
    defined = {
        name
        for path in TESTS.rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    named = set(re.findall(r"`(test_\w+)`", DOC.read_text(encoding="utf-8")))
    assert len(named) > 50
    assert named <= defined, sorted(named - defined)
