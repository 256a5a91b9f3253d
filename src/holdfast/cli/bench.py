"""Implement ``holdfast bench``: measure Holdfast, its peers and the machine's limit side by side.

The benchmarks are a separate package: next to ``src`` in a checkout, inside this package when installed. They are found
when the command runs; they need the ``bench`` extra (matplotlib, for pictures).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import holdfast
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def benchmarks_home() -> Path:
    """The directory that holds the package ``benchmarks``. Raises `ConfigError` where there is none."""
    package = Path(holdfast.__file__).resolve().parent
    for home in (package.parents[1], package / "_bench"):
        if (home / "benchmarks" / "runner.py").is_file():
            return home
    raise ConfigError(f"the benchmarks are neither in {package / '_bench'} nor next to the sources; reinstall Holdfast")


def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Cases to run, as --only.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller states, fewer rounds: under four minutes.")] = False,  # noqa: FBT002
    out: Annotated[Path, typer.Option(help="Where to write, on the file system to measure.")] = Path("out/bench"),
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CASE...", help="Cases to run; all by default.")
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", metavar="PEER", help="Contenders to run; all by default.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="full, quick, or tiny: a trial of the benchmarks themselves.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all samples instead of the table.")] = False,  # noqa: FBT002
) -> None:
    """Measure saves and loads against all peers and the raw limit; writes OUT/report.md, samples and pictures.

    Exit status 1 where Holdfast failed or loaded what was not saved; times never decide it.
    """
    sys.path.insert(0, str(benchmarks_home()))
    runner: Any = importlib.import_module("benchmarks.runner")
    chosen = [*(only or []), *(cases or [])]
    try:
        run = runner.checked(size or ("quick" if quick else "full"), chosen, peers or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    results = run(out)
    if as_json:
        typer.echo((out / "results.json").read_text(), nl=False)
    elif sys.stdout.isatty():
        _show(runner.targets(results))
    else:
        typer.echo(runner.summary(results))
    typer.echo(f"the whole report: {out / 'report.md'}", err=True)
    raise typer.Exit(runner.status(results))


def _show(rows: Sequence[Any]) -> None:
    """The targets as a table, on a terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "target", "reached", ""):
        table.add_column(title)
    for row in rows:
        if row.value is not None:
            style = "green" if row.verdict == "ok" else "yellow"
            table.add_row(row.what, row.target, row.reached, f"[{style}]{row.verdict}[/]")
    Console().print(table)
