"""Which device and dtype the engine runs with: names judged, ``auto`` resolved.

Knows no weights. Imports torch only to resolve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def resolve_device(name: str) -> torch.device:
    """Return the torch device.

    Raises:
        ModelLoadError: unknown name, or CUDA asked for where there is none.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ModelLoadError(f"device={name!r}: choose cpu, cuda, cuda:N or auto")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"device={name!r}: torch {torch.__version__} sees no CUDA device here; use --device "
            "cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; choose "
            f"cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return torch.device("cuda", int(number or 0))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of weights and KV on ``device``.

    Raises:
        ModelLoadError: unknown dtype, or float16 on CPU.
    """
    import torch

    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise ModelLoadError(f"dtype={name!r}: choose one of {', '.join(DTYPES)} or auto")
    if name == "float16" and device.type == "cpu":
        raise ModelLoadError("dtype='float16' on cpu is not supported: use float32 or bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
