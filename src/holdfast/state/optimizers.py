"""Optimizers as named tensors and objects: the names stock ``get_optimizer_state_dict`` gives, changing nothing.

    <key>.state.<fqn>.<k>         state of the parameter that its module names <fqn>; tensors and plain values
    <key>.param_groups.<i>.<k>    options of group i; "params" is the list of the group's <fqn>s
    <key>.param_groups.<fqn>.<k>  instead, for parameters of a list of modules (pipeline stages): every rank numbers
                                  the groups of its stages from 0, so numbers would mix up options of different ranks

Guarantees: no state is created, no ``state_dict()`` called, no hook run. A list of optimizers merges: state by name,
groups numbered on from one to the next, as stock does for several optimizers over one model.

How a parameter is named: after the first module of the state that holds all parameters of this key's optimizers, else
after the first that holds it. Where that gives one name to two parameters (an optimizer over two models), all of this
key's names are prefixed by their module's own key (``actor.layers.0.weight``). A parameter in no module of the state
is named by its position among the key's parameters, as a plain ``optimizer.state_dict()`` numbers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from holdfast.state.entries import ObjectEntry, Path, TensorEntry, TensorGuard, check_tensor, joined, same_objects
from holdfast.state.flatten import Leaf, flatten_exactly

if TYPE_CHECKING:
    from holdfast.plan.structure import PathItem
    from holdfast.state.modules import ModuleSource

_values = methodcaller("values")
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


def as_optimizers(value: object) -> tuple[Optimizer, ...] | None:
    """The optimizers ``value`` stands for: one, a list of them, or a container that presents several as one.

    A container (torchtitan's, say) is an `Optimizer` whose own ``state`` stays empty: its ``optimizers`` do the work.
    """
    if isinstance(value, Optimizer):
        inner = getattr(value, "optimizers", None)
        if isinstance(inner, (list, tuple)) and inner and all(isinstance(item, Optimizer) for item in inner):
            return tuple(inner)
        return (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Optimizer) for item in value):
        return tuple(chain.from_iterable(as_optimizers(item) or () for item in value))
    return None


def groups_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


class OptimizerSource:
    """The state and options of the optimizers at one path of the state."""

    def __init__(self, path: Path, optimizers: Sequence[Optimizer]) -> None:
        self.path = path
        self.optimizers = tuple(optimizers)
        self.tensors: list[TensorEntry] = []
        self.fqn_of: dict[int, str] = {}
        self._params: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._fqn_lists: list[list[str]] = []
        self._by_parameter = False
        self._keys: list[Any] = []
        self._holders: list[Any] = []
        self._is_tensor: list[bool] = []
        self._state_tensors: list[torch.Tensor] = []
        self._objects: list[tuple[int, Path, str]] = []
        self._nested = True
        self._guard = TensorGuard(())

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters of all groups, as of the last `refresh`."""
        return self._params

    def refresh(self, modules: Sequence[ModuleSource], *, modules_unchanged: bool, look_closer: bool = True) -> bool:
        """Bring `tensors` up to date; True if nothing had changed since the last call.

        look_closer: whether tensors that are the same objects have stayed of their kinds, too.
        """
        params = [param for group in groups_of(self.optimizers) for param in group[_PARAMS]]
        sizes = [len(group[_PARAMS]) for group in groups_of(self.optimizers)]
        names_stand = modules_unchanged and sizes == self._sizes and same_objects(params, self._params)
        if names_stand and self._stands(look_closer=look_closer):
            return True
        if not names_stand:
            self._params, self._sizes = params, sizes
            self.fqn_of = _names(params, modules)
            self._by_parameter = any(module.staged for module in _homes(params, modules))
            fqns = iter([self.fqn_of[id(param)] for param in params])
            self._fqn_lists = [[next(fqns) for _ in range(size)] for size in sizes]
        self._walk()
        return False

    def _stands(self, *, look_closer: bool) -> bool:
        if self._nested:
            return False
        states = [optimizer.state for optimizer in self.optimizers]
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
        self.tensors, self._keys, self._holders = [], [], []
        self._is_tensor, self._objects, self._nested = [], [], False
        for optimizer in self.optimizers:
            for holder, state in optimizer.state.items():
                self._holders.append(holder)
                fqn = self._label(holder)
                if not isinstance(state, Mapping) or any(type(key) is not str for key in state):
                    self._nested = True
                    if fqn is not None:
                        _flatten_state((*self.path, _STATE, fqn), state, self._emit)
                    continue
                prefix = joined((*self.path, _STATE, str(fqn)))
                for key, value in state.items():
                    self._keys.append(key)
                    is_tensor = isinstance(value, torch.Tensor)
                    self._is_tensor.append(is_tensor)
                    if is_tensor and fqn is not None:  # nearly all: what `flatten_exactly` makes of it, in fewer steps
                        self._emit((*self.path, _STATE, fqn, key), value, f"{prefix}.{key}")
                        continue
                    self._nested |= isinstance(value, (Mapping, list))
                    if fqn is not None:
                        flatten_exactly((*self.path, _STATE, fqn, key), value, self._emit)
        self._state_tensors = [entry.tensor for entry in self.tensors]
        if None in map(self._label, self._holders):
            # State of a parameter that is in no group any more isn't saved; the flat comparison can't leave it out.
            self._nested = True
        self._guard = TensorGuard(self._state_tensors)

    def _label(self, holder: Any) -> str | None:
        return self.fqn_of.get(id(holder)) if isinstance(holder, torch.Tensor) else str(holder)

    def _emit(self, path: Path, value: Any, name: str | None = None) -> None:
        name = joined(path) if name is None else name
        if isinstance(value, torch.Tensor):
            check_tensor(name, value)
            self.tensors.append(TensorEntry(name, path, value, True))  # noqa: FBT003
        else:
            self._objects.append((len(self._is_tensor) - 1, path, name))

    def objects(self) -> list[ObjectEntry]:
        """Plain values of the optimizers' state, as they are now."""
        if not self._objects:
            return []
        if self._nested:
            return self._objects_by_walking()
        inner = chain.from_iterable(map(_values, (optimizer.state for optimizer in self.optimizers)))
        values = list(chain.from_iterable(map(_values, inner)))
        return [ObjectEntry(name, path, values[at]) for at, path, name in self._objects]

    def _objects_by_walking(self) -> list[ObjectEntry]:
        found: list[ObjectEntry] = []

        def take(path: Path, value: Any) -> None:
            if not isinstance(value, torch.Tensor):
                found.append(ObjectEntry(joined(path), path, value))

        for optimizer in self.optimizers:
            for holder, state in optimizer.state.items():
                fqn = self._label(holder)
                if fqn is not None:
                    _flatten_state((*self.path, _STATE, fqn), state, take)
        return found

    def options(self) -> list[tuple[Path, Any]]:
        """Every option of every group, by path, as it is now; all but the parameters."""
        groups = groups_of(self.optimizers)
        labels: Sequence[Sequence[PathItem]]
        labels = self._fqn_lists if self._by_parameter else [[index] for index in range(len(groups))]
        return [
            ((*self.path, _GROUPS, label, key), value)
            for group, group_labels in zip(groups, labels, strict=True)
            for label in group_labels
            for key, value in group.items()
            if key != _PARAMS
        ]

    def members(self) -> list[ObjectEntry]:
        """Every group's list of parameter names, unless its options are noted under each of them."""
        if self._by_parameter:
            return []
        paths: list[Path] = [(*self.path, _GROUPS, index, _PARAMS) for index in range(len(self._fqn_lists))]
        return [ObjectEntry(joined(path), path, fqns) for path, fqns in zip(paths, self._fqn_lists, strict=True)]


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
