"""The rules that key maps are written with: rename, drop, split, stack, fuse, transpose, cast, quantize.

A rule takes a state dict of stand-ins and gives another. A pattern is a regular expression looked for anywhere in a
name, and ``to`` replaces what it matched (``\\1`` and ``\\g<name>`` work), so the rest of a name stays. Names no rule
speaks of stay as they are, and a tensor made of several stands where the first of them stood.

Guarantees: a rule that matches nothing, gives two tensors one name, or is given pieces that don't fit raises a
`ConfigError` naming the rule and the tensors. Nothing is computed: what a rule does is done with views and copies.
Does not: decide the export's dtype, or whether every tensor is used (`holdfast.export.key_map`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from holdfast.errors import ConfigError, listed
from holdfast.export.moves import with_source
from holdfast.export.stand_ins import StandIn, origin, read
from holdfast.export.tracing import cast as cast_by_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.export.moves import Move

    StateDict = dict[str, torch.Tensor]


@runtime_checkable
class Rule(Protocol):
    """One step of a key map."""

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        """The state dict after this step; ``state`` is left as it is."""
        ...


@dataclass(slots=True)
class Notes:
    """What rules tell the compilation beside the state dict they give."""

    tied: Sequence[Sequence[str]] = ()
    """Groups of names of the state that are one tensor in memory."""
    model: Any = None
    dropped: list[Move] = field(default_factory=list)
    """Elements that were left out on purpose, as moves out of the state."""
    blocks: dict[int, tuple[StandIn, Fp8]] = field(default_factory=dict)
    """By id: tensors to be quantized, and how."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of the state left out as tied, and the name of the state that stays."""

    def drop(self, tensor: torch.Tensor) -> None:
        """``tensor`` is left out on purpose."""
        assert isinstance(tensor, StandIn)
        self.dropped += read(tensor)
        self.blocks.pop(id(tensor), None)


def refused(rule: object, what: str) -> ConfigError:
    return ConfigError(f"key_map: {rule}: {what}", field="key_map")


class Named:
    """A state dict in the making, in which each name is given once."""

    def __init__(self, rule: object) -> None:
        self.state: StateDict = {}
        self._rule = rule
        self._from: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor, came_from: str) -> None:
        if name in self.state:
            raise refused(self._rule, f"`{self._from[name]}` and `{came_from}` both become `{name}`")
        if not name:
            raise refused(self._rule, f"`{came_from}` is left without a name")
        self.state[name] = tensor
        self._from[name] = came_from


def check_pattern(rule: object, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise refused(rule, f"{pattern!r} is no regular expression: {error}") from error


def matches(rule: object, pattern: str, state: StateDict) -> dict[str, re.Match[str]]:
    found = {name: match for name in state if (match := re.search(pattern, name))}
    if not found:
        raise refused(rule, f"no tensor's name matches {pattern!r}; there are {listed(state) or 'none'}")
    return found


def replaced(rule: object, match: re.Match[str], to: str) -> str:
    try:
        new = match.expand(to)
    except (re.error, IndexError) as error:
        raise refused(rule, f"{to!r} can't replace what was found in `{match.string}`: {error}") from error
    return match.string[: match.start()] + new + match.string[match.end() :]


# names ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rename:
    """``Rename(r"^decoder\\.", "model.")`` as `re.sub` does it; or ``Rename(function)`` from old names to new ones."""

    pattern: str | Callable[[str], str]
    to: str | Callable[[re.Match[str]], str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str):
            check_pattern(self, self.pattern)
        if isinstance(self.pattern, str) == (self.to is None):
            raise refused(self, "give a pattern and what replaces it, or one function of the name")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        if isinstance(self.pattern, str):
            matches(self, self.pattern, state)
        made = Named(self)
        for name, tensor in state.items():
            made.add(self._renamed(name), tensor, name)
        return made.state

    def _renamed(self, name: str) -> str:
        if isinstance(self.pattern, str):
            try:
                return re.sub(self.pattern, cast("str", self.to), name)
            except (re.error, IndexError) as error:
                raise refused(self, f"{self.to!r} can't replace what was found in `{name}`: {error}") from error
        new = self.pattern(name)
        if not isinstance(new, str):
            raise refused(self, f"gave {type(new).__name__} for `{name}`, expected its new name")
        return new


@dataclass(frozen=True, slots=True)
class AddPrefix:
    """Put ``prefix`` before every name, or before those that ``pattern`` matches."""

    prefix: str
    pattern: str = ""

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        made = Named(self)
        for name, tensor in state.items():
            made.add(self.prefix + name if name in found else name, tensor, name)
        return made.state


@dataclass(frozen=True, slots=True)
class StripPrefix:
    """Take ``prefix`` off the names that begin with it."""

    prefix: str

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        if not any(name.startswith(self.prefix) for name in state):
            raise refused(self, f"no tensor's name begins so; there are {listed(state) or 'none'}")
        made = Named(self)
        for name, tensor in state.items():
            made.add(name.removeprefix(self.prefix), tensor, name)
        return made.state


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave the tensors out whose names match."""

    pattern: str

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        found = matches(self, self.pattern, state)
        for name in found:
            notes.drop(state[name])
        return {name: tensor for name, tensor in state.items() if name not in found}


@dataclass(frozen=True, slots=True)
class DropTied:
    """Keep one of several names for the same elements: that which ``keep`` matches, else the first."""

    keep: str | None = None

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_pattern(self, self.keep)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        same: dict[Any, list[str]] = defaultdict(list)
        for name, tensor in state.items():
            assert isinstance(tensor, StandIn)
            same[elements_of(tensor, notes.tied)].append(name)
        gone: set[str] = set()
        for names in same.values():
            stays = next((name for name in names if self.keep and re.search(self.keep, name)), names[0])
            for name in names:
                if name != stays:
                    gone.add(name)
                    note_tied(notes, state[name], state[stays])
        return {name: tensor for name, tensor in state.items() if name not in gone}


def elements_of(tensor: StandIn, tied: Sequence[Sequence[str]]) -> Any:
    """What two tensors have equal exactly if they are the same elements in the same order."""
    first = {name: group[0] for group in tied for name in group}
    moves = ((move, first.get(origin(move.source)[0], origin(move.source)[0])) for move in read(tensor))
    parts = tuple((name, origin(move.source)[1][1:], with_source(move, "")) for move, name in moves)
    return tuple(tensor.shape), tensor.dtype, repr(parts) if tensor.numel() else id(tensor)


def note_tied(notes: Notes, gone: torch.Tensor, stays: torch.Tensor) -> None:
    """``gone`` is left out because ``stays`` is the same."""
    assert isinstance(gone, StandIn)
    assert isinstance(stays, StandIn)
    for dropped, kept in zip(read(gone), read(stays), strict=False):
        names = origin(dropped.source)[0], origin(kept.source)[0]
        if names[0] != names[1]:
            notes.aliases[names[0]] = names[1]
    notes.drop(gone)


# dtypes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cast:
    """Write the tensors whose names match in ``dtype``, whatever the rest of the export is written in."""

    pattern: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        kind: Any = self.dtype
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise refused(self, "`dtype` is a floating-point torch.dtype")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        for name in found:
            if not state[name].is_floating_point():
                raise refused(self, f"`{name}` is of {state[name].dtype}: only floating-point tensors are cast")
        return {name: cast_by_rule(tensor, self.dtype) if name in found else tensor for name, tensor in state.items()}


@dataclass(frozen=True, slots=True)
class Fp8:
    """Quantize matrices to float8_e4m3fn with one float32 scale a block, as DeepSeek-V3 is published.

    Of a matrix ``x.weight`` the export has ``x.weight`` in float8_e4m3fn and right behind it ``x.weight_scale_inv``:
    element [i, j] is what block [i, j]'s elements are to be multiplied by, its largest absolute value / 448. Blocks at
    the edges may be smaller. Only renames may follow. ``leave``: patterns of names that are left as they are.
    """

    pattern: str
    block: tuple[int, int] = (128, 128)
    scale_suffix: str = "_scale_inv"
    leave: Sequence[str] = ()

    def __post_init__(self) -> None:
        for pattern in (self.pattern, *self.leave):
            check_pattern(self, pattern)
        block: Sequence[int] = self.block
        if len(block) != 2 or min(block) < 1:
            raise refused(self, "`block` is how many rows and columns share a scale, at least 1 each")
        if not self.scale_suffix:
            raise refused(self, "`scale_suffix` is empty: scales need names of their own")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        found = matches(self, self.pattern, state)
        made = dict(state)
        for name in found:
            if any(re.search(pattern, name) for pattern in self.leave):
                continue
            tensor = state[name]
            if tensor.dim() != 2 or not tensor.is_floating_point():
                raise refused(
                    self,
                    f"`{name}` is {tuple(tensor.shape)} of {tensor.dtype}: only floating-point matrices have blocks",
                )
            quantized = cast_by_rule(tensor, torch.float8_e4m3fn)
            assert isinstance(quantized, StandIn)
            notes.blocks[id(quantized)] = (quantized, self)
            made[name] = quantized
        return made
