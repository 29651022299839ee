"""The ports of KV events, where the operator chooses them.

Owns how ports are dealt to several nodes of one command, and the refusal of those that are taken.
Which node publishes what is the nodes' business: they ask their network for free ports, and
``EventNetwork`` gives them the chosen ones instead.

The nodes of one command take consecutive ports, in the order in which they are numbered; ``up``
numbers its stores first, then prefill, then decode nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore.events.publisher import beside
from launch.config import EventOptions, option_of
from launch.errors import ConfigError
from launch.ports import check_free
from transfer.errors import PeerUnreachable
from transfer.pubsub import Publisher, ReplaySource
from transfer.zmq_network import ZmqNetwork

PORT_MAX = 65535
_FIELDS = ("kv_events_port", "kv_events_replay_port")


class EventPorts(NamedTuple):
    """Where one node publishes, and answers; 0: a free port."""

    kv_events_port: int = 0
    kv_events_replay_port: int = 0


def ports_of(options: EventOptions) -> EventPorts:
    """Return what ``options`` say of one node, or of the first of several."""
    return EventPorts(options.kv_events_port, options.kv_events_replay_port)


def port_options(options: EventOptions, index: int) -> dict[str, Any]:
    """Return the options of the node ``index`` (from 0) of several: its ports are so much higher.

    A port that is free to choose stays so.
    """
    return {name: port + index if port else 0 for name, port in ports_of(options)._asdict().items()}


def check_event_ports(
    options: EventOptions, num_nodes: int, *, promised: Mapping[str, int] | None = None
) -> None:
    """Refuse ports that ``num_nodes`` on this machine cannot have, before anything is started.

    Args:
        promised: ports that others of the same command will take, by option.

    Raises:
        ConfigError: one is in use, promised or above 65535, or both kinds want the same.
    """
    takers = {port: option for option, port in (promised or {}).items()}
    first = ports_of(options)
    for name, port in first._asdict().items():
        if port and port + num_nodes - 1 > PORT_MAX:
            raise ConfigError(
                f"{option_of(name)} {port}: {num_nodes} nodes take {num_nodes} ports from there, "
                f"and {PORT_MAX} is the last: give a lower one"
            )
    if all(first) and abs(first.kv_events_port - first.kv_events_replay_port) < num_nodes:
        raise ConfigError(
            f"{option_of(_FIELDS[1])} {first.kv_events_replay_port}: {_span(first[0], num_nodes)} "
            f"of {option_of(_FIELDS[0])} overlap with it: give one that is {num_nodes} or more away"
        )
    for index in range(num_nodes):
        for name, port in port_options(options, index).items():
            if (taker := takers.get(port)) is not None and port:
                raise ConfigError(
                    f"{option_of(name)}: port {port} is that of {taker}: give another one"
                )
            if port:
                check_free(options.host, port, option_of(name))


def _span(port: int, count: int) -> str:
    return f"ports {port} to {port + count - 1}" if count > 1 else f"port {port}"


class EventNetwork(ZmqNetwork):
    """The channels of one node, whose KV events have the ports of ``chosen``."""

    def __init__(self, chosen: EventPorts, *, allow_remote: bool, secret: str | None) -> None:
        super().__init__(allow_remote=allow_remote, secret=secret)
        self._chosen = chosen

    def publish(self, bind: str, replay_bind: str, replay: ReplaySource) -> Publisher:
        """As a network does, on the chosen ports of the same host.

        Raises:
            ConfigError: a chosen port is in use.
        """
        own, other = self._chosen
        bind = beside(bind, own) if own else bind
        replay_bind = beside(replay_bind, other) if other else replay_bind
        try:
            return super().publish(bind, replay_bind, replay)
        except PeerUnreachable as error:
            named = " ".join(
                f"{option_of(name)} {port}" for name, port in self._chosen._asdict().items() if port
            )
            if not named:
                raise
            raise ConfigError(f"{named}: {error}") from error
