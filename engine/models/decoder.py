"""The forward pass of a decoder-only transformer, for all families.

Owns weights and the order of operations. Knows no sampling, no page ids: KV goes through the
attention back end. Families differ by data only (``ModelConfig``): biases, q/k norm, tied
embeddings, rope, window.

One layer over the T tokens of a ragged batch (no padding anywhere)::

    x ─┬─ norm ─ qkv ─ [q,k norm] ─ rope ─ append KV, attend ─ o ─ + ─┐
       └───────────────────────────────────────────────────────────┘ │
       ┌─────────────────────────────────────────────────────────────┘
       └┬─ norm ─ gate,up ─ silu·mul ─ down ─ + ─▶ next layer
        └─────────────────────────────────────┘

In the last layer, everything after attention runs for the rows that are sampled only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.interface import AttentionBackend
from engine.layers import Linear, make_linear, make_tied_head, rms_norm, silu_mul
from engine.model_config import ModelConfig
from engine.rope import interleaved, inverse_frequencies, rotate_, rotations
from engine.weights import WeightSource


class DecoderLayer(NamedTuple):
    """Weights of one layer. ``qk_norm [Hq + H, D]``: one row for each q and k head."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """All weights of a model on one device.

    Args:
        source: where weights come from; every tensor is taken.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._source = source
        self.embedding = source.take("model.embed_tokens.weight").to(device)
        self.layers = [self._load_layer(i) for i in range(config.num_layers)]
        self.norm = source.take("model.norm.weight").to(device)
        self.head: Linear = (
            make_tied_head(self.embedding)
            if config.tie_embeddings
            else make_linear(source.take("lm_head.weight").to(device))
        )
        self.freqs = inverse_frequencies(config.rope, config.head_dim).to(device)

    def _load_layer(self, index: int) -> DecoderLayer:
        prefix = f"model.layers.{index}."
        take = self._source.take
        return DecoderLayer(
            input_norm=take(f"{prefix}input_layernorm.weight").to(self.device),
            qkv=self._fused(
                (f"{prefix}self_attn.q_proj", True),
                (f"{prefix}self_attn.k_proj", True),
                (f"{prefix}self_attn.v_proj", False),
            ),
            qk_norm=self._load_qk_norm(prefix) if self.config.qk_norm else None,
            o=self._fused((f"{prefix}self_attn.o_proj", False)),
            post_norm=take(f"{prefix}post_attention_layernorm.weight").to(self.device),
            gate_up=self._fused((f"{prefix}mlp.gate_proj", False), (f"{prefix}mlp.up_proj", False)),
            down=self._fused((f"{prefix}mlp.down_proj", False)),
        )

    def _fused(self, *parts: tuple[str, bool]) -> Linear:
        """One linear map whose output is that of ``parts`` side by side.

        A part is a checkpoint name and whether rope applies to its rows.
        """
        weight = self._joined([(f"{name}.weight", rope) for name, rope in parts])
        if not self._source.has(f"{parts[0][0]}.bias"):
            return make_linear(weight)
        return make_linear(weight, self._joined([(f"{name}.bias", rope) for name, rope in parts]))

    def _joined(self, parts: list[tuple[str, bool]]) -> torch.Tensor:
        tensors = []
        for name, rope in parts:
            tensor = self._source.take(name).to(self.device)
            tensors.append(interleaved(tensor, self.config.head_dim) if rope else tensor)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _load_qk_norm(self, prefix: str) -> torch.Tensor:
        config = self.config
        q, k = (
            interleaved(self._source.take(f"{prefix}self_attn.{name}.weight"), config.head_dim)
            for name in ("q_norm", "k_norm")
        )
        rows = [q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)]
        return torch.cat(rows).to(self.device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Run a planned batch; every token's KV is appended by ``attention``.

        Args:
            tokens: ``[T]`` int64 on the device.
            positions: ``[T]`` int64 on the device.
            rows: ``[R]`` int64 on the device, places of tokens whose logits are wanted.

        Returns:
            ``[R, V]`` float32 logits.
        """
        config, eps = self.config, self.config.rms_norm_eps
        num_qk = config.num_heads + config.num_kv_heads
        rotation = rotations(positions, self.freqs)
        last = config.num_layers - 1
        hidden = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            heads = qkv.view(len(tokens), num_qk + config.num_kv_heads, config.head_dim)
            qk = heads[:, :num_qk]
            if layer.qk_norm is not None:
                qk.copy_(rms_norm(qk, layer.qk_norm, eps))
            rotate_(qk, rotation)
            attended = attention.run(
                heads[:, : config.num_heads],
                heads[:, config.num_heads : num_qk],
                heads[:, num_qk:],
                index,
            )
            if index == last:
                attended, hidden = attended[rows], hidden[rows]
            hidden = hidden + layer.o(attended)
            hidden += layer.down(silu_mul(layer.gate_up(rms_norm(hidden, layer.post_norm, eps))))
        return self.head(rms_norm(hidden, self.norm, eps)).float()
