"""Bringing up a model: from a directory to a ``ModelRunner``.

Owns the order: judge the config, resolve device and dtype, read weights tensor by tensor, then
allocate the pool. Every failure of the world is a ``ModelLoadError`` of one line.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.interface import AttentionShape, make_attention, resolve_attention
from engine.config import resolve_device, resolve_dtype
from engine.errors import ModelLoadError
from engine.model_config import ModelConfig, read_model_config
from engine.models.decoder import Decoder
from engine.page_pool import PagePool
from engine.runner import ModelRunner
from engine.step import ModelInfo
from engine.weights import Progress, WeightSource
from kvstore.page import DEFAULT_PAGE_SIZE, PageSpec


def load_runner(
    model_dir: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    num_pages: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    attention: str = "auto",
    progress: Progress | None = None,
    name: str | None = None,
) -> ModelRunner:
    """Load a Hugging Face model directory.

    Args:
        num_pages: pages of the KV pool, the scratch page included.
        progress: called with bytes read and bytes in all, after every tensor.
        name: of the model; the directory's by default.

    Raises:
        ModelLoadError: the directory, its files, device, dtype or sizes do not work; one line that
            names the value and what to do.
    """
    directory = Path(model_dir)
    config = read_model_config(directory)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    backend = resolve_attention(attention, place)
    spec = page_spec(config, page_size, kind)
    if num_pages < 2:
        raise ModelLoadError(f"num_pages={num_pages}: at least 2 are needed (page 0 is scratch)")
    source = WeightSource(directory, config, kind, progress)
    with torch.inference_mode():
        decoder = Decoder(config, source, place)
    pool = _device_pool(spec, num_pages, place)
    info = ModelInfo(
        name=name or directory.resolve().name,
        fingerprint=source.finish(),
        spec=spec,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
    )
    shape = AttentionShape.of(config)
    return ModelRunner(info, decoder, pool, make_attention(backend, shape, pool))


def page_spec(config: ModelConfig, page_size: int, dtype: torch.dtype) -> PageSpec:
    """Return the page geometry of a model.

    Raises:
        ModelLoadError: the sizes do not make a page.
    """
    try:
        return PageSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=str(dtype).removeprefix("torch."),
        )
    except ValueError as exc:
        raise ModelLoadError(str(exc)) from exc


def _device_pool(spec: PageSpec, num_pages: int, device: torch.device) -> PagePool:
    nbytes = num_pages * spec.page_nbytes
    try:
        storage = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as exc:  # torch raises OutOfMemoryError, a RuntimeError
        raise ModelLoadError(
            f"num_pages={num_pages}: no memory for a pool of {nbytes / 2**30:.1f} GiB on {device}; "
            "use fewer pages"
        ) from exc
    return PagePool(spec, num_pages, storage)
