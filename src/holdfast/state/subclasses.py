"""Take tensor subclasses apart, and put them together: those with `__tensor_flatten__` and `__tensor_unflatten__`.

    <name>.<inner>          an inner tensor, an entry like any other; inner tensors may be subclasses again
    <name>.__subclass__     a plain note: class, names of inner tensors, context, shape and strides

Quantized weights and the states of 8-bit and 4-bit optimizers are of this kind. Inner tensors are staged, watched and
loaded as what they are; the subclass itself is never copied. A load fills the inner tensors of a subclass that is there
in place, and compares the note. It makes one that isn't there (optimizer state before the first step) only if its class
is one that `torch.serialization.add_safe_globals` was called with, and its context consists of plain values.

Of a DTensor of a subclass (FSDP2 of float8 weights, quantized optimizer states) the inner tensors of its local part
are stored, sharded as it is: those of its shape, and of classes that are known to have them rows of one value a block.

Guarantees: nothing that a file names is imported. A context that can't be compared is a `ConfigError` that names the
tensor, and so is an inner tensor of a DTensor that isn't known to be sharded in some way.
Does not: take plain DTensors apart, nor what isn't sound to read in parts (nested tensors, pending collectives).
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, StateMismatch
from holdfast.state.entries import ObjectEntry, Path, TensorEntry, WholePlace, joined, same_objects
from holdfast.state.shards import LocalPart

NOTE: Final = "__subclass__"
_KIND: Final = "__kind__"
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)

unfolds: Callable[[object], bool] = compat.has_inner_tensors
"""Return True for a tensor that is stored as its inner tensors."""


def rows_of(tensor: torch.Tensor, shown: str = "a tensor") -> Iterator[tuple[str, torch.Tensor | LocalPart]]:
    """Yield the inner tensors, each with its name; of inner tensors that are subclasses their own.

    Of a DTensor's local part, each with its place. Raises `ConfigError`, naming it, where that can't be told.
    """
    for path, value in parts_of(tensor, shown, notes=False):
        yield ".".join(path), value


def held(value: torch.Tensor | LocalPart) -> torch.Tensor:
    """Return the plain tensor of a row."""
    return value.tensor if isinstance(value, LocalPart) else value


def parts_of(tensor: torch.Tensor, name: str, *, notes: bool = True) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield inner tensors, and the notes of this and inner subclasses, by path below ``name``."""
    local = compat.dtensor_local(tensor) if compat.is_dtensor(tensor) else tensor
    for key in compat.inner_names(local):
        inner = getattr(local, key)
        if unfolds(inner):
            if local is not tensor:
                raise _unplaced(f"{name}.{key}", local, "it is itself made of inner tensors")
            yield from (((key, *path), value) for path, value in parts_of(inner, f"{name}.{key}", notes=notes))
        else:
            yield (key,), inner if local is tensor else _placed(tensor, local, key, inner, name)
    if notes:
        yield (NOTE,), note_of(tensor, name)


_BLOCKWISE: Final = ("OptimState4bit", "OptimState8bit", "OptimStateFp8")
"""torchao's quantized states: their inner tensors are flat rows of blocks, but for tables that are the same everywhere.
"""
_TABLES: Final = ("qmap",)


def _placed(
    outer: torch.Tensor, local: torch.Tensor, key: str, inner: torch.Tensor, name: str
) -> torch.Tensor | LocalPart:
    """Return an inner tensor of a DTensor's local part with its place in that of the whole."""
    if type(local).__qualname__ in _BLOCKWISE and key in _TABLES:
        return inner
    place = None
    if inner.shape == local.shape:
        place = whole_place(outer, tuple(outer.shape))
    elif type(local).__qualname__ in _BLOCKWISE and inner.dim() == 1 and inner.numel():
        place = block_place(outer, inner.numel() * outer.numel() // max(local.numel(), 1))
    if place is None:
        raise _unplaced(f"{name}.{key}", local, f"of shape {list(inner.shape)}, where its part is {list(local.shape)}")
    return LocalPart(inner, place)


def whole_place(outer: torch.Tensor, shape: tuple[int, ...]) -> WholePlace:
    """Return the place of what is of ``shape``, and sharded like the DTensor ``outer``."""
    return WholePlace(shape, None, outer.device_mesh, tuple(outer.placements))  # type: ignore[attr-defined]


def block_place(outer: torch.Tensor, length: int) -> WholePlace | None:
    """Return the place of a row of ``length`` with one value for each block of the flattened DTensor ``outer``.

    None if ranks don't have equal numbers of whole rows of ``outer``, or blocks go across them.
    """
    mesh, placements = outer.device_mesh, tuple(outer.placements)  # type: ignore[attr-defined]
    ranks = 1
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(0) or compat.strided_shard_split(placement) is not None:
            return None
        ranks *= int(mesh.size(dim))
    if not length or outer.shape[0] % ranks or length % ranks or outer.numel() % length:
        return None
    return whole_place(outer, (length,))


def new_row(outer: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | LocalPart:
    """Return memory for the inner tensor ``name``, of ``shape``, of a tensor that is sharded like ``outer``.

    Raises `ConfigError` if it can't be sharded so.
    """
    local = compat.dtensor_local(outer)
    if name.rpartition(".")[2] in _TABLES:
        return torch.empty(shape, dtype=dtype, device=local.device)
    if shape == tuple(outer.shape):
        return LocalPart(torch.empty(local.shape, dtype=dtype, device=local.device), whole_place(outer, shape))
    place = block_place(outer, shape[0]) if len(shape) == 1 else None
    if place is None:
        raise _unplaced(name, outer, f"of shape {list(shape)}, where the whole is {list(outer.shape)}")
    ours = shape[0] * local.numel() // outer.numel()
    return LocalPart(torch.empty(ours, dtype=dtype, device=local.device), place)


def plain_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return new memory for a plain tensor of a subclass's shape, sharded like it: `empty_like` may make another."""
    if not compat.is_dtensor(tensor):
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    local = torch.empty(compat.dtensor_local(tensor).shape, dtype=dtype, device=tensor.device)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return compat.make_dtensor(local, mesh, placements, tensor.shape, tensor.stride())


def _unplaced(name: str, local: torch.Tensor, why: str) -> ConfigError:
    return ConfigError(
        f"{name}: an inner tensor of a sharded {type(local).__qualname__}, {why}: how it is sharded can't be told. "
        "Shard so that all ranks have equally many rows and whole blocks, or don't quantize what is sharded",
        field=name,
    )


def notes_of(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the notes of this and inner subclasses, by name below ``name``."""
    for path, value in parts_of(tensor, name):
        if path[-1] == NOTE:
            yield ".".join(path), value


class Unfolded:
    """A parameter or buffer of a module that is stored as its inner tensors: those it had when it was looked at."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.name = str(entry.path[-1])
        self._inner = self._held()

    @property
    def stands(self) -> bool:
        """Whether its inner tensors are still the same objects."""
        return unfolds(self.entry.tensor) and same_objects(self._held(), self._inner)

    def _held(self) -> list[torch.Tensor]:
        return [held(row) for _, row in rows_of(self.entry.tensor, self.entry.name)]

    def entries(self) -> list[TensorEntry]:
        """Return the entries of its inner tensors."""
        below = [(self._path(name), inner) for name, inner in rows_of(self.entry.tensor, self.entry.name)]
        return [
            TensorEntry(
                joined(path), path, held(row), self.entry.lazy, place=row.place if isinstance(row, LocalPart) else None
            )
            for path, row in below
        ]

    def notes(self) -> list[ObjectEntry]:
        """Return its notes, as they are now."""
        below = [(self._path(name), note) for name, note in notes_of(self.entry.tensor, self.entry.name)]
        return [ObjectEntry(joined(path), path, note) for path, note in below]

    def _path(self, below: str) -> Path:
        return (*self.entry.path[:-1], f"{self.name}.{below}")


def note_of(tensor: torch.Tensor, name: str) -> tuple[Any, ...]:
    """Return what is needed, besides the inner tensors, to know whether another is of this kind, or to make it."""
    local = compat.dtensor_local(tensor) if compat.is_dtensor(tensor) else tensor
    names, context = compat.flatten_subclass(local)
    kind = type(local)
    return (
        f"{kind.__module__}.{kind.__qualname__}",
        tuple(names),
        _resized(_plain(context, name), local.shape, tensor.shape),
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def _resized(context: Any, shape: torch.Size, other: torch.Size) -> Any:
    """Return a context with the shape of one tensor in the place of another's."""
    if shape == other:
        return context
    if isinstance(context, torch.Size):
        return other if context == shape else context
    if type(context) in (list, tuple):
        is_shape = tuple(context) == tuple(shape)
        return type(context)(other if is_shape else (_resized(item, shape, other) for item in context))
    if type(context) is dict:
        return {key: _resized(item, shape, other) for key, item in context.items()}
    return context


def check_note(stored: Any, here: tuple[Any, ...], name: str) -> None:
    """Raise `StateMismatch` unless ``stored`` is the note ``here`` of the tensor ``name``."""
    if isinstance(stored, tuple) and stored[:-1] == here[:-1]:  # strides follow from the inner tensors'
        return
    shown = here[0].rpartition(".")[2]
    if not isinstance(stored, tuple) or len(stored) != len(here) or stored[0] != here[0]:
        detail = f"stored as a {_class_in(stored)}, the state has a {shown}"
    else:
        titles = ("class", "inner tensors", "context", "shape")
        odd = [at for at in range(len(here) - 1) if stored[at] != here[at]]
        detail = "; ".join(f"{titles[at]} {stored[at]!r:.200} stored, {here[at]!r:.200} here" for at in odd)
        detail = f"a {shown} of another kind: {detail}"
    raise StateMismatch(
        f"the checkpoint doesn't fit the state: {name} ({detail}). Quantize the state as it was when it was saved",
        mismatched=(name,),
    )


def refold(like: Any, inner: Mapping[str, Any], note: Any) -> torch.Tensor:
    """Return the subclass with these ``inner`` tensors: ``like`` itself where it has them, else a new one.

    Of parts, a DTensor with it as its local part.

    Raises `StateMismatch` if ``like`` is of another kind, `ConfigError` for a class that may not be made.
    """
    name = "a tensor"
    parts = [part for part in inner.values() if isinstance(part, LocalPart)]
    inner = {key: held(value) for key, value in inner.items()}
    if unfolds(like):
        check_note(note, note_of(like, name), name)
        local = compat.dtensor_local(like) if compat.is_dtensor(like) else like
        if all(getattr(local, key) is value for key, value in inner.items()):
            compat.forget_derived(local)
            found: torch.Tensor = like
            return found
        made = compat.unflatten_subclass(type(local), dict(inner), compat.flatten_subclass(local)[1], local)
        if local is like:
            return made
        return compat.make_dtensor(made, like.device_mesh, like.placements, like.shape, like.stride())
    kind = _known_class(note)
    names, context, shape, strides = note[1:]
    if set(names) != set(inner) or not _is_plain(context):
        raise ConfigError(
            f"a {kind.__name__} in the checkpoint can't be made from what is stored: its context has values that only "
            "it can make. Let the optimizer make a step before loading, or quantize the model first",
        )
    like = torch.empty_strided(shape, strides, device="meta")
    if not parts:
        return compat.unflatten_subclass(kind, dict(inner), context, like)
    mesh, placements = parts[0].place.mesh, parts[0].place.placements
    # Whatever else is in it, its local shape is that of a tensor sharded alike.
    local = compat.dtensor_local(compat.empty_dtensor(shape, mesh, placements))
    made = compat.unflatten_subclass(kind, dict(inner), _resized(context, like.shape, local.shape), local)
    return compat.make_dtensor(made, mesh, placements, shape, strides)


def _known_class(note: Any) -> type[torch.Tensor]:
    wanted = _class_in(note)
    for kind in torch.serialization.get_safe_globals():
        found = kind[0] if isinstance(kind, tuple) else kind
        if (
            isinstance(found, type)
            and issubclass(found, torch.Tensor)
            and f"{found.__module__}.{found.__qualname__}" == wanted
        ):
            return found
    raise ConfigError(
        f"the checkpoint has a tensor of class {wanted}, which this state doesn't have: only classes that "
        "torch.serialization.add_safe_globals was called with are made. Import the library that has it, or let the "
        "optimizer make a step before loading"
    )


def _class_in(note: Any) -> str:
    return note[0] if isinstance(note, tuple) and len(note) == 5 and isinstance(note[0], str) else "tensor"


def _plain(value: Any, name: str) -> Any:
    """Return ``value`` as plain values that are equal exactly if it is."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    shown = f"{kind.__module__}.{kind.__qualname__}"
    if kind is tuple or kind is list or kind is torch.Size:
        return kind(_plain(item, name) for item in value) if kind is not torch.Size else value
    if isinstance(value, enum.Enum):
        return {_KIND: shown, "name": value.name}
    if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        items = {key: _plain(item, name) for key, item in value.items()}
        return items if kind is dict else {_KIND: shown, "items": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: _plain(getattr(value, item.name), name) for item in dataclasses.fields(value)}
        return {_KIND: shown, "fields": fields}
    if isinstance(value, tuple):
        return {_KIND: shown, "items": [_plain(item, name) for item in value]}
    if isinstance(value, (type, types.FunctionType)) and "<" not in value.__qualname__:
        return {_KIND: "named", "name": f"{value.__module__}.{value.__qualname__}"}
    raise ConfigError(
        f"{name}: the context of its class has a value of type {shown}, which can't be stored; keep plain tensors",
        field=name,
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return _KIND not in value and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else True
