"""Implement ``holdfast report``: write the page of a root as one HTML file. Torch-free without ``--stats``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.catalog.listing import existing_directory, size_text
from holdfast.cli.ls import is_one_checkpoint, none_in
from holdfast.cli.output import AsJson, print_json, shown
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def root_of(path: str) -> str:
    """Return the root at ``path``. Raises `ConfigError` for what is none, or is one checkpoint."""
    root = existing_directory(path)
    if is_one_checkpoint(root):
        raise ConfigError(f"{root} is one checkpoint; give the root that holds it: {os.path.dirname(root)}")
    return root


def report(
    path: Annotated[str, typer.Argument(metavar="ROOT", help="A directory or URL of checkpoints.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    steps: Annotated[
        list[int] | None,
        typer.Option("--step", help="Include the tensors of this step; may be repeated. By default the newest two."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Include statistics of values; reads data.")] = False,  # noqa: FBT002
    stats_mib: Annotated[int, typer.Option(help="Read at most so many MiB for --stats, small tensors first.")] = 1024,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Write one HTML file that shows a root: saves, steps, tensors, differences, lineage. It needs no server.

    Reads manifests and the journal, and of the steps whose tensors it includes the reports; no data without --stats.
    """
    from holdfast.view.model import summary_of
    from holdfast.view.page import render_page
    from holdfast.view.tensors import tensors_of

    began = time.perf_counter()
    root = root_of(path)
    summary = summary_of(root)
    names = _included(summary, steps)
    checkpoints, left_out = {}, {}
    for name in names:
        try:
            checkpoints[name] = tensors_of(f"{root.rstrip('/')}/{name}")
        except HoldfastError as error:
            if steps:
                raise
            left_out[name] = str(error)
    statistics = None
    if stats and checkpoints:
        from holdfast.view.statistics import all_statistics

        statistics = all_statistics(f"{root.rstrip('/')}/{next(iter(checkpoints))}", bytes_max=stats_mib << 20)
    data = render_page(summary, checkpoints=checkpoints, statistics=statistics).encode()
    _write(out, data)
    seconds = round(time.perf_counter() - began, 3)
    if as_json:
        print_json(
            "report",
            path=root,
            out=str(out),
            nbytes=len(data),
            seconds=seconds,
            entries=len(summary["steps"]),
            included=list(checkpoints),
            left_out=left_out,
        )
        return
    if not summary["steps"]:
        typer.echo(shown(none_in(root)), err=True)
    for name, why in left_out.items():
        typer.echo(f"without the tensors of {shown(name)}: {shown(why)}", err=True)
    typer.echo(f"{shown(str(out))}: {len(summary['steps'])} entries, {size_text(len(data))}, {seconds:.1f} s")


def _included(summary: dict[str, Any], steps: Sequence[int] | None) -> list[str]:
    """Return the names of the checkpoints to include, the newest first, or those of ``steps`` as they come.

    Of a step that is asked for, stock DCP's checkpoint is one, and an export where there is no other. One that can't be
    read says so then.
    """
    rows = [row for row in summary["steps"] if row["state"] in ("published", "stock", "corrupt", "newer")]
    ours = [row for row in rows if row["state"] == "published" and row["kind"] == "checkpoint"]
    if not steps:
        return [row["name"] for row in ours[:-3:-1]]
    by_step = {row["step"]: row["name"] for row in [*rows[::-1], *ours]}
    for step in steps:
        if step not in by_step:
            have = ", ".join(str(found) for found in sorted(found for found in by_step if found is not None)) or "none"
            raise CheckpointNotFound(
                f"step {step} is not under {summary['root']}; steps: {have}", path=summary["root"], step=step
            )
    return list(dict.fromkeys(by_step[step] for step in steps))


def _write(out: Path, data: bytes) -> None:
    """Write the file whole, or leave the one before."""
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(f"{out} can't be written: {error.strerror}", path=str(out), errno=error.errno) from error
