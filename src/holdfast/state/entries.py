"""What collecting a state yields: tensor entries and object entries, by name; and what may be an entry.

Guarantees: an entry holds a reference, never a copy; a tensor that can't be stored is a `ConfigError` that names its
key and says what to do instead. Assumes nothing is changed between collecting and staging except as the update hook
allows. Does not: decide whether a plain object can be stored (``format.objects`` does, when it dumps it).
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.plan.structure import PathItem
from holdfast.tensor_kinds import TOGETHER, KindGuard, interned, look

if TYPE_CHECKING:
    from collections.abc import Sequence

Path = tuple[PathItem, ...]

_DTYPES: Final = {dtype: name for name in ITEMSIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
_STORED_DTYPES: Final = {name: dtype for dtype, name in _DTYPES.items()}
_FULL_CHECK_TENSORS: Final = 4096


class TensorEntry(msgspec.Struct, frozen=True, eq=False):
    """One tensor: ``tensor`` is the outer one (a DTensor stays a DTensor)."""

    name: str
    path: Path
    tensor: torch.Tensor
    lazy: bool
    """It changes only in an optimizer step, or where the user calls ``before_update()``: staging may take its time.

    True of parameters and optimizer state. Whatever else the user has may change at any moment, however large.
    """


class ObjectEntry(msgspec.Struct, frozen=True, eq=False):
    """One plain value, as it was when the state was collected."""

    name: str
    path: Path
    value: Any


class Collected(msgspec.Struct, frozen=True, eq=False):
    """References to all that a rank's state holds at this moment."""

    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    unchanged: bool
    """Names, order, shapes, dtypes, placements, and the lazily staged tensor objects themselves, are those of the
    tree's previous `Collected`: who kept those may go on using them. All else is to be taken from here each time."""
    fingerprint: int
    """Equal for two collections of one tree exactly when everything between them was ``unchanged``."""
    group_ranks: tuple[int, ...]
    """Global ranks of the saving group, in group order."""
    rank: int
    """Whose state this is: its place in the group."""
    settled: Sequence[TensorEntry] = ()
    """Of those not staged lazily the ones that are the same objects as long as ``number`` is the same."""
    fleeting: Sequence[TensorEntry] = ()
    """The others that aren't staged lazily: they may be other objects each time."""
    number: int = 0


class Collector(Protocol):
    """What a save takes its snapshots of: a `StateTree`, or anything that collects alike."""

    def collect(self, *, look_closer: bool = True) -> Collected:
        """References to everything there is now; see `StateTree.collect`."""
        ...

    def module_tensors(self) -> frozenset[str]:
        """Names of the tensors that a save may convert to another dtype."""
        ...

    def update_targets(self, collected: Collected) -> frozenset[int]:
        """``id`` of every tensor whose update may change a lazily staged one."""
        ...


def joined(path: Path) -> str:
    return ".".join(map(str, path))


def known_dtype(tensor: torch.Tensor, name: str) -> str:
    """The stored name of ``tensor``'s dtype; `ConfigError` where it can't be stored."""
    found = _DTYPES.get(tensor.dtype)
    if found is None:
        raise ConfigError(f"{name}: dtype {tensor.dtype} can't be stored; convert the tensor first", field=name)
    return found


def torch_dtype(stored: str) -> torch.dtype:
    """The dtype object for a stored name; `ConfigError` if this torch doesn't have it."""
    known = _STORED_DTYPES.get(stored)
    if known is not None:
        return known
    found = getattr(torch, stored, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {stored!r} is unknown to torch {torch.__version__}; load with a newer torch")
    return found


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise `ConfigError`, naming ``name``, unless ``tensor`` can be stored."""
    if type(tensor) is torch.Tensor:  # most are, and there may be very many
        _check_plain(name, tensor)
        return
    if compat.is_dtensor(tensor):
        for placement in tensor.placements:  # type: ignore[attr-defined]
            if placement.is_partial():
                _refuse(name, f"a DTensor with placement {placement} is a sum not yet taken", "redistribute it first")
        tensor = compat.dtensor_local(tensor)
    tensor = compat.wait_for_collective(tensor)
    if compat.is_uninitialized(tensor):
        _refuse(name, "a lazy parameter has no values yet", "run a forward first")
    if not compat.is_storable_type(tensor):
        _refuse(name, f"tensors of type {type(tensor).__qualname__} can't be stored", "keep it as plain tensors")
    _check_plain(name, tensor)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        _refuse(name, "nested tensors can't be stored", "keep values and offsets as two plain tensors")
    if tensor.layout is not torch.strided:
        _refuse(name, f"a tensor of layout {tensor.layout} can't be stored", "keep values and indices, or to_dense()")
    if tensor.is_quantized:
        _refuse(name, "quantized tensors can't be stored", "keep int_repr(), scale and zero point, or dequantize()")
    if tensor.is_meta:
        _refuse(name, "a tensor on the meta device has no values", "materialize the module first (to_empty)")
    known_dtype(tensor, name)


def _refuse(name: str, what: str, instead: str) -> None:
    raise ConfigError(f"{name}: {what}; {instead}", field=name)


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor that its place in a checkpoint depends on, but for its name."""
    if compat.is_dtensor(tensor):
        return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return look(tensor)


class Described(NamedTuple):
    """Names and looks of tensors, each as `describe` gives it; as few objects as there are kinds of tensors."""

    names: list[str]
    looks: list[tuple[Any, ...]]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry]) -> Described:
        return cls([entry.name for entry in entries], interned([describe(entry.tensor) for entry in entries]))


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether one place in memory is several elements of ``tensor``, so that nothing can be written to it."""
    if tensor.is_contiguous():  # or empty
        return False
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if tensor.numel() > 1 + sum(step * (size - 1) for step, size in steps):
        return True  # fewer places than elements
    reach = 0
    for step, size in steps:
        if step <= reach:  # a dimension steps within what inner ones reach: they may still pass one another
            return step == 0 or _meet(steps)
        reach += step * (size - 1)
    return False


def _meet(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether any two elements of these (stride, size) by dimension have the same place."""
    places = np.zeros(1, dtype=np.int64)
    for step, size in steps:
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * step).ravel()
    return len(np.unique(places)) < len(places)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor this rank holds of ``tensor``: same memory, detached, conjugate and negative bits as they are.

    Returns at once, unless the tensor is the result of a functional collective that is still under way: that is
    waited for (on an accelerator: by the current stream).
    """
    if compat.is_dtensor(tensor):
        tensor = compat.dtensor_local(tensor)
    return compat.wait_for_collective(tensor).detach()


class TensorGuard:
    """Notices that tensor objects, unchanged in identity, have changed in shape, dtype, device or placement.

    That is what ``.data = ...`` does, and with it ``module.to(...)``. Where torch can't compare many tensors at once,
    shapes are what costs: above 4,096 tensors their size in bytes stands in for it. A transpose is then left to the
    stager, which refuses a tensor that isn't as planned.
    """

    __slots__ = ("_dtensors", "_kinds", "_specs", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], looks: Sequence[tuple[Any, ...]] | None = None) -> None:
        """looks: what `describe` has given for each a moment ago."""
        self._tensors = list(tensors)
        few = len(self._tensors) <= _FULL_CHECK_TENSORS
        self._dtensors = [tensor for tensor in self._tensors if compat.is_dtensor(tensor)]
        plain = None if self._dtensors else looks
        self._kinds = []
        for start in range(0, len(self._tensors), TOGETHER):
            some = slice(start, start + TOGETHER)
            guard = KindGuard(self._tensors[some], thorough=few, looks=None if plain is None else plain[some])
            self._kinds.append((start, guard))
        self._specs = list(map(compat.dtensor_spec, self._dtensors))

    def stands(self) -> bool:
        return all(kind.stands(self._tensors[start : start + TOGETHER]) for start, kind in self._kinds) and all(
            map(is_, map(compat.dtensor_spec, self._dtensors), self._specs)
        )


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether two sequences hold the very same objects: never compares values, which tensors do element by element."""
    return len(left) == len(right) and all(map(is_, left, right))
