"""The decode node: pulls KV pages of prompts, generates tokens, writes pages back."""

from decode_node.config import DecodeConfig
from decode_node.node import DecodeNode

__all__ = [
    "DecodeConfig",
    "DecodeNode",
]
