"""The supported model families, as data.

Owns the differences between architectures of one decoder; the code that runs them is in
``engine/models/decoder.py``. Names are those of ``architectures`` in ``config.json``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """How one architecture differs from plain Llama.

    Attributes:
        qkv_bias: biases on q, k, v: always, never, or as ``attention_bias`` says (then on o too).
        mlp_bias: the config key ``mlp_bias`` is honoured.
        qk_norm: RMS norm over head_dim of q and k before rope.
        sliding_window: ``always`` when the config has one, ``if_enabled`` by
            ``use_sliding_window``, ``never``.
    """

    qkv_bias: Literal["always", "never", "config"] = "never"
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: Literal["always", "if_enabled", "never"] = "never"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="config", mlp_bias=True),  # SmolLM2 too
    "MistralForCausalLM": Family(sliding_window="always"),
    "Qwen2ForCausalLM": Family(qkv_bias="always", sliding_window="if_enabled"),
    "Qwen3ForCausalLM": Family(qkv_bias="config", qk_norm=True, sliding_window="if_enabled"),
}
