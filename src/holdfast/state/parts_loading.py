"""How each kind of part takes its share of a checkpoint: the planning half of `StateTree.destinations`.

Optimizers are never stepped: state that is stored and not there yet is made as the optimizer would make it, shaped
and placed like its parameter. State that is there although the checkpoint has none for the whole optimizer is
dropped, for that is what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.state.entries import Path, joined, torch_dtype
from holdfast.state.flatten import KEYS_NOTE, flatten, holds_nothing, rebuild
from holdfast.state.foreign import OptimizerNames, model_prefix, optimizer_names
from holdfast.state.loading import (
    GENERATORS,
    STATEFULS,
    LoadBuilder,
    Objects,
    StoredInfo,
    Wanted,
    fill_number,
    mismatch_error,
)
from holdfast.state.modules import ModuleSource
from holdfast.state.optimizers import OptimizerSource, groups_of
from holdfast.state.per_rank import PerRank
from holdfast.state.rng import RNG
from holdfast.state.values import LeafPart, StatefulPart

if TYPE_CHECKING:
    from torch.optim import Optimizer

_HOST_SCALARS = ("step", "mu_product")
"""0-dim state that optimizers keep on the host, unless they are capturable or fused."""


def plan_part(builder: LoadBuilder, part: ModuleSource | OptimizerSource | StatefulPart | LeafPart) -> None:
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
    else:
        _plan_leaf(builder, part, name)


# modules -------------------------------------------------------------------------------------------------------


def _plan_modules(builder: LoadBuilder, part: ModuleSource, key: str) -> None:
    fqns = [str(entry.path[-1]) for entry in part.tensors]
    prefix = f"{key}." if builder.fitted else model_prefix(key, fqns, builder.names)
    stored_somewhere = {
        id(e.tensor) for e, fqn in zip(part.tensors, fqns, strict=True) if prefix + fqn in builder.names
    }
    for entry, fqn in zip(part.tensors, fqns, strict=True):
        if prefix + fqn not in builder.names and (
            id(entry.tensor) in stored_somewhere or prefix + fqn in builder.optional
        ):
            continue  # tied: writers that keep a shared tensor once keep it under one of its names
        builder.fill(prefix + fqn, entry.tensor, entry.name)
    for path, module in part.extra_states:
        like = module.get_extra_state()
        wanted = builder.subtree(prefix + str(path[-1]), like)
        if wanted is not None:
            builder.then(lambda objects, module=module, wanted=wanted: module.set_extra_state(wanted(objects)))  # type: ignore[misc]
        elif like is not None and not holds_nothing(like) and prefix + str(path[-1]) not in builder.optional:
            builder.missing(joined(path))


# optimizers ----------------------------------------------------------------------------------------------------


def _plan_optimizers(builder: LoadBuilder, part: OptimizerSource, key: str) -> None:
    params = [param for group in groups_of(part.optimizers) for param in group["params"]]
    fqns = list(dict.fromkeys(part.fqn_of[id(param)] for param in params))
    names = optimizer_names(key, fqns, builder.names)
    groups_stored = _plan_groups(builder, part, names)
    stored = _state_by_label(builder, part, names)
    if groups_stored and not stored:
        for optimizer in part.optimizers:
            builder.then(lambda _, optimizer=optimizer: optimizer.state.clear())  # type: ignore[misc]
        return
    for optimizer in part.optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                fqn = part.fqn_of[id(param)]
                slot = _Slot(optimizer, group, param, joined((*part.path, "state", fqn)))
                _plan_state(builder, slot, stored.get(names.label_of[fqn], {}))
        for holder in _other_holders(optimizer):
            slot = _Slot(optimizer, {}, holder, joined((*part.path, "state", str(holder))))
            _plan_state(builder, slot, stored.get(str(holder), {}))
        builder.then(lambda _, optimizer=optimizer: place_steps(optimizer))  # type: ignore[misc]


def _state_by_label(builder: LoadBuilder, part: OptimizerSource, names: OptimizerNames) -> dict[str, dict[str, str]]:
    """label → what follows it → stored name, for the labels of this part."""
    labels = {*names.label_of.values()}
    labels.update(str(holder) for optimizer in part.optimizers for holder in _other_holders(optimizer))
    found: dict[str, dict[str, str]] = {}
    for name in builder.names.below(names.state[:-1]):
        rest = name[len(names.state) :]
        cut = len(rest)
        while cut > 0 and rest[:cut] not in labels:
            cut = rest.rfind(".", 0, cut)
        if cut > 0:
            found.setdefault(rest[:cut], {})[rest[cut + 1 :]] = name
    return found


class _Slot(NamedTuple):
    """Where an optimizer keeps the state of one parameter."""

    optimizer: Optimizer
    group: Mapping[str, Any]
    holder: Any
    """The parameter; or what else some optimizers key global state with."""
    shown: str

    @property
    def state(self) -> Any:
        return self.optimizer.state.get(self.holder, {})


def _other_holders(optimizer: Optimizer) -> list[Any]:
    holders: list[Any] = list(optimizer.state)
    return [holder for holder in holders if not isinstance(holder, torch.Tensor)]


def _plan_state(builder: LoadBuilder, slot: _Slot, stored: Mapping[str, str]) -> None:
    present: dict[str, Any] = {}
    flatten((), slot.state, lambda path, value: present.__setitem__(joined(path), value))
    for below, value in present.items():
        if isinstance(value, torch.Tensor) and below not in stored:
            builder.missing(f"{slot.shown}.{below}")
    leaves: dict[Path, Wanted] = {}
    for below, name in stored.items():
        like = present.get(below)
        path = builder.relative(name, name[: len(name) - len(below) - 1]) if below else ()
        if isinstance(like, torch.Tensor):
            builder.fill(name, like, f"{slot.shown}.{below}")
            leaves[path] = _constant(like)
        elif name in builder.tensors and not isinstance(like, (bool, int, float)):
            tensor = _new_state(slot, below, builder.tensors[name])
            builder.new_tensor(name, tensor)
            leaves[path] = _constant(tensor)
        else:
            leaves[path] = builder.value(name, like)
    if leaves:
        builder.then(lambda objects: _set_state(slot, {path: wanted(objects) for path, wanted in leaves.items()}))


def _constant(tensor: torch.Tensor) -> Wanted:
    return lambda _: tensor


def _set_state(slot: _Slot, leaves: Mapping[Path, Any]) -> None:
    if () in leaves:
        slot.optimizer.state[slot.holder] = leaves[()]
        return
    state = slot.optimizer.state.setdefault(slot.holder, {})
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


def _plan_groups(builder: LoadBuilder, part: OptimizerSource, names: OptimizerNames) -> bool:
    """Options of all groups; True if the checkpoint has any. One it lacks keeps its value, one only it has is set."""
    groups = groups_of(part.optimizers)
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
            builder.missing(joined((*part.path, "param_groups", index)))
    if not any(stored):
        return False

    def set_options(objects: Objects) -> None:
        chosen = stored if names.by_parameter else _matched(part, names, groups, stored, objects)
        for group, of_group in zip(groups, chosen, strict=True):
            for option, wanted in {} if of_group is None else of_group.options.items():
                _set_option(group, option, wanted(objects), joined((*part.path, "param_groups")))

    builder.then(set_options)
    return True


def _stored_group(builder: LoadBuilder, base: str, group: Mapping[str, Any]) -> _StoredGroup | None:
    """What is stored at ``base``; ``group`` says which kinds its options have, for those of one run have the same."""
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
    """For each group the stored one that its parameters were in, whatever its number.

    By number where members aren't noted, or are all under labels that are unknown here.
    """
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
    if isinstance(value, torch.Tensor):
        builder.fill(name, value, joined(part.path))
        return
    stored = builder.names.below(name)
    if not stored:
        if not isinstance(value, Mapping):
            builder.missing(joined(part.path))
        return
    if not isinstance(part.holder, (MutableMapping, list, PerRank)):
        builder.use(stored)
        builder.mismatch(joined(part.path), f"it sits in a {type(part.holder).__name__}, which can't be changed")
        return
    wanted = builder.subtree(name, value)
    assert wanted is not None
    builder.then(lambda objects: _put(part, wanted(objects)))


def _put(part: LeafPart, new: Any) -> None:
    """Replace a plain value; containers that the user may hold elsewhere too are changed in place."""
    if isinstance(part.value, list) and isinstance(new, list):
        part.value[:] = new
    elif isinstance(part.value, MutableMapping) and isinstance(new, Mapping):
        part.value.update(new)
    elif isinstance(part.holder, PerRank):
        part.holder.value = new
    else:
        part.holder[part.key] = new
