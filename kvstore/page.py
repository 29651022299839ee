"""Page geometry: what one KV page is, byte for byte.

Owns ``PageSpec`` and the legend of shapes used in all docstrings. Knows no torch: the dtype is a
name. One page is one contiguous blob, head-major::

    page[num_kv_heads, num_layers, 2 (K, V), page_size, head_dim]

so that a page is one transfer descriptor, and the share of any tensor-parallel rank (a run of
heads) is one contiguous byte range of it.

Legend: ``H`` num_kv_heads, ``Hq`` query heads, ``L`` num_layers, ``S`` page_size, ``D`` head_dim,
``T`` tokens of a ragged batch, ``B`` sequences of a batch, ``N`` num_pages, ``V`` vocabulary.
"""

from __future__ import annotations

from functools import cached_property
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

PageId = NewType("PageId", int)
PageKey = NewType("PageKey", bytes)

KEY_NBYTES = 32  # of a page key, and of a namespace
DEFAULT_PAGE_SIZE = 16
PAGE_SIZE_MAX = 1024

DTYPE_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class PageSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Geometry of the KV pages of one model.

    Raises:
        ValueError: on construction with a size that is not positive, a page size above
            ``PAGE_SIZE_MAX``, or an unknown dtype; the message names the value.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = DEFAULT_PAGE_SIZE
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.page_size > PAGE_SIZE_MAX:
            raise ValueError(f"page_size={self.page_size}: must be at most {PAGE_SIZE_MAX}")
        if self.dtype not in DTYPE_ITEMSIZE:
            raise ValueError(f"dtype={self.dtype!r}: choose one of {sorted(DTYPE_ITEMSIZE)}")

    @property
    def itemsize(self) -> int:
        return DTYPE_ITEMSIZE[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: ``[H, L, 2, S, D]``."""
        return (self.num_kv_heads, self.num_layers, 2, self.page_size, self.head_dim)

    @cached_property
    def num_runs(self) -> int:
        """Contiguous runs of slots in a page: one per (head, layer, K or V)."""
        return self.num_kv_heads * self.num_layers * 2

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of one slot in one run."""
        return self.head_dim * self.itemsize

    @property
    def token_nbytes(self) -> int:
        """KV bytes of one token over all heads and layers."""
        return self.num_runs * self.slot_nbytes

    @cached_property
    def page_nbytes(self) -> int:
        return self.page_size * self.token_nbytes

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens, the tail page included."""
        return -(-num_tokens // self.page_size)

    def valid_bytes(self, page: memoryview, num_tokens: int) -> npt.NDArray[np.uint8]:
        """The bytes of the first ``num_tokens`` slots of every run, contiguous.

        A view of ``page`` when it is full, else a copy.
        """
        assert len(page) == self.page_nbytes, (len(page), self.page_nbytes)
        assert 1 <= num_tokens <= self.page_size, num_tokens
        flat = np.frombuffer(page, dtype=np.uint8)
        if num_tokens == self.page_size:
            return flat
        runs = flat.reshape(self.num_runs, self.page_size * self.slot_nbytes)
        return np.ascontiguousarray(runs[:, : num_tokens * self.slot_nbytes]).reshape(-1)

    def describe(self) -> dict[str, str]:
        """The spec as contract facts, for hello and membership."""
        return {
            "num_layers": str(self.num_layers),
            "num_kv_heads": str(self.num_kv_heads),
            "head_dim": str(self.head_dim),
            "page_size": str(self.page_size),
            "kv_dtype": self.dtype,
        }
