"""Plan how each kind of part loads its share of a checkpoint: the planning half of `StateTree.destinations`.

Optimizers are never stepped: stored state that an optimizer does not have yet is created as the optimizer would do it,
with the shape and placement of its parameter. If the checkpoint has no state for an optimizer at all, its existing
state is dropped, since that is what was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.state.entries import LeafPart, Path, PerRank, Replicated, StatefulPart, joined, shares_memory, torch_dtype
from holdfast.state.flatten import KEYS_NOTE, flatten, holds_nothing, rebuild
from holdfast.state.fsdp1 import FSDP1Optimizer, plan_fsdp1
from holdfast.state.load_plan import (
    GENERATORS,
    NOTES,
    STATEFULS,
    LoadBuilder,
    Objects,
    OptimizerNames,
    StoredInfo,
    Wanted,
    fill_number,
    mismatch_error,
    model_prefix,
    optimizer_names,
)
from holdfast.state.modules import ModuleSource, NotTaken
from holdfast.state.optimizer_views import DELEGATES, NODE_KEYS, Reading, SaidView, View
from holdfast.state.optimizers import OptimizerSource, groups_of
from holdfast.state.rng import RNG
from holdfast.state.shards import LocalPart, is_sharded, shape_of
from holdfast.state.subclasses import NOTE, check_note, new_row, notes_of, plain_like, unfolds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import nn
    from torch.optim import Optimizer

    from holdfast.state.modules import Given, Part


# Load a module whose state dict has hooks. If the names of ``state_dict()`` are stored, values in parameters and
# buffers are filled in place, others in the tensors that ``state_dict()`` returned; then ``load_state_dict`` gets all
# of them. If the module's own names are stored (saved without the hooks), these are filled directly. A mismatch is
# found before anything is changed if only torch's own ``load_state_dict`` runs, otherwise after it has run.

_log = logging.getLogger("holdfast.state")
_WHERE = "the checkpoint"
_UNPAIRED = "a hook of saving has none of loading that undoes it"
_LEFT_OUT = f"state_dict() leaves it out and load_state_dict() wants it: {_UNPAIRED}"
_NOT_TAKEN = f"state_dict() gives it and load_state_dict() doesn't take it: {_UNPAIRED}"


class HandBack:
    """State dict of one module with hooks, to be passed to its ``load_state_dict``."""

    def __init__(self, source: ModuleSource, part: Part) -> None:
        self.hooked = part.hooked
        self.given: dict[str, Given] = {key: source.given[name] for key, name in part.keys.items()}
        """By key in the module's own state dict."""
        self._metadata = part.metadata
        self._path = source.path

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.given.values()}

    def shown(self, name: str) -> str:
        return joined((*self._path, name))

    def unfit(self) -> dict[str, str]:
        """Return names that are known not to be restored before ``load_state_dict`` has run, with the reason."""
        if self.hooked.loads:
            return {}
        expected = {*self.hooked.own, *(str(path[-1]) for path, _ in self.hooked.extra_states)}
        return self._unfit(expected - self.names, self.names - expected)

    def load(self, values: Mapping[str, Any], *, strict: bool = True) -> None:
        """Give ``values``, by key, to ``load_state_dict``.

        Raises `StateMismatch` for what that doesn't take, `ConfigError` for what a hook raises.
        """
        try:
            result = self.hooked.load(values, self._metadata, strict=strict)
        except NotTaken as error:
            shown = self.hooked.shown
            raise mismatch_error(
                _WHERE, mismatched=[shown], details={shown: f"load_state_dict() says: {error}"}
            ) from error
        if not strict or self.hooked.judges_itself or result is None:
            return
        missing = {self.hooked.public(key) for key in getattr(result, "missing_keys", ())}
        unexpected = {self.hooked.public(key) for key in getattr(result, "unexpected_keys", ())}
        unfit = self._unfit(missing, unexpected)
        if unfit:
            raise mismatch_error(_WHERE, mismatched=list(unfit), details=unfit)

    def _unfit(self, missing: Iterable[str], unexpected: Iterable[str]) -> dict[str, str]:
        """Select from the missing and unexpected names of ``load_state_dict`` those that are mismatches.

        What lies in the module has been filled by whatever name it was given. What a hook leaves out on purpose may be
        missing where no optimizer trains it: buffers and frozen parameters.
        """
        given = {one.name: one for one in self.given.values()}
        filled = {id(one.value) for one in given.values() if one.in_place}
        unfit: dict[str, str] = {}
        for name in missing:
            tensor, is_parameter = self.hooked.own.get(name, (None, True))
            if tensor is None or (is_parameter and tensor.requires_grad and id(tensor) not in filled):
                unfit[self.shown(name)] = _LEFT_OUT
        for name in unexpected:
            if name not in given or not given[name].in_place:
                unfit[self.shown(name)] = _NOT_TAKEN
        return unfit


def plan_hooked(builder: LoadBuilder, back: HandBack, prefix: str, stored_somewhere: set[int]) -> None:
    """Plan the load of one module with hooks; ``prefix`` is before its source's names in the checkpoint."""
    hooked = back.hooked
    if not builder.fitted and _is_stored_without_hooks(builder, back, prefix):
        _log.info(
            "%s: stored as its own parameters and buffers, and not as its state_dict() gives them: loaded directly, "
            "without hooks",
            hooked.shown,
        )
        for name, (tensor, _) in hooked.own.items():
            fill_unless_tied(builder, prefix + name, tensor, back.shown(name), stored_somewhere)
        for path, module in hooked.extra_states:
            plan_extra_state(builder, prefix + str(path[-1]), module, joined(path))
        return
    values: dict[str, Wanted] = {}
    any_stored = False
    for key, given in back.given.items():
        any_stored |= bool(builder.names.below(prefix + given.name))
        shown = back.shown(given.name)
        values[key] = _wanted(builder, given, prefix + given.name, shown, stored_somewhere)
    if not any_stored:
        return
    for name, detail in back.unfit().items():
        builder.mismatch(name, detail)
    strict = builder.strict
    builder.then(lambda objects: back.load({key: value(objects) for key, value in values.items()}, strict=strict))


def _is_stored_without_hooks(builder: LoadBuilder, back: HandBack, prefix: str) -> bool:
    """Return True if the checkpoint has all parameters and buffers under their own names, not as hooks return them."""
    own = {name: tensor for name, (tensor, _) in back.hooked.own.items()}
    given = {one.name: one.value for one in back.given.values() if one.is_tensor}

    def fit(tensors: Mapping[str, torch.Tensor]) -> bool:
        infos = {name: builder.tensors.get(prefix + name) for name in tensors}
        return all(info is not None and tuple(info.shape) == shape_of(tensors[name]) for name, info in infos.items())

    return bool(own) and fit(own) and (bool(own.keys() - given.keys()) or not fit(given))


def _wanted(builder: LoadBuilder, given: Given, stored: str, shown: str, stored_somewhere: set[int]) -> Wanted:
    value = given.value
    if not given.is_tensor:
        wanted = None if not builder.takes(shown) else builder.subtree(stored, value, in_place=False)
        if wanted is not None:
            return wanted
        if value is not None and not holds_nothing(value) and builder.takes(shown) and stored not in builder.optional:
            builder.missing(shown)
        return lambda _: value
    tensor: torch.Tensor = value
    if not given.in_place and not is_sharded(tensor) and shares_memory(tensor):
        tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
    fill_unless_tied(builder, stored, tensor, shown, stored_somewhere)
    return lambda _: tensor


def fill_unless_tied(
    builder: LoadBuilder, stored: str, tensor: torch.Tensor, shown: str, stored_somewhere: set[int]
) -> None:
    """Want ``stored`` in ``tensor``, unless the tensor is filled from another name that it is tied to."""
    if (
        builder.takes(shown)
        and stored not in builder.names
        and (id(tensor) in stored_somewhere or stored in builder.optional)
    ):
        return  # writers that keep a shared tensor once keep it under one of its names
    builder.fill(stored, tensor, shown)


def plan_extra_state(builder: LoadBuilder, stored: str, module: nn.Module, shown: str) -> None:
    """Want what ``get_extra_state`` of ``module`` gave, for its ``set_extra_state``."""
    if not builder.takes(shown):
        return
    like = module.get_extra_state()
    wanted = builder.subtree(stored, like)
    if wanted is not None:

        def put(objects: Objects) -> None:
            module.set_extra_state(wanted(objects))

        builder.then(put)
    elif like is not None and not holds_nothing(like) and stored not in builder.optional:
        builder.missing(shown)


_HOST_SCALARS = ("step", "mu_product")
"""0-dim state that optimizers keep on the host, unless they are capturable or fused."""


def plan_part(
    builder: LoadBuilder, part: ModuleSource | OptimizerSource | FSDP1Optimizer | StatefulPart | LeafPart
) -> None:
    home = builder.home_of(part.path)
    name, every = home if home is not None else (joined(part.path), [])
    if isinstance(part, StatefulPart):
        _plan_stateful(builder, part, None if home is None else name, every)
    elif every:
        builder.other_world(part.path)
    elif isinstance(part, ModuleSource):
        _plan_modules(builder, part, name)
    elif isinstance(part, OptimizerSource):
        _plan_optimizers(builder, part, name)
    elif isinstance(part, FSDP1Optimizer):
        plan_fsdp1(builder, part, name)
    else:
        _plan_leaf(builder, part, name)


# modules -------------------------------------------------------------------------------------------------------


def _plan_modules(builder: LoadBuilder, part: ModuleSource, key: str) -> None:
    names = [name for name, _, _ in part.wanted()]
    raw = [name for asked in part.asked.parts for name in asked.hooked.own]
    prefix = f"{key}." if builder.fitted else model_prefix(key, [*names, *raw], builder.names)
    if not prefix:
        builder.know_flat([*names, *raw])
    stored_somewhere = {id(tensor) for name, tensor, _ in part.wanted() if prefix + name in builder.names}
    by_hooks: set[str] = set()
    for asked in part.asked.parts:
        back = HandBack(part, asked)
        plan_hooked(builder, back, prefix, stored_somewhere)
        by_hooks |= back.names
    for name, tensor, _ in part.wanted():
        if name not in by_hooks:
            fill_unless_tied(builder, prefix + name, tensor, joined((*part.path, name)), stored_somewhere)
    for path, module in part.extra_states:
        plan_extra_state(builder, prefix + str(path[-1]), module, joined(path))
    for one in part.noted():
        _plan_notes(builder, prefix + one.name, one.entry.tensor, one.entry.name)
    builder.use(prefix + name for name in part.left_out())


def _plan_notes(builder: LoadBuilder, stored: str, tensor: torch.Tensor, shown: str) -> None:
    """Compare what is noted of a tensor that is stored as its inner tensors with what it is here."""
    if not builder.takes(shown):
        return
    local = compat.dtensor_local(tensor) if compat.is_dtensor(tensor) else tensor
    builder.then(lambda _: compat.forget_derived(local))
    for below, here in notes_of(tensor, shown):
        note = f"{stored}.{below}"
        if note not in builder.objects:
            builder.missing(f"{shown}.{below}")
            continue
        wanted = builder.value(note)
        builder.then(lambda objects, wanted=wanted, here=here: check_note(wanted(objects), here, shown), order=NOTES)  # type: ignore[misc]


# optimizers ----------------------------------------------------------------------------------------------------


def _plan_optimizers(builder: LoadBuilder, part: OptimizerSource, key: str) -> None:
    """Plan what is filled; then what is given back by `load_state_dict`; then what only optimizers inside have."""
    sections = part.sections()
    depths = sorted({below.count(DELEGATES) for below in (*sections, *(each.below for each in part.readings))})
    for depth in depths:
        for below, views in sections.items():
            if below.count(DELEGATES) == depth:
                _plan_section(builder, part, joined((key, *below)), below, views)
        for reading in part.readings:
            if reading.asked and reading.below.count(DELEGATES) == depth:
                _plan_giving_back(builder, part, reading, joined((key, *reading.below)))


def _plan_section(builder: LoadBuilder, part: OptimizerSource, key: str, below: Path, views: Sequence[View]) -> None:
    """State and options of optimizers whose groups are numbered on from one to the next."""
    params = [param for view in views for group in view.groups for param in group["params"]]
    fqns = list(dict.fromkeys(part.fqn_of[id(param)] for param in params))
    names = optimizer_names(key, fqns, builder.names, bare=not below)
    if not names.state.startswith(f"{key}."):
        builder.know_flat([names.state, names.groups])
    groups_stored = _plan_groups(builder, part, below, views, names)
    notes = names.state + KEYS_NOTE
    others = {name[len(notes) + 1 :]: builder.value(name) for name in builder.names.below(notes) if name != notes}
    stored = _state_by_label(builder, part, views, names, others)
    with_state = [view for view in views if view.has_state]
    noted_empty = names.state[:-1] in builder.names
    builder.use([names.state[:-1]])
    if (groups_stored or noted_empty) and not stored:
        for view in with_state:
            builder.then(lambda _, view=view: view.clear())  # type: ignore[misc]
        with_state = []
    for view in with_state:
        for group in view.groups:
            for param in group["params"]:
                fqn = part.fqn_of[id(param)]
                of_param = stored.get(names.label_of[fqn], {})
                if view.partial and not view.holds(param):
                    builder.use(of_param.values())
                    continue
                _plan_state(builder, _Slot(view, group, param, joined((*part.path, *below, "state", fqn))), of_param)
        known = {str(holder): holder for holder in view.state if not isinstance(holder, torch.Tensor)}
        for label in dict.fromkeys((*known, *others)):
            slot = _Slot(view, {}, known.get(label, label), joined((*part.path, *below, "state", label)))
            _plan_state(builder, slot, stored.get(label, {}), others.get(label))
    for view in views:
        builder.then(lambda _, view=view: _settle(view))  # type: ignore[misc]


def _state_by_label(
    builder: LoadBuilder,
    part: OptimizerSource,
    views: Sequence[View],
    names: OptimizerNames,
    others: Collection[str],
) -> dict[str, dict[str, str]]:
    """label → what follows it → stored name, for the labels of this part."""
    labels = {*names.label_of.values(), *others}
    labels.update(str(holder) for view in views for holder in view.state if not isinstance(holder, torch.Tensor))
    found: dict[str, dict[str, str]] = {}
    for name in builder.names.below(names.state[:-1]):
        rest = name[len(names.state) :]
        label = builder.item_below(name, names.state[:-1])
        if label is not None:
            if label in labels:
                found.setdefault(label, {})[rest[len(label) + 1 :]] = name
            elif part.unnamed:
                builder.hint(
                    f"The parameters of {joined(part.path)} are in no module of the state, and have numbers there, "
                    "where the checkpoint has names: put the module that they are of into the state."
                )
            continue
        cut = len(rest)
        while cut > 0 and rest[:cut] not in labels:
            cut = rest.rfind(".", 0, cut)
        if cut > 0:
            found.setdefault(rest[:cut], {})[rest[cut + 1 :]] = name
    return found


def _plan_giving_back(builder: LoadBuilder, part: OptimizerSource, reading: Reading, key: str) -> None:
    """Plan to call an optimizer's own `load_state_dict` with the stored form of its `state_dict()`, once it is read."""
    nodes = [joined((key, *view.below[len(reading.below) :], kind)) for view in reading.views for kind in NODE_KEYS]
    stored = [
        name
        for name in builder.names.below(key)
        if not any(name.startswith(f"{other}.") for other in (*nodes, f"{key}.{DELEGATES}"))
    ]
    present = {str(item): value for item, value in reading.extras.items()}
    if sum(other.asked and other.below == reading.below for other in part.readings) > 1:  # each has its own
        stored = [name for name in stored if str(builder.relative(name, key)[0]) in present]
    for item, value in present.items():
        mine = f"{key}.{item}"
        if not holds_nothing(value) and not any(name == mine or name.startswith(f"{mine}.") for name in stored):
            builder.missing(joined((*part.path, *reading.below, item)))
    if not builder.names.below(key) and not any(builder.names.any_below(node) for node in ("state", "param_groups")):
        return  # all of it is missing: it stays as it is
    wanted = builder.gather(key, stored, reading.extras, in_place=False) if stored else None

    def give_back(objects: Objects) -> None:
        extras = reading.extras if wanted is None else wanted(objects)
        reading.give_back({**reading.extras, **extras})

    builder.then(give_back)


class _Slot(NamedTuple):
    """Location of the state of one parameter in an optimizer."""

    view: View
    group: Mapping[str, Any]
    holder: Any
    """The parameter; or what else some optimizers key global state with."""
    shown: str


def _plan_state(builder: LoadBuilder, slot: _Slot, stored: Mapping[str, str], holder: Wanted | None = None) -> None:
    """holder: gives the key that the state goes under, where the optimizer doesn't have it yet."""
    present: dict[str, Any] = {}
    flatten((), slot.view.state.get(slot.holder, {}), lambda path, value: present.__setitem__(joined(path), value))
    for below, value in present.items():
        if isinstance(value, torch.Tensor | LocalPart) and below not in stored:
            builder.missing(f"{slot.shown}.{below}")
    if not present and isinstance(slot.holder, torch.Tensor):
        _refuse_other_kinds(builder, slot, stored)
    leaves: dict[Path, Wanted] = {}
    for below, name in stored.items():
        like = present.get(below)
        path = builder.relative(name, name[: len(name) - len(below) - 1]) if below else ()
        if isinstance(like, torch.Tensor | LocalPart):
            tensor = slot.view.destination(like)
            builder.fill(name, tensor, f"{slot.shown}.{below}")
            leaves[path] = _constant(tensor)
        elif name in builder.tensors and not isinstance(like, (bool, int, float)):
            info = builder.tensors[name]
            if compat.is_dtensor(slot.holder) and f"{below.rpartition('.')[0]}.{NOTE}" in stored:
                row = new_row(slot.holder, f"{slot.shown}.{below}", tuple(info.shape), torch_dtype(info.dtype))
                builder.fill(name, row, f"{slot.shown}.{below}")
                leaves[path] = _constant(row)
                continue
            tensor = _new_state(slot, below, info)
            builder.new_tensor(name, tensor)
            leaves[path] = _constant(tensor)
        else:
            leaves[path] = builder.value(name, like)
    if leaves:
        builder.then(
            lambda objects: _set_state(
                slot.view.target,
                slot.holder if holder is None else holder(objects),
                {path: wanted(objects) for path, wanted in leaves.items()},
            )
        )


def _refuse_other_kinds(builder: LoadBuilder, slot: _Slot, stored: Mapping[str, str]) -> None:
    """Note stored state of a kind that the optimizer, which has none yet, would not make, and might step all the same.

    Plain state for one that quantizes its own; quantized state for one of torch's, whose parameter isn't.
    """
    owner, holder = slot.view.owner, slot.holder
    kind = type(owner).__qualname__
    made = compat.made_state(owner, holder)
    for below, name in stored.items():
        shown = f"{slot.shown}.{below}"
        if made is not None and unfolds(made) and name in builder.tensors:
            info = builder.tensors[name]
            if "." not in below and tuple(info.shape) == tuple(holder.shape):
                builder.mismatch(shown, f"stored as a plain {info.dtype}, and {kind} makes a {type(made).__qualname__}")
        elif below.endswith(f".{NOTE}") and not unfolds(holder) and type(owner).__module__.startswith("torch.optim."):
            outer = shown.removesuffix(f".{NOTE}")
            builder.mismatch(outer, f"stored as inner tensors of a quantized one, and {kind} makes a plain one")


def _constant(tensor: Any) -> Wanted:
    return lambda _: tensor


def _set_state(target: Any, holder: Any, leaves: Mapping[Path, Any]) -> None:
    if () in leaves:
        target[holder] = leaves[()]
        return
    state = target.setdefault(holder, {})
    keys = {str(key): key for key in [*state, *leaves.get((KEYS_NOTE,), ())]}
    branches: dict[Any, dict[Path, Any]] = {}
    for path, value in leaves.items():
        if path == (KEYS_NOTE,):
            continue
        branches.setdefault(path[0], {})[path[1:]] = value
    for item, branch in branches.items():
        key = keys.get(str(item), item)
        state[key] = rebuild(state.get(key), branch)


def _new_state(slot: _Slot, below: str, info: StoredInfo) -> torch.Tensor:
    """Memory for stored state that isn't there yet, where the optimizer would have put it."""
    dtype, shape, holder = torch_dtype(info.dtype), tuple(info.shape), slot.holder
    if not isinstance(holder, torch.Tensor):
        return torch.empty(shape, dtype=dtype)
    if shape == () and below in _HOST_SCALARS:
        on_device = slot.group.get("capturable") or slot.group.get("fused")
        return torch.empty((), dtype=dtype, device=holder.device if on_device else "cpu")
    if shape == tuple(holder.shape) and unfolds(holder):
        return plain_like(holder, dtype)
    if shape == tuple(holder.shape):
        return torch.empty_like(holder, dtype=dtype, requires_grad=False)
    if shape and compat.is_dtensor(holder):
        return _distributed_like(holder, shape, dtype)
    return torch.empty(shape, dtype=dtype, device=holder.device)


def _distributed_like(param: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A DTensor of another shape on the parameter's mesh, sharded where the two agree on the size, else replicated."""
    from torch.distributed.tensor import Replicate, empty

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    kept = []
    for placement in placements:
        agrees = (
            placement.is_shard()
            and compat.strided_shard_split(placement) is None
            and len(shape) == param.ndim
            and shape[placement.dim] == param.shape[placement.dim]
        )
        kept.append(placement if agrees else Replicate())
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=kept)


class _StoredGroup(NamedTuple):
    """The options of one group as they are stored; ``members`` gives the labels of its parameters, where noted."""

    members: Wanted | None
    options: Mapping[Any, Wanted]


def _plan_groups(
    builder: LoadBuilder, part: OptimizerSource, below: Path, views: Sequence[View], names: OptimizerNames
) -> bool:
    """Options of all groups; True if the checkpoint has any. One it lacks keeps its value, one only it has is set."""
    groups = groups_of(views)
    stored: list[_StoredGroup | None] = []
    for index, group in enumerate(groups):
        base = f"{names.groups}{index}"
        if names.by_parameter:
            bases = [names.groups + part.fqn_of[id(param)] for param in group["params"]]
            base = next((base for base in bases if builder.names.any_below(base)), base if bases else "")
            for other in bases:
                builder.use(builder.names.below(other))
        stored.append(_stored_group(builder, base, group) if base else None)
        if base and stored[-1] is None:
            builder.missing(joined((*part.path, *below, "param_groups", index)))
    if not any(stored):
        return False

    def set_options(objects: Objects) -> None:
        now = groups_of(views)  # `load_state_dict` of an optimizer may have made new ones
        chosen = stored if names.by_parameter else _matched(part, names, now, stored, objects)
        for group, of_group in zip(now, chosen, strict=True):
            for option, wanted in {} if of_group is None else of_group.options.items():
                _set_option(group, option, wanted(objects), joined((*part.path, *below, "param_groups")))

    builder.then(set_options)
    return True


def _stored_group(builder: LoadBuilder, base: str, group: Mapping[str, Any]) -> _StoredGroup | None:
    """Return the group stored at ``base``; ``group`` gives the kinds of its options, which are equal within a run."""
    stored = builder.names.below(base)
    if not stored:
        return None
    leaves: dict[Any, dict[Path, str]] = {}
    for name in stored:
        path = builder.relative(name, base)
        leaves.setdefault(path[0], {})[path[1:]] = name
    members = leaves.pop("params", {})
    builder.use(members.values())
    # Values of their own, even of tensors: which group they are for is known when `members` has been read.
    options = {option: _option(builder, of_option, group.get(option)) for option, of_option in leaves.items()}
    return _StoredGroup(builder.value(members[()]) if () in members else None, options)


def _option(builder: LoadBuilder, leaves: Mapping[Path, str], like: Any) -> Wanted:
    kind = None if isinstance(like, torch.Tensor) else like
    wanted = {path: builder.value(name, None if path else kind) for path, name in leaves.items()}
    return lambda objects: rebuild(kind, {path: value(objects) for path, value in wanted.items()})


def _matched(
    part: OptimizerSource,
    names: OptimizerNames,
    groups: Sequence[Mapping[str, Any]],
    stored: Sequence[_StoredGroup | None],
    objects: Objects,
) -> list[_StoredGroup | None]:
    """Return for each group the stored group that its parameters were in, whatever its number."""
    members = [
        set(map(str, of.members(objects))) if of is not None and of.members is not None else set() for of in stored
    ]
    labels = [{names.label_of[part.fqn_of[id(param)]] for param in group["params"]} for group in groups]
    if labels == members or not set().union(*labels) & set().union(*members):
        return list(stored)
    chosen: list[_StoredGroup | None] = []
    for index, of_group in enumerate(labels):
        homes = [at for at, of_stored in enumerate(members) if of_stored & of_group]
        if not homes and stored[index] is None:
            chosen.append(None)  # all new: missing, as has been said
            continue
        if len(homes) > 1 or (of_group and not homes):
            name = joined((*part.path, "param_groups", index))
            where = f"are of groups {homes}" if homes else "are in no group"
            raise mismatch_error(
                "the checkpoint",
                mismatched=[name],
                details={name: f"its {len(of_group)} parameters ({min(of_group)}, ...) {where} in the checkpoint"},
            )
        chosen.append(stored[homes[0] if homes else index])
    return chosen


def _set_option(group: dict[str, Any], option: Any, value: Any, name: str) -> None:
    present = group.get(option)
    if not isinstance(present, torch.Tensor):
        group[option] = value
    elif isinstance(value, torch.Tensor):
        if value.shape != present.shape:
            detail = f"stored as {list(value.shape)}, the state has {list(present.shape)}"
            raise mismatch_error(name, mismatched=[f"{name}.{option}"], details={f"{name}.{option}": detail})
        with torch.no_grad():  # a compiled step refers to the tensor
            compat.copy_(present, value)
    else:
        fill_number(f"{name}.{option}", present, value)


def _settle(view: View) -> None:
    """Do what is to be done when all state and options have been set."""
    if isinstance(view, SaidView):
        return  # `load_state_dict` will
    if view.partial:  # what its own `load_state_dict` may have left in the outer one is not what it steps with
        view.front.state.clear()
    if view.front is not view.owner:
        for outer, inner in zip(view.front.param_groups, view.owner.param_groups, strict=True):
            inner.update({option: value for option, value in outer.items() if option != "params"})
    place_steps(view.owner)


def place_steps(optimizer: Optimizer) -> None:
    """Move step counts to the device where the options, as they are now, say so: torch refuses others at its next step.

    As torch's own ``load_state_dict`` does, which takes the stored options over, too.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                for key in _HOST_SCALARS if isinstance(state, dict) else ():
                    if isinstance(state.get(key), torch.Tensor):
                        state[key] = state[key].to(param.device)


# stateful objects and plain values -----------------------------------------------------------------------------


def _plan_stateful(builder: LoadBuilder, part: StatefulPart, home: str | None, every: list[str]) -> None:
    order = GENERATORS if isinstance(part.stateful, RNG) else STATEFULS
    like = part.stateful.state_dict()
    if every:
        reshard = getattr(part.stateful, "reshard_state_dict", None)
        if not callable(reshard):
            builder.other_world(part.path)
            return
        states = [wanted for name in every if (wanted := builder.subtree(name, like, in_place=False)) is not None]

        def hand_over(objects: Objects) -> None:
            mine = reshard([wanted(objects) for wanted in states], builder.rank, builder.world)
            if mine is not None:
                part.stateful.load_state_dict(mine)

        builder.then(hand_over, order=order)
        return
    wanted = None if home is None else builder.subtree(home, like)
    if wanted is not None:
        state = wanted
        builder.then(lambda objects: part.stateful.load_state_dict(state(objects)), order=order)
    elif not part.optional and not holds_nothing(like):
        builder.missing(joined(part.path))


def _plan_leaf(builder: LoadBuilder, part: LeafPart, name: str) -> None:
    value = part.value
    if isinstance(value, torch.Tensor) or is_sharded(value):
        builder.fill(name, value, joined(part.path))
        if unfolds(value):
            _plan_notes(builder, name, value, joined(part.path))
        return
    stored = [each for each in builder.names.below(name) if each != f"{name}.{KEYS_NOTE}"]
    if not stored:
        if part.is_whole or not isinstance(value, Mapping):
            builder.missing(joined(part.path))
        return
    if not isinstance(part.holder, (MutableMapping, list, PerRank, Replicated)):
        builder.use(stored)
        builder.mismatch(joined(part.path), f"it sits in a {type(part.holder).__name__}, which can't be changed")
        return
    wanted = builder.subtree(name, value)
    assert wanted is not None
    builder.then(lambda objects: _put(part, wanted(objects)))


def _put(part: LeafPart, new: Any) -> None:
    """Replace a plain value; containers that the user may hold elsewhere too are changed in place."""
    if part.is_whole:
        part.holder[part.key] = new
    elif isinstance(part.value, list) and isinstance(new, list):
        part.value[:] = new
    elif isinstance(part.value, MutableMapping) and isinstance(new, Mapping):
        part.value.update(new)
    elif isinstance(part.holder, PerRank | Replicated):
        part.holder.value = new
    else:
        part.holder[part.key] = new
