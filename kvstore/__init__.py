"""The distributed store of KV pages: geometry, keys, store nodes and the client. Free of torch."""

from kvstore.client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.memory import MemoryFaults, MemoryStore
from kvstore.node import StoreNode
from kvstore.page import PageKey, PageSpec
from kvstore.store import GetOutcome, PageStore, PutOutcome

__all__ = [
    "GetOutcome",
    "MemoryFaults",
    "MemoryStore",
    "PageKey",
    "PageSpec",
    "PageStore",
    "PutOutcome",
    "StoreClient",
    "StoreClientConfig",
    "StoreConfig",
    "StoreNode",
]
