"""Print results: JSON for scripts, text for people, progress bars. Torch-free.

Guarantees: with ``--json`` standard output is one JSON document and nothing else; text that comes from a checkpoint
can't control a terminal; progress goes to standard error, and only if that is a terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import select
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from holdfast.catalog.listing import size_text
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.format.sealed import NewerFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_E = TypeVar("_E", bound=BaseException)

SCHEMA: Final = 1
"""Increased when a member of a document is removed or changes its meaning, not when members are added."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]

FOUND: Final = 1
MISUSE: Final = 2
INTERRUPTED: Final = 130
"""128 and the number of SIGINT, as a shell has it."""
UNHEARD: Final = 141
"""128 and the number of SIGPIPE."""
LINES: Final = "\n"


def prepare_streams() -> tuple[int, int] | None:
    """Escape what the encoding of standard output or error lacks; take one that is closed for ``/dev/null``.

    What is logged is printed as messages are, unless somebody has set up logging.
    Returns what standard output leads to, for `is_unheard`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.lastResort = _Messages(logging.WARNING)
    return _output()


class _Messages(logging.Handler):
    """Print what is logged on standard error: names in it can't control a terminal, nor begin a line."""

    _traces: Final = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            trace = "" if record.exc_info is None else "\n" + self._traces.formatException(record.exc_info)
            typer.echo(f"holdfast: {shown(record.getMessage())}{shown(trace, keep=LINES)}", err=True)


def _output() -> tuple[int, int] | None:
    try:
        found = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def is_unheard(output: tuple[int, int] | None) -> bool:
    """Return True if nobody can read standard output any more: a broken pipe may also be that of an engine.

    output: what it led to at first. rich sends it to ``/dev/null`` when its reader has gone.
    """
    if _output() != output:
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    except (OSError, ValueError):
        return True
    return bool(poll.poll(0))


def drop_output() -> None:
    """Let what is still to be written to standard output go nowhere: the interpreter would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def came_of(ended: BaseException, kind: type[_E]) -> _E | None:
    """Return the ``kind`` that ``ended`` is or was raised because of: typer and torch hide some behind their own."""
    found: BaseException | None = ended
    while found is not None and not isinstance(found, kind):
        found = found.__context__
    return found


def exit_status(error: HoldfastError) -> int:
    """2 for what was asked wrongly, 1 for what was found, such as a checkpoint of a newer Holdfast."""
    asked_wrongly = isinstance(error, (ConfigError, CheckpointNotFound)) and not isinstance(error, NewerFormat)
    return MISUSE if asked_wrongly else FOUND


def print_json(command: str, **members: Any) -> None:
    """One document: ``schema`` and ``command`` first; a member a line, and of a list of rows, a row a line."""
    parts: list[str] = []
    for name, value in {"schema": SCHEMA, "command": command, **members}.items():
        parts += (",\n" if parts else "{\n", f'  "{name}": ', *_member(value))
    sys.stdout.writelines([*parts, "\n}\n"])


def print_line(command: str, **members: Any) -> None:
    """One document on a line of its own, of a command that prints several; out at once."""
    sys.stdout.write(_json({"schema": SCHEMA, "command": command, **members}) + "\n")
    sys.stdout.flush()


def _member(value: Any) -> tuple[str, ...]:
    """Return ``value`` in parts, none of them a copy: a list of very many rows takes tens of MB."""
    if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], (int, float, str)):
        return (_json(value),)
    try:
        rows = _ascii(_encoder.encode_lines(value).rstrip().replace(b"\n", _ROW.encode()))  # JSON escapes those in rows
    except _NOT_FOR_MSGSPEC:
        rows = _ROW.join(map(_json, value))
    return "[\n    ", rows, "\n  ]"


def _json(value: Any) -> str:
    """Return ``value`` as ASCII; where msgspec can't, such as for lone surrogates, as the standard library has it."""
    try:
        return _ascii(_encoder.encode(value))
    except _NOT_FOR_MSGSPEC:
        return json.dumps(value, default=str)


def _ascii(data: bytes) -> str:
    if data.isascii():
        return data.decode("ascii")
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], data.decode())


_ROW: Final = ",\n    "
_encoder: Final = msgspec.json.Encoder(enc_hook=str)
_NOT_FOR_MSGSPEC: Final = (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError)
_BEYOND_ASCII: Final = re.compile("[^\x00-\x7f]+")


def print_error(error: HoldfastError, *, as_json: bool, on_a_line: bool = False) -> None:
    """The message on standard error; with ``--json`` also a document that says what kind of error it is.

    on_a_line: for a command that prints its documents so.
    """
    typer.echo(f"holdfast: {shown(_told(error))}", err=True)
    if as_json:
        told = {"kind": type(error).__name__, "message": _told(error), "path": getattr(error, "path", None)}
        (print_line if on_a_line else print_json)("error", error=told)


def _told(error: HoldfastError) -> str:
    """Return the message, with the option where it names an argument."""
    return str(error).replace("pass overwrite=True", "give --overwrite")


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
    columns = []
    for number, cells in enumerate(zip(titles, *rows, strict=True)):
        pad = str.rjust if number in right else str.ljust
        text = "".join(cells)
        if text.isascii() and text.isprintable():
            width = max(map(len, cells))
            columns.append([pad(cell, width) for cell in cells])
        else:
            columns.append(_padded([_escaped(cell, sys.stdout.encoding or "utf-8") for cell in cells], pad))
    sys.stdout.write("\n".join(["  ".join(row).rstrip() for row in zip(*columns, strict=True)]) + "\n")


def _padded(cells: list[str], pad: Callable[[str, int], str]) -> list[str]:
    """Return ``cells`` as wide as the widest, as a terminal counts: some characters take two columns, some none."""
    from rich.cells import cell_len

    widths = [cell_len(cell) for cell in cells]
    widest = max(widths)
    return [pad(cell, len(cell) + widest - width) for cell, width in zip(cells, widths, strict=True)]


def _escaped(text: str, encoding: str) -> str:
    """``text`` as `shown`, and without what ``encoding`` lacks."""
    return shown(text).encode(encoding, "backslashreplace").decode(encoding)


_SHOWN_AFTER_S: Final = 0.5
"""A bar that would be gone before it could be read isn't shown."""
_BESIDE_TITLE: Final = 41
"""Columns for ``100% of 1023.9 MiB, 1023.9 MiB/s`` and the time left."""
_BAR: Final = 9
_TITLE_MIN: Final = 8


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], object] | None]:
    """A function to call with (bytes done, bytes in all); None where nobody looks at a terminal that can draw."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        yield None
        return
    bar, began = contextlib.ExitStack(), time.monotonic()
    show: Callable[[int, int], object] | None = None

    def told(done: int, total: int) -> None:
        nonlocal show
        if show is None and done < total and time.monotonic() - began >= _SHOWN_AFTER_S:
            show = bar.enter_context(_bar(title))
        if show is not None:
            show(done, total)

    with bar:
        yield told


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], object]]:
    """A line of standard error, whatever the terminal's width is or becomes, that is gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    def one_line() -> Column:
        return Column(no_wrap=True, overflow="crop")

    console = Console(stderr=True)
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
    amount = TextColumn("{task.fields[amount]}", markup=False, table_column=one_line())
    left = TimeRemainingColumn(table_column=one_line())

    class Line(Progress):
        def get_renderables(self) -> Iterator[Any]:
            """Leave out the bar and then the title where there is no room; the figures are what matters."""
            room = console.width - _BESIDE_TITLE
            columns: list[ProgressColumn] = [amount, left]
            if room >= _BAR + _TITLE_MIN:
                columns.insert(0, bar)
                room -= _BAR
            if room >= _TITLE_MIN:
                text = _fitting(title, room - 1, console.encoding).replace("{", "{{").replace("}", "}}")
                columns.insert(0, TextColumn(text, markup=False, table_column=one_line()))
            self.columns = tuple(columns)
            yield self.make_tasks_table(self.tasks)

    with Line(console=console, transient=True, expand=True) as progress:
        task = progress.add_task("", total=None, amount="")

        def show(done: int, total: int) -> None:
            speed = progress.tasks[0].speed
            amount = f"{done / total:.0%} of {size_text(total)}" + (f", {size_text(int(speed))}/s" if speed else "")
            progress.update(task, completed=done, total=total, amount=amount)

        yield show


def _fitting(text: str, room: int, encoding: str) -> str:
    """Return the end of ``text`` that takes at most ``room`` columns of a terminal of this encoding."""
    from rich.cells import cell_len

    text = _escaped(text, encoding)
    if cell_len(text) <= room:
        return text
    mark = "…" if encoding.startswith("utf") else "..."
    text = text[-room:]
    while cell_len(mark + text) > room:
        text = text[1:]
    return mark + text
