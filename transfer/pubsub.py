"""The one-to-many contract: a publisher that never waits, subscribers that can ask again.

Owns the interfaces only. Messages are lists of byte strings ("parts"); the first part of what is
published is its topic. Knows no sequence numbers and no formats: whoever publishes says how its
messages are numbered, and answers requests for old ones. ``transfer/zmq_pubsub.py`` carries this
over ZeroMQ (PUB and ROUTER); tests and the simulator have it in memory.

Guarantees, on every implementation:

* ``send`` and ``ask`` never block and never raise because of what a peer does.
* What a subscriber receives of one publisher is in order. Messages may be missing: before it was
  connected, and whenever its queue was full. Nothing tells it so but the numbers.
* A request is answered by any number of messages, in order, or by none. What an unanswered request
  means is the asker's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Parts = Sequence[bytes]
ReplaySource = Callable[[list[bytes]], Iterator[Parts]]  # a request → the answers, made as needed
PartsCallback = Callable[[list[bytes]], None]


class Publisher(Protocol):
    """Sends to whoever subscribes, and answers requests at a second address."""

    @property
    def address(self) -> str: ...

    @property
    def replay_address(self) -> str: ...

    @property
    def num_dropped(self) -> int:
        """Messages that at least one subscriber had no room for and has lost."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests for old messages."""
        ...

    def send(self, parts: Parts) -> None: ...

    def close(self) -> None:
        """Stop at once; idempotent."""
        ...


class Subscription(Protocol):
    """Receives what one publisher sends, across its restarts on the same address."""

    def ask(self, parts: Parts) -> None:
        """Send a request; the answers come to ``on_replay``."""
        ...

    def close(self) -> None:
        """Stop at once; idempotent. No callback is called any more."""
        ...
