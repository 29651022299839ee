"""The policies by name, as the configuration names them."""

from __future__ import annotations

from kvstore.server.page_table import PageTable
from kvstore.server.policies.base import EvictionPolicy
from kvstore.server.policies.fifo import Fifo
from kvstore.server.policies.heat import Heat
from kvstore.server.policies.lfu import Lfu
from kvstore.server.policies.lru import Lru
from kvstore.server.policies.slru import Slru

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Lfu, Slru, Fifo, Heat)
}


def policy_named(name: str, table: PageTable) -> EvictionPolicy:
    """The policy of that name over ``table``; names are checked by ``StoreConfig``."""
    return POLICIES[name](table)
