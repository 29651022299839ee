"""The command line declared from the option models: one function makes a typer command of a model.

Owns the translation of a pydantic field (type, default, description) to a typer option, so that
``--help`` and the code cannot differ. Knows no command.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from launch.config import Options, option_of
from launch.errors import ConfigError

O = TypeVar("O", bound=Options)  # noqa: E741

ENVIRONMENT = {
    "join": "KVFERRY_JOIN",
    "admin_token": "KVFERRY_ADMIN_TOKEN",
    "inject": "KVFERRY_INJECT",
}
HIDDEN = {"fake_step_delay", "fake_token_delay"}


def checked_timeout(value: float) -> float:
    """Return ``value``, the seconds of a ``--timeout``; ConfigError unless above 0 and finite."""
    if not 0 < value < math.inf:
        raise ConfigError(f"--timeout {value:g}: give seconds above 0, for example 5")
    return value


def _metavar(annotation: Any) -> str:
    """Name of the type for ``--help``; the model parses and checks, so that it names the value."""
    members = [arg for arg in get_args(annotation) if arg is not type(None)]
    kind = members[0] if members else annotation
    if Literal in (get_origin(annotation), get_origin(kind)):
        return "NAME"
    if len(members) > 1 and get_origin(annotation) is not tuple:
        return "TEXT"
    return {int: "INT", float: "NUMBER"}.get(kind, "TEXT")


def _help(annotation: Any, description: str | None) -> str:
    if get_origin(annotation) is Literal:
        return f"{description} One of {', '.join(get_args(annotation))}."
    return description or ""


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the option of one field: a flag, a repeatable option, or one with a value."""
    is_flag, repeats = field.annotation is bool, get_origin(field.annotation) is tuple
    option = typer.Option(
        option_of(name),
        help=_help(field.annotation, field.description),
        metavar=None if is_flag else _metavar(field.annotation),
        envvar=ENVIRONMENT.get(name),
        hidden=name in HIDDEN,
    )
    kind: Any = bool if is_flag else (list[str] if repeats else str) | None
    default: Any = field.default
    if repeats:
        default = None  # the model's
    elif not is_flag and default is not None:
        default = str(default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def command_of(
    options: type[O], run: Callable[[O], None], *, without: Collection[str] = ()
) -> Callable[..., None]:
    """Return a function with one keyword option per field, which calls ``run`` with the model.

    Fields named in ``without`` keep their defaults and get no option.
    """
    parameters = [
        _parameter(name, field)
        for name, field in options.model_fields.items()
        if name not in without
    ]

    def command(**values: Any) -> None:
        run(options.of(**{name: value for name, value in values.items() if value is not None}))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
