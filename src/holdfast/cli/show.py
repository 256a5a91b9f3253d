"""Implement ``holdfast show`` and ``holdfast cat``: what one checkpoint holds, and one value of it.

`show` prints from manifest and reports, of exports from headers, and reads no data. It is torch-free but for stock DCP,
whose ``.metadata`` consists of torch's own classes. `cat` reads and verifies what it prints.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from holdfast.catalog.listing import existing_directory, size_text, suspicious_in
from holdfast.cli.ls import chosen_path, chosen_source
from holdfast.cli.output import AsJson, age_text, plain_number, print_json, print_rows, shown
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.export.verify import is_export
from holdfast.loader.outline import outline_of
from holdfast.loader.sources.holdfast import HoldfastSource
from holdfast.loader.sources.huggingface import has_committed_model, open_committed_hf
from holdfast.loader.sources.open import open_source
from holdfast.state.gc_pause import gc_paused

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from holdfast.loader.checkpoint import Checkpoint, Index
    from holdfast.loader.outline import Outline, OutlinedTensor
    from holdfast.loader.sources.holdfast import CheckpointSource, StoredObject

_T = TypeVar("_T")


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
    source = _opened(path, step)
    outline = outline_of(source)
    stored = _model_of(source, outline)
    with gc_paused():
        tensors, objects = _matching(stored, pattern), _matching(outline.objects, pattern)
        if as_json:
            print_json("show", **_document(source, outline, tensors, objects))
            return
        _print_head(source, outline, stored)
        if tree:
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            _print_tree({**sizes, **{name: kept.nbytes for name, kept in objects.items()}})
            return
        if tensors:
            typer.echo("")
            rows = [_row(tensor) for tensor in tensors.values()]
            print_rows(("tensor", "dtype", "shape", "size", "shards"), rows, right=(3, 4))
        if shards:
            _print_shards(tensors)
        if objects:
            typer.echo("")
            print_rows(("object", "size"), [[name, size_text(row.nbytes)] for name, row in objects.items()], right=(1,))


def _opened(path: str, step: int | None) -> CheckpointSource:
    try:
        return open_source(chosen_path(path, step), exports=True)
    except CheckpointNotFound:
        directory = existing_directory(path)
        if step is not None or not is_export(directory):
            raise
        return open_source(directory, exports=True)  # a model of save_pretrained


def _model_of(source: CheckpointSource, outline: Outline) -> Mapping[str, OutlinedTensor]:
    """Return the tensors: of Holdfast's export by the headers of its files, none of one that isn't a whole model."""
    if not isinstance(source, HoldfastSource) or source.manifest.kind != "export" or not has_committed_model(source):
        return outline.tensors
    return outline_of(open_committed_hf(source)).tensors


def _matching(rows: Mapping[str, _T], pattern: str | None) -> dict[str, _T]:
    """Return the rows whose names match, by name."""
    names = sorted(rows)
    return {name: rows[name] for name in names if pattern is None or fnmatch.fnmatchcase(name, pattern)}


def _document(
    source: CheckpointSource,
    outline: Outline,
    tensors: Mapping[str, OutlinedTensor],
    objects: Mapping[str, StoredObject],
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
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "files": [{"name": file.name, "nbytes": file.size} for file in outline.files.values()],
        "tensors": list(tensors.values()),
        "objects": [
            {"name": kept.name, "file": kept.file, "file_offset": kept.offset, "nbytes": kept.nbytes}
            for kept in objects.values()
        ],
    }


def _print_head(source: CheckpointSource, outline: Outline, stored: Mapping[str, OutlinedTensor]) -> None:
    manifest = source.manifest
    tensors = f"{len(stored)} tensors, {size_text(sum(tensor.nbytes for tensor in stored.values()))}"
    rows = [("path", source.directory), ("step", "-" if source.step is None else str(source.step))]
    if manifest is None:
        writer = "another program" if is_export(source.directory) else "stock DCP"
        rows.append(("written by", f"{writer}: no checksums"))
    else:
        kind = ", export" if manifest.kind == "export" else "" if manifest.resumable else ", model only"
        rows += [
            ("saved", f"{manifest.created} ({age_text(manifest.created)} ago) by {manifest.world} ranks{kind}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ]
        rows += [("delta to", ", ".join(member.name for member in manifest.chain))]
        rows += [("metrics", ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items()))]
    if manifest is not None and manifest.kind == "export":
        sizes = [file.size for file in outline.files.values()] + [small.size for small in manifest.files]
        files = f"{len(sizes)} files, {size_text(sum(sizes))}"
        rows.append(("holds", f"{tensors}; {files}" if stored else files))
    else:
        rows.append(("holds", f"{tensors}; {len(outline.objects)} objects"))
    rows += [("suspicious", f"{row['what']}: {row['message']}") for row in suspicious_in(manifest)]
    for title, text in rows:
        if text:
            typer.echo(f"{title:<10}  {shown(text)}")


def _row(tensor: OutlinedTensor) -> tuple[str, ...]:
    return (tensor.name, *_kind(tensor.dtype, tensor.shape, tensor.nbytes, len(tensor.shards)))


@functools.lru_cache(4096)
def _kind(dtype: str, shape: tuple[int, ...], nbytes: int, shards: int) -> tuple[str, ...]:
    return (dtype, "x".join(map(str, shape)) or "scalar", size_text(nbytes), str(shards))


def _print_shards(tensors: Mapping[str, OutlinedTensor]) -> None:
    rows = [
        [
            tensor.name,
            str(list(shard.offsets)),
            str(list(shard.sizes)),
            shard.file,
            str(shard.file_offset),
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


# One value -------------------------------------------------------------------------------------------------------

_ELEMENTS_MAX: Final = 1000
"""Elements that are printed unless all are asked for."""


def cat(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a root: its newest step; or a URL.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="A tensor, an object, or an extra file.")],
    part: Annotated[
        str | None,
        typer.Option("--slice", metavar="INDEX", help="Of a tensor, such as '0:4,:' or '-1'; only that is read."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which step of a root.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All elements, however many.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Print one value, verified: a tensor with its statistics, an object, or an extra file as it is.

    Of a large tensor the elements at the edges are printed; with --json all of the slice, up to a million.
    """
    from holdfast.loader.checkpoint import Checkpoint

    checkpoint = Checkpoint(chosen_source(path, step))
    if name in checkpoint.tensors:
        _cat_tensor(checkpoint, name, _index_of(part), everything=everything, as_json=as_json)
        return
    if part is not None:
        raise ConfigError(f"--slice: {name!r} is no tensor of {checkpoint.path}", field="slice")
    if name in checkpoint.objects:
        value = checkpoint.objects[name]
        if as_json:
            print_json("cat", path=checkpoint.path, name=name, kind="object", value=_plain(value))
        else:
            typer.echo(shown(repr(value)))
    elif name in checkpoint.files:
        _cat_file(checkpoint, name, as_json=as_json)
    else:
        raise CheckpointNotFound(_unknown(checkpoint, name), path=checkpoint.path, step=checkpoint.step)


def _unknown(checkpoint: Checkpoint, name: str) -> str:
    known = [*checkpoint.tensors, *checkpoint.objects, *checkpoint.files]
    last = name.rpartition(".")[2]
    close = [one for one in known if last and last in one][:4] or known[:4]
    return f"{checkpoint.path} has no {name!r}; there is {', '.join(close) or 'nothing'}: see `holdfast show`"


def _index_of(text: str | None) -> Index | None:
    """Return an index as Python's: integers, slices and `...`, with commas between. Raises `ConfigError`."""
    if text is None:
        return None
    found: list[Any] = []
    for item in text.strip().strip("[]").split(","):
        parts = [one.strip() for one in item.split(":")]
        try:
            if item.strip() == "...":
                found.append(...)
            elif len(parts) == 1:
                found.append(int(parts[0]))
            else:
                found.append(slice(*(int(one) if one else None for one in parts)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--slice: {text!r} is no index; write '0:4,:' or '-1'", field="slice") from error
    return tuple(found)


def _cat_tensor(checkpoint: Checkpoint, name: str, index: Index | None, *, everything: bool, as_json: bool) -> None:
    tensor = checkpoint.read(name, index)
    facts = _facts(tensor)
    if as_json:
        if tensor.numel() > _JSON_ELEMENTS_MAX:
            raise ConfigError(
                f"{name} has {tensor.numel()} elements, more than {_JSON_ELEMENTS_MAX} for a document; choose some of "
                "them with --slice",
                field="slice",
            )
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        values = _plain(tensor)
        print_json(
            "cat",
            path=checkpoint.path,
            name=name,
            kind="tensor",
            dtype=dtype,
            shape=shape,
            statistics=facts,
            values=values,
        )
        return
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    typer.echo(f"{shown(name)}  {str(tensor.dtype).removeprefix('torch.')}  {sizes}")
    typer.echo("  ".join(f"{key} {value:.6g}" for key, value in facts.items()))
    typer.echo(_printable(tensor, sys.maxsize if everything else _ELEMENTS_MAX))


_JSON_ELEMENTS_MAX: Final = 1_000_000


_PIECE: Final = 1 << 20
"""Elements that are described at a time, so that no float64 copy of a large tensor is made."""


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    """Return minimum, maximum, mean, standard deviation and norm of the finite elements, and how many aren't finite."""
    from holdfast.loader.values import ValueSums, values_of

    found: dict[str, Any] = {"elements": tensor.numel()}
    if not tensor.numel() or tensor.is_complex():
        return found
    sums, row = ValueSums(), tensor.reshape(-1)
    for at in range(0, tensor.numel(), _PIECE):
        values = values_of(row[at : at + _PIECE])
        if values is None:  # packed fp4
            return found
        sums.add(values)
    if sums.count:
        found |= {"min": sums.least, "max": sums.most, "mean": sums.mean, "std": sums.std, "norm": sums.norm}
    if sums.nans or sums.infinite:
        found |= {"nan": sums.nans, "inf": sums.infinite}
    return {**found, "zeros": sums.zeros}


def _printable(tensor: torch.Tensor, most: int) -> str:
    """Return the elements as text, those at the edges if there are more than ``most``."""
    import numpy as np
    import torch

    if tensor.is_floating_point() and tensor.dtype != torch.float64:  # numpy has no bfloat16, nor fp8
        with contextlib.suppress(RuntimeError, NotImplementedError):
            tensor = tensor.to(torch.float32)
    try:
        values = tensor.numpy()
    except TypeError:  # packed fp4: its bytes
        values = tensor.view(torch.uint8).numpy()
    return np.array2string(values, threshold=most, max_line_width=120)


def _cat_file(checkpoint: Checkpoint, name: str, *, as_json: bool) -> None:
    content = checkpoint.read_file(name)
    if as_json:
        text = content.decode(errors="backslashreplace")
        print_json("cat", path=checkpoint.path, name=name, kind="file", nbytes=len(content), text=text)
        return
    if sys.stdout.isatty():
        typer.echo(shown(content.decode(errors="backslashreplace"), keep="\n\t"))
    else:
        sys.stdout.buffer.write(content)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what it has no form for, as text."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.is_floating_point():
            try:
                value = value.to(torch.float64)
            except (RuntimeError, NotImplementedError):  # packed fp4: its bytes
                value = value.view(torch.uint8)
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return plain_number(value)
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)
