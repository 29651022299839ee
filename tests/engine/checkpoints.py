"""Tiny random checkpoints of every family, made with transformers; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 160
MAX_POSITION = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(class_name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{class_name}Config")(**{**_COMMON, **changes})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama-llama3-rope": _config("Llama", rope_parameters=_LLAMA3, tie_word_embeddings=False),
    "llama-tied-biased": _config(
        "Llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-linear-rope": _config(
        "Llama",
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        num_key_value_heads=1,
        head_dim=24,
    ),
    "mistral-window": _config("Mistral", sliding_window=20, head_dim=16),
    "mistral": _config("Mistral", sliding_window=None, head_dim=32),
    "qwen2": _config("Qwen2", tie_word_embeddings=True, use_sliding_window=False),
    "qwen3": _config("Qwen3", head_dim=32, tie_word_embeddings=False),
}


def make_model(family: str, seed: int = 0) -> Any:
    """A random model in float32 whose greedy choices are far from ties."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    name = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 2.0 / parameter.shape[-1] ** 0.5)
    return model


def save(model: Any, directory: Path, **kwargs: Any) -> Path:
    model.save_pretrained(directory, safe_serialization=True, **kwargs)
    return directory
