"""Attention over paged KV in plain torch: the reference, on CPU and GPU.

Owns the gather of pages and the calls of scaled_dot_product_attention. Only the pages of the
sequences at hand are read, one layer at a time; the pool is never copied.

Seen as rows of one page run, ``[N·H·L·2, S·D]``, the pool yields K and V of a set of sequences by
a single ``index_select`` in the order (K or V, sequence, head, page): exactly the dense operand
``[2, B, H, P·S, D]``. The index is made once per step and serves all layers, whose rows are
shifted.

* Decode sequences (one token): groups of similar length (``decode_groups``), one call each. The G
  query heads of a KV head are the rows of one small matrix, so K and V are read once for all.
* Chunks: one call for every ``QUERY_BLOCK`` tokens, against the positions before its end only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.decode_groups import DecodeGroup, group_by_pages
from engine.attention.interface import AttentionShape, Int32s, Int64s, RaggedBatch
from engine.attention.kv_writer import KVWriter
from engine.page_pool import PagePool

QUERY_BLOCK = 512


class _Gather(NamedTuple):
    """KV of sequences of ``num_pages`` pages each; ``run_rows`` is the index described above."""

    run_rows: torch.Tensor
    num_seqs: int
    num_pages: int


class _Decode(NamedTuple):
    """One group. ``length`` is that of the longest; ``bias`` hides the rest of shorter ones;
    ``stale`` are rows ``[2·B·H·P·S]`` of the gathered KV that hold no valid slot."""

    gather: _Gather
    rows: torch.Tensor
    length: int
    bias: torch.Tensor | None
    stale: torch.Tensor | None


class _Block(NamedTuple):
    """Query tokens ``first:last`` of the batch against positions ``low:high`` of their sequence."""

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None


class _Chunk(NamedTuple):
    gather: _Gather
    blocks: list[_Block]


class TorchBackend:
    """See ``AttentionBackend``."""

    def __init__(self, shape: AttentionShape, pool: PagePool) -> None:
        assert (shape.num_kv_heads, shape.head_dim) == (pool.spec.num_kv_heads, pool.spec.head_dim)
        spec = pool.spec
        self._shape = shape
        self._spec = spec
        self._groups = shape.num_heads // shape.num_kv_heads
        self._writer = KVWriter(pool)
        runs = pool.pages.view(-1, spec.page_size * spec.head_dim)
        tail = (spec.num_layers - 1) * 2
        self._layers = [
            runs.narrow(0, layer * 2, len(runs) - tail) for layer in range(spec.num_layers)
        ]
        self._device = runs.device
        self._dtype = runs.dtype
        self._decodes: list[_Decode] = []
        self._chunks: list[_Chunk] = []

    def plan(self, batch: RaggedBatch) -> None:
        size = self._spec.page_size
        counts = np.diff(batch.qo_indptr).tolist()
        pages = np.diff(batch.kv_indptr).tolist()
        lengths = ((np.diff(batch.kv_indptr) - 1) * size + batch.kv_last_page_len).tolist()
        self._writer.plan(batch.slots)
        decoding = [i for i, count in enumerate(counts) if count == 1]
        page_nbytes = self._spec.page_nbytes // self._spec.num_layers
        groups = group_by_pages(decoding, [pages[i] for i in decoding], page_nbytes)
        self._decodes = [self._plan_decode(batch, group, lengths) for group in groups]
        self._chunks = [
            self._plan_chunk(batch, i, count, lengths[i])
            for i, count in enumerate(counts)
            if count > 1
        ]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        self._writer.write(k, v, layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        runs = self._layers[layer]
        for decode in self._decodes:
            self._run_decode(decode, q, runs, out)
        for chunk in self._chunks:
            self._run_chunk(chunk, q, runs, out)
        return out.view(len(q), -1)

    def _gather_of(self, tables: Int32s) -> _Gather:
        """Plan the gather of ``tables [B, P]`` page ids."""
        spec = self._spec
        pages = torch.from_numpy(tables.astype(np.int64)).to(self._device)
        head = torch.arange(spec.num_kv_heads, device=self._device)[:, None]
        kv = torch.arange(2, device=self._device).view(2, 1, 1, 1)
        row = (pages[:, None] * spec.num_kv_heads + head) * (spec.num_layers * 2) + kv
        return _Gather(row.reshape(-1), *tables.shape)

    def _gathered(self, gather: _Gather, runs: torch.Tensor) -> torch.Tensor:
        """K and V as ``[2, B, H, P·S, D]``."""
        spec = self._spec
        shape = (2, gather.num_seqs, spec.num_kv_heads, gather.num_pages * spec.page_size)
        return torch.index_select(runs, 0, gather.run_rows).view(*shape, spec.head_dim)

    def _plan_decode(self, batch: RaggedBatch, group: DecodeGroup, lengths: list[int]) -> _Decode:
        tables = np.empty((len(group.members), group.num_pages), dtype=np.int32)
        for row, i in enumerate(group.members):
            table = batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]]
            tables[row, : len(table)] = table
            tables[row, len(table) :] = table[0]  # padding, hidden: any page with valid numbers
        own = np.array([lengths[i] for i in group.members], dtype=np.int64)
        length = int(own.max())
        rows = torch.from_numpy(batch.qo_indptr[list(group.members)].astype(np.int64))
        bias, stale = self._hide(own, np.diff(batch.kv_indptr)[list(group.members)], tables, length)
        return _Decode(self._gather_of(tables), rows.to(self._device), length, bias, stale)

    def _hide(
        self, own: Int64s, num_pages: Int32s, tables: Int32s, length: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What keeps one group's invalid positions out: a bias ``[B, 1, 1, n]``, and stale rows.

        A bias alone would not do: 0 · NaN is NaN, and an invalid slot may hold any bytes.
        """
        window, spec = self._shape.window, self._spec
        positions = np.arange(length)
        hidden = positions >= own[:, None]
        if window is not None:
            hidden |= positions < (own[:, None] - window)
        if not hidden.any():
            return None, None
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        bias.masked_fill_(torch.from_numpy(hidden).to(self._device), float("-inf"))
        # Padding repeats the first page, which is invalid in part when it is also the last.
        repeats = (positions < num_pages[:, None] * spec.page_size) | (num_pages[:, None] == 1)
        row, position = np.nonzero((positions >= own[:, None]) & repeats)
        span = tables.shape[1] * spec.page_size
        runs = np.arange(2 * spec.num_kv_heads).reshape(2, 1, spec.num_kv_heads)
        kv, head = runs // spec.num_kv_heads, runs % spec.num_kv_heads
        flat = ((kv * len(own) + row[None, :, None]) * spec.num_kv_heads + head) * span
        flat = (flat + position[None, :, None]).reshape(-1)
        stale = torch.from_numpy(flat.astype(np.int64)).to(self._device)
        return bias[:, None, None], stale if len(flat) else None

    def _run_decode(
        self, decode: _Decode, q: torch.Tensor, runs: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv = self._gathered(decode.gather, runs)
        if decode.stale is not None:
            kv.view(-1, self._spec.head_dim).index_fill_(0, decode.stale, 0.0)
        keys, values = kv[0, :, :, : decode.length], kv[1, :, :, : decode.length]
        spec = self._spec
        query = q[decode.rows].view(-1, spec.num_kv_heads, self._groups, spec.head_dim)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=decode.bias)
        out[decode.rows] = attended.flatten(1, 2)

    def _plan_chunk(self, batch: RaggedBatch, i: int, count: int, length: int) -> _Chunk:
        table = batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]]
        first, start = int(batch.qo_indptr[i]), length - count
        blocks = [
            self._plan_block(first, start, begin, min(begin + QUERY_BLOCK, count))
            for begin in range(0, count, QUERY_BLOCK)
        ]
        return _Chunk(self._gather_of(table[None, :]), blocks)

    def _plan_block(self, first: int, start: int, begin: int, end: int) -> _Block:
        window = self._shape.window
        high = start + end
        low = 0 if window is None else max(0, start + begin - window + 1)
        if start + begin == 0 and (window is None or end <= window):
            return _Block(first, first + end, 0, high, None)  # a square: plain causal
        query = torch.arange(start + begin, high, device=self._device)[:, None]
        key = torch.arange(low, high, device=self._device)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        return _Block(first + begin, first + end, low, high, mask)

    def _run_chunk(
        self, chunk: _Chunk, q: torch.Tensor, runs: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv = self._gathered(chunk.gather, runs)[:, 0, :, None]  # [2, H, 1, P·S, D]
        groups = self._groups
        for block in chunk.blocks:
            query = q[block.first : block.last].reshape(
                block.last - block.first, -1, groups, kv.shape[-1]
            )
            query = query.permute(1, 2, 0, 3)
            keys, values = kv[:, :, :, block.low : block.high].expand(-1, -1, groups, -1, -1)
            attended = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=block.mask, is_causal=block.mask is None
            )
            out[block.first : block.last] = attended.permute(2, 0, 1, 3).flatten(1, 2)
