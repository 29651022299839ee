"""Prefill: computes the KV of prompts and publishes it to the shared page store."""

from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from prefill_node.radix_cache import RadixCache
from prefill_node.scheduler import PrefillScheduler

__all__ = [
    "PrefillConfig",
    "PrefillNode",
    "PrefillScheduler",
    "RadixCache",
]
