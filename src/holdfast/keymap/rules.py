r"""Define the rules of key maps: rename, drop, split, stack, fuse, transpose, narrow, cast, quantize.

A rule maps a state dict of symbolic tensors to another. A pattern is a regular expression searched anywhere in a name,
and ``to`` replaces the match (``\\1`` and ``\\g<name>`` work), so the rest of a name stays. Names that no rule matches
stay unchanged, and a tensor made of several takes the position of the first of them.

Guarantees: a rule that matches nothing, gives two tensors one name, or is given pieces that don't fit raises a
`ConfigError` naming the rule and the tensors. Nothing is computed: rules only make views and copies.
Does not: decide the export's dtype, or check that every tensor is used (`holdfast.keymap.compile`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from holdfast.errors import ConfigError, listed
from holdfast.keymap.moves import with_source
from holdfast.keymap.tracing import SymbolicTensor, origin, read
from holdfast.keymap.tracing import cast as cast_by_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.keymap.moves import Move

    StateDict = dict[str, torch.Tensor]


@runtime_checkable
class Rule(Protocol):
    """One step of a key map."""

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        """Return the state dict after this step; ``state`` is not changed."""
        ...


@dataclass(slots=True)
class Notes:
    """Facts that rules pass to the compilation besides the state dict."""

    tied: Sequence[Sequence[str]] = ()
    """Groups of names of the state that are one tensor in memory."""
    model: Any = None
    """The module that the state is of; a tuple of those of its stages that are here."""
    dropped: list[Move] = field(default_factory=list)
    """Elements that were left out on purpose, as moves out of the state."""
    blocks: dict[int, tuple[SymbolicTensor, Fp8]] = field(default_factory=dict)
    """By id: tensors to be quantized, and how."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of the state left out as tied, and the name of the state that stays."""

    def drop(self, tensor: torch.Tensor) -> None:
        """Record that ``tensor`` is left out on purpose."""
        assert isinstance(tensor, SymbolicTensor)
        self.dropped += read(tensor)
        self.blocks.pop(id(tensor), None)


def refused(rule: object, what: str) -> ConfigError:
    return ConfigError(f"key_map: {rule}: {what}", field="key_map")


class Named:
    """A state dict under construction, in which each name is used once."""

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
    """Rename tensors: ``Rename(r"^decoder\\.", "model.")`` as `re.sub` does it, or ``Rename(function)``.

    pattern: a regular expression that is searched for in names; or, without ``to``, a function from each old name to
    the new one. to: what replaces each match.
    """

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
    """Put ``prefix`` before every name, or before those that ``pattern`` matches.

    pattern: a regular expression that is searched for in names; one that matches none is a `ConfigError`.
    """

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
    """Remove ``prefix`` from the names that begin with it; a `ConfigError` if none does."""

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
    """Drop the tensors whose names match.

    pattern: a regular expression that is searched for in names; one that matches none is a `ConfigError`.
    """

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
    """Keep one of several names for the same elements: the one that ``keep`` matches, else the first.

    keep: a regular expression that is searched for in names; None for the first name.
    """

    keep: str | None = None

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_pattern(self, self.keep)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        same: dict[Any, list[str]] = defaultdict(list)
        for name, tensor in state.items():
            assert isinstance(tensor, SymbolicTensor)
            same[elements_of(tensor, notes.tied)].append(name)
        gone: set[str] = set()
        for names in same.values():
            stays = next((name for name in names if self.keep and re.search(self.keep, name)), names[0])
            for name in names:
                if name != stays:
                    gone.add(name)
                    note_tied(notes, state[name], state[stays])
        return {name: tensor for name, tensor in state.items() if name not in gone}


def elements_of(tensor: SymbolicTensor, tied: Sequence[Sequence[str]]) -> Any:
    """Return a key that is equal for two tensors exactly if they are the same elements in the same order."""
    first = {name: group[0] for group in tied for name in group}
    moves = ((move, first.get(origin(move.source)[0], origin(move.source)[0])) for move in read(tensor))
    parts = tuple((name, origin(move.source)[1][1:], with_source(move, "")) for move, name in moves)
    return tuple(tensor.shape), tensor.dtype, repr(parts) if tensor.numel() else id(tensor)


def note_tied(notes: Notes, gone: torch.Tensor, stays: torch.Tensor) -> None:
    """Record that ``gone`` is left out because ``stays`` is the same."""
    assert isinstance(gone, SymbolicTensor)
    assert isinstance(stays, SymbolicTensor)
    for dropped, kept in zip(read(gone), read(stays), strict=False):
        names = origin(dropped.source)[0], origin(kept.source)[0]
        if names[0] != names[1]:
            notes.aliases[names[0]] = names[1]
    notes.drop(gone)


# dtypes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cast:
    """Write the tensors whose names match in ``dtype``, whatever the rest of the export is written in.

    pattern: a regular expression that is searched for in names. dtype: a floating-point `torch.dtype`; a tensor that
    isn't floating-point is a `ConfigError`.
    """

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

    A matrix ``x.weight`` is exported as ``x.weight`` in float8_e4m3fn, followed by ``x.weight_scale_inv``:
    its element [i, j] is the factor for the elements of block [i, j], their largest absolute value / 448. Blocks at
    the edges may be smaller. Only renames may follow.

    pattern: a regular expression that is searched for in names; a match that isn't a floating-point matrix is a
    `ConfigError`. block: rows and columns that share a scale, at least 1 each. scale_suffix: what is put behind a
    matrix's name for its scales. leave: patterns of names that are not quantized.
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
            assert isinstance(quantized, SymbolicTensor)
            notes.blocks[id(quantized)] = (quantized, self)
            made[name] = quantized
        return made


# Rules that change shapes: split and stack experts, split and fuse, transpose, narrow. They only make views and copies.


def dimension(rule: object, name: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise refused(rule, f"`{name}` of shape {tuple(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


@dataclass(frozen=True, slots=True)
class SplitExperts:
    """Split stacked experts: one tensor for each index of a dimension.

    ``SplitExperts(r"experts\\.w1$", "experts.{}.w1.weight")``: ``{}`` is the expert's number.

    pattern: a regular expression that is searched for in names. to: what replaces the match, with ``{}``. dim: the
    dimension that has the experts.
    """

    pattern: str
    to: str
    dim: int = 0

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        if "{}" not in self.to:
            raise refused(self, f"{self.to!r} gives every expert the same name: put {{}} where its number goes")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        made = Named(self)
        for name, tensor in state.items():
            if name not in found:
                made.add(name, tensor, name)
                continue
            new = replaced(self, found[name], self.to)
            for number, expert in enumerate(tensor.unbind(dimension(self, name, tensor, self.dim))):
                made.add(new.replace("{}", str(number)), expert, name)
        return made.state


@dataclass(frozen=True, slots=True)
class StackExperts:
    """Stack experts, the inverse of `SplitExperts`:
    ``StackExperts(r"experts\\.(?P<expert>\\d+)\\.w1\\.weight$", "experts.w1")``.

    pattern: a regular expression that is searched for in names; its group ``expert`` is the expert's number, from 0 on
    without a gap. to: what replaces the match. dim: the new dimension, along which experts are stacked.
    """

    pattern: str
    to: str
    dim: int = 0

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        if "expert" not in re.compile(self.pattern).groupindex:
            raise refused(self, r"the pattern has no group (?P<expert>\d+) for the expert's number")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        stacks: dict[str, dict[int, str]] = defaultdict(dict)
        for name, match in found.items():
            new, number = replaced(self, match, self.to), match["expert"]
            if not number.isdecimal() or int(number) in stacks[new]:
                raise refused(self, f"`{name}` is one more expert {number!r} of `{new}`, or none")
            stacks[new][int(number)] = name
        made = Named(self)
        for name, tensor in state.items():
            new = replaced(self, found[name], self.to) if name in found else ""
            if not new:
                made.add(name, tensor, name)
            elif stack := stacks.pop(new, None):
                if sorted(stack) != list(range(len(stack))):
                    missing = sorted(set(range(max(stack))) - set(stack))
                    raise refused(self, f"`{new}` lacks experts {missing[:8]}: there are {listed(stack.values())}")
                parts = [state[stack[number]] for number in range(len(stack))]
                _check_alike(self, [stack[number] for number in range(len(stack))], parts, None)
                made.add(new, torch.stack(parts, self.dim), name)
        return made.state


def _grouped(tensor: torch.Tensor, dim: int, groups: int) -> torch.Tensor:
    """Split ``dim`` into two: the group, and the index within it."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def _check_alike(rule: object, names: Sequence[str], parts: Sequence[torch.Tensor], dim: int | None) -> None:
    """Raise unless the shapes are equal, but for ``dim``, and the dtypes are."""

    def kind(tensor: torch.Tensor) -> Any:
        shape = list(tensor.shape)
        if dim is not None and -len(shape) <= dim < len(shape):
            shape[dim] = -1
        return shape, tensor.dtype

    for name, part in zip(names, parts, strict=True):
        if kind(part) != kind(parts[0]):
            raise refused(
                rule,
                f"`{names[0]}` is {tuple(parts[0].shape)} of {parts[0].dtype} and `{name}` is {tuple(part.shape)} of "
                f"{part.dtype}: they don't fit together",
            )


@dataclass(frozen=True, slots=True)
class Split:
    """Cut a fused tensor into several: ``Split(r"qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes=(64, 16, 16))``.

    pattern: a regular expression that is searched for in names. to: what replaces the match, one for each part. dim:
    the dimension that is cut. sizes: size of each part along ``dim``; equal parts without it. groups: number of groups
    in the fused tensor, each with a part of every result (query, key and value head by head); ``sizes`` are then those
    within a group.
    """

    pattern: str
    to: tuple[str, ...]
    sizes: tuple[int, ...] | None = None
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)
        to: Any = self.to
        if isinstance(to, str) or not to:
            raise refused(self, "`to` is a tuple of what replaces the match, one for each part")
        if self.sizes is not None and (len(self.sizes) != len(self.to) or min(self.sizes) < 0):
            raise refused(self, f"{len(self.to)} parts need as many sizes, none negative")
        if self.groups < 1:
            raise refused(self, "`groups` is at least 1")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        made = Named(self)
        for name, tensor in state.items():
            if name not in found:
                made.add(name, tensor, name)
                continue
            dim = dimension(self, name, tensor, self.dim)
            whole, rest = divmod(tensor.shape[dim], self.groups)
            sizes = self.sizes or (whole // len(self.to),) * len(self.to)
            if rest or sum(sizes) != whole:
                raise refused(
                    self,
                    f"`{name}` has {tensor.shape[dim]} in dimension {dim}, which isn't {self.groups} x "
                    f"{' + '.join(map(str, sizes))}: pieces would {'be missing' if sum(sizes) <= whole else 'overlap'}",
                )
            grouped = _grouped(tensor, dim, self.groups) if self.groups > 1 else tensor
            parts = torch.split_with_sizes(grouped, list(sizes), dim + (self.groups > 1))
            for to, part in zip(self.to, parts, strict=True):
                flat = part.flatten(dim, dim + 1) if self.groups > 1 else part
                made.add(replaced(self, found[name], to), flat, name)
        return made.state


@dataclass(frozen=True, slots=True)
class Fuse:
    """Concatenate tensors: ``Fuse((r"gate_proj", r"up_proj"), "gate_up_proj")``, for each name this gives.

    patterns: regular expressions that are searched for in names, one for each part, in order. to: what replaces the
    match. dim: the dimension along which parts are put together. groups: cut each into this many parts and interleave
    them, the inverse of `Split` with ``groups``.
    """

    patterns: tuple[str, ...]
    to: str
    dim: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        patterns: Any = self.patterns
        if isinstance(patterns, str) or not patterns:
            raise refused(self, "`patterns` is a tuple, one pattern for each piece")
        for pattern in self.patterns:
            check_pattern(self, pattern)
        if self.groups < 1:
            raise refused(self, "`groups` is at least 1")

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        pieces: dict[str, dict[int, str]] = defaultdict(dict)
        whole: dict[str, str] = {}
        for number, pattern in enumerate(self.patterns):
            for name, match in matches(self, pattern, state).items():
                new = replaced(self, match, self.to)
                if name in whole or number in pieces[new]:
                    other = pieces[new].get(number, name)
                    raise refused(self, f"`{name}` and `{other}` are both piece {number} of `{new}`, or one is two")
                pieces[new][number] = name
                whole[name] = new
        made = Named(self)
        for name, tensor in state.items():
            if name not in whole:
                made.add(name, tensor, name)
            elif given := pieces.pop(whole[name], None):
                made.add(whole[name], self._fused(whole[name], given, state), name)
        return made.state

    def _fused(self, new: str, given: dict[int, str], state: StateDict) -> torch.Tensor:
        missing = [pattern for number, pattern in enumerate(self.patterns) if number not in given]
        if missing:
            raise refused(self, f"`{new}` lacks {missing}: there are {listed(given.values())}")
        names = [given[number] for number in range(len(self.patterns))]
        parts = [state[name] for name in names]
        dim = dimension(self, names[0], parts[0], self.dim)
        _check_alike(self, names, parts, dim)
        if self.groups == 1:
            return torch.cat(parts, dim)
        for name, part in zip(names, parts, strict=True):
            if part.shape[dim] % self.groups:
                raise refused(self, f"`{name}` has {part.shape[dim]} in dimension {dim}: not {self.groups} groups")
        return torch.cat([_grouped(part, dim, self.groups) for part in parts], dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions of the tensors whose names match.

    pattern: a regular expression that is searched for in names. dim0, dim1: the dimensions, the first two by default.
    """

    pattern: str
    dim0: int = 0
    dim1: int = 1

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        del notes
        found = matches(self, self.pattern, state)
        return {
            name: tensor.transpose(dimension(self, name, tensor, self.dim0), dimension(self, name, tensor, self.dim1))
            if name in found
            else tensor
            for name, tensor in state.items()
        }


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keep [start, stop) of a dimension and drop the rest, such as the padding of a vocabulary.

    pattern: a regular expression that is searched for in names. start, stop: what is kept of the dimension. dim: the
    dimension, the first by default.
    """

    pattern: str
    start: int
    stop: int
    dim: int = 0

    def __post_init__(self) -> None:
        check_pattern(self, self.pattern)

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        found = matches(self, self.pattern, state)
        made = dict(state)
        for name in found:
            tensor = state[name]
            dim = dimension(self, name, tensor, self.dim)
            if not 0 <= self.start <= self.stop <= tensor.shape[dim]:
                raise refused(self, f"`{name}` has {tensor.shape[dim]} in dimension {dim}")
            notes.drop(tensor.narrow(dim, 0, self.start))
            notes.drop(tensor.narrow(dim, self.stop, tensor.shape[dim] - self.stop))
            made[name] = tensor.narrow(dim, self.start, self.stop - self.start)
        return made
