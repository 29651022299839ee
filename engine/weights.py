"""From a directory of safetensors files to the tensors a decoder wants, one at a time.

Owns finding the files, the list of tensors a model must have, and the check of one against the
other *before* anything is read: missing, unexpected or mis-shaped tensors are one error that names
tensor and file. Every tensor is hashed for the fingerprint as it passes. Peak memory is that of the
weights handed out plus the one being read. Knows no layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.fingerprint import Fingerprint
from engine.model_config import ModelConfig
from engine.safetensors_file import TensorEntry, read_header, read_tensor

INDEX_NAME = "model.safetensors.index.json"
# Called with bytes read so far and bytes in all.
Progress = Callable[[int, int], None]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor of the checkpoint."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_rows, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            expected[f"{prefix}{norm}.weight"] = (hidden,)
        for name, rows, columns, bias in linears:
            expected[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                expected[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            expected[f"{prefix}self_attn.q_norm.weight"] = (dim,)
            expected[f"{prefix}self_attn.k_norm.weight"] = (dim,)
    return expected


def find_tensors(model_dir: Path) -> dict[str, TensorEntry]:
    """Return every tensor in the directory; the sharded index is followed when there is one.

    Raises:
        ModelLoadError: no safetensors files, a listed file is absent, or a file is broken.
    """
    index = model_dir / INDEX_NAME
    files = _indexed_files(index) if index.is_file() else sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{str(model_dir)!r} holds no *.safetensors files; fetch the model with `kvferry model "
            "pull`, or convert a GGUF file with `kvferry model convert`"
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise ModelLoadError(
                    f"tensor {name!r} is in {entries[name].file.name} and in {file.name} of "
                    f"{str(model_dir)!r}; remove the file that is left over"
                )
            entries[name] = entry
    return entries


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{str(index)!r} is not a safetensors index; fetch it again") from exc
    for name in names:
        if "/" in name or not (index.parent / name).is_file():
            raise ModelLoadError(f"{str(index)!r} lists {name!r}, which is missing; fetch it again")
    return [index.parent / name for name in names]


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and no computation needs."""
    return name.endswith(".rotary_emb.inv_freq") or (
        config.tie_embeddings and name == "lm_head.weight"
    )


class WeightSource:
    """Hands out the tensors of one checkpoint, each exactly once.

    Args:
        dtype: what tensors are converted to.
        progress: called after every tensor.

    Raises:
        ModelLoadError: on construction, when the checkpoint does not fit ``config``.
    """

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        self._entries = find_tensors(model_dir)
        self._expected = expected_tensors(config)
        self._dtype = dtype
        self._progress = progress
        self.fingerprint = Fingerprint(config)
        _check_fit(model_dir, config, self._expected, self._entries)
        self._pending = set(self._expected)
        self._total_nbytes = sum(self._entries[name].nbytes for name in self._expected)
        self._done_nbytes = 0

    def take(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU in the requested dtype, and forget it."""
        self._pending.remove(name)
        entry = self._entries[name]
        tensor = read_tensor(name, entry)
        self.fingerprint.add(name, tensor)
        self._done_nbytes += entry.nbytes
        if self._progress is not None:
            self._progress(self._done_nbytes, self._total_nbytes)
        return tensor.to(self._dtype)

    def has(self, name: str) -> bool:
        return name in self._expected

    def finish(self) -> str:
        """Assert that everything was taken; return the model fingerprint."""
        assert not self._pending, f"never taken: {sorted(self._pending)[:3]}"
        return self.fingerprint.hexdigest()


def _check_fit(
    model_dir: Path,
    config: ModelConfig,
    expected: dict[str, tuple[int, ...]],
    entries: dict[str, TensorEntry],
) -> None:
    where = f"{str(model_dir)!r} does not fit its config.json ({config.architecture})"
    for name, shape in expected.items():
        if name not in entries:
            count = sum(1 for other in expected if other not in entries)
            files = ", ".join(sorted({entry.file.name for entry in entries.values()}))
            raise ModelLoadError(
                f"{where}: tensor {name!r} is missing from {files} ({count} missing in all); "
                "fetch it again"
            )
        if entries[name].shape != shape:
            raise ModelLoadError(
                f"{where}: tensor {name!r} in {entries[name].file.name} has shape "
                f"{list(entries[name].shape)}, not {list(shape)}"
            )
    unexpected = [n for n in entries if n not in expected and not _is_ignored(n, config)]
    if unexpected:
        name = min(unexpected)
        raise ModelLoadError(
            f"{where}: tensor {name!r} in {entries[name].file.name} is unexpected "
            f"({len(unexpected)} in all)"
        )
