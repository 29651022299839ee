"""``kvferry namespace`` and ``kvferry cache``: what they can be told, and what they print.

The work is ``cache.py``'s.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from launch.cli_options import checked_timeout
from launch.config import SECRET_FILE_HELP
from launch.errors import ConfigError

cache_app = typer.Typer(help="Cached pages.", no_args_is_help=True, rich_markup_mode=None)

Join = Annotated[
    str | None, typer.Option(envvar="KVFERRY_JOIN", help="Where the registry listens.")
]
SecretFile = Annotated[str | None, typer.Option(help=SECRET_FILE_HELP)]
Timeout = Annotated[
    float, typer.Option(help="Seconds to wait for the registry.", callback=checked_timeout)
]
Model = Annotated[str | None, typer.Option(help="The served model; the cluster's by default.")]
Salt = Annotated[str | None, typer.Option(help="cache_salt of the requests.")]
Adapter = Annotated[str | None, typer.Option(help="Adapter of the requests.")]


def namespace(
    join: Join = None,
    model: Model = None,
    salt: Salt = None,
    adapter: Adapter = None,
    secret_file: SecretFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Print the namespace of a tenant's pages: for --quota, and for clearing its cache."""
    from launch import cache

    view = cache.find(join, secret_file, timeout)
    print(cache.namespace_hex(view, model=model, salt=salt, adapter=adapter))


@cache_app.command()
def clear(
    join: Join = None,
    namespace: Annotated[str | None, typer.Option(help="As `kvferry namespace` prints it.")] = None,
    model: Model = None,
    salt: Salt = None,
    adapter: Adapter = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    admin_token: Annotated[
        str | None,
        typer.Option(envvar="KVFERRY_ADMIN_TOKEN", help="Of the gateway, beyond its machine."),
    ] = None,
    secret_file: SecretFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Make all nodes forget the pages of one namespace, on every tier.

    Exit code 4: no node held a page under that namespace.
    """
    from launch import cache

    parts = {"model": model, "salt": salt, "adapter": adapter}
    order = _order(namespace, {k: v for k, v in parts.items() if v is not None}, everything)
    done = cache.clear(cache.find(join, secret_file, timeout), order, admin_token)
    print("\n".join(cache.report(done)))
    if (missed := cache.nothing_held(done)) is not None:
        raise missed


def _order(namespace: str | None, parts: dict[str, str], everything: bool) -> dict[str, Any]:
    """Return what the gateway is asked to clear; ConfigError unless it is one thing."""
    ways = ["--namespace"] * (namespace is not None)
    ways += [", ".join(f"--{name}" for name in parts)] * bool(parts)
    ways += ["--all"] * everything
    choice = "--namespace HEX, or --salt S (--model, --adapter), or --all"
    if not ways:
        raise ConfigError(f"cache clear: say what: {choice}")
    if len(ways) > 1:
        raise ConfigError(
            f"cache clear: {' and '.join(ways)} do not go together: leave all but one out: {choice}"
        )
    if namespace is None:
        return {"all": True} if everything else dict(parts)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", namespace):
        raise ConfigError(
            f"--namespace {namespace}: write 64 hex digits, as `kvferry namespace` prints them"
        )
    return {"namespace": namespace}
