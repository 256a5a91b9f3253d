"""Implement `export_hf` and `async_export_hf`: export a state once, or a published checkpoint.

`export_hf` reads the state in place while its caller waits. `async_export_hf` captures it as a save does: staged lazily
or eagerly, then exported in the background.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from holdfast.catalog.root import checked_target
from holdfast.config import SHARD_BYTES, HFExport, config_within
from holdfast.coordination.deadline import Deadline
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.export.build import ExportBuilder, Model, model_of, models_of, quantized
from holdfast.export.exporter import Exporter, exchange_of
from holdfast.export.inputs import LiveState, StoredState
from holdfast.loader.checkpoint import Checkpoint, source_of
from holdfast.saver.agreement import Agreement
from holdfast.saver.deliverer import DeliverySession
from holdfast.saver.handle import Callbacks
from holdfast.saver.process_session import process_session
from holdfast.saver.session import OneCallSession, Session
from holdfast.saver.startup import claim_path
from holdfast.state.subclasses import NOTE
from holdfast.state.tree import StateTree
from holdfast.storage.local import open_storage
from holdfast.validation import absolute, checked_seconds, is_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.saver.handle import SaveHandle


OUTCOME_GRACE_S = 30.0
_KEY = "model"


def export_hf(
    source: Mapping[str, Any] | nn.Module | Checkpoint,
    out: str | os.PathLike[str],
    *,
    assets: Any = None,
    dtype: torch.dtype | str | None = None,
    key_map: Any = None,
    max_shard_bytes: int = SHARD_BYTES,
    tokenizer: Any = None,
    fp32_keys: Sequence[str] = (),
    modules: Sequence[str] | None = None,
    process_group: Any | None = None,
    timeout: float = 3600.0,
    overwrite: bool = False,
) -> Path | str:
    """Export to a Hugging Face directory ``out``; returns its path once it is published and durable on every rank.

    out: a directory, or a URL such as ``s3://bucket/model``, which is returned as a string.

    source: a state with modules, or lists of them (pipeline stages), at its top level, as for `holdfast.save`; or one
    module, or an opened checkpoint.
    assets, dtype, key_map, max_shard_bytes, tokenizer, fp32_keys, modules: as for `HFExport`. For a checkpoint, the
    architecture in ``config.json`` of ``assets`` decides what `save_pretrained` would write; without assets
    tensors keep their names; ``modules=[""]`` exports the tensors that are under no top-level key, such as torchtitan's
    model or a flat state dict. process_group: the ranks that export; all of them call this. timeout: seconds for all of
    it. overwrite: replace the model at ``out``, and keep other files.

    Raises `ConfigError`, `CheckpointExists`, `SaveFailed`, `StorageError`, `DeadlineExceeded`, `OutcomeUnknown`; the
    same on every rank. Nothing is visible at ``out`` unless this returned. For the training thread of every rank.
    """
    options = {
        "assets": assets,
        "dtype": dtype,
        "key_map": key_map,
        "max_shard_bytes": max_shard_bytes,
        "tokenizer": tokenizer,
        "fp32_keys": fp32_keys,
        "modules": modules,
    }
    # First of all: also an argument that is refused is told to the other ranks.
    with _ExportSession(process_group, purpose="export", timeout=timeout) as session:
        with session.settling():
            session.deadline = Deadline.after(checked_seconds("timeout", timeout))
            session.target = checked_target(out, field="out")
            session.prepare(source, options, overwrite=overwrite)
        return session.run(overwrite=overwrite)


def async_export_hf(
    source: Mapping[str, Any] | nn.Module,
    out: str | os.PathLike[str],
    *,
    assets: Any = None,
    dtype: torch.dtype | str | None = None,
    key_map: Any = None,
    max_shard_bytes: int = SHARD_BYTES,
    tokenizer: Any = None,
    fp32_keys: Sequence[str] = (),
    modules: Sequence[str] | None = None,
    staging: Literal["lazy", "eager"] = "lazy",
    process_group: Any | None = None,
    timeout: float = 3600.0,
    overwrite: bool = False,
) -> SaveHandle:
    """Start an export of ``source`` to ``out`` and return its handle, whose result is the export as a `Checkpoint`.

    source: a state or a module, not a checkpoint. staging: ``"lazy"`` copies the weights after this has returned, and
    the next optimizer step waits until they are; with ``"eager"`` they are copied when this returns. The other
    arguments as for `export_hf`, and so are the errors, which the handle raises; those of arguments are raised here.
    Every rank calls it, on its training thread.
    """
    options = {
        "assets": assets,
        "dtype": dtype,
        "key_map": key_map,
        "max_shard_bytes": max_shard_bytes,
        "tokenizer": tokenizer,
        "fp32_keys": fp32_keys,
        "modules": modules,
    }
    session = _CapturedExportSession(process_group, purpose="export", timeout=timeout)
    try:
        with session.settling():
            session.deadline = Deadline.after(checked_seconds("timeout", timeout))
            session.target = checked_target(out, field="out")
            session.prepare(source, options, staging=staging, overwrite=overwrite)
        handle = session.start(eager=staging == "eager", overwrite=overwrite)
    except BaseException:
        session.end()
        raise
    session.end_in_background(handle)
    return handle


class _CapturedExportSession(OneCallSession):
    """A session of one export that is made from a capture. Every rank makes one, with the same arguments."""

    _exporter: Exporter | None = None
    _tree: StateTree

    def prepare(self, source: Any, options: dict[str, Any], *, staging: str, overwrite: bool) -> None:
        """Make ready what this rank needs, and lock the target."""
        if staging not in ("lazy", "eager"):
            raise ConfigError(f"staging must be 'lazy' or 'eager', not {staging!r}", field="staging")
        group, directory = self.group, os.path.dirname(self.target)
        export = HFExport(**options, root=directory, every=None, latest_link=False)
        source = {"model": source} if isinstance(source, nn.Module) else source
        if not isinstance(source, Mapping):
            what = (
                f"source: expected a state or a module, found {type(source).__name__}; export a checkpoint by export_hf"
            )
            raise ConfigError(what, field="source")
        models = models_of(export, source)
        exported = {model.key: source[model.key] for model in models}
        self._tree = StateTree(exported, rank=group.rank, world=group.world, group_ranks=group.ranks)
        recipe = ExportBuilder(export, models, rank=group.rank)
        if group.rank == 0:
            self.hold(claim_path(self.target, step=None, overwrite=overwrite, timeout_s=self.left_s()).release)
        kept = process_session()
        kept.keep_engine(group.rank)
        saver = self.start_saver(
            open_storage(directory), config_within(self.left_s()), overlaps=False, shared=kept.plans_of(group)
        )
        self._exporter = Exporter(export, recipe, saver.session(), exchange=exchange_of(group, "export"), managed=False)
        self.guard(saver)

    def start(self, *, eager: bool, overwrite: bool) -> SaveHandle:
        assert self._exporter is not None
        self._exporter.start()
        job = self._exporter.new_job(None, name=os.path.basename(self.target), overwrite=overwrite)
        self._exporter.submit(job)
        self.saver.start(self._tree, [job], step=None, eager=eager)
        return job.handle

    def close_deliveries(self) -> None:
        """Close the exporter; an export in work is given up once the time is up."""
        if self._exporter is not None:
            self._exporter.close(time.monotonic() + max(self.left_s(), OUTCOME_GRACE_S))


class _ExportSession(Session):
    """A session of one export. Every rank makes one, with the same arguments."""

    _exporter: Exporter
    _material: LiveState | StoredState

    def prepare(self, source: Any, options: dict[str, Any], *, overwrite: bool) -> None:
        """Make ready what this rank needs, and lock the target."""
        group, target = self.group, self.target
        # Nothing trains meanwhile that the engine would have to yield to.
        export = HFExport(**options, root=os.path.dirname(target), every=None, latest_link=False, nice=0)
        if isinstance(source, nn.Module):
            source = {"model": source}
        if isinstance(source, Checkpoint):
            names = _names_here(source, export)
            models = _stored_models(source, names, export)
            self._material = StoredState(source, names, group.rank, group.world)
        elif isinstance(source, Mapping):
            models = models_of(export, source)
            exported = {model.key: source[model.key] for model in models}
            tree = StateTree(exported, rank=group.rank, world=group.world, group_ranks=group.ranks)
            agreement = Agreement(group.board.clone(), "export")
            self.hold(agreement.board.close)
            self.hold(agreement.leave)
            self._material = LiveState(tree, group, agreement, target=target, timeout_s=self.left_s())
        else:
            raise ConfigError(
                f"source: expected a state, a module or an opened checkpoint, found {type(source).__name__}",
                field="source",
            )
        recipe = ExportBuilder(export, models, rank=group.rank)
        if group.rank == 0:
            self.hold(claim_path(target, step=None, overwrite=overwrite, timeout_s=self.left_s()).release)
        kept = process_session()
        kept.keep_engine(group.rank)
        session = DeliverySession(group, config_within(self.left_s()), Callbacks(), wait_staged=lambda _: None)
        exchange, shared = exchange_of(group, "export"), kept.plans_of(group)
        self._exporter = Exporter(export, recipe, session, exchange=exchange, managed=False, shared=shared)
        self.hold(self._close_exporter)

    def run(self, *, overwrite: bool) -> Path | str:
        """Export, and wait for it."""
        self._exporter.start()
        job = self._exporter.new_job(None, name=os.path.basename(self.target), overwrite=overwrite)
        job.give(self._material)
        self._exporter.submit(job)
        try:
            published = os.fspath(job.handle.result(max(self.left_s(), OUTCOME_GRACE_S)))
            return published if is_store(published) else Path(published)
        except DeadlineExceeded:
            target, timeout_s = self.target, self.deadline.timeout_s
            message = f"the export to {target} did not end within {timeout_s:g} s; look at the storage, or allow more"
            raise DeadlineExceeded(message, waited_for=f"export to {target}", timeout_s=timeout_s) from None

    def _close_exporter(self) -> None:
        """Close the exporter; an export in work is given up once the time is up."""
        self._exporter.close(time.monotonic() + max(self.left_s(), OUTCOME_GRACE_S))


def _names_here(checkpoint: Checkpoint, export: HFExport) -> dict[str, str]:
    """Return the names of the checkpoint's tensors by those to export them from: with a top-level key."""
    modules = tuple(export.modules) if export.modules is not None else None
    if modules is None or "" not in modules:
        return {name: name for name in checkpoint.tensors}
    if modules != ("",):
        raise ConfigError(
            "modules: '' stands for the tensors under no top-level key, which are a model of their own; export others "
            "in another call",
            field="modules",
        )
    found = {f"{_KEY}.{name}": name for name in checkpoint.top_names}
    if not found:
        raise ConfigError(
            f"modules: {checkpoint.path} has no tensors under no top-level key; leave `modules` out", field="modules"
        )
    return found


def _stored_models(checkpoint: Checkpoint, names: Mapping[str, str], export: HFExport) -> list[Model]:
    """Return the models of a checkpoint by top-level name, ``model`` unless others are requested."""
    there = {name.partition(".")[0] for name in names}
    if export.modules is None:
        _require_keyed(checkpoint)
    keys = tuple(key or _KEY for key in export.modules) if export.modules is not None else (_KEY,)
    missing = [key for key in keys if key not in there]
    if missing:
        raise ConfigError(
            f"the checkpoint {checkpoint.path} has no tensors under {', '.join(map(repr, missing))}; there are "
            f"{', '.join(sorted(there)) or 'none'}; select the models with `modules`",
            field="modules",
        )
    flat, paths = export.modules is not None and "" in export.modules, source_of(checkpoint).paths
    for note in checkpoint.objects:
        name, _, last = note.rpartition(".")
        if last == NOTE and (len(paths.get(note, ())) == 2 if flat else note.partition(".")[0] in keys):
            raise quantized(name, "tensor subclass")
    if len(keys) == 1 and (model := _architecture(export.assets)) is not None:
        if export.key_map is None:
            _require_shapes(checkpoint, names, keys[0], model)
        return [model_of(keys[0], [model])]
    models = []
    for key in keys:
        tensors = {name: checkpoint.tensors[stored] for name, stored in names.items() if name.startswith(f"{key}.")}
        count = sum(math.prod(info.shape) for info in tensors.values())
        models.append(Model(key, (), tuple(name.removeprefix(f"{key}.") for name in tensors), (), count))
    return models


def _require_keyed(checkpoint: Checkpoint) -> None:
    """Raise `ConfigError` for tensors whose names begin with no key of a state: none of them may be left out."""
    if flat := checkpoint.flat_names:
        more = f", and {len(flat) - 3} more" if len(flat) > 3 else ""
        raise ConfigError(
            f"{checkpoint.path} has tensors under no top-level key ({', '.join(flat[:3])}{more}), "
            "like a flat state dict or a Hugging Face directory, so the model can't be "
            "identified. If they are one model, pass modules=['']; else load it into the model and export that, or "
            "select top-level keys with `modules`",
            field="source",
        )


def _require_shapes(checkpoint: Checkpoint, names: Mapping[str, str], key: str, model: nn.Module) -> None:
    """Raise `ConfigError` where the checkpoint has other shapes than ``model``: nobody could load the export."""
    odd = []
    for name, tensor in model.state_dict().items():
        stored = checkpoint.tensors.get(names.get(f"{key}.{name}", ""))
        if stored is not None and tuple(stored.shape) != tuple(tensor.shape):
            odd.append(f"`{name}` is {list(stored.shape)} in the checkpoint, and {list(tensor.shape)} in the config")
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise ConfigError(
            f"{checkpoint.path} does not match the model of `assets`: {'; '.join(odd[:5])}{more}; "
            "pass the assets of the model that was trained",
            field="assets",
        )


def _architecture(assets: Any) -> nn.Module | None:
    """The model that ``assets`` describe, without data; None where they don't or `transformers` isn't there."""
    first = assets[0] if isinstance(assets, (list, tuple)) and assets else assets
    try:
        import torch
        import transformers
    except ImportError:
        return None
    config: Any = first
    if isinstance(first, (str, os.PathLike)):
        try:
            config = transformers.AutoConfig.from_pretrained(absolute(os.fspath(first)), local_files_only=True)
        except (OSError, ValueError):
            return None  # what is wrong with the directory is said when its files are collected
    names = getattr(config, "architectures", None) or ()
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        return None
    with torch.device("meta"):
        made: nn.Module = kind(config)
    return made
