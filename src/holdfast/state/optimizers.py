"""Collect optimizers as named tensors and objects, with the names of stock ``get_optimizer_state_dict``, changing
nothing.

    <key>.state.<fqn>.<k>         state of the parameter that its module names <fqn>; tensors and plain values
    <key>.param_groups.<i>.<k>    options of group i; "params" is the list of the group's <fqn>s
    <key>.param_groups.<fqn>.<k>  instead, for parameters of a list of modules (pipeline stages): every rank numbers
                                  the groups of its stages from 0, so numbers would mix up options of different ranks;
                                  without "param_names", the names that the optimizer was given

    <key>.<k>                     what else the optimizer's own `state_dict()` gives
    <key>.state.__keys__.<k>      for state of what is no parameter: its key as it is, where <k> is that as text
    <key>.__delegates__.<a>.…     what optimizers in its attributes have and its `state_dict()` doesn't give

Guarantees: no state is created, and no method or hook of torch's own optimizers is called; those that change
`state_dict` or `load_state_dict` are asked by it (``optimizer_views``). A list of optimizers merges: state by name,
groups numbered on from one to the next, as stock does for several optimizers over one model.

How a parameter is named: after the first module of the state that holds all parameters of this key's optimizers, else
after the first that holds it. Where that gives one name to two parameters (an optimizer over two models), all of this
key's names are prefixed by their module's own key (``actor.layers.0.weight``). A parameter in no module of the state is
named by its position among the key's parameters, as a plain ``optimizer.state_dict()`` numbers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import Optimizer

from holdfast.state.entries import ObjectEntry, Path, TensorEntry, TensorGuard, check_tensor, joined, same_objects
from holdfast.state.flatten import KEYS_NOTE, Leaf, flatten_exactly
from holdfast.state.optimizer_views import (
    GROUPS,
    PARAMS,
    STATE,
    IsStored,
    Reading,
    View,
    check_container,
    needs_reading,
    read,
)
from holdfast.state.shards import LocalPart, entries_of
from holdfast.state.subclasses import unfolds

if TYPE_CHECKING:
    from holdfast.format.structure import PathItem
    from holdfast.state.modules import ModuleSource

PARAM_NAMES: Final = "param_names"
"""An option of a group whose parameters were given with names."""
_values = methodcaller("values")


def as_optimizers(value: object) -> tuple[Optimizer, ...] | None:
    """The optimizers ``value`` stands for: one, a list of them, or a container that presents several as one.

    A container (torchtitan's, say) is an `Optimizer` whose own ``state`` stays empty: its ``optimizers`` do the work.
    """
    if isinstance(value, Optimizer):
        inner = _contained(value)
        return inner or (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Optimizer) for item in value):
        return tuple(chain.from_iterable(as_optimizers(item) or () for item in value))
    return None


def containers_in(value: object) -> tuple[Optimizer, ...]:
    """The containers among what `as_optimizers` looks into."""
    if isinstance(value, Optimizer):
        return (value,) if _contained(value) else ()
    return tuple(chain.from_iterable(map(containers_in, value))) if isinstance(value, (list, tuple)) else ()


def _contained(value: Optimizer) -> tuple[Optimizer, ...]:
    inner = getattr(value, "optimizers", None)
    if isinstance(inner, (list, tuple)) and all(isinstance(item, Optimizer) for item in inner):
        return tuple(inner)
    return ()


def groups_of(views: Sequence[View]) -> list[dict[str, Any]]:
    return [group for view in views if view.has_options for group in view.groups]


class OptimizerSource:
    """The state and options of the optimizers at one path of the state."""

    def __init__(self, path: Path, optimizers: Sequence[Optimizer], containers: Sequence[Optimizer] = ()) -> None:
        self.path = path
        self.optimizers = tuple(optimizers)
        self._unchecked = list(containers)
        self.tensors: list[TensorEntry] = []
        self.copies: list[TensorEntry] = []
        """Tensors that a `state_dict()` made for the occasion."""
        self.fqn_of: dict[int, str] = {}
        self.readings: list[Reading] = []
        self.views: list[View] = []
        self.unguarded: frozenset[int] = frozenset()
        """``id`` of the parameters that may be updated where no hook says so."""
        self._direct = False
        self.unnamed = False
        """Some parameters are in no module of the state, and have numbers for names."""
        self._params: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._fqn_lists: dict[Path, list[list[str]]] = {}
        self._by_parameter = False
        self._keys: list[Any] = []
        self._holders: list[Any] = []
        self._is_tensor: list[bool] = []
        self._state_tensors: list[torch.Tensor] = []
        self._objects: list[tuple[int, Path, str]] = []
        self._nested = True
        self._has_others = False
        """There is state of what is no parameter."""
        self._guard = TensorGuard(())

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters of all groups, as of the last `refresh`, and of the optimizers inside these."""
        inner = [other for reading in self.readings for _, other in reading.inner if hasattr(other, GROUPS)]
        return [*self._params, *(param for other in inner for group in other.param_groups for param in group[PARAMS])]

    def sections(self) -> dict[Path, list[View]]:
        """Views by where they are stored: groups are numbered on from one view to the next of a section."""
        found: dict[Path, list[View]] = {}
        for view in self.views:
            found.setdefault(view.below, []).append(view)
        return found

    def refresh(self, modules: Sequence[ModuleSource], *, modules_unchanged: bool, look_closer: bool = True) -> bool:
        """Bring `tensors` up to date; True if nothing had changed since the last call.

        look_closer: whether tensors that are the same objects have stayed of their kinds, too.
        """
        self._read()
        names_stand = self._name(modules, modules_unchanged=modules_unchanged)
        if names_stand and self._stands(look_closer=look_closer):
            return True
        self._walk()
        return False

    def read_for(self, modules: Sequence[ModuleSource], is_stored: IsStored) -> None:
        """Bring `readings` into the form in which a checkpoint has them."""
        if not self._direct:
            self._read(is_stored)
            self._name(modules, modules_unchanged=False)

    def _read(self, is_stored: IsStored | None = None) -> None:
        direct = not any(map(needs_reading, self.optimizers))
        if not (direct and self._direct):  # views of torch's own optimizers are good for ever
            name = joined(self.path)
            self.readings = []
            for index, optimizer in enumerate(self.optimizers):
                label = () if len(self.optimizers) == 1 else (str(index),)
                self.readings += read(optimizer, name, is_stored, label=label)
            self.views = [view for reading in self.readings for view in reading.views]
            self.unguarded = frozenset(
                id(param) for view in self.views if view.eager for group in view.groups for param in group[PARAMS]
            )
        self._direct = direct
        if is_stored is None:
            for container in list(self._unchecked):
                members = _contained(container)
                if all(member.state for member in members):
                    check_container(container, members, joined(self.path))
                    self._unchecked.remove(container)

    def _name(self, modules: Sequence[ModuleSource], *, modules_unchanged: bool) -> bool:
        """Name all parameters; True if they and their names are those of the last time."""
        groups = [group for view in self.views for group in view.groups]
        params = [param for group in groups for param in group[PARAMS]]
        sizes = [len(group[PARAMS]) for group in groups]
        if modules_unchanged and sizes == self._sizes and same_objects(params, self._params):
            return True
        self._params, self._sizes = params, sizes
        self.fqn_of = _names(list({id(param): param for param in params}.values()), modules)
        self.unnamed = not all(any(id(param) in module.fqn_of for module in modules) for param in params)
        self._by_parameter = any(module.staged for module in _homes(params, modules))
        self._fqn_lists = {
            below: [[self.fqn_of[id(param)] for param in group[PARAMS]] for group in groups_of(views)]
            for below, views in self.sections().items()
        }
        return False

    def _stands(self, *, look_closer: bool) -> bool:
        if self._nested:
            return False
        states = [view.state for view in self.views if view.has_state]
        holders = list(chain.from_iterable(states))
        if not same_objects(holders, self._holders):
            return False
        try:
            inner = list(chain.from_iterable(map(_values, states)))
            keys = list(chain.from_iterable(inner))
            values = list(chain.from_iterable(map(_values, inner)))
        except (TypeError, AttributeError):
            return False
        return (
            keys == self._keys
            and same_objects(list(compress(values, self._is_tensor)), self._state_tensors)
            and not any(isinstance(values[at], (torch.Tensor, Mapping, list)) for at, _, _ in self._objects)
            and (not look_closer or self._guard.stands())
        )

    def _walk(self) -> None:
        self.tensors, self.copies, self._keys, self._holders, self._state_tensors = [], [], [], [], []
        self._is_tensor, self._objects, self._nested = [], [], False
        for view in [view for view in self.views if view.has_state]:
            emit = partial(self._emit, view)
            base = (*self.path, *view.below, STATE)
            for holder, state in view.state.items():
                self._holders.append(holder)
                fqn = self._label(holder)
                if not isinstance(state, Mapping) or any(type(key) is not str for key in state):
                    self._nested = True
                    if fqn is not None:
                        _flatten_state((*base, fqn), state, emit)
                    continue
                prefix = joined((*base, str(fqn)))
                for key, value in state.items():
                    self._keys.append(key)
                    is_tensor = isinstance(value, torch.Tensor)
                    self._is_tensor.append(is_tensor)
                    if (
                        is_tensor and fqn is not None and not unfolds(value)
                    ):  # nearly all: what `flatten_exactly` makes of it, in fewer steps
                        emit((*base, fqn, key), value, f"{prefix}.{key}")
                        continue
                    self._nested |= isinstance(value, (Mapping, list)) or is_tensor
                    if fqn is not None:
                        flatten_exactly((*base, fqn, key), value, emit)
        if self.copies or None in map(self._label, self._holders):
            # State of a parameter that is in no group any more isn't saved; the flat comparison can't leave it out.
            self._nested = True
        self._has_others = not all(isinstance(holder, torch.Tensor) for holder in self._holders)
        self._guard = TensorGuard(self._state_tensors)

    def _label(self, holder: Any) -> str | None:
        return self.fqn_of.get(id(holder)) if isinstance(holder, torch.Tensor) else str(holder)

    def _emit(self, view: View, path: Path, value: Any, name: str | None = None) -> None:
        name = joined(path) if name is None else name
        if isinstance(value, LocalPart):
            self.tensors += entries_of(name, path, value, lazy=not view.eager and view.is_live(value.tensor))
            return
        if not isinstance(value, torch.Tensor):
            self._objects.append((len(self._is_tensor) - 1, path, name))
            return
        check_tensor(name, value)
        if view.is_live(value):
            self.tensors.append(TensorEntry(name, path, value, not view.eager))
            self._state_tensors.append(value)
        else:
            self.copies.append(TensorEntry(name, path, value, lazy=False))

    def objects(self) -> list[ObjectEntry]:
        """Plain values of the optimizers' state, as they are now."""
        notes = [ObjectEntry(joined(path), path, holder) for path, holder in self._notes()]
        if not self._objects:
            return notes
        if self._nested:
            return notes + self._objects_by_walking()
        inner = chain.from_iterable(map(_values, (view.state for view in self.views if view.has_state)))
        values = list(chain.from_iterable(map(_values, inner)))
        return notes + [ObjectEntry(name, path, values[at]) for at, path, name in self._objects]

    def _notes(self) -> Iterator[tuple[Path, Any]]:
        """Yield facts that a load can't derive from the optimizers: which have no state, or state under other keys."""
        for view in self.views:
            if view.empty and view.has_state:
                yield (*self.path, *view.below, STATE), {}
        for view in self.views if self._has_others else ():
            for holder in view.state if view.has_state else ():
                if not isinstance(holder, torch.Tensor):
                    yield (*self.path, *view.below, STATE, KEYS_NOTE, str(holder)), holder

    def _objects_by_walking(self) -> list[ObjectEntry]:
        found: list[ObjectEntry] = []

        def take(path: Path, value: Any) -> None:
            if not isinstance(value, torch.Tensor | LocalPart):
                found.append(ObjectEntry(joined(path), path, value))

        for view in self.views:
            for holder, state in view.state.items() if view.has_state else ():
                fqn = self._label(holder)
                if fqn is not None:
                    _flatten_state((*self.path, *view.below, STATE, fqn), state, take)
        return found

    def options(self) -> list[tuple[Path, Any]]:
        """Every option of every group, by path, as it is now; all but the parameters."""
        found: list[tuple[Path, Any]] = []
        for below, views in self.sections().items():
            base = (*self.path, *below, GROUPS)
            for index, (group, fqns) in enumerate(zip(groups_of(views), self._fqn_lists[below], strict=True)):
                labels: Sequence[PathItem] = fqns if self._by_parameter else [index]
                # Under each parameter's name a list of all names would be as long as their number squared.
                skipped = (PARAMS, PARAM_NAMES) if self._by_parameter else (PARAMS,)
                found += [
                    ((*base, label, key), value)
                    for label in labels
                    for key, value in group.items()
                    if key not in skipped
                ]
        return found

    def members(self) -> list[ObjectEntry]:
        """Every group's list of parameter names, unless its options are noted under each of them."""
        if self._by_parameter:
            return []
        return [
            ObjectEntry(joined(path), path, fqns)
            for below, lists in self._fqn_lists.items()
            for index, fqns in enumerate(lists)
            for path in [(*self.path, *below, GROUPS, index, PARAMS)]
        ]

    def emit_extras(self, leaf: Leaf) -> None:
        """Call ``leaf`` with what `state_dict()` has given besides state and groups."""
        for reading in self.readings:
            if not reading.asked or not reading.extras:
                continue
            nodes = {(*self.path, *view.below) for view in reading.views}

            def take(path: Path, value: Any, nodes: set[Path] = nodes) -> None:
                if path not in nodes:  # what is left of a state and its groups without these: nothing
                    leaf(path, value)

            flatten_exactly((*self.path, *reading.below), reading.extras, take)


def _flatten_state(path: Path, state: Any, leaf: Leaf) -> None:
    """One parameter's state, exactly; but where it has none nothing is noted, as stock readers expect."""
    if not isinstance(state, Mapping) or state:
        flatten_exactly(path, state, leaf)


def _homes(params: Sequence[torch.Tensor], modules: Sequence[ModuleSource]) -> Sequence[ModuleSource]:
    """The first module that holds all ``params``, else all that hold any."""
    whole = [module for module in modules if all(id(param) in module.fqn_of for param in params)]
    return whole[:1] or [module for module in modules if any(id(param) in module.fqn_of for param in params)]


def _names(params: Sequence[torch.Tensor], modules: Sequence[ModuleSource]) -> dict[int, str]:
    homes = _homes(params, modules)
    found: dict[int, str] = {}
    prefixed: dict[int, str] = {}
    for index, param in enumerate(params):
        home = next((module for module in homes if id(param) in module.fqn_of), None)
        fqn = str(index) if home is None else home.fqn_of[id(param)]
        found[id(param)] = fqn
        prefixed[id(param)] = fqn if home is None else f"{joined(home.path)}.{fqn}"
    return found if len(set(found.values())) == len(found) else prefixed
