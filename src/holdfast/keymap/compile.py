"""From what a user calls a key map to what an export is made by: `compile_key_map`.

A key map is None (what a transformers model's own ``save_pretrained`` would do, names as they are for anything else), a
rule, a mapping of old names to new ones (None drops a tensor), a torchtitan ``StateDictAdapter`` or anything else with
``to_hf`` and ``from_hf``, a function from state dict to state dict, or a sequence of these, one after another.

Guarantees: what is returned fills every element of every tensor exactly once; every element of the state goes somewhere
or was dropped by name. All else is a `ConfigError` that names rule and tensors, before anything is written: a rule that
matches nothing, two sources for one name, missing pieces, a tensor nobody maps, names that aren't the model's.
Deterministic: every rank that compiles the same map for the same state gets the same.
Does not: read or write tensors, know which rank has what.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, listed
from holdfast.keymap.moves import KeyMapping, MappedTensor, inverted, uncovered
from holdfast.keymap.rules import Fp8, Named, Notes, Rule, refused
from holdfast.keymap.tracing import SymbolicTensor, is_cast_by_rule, origin, run_on_stand_ins, stand_in, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.keymap.moves import Move
    from holdfast.keymap.tracing import Sources

    StateDict = dict[str, torch.Tensor]

_CAST_BY_DTYPE: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
"""What the export's dtype applies to. Of float8 it does not: without its scales it means nothing in another dtype."""


def compile_key_map(
    key_map: Any,
    sources: Sources,
    *,
    dtype: torch.dtype | None = None,
    fp32_keys: Sequence[str] = (),
    tied: Sequence[Sequence[str]] = (),
    model: Any = None,
) -> KeyMapping:
    """Compile ``key_map`` for a state with tensors of these names, shapes and dtypes.

    dtype: of every floating-point tensor of the export that no rule casts; each keeps its own without it.
    fp32_keys: regular expressions; tensors of the export whose names one of them matches are written in float32.
    tied: groups of names of the state that are one tensor in memory; those of ``model`` without it.
    model: the module the state is of, for the default map; names are relative to it. A tuple of modules: those of its
        stages that are here, where the state has what all stages have.

    Raises:
        ConfigError: as the module says.
    """
    _check_dtype(dtype)
    notes = Notes(tied=_tied(tied, sources, model), model=model)
    state: StateDict = {name: stand_in(name, shape, kind) for name, (shape, kind) in sources.items()}
    for step in steps_of(key_map):
        state = step.applied_to(state, notes)
    _check_quantized(state, notes)
    targets: dict[str, MappedTensor] = {}
    storages = _storages(state)
    for name, tensor in state.items():
        kind = _final_dtype(name, tensor, dtype, fp32_keys)
        made = traced(name, tensor, kind)
        _add(targets, MappedTensor(name, made.shape, made.dtype, made.moves, storage=storages.get(name)))
        if id(tensor) in notes.blocks:
            _add(targets, _scales(targets[name], notes.blocks[id(tensor)][1]))
    for pattern in fp32_keys:
        if not any(re.search(pattern, name) for name in targets):
            raise ConfigError(
                f"fp32_keys: no tensor of the export matches {pattern!r}; there are {listed(targets) or 'none'}",
                field="fp32_keys",
            )
    _check_all_used(sources, targets.values(), notes)
    return KeyMapping(tuple(targets.values()), dict(notes.aliases))


def _tied(tied: Sequence[Sequence[str]], sources: Sources, model: Any) -> list[list[str]]:
    if not tied and isinstance(model, torch.nn.Module):
        from holdfast.keymap.hf_default import named_tensors, tied_among

        tied = tied_among(named_tensors(model))
    return [list(group) for group in tied if any(name in sources for name in group)]


def _storages(state: StateDict) -> dict[str, str]:
    """Map tensors that would share memory to the tensor that stands for their storage: the first of its names."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        if isinstance(tensor, SymbolicTensor):
            found = first.setdefault(id(tensor.memory), name)
            if found != name:
                shared[name] = shared[found] = found
    return shared


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or compat.dtype_name(dtype) not in _CAST_BY_DTYPE):
        raise ConfigError(
            f"dtype: {dtype!r} is not one of {', '.join(sorted(_CAST_BY_DTYPE))}; for float8 with scales use the key "
            "map's `Fp8` rule",
            field="dtype",
        )


def _final_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype | None, fp32_keys: Sequence[str]) -> str:
    own = compat.dtype_name(tensor.dtype)
    if own not in _CAST_BY_DTYPE or is_cast_by_rule(tensor):
        return own
    if any(re.search(pattern, name) for pattern in fp32_keys):
        return "float32"
    return own if dtype is None else compat.dtype_name(dtype)


def _add(targets: dict[str, MappedTensor], tensor: MappedTensor) -> None:
    if tensor.name in ("", "__metadata__"):
        raise ConfigError(f"key_map: `{tensor.name}` can't be a tensor's name in a safetensors file", field="key_map")
    if tensor.name in targets:
        raise ConfigError(f"key_map: the export would have two tensors called `{tensor.name}`", field="key_map")
    targets[tensor.name] = tensor


# accepted forms ------------------------------------------------------------------------------------------------


def steps_of(key_map: Any) -> list[Rule]:
    """``key_map``, in any of the forms that are accepted, as rules."""
    if key_map is None:
        from holdfast.keymap.hf_default import HFDefault

        return [HFDefault()]
    if isinstance(key_map, str):
        raise ConfigError(f"key_map: {key_map!r} is a string; {_FORMS}", field="key_map")
    if isinstance(key_map, type):
        raise ConfigError(f"key_map: {key_map.__name__} is a class; pass an instance. {_FORMS}", field="key_map")
    if isinstance(key_map, Rule):
        return [key_map]
    if callable(getattr(key_map, "to_hf", None)) and hasattr(key_map, "from_hf"):
        return [_Function(key_map.to_hf, f"{type(key_map).__name__}.to_hf")]
    if isinstance(key_map, Mapping):
        return [_Names(dict(key_map))]
    if isinstance(key_map, Sequence):
        return [step for one in key_map for step in steps_of(one)]
    if callable(key_map):
        return [_Function(key_map, getattr(key_map, "__qualname__", type(key_map).__name__))]
    raise ConfigError(f"key_map: {type(key_map).__name__} can't be used; {_FORMS}", field="key_map")


_FORMS: Final = (
    "a key map is None, a rule of holdfast.export, a mapping of old names to new ones, an object with `to_hf` and "
    "`from_hf`, a function from state dict to state dict, or a sequence of these"
)


@dataclass(frozen=True, slots=True)
class _Function:
    """A user's function over the state dict."""

    function: Callable[[StateDict], Any]
    shown: str

    def __repr__(self) -> str:
        return f"`{self.shown}`"

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        return run_on_stand_ins(self.function, state, shown=self.shown)


@dataclass(frozen=True, slots=True)
class _Names:
    """A mapping of old names to new ones: all of them, each known."""

    names: dict[Any, Any]

    def __repr__(self) -> str:
        return "the mapping of names"

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        odd = [f"{old!r}: {new!r}" for old, new in self.names.items() if not _is_name(old, new)]
        if odd:
            raise refused(self, f"names are strings, and None drops a tensor; found {listed(odd)}")
        unknown = [old for old in self.names if old not in state]
        # Of tied names one is enough.
        named = {old for old, new in self.names.items() if new is not None}
        stood_for = {name for group in notes.tied if named.intersection(group) for name in group}
        left = [name for name in state if name not in self.names and name not in stood_for]
        if unknown or left:
            what = [f"it names {listed(unknown)}, which the state does not have"] if unknown else []
            what += [f"it does not say what becomes of {listed(left)} (None drops a tensor)"] if left else []
            raise refused(self, "; ".join(what))
        made = Named(self)
        for old, tensor in state.items():
            new = self.names.get(old)
            if new is not None:
                made.add(new, tensor, old)
            else:
                notes.drop(tensor)
        return made.state


def _is_name(old: object, new: object) -> bool:
    return isinstance(old, str) and (new is None or (isinstance(new, str) and bool(new)))


# quantized tensors ---------------------------------------------------------------------------------------------


def _check_quantized(state: StateDict, notes: Notes) -> None:
    there = {id(tensor) for tensor in state.values()}
    for number, (tensor, rule) in notes.blocks.items():
        if number not in there:
            raise refused(
                rule,
                f"what it made of {tensor.memory.shown()} was changed or left out after it; only renames may follow",
            )
    once: set[int] = set()
    for name, number in ((name, id(tensor)) for name, tensor in state.items()):
        if number in once:
            raise refused(notes.blocks[number][1], f"`{name}` is a second name of what it made: drop one before it")
        if number in notes.blocks:
            once.add(number)


def _scales(target: MappedTensor, rule: Fp8) -> MappedTensor:
    rows, columns = (-(-size // block) for size, block in zip(target.shape, rule.block, strict=True))
    name = target.name + rule.scale_suffix
    return MappedTensor(name, (rows, columns), "float32", target.moves, scale_of=target.name, block=rule.block)


# nothing is lost -----------------------------------------------------------------------------------------------


def _check_all_used(sources: Sources, targets: Iterable[MappedTensor], notes: Notes) -> None:
    """Raise unless every element of the state is in the export or was left out on purpose."""
    used: dict[str, list[Move]] = defaultdict(list)
    for target in targets:
        for move in target.moves:
            used[move.source] += inverted(move, target.name)
    in_export = set(used)
    for move in notes.dropped:
        used[origin(move.source)[0]] += inverted(move, "")
    tied_to = {name: group for group in notes.tied for name in group}
    lost: list[str] = []
    partly: list[str] = []
    for name, (shape, _) in sources.items():
        if not prod(shape):
            continue
        other = next((one for one in tied_to.get(name, ()) if one in in_export), None)
        if name not in in_export and other is not None:
            notes.aliases.setdefault(name, other)
        elif name not in used:
            lost.append(name)
        elif rest := uncovered(used[name], prod(shape)):
            partly.append(f"`{name}` ({sum(move.volume for move in rest)} of {prod(shape)} elements)")
    if lost:
        raise ConfigError(
            f"key_map: {listed(lost)} are not mapped to anything. Drop them explicitly with "
            "holdfast.export.Drop(pattern), or map them",
            field="key_map",
        )
    if partly:
        raise ConfigError(
            f"key_map: part of {', '.join(partly[:5])} is not mapped to anything: pieces are "
            "missing. To drop padding explicitly, use holdfast.export.Narrow(pattern, start, stop)",
            field="key_map",
        )
