"""Print results: JSON for scripts, text for people, progress bars. Torch-free.

Guarantees: with ``--json`` standard output is one JSON document and nothing else; text that comes from a checkpoint
can't control a terminal; progress goes to standard error, and only if that is a terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SCHEMA: Final = 1
"""Increased when a member of a document is removed or changes its meaning, not when members are added."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]

FOUND: Final = 1
MISUSE: Final = 2
LINES: Final = "\n"


def exit_status(error: HoldfastError) -> int:
    """2 for what was asked wrongly, 1 for what was found."""
    return MISUSE if isinstance(error, (ConfigError, CheckpointNotFound)) else FOUND


def print_json(command: str, **members: Any) -> None:
    """One document: ``schema`` and ``command`` first."""
    document = {"schema": SCHEMA, "command": command, **members}
    typer.echo(json.dumps(document, indent=2, default=str))


def print_line(command: str, **members: Any) -> None:
    """One document on a line of its own, of a command that prints several; out at once."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, "command": command, **members}, default=str) + "\n")
    sys.stdout.flush()


def print_error(error: HoldfastError, *, as_json: bool) -> None:
    """The message on standard error; with ``--json`` also a document that says what kind of error it is."""
    typer.echo(f"holdfast: {shown(str(error), keep=LINES)}", err=True)
    if as_json:
        print_error_document(error)


def print_error_document(error: HoldfastError) -> None:
    """Print the kind of error as JSON, for scripts."""
    kind, text = type(error).__name__, str(error)
    print_json("error", error={"kind": kind, "message": text, "path": getattr(error, "path", None)})


def plain_number(value: float) -> float | str:
    """JSON has no infinities and no NaN: they are strings there, as in the manifest."""
    return value if math.isfinite(value) else str(value)


def shown(text: str, *, keep: str = "") -> str:
    """``text`` with everything escaped that a terminal would act upon, or that can't be encoded."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def age_s_of(created: str | None) -> float | None:
    """Seconds since an ISO 8601 time, by this machine's clock; None where it isn't one."""
    try:
        when = datetime.fromisoformat(created or "")
    except ValueError:
        return None
    now = datetime.now(timezone.utc)
    return round((now - (when if when.tzinfo else when.replace(tzinfo=timezone.utc))).total_seconds(), 1)


def age_text(created: str | None) -> str:
    """``3 h``: the largest unit that fits."""
    age_s = age_s_of(created)
    if age_s is None:
        return "-"
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns under their titles, each as wide as it needs; those in ``right`` end at the same place."""
    table = [list(titles), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    for row in table:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], object] | None]:
    """A function to call with (bytes done, bytes in all); None where nobody looks at a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(shown(title)), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
