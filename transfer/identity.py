"""Who a process is: node id, role and incarnation.

Owns the identity types and nothing else. An *incarnation* is the random id of one process life: a
restart on the same address is another incarnation, and whatever was promised by the old one is
void (``Stale``).
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import NewType

import msgspec

NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", str)


class Role(StrEnum):
    """What a node is for."""

    GATEWAY = "gateway"
    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    OBSERVER = "observer"  # status, bench: watches, never listed as a member


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process life of one node."""

    node_id: NodeId
    role: Role
    incarnation: Incarnation


def new_identity(role: Role, node_id: str | None = None) -> Identity:
    """Return an identity with a fresh random incarnation; the node id defaults to a random one."""
    incarnation = secrets.token_hex(8)
    return Identity(
        node_id=NodeId(node_id or f"{role.value}-{incarnation[:6]}"),
        role=role,
        incarnation=Incarnation(incarnation),
    )
