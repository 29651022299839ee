"""``kvferry status``: what the registry and the store nodes say, as tables or as JSON.

Owns the asking, and the presentation of one membership view; how stores are shown is
``store_view``'s. Watches as an observer, which is never listed itself. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.config import NAMESPACES_SHOWN_MAX
from kvstore.messages import ReadStats, StoreStats
from launch.config import DEFAULT_JOIN, JoinOptions
from launch.errors import ConfigError, StartError
from launch.parts import make_network, read_secret
from launch.runtime import run_command
from launch.seat import OutsideSeat, no_answer, outside_seat
from launch.store_view import Answer, columns, store_text, summary
from transfer.channel import Hello, Network
from transfer.errors import HelloRefused, PeerUnreachable, TransferError, Unauthorized
from transfer.etcd import is_etcd, parse_address
from transfer.identity import Identity, NodeId, Role, new_identity
from transfer.membership import PAGE_STORE_LOST, Member, MembershipView

if TYPE_CHECKING:
    from rich.table import Table

CONTRACT_SHOWN = ("model", "kv_dtype", "page_size", "num_layers", "num_kv_heads", "head_dim")
ASK_S = 2.0  # for the answers of store nodes
WIDTH_MAX = 10_000  # of a table that is measured before it is shown
HEADINGS = ("node", "role", "transport", "running", "waiting", "pages", "heartbeat")


def show(
    join: str | None, *, as_json: bool, timeout_s: float, secret_file: str | None = None
) -> None:
    """Print the members of the cluster at ``join``.

    Raises:
        LaunchError: as ``fetch``, or the secret cannot be read.
    """
    options = JoinOptions.of(join=join or DEFAULT_JOIN, secret_file=secret_file)
    with only_the_error_line():
        view, answers = run_command(fetch_all(options, timeout_s))
    if as_json:
        members = [describe(member, answers.get(member.node_id)) for member in view.members]
        print(json.dumps(members, indent=2))
        return
    from rich.console import Console

    console, shown = Console(), table(view)
    if sys.stdout.isatty() and Console(width=WIDTH_MAX).measure(shown).maximum <= console.width:
        console.print(shown)
    else:
        print(plain(view))
    engine = engine_text(view)
    if engine:
        print("\n" + engine)
    stores = {
        str(member.node_id): summary(member, answers[member.node_id])
        for member in view.members
        if member.node_id in answers
    }
    if stores:
        print("\n" + store_text(stores))


@contextmanager
def only_the_error_line() -> Iterator[None]:
    """Keep what ``transfer`` logs while it waits to itself: our one line says it all."""
    log = logging.getLogger("transfer")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


async def fetch(options: JoinOptions, timeout_s: float) -> MembershipView:
    """Return the present view of the registry.

    Raises:
        StartError: nobody answers in time, or no node is registered there.
        ConfigError: the registry refuses this version, or etcd this user.
    """
    async with _watching(options, timeout_s) as (view, _, _):
        return view


async def fetch_all(
    options: JoinOptions, timeout_s: float
) -> tuple[MembershipView, dict[NodeId, Answer]]:
    """Return the view, and what each of its store nodes says when asked. Raises as ``fetch``."""
    async with _watching(options, timeout_s) as (view, network, identity):
        stores = view.with_role(Role.STORE, include_draining=True)
        deadline_s = asyncio.get_running_loop().time() + min(timeout_s, ASK_S)
        asked = (_ask(store, network, identity, deadline_s) for store in stores)
        answers = await asyncio.gather(*asked)
        return view, {m.node_id: a for m, a in zip(stores, answers, strict=True)}


async def _ask(store: Member, network: Network, identity: Identity, deadline_s: float) -> Answer:
    hello = Hello(identity=identity)
    try:
        channel = await network.connect(store.info.address, hello, deadline_s=deadline_s)
        try:
            message = ReadStats(num_namespaces=NAMESPACES_SHOWN_MAX)
            return Answer(await channel.request(message, StoreStats, deadline_s=deadline_s))
        finally:
            await channel.close()
    except TransferError as error:
        return Answer(None, f"{type(error).__name__}: {error}")


@asynccontextmanager
async def _watching(
    options: JoinOptions, timeout_s: float
) -> AsyncIterator[tuple[MembershipView, Network, Identity]]:
    network = make_network(read_secret(options))
    identity = new_identity(Role.OBSERVER)
    membership = outside_seat(options.join, network, identity)
    try:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        await _watch(membership, options.join, timeout_s, deadline_s)
        if not membership.view.members:
            raise StartError(_nobody(options.join))
        yield membership.view, network, identity
    finally:
        await membership.leave()
        await network.close()


async def _watch(seat: OutsideSeat, join: str, timeout_s: float, deadline_s: float) -> None:
    try:
        await seat.watch_only(deadline_s=deadline_s)
    except PeerUnreachable as error:
        raise StartError(no_answer(join, timeout_s, starts=False)) from error
    except (HelloRefused, Unauthorized) as error:
        raise ConfigError(f"--join {join}: {error}") from error


def _nobody(join: str) -> str:
    """Why the cluster at ``join`` has no members, and what to do."""
    if not is_etcd(join):
        return (
            f"--join {join}: a registry answers there, but no node is registered with it: start "
            "nodes with this --join, or ask the one that `kvferry gateway` or `kvferry up` prints"
        )
    name = parse_address(join).name
    return (
        f"--join {join}: etcd answers, but no node is registered under the name {name!r}: is it "
        "spelled as in the --join of the nodes? Have they started, and joined this etcd? (`etcdctl "
        "get --prefix --keys-only /kvferry/` lists every name)"
    )


def describe(member: Member, answer: Answer | None = None) -> dict[str, Any]:
    """Return one member as plain data; a store with its ``summary``."""
    shown: dict[str, Any] = {
        "node_id": member.node_id,
        "role": member.info.identity.role.value,
        "incarnation": member.info.identity.incarnation,
        "address": member.info.address,
        "transport": member.info.transport,
        "draining": member.status.draining,
        "heartbeat_age_s": round(member.heartbeat_age_s, 3),
        "contract": member.info.contract,
        "labels": member.info.labels,
        "gauges": member.status.gauges,
        "counters": member.status.counters,
    }
    if answer is not None:
        shown["store"] = summary(member, answer)
    return shown


def table(view: MembershipView) -> Table:
    """Return the members as a table for a terminal."""
    from rich.table import Table

    shown = Table(title=_contract_line(view), title_justify="left")
    for heading in HEADINGS:
        shown.add_column(heading, no_wrap=True)
    for member in view.members:
        shown.add_row(*_row(member))
    return shown


def plain(view: MembershipView) -> str:
    """Return the members as aligned columns of whatever width they need: nothing is ever cut.

    For a pipe, a file, or a terminal that is too narrow for the table.
    """
    rows = [_row(member) for member in view.members]
    return f"{_contract_line(view)}\n{columns(HEADINGS, rows)}"


def engine_text(view: MembershipView) -> str:
    """Where nodes keep pages, if not in the cluster's stores, and who gets no answer there."""
    lines = []
    for engine in sorted({m.info.other_page_store or "" for m in view.members} - {""}):
        users = [m for m in view.members if m.info.other_page_store == engine]
        lost = [m.node_id for m in users if m.status.gauges.get(PAGE_STORE_LOST)]
        lines.append(f"page store: {engine}")
        if lost:
            lines.append(
                f"  it does not answer {', '.join(lost)} ({len(lost)} of {len(users)} nodes): "
                "prompts are computed, pages neither found nor kept"
            )
    return "\n".join(lines)


def _row(member: Member) -> tuple[str, ...]:
    """The cells of one member, under ``HEADINGS``."""
    return (
        str(member.node_id),
        member.info.identity.role.value + (" (draining)" if member.status.draining else ""),
        member.info.transport,
        _gauge(member, "num_running"),
        _gauge(member, "num_waiting"),
        _pages(member),
        f"{member.heartbeat_age_s:.1f} s ago",
    )


def _contract_line(view: MembershipView) -> str:
    """The facts on which all computing members agree."""
    stated = (m.info.contract for m in view.members)
    contract = next((facts for facts in stated if "page_size" in facts), {})
    facts = [f"{name} {contract[name]}" for name in CONTRACT_SHOWN if name in contract]
    return ", ".join(facts) or "no prefill or decode node has joined yet"


def _gauge(member: Member, name: str) -> str:
    value = member.status.gauges.get(name)
    return "" if value is None else f"{value:.0f}"


def _pages(member: Member) -> str:
    gauges = member.status.gauges
    if "num_pages" not in gauges:
        return ""
    total = gauges["num_pages"]
    if member.info.identity.role is Role.STORE:
        return f"{total:.0f} stored"
    usable, cached = gauges.get("num_free_pages", 0.0), gauges.get("num_evictable_pages", 0.0)
    held = total - usable
    return f"{usable - cached:.0f} free, {cached:.0f} cached, {held:.0f} held of {total:.0f}"
