"""The building blocks of a decoder: linear maps, RMS norm, gated activation.

Owns how each is computed fast on each device. Knows no model and no pages.

On CPU in float32, weights are packed once into oneDNN's blocked layout, whose product beats
``F.linear`` for a few rows as well as for chunks (docs/engine.md). The packed weight replaces the
plain one, so memory does not grow.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

# A tied output matrix must also exist unpacked, for the embedding: pack a copy only when small.
PACKED_COPY_NBYTES_MAX = 128 << 20
_PACK_ROWS_HINT = 16


class Linear(Protocol):
    """``[T, in] → [T, out]``, contiguous."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """A weight ``[out, in]`` in its plain layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A weight in oneDNN's blocked layout (CPU, float32)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS_HINT)
        self._bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._apply(x, self._packed, self._bias, "none", [], "")
        return out


def can_pack(weight: torch.Tensor) -> bool:
    """True when this build of torch packs such a weight (a private, long-stable operator)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the fastest linear map for ``weight``; the caller drops ``weight`` afterwards."""
    return PackedLinear(weight, bias) if can_pack(weight) else DenseLinear(weight, bias)


def make_tied_head(embedding: torch.Tensor) -> Linear:
    """Return the output map that shares its weight with ``embedding [V, hidden]``."""
    small = embedding.numel() * embedding.element_size() <= PACKED_COPY_NBYTES_MAX
    return make_linear(embedding) if small else DenseLinear(embedding)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension, in float32; ``weight`` broadcasts against ``x``.

    On CPU the norm is one reduction and one product, where ``F.rms_norm`` is composed of passes.
    """
    if x.is_cuda and weight.dim() == 1:
        normed: torch.Tensor = torch.rms_norm(x, list(weight.shape), weight, eps)
        return normed
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    normed = (wide * scale).to(x.dtype)
    return normed.mul_(weight)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[T, 2 * intermediate] → [T, intermediate]``: silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
