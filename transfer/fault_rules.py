"""What a rule of fault injection says: its parts, and which operations it is about. Pure.

Owns the vocabulary (kinds, selectors, limits) and matching. Knows no text (``fault_text``), no
chance (``fault_schedule``) and no transport (``fault_injection``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from transfer.interface import Rights
from transfer.token import Endpoint

MAX_RULES = 64
MAX_TEXT_CHARS = 16_384
MAX_PAUSE_S = 3600.0
MAX_CORRUPT_NBYTES = 4096

TRANSPORT_NAMES = ("loopback", "shm", "tcp", "ucx", "sim")


class FaultKind(Enum):
    """What can be done to one operation.

    ==========  =================================================================================
    DELAY       nothing happens for a time, then the operation runs
    DROP        nothing moves; only the deadline, a cancel or the engine's end completes it
    RESET       some bytes move, then the connection breaks while the rest is on its way
    TRUNCATE    some bytes move, then the connection breaks; the rest is never sent
    CORRUPT     everything moves, but some bytes of the destination are flipped; it succeeds
    STALL       some bytes move, nothing happens for a time, then the rest moves
    ==========  =================================================================================
    """

    DELAY = "delay"
    DROP = "drop"
    RESET = "reset"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    STALL = "stall"


PAUSING = frozenset({FaultKind.DELAY, FaultKind.STALL})
IN_THE_MIDDLE = frozenset({FaultKind.RESET, FaultKind.TRUNCATE, FaultKind.CORRUPT, FaultKind.STALL})


class Span(NamedTuple):
    """An inclusive range from which a value is drawn; both ends equal for a fixed one."""

    low: float
    high: float


NO_PAUSE = Span(0.0, 0.0)


class Operation(NamedTuple):
    """What the rules see of one read or write."""

    right: Rights  # "r" or "w"
    transport: str
    endpoint: Endpoint
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class FaultRule:
    """One rule.

    Attributes:
        text: as it was written, with single spaces.
        kind: what it does.
        right: which operations, ``"r"`` or ``"w"``; None for both.
        transport: on which transport; None for any.
        peer: to which peer (``host``, ``host:port``, loopback name, incarnation); None for any.
        probability: of hitting an operation that it is about.
        every: only each so-many-th operation that it is about.
        limit: how many faults at most; None for no limit.
        after_nbytes: bytes that are spared; drawn anew for each fault. None: a random place.
        pause_s: how long a delay or a stall takes.
        num_bytes: how many bytes a corruption flips.
        from_s, until_s: when it is active, in seconds since the engine started.
    """

    text: str
    kind: FaultKind
    right: Rights | None = None
    transport: str | None = None
    peer: str | None = None
    probability: float = 1.0
    every: int = 1
    limit: int | None = None
    after_nbytes: Span | None = None
    pause_s: Span = NO_PAUSE
    num_bytes: int = 1
    from_s: float = 0.0
    until_s: float = math.inf

    def is_about(self, operation: Operation, now_s: float) -> bool:
        """True if the rule may hit ``operation``, apart from ``every``, chance and ``limit``.

        An operation that ends before the least ``after_nbytes`` has no byte to hit.
        """
        return (
            self.right in (None, operation.right)
            and self.transport in (None, operation.transport)
            and (self.after_nbytes is None or self.after_nbytes.low < operation.nbytes)
            and self.from_s <= now_s < self.until_s
            and (self.peer is None or self.peer in names_of(operation.endpoint))
        )


class FaultRules(NamedTuple):
    """All rules, in the order in which they were written, and the seed of their chances."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0

    def describe(self) -> str:
        """Return the active rules as text that ``parse_rules`` reads back."""
        return "; ".join([*(rule.text for rule in self.rules), f"seed={self.seed}"])


def names_of(endpoint: Endpoint) -> set[str]:
    """Return every name by which a rule can mean this peer."""
    addresses = {endpoint.tcp, endpoint.ucx}
    hosts = {address.rpartition(":")[0].strip("[]") for address in addresses}
    return (addresses | hosts | {endpoint.loopback, endpoint.incarnation}) - {""}
