"""The command line declared from the option models: one function makes a typer command of a model.

Owns the translation of a pydantic field (type, default, description) to a typer option, so that
``--help`` and the code cannot differ. Knows no command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from launch.config import Options

O = TypeVar("O", bound=Options)  # noqa: E741

ENVIRONMENT = {"join": "KVFERRY_JOIN", "admin_token": "KVFERRY_ADMIN_TOKEN"}
HIDDEN = {"fake_step_delay", "fake_token_delay"}


def _metavar(annotation: Any) -> str:
    """Name of the type for ``--help``; the model parses and checks, so that it names the value."""
    members = [arg for arg in get_args(annotation) if arg is not type(None)]
    if get_origin(annotation) is Literal:
        return "NAME"
    kind = members[0] if members else annotation
    return {int: "INT", float: "NUMBER"}.get(kind, "TEXT")


def _help(annotation: Any, description: str | None) -> str:
    if get_origin(annotation) is Literal:
        return f"{description} One of {', '.join(get_args(annotation))}."
    return description or ""


def command_of(options: type[O], run: Callable[[O], None]) -> Callable[..., None]:
    """Return a function with one keyword option per field, which calls ``run`` with the model."""
    parameters = []
    for name, field in options.model_fields.items():
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=_help(field.annotation, field.description),
            metavar=_metavar(field.annotation),
            envvar=ENVIRONMENT.get(name),
            hidden=name in HIDDEN,
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if field.default is None else str(field.default),
                annotation=Annotated[str | None, option],
            )
        )

    def command(**values: str | None) -> None:
        run(options.of(**{name: value for name, value in values.items() if value is not None}))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
