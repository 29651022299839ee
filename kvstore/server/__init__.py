"""The store node: slots, directory, leases, eviction, and the answers to clients."""

from kvstore.server.node import StoreNode

__all__ = ["StoreNode"]
