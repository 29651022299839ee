"""Reading safetensors files one tensor at a time, with plain reads.

Owns the file format (https://github.com/huggingface/safetensors#format)::

    [8 bytes LE: n][n bytes JSON: name → dtype, shape, data_offsets][data]

Why not a memory map: mapped pages count as resident memory of the process until the map ends, so
loading would peak at twice the weights. Files are untrusted: every offset is checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelLoadError

HEADER_NBYTES_MAX = 100 << 20
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


class TensorEntry(NamedTuple):
    """Where one tensor lies. ``offset`` counts from the start of the file."""

    file: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file.

    Raises:
        ModelLoadError: unreadable, truncated, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            header_nbytes = int.from_bytes(file.read(8), "little")
            file_nbytes = path.stat().st_size
            if not 2 <= header_nbytes <= min(HEADER_NBYTES_MAX, file_nbytes - 8):
                raise ModelLoadError(f"{str(path)!r} is not a safetensors file; fetch it again")
            raw = json.loads(file.read(header_nbytes))
            return {
                name: _entry(path, name, value, 8 + header_nbytes, file_nbytes)
                for name, value in raw.items()
                if name != "__metadata__"
            }
    except OSError as exc:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {exc.strerror}") from exc
    except ModelLoadError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{str(path)!r} has a broken header; fetch it again") from exc


def _entry(path: Path, name: str, value: Any, data_start: int, file_nbytes: int) -> TensorEntry:
    begin, end = (int(x) for x in value["data_offsets"])
    entry = TensorEntry(
        path,
        str(value["dtype"]),
        tuple(int(n) for n in value["shape"]),
        data_start + begin,
        end - begin,
    )
    if not 0 <= begin <= end <= file_nbytes - data_start:
        raise ModelLoadError(
            f"tensor {name!r} in {str(path)!r} lies beyond the file; fetch it again"
        )
    return entry


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data


def read_tensor(name: str, entry: TensorEntry) -> torch.Tensor:
    """Return one tensor, in the dtype of the file, in memory of its own.

    Raises:
        ModelLoadError: unsupported dtype, inconsistent size, unreadable, or the file ends early.
    """
    dtype = _DTYPES.get(entry.dtype_name)
    if dtype is None:
        raise ModelLoadError(
            f"tensor {name!r} in {str(entry.file)!r} has dtype {entry.dtype_name}: only "
            f"{', '.join(_DTYPES)} are supported; use the unquantized checkpoint"
        )
    tensor = torch.empty(entry.shape, dtype=dtype)
    view = byte_view(tensor)
    if len(view) != entry.nbytes:
        raise ModelLoadError(
            f"tensor {name!r} in {str(entry.file)!r}: shape {list(entry.shape)} does not fit "
            f"{entry.nbytes} bytes; fetch the file again"
        )
    try:
        _fill(view, name, entry)
    except OSError as exc:
        raise ModelLoadError(f"{str(entry.file)!r} cannot be read: {exc.strerror}") from exc
    return tensor


def _fill(view: memoryview, name: str, entry: TensorEntry) -> None:
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        filled = 0
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise ModelLoadError(
                    f"{str(entry.file)!r} ends inside tensor {name!r}; fetch it again"
                )
            filled += count
