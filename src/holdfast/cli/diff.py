"""Implement ``holdfast diff``: what two checkpoints differ in, by meaning, not by bytes of files.

Tensors whose checksums are equal aren't read. With ``--structure`` nothing is read and torch isn't imported.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.ls import chosen_source
from holdfast.cli.output import AsJson, plain_number, print_json, print_rows, progress_bar, shown
from holdfast.errors import ConfigError
from holdfast.loader.comparison import Comparison, compare, resume_findings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.loader.comparison import TensorChange, TensorKind

_NAMES_MAX: Final = 20
"""Lines of each kind that are printed, unless all are asked for."""
_LAYER: Final = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a root: its newest step; or a URL.")],
    second: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    step: Annotated[int | None, typer.Option("--step", help="Which step of the root A.")] = None,
    other_step: Annotated[int | None, typer.Option("--other-step", help="Which step of the root B.")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Only names that match, such as 'model.*bias'.")
    ] = None,
    structure: Annotated[bool, typer.Option("--structure", help="Read no values: names, shapes, checksums.")] = False,  # noqa: FBT002
    resume_check: Annotated[bool, typer.Option("--resume-check", help="Would resumed runs go on alike?")] = False,  # noqa: FBT002
    everything: Annotated[bool, typer.Option("--all", help="Every changed tensor, not the most changed.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Compare two checkpoints: tensors added, removed, reshaped, changed and by how much; objects; extra files.

    Exit status 1 where they differ. A and B may be of any kind that `show` reads, also stock DCP and Hugging Face.
    """
    if resume_check and (structure or pattern is not None):
        raise ConfigError(
            "--resume-check compares all values; leave --structure and --filter out", field="resume-check"
        )
    one, other = chosen_source(first, step), chosen_source(second, other_step)
    with progress_bar("comparing") as progress:
        found = compare(
            one,
            other,
            takes=None if pattern is None else lambda name: fnmatch.fnmatchcase(name, pattern),
            values=not structure,
            progress=progress,
        )
    if pattern is not None and found == Comparison():
        raise ConfigError(f"--filter {pattern!r} matches no tensor and no object of either", field="filter")
    said = resume_findings(one, other, found) if resume_check else []
    if as_json:
        members = {"resume": {"alike": not said, "findings": said}} if resume_check else {}
        print_json(
            "diff", first=one.directory, second=other.directory, same=found.is_same, **_document(found), **members
        )
    else:
        _print(found, everything=everything)
        if resume_check:
            _print_findings(said)
    if said or not found.is_same:
        raise typer.Exit(1)


def _kind_text(kind: TensorKind) -> str:
    return f"{kind.dtype} {'x'.join(map(str, kind.shape)) or 'scalar'}"


def _print(found: Comparison, *, everything: bool) -> None:
    limit = None if everything else _NAMES_MAX
    for title, kinds in (("only in B", found.added), ("only in A", found.removed)):
        _print_names(title, [f"{name}  {_kind_text(kind)}" for name, kind in kinds.items()], limit)
    reshaped = [f"{name}  {_kind_text(one)} -> {_kind_text(two)}" for name, (one, two) in found.reshaped.items()]
    _print_names("another shape or dtype", reshaped, limit)
    _print_changes(found.changed, limit)
    _print_names("other checksums", found.moved, limit)
    for title, names in (("objects only in B", found.objects_added), ("objects only in A", found.objects_removed)):
        _print_names(title, names, limit)
    changed = [f"{name}: {one} -> {two}" for name, (one, two) in found.objects_changed.items()]
    _print_names("objects changed", changed, limit)
    _print_names("extra files that differ", found.files, limit)
    counts = [f"{found.equal} tensors and {found.objects_equal} objects are equal"]
    if found.unknown:
        counts.append(f"{len(found.unknown)} tensors can't be told without their values")
    if found.objects_unknown:
        counts.append(f"{len(found.objects_unknown)} objects were not read")
    typer.echo("; ".join(counts))


def _print_names(title: str, names: Sequence[str], limit: int | None) -> None:
    if not names:
        return
    typer.echo(f"{title}: {len(names)}")
    for name in names[:limit]:
        typer.echo(f"  {shown(name)}")
    if limit is not None and len(names) > limit:
        typer.echo(f"  … and {len(names) - limit} more (--all)")
    typer.echo("")


def _print_changes(changed: Sequence[TensorChange], limit: int | None) -> None:
    if not changed:
        return
    layers = _layers(changed)
    typer.echo(f"changed: {len(changed)} tensors")
    if len(layers) < len(changed):
        rows = [
            [layer.name, str(layer.tensors), _share(layer.share), _number(layer.max_abs), _number(layer.relative)]
            for layer in layers
        ]
        print_rows(("layer", "tensors", "elements", "max abs", "relative"), rows, right=(1, 2, 3, 4))
        typer.echo("")
    most = changed if limit is None else sorted(changed, key=lambda one: -one.relative)[:limit]
    rows = [
        [
            one.name,
            _share(one.share),
            _number(one.max_abs),
            _number(one.relative),
            "-" if one.cosine is None else f"{one.cosine:.6f}",
            "-" if not any(one.non_finite) else f"{one.non_finite[0]} -> {one.non_finite[1]}",
        ]
        for one in most
    ]
    print_rows(("tensor", "elements", "max abs", "relative", "cosine", "NaN, inf"), rows, right=(1, 2, 3, 4, 5))
    if len(most) < len(changed):
        typer.echo(f"… the {len(most)} that changed most; {len(changed) - len(most)} more (--all)")
    typer.echo("")


@dataclass(slots=True)
class _Layer:
    """What changed in the tensors of one layer."""

    name: str
    tensors: int = 0
    elements: int = 0
    changed: int = 0
    max_abs: float = 0.0
    relative: float = 0.0
    """The largest of its tensors."""

    @property
    def share(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


def _layers(changed: Iterable[TensorChange]) -> list[_Layer]:
    """Return changes by layer: names up to their first number, or without their last part."""
    found: dict[str, _Layer] = {}
    for one in changed:
        numbered = _LAYER.match(one.name)
        key = numbered.group(1) if numbered else one.name.rpartition(".")[0] or one.name
        layer = found.setdefault(key, _Layer(key))
        layer.tensors += 1
        layer.elements += one.elements
        layer.changed += one.changed
        layer.max_abs, layer.relative = max(layer.max_abs, one.max_abs), max(layer.relative, one.relative)
    return list(found.values())


def _share(share: float) -> str:
    return "all" if share == 1.0 else f"{100 * share:.3g} %"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _print_findings(said: Sequence[str]) -> None:
    if not said:
        typer.echo("runs that resume from these go on alike")
        return
    typer.echo("runs that resume from these do not go on alike:")
    for line in said:
        typer.echo(f"  {shown(line)}")


def _document(found: Comparison) -> dict[str, Any]:
    def kinds(rows: dict[str, TensorKind]) -> list[dict[str, Any]]:
        return [{"name": name, "dtype": kind.dtype, "shape": kind.shape} for name, kind in rows.items()]

    return {
        "added": kinds(found.added),
        "removed": kinds(found.removed),
        "reshaped": [
            {"name": name, "first": [one.dtype, one.shape], "second": [two.dtype, two.shape]}
            for name, (one, two) in found.reshaped.items()
        ],
        "changed": [
            {
                "name": one.name,
                "elements": one.elements,
                "changed": one.changed,
                "max_abs": plain_number(one.max_abs),
                "relative": plain_number(one.relative),
                "cosine": None if one.cosine is None or math.isnan(one.cosine) else one.cosine,
                "non_finite": list(one.non_finite),
            }
            for one in found.changed
        ],
        "layers": [
            {
                "name": layer.name,
                "tensors": layer.tensors,
                "elements": layer.elements,
                "changed": layer.changed,
                "max_abs": plain_number(layer.max_abs),
                "relative": plain_number(layer.relative),
            }
            for layer in _layers(found.changed)
        ],
        "moved": found.moved,
        "unknown": found.unknown,
        "equal": found.equal,
        "objects": {
            "added": found.objects_added,
            "removed": found.objects_removed,
            "changed": [
                {"name": name, "first": one, "second": two} for name, (one, two) in found.objects_changed.items()
            ],
            "unknown": found.objects_unknown,
            "equal": found.objects_equal,
        },
        "files": found.files,
    }
