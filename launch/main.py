"""The ``kvferry`` command: its commands, and how it ends.

Owns the one way out: whatever goes wrong for a reason outside of the code is one line
``kvferry: error: <what> <remedy>`` on stderr and a non-zero exit code. Tracebacks are for our bugs.

Heavy imports (torch, transformers, fastapi) happen inside of the commands that need them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
import typer.main

from launch import __version__, process_env
from launch.cli_cache import Join, SecretFile, Timeout, cache_app, namespace
from launch.cli_model import model_app
from launch.cli_options import command_of
from launch.config import GatewayOptions, NodeOptions, StoreOptions, UpOptions
from launch.doctor import options as doctor
from launch.errors import EXIT_ABORTED, EXIT_CONFIG, LaunchError
from launch.output import hold_standard_streams, write_line

# typer does not export the base of its usage errors, and where it lives depends on the version
_UsageError: type[Exception] = next(
    base
    for base in typer.BadParameter.__mro__
    if base.__name__ == "UsageError" and issubclass(base, Exception)
)

SLIP_SHARE = 0.75  # of a name that is typed right (as difflib counts), when it is a slip

app = typer.Typer(
    name="kvferry",
    help="Serve a language model with prefill and decode on separate pools of processes.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich's costs more to import than all the rest
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(model_app, name="model")
app.add_typer(cache_app, name="cache")


def _up(options: UpOptions) -> None:
    from launch import up

    up.run(options)


def _gateway(options: GatewayOptions) -> None:
    from launch import gateway_role

    gateway_role.run(options)


def _store(options: StoreOptions) -> None:
    from launch import store_role

    store_role.run(options)


def _prefill(options: NodeOptions) -> None:
    from launch import node_role

    node_role.run("prefill", options)


def _decode(options: NodeOptions) -> None:
    from launch import node_role

    node_role.run("decode", options)


def _doctor(options: doctor.DoctorOptions) -> None:
    from launch.doctor import command

    command.run(options)


app.command("up", help="Start a whole cluster on this machine.")(command_of(UpOptions, _up))
app.command("gateway", help="Start the HTTP door and registry.")(
    command_of(GatewayOptions, _gateway)
)
app.command("store", help="Start a store node.")(command_of(StoreOptions, _store))
app.command("prefill", help="Start prefill nodes.")(command_of(NodeOptions, _prefill))
app.command("decode", help="Start decode nodes.")(command_of(NodeOptions, _decode))
app.command("doctor", help=doctor.HELP)(
    command_of(doctor.DoctorOptions, _doctor, without=doctor.UNUSED)
)


@app.command()
def status(
    join: Join = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 5.0,
    secret_file: SecretFile = None,
) -> None:
    """Show the roles, transport, page spec, load and pages of a running cluster."""
    from launch.status import show

    show(join, as_json=as_json, timeout_s=timeout, secret_file=secret_file)


app.command("namespace")(namespace)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _version_asked(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


Version = typer.Option("--version", help="As `kvferry version`.", callback=_version_asked)


@app.callback()
def kvferry(_: Annotated[bool, Version] = False) -> None:
    """Take what stands before the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    hold_standard_streams()
    process_env.die_with_parent()
    exit_code = _run(argv)
    if argv is None:  # the process is ours
        process_env.end_if_a_call_hangs(exit_code)
    return exit_code


def _run(argv: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        result = command.main(args=arguments, prog_name="kvferry", standalone_mode=False)
    except LaunchError as error:
        return _fail(str(error), error.exit_code)
    except _UsageError as error:
        return _fail_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_ABORTED)
    if result == EXIT_ABORTED:  # what some versions of typer make of Ctrl-C
        return _fail("interrupted", EXIT_ABORTED)
    return result if isinstance(result, int) else 0


def _fail_usage(error: Any) -> int:
    text = _no_such_command(error) or " ".join(str(error.format_message()).split())
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
        print(error.format_message(), file=sys.stderr)
        return EXIT_CONFIG
    command = error.ctx.command_path if error.ctx else "kvferry"
    return _fail(f"{text} (see `{command} --help`)", EXIT_CONFIG)


def _no_such_command(error: Any) -> str | None:
    """Return what to say of a command that there is not; None when that is not the error.

    A name is proposed when it is near enough to be a slip of the finger, else all of them.
    """
    match = re.match(r"No such command '(.*?)'", str(error.format_message()))
    if match is None or error.ctx is None:
        return None
    names = list(error.ctx.command.commands)
    near = get_close_matches(match[1], names, n=1, cutoff=SLIP_SHARE)
    remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"no such command: {match[1]}: {remedy}"


def _fail(message: str, exit_code: int) -> int:
    write_line(f"kvferry: error: {message}", sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
