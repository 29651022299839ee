"""Which other store nodes take no pages any more, as a node that drains learns from themselves.

Owns the verdict and the links that bring the evidence. Knows no pages, no view: the membership
tells of a drain, too, but not when its registry has stopped before the stores, as it does when a
whole cluster is stopped. Then nodes that all drain would wait for one another.

A node has *departed*, for the rest of that life, when it says so (``AnnounceDrain``, or it refuses
by ``draining`` or ``closed``), or when only failures have come from it for ``SILENCE_S`` while this
node drains: before, silence means nothing, as nothing has to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvstore.client.link import StoreLink
from kvstore.config import StoreClientConfig
from kvstore.replication.holdings import now_s
from transfer.channel import Hello, Network
from transfer.errors import RemoteFailed, TransferError
from transfer.identity import Identity, NodeId
from transfer.membership import NodeInfo

SILENCE_S = 2.0  # as long as the membership waits for a heartbeat
DEPARTED_MAX = 4096  # nodes remembered; the oldest are forgotten first
_PARTING = ("draining", "closed")

R = TypeVar("R", bound=msgspec.Struct)


class Departures:
    """See the module's docstring.

    Args:
        changed: called when one more node has departed; from a call to that node, so it must not
            close its link at once.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._departed: dict[NodeId, str] = {}  # the life that is over
        self._silent: dict[NodeId, tuple[str, float]] = {}  # the life, and since when
        self._counts_silence = False

    def has_departed(self, identity: Identity) -> bool:
        return self._departed.get(identity.node_id) == str(identity.incarnation)

    def note_parting(self, identity: Identity) -> None:
        """The node says that it takes no pages any more."""
        self._silent.pop(identity.node_id, None)
        if self.has_departed(identity):
            return
        self._departed.pop(identity.node_id, None)
        self._departed[identity.node_id] = str(identity.incarnation)
        if len(self._departed) > DEPARTED_MAX:
            del self._departed[next(iter(self._departed))]
        self._changed()

    def note_answer(self, identity: Identity) -> None:
        self._silent.pop(identity.node_id, None)

    def note_failure(self, identity: Identity, error: TransferError, at_s: float) -> None:
        """A call to the node has failed: a refusal is an answer, all else is silence."""
        if isinstance(error, RemoteFailed):
            self.note_answer(identity)
            if error.code in _PARTING:
                self.note_parting(identity)
            return
        if not self._counts_silence:
            return
        life = str(identity.incarnation)
        silent, since_s = self._silent.get(identity.node_id, (life, at_s))
        if silent != life:
            since_s = at_s
        self._silent[identity.node_id] = (life, since_s)
        if at_s - since_s >= SILENCE_S:
            self.note_parting(identity)

    def count_silence(self) -> None:
        """This node drains: who does not answer from now on is not waited for."""
        self._counts_silence = True


class WatchedLink(StoreLink):
    """A link whose calls tell ``departures`` how they went."""

    def __init__(
        self,
        info: NodeInfo,
        departures: Departures,
        *,
        network: Network,
        hello: Hello,
        config: StoreClientConfig,
        counters: Counter[str],
    ) -> None:
        super().__init__(info, network=network, hello=hello, config=config, counters=counters)
        self._departures = departures

    async def call(
        self, message: msgspec.Struct, reply: type[R], *, deadline_s: float, wait_s: float = 0.0
    ) -> R:
        identity = self.info.identity
        try:
            answer = await super().call(message, reply, deadline_s=deadline_s, wait_s=wait_s)
        except TransferError as error:
            self._departures.note_failure(identity, error, now_s())
            raise
        self._departures.note_answer(identity)
        return answer
