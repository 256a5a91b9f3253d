"""``holdfast``, and ``python -m holdfast``: the commands, and what their exit status means.

Exit status 0: fine. 1: a finding, such as a corrupt checkpoint. 2: misuse: an unknown option, a path that makes no
sense. Errors of Holdfast are one message on standard error, without a traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli.bench import bench
from holdfast.errors import ConfigError, HoldfastError

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


app.command()(bench)


def main() -> None:
    """Run the command named by ``sys.argv``; ends the process with its status."""
    try:
        app()
    except HoldfastError as error:
        typer.echo(f"holdfast: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
