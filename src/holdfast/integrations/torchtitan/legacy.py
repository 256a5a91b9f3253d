"""Define the surface that torchtitan's ``CheckpointManager`` had before 0.3, on Holdfast; for trainers built on it.

Imports nothing of torchtitan: options are read from any object that has them by name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError
from holdfast.integrations.torchtitan.checkpoints import Options, TitanCheckpoints, refuse_replicas

if TYPE_CHECKING:
    from torch import nn

_MISSING: Final = object()


class LegacyCheckpointManager:
    """Saves and loads for a trainer of an older torchtitan.

    checkpoint_config: an object with torchtitan's options of checkpoints (``enable`` or ``enable_checkpoint``,
    ``folder``, ``interval``, ``async_mode`` and so on; older names of theirs too), or the whole ``job_config`` that has
    them at ``.checkpoint``. An option that it lacks has torchtitan's default. base_folder: what ``folder`` is relative
    to; None for ``job_config.job.dump_folder``. ft_manager: refused if it is enabled (`ConfigError`): see
    ``holdfast.integrations.torchft``.
    Every rank makes one, and calls it alike, from the training thread.
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        checkpoint_config: Any = None,
        *,
        job_config: Any = None,
        sd_adapter: Any = None,
        base_folder: str | None = None,
        ft_manager: Any = None,
    ) -> None:
        if (job := checkpoint_config if job_config is None else job_config) is None:
            raise ConfigError("checkpoint_config or job_config is needed", field="checkpoint_config")
        config = getattr(job, "checkpoint", job)
        refuse_replicas(ft_manager)
        if base_folder is None:
            base_folder = getattr(getattr(job, "job", None), "dump_folder", "")
        self.enable = bool(_option(config, ("enable", "enable_checkpoint"), default=True))
        self.load_step = int(_option(config, ("load_step",), default=-1))
        if not self.enable:
            return
        options = _options(config, base_folder)
        self.folder, self.interval, self.keep_latest_k = options.folder, options.interval, options.keep_latest_k
        self.checkpoints = TitanCheckpoints(
            options,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            dataloader=dataloader,
            states=states,
            sd_adapter=sd_adapter,
        )
        self.states = self.checkpoints.state

    def load(self, step: int | None = None) -> bool:
        """Load ``step``, -1 for the newest, None for ``load_step`` of the options; False if there is nothing to load.

        Raises `FileNotFoundError`, `ValueError`, and as `holdfast.CheckpointManager.restore`.
        """
        return self.enable and self.checkpoints.load(self.load_step if step is None else step)

    def save(self, curr_step: int, force: bool = False, *, last_step: bool = False) -> None:  # noqa: FBT001, FBT002
        """Save if ``curr_step`` is due. force, last_step: whatever the interval, by the options of a last save.

        Returns at once, or when published if ``async_mode`` is disabled, and for a last save. Raises what an earlier
        save failed with.
        """
        if self.enable:
            self.checkpoints.save(curr_step, last=force or last_step)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the parameters may be changed. Optimizers of torch's wait by themselves."""
        if self.enable:
            self.checkpoints.before_update()

    def close(self) -> None:
        """Let what is in flight end and release everything; idempotent; within an ``except``, without other ranks."""
        if self.enable:
            self.checkpoints.close()


def _option(config: Any, names: tuple[str, ...], *, default: Any) -> Any:
    for name in names:
        value = getattr(config, name, _MISSING)
        if value is not _MISSING:
            return value
    return default


def _options(config: Any, base_folder: str) -> Options:
    def option(*names: str, default: Any) -> Any:
        return _option(config, names, default=default)

    folder = str(option("folder", default="checkpoint"))
    interval, keep = int(option("interval", default=500)), int(option("keep_latest_k", default=10))
    if keep == 1 or keep < 0:
        raise ValueError("keep_latest_k is 0, which keeps all, or at least 2")
    if interval < 1 or not folder.strip():
        raise ValueError("interval is at least 1, and folder isn't empty")
    in_hf = bool(option("last_save_in_hf", default=False))
    model_only = bool(
        option("last_save_model_only", "last_save_model_weights_only", "model_weights_only", default=True)
    )
    if in_hf and not model_only:
        raise ValueError("last_save_in_hf requires last_save_model_only=True.")
    return Options(
        folder=folder if "://" in folder else os.path.join(base_folder, folder),
        interval=interval,
        async_mode=str(getattr(mode := option("async_mode", default="disabled"), "value", mode)).lower(),
        keep_latest_k=keep,
        enable_first_step_checkpoint=bool(option("enable_first_step_checkpoint", default=False)),
        load_only=bool(option("load_only", default=False)),
        exclude_from_loading=tuple(option("exclude_from_loading", default=())),
        initial_load_path=option("initial_load_path", default=None),
        initial_load_model_only=bool(option("initial_load_model_only", default=True)),
        initial_load_in_hf=bool(option("initial_load_in_hf", default=False)),
        initial_load_in_hf_quantized=bool(option("initial_load_in_hf_quantized", default=False)),
        last_save_model_only=model_only,
        last_save_in_hf=in_hf,
        export_dtype=str(option("export_dtype", default="float32")),
    )
