"""Read the state of any optimizer and restore it, with custom classes, hooks and nested optimizers.

    torch's own methods           `state` and `param_groups` are read and written directly; nothing of the user's runs
    methods or hooks of its own   what `state_dict()` gives is stored, and goes back through `load_state_dict()`
    ZeroRedundancyOptimizer       options of the outer optimizer, state of the local one: this rank's parameters only

`state_dict()` need not say everything: optimizers that an optimizer keeps in its attributes are followed. What they
have and `state_dict()` does not give is stored below ``<key>.__delegates__.<attribute>``; a wrapper that has no state
of its own, and the groups of the one optimizer it wraps, is stored under the names of that one.

Guarantees: never less is stored than `state_dict()` gives; what can't be stored is a `ConfigError` that names the key.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch.optim import Optimizer

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import Path
from holdfast.state.shards import LocalPart
from holdfast.state.subclasses import held, rows_of, unfolds

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
DELEGATES: Final = "__delegates__"
NODE_KEYS: Final = (STATE, GROUPS)
_ITSELF: Final = "self"
_HOOKS: Final = tuple(f"_optimizer_{kind}state_dict_{when}_hooks" for kind in ("", "load_") for when in ("pre", "post"))
_FLATTENED: Final = (f"{STATE}.", f"{GROUPS}.")
"""How names of state and options begin where a container has flattened those of its optimizers."""
_LISTS: Final = (list, tuple)
_NEITHER: Final = frozenset({bool, int, float, str, type(None), dict, OrderedDict, defaultdict, torch.Tensor})
"""Types of attributes that every optimizer of torch's has: known at once to be no optimizer."""

IsStored = Callable[[Path], bool]
"""Whether the checkpoint to be loaded has anything below this path, which is relative to the optimizer's key."""


class View:
    """State and groups of one optimizer, as they are now: its own, or as ``said`` by a `state_dict()`.

    below: path under the optimizer's key. front: the optimizer whose groups have the options, if that is not ``owner``.
    """

    def __init__(self, below: Path, owner: Optimizer, *, front: Optimizer | None = None) -> None:
        self.below = below
        self.owner = owner
        self.front = owner if front is None else front
        self.has_state = self.has_options = True
        self.partial = False
        """Other ranks have the state of the parameters that ``owner`` does not hold."""
        self.empty = False
        """It has no state, and that is stored."""
        self.eager = False
        """No hook waits before these tensors change, so they are copied before a save returns."""

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.front.param_groups
        return groups

    @property
    def state(self) -> Mapping[Any, Any]:
        state: Mapping[Any, Any] = self.owner.state
        return state

    @property
    def target(self) -> Any:
        """The mapping from parameter to state that a load writes to."""
        return self.owner.state

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is updated by the optimizer and stays the same object across steps."""
        del tensor
        return True

    def holds(self, param: torch.Tensor) -> bool:
        """Return True if this rank has the state of ``param``."""
        return any(param is other for group in self.owner.param_groups for other in group[PARAMS])

    def destination(self, present: torch.Tensor | LocalPart) -> torch.Tensor | LocalPart:
        """The tensor to load into where the optimizer has ``present``."""
        return present

    def clear(self) -> None:
        self.target.clear()


class SaidView(View):
    """A ``{"state": ..., "param_groups": ...}`` as `state_dict()` gives it, with parameters in the place of numbers."""

    def __init__(self, below: Path, owner: Optimizer, node: Mapping[str, Any], at: Path, live: frozenset[int]) -> None:
        super().__init__(below, owner)
        self.at = at
        """Where the node is in what `state_dict()` gives: its keys, as they are."""
        live_groups = owner.param_groups
        self._groups = [
            {**said, PARAMS: list(group[PARAMS])} for said, group in zip(node[GROUPS], live_groups, strict=True)
        ]
        self.numbers = [list(said[PARAMS]) for said in node[GROUPS]]
        numbers = chain.from_iterable(self.numbers)
        params = list(chain.from_iterable(group[PARAMS] for group in live_groups))
        param_of = dict(zip(numbers, params, strict=True))
        self._state = {param_of.get(key, key): value for key, value in node[STATE].items()}
        self._live = live
        self.given: dict[Any, Any] = dict(self._state)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._groups

    @property
    def state(self) -> Mapping[Any, Any]:
        return self._state

    @property
    def target(self) -> Any:
        return self.given

    def is_live(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._live

    def destination(self, present: torch.Tensor | LocalPart) -> torch.Tensor | LocalPart:
        if isinstance(present, LocalPart):
            return present._replace(tensor=torch.empty_like(present.tensor))
        return torch.empty_like(present, requires_grad=False)  # `load_state_dict` may change its own before it reads

    def node(self) -> dict[str, Any]:
        """State dict to pass to ``load_state_dict``, numbered as ``state_dict()`` numbered it."""
        number_of = {
            id(param): number
            for group, numbers in zip(self._groups, self.numbers, strict=True)
            for param, number in zip(group[PARAMS], numbers, strict=True)
        }
        state = {
            number_of[id(holder)] if isinstance(holder, torch.Tensor) else holder: value
            for holder, value in self.given.items()
        }
        groups = [{**group, PARAMS: numbers} for group, numbers in zip(self._groups, self.numbers, strict=True)]
        return {STATE: state, GROUPS: groups}


class Reading:
    """All that one optimizer has to be stored, in views; and, where it was asked, the rest of its `state_dict()`."""

    def __init__(self, optimizer: Optimizer, below: Path, views: list[View]) -> None:
        self.optimizer = optimizer
        self.below = below
        self.views = views
        self.asked = False
        self.extras: Any = {}
        """What `state_dict()` gives besides ``views``."""
        self.inner: list[tuple[str, Optimizer]] = []

    def give_back(self, extras: Any) -> None:
        """Call `load_state_dict` with the views and ``extras``, keeping the group dictionaries the objects they are."""
        for view in self.views:
            if isinstance(view, SaidView):
                node = extras
                for key in view.at:
                    node = node[key]
                node.update(view.node())
        holders = [holder for _, holder in _holders(self.optimizer, self.inner)]
        before = [(holder.param_groups, list(holder.param_groups)) for holder in holders]
        self.optimizer.load_state_dict(extras)
        for holder, (groups, members) in zip(holders, before, strict=True):
            keep_groups(holder, groups, members)
        _undo_casts(self)


def keep_groups(optimizer: Optimizer, groups: list[dict[str, Any]], members: list[dict[str, Any]]) -> None:
    """Copy new options into the existing group dictionaries, to which schedulers and wrappers refer."""
    now = optimizer.param_groups
    for index, (old, new) in enumerate(zip(members, list(now), strict=False)):
        if new is not old:
            options = dict(new)
            old.clear()
            old.update(options)
            now[index] = old
    if now is not groups:
        groups[:] = now


def _undo_casts(reading: Reading) -> None:
    """Give state the dtype again that was stored: torch's `load_state_dict` makes all floats of the parameter's.

    Only where `state_dict()` gives the tensors that the optimizer steps with: any others may have had another dtype.
    """
    given = {
        (view.below, id(holder), key): value
        for view in reading.views
        if isinstance(view, SaidView)
        for holder, state in view.given.items()
        if isinstance(holder, torch.Tensor) and isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dtype != holder.dtype
    }
    if not given:
        return
    now = Reading(reading.optimizer, reading.below, [])
    now.inner = reading.inner
    _split_said(now, reading.optimizer.state_dict())
    for view in now.views:
        for holder, state in view.owner.state.items():
            for key, landed in state.items() if isinstance(state, dict) else ():
                value = given.get((view.below, id(holder), key))
                if value is not None and _was_cast(value, landed) and view.state.get(holder, {}).get(key) is landed:
                    state[key] = value.to(device=landed.device)


def _was_cast(value: torch.Tensor, landed: Any) -> bool:
    return (
        isinstance(landed, torch.Tensor)
        and landed.dtype != value.dtype
        and landed.shape == value.shape
        and compat.same_values(value.to(device=landed.device, dtype=landed.dtype), landed)
    )


# reading ---------------------------------------------------------------------------------------------------------


def needs_reading(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has more than its `state` and its `param_groups`."""
    return has_own_methods(optimizer) or bool(inner_optimizers(optimizer))


def read(
    optimizer: Optimizer, name: str, is_stored: IsStored | None = None, below: Path = (), label: Path = ()
) -> list[Reading]:
    """Read ``optimizer``, stored under ``name``; itself first, then the optimizers that it delegates to.

    is_stored: for a load, what the checkpoint has. label: tells delegates of several optimizers in a list apart.
    """
    if has_own_methods(optimizer) and not compat.is_zero_optimizer(optimizer):
        return _ask(optimizer, name, is_stored, below, label)
    if compat.is_zero_optimizer(optimizer):
        return [_read_zero(optimizer, name, below)]
    inner = inner_optimizers(optimizer)
    if not inner:
        if not hasattr(optimizer, GROUPS) or not hasattr(optimizer, STATE):
            raise _refused(name, optimizer, "it has no param_groups and state: Optimizer.__init__ was not called")
        view = View(below, optimizer)
        view.eager = not is_hooked(optimizer)
        return [Reading(optimizer, below, [view])]
    return _read_wrapper(optimizer, inner, name, is_stored, below, label)


def has_own_methods(optimizer: Optimizer) -> bool:
    """Return True if saving or loading is customized: by the class, on the instance, or by a hook."""
    attributes = vars(optimizer)
    return (
        not _is_stock(type(optimizer))
        or "state_dict" in attributes
        or "load_state_dict" in attributes
        or any(getattr(optimizer, name, None) for name in _HOOKS)
    )


def _is_stock(kind: type[Optimizer]) -> bool:
    own: tuple[object, object] = (kind.state_dict, kind.load_state_dict)
    return own == (Optimizer.state_dict, Optimizer.load_state_dict)


def inner_optimizers(holder: object) -> list[tuple[str, Optimizer]]:
    """Optimizers in the attributes of ``holder``, or in lists and dicts there; each by name, and once."""
    found: dict[int, tuple[str, Optimizer]] = {}
    for name, value in getattr(holder, "__dict__", {}).items():
        kind = type(value)
        if kind in _LISTS and name != GROUPS:
            items = [(f"{name}.{index}", item) for index, item in enumerate(value) if isinstance(item, Optimizer)]
        elif kind is dict and name != "defaults":
            items = [(f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Optimizer)]
        elif kind not in _NEITHER and isinstance(value, Optimizer):
            items = [(name, value)]
        else:
            continue
        for label, item in items:
            if item is not holder:
                found.setdefault(id(item), (label, item))
    return list(found.values())


def _reachable(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """All optimizers inside ``optimizer``, at any depth, by a dotted name."""
    found: dict[int, tuple[str, Optimizer]] = {id(optimizer): ("", optimizer)}
    todo = [("", optimizer)]
    while todo:
        prefix, holder = todo.pop(0)
        for label, inner in inner_optimizers(holder):
            if id(inner) not in found:
                found[id(inner)] = (prefix + label, inner)
                todo.append((f"{prefix}{label}.", inner))
    return list(found.values())[1:]


def _holders(optimizer: Optimizer, inner: list[tuple[str, Optimizer]]) -> list[tuple[str, Optimizer]]:
    """Return those of an optimizer and the ones inside it that have groups and state to read."""
    return [
        (label, holder)
        for label, holder in ((_ITSELF, optimizer), *inner)
        if hasattr(holder, GROUPS) and hasattr(holder, STATE)
    ]


def _read_wrapper(
    optimizer: Optimizer,
    inner: list[tuple[str, Optimizer]],
    name: str,
    is_stored: IsStored | None,
    below: Path,
    label: Path,
) -> list[Reading]:
    """An optimizer with torch's own methods that has others inside it, of which these methods know nothing."""
    if not hasattr(optimizer, GROUPS) or not hasattr(optimizer, STATE):
        if len(inner) > 1:
            raise _refused(name, optimizer, "it has no param_groups and state of its own, and wraps several optimizers")
        return read(inner[0][1], name, is_stored, below, label)
    uncovered = [
        (attribute, other)
        for attribute, other in inner
        if other.state is not optimizer.state or not _same_groups(other, optimizer)
    ]
    alone = len(uncovered) == 1 and not optimizer.state and _same_groups(uncovered[0][1], optimizer)
    if alone and not (is_stored and is_stored((*below, DELEGATES))):
        found = read(uncovered[0][1], name, is_stored, below, label)  # it has nothing that this one hasn't
    else:
        found = [Reading(optimizer, below, [View(below, optimizer)])]
        found[0].inner = _reachable(optimizer)
        for attribute, other in uncovered:
            found += read(other, name, is_stored, (*below, DELEGATES, *label, attribute))
    for view in chain.from_iterable(each.views for each in found):
        view.eager = True  # whether it changes them in the steps of those inside it only, nobody can tell
    return found


def _same_groups(left: Optimizer, right: Optimizer) -> bool:
    ours, theirs = left.param_groups, right.param_groups
    return len(ours) == len(theirs) and all(one is other for one, other in zip(ours, theirs, strict=True))


def _read_zero(optimizer: Optimizer, name: str, below: Path) -> Reading:
    """A `ZeroRedundancyOptimizer`: never asked, as its `state_dict()` is what a collective gathered some time ago."""
    local = compat.zero_local_optimizer(optimizer)
    if local is None:
        raise _refused(name, optimizer, "overlap_with_ddp=True leaves it no optimizer to save", "set it to False")
    if type(optimizer) is not compat.zero_class() or any(getattr(optimizer, hooks, None) for hooks in _HOOKS):
        raise _refused(
            name,
            optimizer,
            "its state_dict() is changed by a subclass or a hook, and gives a state only after a collective",
            "use ZeroRedundancyOptimizer as it is, and keep what you add in an object with state_dict and "
            "load_state_dict, under a key of its own",
        )
    if needs_reading(local):
        raise _refused(
            name,
            local,
            "as the optimizer_class of a ZeroRedundancyOptimizer it has methods, hooks or optimizers of its own, which "
            "that does not keep either",
            "use an optimizer_class with the state_dict() of torch.optim.Optimizer",
        )
    if odd := next((holder for holder in local.state if not isinstance(holder, torch.Tensor)), None):
        raise _refused(name, local, f"its state has {odd!r}, which is no parameter: each rank may have another one")
    view = View(below, local, front=optimizer)
    view.partial = True
    reading = Reading(optimizer, below, [view])
    reading.inner = [("optim", local)]
    return reading


def _refused(name: str, optimizer: object, why: str, instead: str = "") -> ConfigError:
    what = instead or (
        "save the optimizer inside it, or an object with state_dict and load_state_dict that has all it needs"
    )
    return ConfigError(f"{name}: {type(optimizer).__qualname__} can't be saved or loaded: {why}; {what}", field=name)


def check_container(container: Optimizer, members: Sequence[Optimizer], name: str) -> None:
    """Raise `ConfigError` if a container's `state_dict()` has what none of its ``members`` has: these alone are stored.

    Asks it, which is for when all members have state: those of torchtitan step optimizers that have none.
    """
    if (
        Optimizer.state_dict is type(container).state_dict
        or Optimizer.load_state_dict is type(container).load_state_dict
    ):
        return
    reading = Reading(container, (), [])
    reading.inner = [(str(index), member) for index, member in enumerate(members)]
    given: Any = container.state_dict()
    said = given if isinstance(given, Mapping) else {type(given).__name__: given}
    _split_said(reading, {key: value for key, value in said.items() if not str(key).startswith(_FLATTENED)})
    live = frozenset(chain.from_iterable(_tensor_ids(member.state) for member in members))
    for key, value in reading.extras.items():
        if not _is_covered(value, live):
            raise _refused(
                name,
                container,
                f"its state_dict() has {key!r}, which is of none of the optimizers in it",
                "keep that in an object with state_dict and load_state_dict, under a key of its own",
            )


# asking ----------------------------------------------------------------------------------------------------------


def _ask(optimizer: Optimizer, name: str, is_stored: IsStored | None, below: Path, label: Path) -> list[Reading]:
    inner = _reachable(optimizer)
    if zero := next((other for _, other in inner if compat.is_zero_optimizer(other)), None):
        raise _refused(
            name,
            optimizer,
            f"its state_dict() asks a {type(zero).__name__}, which has one only after a collective",
            f"put the {type(zero).__name__} itself into the state",
        )
    try:
        said = optimizer.state_dict()
    except Exception as error:
        raise _refused(name, optimizer, f"its state_dict() failed ({type(error).__name__}: {error})") from error
    if not isinstance(said, Mapping):
        raise _refused(name, optimizer, f"its state_dict() gave a {type(said).__name__}, not a mapping")
    if DELEGATES in said:
        raise _refused(name, optimizer, f"its state_dict() has the key {DELEGATES!r}, which is reserved", "rename it")
    reading = Reading(optimizer, below, [])
    reading.asked, reading.inner = True, inner
    _split_said(reading, said)
    rest = _left_out(said, reading, is_stored, (*below, DELEGATES, *label))
    # A pure forwarder changes things where those inside it do, behind their hooks. Any other may do so anywhere.
    knows_more = bool(inner) and (bool(rest.views) or not _holds_nothing(reading.extras))
    eager = knows_more or not is_hooked(optimizer)
    for view in (*reading.views, *rest.views):
        view.eager = eager
    return [reading, rest] if rest.views else [reading]


def _split_said(reading: Reading, said: Mapping[Any, Any]) -> None:
    """Make views of the parts of a `state_dict()` that have torch's form, and extras of the rest."""
    owners = [holder for _, holder in _holders(reading.optimizer, reading.inner)]
    live = frozenset(chain.from_iterable(_tensor_ids(owner.state) for owner in owners))
    reading.extras = _split(said, reading, owners, (), (), live)


def _split(said: Any, reading: Reading, owners: list[Optimizer], path: Path, at: Path, live: frozenset[int]) -> Any:
    """``said`` without what views were made of, which are added to ``reading``: new containers where these were."""
    if isinstance(said, Mapping):
        owner = _owner_of(said, owners, [view.owner for view in reading.views])
        rest: Mapping[Any, Any] = said
        if owner is not None:
            reading.views.append(SaidView((*reading.below, *path), owner, said, at, live))
            rest = {key: value for key, value in said.items() if key not in NODE_KEYS}
        parts = {
            key: _split(value, reading, owners, (*path, str(key)), (*at, key), live) for key, value in rest.items()
        }
        same = owner is None and bool(at) and all(part is rest[key] for key, part in parts.items())
        return said if same else parts
    if type(said) is list:
        items = [_split(value, reading, owners, (*path, index), (*at, index), live) for index, value in enumerate(said)]
        return said if all(map(is_, items, said)) else items
    return said


def _owner_of(said: Mapping[Any, Any], owners: list[Optimizer], taken: list[Optimizer]) -> Optimizer | None:
    """The optimizer whose state ``said`` is, if it has the form that torch's `state_dict()` has.

    Where there is no state to know it by: one with these options, which isn't ``taken``; or one with groups of these
    sizes.
    """
    state, groups = said.get(STATE), said.get(GROUPS)
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get(PARAMS), list) for group in groups):
        return None
    numbers = list(chain.from_iterable(group[PARAMS] for group in groups))
    if any(type(number) is not int for number in numbers) or len(set(numbers)) < len(numbers):
        return None
    sizes = [len(group[PARAMS]) for group in groups]
    fitting = [owner for owner in owners if [len(group[PARAMS]) for group in owner.param_groups] == sizes]
    for owner in fitting:
        params = chain.from_iterable(group[PARAMS] for group in owner.param_groups)
        theirs = {number: owner.state.get(param) for number, param in zip(numbers, params, strict=True)}
        if any(value is not None and theirs.get(number) is value for number, value in state.items()):
            return owner
    alike = [owner for owner in fitting if all(map(_same_options, groups, owner.param_groups))]
    free = [owner for owner in alike if not any(owner is other for other in taken)]
    return next(iter(free or alike or fitting), None)


def _same_options(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return True if two groups have equal options apart from their parameters."""
    return left.keys() == right.keys() and all(
        option == PARAMS or value is right[option] for option, value in left.items()
    )


def _left_out(said: Mapping[Any, Any], reading: Reading, is_stored: IsStored | None, base: Path) -> Reading:
    """Read directly the state of the optimizer and those inside it that its `state_dict()` leaves out."""
    rest = Reading(reading.optimizer, reading.below, [])
    if not reading.inner:
        return rest
    given = frozenset(_tensor_ids(said))
    holders = _holders(reading.optimizer, reading.inner)
    several = any(not _same_groups(holders[0][1], holder) for _, holder in holders[1:])
    seen: list[Optimizer] = []
    for label, holder in holders:
        view = View((*base, label), holder)
        known = is_stored is not None and is_stored((*view.below, STATE))
        twin = any(holder.state is other.state for other in seen)
        # One that has no state yet may be left out when it has: that it has none is noted.
        view.empty = is_stored is None and not holder.state and not _is_owner(holder, reading.views)
        view.has_state = not twin and (known or view.empty or _has_more(holder, given, reading.views))
        view.has_options = several and not any(_same_groups(holder, other) for other in seen)
        seen.append(holder)
        if view.has_state or view.has_options:
            rest.views.append(view)
    return rest


def _is_owner(holder: Optimizer, views: list[View]) -> bool:
    return any(holder.state is view.owner.state for view in views)


def _has_more(holder: Optimizer, given: frozenset[int], views: list[View]) -> bool:
    """Return True if an optimizer has state that was returned neither itself nor, under its own keys, as a copy."""
    for param, state in holder.state.items():
        said = [view.state[param] for view in views if param in view.state]
        if any(each is state for each in said):
            continue
        if not isinstance(state, Mapping):
            if not said:
                return True
            continue
        keys = set(chain.from_iterable(each for each in said if isinstance(each, Mapping)))
        if any(key not in keys and id(value) not in given for key, value in state.items()):
            return True
    return False


def _tensor_ids(value: Any) -> Iterator[int]:
    """``id`` of every tensor in nested containers."""
    if isinstance(value, torch.Tensor):
        yield id(value)
        if unfolds(value):
            yield from (id(held(row)) for _, row in rows_of(value))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensor_ids(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensor_ids(item)


def _is_covered(value: Any, live: frozenset[int]) -> bool:
    """Return True if ``value`` consists only of containers and these tensors."""
    if isinstance(value, torch.Tensor):
        return id(value) in live
    if isinstance(value, (dict, list)):
        return all(_is_covered(item, live) for item in (value.values() if isinstance(value, dict) else value))
    return False


def _holds_nothing(value: Any) -> bool:
    return _is_covered(value, frozenset())


# updates -----------------------------------------------------------------------------------------------------------


def is_hooked(optimizer: object) -> bool:
    """Return True if torch calls the global step hook before ``optimizer`` changes its parameters in `step`."""
    if compat.step_calls_hooks(optimizer):
        return True
    inner = inner_optimizers(optimizer)
    return bool(inner) and all(is_hooked(other) for _, other in inner)


def unguarded_parameters(value: object) -> list[torch.Tensor]:
    """Parameters of an object that looks like an optimizer and is none of torch's: no hook says when it steps."""
    groups = getattr(value, GROUPS, None)
    if not isinstance(groups, list) or not callable(getattr(value, "step", None)) or is_hooked(value):
        return []
    return [
        param
        for group in groups
        if isinstance(group, Mapping) and isinstance(group.get(PARAMS), (list, tuple))
        for param in group[PARAMS]
        if isinstance(param, torch.Tensor)
    ]
