"""GGUF file → Hugging Face safetensors directory.

Owns the driver: reads tensors one by one, dequantises, undoes llama.cpp's row permutation, writes
shards and the JSON files beside them. Which keys and names correspond is ``gguf_config``'s and
``gguf_tokenizer``'s business.

The target directory appears at once and complete, by a rename; a conversion that dies leaves only
a ``.partial`` directory, which the next one removes. At most one shard of tensors is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import gguf_config, gguf_tokenizer
from launch.errors import ConfigError
from launch.progress import progress

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

SHARD_NBYTES_MAX = 2 << 30
DTYPES = ("float32", "bfloat16")


def convert_gguf(source: Path, target: Path, *, dtype: str = "float32") -> None:
    """Convert ``source`` into the new directory ``target``.

    Raises:
        ConfigError: no such file, not a GGUF file, a model that is not supported, an unknown
            dtype, or a target that exists already.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if source.is_dir():
        raise ConfigError(f"{source}: is a directory: name the .gguf file in it")
    if not source.is_file():
        raise ConfigError(f"{source}: no such file: name a .gguf file")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists already: remove it or name another directory")
    reader = _open(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    gguf_config.architecture_of(meta)
    with _atomic_directory(target) as directory:
        _write_tokenizer(directory, source, meta)
        _write_weights(directory, reader.tensors, meta, dtype)
        tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
        config = gguf_config.model_config(meta, dtype=dtype, tied=tied)
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", gguf_config.generation_config(meta))


def _open(source: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file ({error})") from error


@contextmanager
def _atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a fresh directory that becomes ``target`` when the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, source: Path, meta: Mapping[str, Any]) -> None:
    original = source.parent / "tokenizer.json"
    if original.is_file():
        shutil.copyfile(original, directory / "tokenizer.json")
    else:
        gguf_tokenizer.build_tokenizer(meta).save(str(directory / "tokenizer.json"))
    max_length = int(meta[f"{meta['general.architecture']}.context_length"])
    config = gguf_tokenizer.tokenizer_config(meta, max_length)
    _write_json(directory / "tokenizer_config.json", config)


def _unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the two rotary halves of each head."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tensors(
    tensors: list[Any], meta: Mapping[str, Any], dtype: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(Hugging Face name, tensor)`` one at a time."""
    import gguf
    import numpy as np
    import torch

    permuted = gguf_config.architecture_of(meta).permuted
    prefix = f"{meta['general.architecture']}.attention"
    heads = int(meta[f"{prefix}.head_count"])
    heads_of = {"attn_q": heads, "attn_k": int(meta.get(f"{prefix}.head_count_kv", heads))}
    for tensor in tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if permuted and part in heads_of:
            values = _unpermute(values, heads_of[part])
        name = gguf_config.hf_tensor_name(tensor.name)
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))


def _write_weights(
    directory: Path, tensors: list[Any], meta: Mapping[str, Any], dtype: str
) -> None:
    """Write the tensors as one file, or as shards with an index when they are large."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    shard_nbytes = total_nbytes = 0
    itemsize = 4 if dtype == "float32" else 2
    total = sum(int(tensor.n_elements) for tensor in tensors) * itemsize

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        save_file(shard, str(path), metadata={"format": "pt"})
        path.chmod(0o644)  # save_file makes it unreadable for other users
        shards.append(list(shard))
        shard.clear()

    with progress(f"converting to {dtype}", total) as report:
        for name, tensor in _tensors(tensors, meta, dtype):
            if shard and shard_nbytes + tensor.nbytes > SHARD_NBYTES_MAX:
                flush()
                shard_nbytes = 0
            shard[name] = tensor
            shard_nbytes += tensor.nbytes
            total_nbytes += tensor.nbytes
            report.advance(tensor.nbytes)
        flush()
    _name_shards(directory, shards, total_nbytes)


def _name_shards(directory: Path, shards: list[list[str]], total_nbytes: int) -> None:
    """Give the shards their final names, which say how many there are."""
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
