"""The rules that change shapes: split and stack experts, split and fuse, transpose, narrow.

Patterns and names work as `holdfast.export.rules` says.

Guarantees: pieces that are missing, that are given twice or that don't fit together are a `ConfigError` naming them.
Nothing is computed: each rule is views and copies of what it is given.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import listed
from holdfast.export.rules import Named, check_pattern, matches, refused, replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.export.rules import Notes

    StateDict = dict[str, torch.Tensor]


def dimension(rule: object, name: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise refused(rule, f"`{name}` of shape {tuple(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


@dataclass(frozen=True, slots=True)
class SplitExperts:
    """One tensor for each index of a dimension: stacked experts as tensors of their own.

    ``SplitExperts(r"experts\\.w1$", "experts.{}.w1.weight")``: ``{}`` is the expert's number.
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
    """The way back: ``StackExperts(r"experts\\.(?P<expert>\\d+)\\.w1\\.weight$", "experts.w1")``."""

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
    """With ``dim`` as two: the group, and the place in it."""
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

    sizes: how much of ``dim`` each gets; equal parts without it. groups: where the fused tensor holds so many groups,
    each with a part of every one (query, key and value head by head), ``sizes`` are those within a group.
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

    groups: cut each into so many parts first and take them in turn, as `Split` with ``groups`` undoes.
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
    """Swap two dimensions of the tensors whose names match."""

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
    """Keep [start, stop) of a dimension, and leave the rest out on purpose: the padding of a vocabulary, say."""

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
