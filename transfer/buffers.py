"""Turns what users hold into flat memory: a memoryview, or the memory of a CUDA device.

Owns the duck typing (numpy, torch, mmap, bytearray, memoryview, CUDA arrays); imports no torch.
The flat memory keeps its buffer alive.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from transfer.device_memory import DeviceMemory
from transfer.device_torch import TorchMemory


def device_memory_of(buffer: object) -> DeviceMemory | None:
    """Return the device memory that ``buffer`` is; None if it is not on a CUDA device.

    Raises:
        TypeError: memory of a CUDA device that cannot be written, or without torch to copy it.
        ValueError: not contiguous, or on another device than torch's current one.
    """
    if isinstance(buffer, DeviceMemory):
        return buffer
    if _is_tensor(buffer):
        on_cuda = buffer.device.type == "cuda"  # type: ignore[attr-defined]
        return TorchMemory(buffer) if on_cuda else None
    if not hasattr(buffer, "__cuda_array_interface__"):
        return None
    torch = sys.modules.get("torch")
    if torch is None:
        raise TypeError(
            f"cannot register a {type(buffer).__name__} in CUDA memory: its copies need torch; "
            "import torch first"
        )
    tensor = torch.as_tensor(buffer, device="cuda")
    if tensor.data_ptr() != _address_in_cuda(buffer):  # torch has made a copy on its own device
        raise ValueError(
            f"cannot register a {type(buffer).__name__} that is not on {tensor.device}, torch's "
            "current device: register it inside of torch.cuda.device(...)"
        )
    return TorchMemory(tensor)


def _address_in_cuda(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def flat_view(buffer: object) -> memoryview:
    """Return the bytes of ``buffer`` as a one-dimensional memoryview of format ``B``.

    Raises:
        TypeError: not a buffer, or a tensor that is not in host memory.
        ValueError: not C-contiguous.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("only C-contiguous arrays can be registered; copy it first")
        return buffer.reshape(-1).view(np.uint8).data
    if _is_tensor(buffer):
        return _tensor_view(buffer)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"cannot register a {type(buffer).__name__}: not a buffer") from error
    if not view.c_contiguous:
        raise ValueError("only C-contiguous buffers can be registered; copy it first")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _is_tensor(buffer: object) -> bool:
    return hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size")


def _tensor_view(tensor: Any) -> memoryview:
    """Return a view of a torch CPU tensor of any dtype (``.numpy()`` refuses bfloat16)."""
    device = str(tensor.device)
    if device != "cpu":
        raise TypeError(
            f"cannot register a tensor on {device}: regions are host or CUDA memory; copy it to a "
            "CPU tensor first"
        )
    if not tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be registered; call .contiguous() first")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    raw.owner = tensor  # memory lives as long as the view
    return memoryview(raw).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of the first byte; 0 for an empty view."""
    if view.nbytes == 0:
        return 0
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
