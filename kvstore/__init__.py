"""The distributed store of KV pages: geometry, keys, store nodes and the client. Free of torch."""

from kvstore.client.store_client import StoreClient
from kvstore.config import StoreClientConfig, StoreConfig
from kvstore.page import PageKey, PageSpec
from kvstore.server.node import StoreNode
from kvstore.store import GetOutcome, PageStore, PutOutcome

__all__ = [
    "GetOutcome",
    "PageKey",
    "PageSpec",
    "PageStore",
    "PutOutcome",
    "StoreClient",
    "StoreClientConfig",
    "StoreConfig",
    "StoreNode",
]
