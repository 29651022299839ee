"""Attention through FlashInfer (https://docs.flashinfer.ai), on CUDA.

Owns the wrapper and its workspace. Imported only when chosen. Mixed batches of chunks and decode
steps run as one ``BatchPrefillWithPagedKVCacheWrapper`` call: causal, aligned to the end of each
sequence. A layer of the pool is handed over as strided ``(k, v)`` views in HND layout; nothing is
copied.
"""

from __future__ import annotations

import flashinfer
import torch

from engine.attention.interface import AttentionShape, RaggedBatch
from engine.attention.kv_writer import KVWriter
from engine.page_pool import PagePool

WORKSPACE_NBYTES = 256 << 20


class FlashInferBackend:
    """See ``AttentionBackend``."""

    def __init__(self, shape: AttentionShape, pool: PagePool) -> None:
        device = pool.storage.device
        self._shape = shape
        self._spec = pool.spec
        self._writer = KVWriter(pool)
        self._layers = [pool.layer(layer) for layer in range(pool.spec.num_layers)]
        self._dtype = pool.pages.dtype
        self._workspace = torch.empty(WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def plan(self, batch: RaggedBatch) -> None:
        shape = self._shape
        self._writer.plan(batch.slots)
        self._wrapper.plan(
            torch.from_numpy(batch.qo_indptr),
            torch.from_numpy(batch.kv_indptr),
            torch.from_numpy(batch.kv_indices).to(self._workspace.device),
            torch.from_numpy(batch.kv_last_page_len),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._spec.page_size,
            causal=True,
            window_left=-1 if shape.window is None else shape.window - 1,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        self._writer.write(k, v, layer)
        attended: torch.Tensor = self._wrapper.run(q.contiguous(), self._layers[layer])
        return attended.view(len(q), -1)
