"""Appending K and V to the pages of the pool.

Owns the arithmetic from slots to rows of the flat pool. The pool ``[N, H, L, 2, S, D]`` is seen as
rows of D values; the row of (page, head, layer, K or V, slot) is::

    (((page · H + head) · L + layer) · 2 + kv) · S + slot

Rows of layer l are those of layer 0 shifted by ``2·S·l``: one index serves all layers of a step.
"""

from __future__ import annotations

import torch

from engine.attention.interface import Int64s
from engine.page_pool import PagePool


class KVWriter:
    """Scatters the new tokens' K and V, one kernel for each layer."""

    def __init__(self, pool: PagePool) -> None:
        spec = pool.spec
        rows = pool.pages.view(-1, spec.head_dim)
        step = 2 * spec.page_size
        tail = (spec.num_layers - 1) * step
        self._layers = [
            rows.narrow(0, layer * step, len(rows) - tail) for layer in range(spec.num_layers)
        ]
        self._spec = spec
        self._index = torch.empty(0, dtype=torch.int64)

    def plan(self, slots: Int64s) -> None:
        """Fix where the tokens of this step go: ``page_id * S + slot`` for each."""
        spec = self._spec
        flat = torch.from_numpy(slots).to(self._layers[0].device)
        page = torch.div(flat, spec.page_size, rounding_mode="floor")
        slot = flat - page * spec.page_size
        head = torch.arange(spec.num_kv_heads, device=flat.device)
        kv = torch.arange(2, device=flat.device)
        row = (page[:, None] * spec.num_kv_heads + head) * spec.num_layers  # [T, H]
        index = (row[:, None] * 2 + kv[:, None]) * spec.page_size + slot[:, None, None]
        self._index = index.reshape(-1)  # order: token, K or V, head

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Append ``k`` and ``v [T, H, D]`` of one layer."""
        both = torch.stack((k, v), dim=1).view(-1, self._spec.head_dim)
        self._layers[layer].index_copy_(0, self._index, both)
