"""Facts of the served model that the nodes state when they join.

Owns ``ModelFacts`` and how it is read from a membership view. Pure; knows no channels. The last
facts stay valid while every node is away (scale to zero), so that requests can still be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.keys import Namespace, namespace_of, page_keys
from kvstore.page import PageKey, PageSpec
from transfer.identity import Role
from transfer.membership import Member, MembershipView

_SERVING = (Role.PREFILL, Role.DECODE)


class ModelFacts(NamedTuple):
    """What all prefill and decode nodes agree on, and the least of what they can hold."""

    spec: PageSpec
    fingerprint: str
    model: str
    max_model_len: int | None
    vocab_size: int | None

    def namespace(self, salt: str | None, adapter: str | None = None) -> Namespace:
        return namespace_of(self.fingerprint, self.spec, adapter=adapter, salt=salt)

    def keys(
        self, tokens: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]], salt: str | None
    ) -> list[PageKey]:
        """Page keys of ``tokens``, tail included."""
        size = self.spec.page_size
        return page_keys(self.namespace(salt), tokens, size)  # type: ignore[arg-type]


def _spec_of(contract: dict[str, str]) -> PageSpec | None:
    try:
        return PageSpec(
            num_layers=int(contract["num_layers"]),
            num_kv_heads=int(contract["num_kv_heads"]),
            head_dim=int(contract["head_dim"]),
            page_size=int(contract["page_size"]),
            dtype=contract["kv_dtype"],
        )
    except (KeyError, ValueError):
        return None


def _least_label(members: Sequence[Member], label: str) -> int | None:
    values = [m.info.labels.get(label, "") for m in members]
    numbers = [int(value) for value in values if value.isdigit()]
    return min(numbers, default=None)


def _longest(members: Sequence[Member], spec: PageSpec) -> int | None:
    """Tokens of prompt and output that the model takes and that the largest decode pool holds.

    Smaller nodes refuse what does not fit, and the next one is asked.
    """
    pools = [
        int(m.info.labels["num_pages"]) * spec.page_size
        for m in members
        if m.info.identity.role is Role.DECODE and m.info.labels.get("num_pages", "").isdigit()
    ]
    lengths = [_least_label(members, "max_model_len"), max(pools, default=None)]
    return min((n for n in lengths if n is not None), default=None)


def model_facts(view: MembershipView) -> ModelFacts | None:
    """Return the facts stated in ``view``; None when no serving node states a usable contract."""
    members = [m for m in view.members if m.info.identity.role in _SERVING]
    for member in members:
        contract = member.info.contract
        spec = _spec_of(contract)
        if spec is not None and "fingerprint" in contract:
            return ModelFacts(
                spec=spec,
                fingerprint=contract["fingerprint"],
                model=contract.get("model", ""),
                max_model_len=_longest(members, spec),
                vocab_size=_least_label(members, "vocab_size"),
            )
    return None
