"""Memberships of a benchmark, known beforehand: no registry runs.

``FixedMembership`` is for one node in another process: the node prints what it says of itself, the
client reads that line. ``SharedMembership`` is for nodes and clients of one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from transfer.identity import NodeId
from transfer.membership import Member, MembershipView, NodeInfo, NodeStatus, ViewCallback


class FixedMembership:
    """``Membership`` whose view never changes."""

    def __init__(self, info: NodeInfo | None = None) -> None:
        """``info`` is the one member; None for the member itself."""
        members = () if info is None else (Member(info=info, status=NodeStatus()),)
        self.view = MembershipView(version=1, members=members)
        self.connected = True
        self.superseded = False

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        """Tell the parent process who we are: one line of JSON."""
        sys.stdout.write(msgspec.json.encode(info).decode() + "\n")
        sys.stdout.flush()

    def subscribe(self, callback: ViewCallback) -> None:
        callback(self.view)

    async def leave(self) -> None:
        """Nothing was registered."""


def read_member(line: str) -> NodeInfo:
    """Parse the line that ``join`` printed.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    return msgspec.json.decode(line, type=NodeInfo)


class SharedMembership:
    """``Membership`` of all nodes and clients of one process: who joins is seen at once."""

    def __init__(self) -> None:
        self.connected = True
        self.superseded = False
        self._members: dict[NodeId, Member] = {}
        self._callbacks: list[ViewCallback] = []
        self._version = 0

    @property
    def view(self) -> MembershipView:
        members = tuple(member for _, member in sorted(self._members.items()))
        return MembershipView(version=self._version, members=members)

    async def join(self, info: NodeInfo, status: Callable[[], NodeStatus]) -> None:
        self._members[info.identity.node_id] = Member(info=info, status=status())
        self._version += 1
        for callback in self._callbacks:
            callback(self.view)

    def subscribe(self, callback: ViewCallback) -> None:
        self._callbacks.append(callback)
        callback(self.view)

    async def leave(self) -> None:
        """All of them end together."""
