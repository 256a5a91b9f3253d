"""The seam of XTuner's `TrainEngine`, filled by Holdfast: what its trainers call to save, load and export.

    class Engine(TrainEngineMixin, xtuner.v1.engine.TrainEngine): ...

    training thread    async_save_dcp, async_save_hf: references to the state; both return a `concurrent.futures.Future`
    optimizer.step     waits until the state is copied (a hook does that)
    other threads      write, publish, then the future ends and its callbacks run

Guarantees: saving changes no state and uses no process group of training. A directory is visible when it is whole; one
that is there already is replaced as a whole, so a run may come by the same step again. Every future ends, alike on all
ranks, within ``save_timeout`` or ``export_timeout`` seconds, in its path or in a named error.
Assumes: every rank makes the same calls in the same order, on the thread that trains.
Does not: need XTuner. Its trainer keeps the record and deletes old checkpoints, or `TrainerCheckpoints` does.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import holdfast
from holdfast.errors import CallbackFailed, ConfigError
from holdfast.integrations.xtuner.hf_layout import hf_key_map, persistent_options
from holdfast.validation import checked_path, is_store

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from holdfast.loader.checkpoint import Checkpoint
    from holdfast.saver.handle import SaveHandle

Files = Mapping[str, bytes | os.PathLike[str]]
PathLike = str | os.PathLike[str]
_RESERVED: Final = ("model", "optimizer", "rng")


class TrainEngineMixin:
    """Saves and loads the ``model`` and ``optimizer`` of the class that it is mixed into.

    Attributes:
        extra_state: more to save with the optimizer, by name, as for `holdfast.save`; what each rank has for itself
            goes in `holdfast.PerRank`. It is loaded where the optimizer's states are.
        save_timeout, export_timeout: seconds for one save, load, or export.
    """

    model: nn.Module
    optimizer: Optimizer
    extra_state: Mapping[str, Any] = MappingProxyType({})
    save_timeout: float = 600.0
    export_timeout: float = 7200.0
    _in_flight: tuple[SaveHandle, ...] = ()
    _callback_errors: deque[CallbackFailed] | None = None

    # Checkpoints. ------------------------------------------------------------------------------------------------

    def save_dcp(
        self,
        weights_dir: PathLike | None = None,
        save_optimizer: bool = True,  # noqa: FBT001, FBT002 - XTuner's signature
        *,
        model_dir: PathLike | None = None,
        optimizer_dir: PathLike | None = None,
        files: Files | None = None,
    ) -> None:
        """Save to ``weights_dir``; returns when it is published, durable and visible to all ranks.

        save_optimizer: also the optimizer, the random states of each rank, and ``extra_state``. files: small files to
        store with it, see `holdfast.save`. Frozen parameters are left out where ``model_cfg.dcp_ignore_frozen_params``
        is set, as XTuner does by default.
        model_dir, optimizer_dir: instead of ``weights_dir``, two checkpoints as older versions of XTuner read them.
        Raises as `holdfast.save`, the same on every rank.
        """
        self._raise_callback_error()
        if weights_dir is None:
            self._save_split(model_dir, optimizer_dir)
            return
        _refuse_both(model_dir, optimizer_dir)
        holdfast.save(
            self._state(save_optimizer=save_optimizer),
            weights_dir,
            files=files,
            timeout=self.save_timeout,
            overwrite=True,
        )

    def async_save_dcp(
        self,
        weights_dir: PathLike,
        save_optimizer: bool = True,  # noqa: FBT001, FBT002 - XTuner's signature
        *,
        files: Files | None = None,
    ) -> Future[Path]:
        """Start `save_dcp` and return its future, whose result is ``weights_dir`` once that is published.

        The next optimizer step waits until everything is copied; call `before_update` before any other change. Raises
        `ConfigError` for what can't be saved; later failures end in the future. What a callback of an earlier future
        raised is a `CallbackFailed` here, on its rank, and in the other methods that save.
        """
        self._raise_callback_error()
        handle = holdfast.async_save(
            self._state(save_optimizer=save_optimizer),
            weights_dir,
            files=files,
            timeout=self.save_timeout,
            overwrite=True,
        )
        return self._future_of(handle)

    def load_dcp(
        self,
        weights_dir: PathLike | None = None,
        load_states: bool = True,  # noqa: FBT001, FBT002 - XTuner's signature
        load_args: bool = True,  # noqa: FBT001, FBT002 - XTuner's signature
        *,
        model_dir: PathLike | None = None,
        optimizer_dir: PathLike | None = None,
    ) -> Checkpoint:
        """Fill model and optimizer in place from what this class or XTuner saved; on any number of ranks.

        weights_dir: where there is none, the ``model/`` and ``optimizer/`` of an older XTuner beside it are loaded.
        load_states: the optimizer's state, each rank's random states, and ``extra_state``. load_args: the options of
        its groups (``lr`` and so on). If the checkpoint has no optimizer, the model alone is loaded, as XTuner says.
        Raises `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`, and as `holdfast.load`.
        """
        self.before_update()
        source = _source(weights_dir, model_dir, optimizer_dir)
        state = self._state(save_optimizer=True)
        checkpoint = holdfast.load(state, source, include=["model"], timeout=self.save_timeout)
        stored = {name.partition(".")[0] for name in (*checkpoint.tensors, *checkpoint.objects)}
        if not (load_states or load_args) or "optimizer" not in stored or (model_dir and not optimizer_dir):
            return checkpoint
        with _Options(self.optimizer, kept=not load_args):
            holdfast.load(state, source, include=["optimizer"], timeout=self.save_timeout)
        if not load_states:
            self.optimizer.state.clear()
            return checkpoint
        # What XTuner wrote has neither; what this class wrote has all of it, or is not what is loaded here.
        more = [
            name for name in state if name not in ("model", "optimizer") and (name in stored or checkpoint.manifest)
        ]
        if more:
            holdfast.load(state, source, include=more, timeout=self.save_timeout)
        return checkpoint

    # Exports. ----------------------------------------------------------------------------------------------------

    def save_hf(
        self,
        hf_dir: PathLike,
        save_dtype: torch.dtype = torch.bfloat16,
        *,
        tokenizer: Any = None,
    ) -> None:
        """Export the model to the Hugging Face directory ``hf_dir``; returns when it is published and durable.

        save_dtype: bfloat16, or float8_e4m3fn with scales of blocks. tokenizer: saved beside the weights.
        """
        self._raise_callback_error()
        options = {**self._export_options(), "dtype": save_dtype, "tokenizer": tokenizer}
        holdfast.export_hf({"model": self.model}, hf_dir, **options, timeout=self.export_timeout, overwrite=True)

    def async_save_hf(
        self,
        hf_dir: PathLike,
        save_dtype: torch.dtype = torch.bfloat16,
        *,
        tokenizer: Any = None,
    ) -> Future[Path]:
        """Start `save_hf` and return its future, whose result is ``hf_dir`` once that is published.

        Nothing is gathered or unsharded; the next optimizer step waits until the weights are copied.
        """
        self._raise_callback_error()
        options = {**self._export_options(), "dtype": save_dtype, "tokenizer": tokenizer}
        handle = holdfast.async_export_hf(
            {"model": self.model}, hf_dir, **options, timeout=self.export_timeout, overwrite=True
        )
        return self._future_of(handle)

    def hf_options(self) -> Mapping[str, Any]:
        """Return options of `holdfast.export_hf` that replace what is taken from the model (assets, key_map, …)."""
        return {}

    # Changes by hand. --------------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Wait until everything that is being saved or exported is copied, and the state may be changed by hand."""
        for handle in self._handles():
            handle.wait_staged()

    def put_model_to_device(self, device: torch.device | str) -> Any:
        """Move the model, as XTuner does for rollouts, once what is in flight is copied."""
        self.before_update()
        return super().put_model_to_device(device)  # type: ignore[misc]

    def put_optimizer_to_device(self, device: torch.device | str) -> Any:
        """Move the optimizer's state, as XTuner does for rollouts, once what is in flight is copied."""
        self.before_update()
        return super().put_optimizer_to_device(device)  # type: ignore[misc]

    def from_hf(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model from a Hugging Face directory, as XTuner does, once what is in flight is copied."""
        self.before_update()
        return super().from_hf(*args, **kwargs)  # type: ignore[misc]

    def destroy_async_checkpoint_pg(self) -> None:
        """Do nothing: there is no process group of its own to destroy."""

    # Internal. ---------------------------------------------------------------------------------------------------

    def _state(self, *, save_optimizer: bool) -> dict[str, Any]:
        config = getattr(self, "model_cfg", None)
        model = holdfast.TrainableOnly(self.model) if getattr(config, "dcp_ignore_frozen_params", False) else self.model
        if not save_optimizer:
            return {"model": model}
        taken = [name for name in _RESERVED if name in self.extra_state]
        if taken:
            raise ConfigError(f"extra_state: {taken[0]!r} is the engine's own; name it otherwise", field="extra_state")
        return {"model": model, "optimizer": self.optimizer, "rng": holdfast.RNG(), **self.extra_state}

    def _save_split(self, model_dir: PathLike | None, optimizer_dir: PathLike | None) -> None:
        if model_dir is None:
            raise ConfigError("save_dcp needs weights_dir, or model_dir for the older layout", field="weights_dir")
        config = getattr(self, "model_cfg", None)
        options = StateDictOptions(ignore_frozen_params=getattr(config, "dcp_ignore_frozen_params", False))
        named = get_model_state_dict(self.model, options=options)
        holdfast.save(named, model_dir, timeout=self.save_timeout, overwrite=True)
        if optimizer_dir is None:
            return
        if not self.optimizer.state:  # torch would make it, by a step
            raise ConfigError(
                "the older layout stores an optimizer that has made a step; leave optimizer_dir out before the first",
                field="optimizer_dir",
            )
        stated = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        holdfast.save(stated, optimizer_dir, timeout=self.save_timeout, overwrite=True)

    def _export_options(self) -> dict[str, Any]:
        return {**persistent_options(self.model), "key_map": hf_key_map(self.model), **self.hf_options()}

    def _raise_callback_error(self) -> None:
        """Raise what a callback of an earlier future raised, once."""
        if self._callback_errors:
            raise self._callback_errors.popleft()

    def _handles(self) -> tuple[SaveHandle, ...]:
        self._in_flight = tuple(handle for handle in self._in_flight if not handle.done())
        return self._in_flight

    def _future_of(self, handle: SaveHandle) -> Future[Path]:
        """Return a future of its own: `concurrent.futures.wait` wants no look-alike."""
        errors = self._callback_errors = self._callback_errors if self._callback_errors is not None else deque()
        path: Any = handle.path if is_store(handle.path) else Path(handle.path)
        future = TellingFuture(lambda error: errors.append(_callback_failed(path, error)))

        def ended(done: SaveHandle) -> None:
            error = done.exception(0.0)
            if error is None:
                future.set_result(path)
            else:
                future.set_exception(error)

        self._in_flight = (*self._handles(), handle)
        handle.add_done_callback(ended)
        return future


class TellingFuture(Future[Path]):
    """A running future that gives what its callbacks raise to ``failed``; `concurrent.futures` would only log it."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._failed = failed
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[Path]], object]) -> None:
        """Call ``fn`` with the future once it has ended; if it has, at once."""

        def called(future: Future[Path]) -> None:
            try:
                fn(future)
            except Exception as error:
                self._failed(error)
                raise

        super().add_done_callback(called)


class TrainEngine(TrainEngineMixin):
    """The seam for a loop without XTuner."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, extra_state: Mapping[str, Any] | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        if extra_state is not None:
            self.extra_state = extra_state

    def put_model_to_device(self, device: torch.device | str) -> bool:
        """Move the model, once what is in flight is copied."""
        self.before_update()
        self.model.to(device)
        return True

    def put_optimizer_to_device(self, device: torch.device | str) -> bool:
        """Move the optimizer's state, once what is in flight is copied; False if it has none."""
        self.before_update()
        for state in self.optimizer.state.values():
            for key, value in list(_tensors_of(state)):
                state[key] = value.to(device)
        return bool(self.optimizer.state)

    def from_hf(self, hf_path: PathLike, strict: bool = False) -> Checkpoint:  # noqa: FBT001, FBT002
        """Fill the model from a Hugging Face directory, once what is in flight is copied."""
        self.before_update()
        model = {"model": self.model}
        return holdfast.load(model, hf_path, strict=strict, key_map=hf_key_map(self.model), timeout=self.export_timeout)


class _Options:
    """Puts the options of an optimizer's groups back after a load, if they are ``kept``."""

    def __init__(self, optimizer: Optimizer, *, kept: bool) -> None:
        self._optimizer, self._kept = optimizer, kept

    def __enter__(self) -> None:
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups if self._kept else []
        self._before = [{name: copy.deepcopy(group[name]) for name in group if name != "params"} for group in groups]

    def __exit__(self, *_: object) -> None:
        for group, before in zip(self._optimizer.param_groups, self._before, strict=False):
            for name in [name for name in group if name != "params" and name not in before]:
                del group[name]
            for name, value in before.items():
                if isinstance(now := group.get(name), torch.Tensor):
                    now.copy_(value)  # others may refer to it
                else:
                    group[name] = value


def _callback_failed(path: Path | str, error: Exception) -> CallbackFailed:
    failed = CallbackFailed(
        f"a callback of the future of {path} raised {type(error).__name__}: {error}; what was saved or exported there "
        "stands as its future says",
        checkpoint=str(path),
    )
    failed.__cause__ = error
    return failed


def _tensors_of(state: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    if isinstance(state, dict):
        yield from ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))


def _refuse_both(*others: PathLike | None) -> None:
    if any(other is not None for other in others):
        raise ConfigError("weights_dir is given, and model_dir or optimizer_dir: choose a layout", field="model_dir")


def _source(weights_dir: PathLike | None, model_dir: PathLike | None, optimizer_dir: PathLike | None) -> PathLike:
    """Return what to load: a checkpoint, or the parent of an older XTuner's two directories."""
    if weights_dir is not None:
        _refuse_both(model_dir, optimizer_dir)
        place = checked_path(weights_dir, field="weights_dir")
        if is_store(place):
            return place
        path = Path(place)
        older = (path.parent / "model" / ".metadata").exists()
        return path.parent if older and not path.exists() else path
    if model_dir is None:
        raise ConfigError("load_dcp needs weights_dir, or model_dir of the older layout", field="weights_dir")
    model, optimizer = Path(model_dir).expanduser(), Path(optimizer_dir or model_dir).expanduser()
    fits = model.name == "model" and model.parent == optimizer.parent
    if not fits or (optimizer_dir is not None and optimizer.name != "optimizer"):
        raise ConfigError(
            f"the older layout is model/ and optimizer/ in one directory, not {model} and {optimizer_dir}",
            field="model_dir",
        )
    return model.parent
