"""KV events and their bytes: vLLM's format.

Owns the events, the topic, and the encoding of batches, requests and numbers; docs/kv-events.md is
the reference. Knows no sockets and no order of things.

vLLM (``vllm/distributed/kv_events.py``) has written events as tagged arrays, and since its pull
request 42892 (June 2026) as tagged maps, inside of a batch that is an array in both. Publishers
write either (``Encoding``); ``decode_batch`` reads both. Names on the wire are vLLM's: its "block"
is a full page.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvstore.page import KEY_NBYTES, PageKey
from transfer.errors import FrameInvalid

SEQ_NBYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_NBYTES  # -1, where a sequence number is expected
TOKEN_NBYTES = 4
DATA_PARALLEL_RANK = 0  # every rank is a node of its own here
TOPIC_PREFIX = b"kv@"


class Medium(StrEnum):
    """Where the page lies, as vLLM names it."""

    GPU = "GPU"  # the pool that the engine computes in, whatever device that is
    CPU = "CPU"
    DISK = "DISK"


class Encoding(StrEnum):
    """How events are written."""

    ARRAY = "array"
    MAP = "map"


class PagesStored(NamedTuple):
    """These pages are there now: a chain, each the parent of the next.

    ``parent`` is the key of the page before the first; None when that is the root. ``parent`` and
    ``tokens`` (int32 little-endian, all of one size) are known to publishers only: consumers do not
    decode them.
    """

    keys: Sequence[PageKey]
    medium: str | None = None
    parent: PageKey | None = None
    tokens: bytes = b""


class PagesRemoved(NamedTuple):
    """These pages are not there any more."""

    keys: Sequence[PageKey]
    medium: str | None = None


class AllPagesCleared(NamedTuple):
    """No page is there any more."""


KvEvent = PagesStored | PagesRemoved | AllPagesCleared


# ── writing ─────────────────────────────────────────────────────────────────────────────────────


class _StoredMap(msgspec.Struct, frozen=True, tag="BlockStored"):
    block_hashes: list[PageKey]
    parent_block_hash: PageKey | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class _RemovedMap(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: list[PageKey]
    medium: str | None


class _ClearedMap(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass


def _as_map(event: KvEvent) -> msgspec.Struct:
    match event:
        case PagesStored(keys, medium, parent, tokens):
            size = len(tokens) // TOKEN_NBYTES // len(keys)
            token_ids = np.frombuffer(tokens, dtype="<i4").tolist()
            return _StoredMap(list(keys), parent, token_ids, size, None, medium, None)
        case PagesRemoved(keys, medium):
            return _RemovedMap(list(keys), medium)
        case AllPagesCleared():
            return _ClearedMap()


def _as_array(event: KvEvent) -> tuple[object, ...]:
    struct = _as_map(event)
    return type(struct).__struct_config__.tag, *msgspec.structs.astuple(struct)


def encode_batch(
    ts: float, events: Sequence[KvEvent], encoding: Encoding = Encoding.ARRAY
) -> bytes:
    """Return ``[ts, events, data_parallel_rank]`` as msgpack."""
    as_written = _as_array if encoding is Encoding.ARRAY else _as_map
    return msgspec.msgpack.encode((ts, [as_written(e) for e in events], DATA_PARALLEL_RANK))


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(SEQ_NBYTES, "big")


def topic_of(node_id: str, epoch: str) -> bytes:
    """The topic of one publisher's life. Node ids may hold an ``@``, epochs may not."""
    return b"%s%s@%s" % (TOPIC_PREFIX, node_id.encode(), epoch.encode())


# ── reading ─────────────────────────────────────────────────────────────────────────────────────

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
_SKIPPED = msgspec.Raw(b"")


class _ReadStoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[_Key]
    parent_block_hash: msgspec.Raw = _SKIPPED
    token_ids: msgspec.Raw = _SKIPPED
    block_size: msgspec.Raw = _SKIPPED
    lora_id: msgspec.Raw = _SKIPPED
    medium: str | None = None


class _ReadRemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[_Key]
    medium: str | None = None


class _ReadClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _ReadStoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[_Key]
    medium: str | None = None


class _ReadRemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Key]
    medium: str | None = None


class _ReadClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ReadStoredArray | _ReadRemovedArray | _ReadClearedArray]


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ReadStoredMap | _ReadRemovedMap | _ReadClearedMap]


_READ_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)
_READ_MAPS = msgspec.msgpack.Decoder(_MapBatch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """Return the events of a batch in either encoding, without parents and tokens.

    Raises:
        FrameInvalid: neither of the two, or page keys of another length.
    """
    batch: _ArrayBatch | _MapBatch
    try:
        batch = _READ_ARRAYS.decode(payload)
    except msgspec.MsgspecError:
        try:
            batch = _READ_MAPS.decode(payload)
        except msgspec.MsgspecError as error:
            raise FrameInvalid(f"not a batch of KV events: {error}") from error
    return [_as_event(event) for event in batch.events]


def _as_event(event: msgspec.Struct) -> KvEvent:
    if isinstance(event, _ReadStoredArray | _ReadStoredMap):
        return PagesStored([PageKey(key) for key in event.block_hashes], event.medium)
    if isinstance(event, _ReadRemovedArray | _ReadRemovedMap):
        return PagesRemoved([PageKey(key) for key in event.block_hashes], event.medium)
    return AllPagesCleared()


def decode_seq(raw: bytes) -> int | None:
    """Return the sequence number; None for the end of a replay.

    Raises:
        FrameInvalid: not 8 bytes.
    """
    if len(raw) != SEQ_NBYTES:
        raise FrameInvalid(f"{len(raw)} bytes where a sequence number has {SEQ_NBYTES}")
    return None if raw == END_OF_REPLAY else int.from_bytes(raw, "big")


def epoch_of(topic: bytes) -> str:
    """Return the epoch that a topic names; empty when it names none.

    Raises:
        FrameInvalid: not UTF-8.
    """
    try:
        text = topic.decode()
    except UnicodeDecodeError as error:
        raise FrameInvalid(f"topic {topic[:40]!r} is not UTF-8") from error
    return text.rpartition("@")[2] if topic.startswith(TOPIC_PREFIX) else ""
