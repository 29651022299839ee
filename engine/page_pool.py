"""The KV memory of one process: ``[N, H, L, 2, S, D]``, head-major pages.

Owns the storage and its views. Knows no holders (``PageAllocator`` does) and no attention.
The memory is a flat torch tensor that the caller allocates, on any device; a pool in host memory
can be registered with the transfer engine as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.page import PageId, PageSpec

if TYPE_CHECKING:
    import torch


class PagePool:
    """Storage for ``num_pages`` pages of one spec.

    Args:
        spec: page geometry.
        num_pages: pages, the scratch page 0 included.
        storage: flat uint8 tensor of ``num_pages * page_nbytes`` bytes, on the model's device.
    """

    def __init__(self, spec: PageSpec, num_pages: int, storage: torch.Tensor) -> None:
        assert storage.numel() == num_pages * spec.page_nbytes, (storage.shape, num_pages)
        self.spec = spec
        self.num_pages = num_pages
        self.storage = storage

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.spec.page_nbytes

    @property
    def pages(self) -> torch.Tensor:
        """The pool as ``[N, H, L, 2, S, D]`` in the spec's dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return self.storage.view(dtype).view(self.num_pages, *self.spec.shape)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Strided views ``(k, v)``, each ``[N, H, S, D]``, of one layer (FlashInfer's HND)."""
        pages = self.pages
        return pages[:, :, layer, 0], pages[:, :, layer, 1]

    def offset_of(self, page_id: PageId) -> int:
        """Byte offset of a page in the pool's region."""
        assert 0 <= page_id < self.num_pages, page_id
        return page_id * self.spec.page_nbytes


def host_pool(spec: PageSpec, num_pages: int) -> PagePool:
    """Return a zeroed pool in host memory."""
    import torch

    return PagePool(spec, num_pages, torch.zeros(num_pages * spec.page_nbytes, dtype=torch.uint8))
