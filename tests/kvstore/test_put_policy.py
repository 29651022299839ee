"""A policy that no node would take is refused where it is made, and says why."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.store import PutPolicy


@pytest.mark.parametrize("priority", [35.5, 35.0, True, "35", None, float("nan"), np.int64(3)])
def test_a_priority_that_is_no_int_is_refused_by_name(priority: Any) -> None:
    with pytest.raises(ValueError, match=r"priority=.*must be an int, 0..100") as found:
        PutPolicy(priority=priority)
    assert repr(priority) in str(found.value)


@pytest.mark.parametrize("priority_s", [True, "3", Decimal(3), np.float64(3), b""])
def test_a_time_that_is_no_number_is_refused_by_name(priority_s: Any) -> None:
    with pytest.raises(ValueError, match=r"priority_s=.*a number of seconds, or None") as found:
        PutPolicy(priority_s=priority_s)
    assert repr(priority_s) in str(found.value)


@pytest.mark.parametrize("priority_s", [0, -1.0, float("inf"), float("nan"), 10**400])
def test_a_time_that_does_not_end_is_refused(priority_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        PutPolicy(priority_s=priority_s)


@pytest.mark.parametrize("namespace", [None, "n" * 32, bytearray(32)])
def test_a_namespace_that_is_no_bytes_is_refused_by_name(namespace: Any) -> None:
    with pytest.raises(ValueError, match=r"namespace=.*must be bytes"):
        PutPolicy(namespace=namespace)


@pytest.mark.parametrize("priority_s", [None, 5, 5.0, 1e-300, 1e308, 10**100])
@pytest.mark.parametrize("priority", [0, 35, 100])
def test_every_policy_that_can_be_made_arrives(priority: int, priority_s: float | None) -> None:
    made = PutPolicy(priority=priority, priority_s=priority_s)
    assert made == PutPolicy(priority=priority, priority_s=priority_s)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PutPolicy) == made
