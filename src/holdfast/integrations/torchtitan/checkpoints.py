"""Save and load what torchtitan's trainer has, by its options, under its names. Imports nothing of torchtitan.

    <folder>/step-N      model (names without a key), optimizer, lr_scheduler, dataloader, train_state, and the random
                         number generators of each rank, which torchtitan leaves out

Guarantees: the names, and the states under them, are those that torchtitan's own manager writes, so either resumes what
the other wrote. A checkpoint is visible when it is whole. What another writer left in ``folder`` is never deleted.
A last save of the model alone is never resumed from, and stays when a longer run comes by its step.
``folder`` and ``initial_load_path`` may be URLs.
Assumes: every rank makes one and calls it alike, from the training thread.
Does not: run in a group with TorchFT (see ``holdfast.integrations.torchft``), or divide a dataloader's position anew
among another number of data-parallel ranks: torchtitan's own dataloader refuses that.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

import holdfast
from holdfast.errors import CheckpointExists, CheckpointNotFound, ConfigError
from holdfast.manager import CheckpointManager
from holdfast.validation import checked_path, is_store

if TYPE_CHECKING:
    from torch import nn

    from holdfast.saver.handle import SaveHandle

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"
ASYNC_MODES: Final = ("disabled", "async", "async_with_pinned_mem")
_log = logging.getLogger("holdfast.integrations.torchtitan")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Those of torchtitan's configuration that decide what is saved and loaded, by its names."""

    folder: str
    interval: int
    async_mode: str
    keep_latest_k: int
    enable_first_step_checkpoint: bool
    load_only: bool
    exclude_from_loading: tuple[str, ...]
    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    last_save_model_only: bool
    last_save_in_hf: bool
    export_dtype: str


class TitanCheckpoints:
    """The checkpoints of one trainer, in ``options.folder``, made, and locked on a disk, by the first load or save."""

    def __init__(
        self,
        options: Options,
        *,
        model_parts: list[nn.Module] | nn.Module,
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        states: Mapping[str, Any],
        sd_adapter: Any,
    ) -> None:
        if options.last_save_in_hf and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf is True, but sd_adapter is not provided.")
        if options.async_mode not in ASYNC_MODES:
            raise ValueError(f"Unknown checkpoint async_mode {options.async_mode}")
        self._options = options
        self._parts: list[nn.Module] = list(model_parts) if isinstance(model_parts, Sequence) else [model_parts]
        self._sd_adapter = sd_adapter
        # What a dataloader of torchtitan's gives is named by its data-parallel rank already.
        given = {
            OPTIMIZER: optimizers,
            LR_SCHEDULER: lr_schedulers,
            DATALOADER: None if dataloader is None else holdfast.Replicated(dataloader),
            **states,
        }
        self._known = {MODEL, *given}
        self.state: dict[str, Any] = {
            MODEL: holdfast.Unprefixed(self._parts),
            **{key: value for key, value in given.items() if value is not None},
        }
        self._excluded = tuple(key for key in options.exclude_from_loading if key in self.state)
        self.handle: SaveHandle | None = None
        self._manager: CheckpointManager | None = None

    # Loading. ----------------------------------------------------------------------------------------------------

    def load(self, step: int = -1) -> bool:
        """Load exactly ``step``, or with -1 the newest, else what to begin with; False if there is nothing to load.

        Raises `FileNotFoundError` for a missing ``step``, `ValueError` for an initial path that isn't there and for
        unknown names in ``exclude_from_loading``; else as `holdfast.CheckpointManager.restore` and `holdfast.load`.
        """
        folder = self._options.folder
        if step != -1 and "://" not in folder and not os.path.isdir(folder):
            raise FileNotFoundError(
                f"--checkpoint.load_step={step} not found because checkpoint.folder {folder} does not exist"
            )
        for key in self._options.exclude_from_loading:
            if key not in self._known:
                raise ValueError(f"{key} not found in state_dict.")
        if step != -1:
            try:
                self._restored(self.manager.restore(step))
            except CheckpointNotFound as error:
                raise FileNotFoundError(f"--checkpoint.load_step={step} not found: {error}") from error
            return True
        restored = self.manager.restore()
        if restored is None:
            restored = self._restore_seed()
        self._restored(restored)
        return restored is not None or self._load_initial()

    def _restored(self, step: int | None) -> None:
        if step is not None:
            _log.info("loaded step %d from %s", step, self._options.folder)

    def _restore_seed(self) -> int | None:
        """Load the model of step 0, which a seed checkpoint has and nothing else."""
        try:
            return self.manager.restore(0)
        except CheckpointNotFound:
            return None

    def _load_initial(self) -> bool:
        options = self._options
        path = options.initial_load_path
        if options.initial_load_in_hf:
            if self._sd_adapter is None:
                raise ValueError("initial_load_in_hf needs an sd_adapter, and the model has none")
            path = path or self._sd_adapter.hf_assets_path
            if not path or not os.path.isdir(path):
                raise ValueError(
                    f"Checkpoint.initial_load_path is invalid: {path}; with initial_load_in_hf it, or else "
                    "hf_assets_path, is a directory of safetensors"
                )
            self._load_hf(path)
            return True
        if not path:
            _log.info("No checkpoint was provided, this is a fresh start.")
            return False
        path = checked_path(path, field="initial_load_path")
        if not is_store(path) and not os.path.isdir(path):
            raise ValueError(f"Checkpoint.initial_load_path is invalid: {path}")
        try:
            if options.initial_load_model_only:
                holdfast.load({MODEL: self.state[MODEL]}, path)
            else:
                holdfast.load(self.state, path, exclude=self._excluded)
        except CheckpointNotFound as error:
            raise ValueError(f"Checkpoint.initial_load_path is invalid: {error}") from error
        return True

    @torch.no_grad()
    def _load_hf(self, path: str) -> None:
        """Load by the model's own adapter and reader, which know its quantized formats."""
        from torch.distributed.checkpoint import state_dict_loader

        wanted = self._sd_adapter.to_hf(
            {name: value for part in self._parts for name, value in part.state_dict().items()}
        )
        reader = self._sd_adapter.get_hf_storage_reader(path, self._options.initial_load_in_hf_quantized)
        state_dict_loader.load(wanted, storage_reader=reader)
        loaded = self._sd_adapter.from_hf(wanted)
        for part in self._parts:
            part.load_state_dict(loaded, strict=False)

    # Saving. -----------------------------------------------------------------------------------------------------

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return True if ``step`` is to be saved."""
        options = self._options
        if options.load_only:
            return False
        return last or step % options.interval == 0 or (step == 1 and options.enable_first_step_checkpoint)

    def save(self, step: int, *, last: bool = False) -> bool:
        """Save ``step`` if it is due; False if nothing was saved. `handle` is then that of the save.

        Returns at once, or with ``async_mode="disabled"`` and for the ``last`` step when it is published. Raises as
        `holdfast.CheckpointManager.save`, failures of earlier saves included.
        """
        if not self.is_due(step, last=last):
            return False
        if last and self._options.last_save_in_hf:
            self._export(step)
            return True
        try:
            self.handle = self.manager.save(step, final=last)
        except CheckpointExists as error:
            if last or not _is_last_of_earlier(error.path):
                raise
            _log.warning("%s", error)
            return False
        return True

    def _export(self, step: int) -> None:
        self.manager.wait()
        holdfast.export_hf(
            {MODEL: self._parts},
            os.path.join(self._options.folder, f"step-{step}"),
            key_map=self._sd_adapter,
            dtype=self._options.export_dtype,
        )

    def before_update(self) -> None:
        """Wait until the parameters may be changed."""
        if self._manager is not None:
            self._manager.before_update()

    def wait(self) -> None:
        """Wait until everything is published; raises as `holdfast.CheckpointManager.wait`."""
        if self._manager is not None:
            self._manager.wait()

    def close(self) -> None:
        """Let what is in flight end and release everything; idempotent.

        From within an ``except`` it takes the run for failed: other ranks may not be there any more, and nothing waits
        for them.
        """
        if self._manager is not None:
            self._manager.close(failed=sys.exc_info()[1] is not None)

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the folder, made when it is first needed, by all ranks together."""
        if self._manager is None:
            options = self._options
            dtype = options.export_dtype if options.last_save_model_only else None
            config = holdfast.CheckpointConfig(
                every=None,
                keep=holdfast.Keep(last=options.keep_latest_k) if options.keep_latest_k else None,
                mode="sync" if options.async_mode == "disabled" else "async",
                last_model_only=options.last_save_model_only,
                last_dtype=dtype,
                exclude_from_loading=self._excluded,
                load_only=options.load_only,
            )
            folder = checked_path(options.folder, field="folder")
            self._manager = CheckpointManager(folder, self.state, config=config)
        return self._manager


def refuse_replicas(ft_manager: Any) -> None:
    """Raise `ConfigError` for a manager of TorchFT's that is enabled: no replica knows of the others' saves here."""
    if ft_manager is not None and getattr(ft_manager, "enabled", True):
        raise ConfigError(
            "ft_manager is enabled: use holdfast.integrations.torchft.ReplicaCheckpoints, which knows which replica "
            "saves",
            field="ft_manager",
        )


def _is_last_of_earlier(path: str) -> bool:
    """Return True if ``path`` is what an earlier run left as its last: a model alone, or an export."""
    manifest = holdfast.open(path).manifest
    return manifest is not None and (manifest.kind != "checkpoint" or not manifest.resumable)
