"""The store client: ``PageStore`` over all live store nodes."""

from kvstore.client.store_client import StoreClient

__all__ = ["StoreClient"]
