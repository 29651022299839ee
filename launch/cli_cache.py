"""``kvferry namespace`` and ``kvferry cache``: what they can be told, and what they print.

The work is ``cache.py``'s.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from launch.config import SECRET_FILE_HELP
from launch.errors import ConfigError

cache_app = typer.Typer(help="Cached pages.", no_args_is_help=True, rich_markup_mode=None)

Join = Annotated[
    str | None, typer.Option(envvar="KVFERRY_JOIN", help="Where the registry listens.")
]
SecretFile = Annotated[str | None, typer.Option(help=SECRET_FILE_HELP)]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the registry.")]
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
    """Make all nodes forget the pages of one namespace, on every tier."""
    from launch import cache

    parts = {"model": model, "salt": salt, "adapter": adapter}
    order: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
    if (namespace is not None) + bool(order) + everything != 1:
        raise ConfigError(
            "cache clear: say what: --namespace HEX, or --salt S (--model, --adapter), or --all"
        )
    if namespace is not None:
        order = {"namespace": namespace}
    elif everything:
        order = {"all": True}
    for line in cache.clear(cache.find(join, secret_file, timeout), order, admin_token):
        print(line)
