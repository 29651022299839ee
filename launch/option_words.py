"""What an option takes, in plain words; and why a value was refused, without a library's jargon.

Owns the translation of pydantic's fields and errors. Pure. The options' own validators speak for
themselves (they raise ``ValueError`` with value and remedy); everything else that pydantic checks
(types, choices, bounds) is said here.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_OWN_WORDS = ("value_error", "assertion_error")


def refusal(option: str, error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """Return one line for the first wrong value: the option, the value, what it takes instead."""
    first = error.errors()[0]
    field = fields[str(first["loc"][0])]
    reason = _own_words(first) or f"give {taken_by(field)}"
    return f"{option} {first['input']}: {reason}"


def reason_of(error: ValueError) -> str:
    """Return why a config class refused, pydantic's errors in words of ours."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    own = _own_words(first)
    if own is not None:
        return own
    name = ".".join(map(str, first["loc"]))
    return f"{name} {first['input']}: {_wanted(first)}"


def taken_by(field: FieldInfo) -> str:
    """Return what the values of ``field`` are: ``a whole number from 1 to 8``, ``one of a, b``."""
    kind = _kind(field.annotation)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return " ".join([_KINDS.get(kind, "text"), _range(field.metadata)]).rstrip()


def _kind(annotation: Any) -> Any:
    """The type of one value: of an optional field, or of one item of a repeatable one."""
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        members = [arg for arg in get_args(annotation) if arg not in (types.NoneType, Ellipsis)]
        return _kind(members[0])
    return annotation


def _range(metadata: list[Any]) -> str:
    """The bounds of a field, in words; empty when it has none."""
    bounds: dict[str, float] = {}
    for constraint in metadata:  # of annotated_types
        for name in ("ge", "gt", "le", "lt"):
            if (bound := getattr(constraint, name, None)) is not None:
                bounds[name] = bound
    if bounds.keys() == {"ge", "le"}:
        return f"from {bounds['ge']:g} to {bounds['le']:g}"
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {bounds[name]:g}" for name in words if name in bounds)


def _own_words(details: Any) -> str | None:
    """What one of our validators said; None when pydantic itself refused."""
    if details["type"] not in _OWN_WORDS:
        return None
    return str(details.get("ctx", {}).get("error") or details["msg"])


def _wanted(details: Any) -> str:
    """What pydantic wanted, from the error alone."""
    kind, context = str(details["type"]), details.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"give {words} {context[name]:g}"
    if kind == "literal_error":
        return f"choose from {context['expected']}"
    for prefix, wanted in (
        ("int", "a whole number"),
        ("float", "a number"),
        ("finite", "a number"),
    ):
        if kind.startswith(prefix):
            return f"give {wanted}"
    return str(details["msg"])
