"""Membership on etcd (``--join etcd://host:2379/name``): leases, one record each, one watch.

What a member and its watchers may rely on is in ``docs/membership.md``. Nothing that the simulator
runs imports this package: it speaks to a real server, over httpx (loaded when it is first used).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transfer.etcd.address import EtcdAccess, EtcdAddress, is_etcd, parse_address

if TYPE_CHECKING:
    from transfer.etcd.membership import EtcdMembership

__all__ = ["EtcdAccess", "EtcdAddress", "EtcdMembership", "is_etcd", "parse_address"]


def __getattr__(name: str) -> Any:
    if name != "EtcdMembership":
        raise AttributeError(f"module 'transfer.etcd' has no attribute {name!r}")
    return import_module("transfer.etcd.membership").EtcdMembership
