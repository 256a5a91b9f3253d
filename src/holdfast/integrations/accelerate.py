"""Save and load the state of an Hugging Face `accelerate.Accelerator` as one Holdfast checkpoint.

    save_state(accelerator, "out/step-500")     in place of    accelerator.save_state("out/step-500")
    load_state(accelerator, "out/step-500")     in place of    accelerator.load_state("out/step-500")

Accelerate's own hooks are no place for this: it writes optimizers, schedulers and random states whatever they do. So
these functions replace the two methods, for everything that was prepared or registered:

    model, model_1, ...              prepared models, sharded or not
    optimizer, scheduler, ...        prepared optimizers and schedulers
    dataloader, dataloader_1, ...    position and epoch of prepared dataloaders, each rank's own
    scaler, custom, custom_1, ...    the gradient scaler, and what `register_for_checkpointing` was given
    rng, accelerator                 random number generators of each rank; accumulation step and save iteration

Guarantees: a checkpoint is visible when it is whole, and not before. With automatic naming, what ``total_limit``
deletes goes after the new checkpoint is published. A directory that accelerate wrote is loaded by accelerate itself.
``output_dir``, ``input_dir`` and ``project_dir`` may be URLs.
Does not: save DeepSpeed's or Megatron-LM's engines, run state hooks of accelerate (`ConfigError` where one is
registered: it expects files of accelerate's), or read what accelerate can't.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accelerate.utils import DistributedType

import holdfast
from holdfast.catalog.root import is_checkpoint
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.storage.local import open_storage
from holdfast.validation import checked_path, is_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator

    from holdfast.loader.checkpoint import Checkpoint
    from holdfast.saver.handle import SaveHandle

_log = logging.getLogger("holdfast")
_NAME: Final = re.compile(r"checkpoint_(\d+)")
_OWN_ENGINES: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_flying: list[SaveHandle] = []
"""Asynchronous saves of this process that had not ended when the last one began."""


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    timeout: float = 600.0,
) -> Checkpoint:
    """Save everything that ``accelerator`` prepared; returns when it is published, durable and visible to all.

    output_dir: the checkpoint's directory or URL; not with automatic naming, which makes ``project_dir/checkpoints/
    checkpoint_<iteration>`` and keeps ``total_limit`` of them. A checkpoint that is there is replaced as a whole, as
    accelerate does. metrics, files: as for `holdfast.save`. timeout: seconds. All ranks call it. Raises as
    `holdfast.save`.
    """
    target = _target_of(accelerator, output_dir)
    checkpoint = holdfast.save(
        _state_of(accelerator), target, metrics=metrics, files=files, timeout=timeout, overwrite=output_dir is not None
    )
    _saved(accelerator, target)
    return checkpoint


def async_save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    timeout: float = 600.0,
) -> SaveHandle:
    """Start `save_state` and return a handle; the next optimizer step waits until everything is copied.

    With automatic naming older checkpoints are deleted once this one is published, when the handle tells.
    """
    target = _target_of(accelerator, output_dir)
    handle = holdfast.async_save(
        _state_of(accelerator), target, metrics=metrics, files=files, timeout=timeout, overwrite=output_dir is not None
    )
    _flying[:] = [*(started for started in _flying if not started.done()), handle]
    accelerator.project_configuration.iteration += 1
    limit, is_main = _limit_of(accelerator, target), accelerator.is_main_process

    def published(done: Any) -> None:
        if is_main and done.exception() is None:
            _delete_old(os.path.dirname(target), limit)

    handle.add_done_callback(published)
    return handle


def load_state(
    accelerator: Accelerator, input_dir: str | os.PathLike[str] | None = None, *, timeout: float = 600.0, **kwargs: Any
) -> None:
    """Load what `save_state` wrote into everything that ``accelerator`` prepared, in place; on any number of ranks.

    input_dir: a checkpoint; None with automatic naming: the newest one, after what a crash left was settled. A
    directory that accelerate wrote is loaded by ``accelerator.load_state(input_dir, **kwargs)``. All ranks call it.
    With automatic naming the next save is named by the number after this one's. Waits for saves in flight first.

    Raises `CheckpointNotFound`, `StateMismatch` if other objects were prepared or registered, and as `holdfast.load`.
    """
    _refuse(accelerator, accelerator._load_model_state_pre_hook, "load")
    for handle in _flying:
        handle.exception()  # its own deadline ends it
    source = _newest(accelerator) if input_dir is None else checked_path(input_dir, field="input_dir")
    if not is_store(source) and _is_theirs(Path(source)):
        accelerator.load_state(source, **kwargs)
        root, entry = os.path.split(source)
        naming, name = accelerator.project_configuration, _NAME.fullmatch(entry)
        if naming.automatic_checkpoint_naming and name is not None and root == _root_of(accelerator):
            naming.iteration = int(name[1]) + 1  # accelerate itself begins at 0 again
        return
    if kwargs:
        raise ConfigError(f"{', '.join(kwargs)}: known to accelerate's own checkpoints only", field=next(iter(kwargs)))
    holdfast.load(_state_of(accelerator), source, timeout=timeout)


def _state_of(accelerator: Accelerator) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for kind, values in (
        ("model", accelerator._models),
        ("optimizer", [optimizer.optimizer for optimizer in accelerator._optimizers]),
        ("scheduler", accelerator._schedulers),
        ("dataloader", [holdfast.PerRank(_Dataloader(loader)) for loader in accelerator._dataloaders]),
        ("scaler", [accelerator.scaler] if accelerator.scaler is not None else []),
        ("custom", accelerator._custom_objects),
    ):
        state |= {f"{kind}_{at}" if at else kind: value for at, value in enumerate(values)}
    if not accelerator._models:
        raise ConfigError("the accelerator has no model yet: call accelerator.prepare first", field="accelerator")
    return {**state, "rng": holdfast.RNG(), "accelerator": _Counters(accelerator)}


class _Counters:
    """What an accelerator counts: where it is in accumulating gradients, and how many checkpoints it has named."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.project_configuration.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["iteration"] + 1


class _Dataloader:
    """Epoch and seed of a prepared dataloader, and its position if it keeps one (``use_stateful_dataloader``)."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"iteration": getattr(self._loader, "iteration", 0)}
        sampler = self._sampler()
        if sampler is not None:
            state |= {"epoch": sampler.epoch, "seed": sampler.initial_seed}
        if self._is_stateful():
            state["position"] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = state["iteration"]
        sampler = self._sampler()
        if sampler is not None and "epoch" in state:
            sampler.epoch, sampler.initial_seed = state["epoch"], state["seed"]
        if self._is_stateful() and "position" in state:
            self._loader.load_state_dict(state["position"])

    def reshard_state_dict(self, states: list[Mapping[str, Any]], _rank: int, world: int) -> Mapping[str, Any]:
        """On other ranks than it was saved by there is no position, only an epoch to begin again."""
        if any("position" in state for state in states):
            raise ConfigError(
                f"the position of a stateful dataloader was saved by {len(states)} ranks, and this is a run of "
                f"{world}: it can't be divided anew; resume on as many ranks",
                field="dataloader",
            )
        return states[0]

    def _is_stateful(self) -> bool:
        return bool(getattr(self._loader, "use_stateful_dataloader", False))

    def _sampler(self) -> Any:
        from accelerate.data_loader import SeedableRandomSampler

        sampler = self._loader.get_sampler() if hasattr(self._loader, "get_sampler") else None
        return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _refuse(accelerator: Accelerator, hooks: Mapping[Any, Any], what: str) -> None:
    if accelerator.distributed_type in _OWN_ENGINES:
        raise ConfigError(
            f"{accelerator.distributed_type} keeps model and optimizer itself; use accelerator.{what}_state",
            field="accelerator",
        )
    if hooks:
        raise ConfigError(
            f"a hook was registered by register_{what}_state_pre_hook, which works on accelerate's own files: remove "
            "it, and register what it handles by register_for_checkpointing",
            field="accelerator",
        )


def _target_of(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """Return where to save, after all checks."""
    _refuse(accelerator, accelerator._save_model_state_pre_hook, "save")
    if not accelerator.sync_gradients and any(
        param.grad is not None for model in accelerator._models for param in model.parameters()
    ):
        warnings.warn(
            "gradients that are being accumulated are in no checkpoint: a run that loads this one goes on without "
            "them; save where accelerator.sync_gradients is True",
            stacklevel=3,
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        if output_dir is not None:
            raise ConfigError(
                "output_dir is given, and automatic_checkpoint_naming is on: leave one", field="output_dir"
            )
        return f"{_root_of(accelerator)}/checkpoint_{accelerator.save_iteration}"
    if output_dir is None:
        raise ConfigError("output_dir is needed where automatic_checkpoint_naming is off", field="output_dir")
    return checked_path(output_dir, field="output_dir")


def _root_of(accelerator: Accelerator) -> str:
    if accelerator.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs a project_dir", field="project_dir")
    return os.path.join(checked_path(accelerator.project_dir, field="project_dir"), "checkpoints")


def _is_theirs(directory: Path) -> bool:
    """Return True if accelerate wrote ``directory``."""
    return not (directory / MANIFEST_NAME).exists() and (directory / "random_states_0.pkl").exists()


def _saved(accelerator: Accelerator, target: str) -> None:
    accelerator.project_configuration.iteration += 1
    if accelerator.is_main_process:
        _delete_old(os.path.dirname(target), _limit_of(accelerator, target))


def _limit_of(accelerator: Accelerator, target: str) -> int | None:
    configuration = accelerator.project_configuration
    automatic = configuration.automatic_checkpoint_naming and os.path.dirname(target) == _root_of(accelerator)
    return configuration.total_limit if automatic else None


def _by_iteration(root: str) -> list[str]:
    """Return the paths of all that is named as a checkpoint, the oldest first; on a store, where others can't be, ours.

    A store may list what has become empty.
    """
    storage = open_storage(root)
    found = sorted((int(match[1]), entry) for entry in storage.list_dir("") if (match := _NAME.fullmatch(entry)))
    return [f"{root}/{entry}" for _, entry in found if not is_store(root) or is_checkpoint(storage, entry)]


def _delete_old(root: str, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond ``limit``; what can't be deleted is logged, and stays for now.

    Also what was just published, and is about to be opened, stays until its save has ended.
    """
    flying = {handle.path for handle in _flying if not handle.done()}
    for old in _by_iteration(root)[: -max(limit, 1)] if limit is not None else ():
        if old in flying:
            continue
        try:
            holdfast.delete(old)
        except (HoldfastError, OSError) as error:
            _log.warning("total_limit can't delete %s: %s", old, error)


def _newest(accelerator: Accelerator) -> str:
    root = _root_of(accelerator)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("input_dir is needed where automatic_checkpoint_naming is off", field="input_dir")
    if not is_store(root) and not os.path.isdir(root):
        raise CheckpointNotFound(f"{root} isn't there: no checkpoint of this run", path=root)
    # A save that a crash left durable on all ranks is published now: it is the newest, and has its name.
    settling = holdfast.CheckpointConfig(every=None, keep=None, name_template="checkpoint_{step}")
    holdfast.CheckpointManager(root, {"settled": True}, config=settling).close()
    for path in reversed(_by_iteration(root)):
        if is_store(path) or (Path(path) / MANIFEST_NAME).exists() or _is_theirs(Path(path)):
            return path
    raise CheckpointNotFound(f"{root} has no checkpoint of this run", path=root)
