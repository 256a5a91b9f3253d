"""Save and load the optimizer of a module that FSDP1 (``FullyShardedDataParallel``) has flattened.

What such an optimizer holds is slices of flat parameters, without names and equal on no two ranks. So torch is asked:
``FSDP.optim_state_dict`` gives state by the parameters' names, sharded as they are, and ``optim_state_dict_to_load``
takes it. Names in a checkpoint are those of any other optimizer: it loads into FSDP2, DDP or one process, theirs here.

Guarantees: an optimizer that has made no step gets none; a checkpoint that doesn't fit is an error before anything is
changed. Its module has to be in the same state (`ConfigError`).
Assumes: all ranks ask and load at the same point, as torch gathers parameters and state for it.
Does not: stage lazily: what torch gives is made for the occasion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import Path, joined, torch_dtype
from holdfast.state.flatten import flatten, rebuild
from holdfast.state.load_plan import mismatch_error, optimizer_names
from holdfast.state.optimizer_views import GROUPS, PARAMS, STATE, keep_groups
from holdfast.state.shards import shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from holdfast.state.load_plan import LoadBuilder, Objects, OptimizerNames, Wanted
    from holdfast.state.modules import ModuleSource


class FSDP1Optimizer:
    """The optimizer at one path of the state."""

    def __init__(self, path: Path, optimizer: Optimizer) -> None:
        self.path = path
        self.optimizer = optimizer
        self.said: dict[str, Any] = {}
        """Its state by name, as asked for last."""
        self._module: nn.Module | None = None
        self._source: ModuleSource | None = None

    def find_module(self, sources: Sequence[ModuleSource]) -> None:
        """Find the module it is for. Raises `ConfigError` if none of ``sources`` has all of its parameters."""
        params = {id(param) for group in self.optimizer.param_groups for param in group[PARAMS]}
        for source in sources:
            for module in source.modules:
                if params <= compat.fsdp1_parameters(module):
                    self._module, self._source = module, source
                    return
        raise ConfigError(
            f"{joined(self.path)}: its parameters are slices of those of an FSDP1 module (FullyShardedDataParallel), "
            "which no module of this state has: put the module into the state, under a key of its own",
            field=joined(self.path),
        )

    def ask(self) -> dict[str, Any]:
        """Return its state by name. Every rank calls it."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert self._module is not None
        with compat.fsdp1_sharded(self._module):
            found: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(self._module, self.optimizer)
        return found

    def let_go(self) -> None:
        """Hold nothing of what was made for one look."""
        self.said = {}

    def empty(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return memory for state that isn't there yet; None if how it is sharded can't be told."""
        assert self._source is not None
        given = self._source.given.get(fqn)
        if not shape:
            return torch.empty((), dtype=dtype)
        if given is None or shape_of(given.value) != shape:
            return None
        if compat.is_sharded_tensor(given.value):
            return compat.empty_sharded_like(given.value, dtype)
        return torch.empty_like(given.value, dtype=dtype, requires_grad=False)

    def load(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Take what `ask` gives. Every rank calls it."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert self._module is not None
        before = self.optimizer.param_groups
        members = list(before)
        if not state:
            self.optimizer.state.clear()
            for present, group in zip(members, groups, strict=True):
                present.update({option: value for option, value in group.items() if option != PARAMS})
            return
        module, said = self._module, {STATE: state, GROUPS: groups}
        with compat.fsdp1_sharded(module):
            self.optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(module, self.optimizer, said)
            )
        keep_groups(self.optimizer, before, members)


def is_fsdp1_optimizer(optimizer: Optimizer) -> bool:
    """Return True if it steps slices of flat parameters."""
    groups = getattr(optimizer, GROUPS, ())
    return any(compat.is_fsdp1_parameter(param) for group in groups for param in group[PARAMS])


def plan_fsdp1(builder: LoadBuilder, part: FSDP1Optimizer, key: str) -> None:
    """Plan to fill what the optimizer said, or memory like it, and to hand that back."""
    groups: list[dict[str, Any]] = part.said[GROUPS]
    fqns = [fqn for group in groups for fqn in group[PARAMS]]
    names = optimizer_names(key, fqns, builder.names)
    if not names.state.startswith(f"{key}."):
        builder.know_flat([names.state, names.groups])
    builder.use([names.state[:-1]])
    state = {fqn: _plan_state(builder, part, names, fqn) for fqn in fqns}
    options = [_plan_group(builder, part, names, index, group) for index, group in enumerate(groups)]
    if not any(state.values()) and not any(options):
        return  # all of it is missing: it stays as it is

    def hand_back(objects: Objects) -> None:
        made = {fqn: {path: wanted(objects) for path, wanted in of.items()} for fqn, of in state.items() if of}
        read = [{option: wanted(objects) for option, wanted in of.items()} for of in options]
        part.load({fqn: rebuild(None, leaves) for fqn, leaves in made.items()}, _matched(part, groups, read))

    builder.then(hand_back)


def _plan_state(builder: LoadBuilder, part: FSDP1Optimizer, names: OptimizerNames, fqn: str) -> dict[Path, Wanted]:
    prefix = f"{names.state}{names.label_of[fqn]}"
    shown = joined((*part.path, STATE, fqn))
    stored = builder.names.below(prefix)
    present: dict[Path, Any] = {}
    flatten((), part.said[STATE].get(fqn, {}), present.__setitem__)
    leaves: dict[Path, Wanted] = {}
    for name in stored:
        path = builder.relative(name, prefix)
        like = present.pop(path, None)
        if not isinstance(like, torch.Tensor) and name in builder.tensors:
            info = builder.tensors[name]
            like = part.empty(fqn, tuple(info.shape), torch_dtype(info.dtype))
            if like is None:
                builder.use([name])
                builder.mismatch(
                    name, f"of shape {list(info.shape)}, which isn't the parameter's: FSDP1 has no place for it"
                )
                continue
        if isinstance(like, torch.Tensor):
            builder.fill(name, like, joined((shown, *path)))
            leaves[path] = _constant(like)
        else:
            leaves[path] = builder.value(name, like)
    for path, value in present.items():
        if stored and isinstance(value, torch.Tensor):
            builder.missing(joined((shown, *path)))
    return leaves


def _plan_group(
    builder: LoadBuilder, part: FSDP1Optimizer, names: OptimizerNames, index: int, group: Mapping[str, Any]
) -> dict[str, Wanted]:
    """Options of one group; those that the checkpoint lacks stay as they are."""
    label = group[PARAMS][0] if names.by_parameter and group[PARAMS] else str(index)
    base = f"{names.groups}{label}"
    for other in group[PARAMS] if names.by_parameter else ():
        builder.use(builder.names.below(f"{names.groups}{other}"))
    if not builder.names.any_below(base):
        builder.missing(joined((*part.path, GROUPS, index)))
        return {}
    found = {}
    for option, value in group.items():
        if option == PARAMS and names.by_parameter:
            continue
        wanted = builder.subtree(f"{base}.{option}", value, in_place=False)
        if wanted is not None:
            found[option] = wanted
    builder.use(builder.names.below(base))
    return found


def _matched(
    part: FSDP1Optimizer, groups: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each group with the options of the one that its parameters were in, whatever its number.

    Raises `StateMismatch` if they were not in one group.
    """
    made = []
    for index, (group, own) in enumerate(zip(groups, stored, strict=True)):
        mine = set(group[PARAMS])
        known = [of for of in stored if PARAMS in of]
        fitting = [of for of in known if mine <= set(of[PARAMS])] if known and mine else [own]
        if not fitting:
            name = joined((*part.path, GROUPS, index))
            detail = f"its {len(mine)} parameters ({min(mine)}, ...) are not those of one group in the checkpoint"
            raise mismatch_error("the checkpoint", mismatched=[name], details={name: detail})
        made.append({**group, **fitting[0], PARAMS: group[PARAMS]})
    return made


def _constant(value: Any) -> Wanted:
    return lambda _: value
