"""Pages in device memory over any store: staged through host memory."""

from kvstore.device.staged import StagedStore

__all__ = ["StagedStore"]
