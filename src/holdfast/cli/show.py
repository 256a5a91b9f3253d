"""Implement ``holdfast show``: print the content of one checkpoint from its manifest and reports; no data is read.

Torch-free for Holdfast's checkpoints; the ``.metadata`` of stock DCP consists of torch's own classes.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.boxes import whole
from holdfast.cli.ls import chosen_path
from holdfast.cli.output import AsJson, age_text, plain_number, print_json, print_rows, shown, size_text
from holdfast.loader.sources.open import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.format.manifest import Manifest
    from holdfast.loader.sources.holdfast import CheckpointSource, StoredObject
    from holdfast.plan.read import StoredTensor


def show(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a root: its newest step; or a URL.")],
    step: Annotated[int | None, typer.Option(help="Which step of a root.")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help="Only names that match, such as 'model.*bias'.")
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Names as a tree, with the bytes below each.")] = False,  # noqa: FBT002
    shards: Annotated[bool, typer.Option("--shards", help="Where each shard of each tensor lies.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Show a checkpoint: tensors with dtype, shape and shards, objects, the world that saved it, and versions.

    Works on directories that stock DCP wrote, too.
    """
    source = open_source(chosen_path(path, step), exports=True)
    tensors = {name: source.tensors[name] for name in sorted(source.tensors) if _matches(name, pattern)}
    objects = {name: source.objects[name] for name in sorted(source.objects) if _matches(name, pattern)}
    if as_json:
        print_json("show", **_document(source, tensors, objects))
        return
    _print_head(source)
    if tree:
        sizes = {name: _nbytes(tensor) for name, tensor in tensors.items()}
        _print_tree({**sizes, **{name: kept.nbytes for name, kept in objects.items()}})
        return
    if tensors:
        typer.echo("")
        print_rows(
            ("tensor", "dtype", "shape", "size", "shards"), [_row(row) for row in tensors.values()], right=(3, 4)
        )
    if shards:
        _print_shards(tensors)
    if objects:
        typer.echo("")
        print_rows(("object", "size"), [[name, size_text(row.nbytes)] for name, row in objects.items()], right=(1,))


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)


def _nbytes(tensor: StoredTensor) -> int:
    return whole(tensor.shape).volume * tensor.itemsize


def _document(
    source: CheckpointSource, tensors: Mapping[str, StoredTensor], objects: Mapping[str, StoredObject]
) -> dict[str, Any]:
    manifest = source.manifest
    return {
        "path": source.directory,
        "writer": "stock" if manifest is None else "holdfast",
        "kind": "checkpoint" if manifest is None else manifest.kind,
        "checksummed": source.checksummed,
        "step": source.step,
        "world": source.world,
        "name": None if manifest is None else manifest.name,
        "attempt": None if manifest is None else manifest.attempt,
        "created": None if manifest is None else manifest.created,
        "resumable": None if manifest is None else manifest.resumable,
        "chain": [] if manifest is None else [member.name for member in manifest.chain],
        "metrics": {} if manifest is None else {key: plain_number(value) for key, value in manifest.metrics.items()},
        "versions": {} if manifest is None else manifest.versions,
        "suspicious": suspicious_in(manifest),
        "nbytes": sum(map(_nbytes, tensors.values())),
        "files": [{"name": file.name, "nbytes": file.size} for file in source.files.values()],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "nbytes": _nbytes(tensor),
                "shards": [
                    {
                        "offsets": shard.box.offsets,
                        "sizes": shard.box.sizes,
                        "file": shard.file,
                        "file_offset": shard.payload_offset,
                        "nbytes": shard.nbytes,
                    }
                    for shard in tensor.shards
                ],
            }
            for tensor in tensors.values()
        ],
        "objects": [
            {"name": kept.name, "file": kept.file, "file_offset": kept.offset, "nbytes": kept.nbytes}
            for kept in objects.values()
        ],
    }


def suspicious_in(manifest: Manifest | None) -> list[dict[str, Any]]:
    """Return what was suspicious about a save, each with ``what``, ``tensors`` and ``message``."""
    found = None if manifest is None else manifest.extra.get("suspicious")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return [{name: row.get(name) for name in ("what", "tensors", "message")} for row in rows]


def _print_head(source: CheckpointSource) -> None:
    manifest = source.manifest
    total = sum(map(_nbytes, source.tensors.values()))
    rows = [("path", source.directory), ("step", "-" if source.step is None else str(source.step))]
    if manifest is None:
        rows.append(("written by", "stock DCP: no checksums"))
    else:
        kind = ", export" if manifest.kind == "export" else "" if manifest.resumable else ", model only"
        rows += [
            ("saved", f"{manifest.created} ({age_text(manifest.created)} ago) by {manifest.world} ranks{kind}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ]
        rows += [("delta to", ", ".join(member.name for member in manifest.chain))]
        rows += [("metrics", ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items()))]
    if manifest is not None and manifest.kind == "export":
        sizes = [file.size for file in source.files.values()] + [small.size for small in manifest.files]
        rows.append(("holds", f"{len(sizes)} files, {size_text(sum(sizes))}"))
    else:
        rows.append(("holds", f"{len(source.tensors)} tensors, {size_text(total)}; {len(source.objects)} objects"))
    rows += [("suspicious", f"{row['what']}: {row['message']}") for row in suspicious_in(manifest)]
    for title, text in rows:
        if text:
            typer.echo(f"{title:<10}  {shown(text)}")


def _row(tensor: StoredTensor) -> list[str]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return [tensor.name, tensor.dtype, shape, size_text(_nbytes(tensor)), str(len(tensor.shards))]


def _print_shards(tensors: Mapping[str, StoredTensor]) -> None:
    rows = [
        [
            tensor.name,
            str(list(shard.box.offsets)),
            str(list(shard.box.sizes)),
            shard.file,
            str(shard.payload_offset),
            str(shard.nbytes),
        ]
        for tensor in tensors.values()
        for shard in tensor.shards
    ]
    typer.echo("")
    print_rows(("shard of", "offsets", "sizes", "file", "at byte", "bytes"), rows, right=(4, 5))


def _print_tree(sizes: Mapping[str, int]) -> None:
    """Each name under the parts before its last dot, with what all below it takes; not recursive: names may be deep."""
    below: dict[tuple[str, ...], int] = {}
    for name, nbytes in sizes.items():
        parts = tuple(name.split("."))
        for depth in range(1, len(parts) + 1):
            below[parts[:depth]] = below.get(parts[:depth], 0) + nbytes
    typer.echo("")
    rows = [["  " * (len(parts) - 1) + parts[-1], size_text(nbytes)] for parts, nbytes in sorted(below.items())]
    print_rows(("name", "size"), rows, right=(1,))
