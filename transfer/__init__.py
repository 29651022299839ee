"""Bytes and messages between peers; knows no pages, no tokens, no models.

Names are loaded when they are first used, so that a process which needs only the errors or the
identity types does not pay for numpy and pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer.config import TransferConfig
    from transfer.counters import TransferCounters
    from transfer.engine import TransferEngine
    from transfer.interface import (
        Priority,
        Range,
        Region,
        Transfer,
        deadline_after,
        remaining_s,
    )

__all__ = [
    "Priority",
    "Range",
    "Region",
    "Transfer",
    "TransferConfig",
    "TransferCounters",
    "TransferEngine",
    "deadline_after",
    "remaining_s",
]

_HOMES = {
    "TransferConfig": "transfer.config",
    "TransferCounters": "transfer.counters",
    "TransferEngine": "transfer.engine",
    "Priority": "transfer.interface",
    "Range": "transfer.interface",
    "Region": "transfer.interface",
    "Transfer": "transfer.interface",
    "deadline_after": "transfer.interface",
    "remaining_s": "transfer.interface",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'transfer' has no attribute {name!r}")
    return getattr(import_module(home), name)
