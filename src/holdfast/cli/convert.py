"""Implement ``holdfast convert`` and ``holdfast export``: the same state in another format.

    checkpoint of Holdfast or stock DCP, a delta too     \\              dcp    a checkpoint, which stock DCP reads
    a file of torch.save (plain objects only)             >  state  ->  torch  one file, which `torch.load` reads
    Hugging Face directory, *.safetensors                /              hf     a Hugging Face directory (tensors only)

Guarantees: what is read is verified, as far as its format has checksums; nothing in a file of torch.save is executed;
what is written is there as a whole or not at all, and replaces nothing unless told to. A checkpoint becomes a copy of
itself, with what each rank has saved. What another format has no place for is told.
Assumes: memory for all of the state; of an export from a checkpoint, for pieces of it, and for none of it of a copy. A
file that is exported is first saved as a checkpoint beside the target.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from holdfast.cli.ls import chosen_source
from holdfast.cli.output import AsJson, came_of, plain_number, print_json, shown
from holdfast.errors import CheckpointExists, ConfigError, StorageError
from holdfast.format.structure import rank_label
from holdfast.loader.checkpoint import Checkpoint, source_of
from holdfast.loader.sources.open import open_source
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.format.manifest import Manifest

_SAFETENSORS = ".safetensors"
_SAID_MAX: Final = 12
"""How much of what is left out is named on one line."""

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint, a root (its newest step), or a URL.")]
Step = Annotated[int | None, typer.Option(help="Which step of a root.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="KEY", help="Top-level key to export; '' for tensors without one. Repeatable."),
]


@dataclass(frozen=True, slots=True)
class Omitted:
    """What a checkpoint holds and another format doesn't. tensors: how many, by top-level key."""

    tensors: dict[str, int] = field(default_factory=dict)
    objects: int = 0
    files: list[str] = field(default_factory=list)
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Return one line, empty if nothing is left out."""
        said = [f"{key} ({_counted(count, 'tensor')})" for key, count in self.tensors.items()]
        said += [_counted(self.objects, "object")] if self.objects else []
        said += self.files
        if len(said) > _SAID_MAX:
            said[_SAID_MAX:] = [f"{len(said) - _SAID_MAX} more"]
        said += ["step"] if self.step is not None else []
        return ", ".join([*said, *(["metrics"] if self.metrics else [])])

    def document(self) -> dict[str, Any]:
        """Return the member ``left_out`` of the document."""
        return {**asdict(self), "metrics": {name: plain_number(value) for name, value in self.metrics.items()}}


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint, root, URL, Hugging Face directory, *.safetensors, *.pt.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="A directory or URL; for torch a file.")],
    to: Annotated[Literal["dcp", "torch", "hf"], typer.Option("--to", help="What to write.")],
    step: Step = None,
    modules: Modules = None,
    overwrite: Overwrite = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Write a checkpoint in another format: dcp (Holdfast's, which stock DCP reads), torch.save's, or Hugging Face's.

    dcp keeps all: of a checkpoint it is a verified copy, and a delta version becomes a whole one. torch keeps names,
    nesting and values; hf the tensors of modules. What they leave out is told.
    """
    found = _opened(source, step)
    left_out = Omitted()
    if to == "hf":
        left_out = _export(found, target, modules=modules, overwrite=overwrite)
    elif modules:
        raise ConfigError("--module is for --to hf; a checkpoint and a file of torch.save have all", field="module")
    elif to == "torch":
        _write_torch(found.state() if isinstance(found, Checkpoint) else found, target, overwrite=overwrite)
        if isinstance(found, Checkpoint):
            left_out = Omitted(files=sorted(found.files), step=found.step, metrics=found.metrics)
    else:
        _write_checkpoint(found, target, overwrite=overwrite)
    if not as_json and (told := left_out.text()):
        typer.echo(f"holdfast: left out: {shown(told)}", err=True)
    _tell("convert", source, target, as_json=as_json, to=to, left_out=left_out.document())


def export(
    source: Source,
    target: Annotated[str, typer.Argument(metavar="DST", help="The Hugging Face directory to write, or a URL.")],
    step: Step = None,
    dtype: Annotated[str | None, typer.Option(help="Of floating-point tensors: bfloat16, float16, float32, …")] = None,
    assets: Annotated[
        str | None, typer.Option(help="A model directory: its config decides the names, its tokenizer is copied.")
    ] = None,
    modules: Modules = None,
    fp32_keys: Annotated[
        list[str] | None, typer.Option("--fp32-key", metavar="REGEX", help="Tensors that stay float32. Repeatable.")
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest file, in GiB.")] = 5.0,
    overwrite: Overwrite = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Export the model of a checkpoint as a Hugging Face directory, which `from_pretrained` reads."""
    found = Checkpoint(chosen_source(source, step))
    _export(
        found,
        target,
        dtype=dtype,
        assets=assets,
        modules=modules,
        fp32_keys=tuple(fp32_keys or ()),
        max_shard_bytes=int(max_shard_gib * (1 << 30)),
        overwrite=overwrite,
    )
    _tell("export", source, target, as_json=as_json, dtype=dtype)


def _tell(command: str, source: str, target: str, *, as_json: bool, **members: Any) -> None:
    path = located(target)
    if as_json:
        print_json(command, source=source, path=path, **members)
    else:
        typer.echo(f"{shown(path)} is written")


def _opened(source: str, step: int | None) -> Checkpoint | Mapping[str, Any]:
    """Open a directory or URL, or read a file of one of the known formats."""
    path = located(source)
    if is_store(path) or not os.path.isfile(path):
        return Checkpoint(chosen_source(source, step))
    if step is not None:
        raise ConfigError(f"{path} is a file; --step is for a root", field="step")
    return _read_safetensors(path) if path.endswith(_SAFETENSORS) else _read_torch(path)


def _read_safetensors(path: str) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Any] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} can't be read as safetensors: {error}", path=path, errno=None) from error
    return found


def _read_torch(path: str) -> Mapping[str, Any]:
    """Read a file of torch.save by the allow-list of checkpoints; one of before zip files, by torch's own."""
    import pickle

    import torch

    from holdfast.format.objects import read_object
    from holdfast.format.pickles import PickleRefused
    from holdfast.format.torch_record import MalformedRecord

    try:
        with open(path, "rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip:
            found = read_object(memoryview(pathlib.Path(path).read_bytes()))
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (
        PickleRefused,
        MalformedRecord,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
    ) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's advice is not ours
            reason = "it holds other objects, or is no file of torch.save"
        raise StorageError(
            f"{path} can't be read: {reason}. It has to be a file of torch.save with tensors and plain objects only: "
            "save its state_dict() again, without other objects",
            path=path,
            errno=None,
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; a dictionary is needed", field="source")
    return found


def _export(
    found: Checkpoint | Mapping[str, Any], target: str, *, modules: list[str] | None, **options: Any
) -> Omitted:
    from holdfast.export.one_shot import export_hf

    with _as_checkpoint(found, located(target)) as checkpoint:
        is_flat = modules is None and len(checkpoint.top_names) == len(checkpoint.tensors)
        keys = [""] if is_flat else modules
        written = Checkpoint(open_source(os.fspath(export_hf(checkpoint, target, modules=keys, **options))))
        names = set(checkpoint.tensors)
        if keys == [""]:
            names -= set(checkpoint.top_names)
        else:
            names = {name for name in names if name.partition(".")[0] not in (keys or ["model"])}
        left = Counter(name.partition(".")[0] for name in sorted(names))
        return Omitted(
            tensors=dict(left),
            objects=len(checkpoint.objects),
            files=sorted({*checkpoint.files} - {*written.files}),
            step=checkpoint.step,
            metrics=checkpoint.metrics,
        )


@contextlib.contextmanager
def _as_checkpoint(found: Checkpoint | Mapping[str, Any], target: str) -> Iterator[Checkpoint]:
    """Yield the state as a checkpoint, which is what exports read: one beside ``target``, removed at the end."""
    if isinstance(found, Checkpoint):
        yield found
        return
    from holdfast.api import save

    parent = None if is_store(target) else os.path.dirname(target)
    try:
        if parent is not None:
            os.makedirs(parent, exist_ok=True)
        place = tempfile.mkdtemp(prefix=".holdfast-convert-", dir=parent)
    except OSError as error:
        raise StorageError(
            f"{target} can't be written: {error.strerror or error}", path=target, errno=error.errno
        ) from error
    try:
        yield save(found, os.path.join(place, "state"))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_checkpoint(found: Checkpoint | Mapping[str, Any], target: str, *, overwrite: bool) -> None:
    """Copy a checkpoint as it is where that can be done; otherwise save its state again."""
    from holdfast.api import save, save_like
    from holdfast.saver.copies import TIMEOUT_S, can_be_copied, copy_checkpoint

    if not isinstance(found, Checkpoint):
        save(found, target, overwrite=overwrite)
        return
    manifest = found.manifest
    if manifest is not None and can_be_copied(found.path, manifest):
        copy_checkpoint(found.path, manifest, target, overwrite=overwrite)
        return
    files = {name: found.read_file(name) for name in found.files}
    if manifest is None or manifest.kind == "export":
        save(found.state(), target, step=found.step, metrics=found.metrics, files=files, overwrite=overwrite)
        return
    _refuse_values_of_ranks(found, manifest)
    save_like(manifest, found.state(), target, files=files, overwrite=overwrite, timeout=TIMEOUT_S)


def _refuse_values_of_ranks(found: Checkpoint, manifest: Manifest) -> None:
    """Raise `ConfigError` if one process can't save again what ranks have saved each for itself."""
    labels = {rank_label(rank) for rank in range(manifest.world)}
    own = sorted(".".join(map(str, path)) for path in source_of(found).paths.values() if labels.intersection(path))
    if own and manifest.world > 1:
        raise ConfigError(
            f"{found.path} was saved by {manifest.world} ranks, and has values of each ({own[0]}, ...), which one "
            "process can't save again: copy all of its files to another place of the same kind by other means, such as "
            "`aws s3 cp --recursive` or `cp -r`; or convert the checkpoint that it was copied from",
            field="source",
        )


def _write_torch(state: Mapping[str, Any], target: str, *, overwrite: bool) -> None:
    """Write one file, by a rename once it is durable. Raises `CheckpointExists`, `StorageError`."""
    import torch

    path = located(target)
    if is_store(path):
        raise ConfigError(f"{path}: a file of torch.save is written to a file system; give a path", field="target")
    if os.path.isdir(path) or (os.path.lexists(path) and not overwrite):
        raise CheckpointExists(f"{path} is there already; choose another name, or --overwrite a file", path=path)
    fresh = f"{path}.{secrets.token_hex(6)}.partial"
    try:
        with open(fresh, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(fresh, path)
        else:
            os.link(fresh, path)  # fails where somebody was faster
    except FileExistsError as error:
        raise CheckpointExists(f"{path} is there by now; choose another name", path=path) from error
    except (OSError, RuntimeError) as error:
        # torch ends a file whose write failed, or was interrupted, and hides why behind an error of its own.
        why = came_of(error, KeyboardInterrupt) or came_of(error, OSError)
        if why is None or isinstance(why, KeyboardInterrupt):
            raise (why or error) from None
        raise StorageError(f"{path} can't be written: {why.strerror or why}", path=path, errno=why.errno) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
