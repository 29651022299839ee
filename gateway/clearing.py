"""Telling every node of the cluster to forget cached pages: all of them, or one namespace.

Owns the order and the report. Compute nodes come first, so that nothing of theirs is on its way
when the stores are told. Stores copy pages to one another: they are told again until they have
nothing left, a bounded number of times. What running requests store afterwards stays.

A node that cannot be told is part of the report, never silently left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from gateway.links import Link
from kvstore.events import CacheCleared, ClearCache
from transfer.channel import Hello, Network
from transfer.errors import TransferError
from transfer.identity import Identity, NodeId, Role
from transfer.membership import Member, MembershipView

STORE_ROUNDS_MAX = 4
NOT_OURS = (
    "not a store node of this cluster, which cannot clear it: its pages stay until it evicts them, "
    "or until you have it remove the objects that begin with kvferry/; in Mooncake a client's "
    "remove_by_regex('^kvferry/.*', True) does so"
)
CLEAR_S = 60.0  # for the whole cluster: a million pages take seconds


class ClearedNode(NamedTuple):
    """What one node did. ``num_pages`` counts copies: a page on two stores counts twice.

    Attributes:
        error: why it could not be told, or not to its end; None when it has nothing left.
    """

    node_id: NodeId
    role: Role
    num_pages: int
    error: str | None = None


async def clear_links(
    links: Iterable[Link], namespace: bytes | None, *, deadline_s: float
) -> list[ClearedNode]:
    """Clear the local caches of prefill and decode nodes."""
    return list(await asyncio.gather(*(_clear_link(x, namespace, deadline_s) for x in links)))


async def _clear_link(link: Link, namespace: bytes | None, deadline_s: float) -> ClearedNode:
    channel = link.channel
    if channel is None:
        reason = f"not reachable: {link.last_error or 'connecting'}"
        return ClearedNode(link.name, link.role, 0, reason)
    try:
        message = ClearCache(namespace)
        reply = await channel.request(message, CacheCleared, deadline_s=deadline_s)
    except TransferError as error:
        return ClearedNode(link.name, link.role, 0, _words(error))
    return ClearedNode(link.name, link.role, reply.num_pages)


async def clear_stores(
    stores: Iterable[Member],
    namespace: bytes | None,
    *,
    network: Network,
    identity: Identity,
    deadline_s: float,
) -> list[ClearedNode]:
    """Clear store nodes, all tiers, until a round finds nothing."""
    members = list(stores)
    clear_id = f"{identity.incarnation}/{deadline_s!r}"  # no two clears have the same deadline
    total: list[ClearedNode] = [ClearedNode(m.node_id, Role.STORE, 0) for m in members]
    for _ in range(STORE_ROUNDS_MAX):
        message = ClearCache(namespace, clear_id)
        calls = (_clear_store(m, message, network, identity, deadline_s) for m in members)
        found = await asyncio.gather(*calls)
        total = [
            now._replace(num_pages=before.num_pages + now.num_pages)
            for before, now in zip(total, found, strict=True)
        ]
        if not any(node.num_pages for node in found):
            break
    return total


async def _clear_store(
    member: Member,
    message: ClearCache,
    network: Network,
    identity: Identity,
    deadline_s: float,
) -> ClearedNode:
    hello = Hello(identity=identity)
    try:
        channel = await network.connect(member.info.address, hello, deadline_s=deadline_s)
        try:
            reply = await channel.request(message, CacheCleared, deadline_s=deadline_s)
        finally:
            await channel.close()
    except TransferError as error:
        return ClearedNode(member.node_id, Role.STORE, 0, _words(error))
    return ClearedNode(member.node_id, Role.STORE, reply.num_pages)


def other_engines(view: MembershipView) -> list[ClearedNode]:
    """The stores that members use and that are no nodes of ours: nobody can tell them."""
    named = (member.info.other_page_store for member in view.members)
    addresses = sorted({address for address in named if address})
    return [ClearedNode(NodeId(name), Role.STORE, 0, NOT_OURS) for name in addresses]


def what_is_left(nodes: Iterable[ClearedNode]) -> str | None:
    """Say who was not cleared and what helps; None when everybody was."""
    failed = [node for node in nodes if node.error is not None]
    again = [node.node_id for node in failed if node.error != NOT_OURS]
    never = [node.node_id for node in failed if node.error == NOT_OURS]
    parts = [f"not cleared everywhere: {', '.join(node.node_id for node in failed)}"]
    if again:
        parts.append(f"see nodes, and try again for {', '.join(again)}")
    if never:
        parts.append(f"trying again does not clear {', '.join(never)}: see nodes for what does")
    return "; ".join(parts) if failed else None


def _words(error: TransferError) -> str:
    return f"{type(error).__name__}: {error}"
