"""`StateTree`: the user's state as named entries, over and over, cheaply; and the plan for filling it again.

The state is walked by the rules of ``flatten``, with these in place of plain leaves:

    module, or list of modules          its parameters, buffers and extra state   (``modules``)
    optimizer, or list of optimizers    its state and options                     (``optimizers``)
    PerRank(x)                          x, under a name that carries the rank
    anything with state_dict() and      what its state_dict() gives now; per rank if it is an `RNG`, a torch
      load_state_dict()                 ``DataLoader``, or if its key or class name has "dataloader" or "data_loader"

Guarantees: collecting copies nothing and changes nothing: no optimizer state is created, no hook of modules or
optimizers runs, gradients aren't touched. What modules and optimizers hold is remembered and revalidated by identity,
shape, dtype and placement, and so are tensors in plain dicts and lists; all else in the user's own containers is read
anew each time. The order of entries is the
same as long as a collection is ``unchanged``.

Threads: one at a time, the thread that trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.errors import ConfigError
from holdfast.gc_pause import gc_paused
from holdfast.plan.structure import PER_RANK
from holdfast.state.containers import ContainerSource, is_remembered
from holdfast.state.entries import (
    Collected,
    Described,
    ObjectEntry,
    Path,
    TensorEntry,
    check_tensor,
    joined,
    same_objects,
)
from holdfast.state.flatten import check_depth, flatten, flatten_exactly, is_entered, item_path
from holdfast.state.loading import LoadBuilder, Loading, StoredInfo, TensorHolder
from holdfast.state.modules import ModuleSource
from holdfast.state.optimizers import OptimizerSource, as_optimizers
from holdfast.state.parts_loading import plan_part
from holdfast.state.per_rank import PerRank
from holdfast.state.rng import RNG
from holdfast.state.values import LeafPart, StatefulPart

Source = ModuleSource | OptimizerSource | ContainerSource
Part = Source | StatefulPart | LeafPart
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
        self._sources: dict[Path, Source] = {}
        self._signature: tuple[Any, ...] | None = None
        self._static: tuple[TensorEntry, ...] = ()
        self._static_order: tuple[Path, ...] = ()
        self._described: Described | None = None
        self._modules_only = False
        self._fingerprint = 0
        self._settled: tuple[TensorEntry, ...] = ()
        self._settled_number = 0
        self._settled_seen: tuple[Any, list[tuple[ContainerSource, int]]] | None = None
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

    def collect(self, *, look_closer: bool = True) -> Collected:
        """References to everything the state holds now; returns at once.

        look_closer: False for a caller that will look itself whether the tensors are still of the kinds that they were
        (shape, dtype, device, placement): ``unchanged`` then says nothing of those of remembered ones.
        Raises `ConfigError`, naming the key, for what can't be stored and for names given twice.
        """
        with gc_paused():
            return self._collect(look_closer=look_closer)

    def _collect(self, *, look_closer: bool) -> Collected:
        parts = self._refresh(look_closer=look_closer)
        static, described, stands = self._static, self._described, not self._stale
        # Until this has gone through: a collection that raises half way must not take a change with it.
        self._stale = True
        if not stands:
            static = tuple(
                entry for part in parts if isinstance(part, ModuleSource | OptimizerSource) for entry in part.tensors
            )
            # A second walk may well find the same: optimizer state that is nested is walked every time.
            described = Described.of(static)
            stands = described == self._described and same_objects(*map(_tensors_of, (static, self._static)))
            static = self._static if stands else static
        containers = [part for part in parts if isinstance(part, ContainerSource)]
        for container in containers:
            container.refresh(look_closer=look_closer)
        sink = _Sink()
        for part in parts:
            if not isinstance(part, ContainerSource):
                _emit_values(part, sink)
        tensors = static + tuple(chain(*(container.tensors for container in containers), sink.tensors))
        signature = (
            [container.described for container in containers],
            Described.of(sink.tensors),
            [entry.name for entry in sink.objects],
        )
        unchanged = stands and signature == self._signature
        if not unchanged:
            _check_names(tensors, sink.objects)
            self._fingerprint += 1
            self._signature = signature
        self._static, self._described, self._stale = static, described, False
        self._settle(containers)
        return Collected(
            tensors,
            tuple(sink.objects),
            unchanged,
            self._fingerprint,
            self.group_ranks,
            self.rank,
            self._settled,
            [*(entry for container in containers for entry in container.restless), *sink.tensors],
            self._settled_number,
        )

    def _settle(self, containers: Sequence[ContainerSource]) -> None:
        """Keep together what of eager tensors is the same from one collection to the next."""
        seen = (self._static, [(container, container.number) for container in containers])
        if self._settled_seen is None or seen[0] is not self._settled_seen[0] or seen[1] != self._settled_seen[1]:
            self._settled = tuple(
                chain(
                    (entry for entry in self._static if not entry.lazy),
                    *(container.settled for container in containers),
                )
            )
            self._settled_number += 1
            self._settled_seen = seen

    def _refresh(self, *, look_closer: bool = True) -> list[Part]:
        """All parts of the state, modules and optimizers brought up to date; notes in `_stale` if those had changed."""
        was_stale, self._stale = self._stale, True
        parts = list(self._parts())
        modules = [part for part in parts if isinstance(part, ModuleSource)]
        optimizers = [part for part in parts if isinstance(part, OptimizerSource)]
        containers = [part for part in parts if isinstance(part, ContainerSource)]
        sources: list[ModuleSource | OptimizerSource] = [*modules, *optimizers]
        order = tuple(source.path for source in sources)
        # Sources are made anew when the object under a path is another one: an unseen source never "stands".
        self._sources = {source.path: source for source in (*sources, *containers)}
        modules_unchanged = order == self._static_order
        for module in modules:
            modules_unchanged &= module.refresh(look_closer=look_closer)
        unchanged = modules_unchanged
        for optimizer in optimizers:
            unchanged &= optimizer.refresh(modules, modules_unchanged=modules_unchanged, look_closer=look_closer)
        self._static_order = order
        self._stale = was_stale or not unchanged
        return parts

    def _parts(self) -> Iterator[Part]:
        for part in self._walk_items((), self._state):
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
        elif (isinstance(value, Mapping) and value) or (isinstance(value, list) and is_entered(value, _is_live)):
            yield from self._walk_items(path, value)
        else:
            yield LeafPart(path, holder, key, value)

    def _walk_items(self, path: Path, holder: Any) -> Iterator[Part]:
        items: Iterable[tuple[Any, Any]] = enumerate(holder) if isinstance(holder, list) else holder.items()
        if is_remembered(holder) and not self._modules_only:
            known = self._sources.get(path)
            remembered = isinstance(known, ContainerSource) and known.holder is holder
            source = known if remembered else ContainerSource(path, holder)
            assert isinstance(source, ContainerSource)
            if source.look():
                items = source.others()
                if source.has_tensors:
                    yield source
        for key, value in items:
            inside = (*path, key) if isinstance(holder, list) else item_path(path, key)
            yield from self._walk(inside, value, holder=holder, key=key)

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

    def holders(self, *, exclude: Collection[str] = ()) -> list[TensorHolder]:
        """What of the state takes tensors: its modules, and plain containers, by the key that each is under.

        Top-level keys in ``exclude`` are left out; so are optimizers, and what has a ``state_dict`` of its own.
        """
        holders: dict[str, TensorHolder] = {}
        for part in _single_values(self._refresh()):
            if str(part.path[0]) in exclude:
                continue
            if isinstance(part, ModuleSource):
                key = joined(tuple(item for item in part.path if item != PER_RANK))
                named = [(str(entry.path[-1]), entry.tensor, entry.lazy) for entry in part.tensors]
                extra = [str(path[-1]) for path, _ in part.extra_states]
                holders[key] = TensorHolder(key, part.modules, named, extra)
            elif isinstance(part, LeafPart) and isinstance(part.value, torch.Tensor):
                *above, last = part.path
                key = str(above[0]) if above else ""
                holder = holders.setdefault(key, TensorHolder(key, (), [], []))
                holder.tensors.append((joined((*above[1:], last)), part.value, True))
        return list(holders.values())

    def destinations(
        self,
        stored_tensors: Mapping[str, StoredInfo],
        stored_objects: Collection[str],
        stored_paths: Mapping[str, Path],
        *,
        stored_world: int | None = None,
        exclude: Collection[str] = (),
        model_only: bool = False,
        fitted: bool = False,
        optional: Collection[str] = (),
    ) -> Loading:
        """What of a checkpoint this rank's state wants, where it goes, and what doesn't fit; changes nothing yet.

        ``stored_paths`` may lack names (a foreign writer noted no paths). ``stored_world`` is the number of ranks
        that saved (None: as many as per-rank names say). Top-level keys in ``exclude``, and with ``model_only`` all
        that aren't modules, are neither wanted nor unexpected; in a state without modules ``model_only`` means nothing.
        ``fitted``: the stored names are this state's own, not those that some stock writer may have used. What modules
        have under a name in ``optional`` keeps its value where nothing is stored.
        """
        parts = list(_single_values(self._refresh()))
        model_only = model_only and any(isinstance(part, ModuleSource) for part in parts)
        builder = LoadBuilder(
            stored_tensors,
            stored_objects,
            stored_paths,
            rank=self.rank,
            world=self.world,
            stored_world=stored_world,
            fitted=fitted,
            optional=optional,
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


def _single_values(parts: Iterable[Part]) -> Iterator[ModuleSource | OptimizerSource | StatefulPart | LeafPart]:
    for part in parts:
        if isinstance(part, ContainerSource):
            yield from part.leaves()
        else:
            yield part


def _emit_values(part: ModuleSource | OptimizerSource | StatefulPart | LeafPart, sink: _Sink) -> None:
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


def _tensors_of(entries: Sequence[TensorEntry]) -> list[torch.Tensor]:
    return [entry.tensor for entry in entries]


def _check_names(tensors: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> None:
    names = [entry.name for entry in tensors] + [entry.name for entry in objects]
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise ConfigError(f"two values of the state are both named {name!r}; rename a key", field=name)


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
