"""Which page store a node uses: the cluster's own store nodes, or an engine that exists.

Owns the choice by the address of ``--store``. Knows no roles and no pools.
"""

from __future__ import annotations

import logging

from kvstore.client.store_client import StoreClient
from kvstore.mooncake import MooncakeConfig, MooncakeStore, MooncakeUnavailable
from kvstore.mooncake.binding import Library
from kvstore.page import PageSpec
from kvstore.store import PageStore
from launch.config import NodeOptions
from launch.errors import ConfigError
from launch.parts import Parts
from launch.runtime import config_errors
from launch.seat import StatingSeat
from transfer.membership import (
    OWN_PAGE_STORE,
    PAGE_STORE_FACT,
    PAGE_STORE_LOSSES,
    PAGE_STORE_LOST,
    Membership,
)

logger = logging.getLogger(__name__)


def mooncake_config(options: NodeOptions) -> MooncakeConfig | None:
    """Return what ``--store`` says of Mooncake; None: the cluster's own store nodes.

    Raises:
        ConfigError: it is no address.
    """
    if options.store is None:
        return None
    return _config_of(options.store, options.advertise_host or options.host)


def _config_of(url: str, host: str) -> MooncakeConfig:
    with config_errors(f"--store {url}"):
        return MooncakeConfig.of_url(url, host=host)


def check_store(url: str | None) -> None:
    """Refuse an address or a machine that cannot work, before anything is loaded.

    Raises:
        ConfigError: the address is wrong, or a library is missing.
    """
    if url is None:
        return
    _config_of(url, "127.0.0.1")
    try:
        Library()
    except MooncakeUnavailable as error:
        raise ConfigError(f"--store {url}: {error}") from error


def make_store(options: NodeOptions, parts: Parts, spec: PageSpec) -> PageStore:
    """Return the client of the page store. Call it inside the running loop."""
    config = mooncake_config(options)
    if config is not None:
        logger.warning(
            "pages are kept in Mooncake at %s: its ports are open on every interface and ask for "
            "no secret, so every host that reaches this one must be trusted",
            config.master,
        )
        return MooncakeStore(config, spec=spec)
    return StoreClient(
        identity=parts.identity,
        network=parts.network,
        transfer=parts.transfer,
        membership=parts.membership,
        spec=spec,
    )


def stated(options: NodeOptions, membership: Membership, store: PageStore) -> Membership:
    """Return a seat that states which engine keeps the node's pages.

    Nodes that keep their pages in different engines then refuse each other, and the gateway knows
    that pages can move although no store node is there. What the node says with its heartbeats
    tells whether ``store``, if it is another engine's, answers.
    """
    config = mooncake_config(options)
    if config is None:
        return StatingSeat(membership, contract={PAGE_STORE_FACT: OWN_PAGE_STORE})
    assert isinstance(store, MooncakeStore), store
    return StatingSeat(
        membership,
        contract={PAGE_STORE_FACT: f"mooncake://{config.master}"},
        gauges=lambda: {PAGE_STORE_LOST: float(store.is_lost)},
        counters=lambda: {PAGE_STORE_LOSSES: float(store.counters().get("master_losses", 0))},
    )
