"""``holdfast verify``: every byte of checkpoints against its checksum. Torch-free for what Holdfast wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from holdfast.cli.choosing import entries_of, is_one_checkpoint, of_step
from holdfast.cli.output import AsJson, exit_status, print_json, progress_bar, shown, size_text
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.listing import existing_directory
from holdfast.opening import open_source
from holdfast.verifying import VerifyReport, problem_of, verify_source


@dataclass(frozen=True, slots=True)
class _Result:
    path: str
    step: int | None
    report: VerifyReport


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a root: all that Holdfast wrote there.")
    ],
    step: Annotated[int | None, typer.Option(help="Only this step of a root.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Only the newest step of a root.")] = False,  # noqa: FBT002
    everything: Annotated[bool, typer.Option("--all", help="What stock DCP wrote, too: it has no checksums.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Read every byte and compare it with its checksum; name every file that is wrong, with tensor and byte range.

    Exit status 1 where anything is wrong. Changes nothing, and may run beside a job that saves.
    """
    if sum((step is not None, newest, everything)) > 1:
        raise ConfigError("give one of --step, --newest and --all", field="all")
    results: list[_Result] = []
    for target, found_step in _targets(path, step, newest=newest, everything=everything):
        result = _verified(target, found_step)
        if result is None:
            continue  # retention has taken it away meanwhile
        results.append(result)
        if not as_json:
            _print(result)
    ok = all(result.report.ok for result in results)
    if as_json:
        print_json("verify", path=existing_directory(path), ok=ok, checkpoints=[_document(row) for row in results])
    if not ok:
        raise typer.Exit(1)


def _targets(path: str, step: int | None, *, newest: bool, everything: bool) -> list[tuple[str, int | None]]:
    directory = existing_directory(path)
    if is_one_checkpoint(directory):
        if step is not None or newest:
            raise ConfigError(f"{directory} is one checkpoint; give its root with --step or --newest", field="step")
        return [(directory, None)]
    _, rows = entries_of(directory)
    if step is not None:
        rows = [of_step(directory, rows, step)]
    elif newest:
        rows = [row for row in rows if row.latest] or rows[-1:]
    elif not everything:
        rows = [row for row in rows if row.state != "stock"]
    if not rows:
        raise CheckpointNotFound(f"{directory} holds no checkpoints to verify", path=directory)
    return [(row.path, row.step) for row in rows]


def _verified(path: str, step: int | None) -> _Result | None:
    try:
        source = open_source(path)
    except CheckpointNotFound:
        return None
    except HoldfastError as error:
        if exit_status(error) > 1:
            raise
        found = VerifyReport(ok=False, files=0, nbytes=0, checksummed=True, problems=(problem_of(error),))
        return _Result(path, step, found)
    with progress_bar(path) as progress:
        report = verify_source(source, progress)
    if not report.ok and _vanished(path):
        return None
    return _Result(path, source.step, report)


def _vanished(path: str) -> bool:
    try:
        open_source(path)
    except CheckpointNotFound:
        return True
    except HoldfastError:
        return False
    return False


def _print(result: _Result) -> None:
    report = result.report
    checked = "" if report.checksummed else ", which has no checksums: only missing bytes would show"
    verdict = "fine" if report.ok else f"WRONG, {len(report.problems)} problems"
    typer.echo(f"{shown(result.path)}: {verdict} ({report.files} files, {size_text(report.nbytes)}{checked})")
    for problem in report.problems:
        typer.echo(f"  {shown(problem.message)}")


def _document(result: _Result) -> dict[str, Any]:
    report = result.report
    return {
        "path": result.path,
        "step": result.step,
        "ok": report.ok,
        "files": report.files,
        "nbytes": report.nbytes,
        "checksummed": report.checksummed,
        "problems": [
            {"path": row.path, "tensor": row.tensor, "byte_range": row.byte_range, "message": row.message}
            for row in report.problems
        ],
    }
