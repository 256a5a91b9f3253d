"""What each supported operation of aten does to stand-ins, registered by name.

Views leave the memory alone: torch computes their sizes and strides. Copies make new memory and fill it with what they
read through strides of their own, which may be negative (flip) or 0 (repeat): more than torch's own views can say.

Guarantees: an operation that is not here is an error that names it (`stand_ins.unsupported`), never a guess; of an
operation that is here, arguments that would compute are errors as well.
Does not: take values of stand-ins. Indices and other arguments that are ordinary tensors are read as they are.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.export.stand_ins import (
    HANDLERS,
    StandIn,
    blank,
    copied,
    nest,
    put,
    read,
    stand_ins_among,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


def made_without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn | None:
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
    if isinstance(value, StandIn):
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
    if not isinstance(of, StandIn) or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        raise unsupported(func, args, kwargs, "elements can't be seen as those of another dtype")
    views = _on_meta(func, args, kwargs)
    if isinstance(views, torch.Tensor):
        return StandIn(views, of.memory)
    return [StandIn(view, of.memory) for view in views]


@_handles(*_BLANKS)
def _blank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return blank(_on_meta(func, args, kwargs))


@_handles(*_READING)
def _reading(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    if not isinstance(target, StandIn):
        raise unsupported(func, args, kwargs, "copies into an ordinary tensor; make it within the key map")
    if isinstance(source, StandIn):
        wide = StandIn(source.geometry.expand(target.shape), source.memory)
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
    if any(not isinstance(part, StandIn) and part.numel() for part in parts):
        raise unsupported(func, args, kwargs, "joins them with constants, which come from no tensor of the state")
    metas = [part.geometry if isinstance(part, StandIn) else part.to("meta") for part in parts]
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
    made.memory.is_pinned = all(part.memory.is_pinned for part in parts if isinstance(part, StandIn))
    return made


def _gathered(of: StandIn, sizes: Sequence[int], strides: Sequence[int], offset: int) -> StandIn:
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
    return StandIn(geometry, copy.memory)


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
    if isinstance(index, StandIn):
        raise unsupported(func, args, kwargs, "indices are values")
    if index.dtype in (torch.bool, torch.uint8):
        if index.dim() != 1:
            raise unsupported(func, args, kwargs, "selects by a mask of several dimensions")
        index = index.nonzero().flatten()
    flat = _selected(func, args, kwargs, of, dim, index.reshape(-1))
    return StandIn(flat.geometry.view(*of.shape[:dim], *index.shape, *of.shape[dim + 1 :]), flat.memory)


def _selected(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: Any, dim: int, index: torch.Tensor
) -> StandIn:
    if isinstance(index, StandIn) or not isinstance(of, StandIn):
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
    if isinstance(target, StandIn) and not isinstance(index, StandIn) and index.dtype in (torch.bool, torch.uint8):
        if index.dim() != 1:
            raise unsupported(func, args, kwargs, "writes by a mask of several dimensions")
        index = index.nonzero().flatten()
    if index.dim() != 1:
        raise unsupported(func, args, kwargs, "writes by an index of several dimensions")
    return _write_at(func, args, kwargs, target, dim, index, source)


def _write_at(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, dim: int, index: Any, source: Any
) -> StandIn:
    if not isinstance(target, StandIn) or not isinstance(source, StandIn) or isinstance(index, StandIn):
        raise unsupported(func, args, kwargs, "writes by indices that are values, or what is none of the state's")
    dim %= target.dim()
    size = target.shape[dim]
    places = [int(i) + (size if i < 0 else 0) for i in index.tolist()]
    if any(not 0 <= place < size for place in places):
        raise unsupported(func, args, kwargs, f"an index is out of range for {size} in dimension {dim}")
    wide = source.geometry.expand(*target.shape[:dim], len(places), *target.shape[dim + 1 :])
    for number, place in enumerate(places):
        part = StandIn(wide.narrow(dim, number, 1), source.memory)
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
