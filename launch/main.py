"""The ``kvferry`` command: its commands, and how it ends.

Owns the one way out: whatever goes wrong for a reason outside of the code is one line
``kvferry: error: <what> <remedy>`` on stderr and a non-zero exit code. Tracebacks are for our bugs.

Heavy imports (torch, transformers, fastapi) happen inside of the commands that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from launch import __version__, process_env
from launch.cli_cache import cache_app, namespace
from launch.cli_model import model_app
from launch.cli_options import checked_timeout, command_of
from launch.config import SECRET_FILE_HELP, GatewayOptions, NodeOptions, StoreOptions, UpOptions
from launch.doctor import options as doctor
from launch.errors import EXIT_ABORTED, EXIT_CONFIG, LaunchError
from launch.output import hold_standard_streams, write_line

# typer does not export the base of its usage errors, and where it lives depends on the version
_UsageError: type[Exception] = next(
    base
    for base in typer.BadParameter.__mro__
    if base.__name__ == "UsageError" and issubclass(base, Exception)
)

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
    join: Annotated[
        str | None, typer.Option(envvar="KVFERRY_JOIN", help="Where the registry listens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for an answer.", callback=checked_timeout)
    ] = 5.0,
    secret_file: Annotated[str | None, typer.Option(help=SECRET_FILE_HELP)] = None,
) -> None:
    """Show the roles, transport, page spec, load and pages of a running cluster."""
    from launch.status import show

    show(join, as_json=as_json, timeout_s=timeout, secret_file=secret_file)


app.command("namespace")(namespace)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


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
    text = " ".join(str(error.format_message()).split())
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
        print(error.format_message(), file=sys.stderr)
        return EXIT_CONFIG
    command = error.ctx.command_path if error.ctx else "kvferry"
    return _fail(f"{text} (see `{command} --help`)", EXIT_CONFIG)


def _fail(message: str, exit_code: int) -> int:
    write_line(f"kvferry: error: {message}", sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
