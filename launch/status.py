"""``kvferry status``: what the registry knows, as a table or as JSON.

Owns the presentation of one membership view. Watches the cluster as an observer, which is never
listed itself. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from launch.config import DEFAULT_JOIN, JoinOptions
from launch.errors import ConfigError, StartError
from launch.parts import make_network, read_secret
from transfer.errors import HelloRefused, PeerUnreachable
from transfer.identity import Role, new_identity
from transfer.membership import Member, MembershipView
from transfer.registry_client import RegistryMembership

if TYPE_CHECKING:
    from rich.table import Table

CONTRACT_SHOWN = ("model", "kv_dtype", "page_size", "num_layers", "num_kv_heads", "head_dim")
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
    with _only_the_error_line():
        view = asyncio.run(fetch(options, timeout_s))
    if as_json:
        print(json.dumps([describe(member) for member in view.members], indent=2))
        return
    from rich.console import Console

    console, shown = Console(), table(view)
    if sys.stdout.isatty() and Console(width=WIDTH_MAX).measure(shown).maximum <= console.width:
        console.print(shown)
    else:
        print(plain(view))


@contextmanager
def _only_the_error_line() -> Iterator[None]:
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
        StartError: nobody answers in time.
        ConfigError: the registry refuses this version.
    """
    network = make_network(read_secret(options))
    membership = RegistryMembership(network, options.join, new_identity(Role.OBSERVER))
    try:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        await membership.watch_only(deadline_s=deadline_s)
        return membership.view
    except PeerUnreachable as error:
        raise StartError(
            f"--join {options.join}: nobody answered within {timeout_s:g} s: "
            "name the address that `kvferry gateway` or `kvferry up` prints, or its secret differs"
        ) from error
    except HelloRefused as error:
        raise ConfigError(f"--join {options.join}: {error}") from error
    finally:
        await membership.leave()
        await network.close()


def describe(member: Member) -> dict[str, Any]:
    """Return one member as plain data."""
    return {
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
    rows = [HEADINGS, *map(_row, view.members)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join((_contract_line(view), *lines))


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
    contract = next((m.info.contract for m in view.members if m.info.contract), {})
    facts = [f"{name} {contract[name]}" for name in CONTRACT_SHOWN if name in contract]
    return ", ".join(facts) or "no prefill or decode node has joined yet"


def _gauge(member: Member, name: str) -> str:
    value = member.status.gauges.get(name)
    return "" if value is None else f"{value:.0f}"


def _pages(member: Member) -> str:
    gauges = member.status.gauges
    if "num_pages" not in gauges:
        return ""
    if member.info.identity.role is Role.STORE:
        return f"{gauges['num_pages']:.0f} stored"
    return f"{gauges.get('num_free_pages', 0):.0f} of {gauges['num_pages']:.0f} free"
