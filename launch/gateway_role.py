"""The gateway process: HTTP door, and registry unless etcd is. Imports no torch.

Owns the HTTP server and the order of starting and ending; what is served is ``gateway``'s, how the
process is a member is its ``door_seat``'s: it keeps the registry itself, or joins an etcd.

Draining: the HTTP server takes no new connections and finishes what it has, while the registry and
the links to the nodes stay up; then everything closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Iterator

import uvicorn

from gateway.app import create_app
from gateway.config import DispatcherConfig, GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.tokenizer import load_tokenizer
from launch import model_store, process_env
from launch.config import GatewayOptions
from launch.door_seat import DoorSeat, EtcdSeat, RegistrySeat
from launch.errors import ConfigError, LaunchError
from launch.parts import control_bind, make_network, read_secret
from launch.ports import listen_on, url_host
from launch.runtime import broken, config_errors, run_role, setup_logging
from transfer.identity import Role, new_identity
from transfer.membership import NodeStatus

logger = logging.getLogger(__name__)

HTTP_STOP_S = 2.0  # beyond the drain, for the server's own clean-up
KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the process's are ``runtime``'s."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayRole:
    """The gateway in a process of its own (or beside other roles)."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        secret = read_secret(options)
        model = model_store.resolve(options.model)
        with config_errors(f"--model {options.model}"):
            self._tokenizer = load_tokenizer(model.directory or model_store.FAKE_MODEL)
        self._config = self._door(model.name)
        self.identity = new_identity(Role.GATEWAY, options.node_id)
        self._network = make_network(secret)
        self._seat = self._make_seat()
        self._http_socket = listen_on(options.host, options.port, "--port")
        self._draining = False
        self._dispatcher: Dispatcher | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{url_host(self._options.host)}:{self._http_socket.getsockname()[1]}"

    async def start(self) -> None:
        """Join (or listen for nodes), serve HTTP.

        Raises:
            ConfigError: the join port is in use; etcd lets nobody in; the node id is taken.
            StartError: no etcd answered in time.
        """
        await self._seat.start(lambda: NodeStatus(draining=self._draining), {"url": self.url})
        self._dispatcher = Dispatcher(
            DispatcherConfig(),
            identity=self.identity,
            network=self._network,
            membership=self._seat.membership,
            rng=random.Random(secrets.randbits(128)),
        )
        await self._dispatcher.start()
        self._server = _Server(self._http_config(self._dispatcher))
        serve = self._server.serve(sockets=[self._http_socket])
        self._serving = asyncio.create_task(serve, name="http server")
        logger.info("serves %s at %s", self._config.model, self.url)
        logger.info("nodes join with --join %s", self._seat.join_url)

    async def wait_ready(self, roles: tuple[Role, ...] = (Role.DECODE,)) -> None:
        """Return once nodes of all ``roles`` are reachable."""
        assert self._dispatcher is not None, "start() first"
        placement = self._dispatcher.placement
        links = placement.links
        await placement.wait_until(
            lambda: all(links.usable(role) for role in roles), deadline_s=math.inf
        )

    async def failed(self) -> LaunchError:
        """Return when the HTTP server ended by itself, or another process took the node id."""
        serving = self._serving
        assert serving is not None, "start() first"
        ended = {f"the HTTP server at {self.url} ended by itself": lambda: not serving.done()}
        return await broken(ended, self._superseded)

    def _superseded(self) -> LaunchError | None:
        if not self._seat.membership.superseded:
            return None
        return ConfigError(
            f"--node-id {self.identity.node_id}: another process joined {self._seat.join_url} "
            "under this node id and took the seat: give each process its own --node-id"
        )

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._stop_http(timeout_s)

    async def close(self) -> None:
        await self._stop_http(0.0)
        self._http_socket.close()
        await self._seat.close_health()
        if self._dispatcher is not None:
            await self._dispatcher.close()
        await self._seat.close()
        await self._network.close()

    def abort(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._http_socket.close()
        self._seat.abort()
        if self._dispatcher is not None:
            self._dispatcher.abort()
        self._network.abort()

    def _door(self, model: str) -> GatewayConfig:
        config = GatewayConfig(model=model, admin_token=self._options.admin_token)
        if self._options.etcd is None:
            return config
        return config.model_copy(update={"members_at": f"etcd ({self._options.etcd})"})

    def _make_seat(self) -> DoorSeat:
        if self._options.etcd is not None:
            wait_s = self._options.join_timeout
            return EtcdSeat(self._options.etcd, self.identity, self._network, wait_s)
        bind = control_bind(self._options, self._options.registry_port)
        return RegistrySeat(self.identity, self._network, bind)

    def _http_config(self, dispatcher: Dispatcher) -> uvicorn.Config:
        app = create_app(
            self._config,
            dispatcher,
            self._tokenizer,
            self._seat.membership,
            health_checks=self._seat.checks,
        )
        return uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )

    async def _stop_http(self, timeout_s: float) -> None:
        """Finish what is being served, for at most ``timeout_s``; idempotent."""
        server, serving = self._server, self._serving
        if server is None or serving is None or serving.done():
            return
        server.should_exit = True
        _, pending = await asyncio.wait({serving}, timeout=timeout_s + 0.2)
        if pending:
            server.force_exit = True
            await asyncio.wait({serving}, timeout=HTTP_STOP_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def run(options: GatewayOptions) -> None:
    """Run ``kvferry gateway`` to its end."""
    setup_logging(options.log_level)
    process_env.bound_malloc()
    run_role(GatewayRole(options), drain_timeout_s=options.drain_timeout)
