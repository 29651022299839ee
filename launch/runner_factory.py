"""The engine of a prefill or decode process: device, dtype, size of the pool, loading.

Owns the choices that depend on this machine and are made before the first weight is read, so that
what cannot work fails in one line. Imports torch: only in processes that compute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.attention.interface import resolve_attention
from engine.config import resolve_device, resolve_dtype
from engine.errors import ModelLoadError
from engine.fake import FakeRunner
from engine.loader import load_runner, page_spec
from engine.model_config import read_model_config
from engine.step import Runner
from kvstore.page import PageSpec
from launch.config import ComputeOptions
from launch.errors import ConfigError
from launch.model_store import ResolvedModel
from launch.progress import progress
from launch.runtime import config_errors
from launch.sizes import human_size, pages_in, parse_size

logger = logging.getLogger(__name__)

CPU_KV_MEMORY = "512MiB"
GPU_FREE_SHARE = 0.85  # of what is free beside the weights; the rest is for activations
FAKE_NUM_PAGES = 4096


def choose_num_pages(
    options: ComputeOptions, spec: PageSpec, device: torch.device, weights_nbytes: int
) -> int:
    """Return the pages of the pool: as asked, else what the memory holds."""
    if options.num_pages is not None:
        return options.num_pages
    if options.kv_memory is None and device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        nbytes = max(int((free - weights_nbytes) * GPU_FREE_SHARE), 0)
        return pages_in(nbytes, spec, f"{human_size(nbytes)} beside the weights on the GPU")
    text = options.kv_memory or CPU_KV_MEMORY
    return pages_in(parse_size(text, "--kv-memory"), spec, f"--kv-memory {text}")


def make_runner(
    options: ComputeOptions, model: ResolvedModel, num_threads: int, *, gpus: str | None = None
) -> Runner:
    """Load the model. Blocks for as long as that takes. ``gpus`` is what ``--gpus`` says.

    Raises:
        ConfigError: the model, the device or the sizes do not work here.
    """
    torch.set_num_threads(num_threads)
    with config_errors(f"--model {options.model}"):
        if model.directory is None:
            return _fake_runner(options, gpus)
        check_gpus(options, gpus)
        return _real_runner(options, model.name, model.directory, num_threads)


def check_gpus(options: ComputeOptions, gpus: str | None) -> None:
    """Refuse ``--gpus`` where the model would silently compute on the CPU.

    Raises:
        ConfigError: torch sees no CUDA device.
    """
    if gpus is not None and options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--gpus {gpus}: torch {torch.__version__} sees no such CUDA device here; leave it out "
            "to compute on the CPU, or install a CUDA build of torch and check nvidia-smi"
        )


@contextmanager
def _blame(name: str, value: str) -> Iterator[None]:
    """Name the option in what the engine says about its parameter of the same name."""
    try:
        yield
    except ModelLoadError as error:
        reason = str(error).removeprefix(f"{name}={value!r}").lstrip(": ")
        raise ConfigError(f"--{name} {value}: {reason}") from error


def _real_runner(options: ComputeOptions, name: str, directory: Path, num_threads: int) -> Runner:
    with _blame("device", options.device):
        device = resolve_device(options.device)
    with _blame("dtype", options.dtype):
        dtype = resolve_dtype(options.dtype, device)
    with _blame("attention", options.attention):
        attention = resolve_attention(options.attention, device)
    spec = page_spec(read_model_config(directory), options.page_size, dtype)
    weights_nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    num_pages = choose_num_pages(options, spec, device, weights_nbytes)
    logger.info(
        "loading %s on %s in %s: %d pages of %d tokens (%s), %d %s",
        name,
        device,
        spec.dtype,
        num_pages,
        spec.page_size,
        human_size(num_pages * spec.page_nbytes),
        num_threads,
        "thread" if num_threads == 1 else "threads",
    )
    with progress("loading weights") as report:
        seen = 0

        def on_tensor(done: int, total: int) -> None:
            nonlocal seen
            report.set_total(total)
            report.advance(done - seen)
            seen = done

        return load_runner(
            directory,
            device=str(device),
            dtype=spec.dtype,
            num_pages=num_pages,
            page_size=options.page_size,
            attention=attention,
            progress=on_tensor,
            name=name,
        )


def _fake_runner(options: ComputeOptions, gpus: str | None) -> Runner:
    if options.device == "cuda":
        raise ConfigError(
            "--device cuda: the fake model computes on the CPU; choose --device cpu, or a model"
        )
    if gpus is not None:
        logger.warning("--gpus %s: the fake model computes on the CPU and uses no GPU", gpus)
    num_pages = options.num_pages or FAKE_NUM_PAGES
    logger.info("the fake model: %d pages of %d tokens", num_pages, options.page_size)
    return FakeRunner(
        num_pages=num_pages,
        page_size=options.page_size,
        step_delay_s=options.fake_step_delay,
        token_delay_s=options.fake_token_delay,
    )
