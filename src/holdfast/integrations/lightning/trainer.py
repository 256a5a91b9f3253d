"""Save and resume Lightning trainers by Holdfast: checkpoints are directories, under the names Lightning gives them.

    class DDP(HoldfastStrategyMixin, DDPStrategy): ...   all ranks write, sharded or not   (DDP, ModelParallel, single)
    Trainer(plugins=[HoldfastCheckpointIO()])            rank 0 writes what Lightning hands over   (DDP, single)
    HoldfastModelCheckpoint(...)                         a `ModelCheckpoint` that lets training go on while it saves
    HoldfastRandomState()                                random states for `HoldfastCheckpointIO`; the mixin has them

A checkpoint holds the dict that Lightning builds, the same for all strategies, so each resumes what another wrote:

    state_dict                      the model's tensors: whole, or each rank's shards
    optimizer_states.N.state        of optimizer N, by parameter number, as ``optimizer.state_dict()`` counts
    lightning.<key>                 everything else, one plain object a key (loops, callbacks, hyper_parameters, ...)
    tensors                         tensors of that of 64 KiB and more, or sharded
    rng, loaders                    each rank's random states and positions of stateful dataloaders (the mixin's)

Guarantees: a checkpoint is visible when it is whole. Without `HoldfastModelCheckpoint` a save returns when it is
published, as Lightning's callbacks assume. With it, a save returns when everything is copied; ``last.ckpt`` is linked,
and an older checkpoint deleted, once the newer is published, and never if that failed. A failed save is raised by
the next save, or by teardown, which waits for what is in flight. Files that Lightning wrote are loaded by Lightning.
Paths may be URLs: of `HoldfastModelCheckpoint`, ``fit(ckpt_path=...)`` and ``trainer.save_checkpoint``.
Does not: support `FSDPStrategy` (FSDP1), DeepSpeed or XLA; store objects that would need pickle to be read back
(`ConfigError` naming the key).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import OrderedDict
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final

import fsspec
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import ConfigError, StateMismatch
from holdfast.integrations.lightning.flights import TIMEOUT_S, Flights, is_there, place_of
from holdfast.storage.local import open_storage
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning.pytorch import LightningModule, Trainer

    from holdfast.loader.checkpoint import Checkpoint

_INLINE_BYTES: Final = 1 << 16
"""Tensors of loops, callbacks and the like that are smaller than this are stored inside their object."""
_APART: Final = "__holdfast_tensor__"
_REST: Final = "lightning"


# What a checkpoint holds. --------------------------------------------------------------------------------------------


def _state_of(checkpoint: Mapping[Any, Any], *, is_main: bool) -> dict[str, Any]:
    """Return what to save of the dict that Lightning has built. Plain objects are those of the main rank."""
    rest = dict(checkpoint)
    if odd := [key for key in rest if not isinstance(key, str)]:
        raise ConfigError(f"the checkpoint has the key {odd[0]!r}: keys are strings", field=repr(odd[0]))
    state: dict[str, Any] = {}
    if "state_dict" in rest:
        weights = rest.pop("state_dict")
        state["state_dict"] = dict(weights)
        rest["state_dict"] = getattr(weights, "_metadata", None)
    if "optimizer_states" in rest:
        optimizers = rest.pop("optimizer_states")
        if optimizers:
            state["optimizer_states"] = [{"state": _Keyed(one.get("state", {}))} for one in optimizers]
        rest["optimizer_states"] = [{key: one[key] for key in one if key != "state"} for one in optimizers]
    apart: dict[str, torch.Tensor] = {}
    kept = {key: (_take_apart(value, key, apart),) for key, value in rest.items()}
    if is_main:
        state[_REST] = kept
    if tensors := {name: value for name, value in apart.items() if is_main or isinstance(value, DTensor)}:
        state["tensors"] = tensors
    return state


class _Keyed:
    """State of an optimizer, whose keys stay the integers that they are: those of a plain dict become strings."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[Any, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self._state = state


def _take_apart(value: Any, name: str, apart: dict[str, torch.Tensor]) -> Any:
    """Return ``value`` with its large and sharded tensors moved to ``apart``."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and value.numel() * value.element_size() < _INLINE_BYTES:
            return value
        while name in apart:
            name += "'"
        apart[name] = value
        return {_APART: name}
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _take_apart(item, f"{name}/{key}", apart)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_take_apart(item, f"{name}/{at}", apart) for at, item in enumerate(value))
    return value


def _put_together(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Reverse `_take_apart`."""
    if type(value) is dict and len(value) == 1 and _APART in value:
        return read(value[_APART])
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _put_together(item, read)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, read) for item in value)
    return value


def _rest_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read everything but the tensors of the model and of optimizers; options of the latter are there."""
    prefix = f"{_REST}."
    rest = {
        name.removeprefix(prefix): checkpoint.objects[name] for name in checkpoint.objects if name.startswith(prefix)
    }
    if "loops" not in rest:
        raise _foreign(checkpoint)

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(f"tensors.{name}")

    return {key: _put_together(value, read) for key, (value,) in rest.items()}


def _whole(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the dict that Lightning had built: all tensors whole, in host memory."""
    found = checkpoint.state()
    if "loops" not in found.get(_REST, {}):
        raise _foreign(checkpoint)
    apart = found.get("tensors", {})
    rest = {key: _put_together(value, apart.__getitem__) for key, (value,) in found[_REST].items()}
    weights: Any = OrderedDict(found.get("state_dict", {}))
    if (metadata := rest.pop("state_dict", None)) is not None:
        weights._metadata = metadata
    whole = {**rest, "state_dict": weights}
    if "optimizer_states" in rest:
        states = found.get("optimizer_states", [])
        whole["optimizer_states"] = [one | other for one, other in zip(states, rest["optimizer_states"], strict=True)]
    return whole


def _foreign(checkpoint: Checkpoint) -> ConfigError:
    what = f"{checkpoint.path} was not saved by a Lightning trainer; holdfast.load it in a hook of your module"
    return ConfigError(what, field="ckpt_path")


def _opened(path: str) -> Checkpoint | None:
    """Open the checkpoint at ``path``; None if it is one that Lightning wrote, or none at all."""
    if is_store(path):
        root, name = os.path.split(path)
        is_ours = open_storage(root).size(name) is None  # Lightning writes one object, by fsspec
    else:
        is_ours = os.path.isdir(path) and not os.path.exists(os.path.join(path, "meta.pt"))
    return holdfast.open(path) if is_ours else None


def export_ckpt(path: str | os.PathLike[str], target: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write the checkpoint at ``path`` as the one file that Lightning would have written; returns when it is there.

    path: a directory or URL. target: a file to make or replace, or an open one (an `io.BytesIO` to hand to
    ``load_from_checkpoint``). Needs host memory for all of it. Random states are left out: Lightning has no place
    for them.
    """
    whole = _whole(holdfast.open(path))
    if isinstance(target, str | os.PathLike):
        TorchCheckpointIO().save_checkpoint(whole, os.fspath(target))
    else:
        torch.save(whole, target)
        target.seek(0)


def _step_of(checkpoint: Mapping[str, Any]) -> int | None:
    step = checkpoint.get("global_step")
    return step if type(step) is int and step >= 0 else None


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise TypeError("storage_options: Holdfast has none to pass on; leave it out")


# Random states. ------------------------------------------------------------------------------------------------------


class _RandomStates(holdfast.RNG):
    """Random states as Lightning can have them restored: loading keeps them, and they are applied when training starts.

    They are applied twice. Before dataloaders are iterated, which draws from them: at the end of an epoch that is what
    came next. And after it, if an epoch is in progress: its iterator had been made before the save.
    """

    def __init__(self) -> None:
        self._kept: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = state

    def apply(self) -> None:
        if self._kept is not None:
            super().load_state_dict(self._kept)

    def on_train_start(self, trainer: Trainer) -> None:
        progress = trainer.fit_loop.epoch_progress.current
        if progress.ready != progress.processed:
            self.apply()
        self._kept = None


class HoldfastRandomState(Callback):
    """Keep the random states of all ranks in Lightning's checkpoints, and restore them when ``fit`` resumes.

    For use with `HoldfastCheckpointIO`, which is called on rank 0 only, or with Lightning's own files; the strategy
    mixin does this by itself. Saving is collective, as Lightning asks of ``trainer.save_checkpoint``. On another number
    of ranks states are derived anew, as `holdfast.RNG` says.
    """

    def __init__(self) -> None:
        self._random = _RandomStates()
        self._is_fitting = False

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of all ranks; all of them call it."""
        state = self._random.state_dict()
        if "numpy" in state and isinstance(state["numpy"], tuple):  # lists: torch.load(weights_only=True) reads them
            state["numpy"] = tuple(item.tolist() if hasattr(item, "tolist") else item for item in state["numpy"])
        ranks: list[Any] = [state]
        if _is_distributed():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, state)
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's states, or on another number of ranks ones made of all; ``fit`` sets them."""
        ranks: Sequence[Mapping[str, Any]] = state_dict["ranks"]
        rank, world = (dist.get_rank(), dist.get_world_size()) if _is_distributed() else (0, 1)
        same = len(ranks) == world
        self._random.load_state_dict(ranks[rank] if same else self._random.reshard_state_dict(ranks, rank, world))
        if self._is_fitting:  # some strategies load after this hook, when all is set up
            self._random.apply()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Set what was loaded."""
        self._is_fitting = True
        self._random.apply()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Set what was loaded once more, if training resumes inside an epoch."""
        self._is_fitting = False
        self._random.on_train_start(trainer)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


# What Lightning is given. --------------------------------------------------------------------------------------------


class HoldfastCheckpointIO(CheckpointIO):
    """A plugin for trainers on one device or DDP: rank 0 saves what Lightning hands over, whole, to a directory.

    Strategies that shard do not use such plugins for their shards: use `HoldfastStrategyMixin`.
    """

    def __init__(self) -> None:
        self._flights = Flights()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint`` to ``path``; returns when it is published, or, from `HoldfastModelCheckpoint`, copied.

        Raises `ConfigError` naming a key that can't be stored, and as `holdfast.save`; what an earlier save failed of.
        """
        _refuse_options(storage_options)
        state = _state_of(checkpoint, is_main=True)
        self._flights.save(state, place_of(path), _step_of(checkpoint), "alone", is_main=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Return the dict that was saved to ``path``, by Holdfast or by Lightning; verified in the first case.

        map_location, weights_only: for files of Lightning's; Holdfast's are read to host memory, without pickle.
        """
        self._flights.wait()
        checkpoint = _opened(_found_at(path))
        if checkpoint is not None:
            return _whole(checkpoint)
        options = {} if map_location is None else {"map_location": map_location}
        return dict(TorchCheckpointIO().load_checkpoint(os.fspath(path), weights_only=weights_only, **options))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete ``path``, once what was saved later is published."""
        self._flights.remove(place_of(path))

    def teardown(self) -> None:
        """Wait for what is in flight; raises what failed, unless training ends by an error already."""
        self._flights.finish(failed=sys.exc_info()[0] is not None)


class _Loaders:
    """Each rank's positions of dataloaders that keep one."""

    def __init__(self, states: Sequence[Any] = ()) -> None:
        self.states = list(states)

    def state_dict(self) -> dict[str, Any]:
        return {"states": (self.states,)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (self.states,) = state["states"]

    def reshard_state_dict(self, states: list[Mapping[str, Any]], _rank: int, world: int) -> Mapping[str, Any]:
        raise ConfigError(
            f"positions of stateful dataloaders were saved in the middle of an epoch by {len(states)} ranks, and this "
            f"is a run of {world}: they can't be divided anew; resume on as many ranks, or from the end of an epoch",
            field="ckpt_path",
        )


class HoldfastStrategyMixin:
    """Put before a strategy, ``class DDP(HoldfastStrategyMixin, DDPStrategy)``: all its ranks save and load together.

    For `SingleDeviceStrategy`, `DDPStrategy` and `ModelParallelStrategy` (FSDP2, tensor parallel), where every rank
    writes and reads its own shards. Random states of each rank are saved, and restored when ``fit`` resumes.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, FSDPStrategy | DeepSpeedStrategy):
            raise ConfigError(
                f"{cls.__name__}: FSDPStrategy and DeepSpeedStrategy flatten parameters in ways of their own, and are "
                "not supported; use FSDP2: ModelParallelStrategy, with fully_shard in configure_model",
                field="strategy",
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flights = Flights()
        self._random = _RandomStates()
        self._has_failed = False

    @property
    def _me(self) -> Any:
        """Itself, with the attributes that it has as a strategy."""
        return self

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self, ModelParallelStrategy)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state: its own tensors, sharded where they are."""
        return dict(self._me.model.state_dict()) if self._is_sharded else super().lightning_module_state_dict()  # type: ignore[misc]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of ``optimizer``: its own tensors, sharded where they are."""
        if not self._is_sharded:
            return dict(super().optimizer_state(optimizer))  # type: ignore[misc]
        return dict((optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint`` to ``filepath`` (rank 0's), on all ranks; returns and raises as the plugin's does."""
        _refuse_options(storage_options)
        me = self._me
        if me._checkpoint_io is not None and type(me._checkpoint_io) is not TorchCheckpointIO:
            raise ConfigError(
                f"the trainer has the plugin {type(me._checkpoint_io).__name__}, and the strategy "
                f"{type(self).__name__}, which saves by itself: leave the plugin out",
                field="plugins",
            )
        state = _state_of(checkpoint, is_main=me.is_global_zero)
        if loaders := _loaders_in(checkpoint.get("loops", {})):
            state["loaders"] = holdfast.PerRank(_Loaders(loaders))
        state["rng"] = self._random
        path = place_of(me.broadcast(os.fspath(filepath)))
        self._flights.save(state, path, _step_of(checkpoint), None, is_main=me.is_global_zero)

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str],
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Load what is at ``checkpoint_path``, on all ranks; a file or directory of Lightning's by its own strategy.

        On one device and DDP it returns everything, and Lightning hands it out. `ModelParallelStrategy` fills model and
        optimizers here, in place, and returns the rest. Raises as `holdfast.load`.
        """
        self._flights.wait()
        path = _found_at(self._me.broadcast(os.fspath(checkpoint_path)))
        checkpoint = _opened(path)
        if checkpoint is None:
            return dict(super().load_checkpoint(path, weights_only=weights_only))  # type: ignore[misc]
        is_fitting = self._me.lightning_module.trainer.state.fn == TrainerFn.FITTING
        is_sharded = self._is_sharded
        loaded = self._load_sharded(checkpoint, with_optimizers=is_fitting) if is_sharded else _whole(checkpoint)
        if is_fitting:
            self._load_own(checkpoint, loaded.get("loops", {}))
        return loaded

    def _load_own(self, checkpoint: Checkpoint, loops: dict[str, Any]) -> None:
        """Load what is each rank's own."""
        present = {name.partition(".")[0] for name in (*checkpoint.tensors, *checkpoint.objects)}
        state: dict[str, Any] = {"rng": self._random} if "rng" in present else {}
        loaders = _Loaders()
        if "loaders" in present and _is_inside_epoch(loops):
            state["loaders"] = holdfast.PerRank(loaders)
        if state:
            holdfast.load(state, checkpoint.path, timeout=TIMEOUT_S)
        if "loaders" in state:
            loops["fit_loop"]["state_dict"]["combined_loader"] = loaders.states

    def _load_sharded(self, checkpoint: Checkpoint, *, with_optimizers: bool) -> dict[str, Any]:
        me, rest = self._me, _rest_of(checkpoint)
        rest.pop("state_dict", None)
        options = rest.pop("optimizer_states", None)
        strict = me.lightning_module.strict_loading
        weights = me.model.state_dict()
        holdfast.load({"state_dict": dict(weights)}, checkpoint.path, strict=strict, timeout=TIMEOUT_S)
        me.model.load_state_dict(weights, strict=strict)
        if not with_optimizers:
            return rest
        if options is None or len(options) != len(me.optimizers):
            raise StateMismatch(
                f"{checkpoint.path} has the state of {len(options or ())} optimizers, the trainer has "
                f"{len(me.optimizers)}; a checkpoint of weights alone can't be resumed by fit(ckpt_path=...)"
            )
        states = [_room_for(checkpoint, at, optimizer) for at, optimizer in enumerate(me.optimizers)]
        if any(states):
            state = {"optimizer_states": [{"state": one} for one in states]}
            holdfast.load(state, checkpoint.path, strict=False, timeout=TIMEOUT_S)
        for at, optimizer in enumerate(me.optimizers):
            for number, key, value in _objects_of(checkpoint, at):
                states[at].setdefault(number, {})[key] = value
            optimizer.load_state_dict({"state": states[at], **options[at]})
        return rest

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete ``filepath``, once what was saved later is published."""
        if self._me.is_global_zero:
            self._flights.remove(place_of(filepath))

    def process_dataloader(self, dataloader: object) -> object:
        """Restore random states and the sampler's epoch if training resumes: what follows makes the iterator.

        Lightning tells samplers the epoch after that; a stateful dataloader has then skipped batches of another one.
        """
        module = self._me.lightning_module
        if module is not None and module.trainer.training:
            self._random.apply()
            _set_sampler_epoch(dataloader, module.trainer.fit_loop.epoch_progress.current.processed)
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Restore random states if training resumes inside an epoch."""
        super().on_train_start()  # type: ignore[misc]
        self._random.on_train_start(self._me.lightning_module.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Note that training ends by an error: teardown raises no other."""
        self._has_failed = True
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for what is in flight; raises what failed, unless training ends by an error already."""
        failed, self._has_failed = self._has_failed, False
        try:
            self._flights.finish(failed=failed)
        finally:
            super().teardown()  # type: ignore[misc]


def _loaders_in(loops: Mapping[str, Any]) -> list[Any]:
    return list(loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader", []))


def _is_inside_epoch(loops: Mapping[str, Any]) -> bool:
    progress = loops.get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    return bool(progress.get("ready") != progress.get("processed"))


def _state_names(checkpoint_names: Mapping[str, Any], at: int) -> Iterator[tuple[str, int, str]]:
    prefix = f"optimizer_states.{at}.state."
    for name in checkpoint_names:
        number, _, key = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal():
            yield name, int(number), key


def _room_for(checkpoint: Checkpoint, at: int, optimizer: Any) -> dict[int, dict[str, torch.Tensor]]:
    """Make what the stored state of optimizer ``at`` is read into: sharded like parameters of the same shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, number, key in _state_names(checkpoint.tensors, at):
        info = checkpoint.tensors[name]
        if number >= len(parameters) or "." in key:
            raise StateMismatch(
                f"{checkpoint.path}: {name} fits none of the {len(parameters)} parameters of optimizer {at}"
            )
        like = parameters[number]
        alike = tuple(like.shape) == info.shape and info.shape
        room = torch.empty_like(like, dtype=info.dtype) if alike else torch.empty(info.shape, dtype=info.dtype)
        state.setdefault(number, {})[key] = room.detach()
    return state


def _objects_of(checkpoint: Checkpoint, at: int) -> Iterator[tuple[int, str, Any]]:
    for name, number, key in _state_names(checkpoint.objects, at):
        yield number, key, checkpoint.objects[name]


class _FoundOnStore(fsspec.AbstractFileSystem):
    """Tells Lightning of checkpoints on stores what it asks of those that ``ckpt_path="last"`` chooses from.

    Lightning asks fsspec, which knows no age of a prefix, and ``s3://`` only with s3fs installed.
    """

    protocol = "holdfast"
    cachable = False

    def exists(self, path: str, **kwargs: Any) -> bool:  # noqa: ARG002 - fsspec's signature
        return is_there(_found_at(path))

    def modified(self, path: str) -> datetime:
        manifest = holdfast.open(_found_at(path)).manifest
        assert manifest is not None
        return datetime.fromisoformat(manifest.created.replace("Z", "+00:00"))


_FOUND: Final = f"{_FoundOnStore.protocol}://"
fsspec.register_implementation(_FoundOnStore.protocol, _FoundOnStore, clobber=True)


def _found_at(path: str | os.PathLike[str]) -> str:
    """Return `place_of` what Lightning was given, or has found by `_FoundOnStore`."""
    return place_of(os.fspath(path).removeprefix(_FOUND))


class HoldfastModelCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that goes on when everything is copied; the checkpoint appears once it is whole.

    Lightning's own expects what it saved to be there: it gives the name again otherwise, and ``save_last="link"`` links
    to nothing. This one knows what is in flight. State in checkpoints is under the name of Lightning's: each resumes
    the other's. Without Holdfast's strategy or plugin it is a `ModelCheckpoint`.

    dirpath: a directory, or a URL as everywhere in Holdfast, which needs no file system of fsspec's. On a store nothing
    is linked (`ConfigError` for ``save_last="link"``), and the checkpoint that was resumed from, and those outside of
    ``dirpath``, are never deleted, as in directories. All else is `ModelCheckpoint`'s.
    """

    _waits = False

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        place = place_of(dirpath, field="dirpath") if dirpath else ""
        if not is_store(place):
            super().__init__(place or dirpath, *args, **kwargs)
            return
        super().__init__(None, *args, **kwargs)  # would ask fsspec for the store's file system
        self.dirpath = place
        self._refuse_links()

    def _refuse_links(self) -> None:
        if self.save_last == "link":
            raise ConfigError(
                f'save_last="link": {self.dirpath} is on an object store, which has no links; save_last=True saves '
                "last.ckpt as a checkpoint of its own",
                field="save_last",
            )

    def _place(self, trainer: Trainer) -> str | None:
        """Return where checkpoints go if that is on a store and Holdfast saves there; None: Lightning does it all."""
        found = str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # also of a logger, or default_root_dir
        place = place_of(found, field="dirpath") if "://" in found and _flights_of(trainer) is not None else ""
        return place if is_store(place) else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out where to save."""
        place = trainer.strategy.broadcast(self._place(trainer))
        if place is None:
            super().setup(trainer, pl_module, stage)
            return
        self.dirpath = place
        self._refuse_links()

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        place = self._place(trainer)
        if place is None:
            return set(super()._find_last_checkpoints(trainer))
        pattern = re.compile(rf"{self.CHECKPOINT_NAME_LAST}(-\d+)?.*{re.escape(self.FILE_EXTENSION)}")
        found = [f"{place}/{name}" for name in open_storage(place).list_dir("") if pattern.fullmatch(name)]
        return {path if _opened(path) is None else f"{_FOUND}{path}" for path in found if is_there(path)}

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        if not is_store(previous) or _flights_of(trainer) is None:
            return bool(super()._should_remove_checkpoint(trainer, previous, current))
        resumed = None if trainer.ckpt_path is None else _found_at(trainer.ckpt_path)
        return previous not in (current, resumed) and previous.startswith(f"{self.dirpath}/")

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the paths of `best_k_models` with their scores to ``filepath``, by default in a local ``dirpath``."""
        if filepath is None and is_store(str(self.dirpath)):
            raise ConfigError(f"to_yaml: dirpath {self.dirpath} is on an object store; name a file", field="filepath")
        super().to_yaml(filepath)

    @property
    def state_key(self) -> str:
        """Lightning's key of a `ModelCheckpoint` with these settings."""
        return str(super().state_key).replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        flights = _flights_of(trainer)
        with contextlib.nullcontext() if flights is None or self._waits else flights.asynchronous():
            super()._save_checkpoint(trainer, filepath)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, if so configured, and wait for it."""
        self._waits = True
        try:
            super().on_exception(trainer, pl_module, exception)
        finally:
            self._waits = False

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Return True, on all ranks, if ``filepath`` is there or a save to it is in flight."""
        flights = _flights_of(trainer)
        if flights is None:
            return bool(super().file_exists(filepath, trainer))
        exists = trainer.is_global_zero and flights.will_exist(place_of(filepath))
        return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        flights = _flights_of(trainer)
        if flights is None:
            ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero and place_of(filepath) != place_of(linkpath):
            flights.link(place_of(filepath), place_of(linkpath))
        trainer.strategy.barrier()


def _flights_of(trainer: Trainer) -> Flights | None:
    strategy = trainer.strategy
    if isinstance(strategy, HoldfastStrategyMixin):
        return strategy._flights
    plugin = strategy.checkpoint_io
    return plugin._flights if isinstance(plugin, HoldfastCheckpointIO) else None
