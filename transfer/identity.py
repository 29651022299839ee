"""Who a process is: node id, role and incarnation.

Owns the identity types and nothing else. An *incarnation* is the random id of one process life: a
restart on the same address is another incarnation, and whatever was promised by the old one is
void (``Stale``).
"""

from __future__ import annotations

import re
import secrets
from enum import StrEnum
from typing import NewType

import msgspec

MAX_NAME_NCHARS = 256  # of a node id or an incarnation: every peer keeps those of all others

# Node ids go into keys of etcd, topics of events and labels of metrics.
_NODE_ID = re.compile(r"[A-Za-z0-9._-]+")

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
    """One process life of one node. ValueError when a name is too long, or the id is none."""

    node_id: NodeId
    role: Role
    incarnation: Incarnation

    def __post_init__(self) -> None:
        for name in (self.node_id, self.incarnation):
            if len(name) > MAX_NAME_NCHARS:
                raise ValueError(
                    f"{name[:20]!r}... has {len(name)} characters: give the node a name of at "
                    f"most {MAX_NAME_NCHARS}"
                )
        check_node_id(self.node_id)


def check_node_id(node_id: str) -> None:
    """ValueError, with how to write one, when ``node_id`` is no name of a node."""
    if not _NODE_ID.fullmatch(node_id) or len(node_id) > MAX_NAME_NCHARS:
        raise ValueError(
            f"{node_id[:40]!r} is no node id: write 1 to {MAX_NAME_NCHARS} letters (a-z, A-Z), "
            "digits, dots, hyphens and underscores"
        )


def new_identity(role: Role, node_id: str | None = None) -> Identity:
    """Return an identity with a fresh random incarnation; the node id defaults to a random one."""
    incarnation = secrets.token_hex(8)
    return Identity(
        node_id=NodeId(node_id or f"{role.value}-{incarnation[:6]}"),
        role=role,
        incarnation=Incarnation(incarnation),
    )
