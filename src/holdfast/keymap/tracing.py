"""Trace a function over a state dict into moves, by running it on symbolic tensors without data.

Each tensor of the state is replaced by a `SymbolicTensor`: sizes, strides and a dtype, which torch computes on the meta
device, and a `SymbolicStorage`: the source of each element of its storage, as moves. Views leave the storage alone, and
share it as in torch; copies make a new one and fill it from strides that may be negative (flip) or 0 (repeat), which
torch's views can't express. So reshapes, transposes and slices cost nothing by themselves, whatever their order, and a
torchtitan adapter, `transformers`' own conversion table and a user's function are all read by one means.

Guarantees: nothing of the size of a tensor is allocated or enumerated: cost grows with moves and dimensions, never with
elements. The function's own code decides names, order and shapes; the moves of a tensor cover each element exactly
once. An unsupported operation, one that computes and one that asks for a value are a `ConfigError` that names the
tensor and the operation, never a guess. So is a cast that loses bits before another cast: one cast straight to the last
dtype, which is what an export makes, would give another result.
Assumes: the function treats tensors by names, shapes and dtypes only, and the same way every time. It runs on this
thread; memory it makes with ``torch.empty`` on another thread is real, and can't be filled from stand-ins.
Does not: read values of symbolic tensors (indices and other arguments that are ordinary tensors are read as they are);
know safetensors, transformers, or what may be dropped.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import strides as row_major
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.keymap.moves import Move, coalesced, inverted, retargeted, run, through, with_source, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    Sources = Mapping[str, tuple[Sequence[int], str | torch.dtype]]
    StateDict = dict[str, torch.Tensor]

SUPPORTED: Final = (
    "A key map is run on tensors without data: it may rename, view, reshape, transpose, slice, split, stack, "
    "concatenate, copy, flip, select by constant indices and cast them, but neither compute with values nor read them"
)

HANDLERS: Final[dict[str, Handler]] = {}
"""What is done for an operation of aten, by its name without the overload."""
_SMALL: Final = frozenset({"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
_EXACT_IN: Final = {
    "float8_e4m3fn": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float8_e5m2": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "bfloat16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
    "uint8": _SMALL,
    "int8": _SMALL,
    "int16": frozenset({"int32", "int64", "float32", "float64"}),
    "int32": frozenset({"int64", "float64"}),
}
"""By dtype, those that hold each of its values: a cast through them on the way to another changes nothing."""


class SymbolicStorage:
    """Symbolic stand-in for a storage: records the source of each element that some tensor of the state covers.

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
        """Return the moves in target order, as few as possible."""
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
        low, stop = view.source_span
        if len(moves) == 1 and moves[0].target_strides == (1,):
            only = moves[0]
            if only.target_offset <= low and stop <= only.target_stop:
                step = only.source_strides[0]
                offset = only.source_offset + (view.source_offset - only.target_offset) * step
                steps = tuple(stride * step for stride in view.source_strides)
                return [Move(only.source, view.counts, view.target_offset, view.target_strides, offset, steps)]
        return [
            part
            for move in moves
            if move.target_offset < stop and low < move.target_stop
            for part in through(view, move)
        ]

    def write(self, view: Move, moves: Iterable[Move]) -> None:
        """Overwrite the elements of a view with ``moves``, whose targets are the indices of ``view``."""
        for hole in inverted(view, ""):
            if hole.target_offset < self._stop:
                self._moves = [part for move in self._moves for part in without(move, hole)]
            self._stop = max(self._stop, hole.target_stop)
        if view.source_strides == view.target_strides:
            self._moves += [replace(move, target_offset=move.target_offset + view.source_offset) for move in moves]
        else:
            self._moves += [part for move in moves for part in retargeted(move, view)]
        self._is_tidy = False


class SymbolicTensor(torch.Tensor):
    """A tensor without data that knows where each of its elements comes from."""

    geometry: torch.Tensor
    """Its sizes and strides, on the meta device."""
    memory: SymbolicStorage

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, geometry: torch.Tensor, memory: SymbolicStorage) -> Self:
        made: Self = compat.without_data(cls, geometry)
        made.geometry = geometry
        made.memory = memory
        return made

    def __init__(self, geometry: torch.Tensor, memory: SymbolicStorage) -> None:
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
    """Run ``func``, an aten operation, on arguments of which some are symbolic tensors."""
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


def _reading(tensor: SymbolicTensor, name: str) -> ConfigError:
    return ConfigError(f"key_map: `{name}` on {tensor.memory.shown()} asks for values. {SUPPORTED}", field="key_map")


def stand_ins_among(values: Iterable[Any]) -> list[SymbolicTensor]:
    """The stand-ins among arguments, those in lists included."""
    found: list[SymbolicTensor] = []
    for value in values:
        if isinstance(value, SymbolicTensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += stand_ins_among(value)
    return found


# making and reading --------------------------------------------------------------------------------------------


def stand_in(name: str, shape: Sequence[int], dtype: str | torch.dtype) -> SymbolicTensor:
    """The stand-in for a tensor of the state."""
    kind = compat.dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if kind not in ITEMSIZE:
        raise ConfigError(f"`{name}` is of dtype {kind}, which can't be exported", field=name)
    geometry = torch.empty(tuple(shape), dtype=getattr(torch, kind), device="meta")
    return SymbolicTensor(
        geometry, SymbolicStorage([run(f"{name}\0{kind}", geometry.numel())] if geometry.numel() else [], kind)
    )


def blank(geometry: torch.Tensor) -> SymbolicTensor:
    """A stand-in with memory of its own that nothing was written to."""
    return SymbolicTensor(geometry, SymbolicStorage([], compat.dtype_name(geometry.dtype)))


def copied(tensor: SymbolicTensor, geometry: torch.Tensor) -> SymbolicTensor:
    """``tensor``'s elements in memory of their own, laid out and cast as ``geometry`` says."""
    made = blank(geometry)
    put(geometry, made.memory, read(tensor), tensor.memory)
    made.memory.is_pinned = tensor.memory.is_pinned
    return made


def read(tensor: SymbolicTensor) -> list[Move]:
    """Return the source of each element of ``tensor``."""
    return tensor.memory.read(view_of(tensor.geometry)) if tensor.numel() else []


def put(geometry: torch.Tensor, memory: SymbolicStorage, moves: Iterable[Move], came_from: SymbolicStorage) -> None:
    """Write ``moves``, into the row-major indices of ``geometry``, to where it lies in ``memory``."""
    if geometry.numel():
        memory.write(view_of(geometry), _cast(moves, came_from.dtype, memory.dtype))


def _cast(moves: Iterable[Move], before: str, after: str) -> list[Move]:
    if before == after:
        return list(moves)
    return [with_source(move, f"{move.source}/{after}") for move in moves]


def origin(source: str) -> tuple[str, list[str]]:
    """The tensor of the state that a move names, and the dtypes its elements have had, its own first."""
    name, _, dtypes = source.partition("\0")
    return name, dtypes.split("/")


def view_of(geometry: torch.Tensor) -> Move:
    """Return the memory position of each element of a tensor, by its row-major index."""
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


_VIEWS: Final = (
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "chunk",
    "detach",
    "diagonal",
    "expand",
    "lift_fresh",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsafe_chunk",
    "unsafe_split",
    "unsafe_split_with_sizes",
    "unsqueeze",
    "view",
)

_BLANKS: Final = (
    "empty_like",
    "full_like",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "zeros_like",
)

_EMPTY: Final = ("empty", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "empty_like")
_CONSTANT: Final = (
    "full",
    "ones",
    "zeros",
    "full_like",
    "ones_like",
    "zeros_like",
    "new_full",
    "new_ones",
    "new_zeros",
)

_READING: Final = ("_local_scalar_dense", "equal", "is_nonzero", "item", "allclose")


def made_without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SymbolicTensor | None:
    """A blank stand-in for what a factory would make, if it is one that a function may mean to fill.

    Constants of integers stay ordinary tensors: they are indices more often than weights.
    """
    name = func.overloadpacket.__name__
    if name not in _EMPTY and name not in _CONSTANT:
        return None
    geometry = _on_meta(func, args, kwargs)
    return blank(geometry) if name in _EMPTY or geometry.is_floating_point() else None


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on the meta device: what sizes and strides it gives."""
    plain = {key: _geometry(value) for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")}
    if "device" in plain or not stand_ins_among((*args, *kwargs.values())):
        plain["device"] = torch.device("meta")
    return func(*(_geometry(value) for value in args), **plain)


def _geometry(value: Any) -> Any:
    if isinstance(value, SymbolicTensor):
        return value.geometry
    if isinstance(value, (list, tuple)):
        return [_geometry(one) for one in value]
    return value


def _handles(*names: str) -> Callable[[Any], Any]:
    def register(handler: Any) -> Any:
        for name in names:
            assert name not in HANDLERS
            HANDLERS[name] = handler
        return handler

    return register


@_handles(*_VIEWS)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of = args[0]
    if not isinstance(of, SymbolicTensor) or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        raise unsupported(func, args, kwargs, "elements can't be seen as those of another dtype")
    views = _on_meta(func, args, kwargs)
    if isinstance(views, torch.Tensor):
        return SymbolicTensor(views, of.memory)
    return [SymbolicTensor(view, of.memory) for view in views]


@_handles(*_BLANKS)
def _blank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return blank(_on_meta(func, args, kwargs))


@_handles(*_READING)
def _reading_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise unsupported(func, args, kwargs, "asks for values")


# copies --------------------------------------------------------------------------------------------------------


@_handles("clone", "_to_copy")
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    geometry = _on_meta(func, args, {key: value for key, value in kwargs.items() if key != "device"})
    if geometry.is_complex() != args[0].is_complex():
        raise unsupported(func, args, kwargs, "casts between complex and real numbers")
    return copied(args[0], geometry)


@_handles("_pin_memory", "pin_memory")
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    return args[0]


@_handles("copy_")
def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, SymbolicTensor):
        raise unsupported(func, args, kwargs, "copies into an ordinary tensor; make it within the key map")
    if isinstance(source, SymbolicTensor):
        wide = SymbolicTensor(source.geometry.expand(target.shape), source.memory)
        put(target.geometry, target.memory, read(wide), source.memory)
    else:
        put(target.geometry, target.memory, [], target.memory)
    return target


@_handles("fill_", "zero_")
def _forget(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func, kwargs
    put(args[0].geometry, args[0].memory, [], args[0].memory)
    return args[0]


@_handles("cat", "concat", "stack")
def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if any(not isinstance(part, SymbolicTensor) and part.numel() for part in parts):
        raise unsupported(func, args, kwargs, "joins them with constants, which come from no tensor of the state")
    metas = [part.geometry if isinstance(part, SymbolicTensor) else part.to("meta") for part in parts]
    geometry = func(metas, dim)
    made = blank(geometry)
    start = 0
    for number, part in enumerate(parts):
        if not part.numel():
            continue
        if func.overloadpacket.__name__ == "stack":
            place = geometry.select(dim, number)
        else:
            place = geometry.narrow(dim, start, part.shape[dim])
            start += part.shape[dim]
        put(place, made.memory, read(part), part.memory)
    made.memory.is_pinned = all(part.memory.is_pinned for part in parts if isinstance(part, SymbolicTensor))
    return made


def _gathered(of: SymbolicTensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> SymbolicTensor:
    """A contiguous copy of what lies in ``of``'s memory at these strides, which may be negative or 0."""
    made = blank(torch.empty(tuple(sizes), dtype=of.dtype, device="meta"))
    if made.numel():
        put(made.geometry, made.memory, of.memory.read(nest(sizes, strides, offset)), of.memory)
    made.memory.is_pinned = of.memory.is_pinned
    return made


@_handles("flip")
def _flip(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    of, dims = args[0], args[1] if len(args) > 1 else kwargs["dims"]
    strides = list(of.stride())
    offset = int(of.storage_offset())
    for dim in {dim % max(of.dim(), 1) for dim in dims}:
        offset += (of.shape[dim] - 1) * strides[dim]
        strides[dim] = -strides[dim]
    return _gathered(of, of.shape, strides, offset)


@_handles("repeat")
def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del func
    of, repeats = args[0], list(args[1] if len(args) > 1 else kwargs["repeats"])
    lead = len(repeats) - of.dim()
    shape = [1] * lead + list(of.shape)
    strides = [0] * lead + list(of.stride())
    sizes = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    copy = _gathered(of, sizes, [n for stride in strides for n in (0, stride)], int(of.storage_offset()))
    geometry = copy.geometry.view([times * size for times, size in zip(repeats, shape, strict=True)])
    return SymbolicTensor(geometry, copy.memory)


@_handles("roll")
def _roll(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of = args[0]
    shifts = args[1] if len(args) > 1 else kwargs["shifts"]
    dims = (args[2] if len(args) > 2 else kwargs.get("dims")) or []
    if not dims:
        flat = torch.roll(of.reshape(-1), shifts, [0])
        return flat.view(of.shape)
    if len(shifts) != len(dims):
        raise unsupported(func, args, kwargs, "shifts and dims differ in number")
    for shift, dim in zip(shifts, dims, strict=True):
        size = of.shape[dim]
        if size and shift % size:
            of = torch.cat(
                [of.narrow(dim, size - shift % size, shift % size), of.narrow(dim, 0, size - shift % size)], dim
            )
    return of if of is not args[0] else of.clone()


@_handles("index_select")
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of, dim, index = (*args, *kwargs.values())[:3]
    return _selected(func, args, kwargs, of, dim, index)


@_handles("index")
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    of, indices = args[0], list(args[1])
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise unsupported(func, args, kwargs, "selects by several index tensors at once")
    dim, index = given[0]
    if isinstance(index, SymbolicTensor):
        raise unsupported(func, args, kwargs, "indices are values")
    if index.dtype in (torch.bool, torch.uint8):
        if index.dim() != 1:
            raise unsupported(func, args, kwargs, "selects by a mask of several dimensions")
        index = index.nonzero().flatten()
    flat = _selected(func, args, kwargs, of, dim, index.reshape(-1))
    return SymbolicTensor(flat.geometry.view(*of.shape[:dim], *index.shape, *of.shape[dim + 1 :]), flat.memory)


def _selected(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: Any, dim: int, index: torch.Tensor
) -> SymbolicTensor:
    if isinstance(index, SymbolicTensor) or not isinstance(of, SymbolicTensor):
        raise unsupported(func, args, kwargs, "indices are values")
    dim %= of.dim()
    size = of.shape[dim]
    wanted = [int(i) + (size if i < 0 else 0) for i in index.tolist()]
    if any(not 0 <= i < size for i in wanted):
        raise unsupported(func, args, kwargs, f"an index is out of range for {size} in dimension {dim}")
    sizes = [*of.shape[:dim], len(wanted), *of.shape[dim + 1 :]]
    made = blank(torch.empty(sizes, dtype=of.dtype, device="meta"))
    strides = list(of.stride())
    for place, first, step, count in _even_steps(wanted):
        part = [*of.shape[:dim], count, *of.shape[dim + 1 :]]
        steps = [*strides[:dim], strides[dim] * step, *strides[dim + 1 :]]
        view = nest(part, steps, int(of.storage_offset()) + first * strides[dim])
        if prod(part):
            put(made.geometry.narrow(dim, place, count), made.memory, of.memory.read(view), of.memory)
    made.memory.is_pinned = of.memory.is_pinned
    return made


@_handles("index_copy_")
def _index_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, dim, index, source = (*args, *kwargs.values())[:4]
    return _write_at(func, args, kwargs, target, dim, index, source)


@_handles("index_put_", "_index_put_impl_")
def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, indices, source = args[0], list(args[1]), args[2]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        raise unsupported(func, args, kwargs, "writes by several index tensors at once, or adds up")
    dim, index = given[0]
    if (
        isinstance(target, SymbolicTensor)
        and not isinstance(index, SymbolicTensor)
        and index.dtype in (torch.bool, torch.uint8)
    ):
        if index.dim() != 1:
            raise unsupported(func, args, kwargs, "writes by a mask of several dimensions")
        index = index.nonzero().flatten()
    if index.dim() != 1:
        raise unsupported(func, args, kwargs, "writes by an index of several dimensions")
    return _write_at(func, args, kwargs, target, dim, index, source)


def _write_at(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, dim: int, index: Any, source: Any
) -> SymbolicTensor:
    if (
        not isinstance(target, SymbolicTensor)
        or not isinstance(source, SymbolicTensor)
        or isinstance(index, SymbolicTensor)
    ):
        raise unsupported(func, args, kwargs, "writes by indices that are values, or what is none of the state's")
    dim %= target.dim()
    size = target.shape[dim]
    places = [int(i) + (size if i < 0 else 0) for i in index.tolist()]
    if any(not 0 <= place < size for place in places):
        raise unsupported(func, args, kwargs, f"an index is out of range for {size} in dimension {dim}")
    wide = source.geometry.expand(*target.shape[:dim], len(places), *target.shape[dim + 1 :])
    for number, place in enumerate(places):
        part = SymbolicTensor(wide.narrow(dim, number, 1), source.memory)
        put(target.geometry.narrow(dim, place, 1), target.memory, read(part), source.memory)
    return target


def _even_steps(indices: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(place, first index, step, how many) of each longest run of evenly spaced indices."""
    place = 0
    while place < len(indices):
        step = indices[place + 1] - indices[place] if place + 1 < len(indices) else 1
        stop = place + 1
        while stop < len(indices) and indices[stop] - indices[stop - 1] == step:
            stop += 1
        yield place, indices[place], step, stop - place
        place = stop


class TracedTensor(NamedTuple):
    """One tensor that a traced function returned."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    moves: tuple[Move, ...]
    """From tensors of the state, in target order: each element once."""


def trace(function: Callable[[StateDict], Any], sources: Sources) -> list[TracedTensor]:
    """Trace ``function`` on a state dict with tensors of these shapes and dtypes; return tensors in the order it
    returns them.

    Raises:
        ConfigError: it computes or reads values, raises, or returns anything but tensors made of the state's elements.
    """
    state: StateDict = {name: stand_in(name, shape, dtype) for name, (shape, dtype) in sources.items()}
    return [traced(name, value) for name, value in run_on_stand_ins(function, state).items()]


def run_on_stand_ins(function: Callable[[StateDict], Any], state: StateDict, shown: str = "") -> StateDict:
    """Run ``function``, called ``shown`` in errors, on a dict of symbolic tensors and check that it returns such a
    dict.
    """
    shown = shown or getattr(function, "__qualname__", None) or type(function).__name__
    try:
        with torch.no_grad(), _Factories():
            result = function(dict(state))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"key_map: `{shown}` failed with {type(error).__name__}: {error}. {SUPPORTED}", field="key_map"
        ) from error
    if not hasattr(result, "items"):
        raise ConfigError(
            f"key_map: `{shown}` returned {type(result).__name__}; return a state dict: names -> tensors",
            field="key_map",
        )
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, SymbolicTensor):
            raise ConfigError(
                f"key_map: `{shown}` returned {type(value).__name__} for {name!r}, not a tensor made of tensors of "
                f"the state. {SUPPORTED}",
                field="key_map",
            )
    return dict(result)


class _Factories(compat.DispatchMode):
    """While entered, ``torch.empty`` and the like make stand-ins that can be filled from stand-ins."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, SymbolicTensor) for kind in types):
            return dispatch(func, tuple(args), dict(kwargs or {}))
        made = made_without_data(func, tuple(args), dict(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor``, a stand-in, in ``dtype`` because a rule says so: no general dtype replaces it."""
    assert isinstance(tensor, SymbolicTensor)
    made = copied(tensor, torch.empty(tensor.shape, dtype=dtype, device="meta"))
    made.memory.is_pinned = True
    return made


def is_cast_by_rule(tensor: torch.Tensor) -> bool:
    """Return True if the tensor was made by `cast`, or only from tensors made by it."""
    assert isinstance(tensor, SymbolicTensor)
    return tensor.memory.is_pinned


def traced(name: str, tensor: torch.Tensor, dtype: str | None = None) -> TracedTensor:
    """Return the moves of a symbolic ``tensor``, checked: every element has a source and casts can be made at once.

    dtype: cast it to this in the end.
    """
    assert isinstance(tensor, SymbolicTensor)
    marked = coalesced(read(tensor))
    filled = sum(move.volume for move in marked)
    if filled != tensor.numel():
        raise ConfigError(
            f"key_map: {tensor.numel() - filled} of the {tensor.numel()} elements of `{name}` do "
            "not come from a tensor of the state: they are constants, or uninitialized memory "
            f"from `torch.empty`; the others come from {tensor.memory.shown()}",
            field="key_map",
        )
    own = tensor.memory.dtype
    for source in dict.fromkeys(move.source for move in marked):
        _check_casts(name, source, own if dtype is None else dtype)
    moves = tuple(with_source(move, origin(move.source)[0]) for move in marked)
    return TracedTensor(name, tuple(tensor.shape), own if dtype is None else dtype, moves)


def _check_casts(name: str, marked: str, final: str) -> None:
    source, dtypes = origin(marked)
    if dtypes[-1] != final:
        dtypes = [*dtypes, final]
    for between in dtypes[1:-1]:
        if between != dtypes[0] and between not in _EXACT_IN.get(dtypes[0], ()):
            raise ConfigError(
                f"key_map: `{source}` is cast from {' to '.join(dtypes)} on its way to `{name}`: "
                f"{between} loses precision that the last cast can't restore, and an export casts "
                "once. Cast directly to the last dtype",
                field="key_map",
            )
