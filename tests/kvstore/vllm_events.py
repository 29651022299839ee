"""How others read our events: decoders from vLLM's definitions, and a router's view by them.

The two generations of vLLM's format that are in use: tagged arrays with the fields up to 2025-11
(``vllm/distributed/kv_events.py`` at 0.11), and tagged maps as of its pull request 42892. Field
names, order, defaults and options are theirs, since these are what is tested against.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.page import PageKey


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class FirstStored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    """Before media were told (0.9)."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class FirstRemoved(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[bytes | int]


class FirstCleared(msgspec.Struct, array_like=True, gc=False, tag="AllBlocksCleared"):
    pass


class FirstBatch(msgspec.Struct, array_like=True, gc=False):
    """Before ranks were told."""

    ts: float
    events: list[FirstStored | FirstRemoved | FirstCleared]


class LongStored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    """The last of the arrays (0.22): two more fields without a default."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class LongRemoved(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class LongBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[LongStored | LongRemoved | FirstCleared]
    data_parallel_rank: int | None = None


class MapStored(msgspec.Struct, gc=False, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class MapRemoved(msgspec.Struct, gc=False, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class MapCleared(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    pass


class MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[MapStored | MapRemoved | MapCleared]
    data_parallel_rank: int | None = None


ARRAY_BATCHES = (FirstBatch, ArrayBatch, LongBatch)


class VllmMirror:
    """What a router knows that reads our events as vLLM's. Holds the parent of every page."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, tuple[PageKey | None, tuple[int, ...]]] = {}
        self.next_seq = 0

    def take(self, parts: list[bytes]) -> None:
        """One message as it is on the wire."""
        _topic, raw_seq, payload = parts
        seq = int.from_bytes(raw_seq, "big")
        assert seq == self.next_seq, f"{seq} instead of {self.next_seq}: a gap"
        self.next_seq += 1
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=ArrayBatch).events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(block_hashes=keys):
                    for key in keys:
                        del self.pages[key]  # type: ignore[arg-type]
                case AllBlocksCleared():
                    self.pages.clear()

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for at, key in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            self.pages[key] = (parent, tokens)  # type: ignore[index,assignment]
            parent = key
