"""Collect the user's state as named entries, repeatedly and cheaply; plan how to fill it again.

The state is walked by the rules of ``flatten``, with these in place of plain leaves:

    module, or list of modules          its parameters, buffers and extra state   (``modules``)
    optimizer, or list of optimizers    its state and options                     (``optimizers``)
    Shard, ShardedTensor                this rank's parts of one tensor             (``shards``)
    values of Megatron's state dicts    the same, by the names that it gives them   (``megatron``)
    PerRank(x)                          x, under a name that carries the rank
    Replicated(x)                       x, under its plain name, whatever it is
    TrainableOnly(module)               the module without its frozen parameters
    Unprefixed(module)                  the module, its names without its key
    anything with state_dict() and      what its state_dict() gives now; per rank if it is an `RNG`, a torch
      load_state_dict()                 ``DataLoader``, or if its key or class name has "dataloader" or "data_loader"

Guarantees: collecting copies nothing and changes nothing: no optimizer state is created, gradients aren't touched, and
no hook runs but those that decide what a ``state_dict()`` is. What modules and optimizers hold is remembered and
revalidated by identity, shape, dtype and placement, and so are tensors in plain dicts and lists; all else in the user's
own containers is read anew each time. The order of entries is the same as long as a collection is ``unchanged``.

Threads: one at a time, the thread that trains.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, eq
from typing import Any, NoReturn

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.format.structure import PER_RANK, SOURCE_MARK, KeysSpec
from holdfast.state.entries import (
    Collected,
    Described,
    KeysPart,
    LeafPart,
    ObjectEntry,
    Path,
    PerRank,
    Replicated,
    StatefulPart,
    TensorEntry,
    TrainableOnly,
    Unprefixed,
    check_tensor,
    joined,
    same_objects,
)
from holdfast.state.flatten import (
    KEYS_NOTE,
    ContainerSource,
    check_depth,
    flatten_exactly,
    is_entered,
    is_remembered,
    item_path,
    keys_to_note,
)
from holdfast.state.fsdp1 import FSDP1Optimizer, is_fsdp1_optimizer
from holdfast.state.gc_pause import gc_paused
from holdfast.state.load_plan import LoadBuilder, Loading, Selection, StoredInfo, TensorHolder
from holdfast.state.megatron import Kind, built, has_tensors, kind_of, object_leaf, path_of, tensor_leaf
from holdfast.state.modules import NOTHING, ModuleSource, as_modules
from holdfast.state.optimizer_views import unguarded_parameters
from holdfast.state.optimizers import OptimizerSource, as_optimizers, containers_in
from holdfast.state.restore_plan import plan_part
from holdfast.state.rng import RNG
from holdfast.state.shards import entries_of, held_elsewhere, is_sharded
from holdfast.state.subclasses import unfolds

Source = ModuleSource | OptimizerSource | ContainerSource
AllAsked = Mapping[Path, Any]
"""By path: `Asked` of modules, what optimizers of FSDP1 said."""
Part = Source | FSDP1Optimizer | StatefulPart | LeafPart | KeysPart
Single = ModuleSource | OptimizerSource | FSDP1Optimizer | StatefulPart | LeafPart
AUTO_RNG_KEY = "rng"
_is_lazy = attrgetter("lazy")
_OF_DEEPSPEED = "put holdfast.integrations.deepspeed.state_of(engine) into the state"


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
        self._strangers: list[torch.Tensor] = []
        """Parameters of objects that look like an optimizer but are not one of torch's."""

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
    def keys(self) -> list[str]:
        """Top-level keys."""
        return [*self._state, *([AUTO_RNG_KEY] if self._rng is not None and AUTO_RNG_KEY not in self._state else [])]

    def require_keys(self, names: Iterable[str], *, field: str) -> None:
        """Raise `ConfigError` unless all ``names`` are top-level keys; ``field`` says where they were given."""
        known = self.keys
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(
                f"{field}: the state has no top-level key {', '.join(map(repr, unknown))}; there are "
                f"{', '.join(map(repr, known))}",
                field=field,
            )

    @property
    def has_modules(self) -> bool:
        """Return True if the state contains a module or a list of modules."""
        return any(isinstance(part, ModuleSource) for part in self._parts())

    def module_tensors(self) -> frozenset[str]:
        """Names of the tensors that modules held when the state was collected last."""
        sources = (source for source in self._sources.values() if isinstance(source, ModuleSource))
        return frozenset(name.partition(SOURCE_MARK)[0] for source in sources for name in source.names)

    # collecting ----------------------------------------------------------------------------------------------

    def collect(self, *, look_closer: bool = True, asked: AllAsked | None = None) -> Collected:
        """References to everything the state holds now; returns at once.

        asked: of a `Collected` of the same moment, so that hooks of modules aren't run again.
        look_closer: False for a caller that will look itself whether the tensors are still of the kinds that they were
        (shape, dtype, device, placement): ``unchanged`` then says nothing of those of remembered ones.
        Raises `ConfigError`, naming the key, for what can't be stored and for names given twice.
        """
        with gc_paused():
            return self._collect(asked, look_closer=look_closer)

    def ask_for_load(self, *, exclude: Collection[str] = ()) -> AllAsked:
        """Call ``state_dict()`` of modules with hooks, for `holders` and `destinations`.

        Hooks may wait for other ranks: all call this at the same point. Top-level keys in ``exclude`` are left out.
        """
        found: dict[Path, Any] = {}
        parts = list(self._parts())
        modules = [part for part in parts if isinstance(part, ModuleSource)]
        for part in parts:
            if isinstance(part, ModuleSource):
                self._sources[part.path] = part
                found[part.path] = NOTHING if str(part.path[0]) in exclude else part.ask_for_load()
        for part in parts:
            if isinstance(part, FSDP1Optimizer) and str(part.path[0]) not in exclude:
                part.find_module(modules)
                found[part.path] = part.ask()
        return found

    def _collect(self, asked: AllAsked | None, *, look_closer: bool) -> Collected:
        parts = self._refresh(asked, look_closer=look_closer)
        static, described, stands = self._static, self._described, not self._stale
        # Until this has gone through: a collection that raises half way must not take a change with it.
        self._stale = True
        if not stands:
            unguarded = self._unguarded(parts)
            static = tuple(
                msgspec.structs.replace(entry, lazy=False) if id(entry.tensor) in unguarded else entry
                for part in parts
                if isinstance(part, ModuleSource | OptimizerSource)
                for entry in part.tensors
            )
            # A second walk may well find the same: optimizer state that is nested is walked every time.
            described = Described.of(static)
            stands = (
                described == self._described
                and same_objects(*map(_tensors_of, (static, self._static)))
                and all(map(eq, map(_is_lazy, static), map(_is_lazy, self._static)))
            )
            static = self._static if stands else static
        given: dict[Path, Any] = {part.path: part.asked for part in parts if isinstance(part, ModuleSource)}
        given |= {part.path: part.said for part in parts if isinstance(part, FSDP1Optimizer)}
        containers = [part for part in parts if isinstance(part, ContainerSource)]
        for container in containers:
            container.refresh(look_closer=look_closer)
        sink = _Sink()
        for part in parts:
            if not isinstance(part, ContainerSource):
                _emit_values(part, sink)
            if isinstance(part, ModuleSource | FSDP1Optimizer):
                part.let_go()
        sink.add_replicas()
        tensors = static + tuple(chain(*(container.tensors for container in containers), sink.tensors))
        signature = (
            [container.described for container in containers],
            Described.of(sink.tensors),
            [entry.name for entry in sink.objects],
            sink.mappings,
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
            given,
            sink.mappings,
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

    def _refresh(
        self, asked: AllAsked | None, *, look_closer: bool = True, exclude: Collection[str] = ()
    ) -> list[Part]:
        """All parts of the state, modules and optimizers brought up to date; notes in `_stale` if those had changed.

        Optimizers under top-level keys in ``exclude`` are left alone: one that can't be saved can be left out.
        """
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
            given = None if asked is None else asked[module.path]
            modules_unchanged &= module.refresh(look_closer=look_closer, asked=given)
        unchanged = modules_unchanged
        for optimizer in optimizers:
            if str(optimizer.path[0]) in exclude:
                unchanged = False
                continue
            unchanged &= optimizer.refresh(modules, modules_unchanged=modules_unchanged, look_closer=look_closer)
            _refuse_partitions_of(optimizer.path, optimizer.parameters, [part for of in modules for part in of.modules])
        for part in parts:
            if isinstance(part, FSDP1Optimizer) and str(part.path[0]) not in exclude:
                part.find_module(modules)
                part.said = part.ask() if asked is None else asked[part.path]
        strangers = [
            param for part in parts if isinstance(part, StatefulPart) for param in unguarded_parameters(part.stateful)
        ]
        unchanged &= same_objects(strangers, self._strangers)
        self._strangers = strangers
        self._static_order = order
        self._stale = was_stale or not unchanged
        return parts

    def _unguarded(self, parts: Sequence[Part]) -> frozenset[int]:
        """``id`` of parameters that may be changed where no hook of torch's waits for their copies."""
        found = {id(param) for param in self._strangers}
        return frozenset(found.union(*(part.unguarded for part in parts if isinstance(part, OptimizerSource))))

    def _parts(self) -> Iterator[Part]:
        for part in self._walk_items((), self._state):
            if isinstance(part, ModuleSource) or not self._modules_only:
                yield part
        if self._rng is not None and AUTO_RNG_KEY not in self._state:
            yield StatefulPart((AUTO_RNG_KEY, PER_RANK), self._rng, optional=True)

    def _walk(self, path: Path, value: Any, *, holder: Any, key: Any, replicated: bool = False) -> Iterator[Part]:
        check_depth(path)
        megatron = kind_of(value)
        if megatron is not None:
            yield from self._walk_megatron(path, value, megatron)
        elif isinstance(value, torch.Tensor):
            yield LeafPart(path, holder, key, value)
        elif isinstance(value, PerRank):
            inside = path if PER_RANK in path else (*path, PER_RANK)
            if replicated:
                raise ConfigError(
                    f"{joined(path)}: a PerRank inside a Replicated; it can be only one", field=joined(path)
                )
            yield from self._walk(inside, value.value, holder=value, key=None)
        elif isinstance(value, Replicated):
            if PER_RANK in path:
                raise ConfigError(
                    f"{joined(path)}: a Replicated inside a PerRank; it can be only one", field=joined(path)
                )
            yield from self._walk(path, value.value, holder=value, key=None, replicated=True)
        elif isinstance(value, (TrainableOnly, Unprefixed)):
            yield self._wrapped_source(path, value)
        elif (modules := as_modules(value)) is not None:
            for module in modules:
                _refuse_object(path, module)
            yield self._module_source(path, modules, staged=not isinstance(value, nn.Module))
        elif (optimizers := as_optimizers(value)) is not None:
            yield self._optimizer_part(path, optimizers, value)
        elif _is_stateful(value):
            _refuse_object(path, value)
            own = not replicated and PER_RANK not in path and _is_rank_own(path, value)
            yield StatefulPart((*path, PER_RANK) if own else path, value)
        elif isinstance(value, DataLoader):
            name = joined(path)
            raise ConfigError(
                f"{name}: a {type(value).__name__} without state_dict() has no state to save; use "
                "torchdata's StatefulDataLoader, or remove it from the state",
                field=name,
            )
        elif (isinstance(value, Mapping) and value) or (isinstance(value, list) and is_entered(value, _is_live)):
            yield from self._walk_items(path, value, replicated=replicated)
        else:
            yield LeafPart(path, holder, key, value)

    def _walk_megatron(self, path: Path, value: Any, kind: Kind) -> Iterator[Part]:
        if PER_RANK in path:
            raise ConfigError(f"{joined(path)}: a {type(value).__name__} inside a PerRank", field=joined(path))
        if kind == "factory":
            yield from self._walk(path, built(path, value), holder=None, key=None)
        elif kind == "tensor":
            yield tensor_leaf(path, value)
        elif kind == "object" and has_tensors(value.data):
            yield from self._walk(path_of(path, value), value.data, holder=vars(value), key="data")
        elif kind == "object":
            yield object_leaf(path, value)

    def _walk_items(self, path: Path, holder: Any, *, replicated: bool = False) -> Iterator[Part]:
        items: Iterable[tuple[Any, Any]] = enumerate(holder) if isinstance(holder, list) else holder.items()
        told = not isinstance(holder, Mapping) or not path
        if is_remembered(holder) and not self._modules_only:
            known = self._sources.get(path)
            remembered = isinstance(known, ContainerSource) and known.holder is holder
            source = known if remembered else ContainerSource(path, holder)
            assert isinstance(source, ContainerSource)
            if source.look():
                told = told or KEYS_NOTE not in holder
                items = source.others()
                if source.has_tensors:
                    yield source
        if not told and (keys := keys_to_note(path, holder)) is not None:
            yield KeysPart(path, keys)
        for key, value in items:
            inside = (*path, key) if isinstance(holder, list) else item_path(path, key)
            yield from self._walk(inside, value, holder=holder, key=key, replicated=replicated)

    def _wrapped_source(self, path: Path, value: TrainableOnly | Unprefixed) -> ModuleSource:
        name, kind = joined(path), type(value).__name__
        modules = as_modules(value.module)
        if modules is None:
            raise ConfigError(f"{name}: {kind} takes a module, not {value.module!r:.200}", field=name)
        unprefixed = isinstance(value, Unprefixed)
        if unprefixed and len(path) > 1:
            raise ConfigError(f"{name}: {kind} is for a module at the top of the state", field=name)
        staged = not isinstance(value.module, nn.Module)
        return self._module_source(path, modules, staged=staged, skips_frozen=not unprefixed, unprefixed=unprefixed)

    def _module_source(
        self,
        path: Path,
        modules: tuple[nn.Module, ...],
        *,
        staged: bool,
        skips_frozen: bool = False,
        unprefixed: bool = False,
    ) -> ModuleSource:
        known = self._sources.get(path)
        if (
            isinstance(known, ModuleSource)
            and (known.staged, known.skips_frozen, known.unprefixed) == (staged, skips_frozen, unprefixed)
            and same_objects(known.modules, modules)
        ):
            return known
        _refuse_partitioned(path, modules)
        return ModuleSource(path, modules, staged=staged, skips_frozen=skips_frozen, unprefixed=unprefixed)

    def _optimizer_part(
        self, path: Path, optimizers: tuple[Optimizer, ...], value: object
    ) -> OptimizerSource | FSDP1Optimizer:
        known = self._sources.get(path)
        if isinstance(known, OptimizerSource) and same_objects(known.optimizers, optimizers):
            return known
        if any(map(is_fsdp1_optimizer, optimizers)):
            if len(optimizers) > 1:
                raise ConfigError(
                    f"{joined(path)}: several optimizers, of FSDP1 modules; give each a key of its own",
                    field=joined(path),
                )
            return FSDP1Optimizer(path, optimizers[0])
        return OptimizerSource(path, optimizers, containers_in(value))

    # what updates change -------------------------------------------------------------------------------------

    def update_targets(self, collected: Collected) -> frozenset[int]:
        """``id`` of every tensor whose update may change a lazily staged one.

        These themselves, and the parameters of the state's optimizers, which may be in no module of the state: a step
        of an optimizer that holds none of all these needn't wait.
        """
        lazy = {id(entry.tensor) for entry in collected.tensors if entry.lazy}
        for source in self._sources.values():
            if isinstance(source, ModuleSource) and (source.is_hooked or source.unfolded):
                lazy.update(source.fqn_of)  # what is captured may be a view of a parameter, or an inner tensor
            if isinstance(source, OptimizerSource):
                lazy.update(map(id, source.parameters))
        return frozenset(lazy)

    # loading -------------------------------------------------------------------------------------------------

    def holders(self, *, exclude: Collection[str] = (), asked: AllAsked | None = None) -> list[TensorHolder]:
        """List the parts of the state that can receive tensors: modules and plain containers, each with its key.

        asked: result of `ask_for_load`; without it modules are asked now. Top-level keys in ``exclude`` are left out;
        so are optimizers and objects with a ``state_dict`` of their own.
        """
        holders: dict[str, TensorHolder] = {}
        asked = self.ask_for_load(exclude=exclude) if asked is None else asked
        for part in _single_values(self._refresh(asked, exclude=exclude)):
            if str(part.path[0]) in exclude:
                continue
            if isinstance(part, ModuleSource):
                key = joined(tuple(item for item in part.path if item != PER_RANK))
                extra = [str(path[-1]) for path, _ in (*part.extra_states, *part.values)]
                holders[key] = TensorHolder(key, part.modules, part.wanted(), extra)
                part.let_go()
            elif isinstance(part, LeafPart) and isinstance(part.value, torch.Tensor) and not unfolds(part.value):
                *above, last = part.path
                key = str(above[0]) if above else ""
                holder = holders.setdefault(key, TensorHolder(key, (), [], []))
                holder.tensors.append((joined((*above[1:], last)), part.value, True))
        return list(holders.values())

    def holder_keys(self) -> list[str]:
        """Keys of the parts that `holders` returns."""
        nothing = {part.path: NOTHING for part in self._parts() if isinstance(part, ModuleSource)}
        return [holder.key for holder in self.holders(asked=nothing)]

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
        quantized: Mapping[str, str] | None = None,
        strict: bool = True,
        asked: AllAsked | None = None,
        selection: Selection | None = None,
        stored_keys: Mapping[Path, Sequence[Any]] | None = None,
    ) -> Loading:
        """Match a checkpoint with this rank's state: which values are needed, where they go, what doesn't fit. Changes
        nothing.

        ``stored_paths`` may lack names (stock DCP may store no paths). ``stored_world`` is the number of ranks that
        saved (None: derived from per-rank names). Top-level keys in ``exclude``, and with ``model_only`` all that
        aren't modules, are neither wanted nor unexpected; in a state without modules ``model_only`` has no effect.
        ``fitted``: the stored names are this state's own, not those that a stock writer may have used. Tensors of
        modules with a name in ``optional`` keep their value if nothing is stored. ``quantized`` names stored tensors
        that are quantized, and how. strict: names that ``load_state_dict`` of a module with hooks misses, or doesn't
        take, are mismatches. asked: as for `holders`. selection: names to load; what is loaded as one, an optimizer or
        an object with a ``state_dict``, can only be selected as a whole: `ConfigError`. stored_keys: keys of the
        mappings at these stored paths, where names don't tell them.
        """
        asked = self.ask_for_load(exclude=exclude) if asked is None else asked
        # What is loaded may talk to the other ranks, whose states may have the same keys in another order.
        parts = list(_single_values(self._refresh(asked, exclude=exclude)))
        parts.sort(key=lambda part: [(isinstance(item, str), item) for item in part.path])
        modules = [part for part in parts if isinstance(part, ModuleSource)]
        model_only = model_only and bool(modules)
        builder = LoadBuilder(
            stored_tensors,
            stored_objects,
            stored_paths,
            rank=self.rank,
            world=self.world,
            stored_world=stored_world,
            fitted=fitted,
            optional=optional,
            quantized=quantized,
            strict=strict,
            selection=selection,
            stored_keys=stored_keys,
        )
        for part in parts:
            top = str(part.path[0])
            builder.know_key(top)
            if isinstance(part, LeafPart) and len(part.path) == 1 and isinstance(part.value, torch.Tensor):
                builder.know_flat([top])
            if top in exclude or (model_only and not isinstance(part, ModuleSource)):
                builder.excuse(top)
                continue
            if not _is_selected(builder, part):
                continue
            if isinstance(part, OptimizerSource):
                part.read_for(modules, partial(builder.has_below, part.path))
            plan_part(builder, part)
        for part in parts:
            if isinstance(part, ModuleSource | FSDP1Optimizer):
                part.let_go()
        for key in exclude:
            builder.excuse(key)
        builder.check_selection(self.keys)
        return builder.build()


class _Sink:
    """Collects leaves as entries."""

    def __init__(self) -> None:
        self.tensors: list[TensorEntry] = []
        self.objects: list[ObjectEntry] = []
        self.mappings: list[KeysSpec] = []
        self._parts: Counter[str] = Counter()
        """How many parts of a tensor there have been: several values may be parts of one."""
        self._replicas: dict[str, TensorEntry] = {}

    def hold_elsewhere(self, part: LeafPart) -> None:
        """Note a replica, which another rank stores."""
        name = joined(part.path)
        if is_sharded(part.value):
            self._replicas.setdefault(name, held_elsewhere(name, part.path, part.value))

    def add_replicas(self) -> None:
        """Say of which tensors this rank holds replicas only."""
        self.tensors += [entry for name, entry in self._replicas.items() if not self._parts[name]]

    def __call__(self, path: Path, value: Any) -> None:
        name = joined(path)
        if is_sharded(value):
            found = entries_of(name, path, value, lazy=False, first=self._parts[name])
            self._parts[name] += len(found)
            self.tensors += found
        elif kind_of(value) is not None:
            raise ConfigError(
                f"{name}: a {type(value).__name__} of Megatron in what a state_dict() gives; put what "
                "sharded_state_dict() gives into the state itself",
                field=name,
            )
        elif isinstance(value, torch.Tensor):
            check_tensor(name, value)
            self.tensors.append(TensorEntry(name, path, value, lazy=False))
        else:
            self.objects.append(ObjectEntry(name, path, value))


def _single_values(parts: Iterable[Part]) -> Iterator[Single]:
    for part in parts:
        if isinstance(part, ContainerSource):
            yield from part.leaves()
        elif not isinstance(part, KeysPart):
            yield part


def _emit_values(part: Single | KeysPart, sink: _Sink) -> None:
    """Emit what is collected anew each time: plain values, options, state dicts of objects."""
    if isinstance(part, KeysPart):
        sink.mappings.append(KeysSpec(part.path, part.keys))
    elif isinstance(part, LeafPart):
        if part.is_replica:
            sink.hold_elsewhere(part)
        elif part.is_whole:
            sink.objects.append(ObjectEntry(joined(part.path), part.path, part.value))
        elif isinstance(part.value, Mapping):  # an empty one
            sink.mappings.append(KeysSpec(part.path, ()))
        else:
            flatten_exactly(part.path, part.value, sink) if unfolds(part.value) else sink(part.path, part.value)
    elif isinstance(part, StatefulPart):
        flatten_exactly(part.path, part.stateful.state_dict(), sink)
    elif isinstance(part, FSDP1Optimizer):
        flatten_exactly(part.path, part.said, sink)
    elif isinstance(part, ModuleSource):
        sink.tensors += part.computed
        sink.objects += [note for one in part.noted() for note in one.notes()]
        for path, value in part.values:
            flatten_exactly(path, value, sink)
        for path, module in part.extra_states:
            flatten_exactly(path, module.get_extra_state(), sink)
    else:
        sink.tensors += part.copies
        sink.objects += [*part.objects(), *part.members()]
        for path, option in part.options():
            flatten_exactly(path, option, sink)
        part.emit_extras(sink)


def _is_selected(builder: LoadBuilder, part: Single) -> bool:
    """Return True if something of ``part`` is to be loaded. `ConfigError` for some of what is loaded as one."""
    name = joined(tuple(item for item in part.path if item != PER_RANK))
    builder.takes(name)
    if builder.selection.takes_none_of(name):
        return False
    if builder.selection.takes_a_part_of(name) and not isinstance(part, ModuleSource):
        raise ConfigError(
            f"include, exclude: {name} is loaded as one; give {name!r} itself, or nothing below it", field="include"
        )
    return True


def _tensors_of(entries: Sequence[TensorEntry]) -> list[torch.Tensor]:
    return [entry.tensor for entry in entries]


def _check_names(tensors: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> None:
    names = [entry.name for entry in tensors] + [entry.name for entry in objects]
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        raise ConfigError(f"two values of the state are both named {name!r}; rename a key", field=name)


def _is_stateful(value: object) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _is_live(value: object) -> bool:
    return (
        isinstance(value, (nn.Module, Optimizer, PerRank, Replicated, TrainableOnly, Unprefixed))
        or kind_of(value) is not None
        or _is_stateful(value)
    )


def _is_rank_own(path: Path, value: object) -> bool:
    if isinstance(value, (RNG, DataLoader)):
        return True
    words = f"{path[-1]} {type(value).__name__}".lower()
    return "dataloader" in words or "data_loader" in words


# What DeepSpeed keeps in partitions would be saved, by its names, as if all ranks held the same. It is looked for in
# processes that have imported DeepSpeed; the optimizer inside a ZeRO optimizer is noticed only beside its module.


def _refuse_object(path: Path, value: object) -> None:
    """Raise `ConfigError` for an engine or optimizer of DeepSpeed's."""
    kind = type(value)
    if "deepspeed" not in sys.modules or not kind.__module__.startswith("deepspeed."):
        return
    if hasattr(value, "param_groups") or (isinstance(value, nn.Module) and kind.__name__.endswith("Engine")):
        what = f"a {kind.__name__} of DeepSpeed has state on each rank that names don't tell apart"
        _refuse(path, f"{what}; {_OF_DEEPSPEED}")


def _refuse_partitioned(path: Path, modules: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` for modules whose weights ZeRO stage 3 has taken away."""
    if "deepspeed" in sys.modules and any(hasattr(param, "ds_tensor") for param in _parameters(modules)):
        why = "DeepSpeed ZeRO stage 3 has partitioned its weights, which aren't in the module"
        _refuse(path, f"{why}; use stages 0 to 2, or engine.save_checkpoint")


def _refuse_partitions_of(path: Path, parameters: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> None:
    """Raise `ConfigError` if ``parameters`` of an optimizer are this rank's partitions of those of ``modules``."""
    if "deepspeed" not in sys.modules:
        return
    known = {id(param): param for param in _parameters(modules)}
    partitioned = any(compat.is_mapped_by_deepspeed(param) for param in known.values())
    if partitioned and not all(id(param) in known for param in parameters):
        what = "its parameters are this rank's partitions of the model's, made by DeepSpeed ZeRO"
        _refuse(path, f"{what}; {_OF_DEEPSPEED}")


def _refuse(path: Path, message: str) -> NoReturn:
    raise ConfigError(f"{joined(path)}: {message}", field=joined(path))


def _parameters(modules: Iterable[nn.Module]) -> Iterable[torch.Tensor]:
    return (param for module in modules for param in module.parameters())
