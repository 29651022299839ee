"""GGUF metadata as Hugging Face configuration: pure functions from one dict to another.

Owns the mapping of ``<arch>.*`` and ``tokenizer.ggml.*`` keys to ``config.json`` and
``generation_config.json``, and of tensor names. Reads no file, knows no torch.

A model that kvferry would compute differently from its author (rope scaling, experts, an unknown
architecture) is refused here by name, never converted to something close.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch.errors import ConfigError

Metadata = Mapping[str, Any]


class Architecture(NamedTuple):
    """How one GGUF architecture is called in Hugging Face's world.

    ``permuted``: llama.cpp stores the rows of the query and key projections interleaved.
    """

    model_type: str
    class_name: str
    permuted: bool


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", permuted=False),
}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def architecture_of(meta: Metadata) -> Architecture:
    """Return the architecture, or refuse it by name."""
    name = meta.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"GGUF architecture {name!r} is not supported: convert one of {known}")
    for key in (f"{name}.rope.scaling.type", f"{name}.expert_count"):
        if meta.get(key) not in (None, "none", 0):
            raise ConfigError(
                f"GGUF key {key}={meta[key]!r} is not supported: "
                "use the model's original safetensors directory"
            )
    return ARCHITECTURES[name]


def hf_tensor_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, or refuse it by name."""
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[stem]}.{kind}"
    raise ConfigError(
        f"GGUF tensor {gguf_name!r} is not supported: "
        "use the model's original safetensors directory"
    )


def _required(meta: Metadata, key: str) -> Any:
    if key not in meta:
        raise ConfigError(f"GGUF key {key} is missing: download the file again")
    return meta[key]


def vocab_size_of(meta: Metadata) -> int:
    """Return the number of rows of the embedding."""
    declared = meta.get(f"{meta['general.architecture']}.vocab_size")
    return int(declared or len(_required(meta, "tokenizer.ggml.tokens")))


def model_config(meta: Metadata, *, dtype: str, tied: bool) -> dict[str, Any]:
    """Return ``config.json`` for the metadata of one file.

    Args:
        meta: all key-value fields of the GGUF file.
        dtype: ``"float32"`` or ``"bfloat16"``, of the tensors beside it.
        tied: the file has no output projection of its own.
    """
    arch = architecture_of(meta)
    prefix = meta["general.architecture"]
    heads = int(_required(meta, f"{prefix}.attention.head_count"))
    hidden = int(_required(meta, f"{prefix}.embedding_length"))
    return {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(_required(meta, f"{prefix}.feed_forward_length")),
        "num_hidden_layers": int(_required(meta, f"{prefix}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{prefix}.attention.head_count_kv", heads)),
        "head_dim": int(meta.get(f"{prefix}.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(_required(meta, f"{prefix}.context_length")),
        # GGUF holds float32; 1e-05 must not become 9.999999747378752e-06
        "rms_norm_eps": _shortest_float32(
            _required(meta, f"{prefix}.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": float(meta.get(f"{prefix}.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": vocab_size_of(meta),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _shortest_float32(value: float) -> float:
    """Return the decimal with the fewest digits that is the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def generation_config(meta: Metadata) -> dict[str, Any]:
    """Return ``generation_config.json``: which tokens begin and end a text."""
    eos = [meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id")]
    ends = [int(token) for token in dict.fromkeys(eos) if token is not None]
    return {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
