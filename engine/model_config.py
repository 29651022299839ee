"""What a model is: the facts of a Hugging Face ``config.json`` that the engine needs.

Owns reading and judging it: a feature that is not implemented is an error that names it, never
silently ignored. Knows no weights and no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelLoadError
from engine.models.families import FAMILIES, Family

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


class RopeConfig(NamedTuple):
    """Rotary position embedding. The factors are used by the types ``linear`` and ``llama3``."""

    rope_type: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(NamedTuple):
    """One decoder-only model. ``sliding_window`` None attends to everything before."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_model_len: int
    eos_token_ids: frozenset[int]


def read_model_config(model_dir: Path) -> ModelConfig:
    """Return the facts of the model in ``model_dir``.

    Raises:
        ModelLoadError: no directory, no or bad ``config.json``, or an unsupported model.
    """
    if not model_dir.is_dir():
        raise ModelLoadError(
            f"model directory {str(model_dir)!r} does not exist; get one with `kvferry model pull`"
        )
    raw = _read_json(model_dir / "config.json")
    generation = model_dir / "generation_config.json"
    eos = raw.get("eos_token_id")
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    return parse_model_config(raw, eos_token_id=eos, source=str(model_dir / "config.json"))


def parse_model_config(raw: dict[str, Any], *, eos_token_id: Any, source: str) -> ModelConfig:
    """Return the facts in a decoded ``config.json``; ``source`` names it in errors.

    Raises:
        ModelLoadError: an unsupported model, or values that make no sense.
    """
    try:
        return _parse(raw, eos_token_id, source)
    except ModelLoadError:
        raise
    except (ValueError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{source} has a value of the wrong kind: {exc}") from exc


def _parse(raw: dict[str, Any], eos_token_id: Any, source: str) -> ModelConfig:
    architecture, family = _family(raw, source)
    missing = [key for key in _REQUIRED if not _is_size(raw.get(key))]
    if missing:
        raise ModelLoadError(f"{source}: {', '.join(missing)} missing or not positive integers")
    _refuse_unsupported(raw, source)
    num_heads = raw["num_attention_heads"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelLoadError(f"{source}: head_dim={head_dim}; rope needs a positive even one")
    attention_bias = family.qkv_bias == "config" and bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, source),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family.qkv_bias == "always",
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sliding_window=_sliding_window(raw, family, source),
        max_model_len=int(raw.get("max_position_embeddings", 2048)),
        eos_token_ids=_token_ids(eos_token_id),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{str(path)!r} does not exist; the directory must be a Hugging Face model "
            "(convert GGUF files with `kvferry model convert`)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {exc}; fetch it again") from exc
    if not isinstance(value, dict):
        raise ModelLoadError(f"{str(path)!r} is not a JSON object; fetch it again")
    return value


def _family(raw: dict[str, Any], source: str) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    found = ", ".join(map(str, names)) or "none"
    raise ModelLoadError(
        f"{source}: architecture {found} is not supported; choose a model of "
        f"{', '.join(sorted(FAMILIES))}"
    )


def _refuse_unsupported(raw: dict[str, Any], source: str) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(
            f"{source}: quantization {method!r} is not supported; use the unquantized checkpoint"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(
            f"{source}: hidden_act={raw['hidden_act']!r} is not supported (silu is)"
        )
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError(
            f"{source}: partial_rotary_factor={raw['partial_rotary_factor']} is not supported"
        )


def _rope(raw: dict[str, Any], source: str) -> RopeConfig:
    """Both spellings: ``rope_parameters`` (transformers 5), ``rope_theta`` + ``rope_scaling``."""
    scaling: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if rope_type not in ("default", "linear", "llama3"):
        raise ModelLoadError(
            f"{source}: rope type {rope_type!r} is not supported (default, linear, llama3 are)"
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _sliding_window(raw: dict[str, Any], family: Family, source: str) -> int | None:
    window = raw.get("sliding_window")
    if family.sliding_window == "if_enabled" and raw.get("use_sliding_window", False) and window:
        raise ModelLoadError(
            f"{source}: use_sliding_window=true (a window on some layers) is not supported; "
            "set it to false to attend to everything"
        )
    return int(window) if window and family.sliding_window == "always" else None


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(x) for x in (value if isinstance(value, list) else [value]))
