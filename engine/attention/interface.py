"""What every attention back end does, and the choice of one.

Owns the interface and ``RaggedBatch``, the description of one step in FlashInfer's terms. The
contract suite in ``tests/engine/test_attention_contract.py`` holds for every implementation.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelLoadError
from engine.model_config import ModelConfig
from engine.page_pool import PagePool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class AttentionShape(NamedTuple):
    """Heads of the model. ``window`` None attends to everything before."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> AttentionShape:
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window)


class RaggedBatch(NamedTuple):
    """B sequences, T tokens. FlashInfer's names; int32 arrays on the host.

    Attributes:
        qo_indptr: ``[B + 1]``, tokens of sequence i are ``qo_indptr[i]:qo_indptr[i + 1]``.
        kv_indptr: ``[B + 1]``, pages of sequence i in ``kv_indices``.
        kv_indices: ``[kv_indptr[B]]`` page ids.
        kv_last_page_len: ``[B]`` valid slots of each last page, 1..S.
        slots: ``[T]`` int64, ``page_id * S + slot`` where the KV of each token goes.
    """

    qo_indptr: Int32s
    kv_indptr: Int32s
    kv_indices: Int32s
    kv_last_page_len: Int32s
    slots: Int64s


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the pool it was made with.

    Query token j of a sequence of q tokens and n valid positions attends to positions
    ``0 .. n - q + j`` (the last ``window`` of them). What lies in slots beyond the valid positions,
    NaN included, has no influence.
    """

    def plan(self, batch: RaggedBatch) -> None:
        """Prepare for one step; holds until the next ``plan``."""
        ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Append ``k`` and ``v`` to their slots, then attend.

        Args:
            q: ``[T, Hq, D]``; k, v: ``[T, H, D]``; any strides with the last dimension dense.

        Returns:
            ``[T, Hq * D]`` contiguous.
        """
        ...


def flashinfer_is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def resolve_attention(name: str, device: torch.device) -> str:
    """Return ``torch`` or ``flashinfer``.

    Raises:
        ModelLoadError: unknown name, or flashinfer where it cannot work.
    """
    if name == "auto":
        return "flashinfer" if device.type == "cuda" and flashinfer_is_installed() else "torch"
    if name not in ("torch", "flashinfer"):
        raise ModelLoadError(f"attention={name!r}: choose torch, flashinfer or auto")
    if name == "flashinfer" and device.type != "cuda":
        raise ModelLoadError("attention='flashinfer' needs --device cuda; use --attention torch")
    if name == "flashinfer" and not flashinfer_is_installed():
        raise ModelLoadError(
            "attention='flashinfer' is not installed; pip install 'flashinfer-python>=0.2', "
            "or use torch"
        )
    return name


def make_attention(name: str, shape: AttentionShape, pool: PagePool) -> AttentionBackend:
    """Return a back end by its resolved name; imports it only then."""
    if name == "flashinfer":
        from engine.attention.flashinfer_backend import FlashInferBackend

        return FlashInferBackend(shape, pool)
    from engine.attention.torch_backend import TorchBackend

    return TorchBackend(shape, pool)
