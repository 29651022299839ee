"""The opaque token that names a region to a peer.

Owns its encoding and nothing else: who may use it is decided by the owner, who looks the
capability up (``transfer/region.py``). A token is unguessable (16 random bytes for each pair of
region and rights), not secret from those who hold it.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from transfer.decoding import decode_foreign
from transfer.errors import FrameInvalid
from transfer.interface import Rights

TOKEN_VERSION = 2
CAPABILITY_NBYTES = 16
MAX_TOKEN_NBYTES = 1024
TOKENS_KEPT_MAX = 1024  # decoded, as each operation comes with the same few tokens


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Every address at which one engine can be reached.

    Attributes:
        incarnation: which life of the engine.
        process: id of the process; equal ids share an address space.
        host: id of host and network namespace; equal ids can share memory.
        loopback: name inside the process; empty when not offered.
        shm: name of the abstract unix socket; empty when not offered.
        tcp: ``host:port``; empty when not offered.
        ucx: ``host:port`` of the UCX listener; empty when not offered.
    """

    incarnation: str
    process: str
    host: str
    loopback: str = ""
    shm: str = ""
    tcp: str = ""
    ucx: str = ""


class Token(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to reach one region."""

    version: int
    endpoint: Endpoint
    region_id: int
    nbytes: int
    rights: Rights
    capability: bytes
    in_shared_memory: bool


def encode_token(token: Token) -> bytes:
    return msgspec.msgpack.encode(token)


@lru_cache(maxsize=TOKENS_KEPT_MAX)
def decode_token(data: bytes) -> Token:
    """Return the token.

    Raises:
        FrameInvalid: the bytes are no token of this version.
    """
    if len(data) > MAX_TOKEN_NBYTES:
        raise FrameInvalid(f"a token has at most {MAX_TOKEN_NBYTES} bytes, got {len(data)}")
    token = decode_foreign(data, _DECODER.decode, "a region token")
    if token.version != TOKEN_VERSION:
        raise FrameInvalid(f"token version {token.version}, this side speaks {TOKEN_VERSION}")
    if token.nbytes < 0 or len(token.capability) != CAPABILITY_NBYTES:
        raise FrameInvalid("region token with an impossible size or capability")
    return token


_DECODER = msgspec.msgpack.Decoder(Token)
