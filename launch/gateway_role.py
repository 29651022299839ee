"""The gateway process: HTTP door and registry. Imports no torch.

Owns the two listening sockets, the HTTP server and the order of starting and ending; what is
served is ``gateway``'s, who is in the cluster is ``transfer``'s registry.

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
from launch.errors import ConfigError, LaunchError, StartError
from launch.gateway_health import GatewayHealth
from launch.parts import control_bind, make_network, read_secret
from launch.ports import listen_on, url_host
from launch.runtime import config_errors, run_role, setup_logging
from transfer.channel import Hello, Listener, Service
from transfer.errors import PeerUnreachable
from transfer.identity import Role, new_identity
from transfer.membership import NodeInfo, NodeStatus
from transfer.registry import Registry, RegistryService
from transfer.registry_client import LocalMembership

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
        self._config = GatewayConfig(model=model.name, admin_token=options.admin_token)
        self._join_port = options.registry_port
        self._http_socket = listen_on(options.host, options.port, "--port")
        self.identity = new_identity(Role.GATEWAY, options.node_id)
        self._network = make_network(secret)
        self._draining = False
        self._listener: Listener | None = None
        self._registry_service: RegistryService | None = None
        self._membership: LocalMembership | None = None
        self._dispatcher: Dispatcher | None = None
        self._health: GatewayHealth | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{url_host(self._options.host)}:{self._http_socket.getsockname()[1]}"

    async def start(self) -> None:
        """Listen for nodes, join, serve HTTP.

        Raises:
            ConfigError: the join port is in use.
        """
        registry, service = Registry(), Service()
        self._registry_service = RegistryService(registry, service)
        self._listener = await self._listen(service)
        self._membership = LocalMembership(registry)
        info = NodeInfo(identity=self.identity, address=self._listener.address)
        await self._membership.join(info, lambda: NodeStatus(draining=self._draining))
        self._dispatcher = Dispatcher(
            DispatcherConfig(),
            identity=self.identity,
            network=self._network,
            membership=self._membership,
            rng=random.Random(secrets.randbits(128)),
        )
        await self._dispatcher.start()
        self._health = GatewayHealth(
            self._network, self._listener.address, self.identity.node_id, self._membership
        )
        await self._health.start()
        config = self._http_config(self._dispatcher, self._membership, self._health)
        self._server = _Server(config)
        serve = self._server.serve(sockets=[self._http_socket])
        self._serving = asyncio.create_task(serve, name="http server")
        logger.info("serves %s at %s", self._config.model, self.url)
        logger.info("nodes join with --join %s", self._listener.address)

    async def wait_ready(self, roles: tuple[Role, ...] = (Role.DECODE,)) -> None:
        """Return once nodes of all ``roles`` are reachable."""
        assert self._dispatcher is not None, "start() first"
        placement = self._dispatcher.placement
        links = placement.links
        await placement.wait_until(
            lambda: all(links.usable(role) for role in roles), deadline_s=math.inf
        )

    async def failed(self) -> LaunchError:
        """Return when the HTTP server ended by itself."""
        assert self._serving is not None, "start() first"
        await asyncio.wait({self._serving})
        return StartError(f"the HTTP server at {self.url} ended by itself")

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._stop_http(timeout_s)

    async def close(self) -> None:
        await self._stop_http(0.0)
        self._http_socket.close()
        if self._health is not None:
            await self._health.close()
        if self._dispatcher is not None:
            await self._dispatcher.close()
        if self._membership is not None:
            await self._membership.leave()
        if self._registry_service is not None:
            self._registry_service.close()
        if self._listener is not None:
            await self._listener.close()
        await self._network.close()

    def abort(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._http_socket.close()
        if self._health is not None:
            self._health.abort()
        if self._dispatcher is not None:
            self._dispatcher.abort()
        self._network.abort()

    async def _listen(self, service: Service) -> Listener:
        bind = control_bind(self._options, self._join_port)
        try:
            return await self._network.listen(service, Hello(identity=self.identity), bind)
        except PeerUnreachable as error:
            raise ConfigError(f"--join-port {self._join_port}: {error}") from error

    def _http_config(
        self, dispatcher: Dispatcher, membership: LocalMembership, health: GatewayHealth
    ) -> uvicorn.Config:
        app = create_app(
            self._config, dispatcher, self._tokenizer, membership, health_checks=health.checks
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
