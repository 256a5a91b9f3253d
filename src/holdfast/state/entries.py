"""Define what collecting a state yields: tensor entries and object entries, by name; tell which of them are as before.

    check_tensor, known_dtype             what may be an entry
    Described, describe                   what a tensor's place in a checkpoint depends on
    TensorGuard, KindGuard, LayoutGuard   whether many tensors still have that shape, dtype, device or placement
    TensorAddresses, memory_of            where they lie in memory

Object identity is not enough: ``tensor.data = other`` keeps the object and replaces its content. Most of the cost is
fetching tensor objects from memory, so tensors are checked `TOGETHER` at a time: another pass over the same tensors
right after finds them in the CPU cache.

Guarantees: an entry holds a reference, never a copy; a `KindGuard` holds no tensor; a tensor that can't be stored is a
`ConfigError` that names its key and says what to do instead. Assumes nothing is changed between collecting and staging
except as the update hook allows.
Does not: decide whether a plain object can be stored (``format.objects`` does, when it dumps it); look at values or
versions (``staging.change_detection``).
"""

from __future__ import annotations

from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.structure import KeysSpec, PathItem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from holdfast.boxes import Box

Path = tuple[PathItem, ...]

_DTYPES: Final = {dtype: name for name in ITEMSIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
_STORED_DTYPES: Final = {name: dtype for dtype, name in _DTYPES.items()}
_FULL_CHECK_TENSORS: Final = 4096
TOGETHER: Final = 512
"""Number of tensors that still fit the CPU cache for a second pass."""

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
Look = tuple[Any, ...]
look: Callable[[torch.Tensor], Look] = attrgetter("shape", "dtype", "device")
"""What kind of thing a plain tensor is, as far as its place in a checkpoint goes."""
_by_size = attrgetter("nbytes", "dtype", "device")
_is_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_is_neg: Callable[[torch.Tensor], bool] = torch.Tensor.is_neg
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class WholePlace(NamedTuple):
    """Where a plain tensor lies in a larger one, of which ranks hold parts."""

    shape: tuple[int, ...]
    """Of the whole."""
    box: Box | None = None
    """The part. None: as ``mesh`` and ``placements`` say, whose local tensor it is; without a mesh nothing of it."""
    mesh: Any = None
    placements: tuple[Any, ...] = ()


class TensorEntry(msgspec.Struct, frozen=True, eq=False):
    """One tensor: ``tensor`` is the outer one (a DTensor stays a DTensor). Of a tensor whose parts are in memory of
    their own, there is an entry for each, named by `source_name`.
    """

    name: str
    path: Path
    tensor: torch.Tensor
    lazy: bool
    """It changes only in an optimizer step, or after ``before_update()``, so it may be copied later. True for
    parameters and optimizer state; all other state may change at any moment.
    """
    fresh: bool = False
    """Nothing else references its memory, so it can't change and need not be copied."""
    place: WholePlace | None = None
    """``tensor`` is a part of what is stored."""
    stored_as: str | None = None
    """Name of the dtype that its values are converted to on the way; None: they stay as they are."""


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
    """Rank in the group of the process whose state this is."""
    settled: Sequence[TensorEntry] = ()
    """Of those not staged lazily the ones that are the same objects as long as ``number`` is the same."""
    fleeting: Sequence[TensorEntry] = ()
    """The others that aren't staged lazily: they may be other objects each time."""
    number: int = 0
    asked: Any = None
    """Results of module hooks, for another collection at the same moment, so that hooks run once."""
    mappings: Sequence[KeysSpec] = ()


class Collector(Protocol):
    """Protocol of objects that a save collects state from: `StateTree` and alike."""

    def collect(self, *, look_closer: bool = True, asked: Any = None) -> Collected:
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
    return dtype_name(tensor.dtype, name)


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """The stored name of ``dtype``; `ConfigError`, naming ``name``, where it can't be stored."""
    found = _DTYPES.get(dtype)
    if found is None:
        raise ConfigError(f"{name}: dtype {dtype} can't be stored; convert the tensor first", field=name)
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
        return cls([entry.name for entry in entries], interned(list(map(_described, entries))))


def _described(entry: TensorEntry) -> tuple[Any, ...]:
    return describe(entry.tensor) if entry.place is None else (*describe(entry.tensor), entry.place)


def shares_memory(tensor: torch.Tensor) -> bool:
    """Return True if several elements of ``tensor`` share one memory location, so that it can't be written to."""
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
    """Return True if two elements of a tensor with these (stride, size) pairs have the same memory location."""
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


# `PerRank`: a value that is each rank's own.

T = TypeVar("T")


class PerRank(Generic[T]):
    """Wraps a value of the state that differs from rank to rank: each rank's is stored, under names of its own.

    Without it, equal names on several ranks are taken for copies of one value, and one rank's is kept. RNG state and
    dataloaders are wrapped by themselves. ``value`` may be anything a state may hold. On load, a plain value is
    replaced: read it back from ``value``; containers, tensors and stateful objects are filled in place.

    On another world size there is no value that is plainly this rank's: where ``value`` has a method
    ``reshard_state_dict(states, rank, world)``, it gets all ranks' states in rank order and returns the one to load
    (None if it has loaded what it wants by itself); otherwise loading it is a `StateMismatch`, unless it is excluded.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value: T = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class Replicated(Generic[T]):
    """Wraps a value of the state that is the same on every rank, where a name or a class would make it each rank's own.

    The opposite of `PerRank`: a dataloader that every rank steps alike is stored once, under its plain name, and loads
    on any number of ranks. Ranks must hold equal values; one rank's is kept. Read a plain value back from ``value``.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value: T = value

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


class TrainableOnly:
    """Wraps a module of the state: its frozen parameters are neither stored nor loaded, its buffers are.

    For adapters on a large frozen model that is loaded from elsewhere. What is frozen is looked at with each save and
    load (``requires_grad``): a parameter that was frozen when it was saved has to be frozen, or excluded, when it is
    loaded. An export needs the whole module: give it that, not this.
    """

    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        """module: a module, or a list of pipeline stages."""
        self.module: Any = module

    def __repr__(self) -> str:
        return f"TrainableOnly({type(self.module).__name__})"


class Unprefixed:
    """Wraps a module of the state: its names in a checkpoint don't begin with its key.

    For checkpoints that torchtitan reads: ``layers.0.weight``, not ``model.layers.0.weight``. At the top of a state
    only. On load both are found, with and without this. An export needs the module itself: give it that, not this.
    """

    __slots__ = ("module",)

    def __init__(self, module: Any) -> None:
        """module: a module, or a list of pipeline stages."""
        self.module: Any = module

    def __repr__(self) -> str:
        return f"Unprefixed({type(self.module).__name__})"


# Parts of a state that are no modules or optimizers: leaves of the user's containers, and stateful objects.


class Stateful(Protocol):
    """DCP's convention: an object that gives its state as a mapping and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class LeafPart(msgspec.Struct, frozen=True, eq=False):
    """One value, and where in the user's containers it sits. ``holder`` is a mapping, a list, a `PerRank` or a
    `Replicated`.
    """

    path: Path
    holder: Any
    key: Any
    value: Any
    is_replica: bool = False
    """It is loaded; another rank stores it."""
    is_whole: bool = False
    """A mapping or list is one value, too, and replaced."""


class KeysPart(msgspec.Struct, frozen=True, eq=False):
    """A mapping of the user's with keys that aren't strings: its keys, beside the parts that are its values."""

    path: Path
    keys: tuple[Any, ...]


class StatefulPart(msgspec.Struct, frozen=True, eq=False):
    path: Path
    stateful: Stateful
    optional: bool = False
    """Nobody asked for it: a checkpoint without it is no mismatch."""


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
    """Return True if both sequences hold the same objects, by identity: comparing tensors by value is elementwise."""
    return len(left) == len(right) and all(map(is_, left, right))


class KindGuard:
    """The kinds of at most `TOGETHER` tensors. The tensors themselves are given again with each question."""

    __slots__ = ("_check", "_look", "_looks")

    def __init__(self, tensors: Sequence[torch.Tensor], *, thorough: bool, looks: Sequence[Look] | None = None) -> None:
        """thorough: compare shapes even where torch has no quick way to; else sizes in bytes stand in for them.

        looks: what `look` has given for each a moment ago.
        """
        self._check = compat.same_kind_check(tensors)
        self._look: Callable[[torch.Tensor], Any] = look if thorough or self._check is not None else _by_size
        known = looks if self._look is look else None
        self._looks: list[Any] = interned(list(map(self._look, tensors))) if known is None else list(known)

    @property
    def is_quick(self) -> bool:
        """Return True if torch compares the tensors in one call, strides included."""
        return self._check is not None

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if each tensor is still of the same kind."""
        if self._check is not None and self._check(*tensors):
            return True
        if list(map(self._look, tensors)) != self._looks:
            return False
        if self._check is not None:
            # Their `requires_grad` is another, say, or the mode that autograd is in.
            self._check = compat.same_kind_check(tensors)
        return True


class LayoutGuard(KindGuard):
    """`KindGuard` that also knows which tensors' memory is, byte for byte, what a contiguous copy of them is."""

    __slots__ = ("_plain",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors, thorough=True)
        self._plain = _plain(tensors)

    def stands(self, tensors: Sequence[torch.Tensor]) -> bool:
        check = self._check
        return super().stands(tensors) and (
            (check is not None and self._check is check) or _plain(tensors) == self._plain
        )


class TensorAddresses:
    """Read the memory addresses of plain tensors repeatedly; valid while each stays of the same kind."""

    __slots__ = ("_kinds", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._kinds = [
            (start, LayoutGuard(self._tensors[start : start + TOGETHER]))
            for start in range(0, len(self._tensors), TOGETHER)
        ]

    def addresses(self) -> Addresses | None:
        """One for each tensor; None if one is another kind of thing by now, or has given up its memory."""
        addresses = np.empty(len(self._tensors), dtype=np.uint64)
        for start, kind in self._kinds:
            few = self._tensors[start : start + TOGETHER]
            if not kind.stands(few):
                return None
            addresses[start : start + len(few)] = addresses_of(few)
        return addresses if addresses.all() else None


def addresses_of(tensors: Sequence[torch.Tensor]) -> Addresses:
    """Return the memory address of each tensor; 0 for tensors without memory."""
    return np.fromiter(map(_address, tensors), np.uint64, len(tensors))


def _plain(tensors: Sequence[torch.Tensor]) -> bytes:
    return bytes(map(_is_contiguous, tensors)) + bytes(map(_is_neg, tensors))


def interned(looks: list[Any]) -> list[Any]:
    """Equal ones as one object: most tensors are of few kinds, and what there is less of, nobody has to look after."""
    try:
        known: dict[Any, Any] = {}
        return [known.setdefault(look, look) for look in looks]
    except TypeError:
        return looks


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors exactly if they are the same elements in memory: one object, or views that are alike."""
    local = compat.local_tensor(tensor)
    if local.layout is not torch.strided or not compat.is_plain(local) or local.is_meta or not local.numel():
        return id(tensor)
    if not local.untyped_storage().data_ptr():
        return id(tensor)
    return local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), tensor.dtype
