"""One request on its way through a prefill node.

Owns what the scheduler knows of a request: its tokens and page keys, its page table, how far it
has come, and who may be writing into its pages. Knows no clock, no futures, no network.

The states (``PrefillState``), and what moves a request on::

              admit: pages reserved      restore ended          last chunk ran
    WAITING ───────────────────▶ RESTORING ─────────▶ RUNNING ───────────────▶ PUBLISHING ──▶ DONE
       │            (nothing to restore: straight on)    │ ▲                       │
       │                            │                    └─┘ chunk ran             │
       └──────────── abort ─────────┴────── abort ────────┴─────────── abort ──────┴──▶ ABORTED

Positions of a prompt, and where each part of its KV came from::

    0          num_local      + num_store                num_valid                num_tokens
    ├── radix cache ──┼── pulled from the store ──┼── computed here ──┼── still missing ──┤
      full pages, shared   private until full and inserted               page table covers all

Invariant: pages are released when the request holds them no longer *and* nobody writes into them
(``num_writers``: a running step, a restore in flight).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import cast

import numpy as np
import numpy.typing as npt

from engine.request import GenerateRequest
from engine.step import SampleInput
from kvstore.keys import Namespace, page_keys
from kvstore.page import PageId
from kvstore.store import PageIdentity


class PrefillState(StrEnum):
    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"
    PUBLISHING = "publishing"
    DONE = "done"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        return self in (PrefillState.DONE, PrefillState.ABORTED)


class PrefillJob:
    """A request and its progress. Mutated by ``PrefillScheduler`` only.

    Args:
        serial: arrival order, unique on this node (request ids are the gateway's and may repeat).
        request: the prompt is ``request.prompt`` followed by ``request.emitted``.
    """

    def __init__(
        self, serial: int, request: GenerateRequest, namespace: Namespace, page_size: int
    ) -> None:
        self.serial = serial
        self.request = request
        self.namespace = namespace
        self.page_size = page_size
        self.packed = request.prompt + request.emitted
        self.tokens: npt.NDArray[np.int32] = np.frombuffer(self.packed, dtype="<i4").astype(
            np.int32
        )
        self.keys = page_keys(namespace, cast("Sequence[int]", self.tokens), page_size)
        self.state = PrefillState.WAITING
        self.page_ids: list[PageId] = []
        self.num_valid = 0  # positions 0..num_valid-1 have KV in page_ids
        self.num_local = 0
        self.num_store = 0
        self.num_writers = 0
        self.pages_pulled = 0
        self.bytes_pulled = 0
        self.arrival_s = 0.0
        self.admitted_s = 0.0
        self.cached_memo: tuple[int, int] | None = None  # (cache version, cached pages)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        """Pages of the whole prompt, the tail page included."""
        return len(self.keys)

    @property
    def num_full_pages(self) -> int:
        return self.num_tokens // self.page_size

    @property
    def num_valid_full_pages(self) -> int:
        return self.num_valid // self.page_size

    @property
    def num_missing(self) -> int:
        """Tokens without KV."""
        return self.num_tokens - self.num_valid

    @property
    def num_computed(self) -> int:
        """Tokens whose KV this node computes: all that came from neither cache."""
        return self.num_tokens - self.num_local - self.num_store

    def packed_pages(self, num_pages: int) -> bytes:
        """The packed tokens of the first ``num_pages`` full pages."""
        return self.packed[: num_pages * self.page_size * 4]

    def identities(self, first_page: int, end_page: int) -> list[PageIdentity]:
        """The identities of pages ``first_page..end_page-1``."""
        page_nbytes = self.page_size * 4
        return [
            PageIdentity(
                key=self.keys[i],
                parent=self.keys[i - 1] if i else self.namespace,
                depth=i,
                tokens=self.packed[i * page_nbytes : (i + 1) * page_nbytes],
            )
            for i in range(first_page, end_page)
        ]

    def sample_input(self) -> SampleInput:
        num_prompt = self.request.num_prompt_tokens
        return SampleInput(
            params=self.request.sampling,
            prompt=self.tokens[:num_prompt],
            output=self.tokens[num_prompt:],
        )
