"""Train with `transformers.Trainer`, and save and resume by Holdfast.

    trainer = HoldfastTrainer(model, args, train_dataset=data)      in place of    Trainer(model, args, ...)
    class MyTrainer(HoldfastTrainerMixin, Trainer): ...             for a Trainer of your own

A callback is no place for this: `on_save` comes when all is written, and resuming reads ``trainer_state.json`` before
anything else. So the mixin replaces what writes ``output_dir/checkpoint-<step>`` and what reads it:

    model, optimizer, lr_scheduler, scaler     sharded or not, under the names of stock DCP
    rng                                        of each rank; applied again after the batches of the epoch were skipped
    trainer_state.json                         an extra file: step, epoch, log, best model, state of callbacks

`TrainingArguments` decide as always: `save_strategy`, `save_steps`, `save_total_limit`, `save_only_model`,
`load_best_model_at_end`, `resume_from_checkpoint`.

Guarantees: a save holds training only until references are taken; ``checkpoint-<step>`` is there when it is whole, and
what `save_total_limit` deletes goes after that. `train` returns when all is published, or raises. What a crash left is
settled before a checkpoint is chosen, and the next older one is taken where that is damaged. Directories that the stock
Trainer wrote are resumed by it.
Assumes ``output_dir`` is on a file system that all ranks share; a `mirror` has copies on an object store.
Does not: handle what `_refuse` names, each by a `ConfigError`; write ``model.safetensors`` into checkpoints (give
``exports``, or use `holdfast.export_hf`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import SaveStrategy, sort_checkpoints
from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

import holdfast
from holdfast.catalog.root import is_checkpoint
from holdfast.errors import CheckpointCorrupt, ConfigError, HoldfastError
from holdfast.storage.local import open_storage
from holdfast.validation import checked_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.config import CheckpointConfig, HFExport
    from holdfast.manager import CheckpointManager

    _Base = Trainer
else:
    _Base = object

_log = logging.getLogger("holdfast")
_TEMPLATE: Final = "checkpoint-{step}"
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_OPEN: Final = {
    *("mode", "staging", "in_flight", "on_error", "on_suspicious", "stage_timeout", "persist_timeout"),
    *("commit_timeout", "mirror_keep", "mirror_timeout", "writers", "io_limit_bytes_per_s", "nice"),
    *("io_class", "io_level", "host_writers", "cores"),
}
"""What `checkpoint_config` may set; the rest is decided by `TrainingArguments`."""
_Told = TypeVar("_Told")


class HoldfastTrainerMixin(_Base):
    """Makes a Trainer save and resume by Holdfast; comes before it: ``class Mine(HoldfastTrainerMixin, Trainer)``.

    checkpoint_config: a `holdfast.CheckpointConfig` for how to save (``mode="sync"``, ``staging``, timeouts, writers,
    I/O limits); when to save and what to keep is up to `TrainingArguments`: other fields are a `ConfigError`. exports:
    `holdfast.HFExport`, made from the same captures: with each save whose step is a multiple of ``every``. mirror: a
    URL or directory to which checkpoints are copied, as for `holdfast.CheckpointManager`; ``output_dir`` is on a disk.

    Raises `ConfigError` for what can't be saved this way.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_config: CheckpointConfig | None = None,
        exports: Sequence[HFExport] = (),
        mirror: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._config = _checked(checkpoint_config or holdfast.CheckpointConfig())
        self._exports = exports
        self._mirror = mirror
        self._manager: CheckpointManager | None = None
        self._root = ""
        self._started: set[int] = set()
        """Steps whose save was started by this run of `train`."""
        self._is_loading = False
        _refuse_urls(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        _refuse(self)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 - the Trainer's signature
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as `Trainer.train` does; returns when what was saved is published.

        resume_from_checkpoint: True for the newest that is whole, or a directory, of Holdfast or the stock Trainer.
        With True a damaged one is passed over for the next older, with a warning.

        Raises what training raises, after saves in flight had a few seconds to end; failures of saves as ``on_error``
        of the configuration says; `CheckpointCorrupt`, `StateMismatch`; `ConfigError` for a checkpoint of a model only.
        """
        self._root = checked_directory(self._get_output_dir(trial), field="output_dir")
        found = self._candidates(resume_from_checkpoint)
        for number, path in enumerate(found):
            self._is_loading = True
            try:
                if path is not None and _is_ours(path):
                    holdfast.open(path).read_file(TRAINER_STATE_NAME)  # verified: the Trainer only parses it
                result = super().train(path, trial, ignore_keys_for_eval)
            except CheckpointCorrupt as error:
                self._end(failed=True)
                if not self._is_loading or number == len(found) - 1:
                    raise
                warnings.warn(f"{path} can't be loaded, falling back to {found[number + 1]}: {error}", stacklevel=2)
                continue
            except BaseException:
                self._end(failed=True)
                raise
            self._end()
            return result
        raise AssertionError("the loop above returns or raises")

    def before_update(self) -> None:
        """Wait until weights may be changed by hand; as `CheckpointManager.before_update`."""
        if self._manager is not None:
            self._manager.before_update()

    # Resuming. ---------------------------------------------------------------------------------------------------

    def _candidates(self, asked: Any) -> Sequence[str | None]:
        """Return what to resume from, best first; the same on every rank. [None] for a run from nothing."""
        if not asked:
            self._tell(lambda: self._refuse_strangers(0))
            return [None]
        settled = holdfast.CheckpointManager(  # publishes or removes what a crash left
            self._root,
            {"settled": True},
            config=dataclasses.replace(self._config, every=None, keep=None, name_template=_TEMPLATE),
        )
        try:
            return self._tell(lambda: self._choose(asked, settled))
        finally:
            settled.close()

    def _choose(self, asked: Any, settled: CheckpointManager) -> list[str]:
        if asked is not True:
            path = os.fspath(asked)
            if "://" in path:
                raise ConfigError(
                    f"{path}: the Trainer resumes from directories; copy it to {self._root}, and resume from there",
                    field="resume_from_checkpoint",
                )
            if _is_ours(path) and _is_model_only(path):
                raise ConfigError(
                    f"{path} was saved with save_only_model: it has no optimizer to resume with; load the model by "
                    "holdfast.load and train from there",
                    field="resume_from_checkpoint",
                )
            self._refuse_strangers(_step_of(path) if self._is_here(path) else 0)
            return [path]
        newest = settled.latest()
        ours = sorted(settled.steps(), key=lambda step: (step == newest, step), reverse=True)
        paths = [self._path_of(step) for step in ours]
        found = [path for path in paths if not _is_model_only(path)]
        strangers = [path for _, path in sorted(_strangers(self._root), reverse=True)]
        if strangers and (not found or _step_of(strangers[0]) > _step_of(found[0])):
            found = strangers + found
        if not found:
            others = "; those that are there were saved with save_only_model" if paths else ""
            raise ValueError(f"No valid checkpoint found in output directory ({self._root}){others}")
        self._refuse_strangers(_step_of(found[0]))
        return found

    def _refuse_strangers(self, step: int) -> None:
        """Raise `ConfigError` if a save after ``step`` would meet a directory that is not Holdfast's."""
        met = [path for number, path in _strangers(self._root) if number > step]
        if met and self.args.save_strategy != SaveStrategy.NO:
            raise ConfigError(
                f"{', '.join(met)}: of the stock Trainer, and in the way of this run's checkpoints; resume from the "
                "newest, move them away, or choose another output_dir",
                field="output_dir",
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        holdfast.load({"model": _model_of(self.model if model is None else model)}, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = {"model": _model_of(self.model), **self._other_state()}  # the model names the optimizer's parameters
        holdfast.load(state, checkpoint, exclude=["model"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        holdfast.load({"rng": holdfast.RNG()}, checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not _is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
        holdfast.load({"model": _model_of(self.model)}, best)

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._end()  # another try, with another batch size
        prepared = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if self.args.save_strategy != SaveStrategy.NO:
            self._begin(resume_from_checkpoint)
        self._is_loading = False
        return prepared

    # Saving. -----------------------------------------------------------------------------------------------------

    def _begin(self, resumed: str | None) -> CheckpointManager:
        """Make the manager that saves what is prepared now, as the run that goes on from ``resumed``."""
        state = {"model": _model_of(self.model), **({} if self.args.save_only_model else self._other_state())}
        config = dataclasses.replace(
            self._config, every=1, keep=None, name_template=_TEMPLATE, exclude_from_loading=(*state, "rng")
        )
        manager = holdfast.CheckpointManager(
            self._root, state, config=config, exports=self._exports, mirror=self._mirror
        )
        self._manager = manager
        if resumed is not None and self._is_here(resumed) and _is_ours(resumed):
            manager.restore(_step_of(resumed))  # all is loaded: it learns where the run goes on
        else:
            manager.start_over()
        return manager

    def _other_state(self) -> dict[str, Any]:
        optimizer = self.optimizer
        state: dict[str, Any] = {
            "optimizer": optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
            "lr_scheduler": self.lr_scheduler,
        }
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002 - the Trainer's signature
        if trial is None and self.hp_search_backend is None:
            self.store_flos()
        step = self.state.global_step
        if step in self._started:
            _log.info("step %d is being saved already", step)
            return
        manager = self._manager or self._begin(None)
        self._note_best(step)
        is_first = self.is_world_process_zero()
        handles = manager.step(
            step, self._metrics(step), files={TRAINER_STATE_NAME: self._trainer_state()} if is_first else None
        )
        self._started.add(step)
        limit = self.args.save_total_limit
        if handles and is_first and limit is not None and limit > 0:
            root, spared = self._root, [self._path_of(step), self.state.best_model_checkpoint or ""]

            def published(handle: Any) -> None:
                if handle.exception() is None:
                    _rotate(root, limit, spared)

            handles[0].add_done_callback(published)

    def _note_best(self, step: int) -> None:
        best = self.state.best_global_step
        kinds = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        if best and self.args.save_strategy in kinds:
            path = self._path_of(best)
            if best == step or best in self._started or os.path.isdir(path):
                self.state.best_model_checkpoint = path

    def _metrics(self, step: int) -> dict[str, float]:
        """Return what was logged at ``step``: loss, metrics of an evaluation."""
        rows: list[dict[str, Any]] = [row for row in self.state.log_history if row.get("step") == step]
        return {
            name: float(value)
            for row in rows
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "epoch")
        }

    def _trainer_state(self) -> bytes:
        callbacks = [*self.callback_handler.callbacks, self.control]
        stateful: list[Any] = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        return (json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n").encode()

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.before_update()  # with fp16_full_eval the model is cast
        return super()._evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._manager is not None:
            self._manager.wait()  # the best model may be in flight
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _end(self, *, failed: bool = False) -> None:
        manager, self._manager = self._manager, None
        self._started = set()
        if manager is not None:
            manager.close(failed=failed)

    def _path_of(self, step: int) -> str:
        return os.path.join(self._root, _TEMPLATE.format(step=step))

    def _is_here(self, path: str) -> bool:
        parent, name = os.path.split(os.path.realpath(path))
        return parent == os.path.realpath(self._root) and _NAME.fullmatch(name) is not None

    def _tell(self, decide: Callable[[], _Told]) -> _Told:
        """Return rank 0's decision, or raise its error, on every rank."""
        told: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                told[0] = decide()
            except Exception as error:  # noqa: BLE001 - raised below, on every rank
                told[1] = error
        if self.args.world_size > 1:
            broadcast_object_list(told)
        if told[1] is not None:
            raise told[1]
        decision: _Told = told[0]
        return decision


class HoldfastTrainer(HoldfastTrainerMixin, Trainer):
    """A `transformers.Trainer` that saves and resumes by Holdfast; see `HoldfastTrainerMixin` for its arguments."""


def _checked(config: CheckpointConfig) -> CheckpointConfig:
    """Raise `ConfigError` for a field that `TrainingArguments` decide."""
    usual = holdfast.CheckpointConfig()
    for field in dataclasses.fields(config):
        if field.name not in _OPEN and getattr(config, field.name) != getattr(usual, field.name):
            raise ConfigError(
                f"checkpoint_config.{field.name} is not for a Trainer: TrainingArguments say when to save and what to "
                f"keep and load; leave it out. It may set {', '.join(sorted(_OPEN))}",
                field=field.name,
            )
    return config


def _refuse_urls(args: Any) -> None:
    """Raise `ConfigError` for an ``output_dir`` that is a URL: the Trainer would make a directory called like it."""
    place = str(getattr(args, "output_dir", None) or "")
    if "://" in place:
        raise ConfigError(
            f"output_dir: {place!r} is a URL, and the Trainer keeps files there by itself: give a directory, "
            "and with mirror= the URL to which checkpoints are copied",
            field="output_dir",
        )
    if place:
        checked_directory(place, field="output_dir")


def _refuse(trainer: Trainer) -> None:
    """Raise `ConfigError` for what can't be saved, or not as asked."""
    args, plugin = trainer.args, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    for found, field, why in (
        (trainer.is_deepspeed_enabled, "deepspeed", "it keeps model and optimizer itself; use the stock Trainer"),
        (is_torch_xla_available(), "xla", "states on XLA devices can't be saved; use the stock Trainer"),
        (is_sagemaker_mp_enabled(), "sagemaker", "SageMaker's model parallel keeps its own; use the stock Trainer"),
        (
            plugin is not None and getattr(plugin, "fsdp_version", 1) == 1,
            "fsdp_config",
            'FSDP 1 flattens parameters; set "version": 2 in fsdp_config',
        ),
        (args.save_on_each_node, "save_on_each_node", "one checkpoint is written by all nodes; leave it out"),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "enable_jit_checkpoint",
            "it begins by making the checkpoint's directory, which must not be there before it is whole; leave it out",
        ),
        (
            args.push_to_hub and str(args.hub_strategy) not in ("end", "HubStrategy.END"),
            "hub_strategy",
            'checkpoints have no files for the Hub; push the model at the end: hub_strategy="end"',
        ),
    ):
        if found:
            raise ConfigError(f"{field}: {why}", field=field)


def _model_of(model: Any) -> Any:
    """Return what is saved of ``model``: the adapter alone where PEFT has trained one, as the Trainer does."""
    adapters = getattr(model, "peft_config", None)
    return holdfast.TrainableOnly(model) if isinstance(adapters, dict) and len(adapters) == 1 else model


def _is_ours(path: str | os.PathLike[str]) -> bool:
    root, name = os.path.split(os.path.abspath(path))
    return os.path.isdir(path) and is_checkpoint(open_storage(root), name)


def _is_model_only(path: str) -> bool:
    try:
        return not any(name.startswith("lr_scheduler") for name in holdfast.open(path).objects)
    except CheckpointCorrupt:
        return False  # loading it will tell


def _step_of(path: str) -> int:
    found = _NAME.fullmatch(os.path.basename(os.path.normpath(path)))
    return int(found[1]) if found else 0


def _strangers(root: str) -> list[tuple[int, str]]:
    """Return (step, path) of the checkpoints in ``root`` that the stock Trainer wrote."""
    if not os.path.isdir(root):
        return []
    storage = open_storage(root)
    return [
        (int(found[1]), os.path.join(root, entry))
        for entry in os.listdir(root)
        if (found := _NAME.fullmatch(entry)) and not is_checkpoint(storage, entry) and os.listdir(f"{root}/{entry}")
    ]


def _rotate(root: str, limit: int, spared: Iterable[str]) -> None:
    """Delete the oldest checkpoints but ``limit``, and neither the newest nor ``spared``, as the Trainer chooses."""
    found = [path for path in sort_checkpoints(root, use_mtime=True) if _NAME.fullmatch(os.path.basename(path))]
    kept = {str(Path(path)) for path in (*spared, *found[-1:])} & set(found)
    old = [path for path in found if path not in kept]
    for path in old[: max(0, len(found) - max(limit, len(kept)))]:
        try:
            holdfast.delete(path)
        except (HoldfastError, OSError) as error:
            _log.warning("save_total_limit can't delete %s: %s", path, error)
