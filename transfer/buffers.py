"""Turns what users hold (numpy, torch, mmap, bytearray, memoryview) into a flat memoryview.

Owns the duck typing; imports no torch. The view keeps its buffer alive.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


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
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _tensor_view(buffer)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"cannot register a {type(buffer).__name__}: not a buffer") from error
    if not view.c_contiguous:
        raise ValueError("only C-contiguous buffers can be registered; copy it first")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _tensor_view(tensor: Any) -> memoryview:
    """Return a view of a torch CPU tensor of any dtype (``.numpy()`` refuses bfloat16)."""
    device = str(tensor.device)
    if device != "cpu":
        raise TypeError(
            f"cannot register a tensor on {device}: regions are host memory; stage it through a "
            "pinned CPU tensor"
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
