"""Give a DeepSpeed engine's state to Holdfast: ZeRO stages 0, 1 and 2.

    state = {**state_of(engine), "progress": progress}      # for holdfast.save, load, CheckpointManager

    model           the module, under its own names, as without DeepSpeed: whole on any number of ranks, and exportable
    optimizer       stages 1 and 2: each rank's partition of master weights and optimizer state, and the loss scaler;
                    stage 0: the optimizer itself, if it is one of torch's
    lr_scheduler    the engine's scheduler, if it has one
    engine          its counters

Guarantees: on as many ranks training goes on bit for bit. What isn't carried is a `ConfigError`: stage 3, whose weights
are partitioned, too; DeepSpeed's optimizers of bfloat16 and float16 without ZeRO; experts, pipelines, random layer
dropping and curricula; a save amid the accumulation of gradients. Partitions on another number of ranks are a
`StateMismatch` that names them; the model alone loads (``include="model"``, then
``engine.optimizer.refresh_fp32_params()``).
Assumes DeepSpeed 0.15 or newer. A save returns when everything is copied: DeepSpeed changes the weights where no hook
of torch's tells. Does not: read or write DeepSpeed's own checkpoint directories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from holdfast.errors import ConfigError
from holdfast.state.entries import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["state_of"]

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALER: Final = "loss_scaler"
_LEFT_OUT: Final = ("param_slice_mappings",)
"""Where each parameter is in the partitions: derived, and of use to DeepSpeed's own converter only."""


def state_of(engine: Any) -> dict[str, Any]:
    """Return what Holdfast saves and loads of ``engine``, as returned by ``deepspeed.initialize``. All ranks call it.

    Raises `ConfigError` for what can't be carried.
    """
    _refuse(engine)
    optimizer = engine.optimizer
    state: dict[str, Any] = {"model": engine.module, "engine": _EngineCounters(engine)}
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        state["optimizer"] = PerRank(_ZeroPartitions(engine))
    elif optimizer is not None:
        state["optimizer"] = optimizer
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler
    return state


def _refuse(engine: Any) -> None:
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    ours = optimizer is None or isinstance(optimizer, (DeepSpeedZeroOptimizer, torch.optim.Optimizer))
    reasons = {
        "ZeRO stage 3 partitions the weights; use stages 0 to 2, or engine.save_checkpoint": stage == 3,
        f"its optimizer is a {type(optimizer).__name__}; use a ZeRO stage 1 or 2, or engine.save_checkpoint": not ours,
        "its module is a pipeline; use engine.save_checkpoint": isinstance(engine.module, PipelineModule),
        "it has experts, each on some ranks only; use engine.save_checkpoint": engine.has_moe_layers,
        "it drops layers at random; use engine.save_checkpoint": engine.random_ltd_enabled(),
        "it learns by a curriculum; use engine.save_checkpoint": engine.curriculum_learning_enabled(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"a DeepSpeed engine can't be saved by Holdfast: {reason}", field="engine")


class _EngineCounters:
    """Counters of an engine, the same on all ranks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        steps = self._engine.gradient_accumulation_steps()
        if self._engine.micro_steps % steps:
            raise ConfigError(
                f"engine: gradients of {self._engine.micro_steps % steps} of {steps} micro-batches are accumulated, "
                "and not saved: save after the step that uses them",
                field="engine",
            )
        return {name: getattr(self._engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, state[name])


class _ZeroPartitions:
    """What a rank alone has of a ZeRO-1 or ZeRO-2 optimizer, as the optimizer's own ``state_dict()`` gives it."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        # A step changes these, and runs a hook of torch's for the partitions only: Holdfast then copies them at once.
        self.param_groups = [{"params": list(engine.module.parameters())}]
        self.step = engine.step

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in self._optimizer.state_dict().items() if key not in _LEFT_OUT}
        state["zero_stage"] = int(state["zero_stage"])
        state[_SCALER] = dict(vars(state[_SCALER]))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        if list(state["partition_count"]) != list(optimizer.partition_count):
            raise ConfigError(
                f"optimizer: saved in {state['partition_count']} partitions, one number a group; now there are "
                f"{optimizer.partition_count}. Resume on as many data-parallel ranks, or load the model only",
                field="optimizer",
            )
        vars(optimizer.loss_scaler).update(state[_SCALER])
        place = torch.distributed.get_rank(group=optimizer.dp_process_group)
        states: list[Any] = [None] * (place + 1)
        states[place] = {**state, _SCALER: optimizer.loss_scaler}
        optimizer.load_state_dict(states, load_optimizer_states=True, load_from_fp32_weights=True)
