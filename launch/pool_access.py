"""How a page store reaches the page pool of an engine: directly, or through staging memory.

Owns the choice and the size of the staging memory. Knows no roles. Imports torch with the engine.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from engine.device_pages import PoolPages
from engine.page_pool import PagePool
from kvstore.device.staged import StagedStore
from kvstore.store import PageStore
from launch.sizes import human_size
from transfer.interface import Region, Transfer

logger = logging.getLogger(__name__)

STAGING_NBYTES = 256 << 20  # pinned host memory beside a GPU
NUM_STAGING_PAGES_MIN = 16  # also when pages are large


class PoolAccess(NamedTuple):
    """A store, and the pool's address space as that store takes it."""

    store: PageStore
    region: Region


def reach_pool(store: PageStore, pool: PagePool, transfer: Transfer) -> PoolAccess:
    """Return what a node needs to move pages between ``pool`` and ``store``.

    A pool in host memory is registered with ``transfer``. One in device memory is reached through
    pinned staging pages; the store that is returned closes the one that was given.

    Raises:
        ModelLoadError: the host has no memory for the staging pages.
    """
    if pool.storage.device.type == "cpu":
        return PoolAccess(store, transfer.register(pool.storage))
    return stage_pool(store, pool, transfer)


def stage_pool(store: PageStore, pool: PagePool, transfer: Transfer) -> PoolAccess:
    """As ``reach_pool``, through staging pages wherever the pool is."""
    page_nbytes = pool.spec.page_nbytes
    num_pages = min(pool.num_pages, max(NUM_STAGING_PAGES_MIN, STAGING_NBYTES // page_nbytes))
    logger.info(
        "pages on %s pass through %s of host memory (%d pages)",
        pool.storage.device,
        human_size(num_pages * page_nbytes),
        num_pages,
    )
    staged = StagedStore(store, transfer=transfer, pages=PoolPages(pool, num_pages), spec=pool.spec)
    return PoolAccess(staged, staged.region)
