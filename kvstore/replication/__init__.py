"""Copies between store nodes: replicas, repair, moving a share at a join, draining, hot pages."""

from kvstore.replication.replicator import Replicator

__all__ = ["Replicator"]
