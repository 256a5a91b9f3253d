"""``holdfast``, and ``python -m holdfast``: the commands, and what their exit status means.

Exit status 0: fine. 1: a finding, such as a corrupt checkpoint, or a root that somebody holds. 2: misuse: an unknown
option, a path or a step that isn't there. Errors of Holdfast are one message on standard error, without a traceback;
with ``--json`` a document on standard output, too.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli.bench import bench
from holdfast.cli.ls import ls
from holdfast.cli.output import exit_status, print_error
from holdfast.cli.recover import recover
from holdfast.cli.show import show
from holdfast.cli.verify import verify
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Checkpoints for PyTorch that never stall training and are never half there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def holdfast(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,  # noqa: FBT002
) -> None:
    """What comes before any command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


for command in (ls, show, verify, recover, bench):
    app.command()(command)


def main() -> None:
    """Run the command named by ``sys.argv``; ends the process with its status."""
    try:
        app()
    except HoldfastError as error:
        print_error(error, as_json="--json" in sys.argv)
        sys.exit(exit_status(error))
