"""`export_hf`: one export, now, of a state or of a published checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.agreement import Agreement, Votes
from holdfast.arguments import checked_path, checked_seconds
from holdfast.callbacks import Callbacks
from holdfast.checkpoint import Checkpoint
from holdfast.config import config_within
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.export.hf_export import SHARD_BYTES, HFExport
from holdfast.export.material import LiveState, StoredState
from holdfast.export.recipe import Model, Recipe, model_of, models_of
from holdfast.export.session import Exporter
from holdfast.exporting import exchange_of
from holdfast.group import open_group
from holdfast.starting import claim_path
from holdfast.state.tree import StateTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.group import Group
    from holdfast.storage.lock import RootLock

OUTCOME_GRACE_S = 30.0


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
) -> Path:
    """Write a Hugging Face directory to ``out``; returns its path once it is published and durable on every rank.

    source: a state with modules at its top level, as for `holdfast.save` (or one module), or an opened checkpoint.
    assets, dtype, key_map, max_shard_bytes, tokenizer, fp32_keys, modules: as for `HFExport`. Of a checkpoint, the
    architecture that ``config.json`` of ``assets`` names decides what `save_pretrained` would write; without assets
    tensors keep their names. process_group: the ranks that export; all of them call this. timeout: seconds for all of
    it. overwrite: replace what is at ``out`` as a whole.

    Raises `ConfigError`, `CheckpointExists`, `SaveFailed`, `StorageError`, `DeadlineExceeded`, `OutcomeUnknown`; the
    same on every rank. Nothing is visible at ``out`` unless this returned. For the training thread of every rank.
    """
    session = _Session(process_group, timeout)
    try:
        return session.run(
            source,
            out,
            overwrite=overwrite,
            assets=assets,
            dtype=dtype,
            key_map=key_map,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
            fp32_keys=fp32_keys,
            modules=modules,
        )
    finally:
        session.close()


class _Session:
    """One export, from open to closed."""

    def __init__(self, process_group: Any | None, timeout: float) -> None:
        # First of all: ranks number their sessions, also one whose arguments are refused.
        self._group: Group = open_group(process_group, purpose="export", timeout=timeout)
        self._timeout_s = checked_seconds("timeout", timeout)
        self._deadline = time.monotonic() + self._timeout_s
        self._votes = Votes(self._group.board)
        self._lock: RootLock | None = None
        self._agreement = Agreement(self._group.board.clone(), "export")
        self._exporter: Exporter | None = None
        self._live: LiveState | None = None

    def run(self, source: Any, out: Any, *, overwrite: bool, **options: Any) -> Path:
        error: BaseException | None = None
        target = ""
        try:
            target = checked_path(out, field="out")
            self._open(source, target, options, overwrite=overwrite)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        self._votes.settle(error, target=target, timeout_s=self._left_s())
        assert self._exporter is not None
        self._exporter.start()
        ticket = self._exporter.ticket(None, name=os.path.basename(target), overwrite=overwrite)
        ticket.give(self._live or StoredState(source, self._group.rank, self._group.world))
        try:
            return Path(ticket.handle.result(max(self._left_s(), OUTCOME_GRACE_S)))
        except DeadlineExceeded:
            message = (
                f"the export to {target} did not end within {self._timeout_s:g} s; look at the storage, or allow more"
            )
            raise DeadlineExceeded(message, waited_for=f"export to {target}", timeout_s=self._timeout_s) from None

    def close(self) -> None:
        """Let go of everything; what is in work is given up."""
        deadline = time.monotonic() + max(self._left_s(), OUTCOME_GRACE_S)
        try:
            if self._exporter is not None:
                self._exporter.close(deadline)
            self._agreement.leave()
        finally:
            self._agreement.board.close()
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()
            self._votes.leave()
            self._group.board.close()

    def _open(self, source: Any, target: str, options: dict[str, Any], *, overwrite: bool) -> None:
        group = self._group
        parent = os.path.dirname(target)
        options = {**options, "root": parent, "every": None, "latest_link": False}
        export = HFExport(**options)
        if isinstance(source, nn.Module):
            source = {"model": source}
        if isinstance(source, Checkpoint):
            models = _stored_models(source, export)
        elif isinstance(source, Mapping):
            models = models_of(export, source)
            exported = {model.key: source[model.key] for model in models}
            tree = StateTree(exported, rank=group.rank, world=group.world, group_ranks=group.ranks)
            self._live = LiveState(tree, group, self._agreement, target=target, timeout_s=self._left_s())
        else:
            raise ConfigError(
                f"source: expected a state, a module or an opened checkpoint, found {type(source).__name__}",
                field="source",
            )
        recipe = Recipe(export, models, rank=group.rank)
        if group.rank == 0:
            self._lock = claim_path(target, step=None, overwrite=overwrite, timeout_s=self._left_s())
        config = config_within(self._left_s())
        self._exporter = Exporter(
            export,
            recipe,
            group,
            config,
            number=0,
            exchange=exchange_of(group, "export"),
            callbacks=Callbacks(),
            wait_staged=lambda _: None,
            managed=False,
        )

    def _left_s(self) -> float:
        return max(0.001, self._deadline - time.monotonic())


def _stored_models(checkpoint: Checkpoint, export: HFExport) -> list[Model]:
    """What is known of the models of a checkpoint: by top-level names, ``model`` unless others are asked for."""
    there = {name.partition(".")[0] for name in checkpoint.tensors}
    keys = tuple(export.modules) if export.modules is not None else ("model",)
    missing = [key for key in keys if key not in there]
    if missing:
        raise ConfigError(
            f"the checkpoint {checkpoint.path} has no tensors under {', '.join(map(repr, missing))}; there are "
            f"{', '.join(sorted(there)) or 'none'}: say which are models by `modules`",
            field="modules",
        )
    if len(keys) == 1 and (model := _architecture(export.assets)) is not None:
        if export.key_map is None:
            _require_shapes(checkpoint, keys[0], model)
        return [model_of(keys[0], model)]
    models = []
    for key in keys:
        tensors = {name: info for name, info in checkpoint.tensors.items() if name.startswith(f"{key}.")}
        count = sum(math.prod(info.shape) for info in tensors.values())
        models.append(Model(key, None, tuple(name.removeprefix(f"{key}.") for name in tensors), (), count))
    return models


def _require_shapes(checkpoint: Checkpoint, key: str, model: nn.Module) -> None:
    """Raise `ConfigError` where the checkpoint has other shapes than ``model``: nobody could load the export."""
    odd = []
    for name, tensor in model.state_dict().items():
        stored = checkpoint.tensors.get(f"{key}.{name}")
        if stored is not None and tuple(stored.shape) != tuple(tensor.shape):
            odd.append(f"`{name}` is {list(stored.shape)} in the checkpoint, and {list(tensor.shape)} in the config")
    if odd:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise ConfigError(
            f"{checkpoint.path} is not of the model that `assets` describe: {'; '.join(odd[:5])}{more}; give the "
            "assets of the model that was trained",
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
            config = transformers.AutoConfig.from_pretrained(os.fspath(first), local_files_only=True)
        except (OSError, ValueError):
            return None  # what is wrong with the directory is said when its files are collected
    names = getattr(config, "architectures", None) or ()
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        return None
    with torch.device("meta"):
        made: nn.Module = kind(config)
    return made
