"""``kvferry up``: a whole cluster on this machine, supervised until it is stopped.

Owns what is printed: progress on stderr, and on stdout what can be pasted. The
processes are ``LocalCluster``'s; with ``--transfer loopback`` all roles run in this process
(``inproc.py``).
"""

from __future__ import annotations

import json
from typing import Protocol

from launch import model_store, process_env
from launch.cluster import LocalCluster, with_ports
from launch.config import Options, PageStoreOptions, UpOptions, option_of
from launch.errors import ConfigError, LaunchError
from launch.output import show_result
from launch.parts import read_secret, transfer_config
from launch.progress import say
from launch.runtime import Role, run_role, setup_logging
from launch.sizes import parse_size
from launch.store_settings import check_stores, make_ssd_directory


class Cluster(Role, Protocol):
    """What ``up`` runs: a role with two addresses."""

    @property
    def url(self) -> str: ...

    @property
    def join_url(self) -> str: ...


def run(options: UpOptions) -> None:
    """Run ``kvferry up`` to its end."""
    setup_logging(options.log_level)
    check(options)
    resolved = model_store.resolve(options.model, pull_missing=True)
    if options.transfer == "loopback":
        process_env.apply(cores=None, threads=options.threads, gpus=options.gpus)
        from launch.inproc import InProcessCluster

        cluster: Cluster = InProcessCluster(with_ports(options))
    else:
        cluster = LocalCluster(options)
    if options.num_stores:
        make_ssd_directory(options)  # last: nothing is made for a start that is refused
    run_role(_Announced(cluster, resolved.name), drain_timeout_s=options.drain_timeout)


def check(options: UpOptions) -> None:
    """Refuse here what every child would refuse later."""
    transfer_config(options, read_secret(options))
    if options.inject:
        say(f"FAULTS ARE INJECTED into every transfer, as asked for: {options.inject}")
    if options.engine is None:
        check_stores(options, options.num_stores)
    else:
        _check_engine(options, options.engine)
    if options.kv_memory is not None:
        parse_size(options.kv_memory, "--kv-memory")
    if options.gpus is not None:
        process_env.parse_gpus(options.gpus)


def _check_engine(options: UpOptions, engine: str) -> None:
    """Refuse an engine that cannot be used, and what only store processes could do."""
    from launch.page_store import check_store

    check_store(engine)
    own = PageStoreOptions.model_fields.keys() - Options.model_fields.keys()
    for name, field in PageStoreOptions.model_fields.items():
        if name in own and getattr(options, name) != field.default:
            hint = " (copies: ?replicas=N behind its address)" if name == "replicas" else ""
            raise ConfigError(
                f"{option_of(name)} {getattr(options, name)}: says something about store "
                f"processes, and --store {engine} starts none: leave one of the two out{hint}"
            )


class _Announced:
    """A cluster that says how to use it once it serves."""

    def __init__(self, cluster: Cluster, model: str) -> None:
        self._cluster = cluster
        self._model = model

    async def start(self) -> None:
        say("starting: this takes as long as loading the weights")
        await self._cluster.start()
        show_result(usage(self._cluster.url, self._cluster.join_url, self._model))

    async def failed(self) -> LaunchError:
        return await self._cluster.failed()

    async def drain(self, timeout_s: float) -> None:
        await self._cluster.drain(timeout_s)

    async def close(self) -> None:
        await self._cluster.close()

    def abort(self) -> None:
        self._cluster.abort()


def usage(url: str, join: str, model: str) -> str:
    """Return lines that can be pasted into a shell: a request, and a look at the cluster."""
    question = {"role": "user", "content": "What is the capital of France?"}
    path, asked = "chat/completions", {"messages": [question], "max_tokens": 64}
    if model == model_store.FAKE_MODEL:
        path, asked = "completions", {"prompt": "Hello", "max_tokens": 16}
    body = {"model": model, **asked, "temperature": 0}  # small models babble when they sample
    return (
        f"\nkvferry serves {model} at {url}. Ask it something:\n\n"
        f"  curl {url}/v1/{path} \\\n"
        "    -H 'content-type: application/json' -H 'x-kvferry-trace: 1' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f"Look at it:\n\n  kvferry status --join {join}\n\n"
        "Ctrl-C stops everything."
    )
