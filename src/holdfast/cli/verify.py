"""Implement ``holdfast verify``: compare every byte of checkpoints and exports with its checksum.

Torch-free for Holdfast's checkpoints; of stock DCP's it says where there is no torch to read them. For exports, index,
headers and other files are checked as well; for directories without a manifest, such as those of ``save_pretrained``,
only these checks are possible.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from holdfast.catalog.journal import note_verified
from holdfast.catalog.listing import existing_directory, lost_link, of_another_step, size_text
from holdfast.cli.ls import absent, entries_of, is_one_checkpoint, newest_of, of_step
from holdfast.cli.output import AsJson, print_json, progress_bar, shown
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.export.verify import is_export, verify_export
from holdfast.format.sealed import NewerFormat
from holdfast.loader.checkpoint import Problem, VerifyReport, problem_of, verify_source
from holdfast.loader.sources.open import open_source
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage

if TYPE_CHECKING:
    from holdfast.catalog.listing import RootEntry


@dataclass(frozen=True, slots=True)
class _Result:
    path: str
    step: int | None
    report: VerifyReport
    kind: Literal["checkpoint", "export"] = "checkpoint"
    state: Literal["verified", "newer", "unverified"] = "verified"
    error: str | None = None
    """Why nothing of it was read: a newer Holdfast wrote it, or reading it needs what isn't installed."""


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, an export, or a root; a path or URL.")],
    step: Annotated[int | None, typer.Option(help="Only this step of a root.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Only the newest step of a root.")] = False,  # noqa: FBT002
    everything: Annotated[bool, typer.Option("--all", help="What stock DCP wrote, too: it has no checksums.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Read every byte and compare it with its checksum; name every file that is wrong, with tensor and byte range.

    Of an export for Hugging Face also compare the index with the headers of its files, and see that JSON files parse.

    Exit status 1 where anything is wrong, or can't be read: a newer Holdfast wrote it, or it needs torch. Changes
    nothing, and may run beside a job that saves. The journal of a root, where there is one and it may be written to,
    notes when each checkpoint was verified.
    """
    if sum((step is not None, newest, everything)) > 1:
        raise ConfigError("give one of --step, --newest and --all", field="all")
    results: list[_Result] = []
    for target, found_step in _targets(path, step, newest=newest, everything=everything):
        result = _verified(target, found_step)
        if result is None:
            continue  # retention has taken it away meanwhile
        results.append(result)
        if result.state == "verified":
            note_verified(result.path, result.step, len(result.report.problems))
        if not as_json:
            _print(result)
    ok = all(result.report.ok for result in results)
    if as_json:
        print_json("verify", path=existing_directory(path), ok=ok, checkpoints=[_document(row) for row in results])
    if not ok:
        raise typer.Exit(1)


def _targets(path: str, step: int | None, *, newest: bool, everything: bool) -> list[tuple[str, int | None]]:
    directory = existing_directory(path)
    if is_one_checkpoint(directory) or is_export(directory):
        if step is not None or newest:
            what = "export" if is_export(directory) else "checkpoint"
            raise ConfigError(f"{directory} is one {what}; give its root with --step or --newest", field="step")
        return [(directory, None)]
    _, rows = entries_of(directory)
    if step is not None:
        rows = [of_step(directory, rows, step)]
    elif newest:
        rows = _newest(rows)
    elif not everything:
        rows = [row for row in rows if row.state != "stock"]
    if not rows:
        raise absent(directory, "no checkpoints and no exports to verify")
    return [(row.path, row.step) for row in rows]


def _newest(rows: list[RootEntry]) -> list[RootEntry]:
    """The newest that can be read, and those with higher steps that can't: one of them would be the newest."""
    newest = newest_of(rows) or rows[-1:]
    top = max((row.step for row in newest if row.step is not None), default=0)
    newer = [row for row in rows if row.error is not None and row.step is not None and row.step > top]
    return [*newer, *newest]


def _verified(path: str, step: int | None) -> _Result | None:
    exported = is_export(path)
    kind: Literal["checkpoint", "export"] = "export" if exported else "checkpoint"
    if exported and not is_one_checkpoint(path):
        return _Result(path, step, _as_read(path, None), kind)
    try:
        source = open_source(path, exports=True)
    except CheckpointNotFound:
        lost = lost_link(path)
        return None if lost is None else _Result(path, step, _unread(problem_of(lost)), kind)
    except NewerFormat as error:  # others are still to be verified
        return _Result(path, step, _unread(), kind, "newer", str(error))
    except HoldfastError as error:
        return _Result(path, step, _unread(problem_of(error)), kind)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        why = f"{path} is not verified: reading it needs {error.name}, and there is none here: pip install {error.name}"
        return _Result(path, step, _unread(Problem(path, None, None, why)), kind, "unverified", why)
    with progress_bar(path) as progress:
        report = verify_source(source, progress)
    if exported:
        report = _as_read(path, report)
    misnamed = None if source.manifest is None else of_another_step(path, source.manifest)
    if misnamed is not None:
        report = replace(report, ok=False, problems=(*report.problems, problem_of(misnamed)))
    if not report.ok and _vanished(path):
        return None
    return _Result(path, source.step, report, kind)


def _unread(*problems: Problem) -> VerifyReport:
    """Report of what can't be opened."""
    return VerifyReport(ok=False, files=0, nbytes=0, checksummed=True, problems=problems)


def _as_read(path: str, report: VerifyReport | None) -> VerifyReport:
    """Add to ``report`` the findings of an export's readers; each damaged file is reported once."""
    if report is None:
        sizes = _sizes_below(path)
        report = VerifyReport(ok=True, files=len(sizes), nbytes=sum(sizes), checksummed=False, problems=())
    told = {problem.path for problem in report.problems}
    problems = (*report.problems, *(problem for problem in verify_export(path) if problem.path not in told))
    return replace(report, ok=not problems, problems=problems)


def _sizes_below(path: str) -> list[int]:
    storage = open_storage(path)
    if isinstance(storage, ObjectStorage):
        return [row.size for row in storage.list_tree("")]
    sizes = []
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(parent, name)).st_size)
            except OSError:
                continue
    return sizes


def _vanished(path: str) -> bool:
    try:
        open_source(path, exports=True)
    except CheckpointNotFound:
        return True
    except HoldfastError:
        return False
    return False


def _print(result: _Result) -> None:
    report = result.report
    if result.error is not None:
        why = "newer, not verified" if result.state == "newer" else "not verified"
        typer.echo(f"{shown(result.path)}: {why}\n  {shown(result.error)}")
        return
    shows = "what an index and headers tell" if result.kind == "export" else "missing bytes"
    checked = "" if report.checksummed else f", which has no checksums: only {shows} would show"
    verdict = "fine" if report.ok else f"WRONG, {len(report.problems)} problems"
    typer.echo(f"{shown(result.path)}: {verdict} ({report.files} files, {size_text(report.nbytes)}{checked})")
    for problem in report.problems:
        typer.echo(f"  {shown(problem.message)}")
    for warning in report.warnings:
        typer.echo(f"  warning: {shown(warning.message)}")


def _document(result: _Result) -> dict[str, Any]:
    report = result.report
    return {
        "path": result.path,
        "step": result.step,
        "kind": result.kind,
        "state": result.state,
        "ok": None if result.state == "newer" else report.ok,
        "error": result.error,
        "files": report.files,
        "nbytes": report.nbytes,
        "checksummed": report.checksummed,
        "problems": _rows(report.problems),
        **({"warnings": _rows(report.warnings)} if result.kind == "checkpoint" else {}),
    }


def _rows(problems: tuple[Problem, ...]) -> list[dict[str, Any]]:
    return [
        {"path": row.path, "tensor": row.tensor, "byte_range": row.byte_range, "message": row.message}
        for row in problems
    ]
