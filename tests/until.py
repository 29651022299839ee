"""Waiting for what other processes do, where they give no event of it."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.05


def until(condition: Callable[[], bool], what: str | Callable[[], str], within_s: float) -> None:
    """Return once ``condition`` holds; fail with ``what`` when it does not within ``within_s``.

    ``condition`` ends the wait early by an assertion of its own, such as that the process lives.
    """
    deadline_s = time.monotonic() + within_s
    while not condition():
        said = what if isinstance(what, str) else what()
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {said}"
        time.sleep(POLL_S)
