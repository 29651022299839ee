"""``kvferry model``: pull, list, path, convert.

Owns the four commands and what they print on stdout. The work is ``model_store``'s and
``convert``'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch import model_store

model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="A known model: see `kvferry model list`.")]


@model_app.command()
def pull(name: Name) -> None:
    """Download and convert a known model, unless it is here."""
    print(model_store.pull(name))


@model_app.command("list")
def list_models() -> None:
    """List the known models and whether they are here."""
    for name, model in model_store.KNOWN_MODELS.items():
        where = str(model_store.path_of(name)) if model_store.is_pulled(name) else "not pulled"
        print(f"{name}\t{where}\t{model.description}")


@model_app.command()
def path(name: Name) -> None:
    """Print the directory of a pulled model."""
    model_store.path_of(name)  # an unknown name is an error, whatever directories there are
    print(model_store.resolve(name).directory)


@model_app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A GGUF file.")],
    directory: Annotated[Path, typer.Argument(help="The new model directory.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.", metavar="NAME")] = "float32",
) -> None:
    """Convert a GGUF file to a Hugging Face safetensors directory."""
    from launch.convert import convert_gguf

    convert_gguf(source, directory, dtype=dtype)
    print(directory)
