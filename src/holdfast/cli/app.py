"""Run the commands of ``holdfast`` and ``python -m holdfast``, and map errors to exit statuses.

Exit status 0: fine. 1: a finding, such as a corrupt checkpoint, or a root that somebody holds. 2: misuse: an unknown
option, a path or a step that isn't there. 130: Ctrl-C. 141: who read standard output has gone, such as ``head``. Errors
of Holdfast are one message on standard error, without a traceback; with ``--json`` a document on standard output, too.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer

from holdfast._version import __version__
from holdfast.cli.bench import bench
from holdfast.cli.convert import convert, export
from holdfast.cli.diff import diff
from holdfast.cli.ls import ls
from holdfast.cli.output import (
    INTERRUPTED,
    MISUSE,
    UNHEARD,
    drop_output,
    exit_status,
    is_unheard,
    prepare_streams,
    print_error,
    print_error_document,
)
from holdfast.cli.prune import prune
from holdfast.cli.recover import recover
from holdfast.cli.report import report
from holdfast.cli.show import cat, show
from holdfast.cli.verify import verify
from holdfast.cli.view import view
from holdfast.cli.watch import watch
from holdfast.errors import ConfigError, HoldfastError, StorageError

app = typer.Typer(
    name="holdfast",
    help="Checkpoints for PyTorch that never stall training and are never half there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def holdfast(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,  # noqa: FBT002
) -> None:
    """Handle options that come before a command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


for command in (ls, show, cat, diff, verify, export, convert, prune, recover, report, view, watch, bench):
    app.command()(command)


def main() -> None:
    """Run the command named by ``sys.argv``; ends the process with its status."""
    as_json = "--json" in sys.argv
    prepare_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk is still a message
    except HoldfastError as error:
        _end(error, as_json=as_json)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        absent = ConfigError(
            f"this reads values of tensors or objects, which needs {error.name}, and there is none here: pip install "
            f"{error.name}; ls, show, verify, prune, report and diff --structure do without"
        )
        _end(absent, as_json=as_json)
    except OSError as error:  # of a working directory that is gone, or of what standard output leads to
        if isinstance(error, BrokenPipeError) and is_unheard():
            _end_unheard()
        _end(
            StorageError(
                f"the operating system refused an operation: {error}", path=error.filename or "", errno=error.errno
            ),
            as_json=as_json,
        )
    except SystemExit as ended:
        if _came_of(ended, BrokenPipeError) and is_unheard():
            _end_unheard()
        if _came_of(ended, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        if as_json and ended.code == MISUSE:
            # What the command line lacks is on standard error by now.
            why: Any = ended.__context__
            message = why.format_message() if hasattr(why, "format_message") else "the command line can't be understood"
            print_error_document(ConfigError(message))
        raise


def _came_of(ended: BaseException, kind: type[BaseException]) -> bool:
    """Return True if typer ended because of a ``kind``; versions of it differ in what they make of one."""
    found: BaseException | None = ended
    while found is not None and not isinstance(found, kind):
        found = found.__context__
    return found is not None


def _end(error: HoldfastError, *, as_json: bool) -> NoReturn:
    try:
        print_error(error, as_json=as_json)
        sys.stdout.flush()
    except OSError:
        drop_output()  # what it leads to takes nothing any more
    sys.exit(exit_status(error))


def _end_unheard() -> NoReturn:
    """End as others do whose reader, such as ``head``, has gone: without a word."""
    drop_output()
    sys.exit(UNHEARD)
