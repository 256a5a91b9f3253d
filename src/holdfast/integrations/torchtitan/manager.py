"""Define torchtitan's checkpoint manager on Holdfast, for torchtitan 0.3 and newer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.tools import filesystem

from holdfast.integrations.torchtitan.checkpoints import ASYNC_MODES, Options, TitanCheckpoints, refuse_replicas

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import nn


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and loads for torchtitan's trainer: assign its `Config` to ``config.checkpoint``.

    Methods and their errors are torchtitan's; `TitanCheckpoints` says what they guarantee. All ranks call them alike,
    from the training thread. ``states``: objects with a ``state_dict`` by name, besides those that are passed each by
    its own argument. sd_adapter: needed for what is in Hugging Face's format. ft_manager: of torchtitan's
    TorchFT experiment, whose trainer passes it; refused if it is enabled (`ConfigError`).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's own manager. Saves are asynchronous unless ``async_mode`` is disabled."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """``disabled`` waits until a checkpoint is published. The other two are the same: the copies are made while the
        next step computes, and the update of the parameters waits for them."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            lowered = self.async_mode.lower()
            if lowered not in ASYNC_MODES:
                raise ValueError(f"Invalid async_mode: {lowered}")
            self.async_mode = cast("Literal['disabled', 'async', 'async_with_pinned_mem']", lowered)

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
        ft_manager: Any = None,
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[Any] | None = None
        if not self.enable:
            return
        refuse_replicas(ft_manager)
        self.folder = filesystem.join(base_folder, config.folder)
        self.interval = config.interval
        self.keep_latest_k = config.keep_latest_k
        self.load_only = config.load_only
        self.async_mode = config.async_mode
        options = Options(
            folder=self.folder,
            interval=config.interval,
            async_mode=config.async_mode,
            keep_latest_k=config.keep_latest_k,
            enable_first_step_checkpoint=config.enable_first_step_checkpoint,
            load_only=config.load_only,
            exclude_from_loading=tuple(config.exclude_from_loading),
            initial_load_path=config.initial_load_path,
            initial_load_model_only=config.initial_load_model_only,
            initial_load_in_hf=config.initial_load_in_hf,
            initial_load_in_hf_quantized=config.initial_load_in_hf_quantized,
            last_save_model_only=config.last_save_model_only,
            last_save_in_hf=config.last_save_in_hf,
            export_dtype=config.export_dtype,
        )
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

    def _load(self, step: int = -1) -> bool:
        return self.checkpoints.load(step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - torchtitan's signature
        saved = self.checkpoints.save(curr_step, last=last_step)
        if saved and self.checkpoints.handle is not None:
            self.save_future = cast("Future[Any]", self.checkpoints.handle)
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self.checkpoints.before_update()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.checkpoints.wait()

    def _close(self) -> None:
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
