"""`StateTree`: the user's state as named entries, over and over, cheaply; and the plan for filling it again.

The state is walked by the rules of ``flatten``, with these in place of plain leaves:

    module, or list of modules          its parameters, buffers and extra state   (``modules``)
    optimizer, or list of optimizers    its state and options                     (``optimizers``)
    PerRank(x)                          x, under a name that carries the rank
    anything with state_dict() and      what its state_dict() gives now; per rank if it is an `RNG`, a torch
      load_state_dict()                 ``DataLoader``, or if its key or class name has "dataloader" or "data_loader"

Guarantees: collecting copies nothing and changes nothing: no optimizer state is created, no hook of modules or
optimizers runs, gradients aren't touched. What modules and optimizers hold is remembered and revalidated by identity,
shape, dtype and placement; what is in the user's own containers is read anew each time. The order of entries is the
same as long as a collection is ``unchanged``.

Threads: one at a time, the thread that trains.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.plan.structure import PER_RANK
from holdfast.state.entries import (
    Collected,
    ObjectEntry,
    Path,
    TensorEntry,
    check_tensor,
    joined,
    same_objects,
)
from holdfast.state.flatten import check_depth, flatten, flatten_exactly, is_entered, item_path
from holdfast.state.loading import LoadBuilder, Loading, StoredInfo
from holdfast.state.modules import ModuleSource
from holdfast.state.optimizers import OptimizerSource, as_optimizers
from holdfast.state.parts_loading import plan_part
from holdfast.state.per_rank import PerRank
from holdfast.state.rng import RNG
from holdfast.state.values import LeafPart, StatefulPart

Part = ModuleSource | OptimizerSource | StatefulPart | LeafPart
AUTO_RNG_KEY = "rng"


class StateTree:
    """One rank's view of the state; made once, used for every save and load.

    ``group_ranks`` are the global ranks of the saving group in group order (None: the ranks are those of the
    default group); ``rank`` and ``world`` are this rank's place in it and its size. With ``auto_rng`` the random
    number generators are added under ``"rng"`` unless the state has that key.

    Raises `ConfigError` naming the key for a state that isn't a mapping, has no keys, or has keys that aren't strings.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        rank: int,
        world: int,
        group_ranks: Sequence[int] | None = None,
        auto_rng: bool = False,
    ) -> None:
        given: object = state
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"state must be a mapping of names to values, not {type(given).__name__}; wrap it: {{'model': ...}}",
                field="state",
            )
        if not state:
            raise ConfigError("state is empty: there is nothing to save or load", field="state")
        for key in given:
            if not isinstance(key, str) or not key:
                raise ConfigError(f"state has the key {key!r}: top-level keys are non-empty strings", field=repr(key))
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} is not one of {world} ranks", field="rank")
        self.rank = rank
        self.world = world
        self.group_ranks = tuple(group_ranks) if group_ranks is not None else tuple(range(world))
        self._state = state
        self._rng = RNG() if auto_rng else None
        self._sources: dict[Path, ModuleSource | OptimizerSource] = {}
        self._signature: tuple[Any, ...] | None = None
        self._static: tuple[TensorEntry, ...] = ()
        self._static_order: tuple[Path, ...] = ()
        self._described: list[tuple[Any, ...]] | None = None
        self._modules_only = False
        self._fingerprint = 0
        self._stale = True

    def modules_only(self) -> StateTree:
        """A tree of the same state that sees only its modules: for saves and loads of the model and nothing else.

        Raises `ConfigError` if the state has no module.
        """
        tree = StateTree(self._state, rank=self.rank, world=self.world, group_ranks=self.group_ranks)
        tree._modules_only = True
        if not tree.has_modules:
            raise ConfigError("the state has no module: there is no model to save or load", field="state")
        return tree

    @property
    def has_modules(self) -> bool:
        """Whether anything in the state is a module, or a list of them."""
        return any(isinstance(part, ModuleSource) for part in self._parts())

    def module_tensors(self) -> frozenset[str]:
        """Names of the tensors that modules held when the state was collected last."""
        sources = (source for source in self._sources.values() if isinstance(source, ModuleSource))
        return frozenset(entry.name for source in sources for entry in source.tensors)

    # collecting ----------------------------------------------------------------------------------------------

    def collect(self) -> Collected:
        """References to everything the state holds now; returns at once.

        Raises `ConfigError`, naming the key, for what can't be stored and for names given twice.
        """
        with gc_paused():
            return self._collect()

    def _collect(self) -> Collected:
        parts = self._refresh()
        static, described, stands = self._static, self._described, not self._stale
        # Until this has gone through: a collection that raises half way must not take a change with it.
        self._stale = True
        if not stands:
            static = tuple(
                entry for part in parts if isinstance(part, ModuleSource | OptimizerSource) for entry in part.tensors
            )
            # A second walk may well find the same: optimizer state that is nested is walked every time.
            described = list(map(_describe, static))
            stands = described == self._described and _same_tensors(static, self._static)
        sink = _Sink()
        for part in parts:
            _emit_values(part, sink)
        tensors = static + tuple(sink.tensors) if sink.tensors else static
        signature = (list(map(_describe, sink.tensors)), [entry.name for entry in sink.objects])
        unchanged = stands and signature == self._signature
        if not unchanged:
            _check_names(tensors, sink.objects)
            self._fingerprint += 1
            self._signature = signature
        self._static, self._described, self._stale = static, described, False
        return Collected(tensors, tuple(sink.objects), unchanged, self._fingerprint, self.group_ranks, self.rank)

    def _refresh(self) -> list[Part]:
        """All parts of the state, modules and optimizers brought up to date; notes in `_stale` if those had changed."""
        was_stale, self._stale = self._stale, True
        parts = list(self._parts())
        modules = [part for part in parts if isinstance(part, ModuleSource)]
        optimizers = [part for part in parts if isinstance(part, OptimizerSource)]
        sources: list[ModuleSource | OptimizerSource] = [*modules, *optimizers]
        order = tuple(source.path for source in sources)
        # Sources are made anew when the object under a path is another one: an unseen source never "stands".
        self._sources = {source.path: source for source in sources}
        modules_unchanged = order == self._static_order
        for module in modules:
            modules_unchanged &= module.refresh()
        unchanged = modules_unchanged
        for optimizer in optimizers:
            unchanged &= optimizer.refresh(modules, modules_unchanged=modules_unchanged)
        self._static_order = order
        self._stale = was_stale or not unchanged
        return parts

    def _parts(self) -> Iterator[Part]:
        for key, value in self._state.items():
            for part in self._walk(item_path((), key), value, holder=self._state, key=key):
                if isinstance(part, ModuleSource) or not self._modules_only:
                    yield part
        if self._rng is not None and AUTO_RNG_KEY not in self._state:
            yield StatefulPart((AUTO_RNG_KEY, PER_RANK), self._rng, optional=True)

    def _walk(self, path: Path, value: Any, *, holder: Any, key: Any) -> Iterator[Part]:
        check_depth(path)
        if isinstance(value, torch.Tensor):
            yield LeafPart(path, holder, key, value)
        elif isinstance(value, PerRank):
            inside = path if PER_RANK in path else (*path, PER_RANK)
            yield from self._walk(inside, value.value, holder=value, key=None)
        elif (modules := _as_modules(value)) is not None:
            yield self._module_source(path, modules, staged=not isinstance(value, nn.Module))
        elif (optimizers := as_optimizers(value)) is not None:
            yield self._optimizer_source(path, optimizers)
        elif _is_stateful(value):
            own = PER_RANK not in path and _is_rank_own(path, value)
            yield StatefulPart((*path, PER_RANK) if own else path, value)
        elif isinstance(value, DataLoader):
            name = joined(path)
            raise ConfigError(
                f"{name}: a {type(value).__name__} without state_dict() has no state to save; use torchdata's "
                "StatefulDataLoader, or leave it out",
                field=name,
            )
        elif isinstance(value, Mapping) and value:
            for inner_key, inner in value.items():
                yield from self._walk(item_path(path, inner_key), inner, holder=value, key=inner_key)
        elif isinstance(value, list) and is_entered(value, _is_live):
            for index, inner in enumerate(value):
                yield from self._walk((*path, index), inner, holder=value, key=index)
        else:
            yield LeafPart(path, holder, key, value)

    def _module_source(self, path: Path, modules: tuple[nn.Module, ...], *, staged: bool) -> ModuleSource:
        known = self._sources.get(path)
        if isinstance(known, ModuleSource) and known.staged == staged and same_objects(known.modules, modules):
            return known
        return ModuleSource(path, modules, staged=staged)

    def _optimizer_source(self, path: Path, optimizers: tuple[Optimizer, ...]) -> OptimizerSource:
        known = self._sources.get(path)
        if isinstance(known, OptimizerSource) and same_objects(known.optimizers, optimizers):
            return known
        return OptimizerSource(path, optimizers)

    # what updates change -------------------------------------------------------------------------------------

    def update_targets(self, collected: Collected) -> frozenset[int]:
        """``id`` of every tensor whose update may change a lazily staged one.

        These themselves, and the parameters of the state's optimizers, which may be in no module of the state: a step
        of an optimizer that holds none of all these needn't wait.
        """
        lazy = {id(entry.tensor) for entry in collected.tensors if entry.lazy}
        for source in self._sources.values():
            if isinstance(source, OptimizerSource):
                lazy.update(map(id, source.parameters))
        return frozenset(lazy)

    # loading -------------------------------------------------------------------------------------------------

    def destinations(
        self,
        stored_tensors: Mapping[str, StoredInfo],
        stored_objects: Collection[str],
        stored_paths: Mapping[str, Path],
        *,
        stored_world: int | None = None,
        exclude: Collection[str] = (),
        model_only: bool = False,
    ) -> Loading:
        """What of a checkpoint this rank's state wants, where it goes, and what doesn't fit; changes nothing yet.

        ``stored_paths`` may lack names (a foreign writer noted no paths). ``stored_world`` is the number of ranks
        that saved (None: as many as per-rank names say). Top-level keys in ``exclude``, and with ``model_only`` all
        that aren't modules, are neither wanted nor unexpected; in a state without modules ``model_only`` means nothing.
        """
        parts = self._refresh()
        model_only = model_only and any(isinstance(part, ModuleSource) for part in parts)
        builder = LoadBuilder(
            stored_tensors, stored_objects, stored_paths, rank=self.rank, world=self.world, stored_world=stored_world
        )
        for part in parts:
            top = str(part.path[0])
            builder.know_key(top)
            if top in exclude or (model_only and not isinstance(part, ModuleSource)):
                builder.excuse(top)
                continue
            plan_part(builder, part)
        for key in exclude:
            builder.excuse(key)
        return builder.build()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without this, making a hundred thousand entries sets off collections that take as long as the work itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Sink:
    """Collects leaves as entries."""

    def __init__(self) -> None:
        self.tensors: list[TensorEntry] = []
        self.objects: list[ObjectEntry] = []

    def __call__(self, path: Path, value: Any) -> None:
        name = joined(path)
        if isinstance(value, torch.Tensor):
            check_tensor(name, value)
            self.tensors.append(TensorEntry(name, path, value, lazy=False))
        else:
            self.objects.append(ObjectEntry(name, path, value))


def _emit_values(part: Part, sink: _Sink) -> None:
    """What isn't remembered from one collection to the next: plain values, options, what objects say of themselves."""
    if isinstance(part, LeafPart):
        if not isinstance(part.value, Mapping):
            sink(part.path, part.value)
    elif isinstance(part, StatefulPart):
        flatten_exactly(part.path, part.stateful.state_dict(), sink)
    elif isinstance(part, ModuleSource):
        for path, module in part.extra_states:
            flatten_exactly(path, module.get_extra_state(), sink)
    else:
        sink.objects += [*part.objects(), *part.members()]
        for path, option in part.options():
            flatten(path, option, sink)


def _describe(entry: TensorEntry) -> tuple[Any, ...]:
    tensor = entry.tensor
    if compat.is_dtensor(tensor):
        return entry.name, tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return entry.name, tensor.shape, tensor.dtype, tensor.device


def _same_tensors(left: Sequence[TensorEntry], right: Sequence[TensorEntry]) -> bool:
    return same_objects([entry.tensor for entry in left], [entry.tensor for entry in right])


def _check_names(tensors: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> None:
    seen: set[str] = set()
    for name in (entry.name for group in (tensors, objects) for entry in group):
        if name in seen:
            raise ConfigError(f"two values of the state are both named {name!r}; rename a key", field=name)
        seen.add(name)


def _as_modules(value: object) -> tuple[nn.Module, ...] | None:
    if isinstance(value, nn.Module):
        return (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, nn.Module) for item in value):
        return tuple(value)
    return None


def _is_stateful(value: object) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _is_live(value: object) -> bool:
    return isinstance(value, (nn.Module, Optimizer, PerRank)) or _is_stateful(value)


def _is_rank_own(path: Path, value: object) -> bool:
    if isinstance(value, (RNG, DataLoader)):
        return True
    words = f"{path[-1]} {type(value).__name__}".lower()
    return "dataloader" in words or "data_loader" in words
