"""``kvferry namespace`` and ``kvferry cache``: what they can be told, and what they print.

The work is ``cache.py``'s.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from launch.cli_options import checked_timeout
from launch.config import DEFAULT_JOIN, ETCD_FORM, SECRET_FILE_HELP
from launch.errors import ConfigError

cache_app = typer.Typer(help="Cached pages.", no_args_is_help=True, rich_markup_mode=None)

JOIN_HELP = f"Where the gateway's registry listens, or {ETCD_FORM}. [default: {DEFAULT_JOIN}]"


def _text(help: str, **more: Any) -> Any:
    return typer.Option(help=help, metavar="TEXT", **more)


Join = Annotated[str | None, _text(JOIN_HELP, envvar="KVFERRY_JOIN")]
SecretFile = Annotated[str | None, _text(SECRET_FILE_HELP)]
Timeout = Annotated[
    float,
    typer.Option(help="Seconds to wait for an answer.", metavar="NUMBER", callback=checked_timeout),
]
Model = Annotated[str | None, _text("The served model; the cluster's by default.")]
Salt = Annotated[str | None, _text("cache_salt of the requests.")]
Adapter = Annotated[str | None, _text("Adapter of the requests.")]
Namespace = Annotated[str | None, _text("As `kvferry namespace` prints it.")]
AdminToken = Annotated[
    str | None, _text("Of the gateway, beyond its machine.", envvar="KVFERRY_ADMIN_TOKEN")
]


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
    namespace: Namespace = None,
    model: Model = None,
    salt: Salt = None,
    adapter: Adapter = None,
    everything: Annotated[bool, typer.Option("--all", help="Every namespace.")] = False,
    admin_token: AdminToken = None,
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
