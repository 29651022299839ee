"""This node's own pages, as its replicator uses them.

Owns the bridge between replication and the node it runs in. Pages are leased, reserved, committed
and checked by the same messages that clients send, answered in place; the questions that no client
asks are the ``Holdings`` interface, which the directory implements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from kvstore.messages import PageGrant
from kvstore.page import PageKey, PageSpec
from kvstore.replication.clears import Clears
from kvstore.replication.put_times import PutTimes
from kvstore.store import PutPolicy
from transfer.channel import Caller, Service
from transfer.identity import Identity
from transfer.interface import Region

R = TypeVar("R", bound=msgspec.Struct)


class KeptAs(NamedTuple):
    """What a copy of a page must be kept as."""

    spec: PageSpec
    policy: PutPolicy


class Holdings(Protocol):
    """The pages of one node."""

    def scan(self, cursor: int, num_max: int) -> tuple[list[PageKey], int | None]:
        """Up to ``num_max`` present pages from ``cursor`` on (0: from the start), and the next
        cursor; None after the last. Pages present throughout a scan are seen; others may be."""
        ...

    def kept_as(self, key: PageKey) -> KeptAs | None:
        """Geometry and policy of a present page."""
        ...

    def forget(self, keys: Sequence[PageKey]) -> int:
        """Make present pages absent; returns how many there were."""
        ...

    def cool(self, keys: Sequence[PageKey]) -> int:
        """Make these pages the first to be evicted; returns how many there were."""
        ...

    def hold(self, key: PageKey, generation: int) -> int | None:
        """Owe the slot of a reservation to this process; a row to let go of, None: it is gone."""
        ...

    def let_go(self, row: int) -> None:
        """Nothing of this process touches the slot of ``row`` any more."""
        ...


class OwnNode:
    """Asks the node that this replicator belongs to.

    Args:
        service: the node's handlers.
        identity: the node's; its own requests carry it.
        region: the segment's memory; copies arrive in it.
        clears: what the node was told to forget lately.
    """

    def __init__(
        self,
        service: Service,
        holdings: Holdings,
        identity: Identity,
        region: Region,
        clears: Clears,
    ) -> None:
        self.clears = clears
        self.put_times = PutTimes()
        self.holdings = holdings
        self.identity = identity
        self.region = region
        self.read_token = region.export("r")
        self._service = service

    async def ask(self, message: msgspec.Struct, reply: type[R], *, deadline_s: float) -> R:
        """Have ``message`` answered as if a client had sent it.

        Raises:
            RemoteFailed: as a client would see it.
        """
        handler = self._service.requests[type(message)]
        answer = await handler(message, Caller(self.identity, deadline_s))
        assert isinstance(answer, reply), (type(answer), reply)
        return answer

    @contextmanager
    def holding(self, grants: Sequence[PageGrant]) -> Iterator[None]:
        """While the body reads into them, the slots of these reservations are granted to nobody.

        Also when the reservations end meanwhile: this process stood still, and its read goes on.
        """
        rows = [self.holdings.hold(grant.key, grant.generation) for grant in grants]
        try:
            yield
        finally:
            for row in rows:
                if row is not None:
                    self.holdings.let_go(row)


def now_s() -> float:
    return asyncio.get_running_loop().time()
