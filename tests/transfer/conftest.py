"""Real etcds for the tests of this folder: one that a module shares, and one of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.etcd_server import EtcdServer, running_etcd


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(shared_etcd: EtcdServer) -> Iterator[EtcdServer]:
    """A cluster name that no other test has, in the etcd of this module.

    A test may stop it (SIGSTOP), and neither end it nor change its users.
    """
    shared_etcd.take_another_name()
    yield shared_etcd
    shared_etcd.go_on()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with running_etcd(tmp_path) as server:
        yield server
