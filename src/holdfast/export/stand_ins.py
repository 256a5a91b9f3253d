"""Tensors without data that know where each of their elements comes from.

A `StandIn` has sizes, strides and a dtype, which torch itself computes on the meta device, and a `Memory`: of each
element of what would be its storage the source, as moves. Views share a memory, as torch's share a storage; reading
a tensor is looking its strides up in it, writing is putting moves where its strides lie.

Guarantees: cost grows with moves and dimensions, never with elements.
Does not: know what an operation means (`holdfast.export.operations` registers that by name), nor what it is for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import strides as row_major
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.moves import Move, coalesced, inverted, retargeted, run, through, with_source, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from typing_extensions import Self

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

SUPPORTED: Final = (
    "A key map is run on tensors without data: it may rename, view, reshape, transpose, slice, split, stack, "
    "concatenate, copy, flip, select by constant indices and cast them, but neither compute with values nor read them"
)

HANDLERS: Final[dict[str, Handler]] = {}
"""What is done for an operation of aten, by its name without the overload."""


class Memory:
    """What stands for a storage: where each of its elements comes from, as far as any tensor of the state has it.

    A move's source here is a name and, behind a NUL, the dtypes its elements have had (`origin`).
    """

    __slots__ = ("_is_tidy", "_moves", "_stop", "dtype", "is_pinned")

    def __init__(self, moves: Iterable[Move], dtype: str) -> None:
        self._moves = list(moves)
        self._stop = max((move.target_stop for move in self._moves), default=0)
        self._is_tidy = len(self._moves) < 2
        self.dtype = dtype
        self.is_pinned = False
        """Whether a rule asked for this dtype, so that no general one replaces it."""

    @property
    def moves(self) -> list[Move]:
        """In target order, in as few as can be."""
        if not self._is_tidy:
            self._moves = list(coalesced(self._moves))
            self._is_tidy = True
        return self._moves

    def shown(self) -> str:
        """The tensors of the state it has elements of, for an error."""
        names = list(dict.fromkeys(origin(move.source)[0] for move in self._moves))
        if not names:
            return "no tensor of the state"
        return ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")

    def read(self, view: Move) -> list[Move]:
        """``view``, which goes from indices of a tensor to this memory, as moves straight from the sources."""
        moves = self.moves
        low, high = _span(view)
        if len(moves) == 1 and moves[0].target_strides == (1,):
            only = moves[0]
            if only.target_offset <= low and high < only.target_stop:
                step = only.source_strides[0]
                offset = only.source_offset + (view.source_offset - only.target_offset) * step
                steps = tuple(stride * step for stride in view.source_strides)
                return [Move(only.source, view.counts, view.target_offset, view.target_strides, offset, steps)]
        return [
            part
            for move in moves
            if move.target_offset <= high and low < move.target_stop
            for part in through(view, move)
        ]

    def write(self, view: Move, moves: Iterable[Move]) -> None:
        """Put ``moves``, whose targets are ``view``'s indices, where the view lies; what was there is gone."""
        for hole in inverted(view, ""):
            if hole.target_offset < self._stop:
                self._moves = [part for move in self._moves for part in without(move, hole)]
            self._stop = max(self._stop, hole.target_stop)
        if view.source_strides == view.target_strides:
            self._moves += [replace(move, target_offset=move.target_offset + view.source_offset) for move in moves]
        else:
            self._moves += [part for move in moves for part in retargeted(move, view)]
        self._is_tidy = False


class StandIn(torch.Tensor):
    """A tensor without data that knows where each of its elements comes from."""

    geometry: torch.Tensor
    """Its sizes and strides, on the meta device."""
    memory: Memory

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, memory: Memory) -> Self:
        made: Self = compat.without_data(cls, geometry)
        made.geometry = geometry
        made.memory = memory
        return made

    def __init__(self, geometry: torch.Tensor, memory: Memory) -> None:
        del geometry, memory
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.shape)}, {self.dtype}, of {self.memory.shown()})"

    def numpy(self, *, force: bool = False) -> Any:
        del force
        raise _reading(self, "numpy")

    def tolist(self) -> Any:
        raise _reading(self, "tolist")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        return dispatch(func, tuple(args), dict(kwargs or {}))


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func``, an operation of aten, gives for these arguments, of which some are stand-ins."""
    handler = HANDLERS.get(func.overloadpacket.__name__)
    if handler is not None:
        return handler(func, args, kwargs)
    # In inference mode operations arrive whole that are otherwise taken apart before.
    parts = func.decompose(*args, **kwargs)
    if parts is not NotImplemented:
        return parts
    raise unsupported(func, args, kwargs)


def unsupported(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> ConfigError:
    """The error for an operation that isn't one of those that only move elements."""
    of = ", ".join(dict.fromkeys(one.memory.shown() for one in stand_ins_among((*args, *kwargs.values()))))
    name = f"{func.namespace}.{func.overloadpacket.__name__}"
    return ConfigError(
        f"key_map: `{name}` on {of or 'a tensor'}{': ' + why if why else ' is not supported'}. {SUPPORTED}",
        field="key_map",
    )


def _reading(tensor: StandIn, name: str) -> ConfigError:
    return ConfigError(f"key_map: `{name}` on {tensor.memory.shown()} asks for values. {SUPPORTED}", field="key_map")


def stand_ins_among(values: Iterable[Any]) -> list[StandIn]:
    """The stand-ins among arguments, those in lists included."""
    found: list[StandIn] = []
    for value in values:
        if isinstance(value, StandIn):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += stand_ins_among(value)
    return found


# making and reading --------------------------------------------------------------------------------------------


def stand_in(name: str, shape: Sequence[int], dtype: str | torch.dtype) -> StandIn:
    """The stand-in for a tensor of the state."""
    kind = compat.dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if kind not in ITEMSIZE:
        raise ConfigError(f"`{name}` is of dtype {kind}, which can't be exported", field=name)
    geometry = torch.empty(tuple(shape), dtype=getattr(torch, kind), device="meta")
    return StandIn(geometry, Memory([run(f"{name}\0{kind}", geometry.numel())] if geometry.numel() else [], kind))


def blank(geometry: torch.Tensor) -> StandIn:
    """A stand-in with memory of its own that nothing was written to."""
    return StandIn(geometry, Memory([], compat.dtype_name(geometry.dtype)))


def copied(tensor: StandIn, geometry: torch.Tensor) -> StandIn:
    """``tensor``'s elements in memory of their own, laid out and cast as ``geometry`` says."""
    made = blank(geometry)
    put(geometry, made.memory, read(tensor), tensor.memory)
    made.memory.is_pinned = tensor.memory.is_pinned
    return made


def read(tensor: StandIn) -> list[Move]:
    """Where each element of ``tensor`` comes from."""
    return tensor.memory.read(view_of(tensor.geometry)) if tensor.numel() else []


def put(geometry: torch.Tensor, memory: Memory, moves: Iterable[Move], came_from: Memory) -> None:
    """Write ``moves``, into the row-major indices of ``geometry``, to where it lies in ``memory``."""
    if geometry.numel():
        memory.write(view_of(geometry), _cast(moves, came_from.dtype, memory.dtype))


def _cast(moves: Iterable[Move], before: str, after: str) -> list[Move]:
    if before == after:
        return list(moves)
    return [with_source(move, f"{move.source}/{after}") for move in moves]


def origin(source: str) -> tuple[str, list[str]]:
    """The tensor of the state that a move in a `Memory` names, and the dtypes its elements have had, its own first."""
    name, _, dtypes = source.partition("\0")
    return name, dtypes.split("/")


def view_of(geometry: torch.Tensor) -> Move:
    """Where each element of a tensor lies in its memory, by its row-major index."""
    return nest(geometry.shape, geometry.stride(), int(geometry.storage_offset()))


def nest(sizes: Sequence[int], strides: Sequence[int], offset: int) -> Move:
    """A tensor of these sizes, strides (any integers) and first element, as a nest from row-major indices."""
    loops: list[tuple[int, int, int]] = []
    for size, step, stride in zip(sizes, row_major(sizes), strides, strict=True):
        if size == 1:
            continue
        if loops and loops[-1][2] == size * stride:
            loops[-1] = (loops[-1][0] * size, step, stride)
        else:
            loops.append((size, step, stride))
    return Move(
        "", tuple(n for n, _, _ in loops), 0, tuple(t for _, t, _ in loops), offset, tuple(s for _, _, s in loops)
    )


def _span(view: Move) -> tuple[int, int]:
    low = high = view.source_offset
    for count, step in zip(view.counts, view.source_strides, strict=True):
        if step < 0:
            low += (count - 1) * step
        else:
            high += (count - 1) * step
    return low, high
