"""Run the commands of ``holdfast`` and ``python -m holdfast``, and map errors to exit statuses.

Exit status 0: fine. 1: a finding, such as a corrupt checkpoint, or a root that somebody holds. 2: misuse: an unknown
option, a path or a step that isn't there. 130: Ctrl-C. 141: who read standard output has gone, such as ``head``. Errors
of Holdfast are one message on standard error, without a traceback; with ``--json`` a document on standard output, too.
Only the module of the command that is named is imported: all of them take longer than to list a root.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from holdfast._version import __version__
from holdfast.cli.output import (
    INTERRUPTED,
    MISUSE,
    UNHEARD,
    came_of,
    drop_output,
    exit_status,
    is_unheard,
    prepare_streams,
    print_error,
)
from holdfast.errors import ConfigError, HoldfastError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    app: typer.Typer
    """All commands, made when it is first asked for."""

_MODULES: Final = {
    "ls": "ls",
    "show": "show",
    "cat": "show",
    "diff": "diff",
    "verify": "verify",
    "export": "convert",
    "convert": "convert",
    "prune": "prune",
    "recover": "recover",
    "report": "report",
    "view": "view",
    "watch": "watch",
    "bench": "bench",
}
"""Commands, as ``--help`` lists them, and the module of each."""
_ON_A_LINE: Final = (["watch"], ["view"])
"""Command lines whose documents are each on one line: they print them while they go on."""


def _holdfast(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,  # noqa: FBT002
) -> None:
    """Handle options that come before a command."""
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(MISUSE)


def _app_of(names: Iterable[str]) -> typer.Typer:
    made = typer.Typer(
        name="holdfast",
        help="Checkpoints for PyTorch that never stall training and are never half there.",
        pretty_exceptions_enable=False,
    )
    made.callback(invoke_without_command=True)(_holdfast)
    for name in names:
        made.command()(getattr(import_module(f"holdfast.cli.{_MODULES[name]}"), name))
    return made


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("app", _app_of(_MODULES))


def main() -> None:
    """Run the command named by ``sys.argv``; ends the process with its status."""
    as_json = "--json" in sys.argv
    named = sys.argv[1:2]
    output = prepare_streams()
    try:
        try:
            run = _app_of(named if named and named[0] in _MODULES else _MODULES)
            status = run(prog_name="holdfast", standalone_mode=False)
        finally:
            sys.stdout.flush()  # here, where a full disk is still a message
    except HoldfastError as error:
        _end(error, as_json=as_json)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        absent = ConfigError(
            "this reads values of tensors or objects, or what stock DCP wrote, which needs "
            f"{error.name}, and there is none here: pip install {error.name}; ls and prune do without, and so do show, "
            "verify, report and diff --structure of what Holdfast wrote"
        )
        _end(absent, as_json=as_json)
    except OSError as error:  # of a working directory that is gone, or of what standard output leads to
        if isinstance(error, BrokenPipeError) and is_unheard(output):
            _end_unheard()
        _end(
            StorageError(
                f"the operating system refused an operation: {error}", path=error.filename or "", errno=error.errno
            ),
            as_json=as_json,
        )
    except SystemExit as ended:
        if came_of(ended, BrokenPipeError) and is_unheard(output):
            _end_unheard()
        raise
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # Of typer, for a command line that can't be understood; its classes aren't the same in all releases.
        command = f"holdfast {named[0]}" if named and named[0] in _MODULES else "holdfast"
        message = " ".join(error.format_message().split()).rstrip(".")
        _end(ConfigError(f"{message}{'' if message[-1:] == '?' else ';'} see `{command} --help`"), as_json=as_json)
    sys.exit(status)


def _end(error: HoldfastError, *, as_json: bool) -> NoReturn:
    try:
        print_error(error, as_json=as_json, on_a_line=sys.argv[1:2] in _ON_A_LINE)
        sys.stdout.flush()
    except OSError:
        drop_output()  # what it leads to takes nothing any more
    sys.exit(exit_status(error))


def _end_unheard() -> NoReturn:
    """End as others do whose reader, such as ``head``, has gone: without a word."""
    drop_output()
    sys.exit(UNHEARD)
