"""What a member writes into etcd, and where.

Owns the keys and the value's format. Under ``/kvferry/<name>/``::

    members/<node_id>   one record each, under the member's lease: gone when the lease is
    joins               set by every registration: who has read the members and finds this key
                        unchanged when it writes knows that nobody joined in between

A record that does not decode (a later version's, a stranger's) is no member; it is logged once.
"""

from __future__ import annotations

import logging
from urllib.parse import quote, unquote

import msgspec

from transfer.etcd.address import EtcdAddress
from transfer.identity import NodeId
from transfer.membership import NodeInfo, NodeStatus

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_COMPLAINTS = 1000


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One member, as it says itself. ``format`` rises when a reader of the old one would err."""

    info: NodeInfo
    status: NodeStatus
    format: int = FORMAT


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


class Keys:
    """The keys of one cluster."""

    def __init__(self, address: EtcdAddress) -> None:
        self.prefix = address.prefix
        self.members = self.prefix + b"members/"
        self.joins = self.prefix + b"joins"
        self._complained: set[bytes] = set()

    def member(self, node_id: NodeId) -> bytes:
        return self.members + quote(node_id, safe="").encode()

    def node_of(self, key: bytes) -> NodeId | None:
        """Return whose key this is; None when it is no member's."""
        name = key[len(self.members) :]
        if not key.startswith(self.members) or not name.isascii():
            return None
        node_id = NodeId(unquote(name.decode()))
        return node_id if self.member(node_id) == key else None

    def record(self, key: bytes, value: bytes) -> Record | None:
        """Return the record of a member's key, or None when it is none that we understand."""
        node_id = self.node_of(key)
        try:
            record = _decoder.decode(value)
        except (msgspec.DecodeError, ValueError) as error:
            self._complain(key, str(error))
            return None
        if record.format != FORMAT:
            self._complain(key, f"format {record.format}, this version reads {FORMAT}")
            return None
        if record.info.identity.node_id != node_id:
            self._complain(key, f"it is the record of {record.info.identity.node_id}")
            return None
        return record

    def _complain(self, key: bytes, why: str) -> None:
        if key not in self._complained and len(self._complained) < MAX_COMPLAINTS:
            self._complained.add(key)
            logger.error("%s in etcd is no member: %s", key.decode(errors="replace"), why)
