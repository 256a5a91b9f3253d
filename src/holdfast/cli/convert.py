"""Implement ``holdfast convert`` and ``holdfast export``: the same state in another format.

    checkpoint of Holdfast or stock DCP, a delta too     \\              dcp    a checkpoint, which stock DCP reads
    a file of torch.save (plain objects only)             >  state  ->  torch  one file, which `torch.load` reads
    Hugging Face directory, *.safetensors                /              hf     a Hugging Face directory (tensors only)

Guarantees: what is read is verified, as far as its format has checksums; nothing in a file of torch.save is executed;
what is written is there as a whole or not at all, and replaces nothing unless told to.
Assumes: memory for all of the state; of an export from a checkpoint, for pieces of it. A file that is exported is first
saved as a checkpoint beside the target.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import tempfile
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from holdfast.cli.ls import chosen_source
from holdfast.cli.output import AsJson, came_of, print_json, shown
from holdfast.errors import CheckpointExists, ConfigError, StorageError
from holdfast.loader.checkpoint import Checkpoint
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SAFETENSORS = ".safetensors"

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint, a root (its newest step), or a URL.")]
Step = Annotated[int | None, typer.Option(help="Which step of a root.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")]
Modules = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="KEY", help="Top-level key to export; '' for tensors without one. Repeatable."),
]


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

    Names, nesting, step, metrics and extra files stay. A delta version becomes a whole one.
    """
    found = _opened(source, step)
    if to == "hf":
        _export(found, target, modules=modules, overwrite=overwrite)
    elif modules:
        raise ConfigError("--module is for --to hf; a checkpoint and a file of torch.save have all", field="module")
    elif to == "torch":
        _write_torch(found.state() if isinstance(found, Checkpoint) else found, target, overwrite=overwrite)
    else:
        _write_checkpoint(found, target, overwrite=overwrite)
    _tell("convert", source, target, as_json=as_json, to=to)


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


def _export(found: Checkpoint | Mapping[str, Any], target: str, *, modules: list[str] | None, **options: Any) -> None:
    from holdfast.export.one_shot import export_hf

    with _as_checkpoint(found, located(target)) as checkpoint:
        is_flat = modules is None and len(checkpoint.top_names) == len(checkpoint.tensors)
        export_hf(checkpoint, target, modules=[""] if is_flat else modules, **options)


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
    from holdfast.api import save

    if not isinstance(found, Checkpoint):
        save(found, target, overwrite=overwrite)
        return
    files = {name: found.read_file(name) for name in found.files}
    save(found.state(), target, step=found.step, metrics=found.metrics, files=files, overwrite=overwrite)


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
