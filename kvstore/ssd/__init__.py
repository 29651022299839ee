"""The SSD tier of a store node: pages that survive a restart and verify on every read."""

from kvstore.ssd.config import SsdConfig, SsdRefused
from kvstore.ssd.tier import SsdTier

__all__ = ["SsdConfig", "SsdRefused", "SsdTier"]
