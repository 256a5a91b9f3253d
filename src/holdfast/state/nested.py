"""Take a nested state apart into bytes and the memory of its tensors, and put it together in another process.

    take_apart(state) -> `Apart`: a description that can be sent, and the `Memory` of each tensor to send after it
    Landing(description, own) -> memory to receive into, then `put_together` -> the state

Guarantees: containers, keys and plain values come back as they were, and tensors with their sizes, strides (where they
have no gaps), dtype, class (`torch.Tensor`, `torch.nn.Parameter`, DTensor, subclasses made of inner tensors) and
``requires_grad``. Tensors that are the same memory are sent once and are the same memory again; views that only overlap
are not. What may be in a state is what may be in a checkpoint: `take_apart` refuses the rest by its position, and
reading a description runs nothing that it names.
Assumes: nobody writes to the tensors meanwhile. A DTensor's local part is sent as it is: the other process has the same
place in its mesh.
Does not: copy, send, or check bytes; find out by itself what the receiver has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.objects import dump_around, load_around
from holdfast.format.structure import MeshLayout
from holdfast.state.entries import check_tensor, known_dtype, local_tensor, memory_of, torch_dtype
from holdfast.state.shards import is_sharded
from holdfast.state.structure import LayoutTable
from holdfast.state.subclasses import note_of, refold, unfolds

if TYPE_CHECKING:
    from collections.abc import Sequence

_STATE: Final = "state"


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """What makes a DTensor of a local tensor. ``groups``: names of the mesh's process groups, where torch has them."""

    layout: MeshLayout
    device: str
    names: tuple[str, ...] | None
    groups: list[str]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def is_like(self, other: Sharding | None) -> bool:
        """Return True if both cut a tensor alike; they may be of other ranks."""
        mine = self.layout.shape, self.layout.placements, self.sizes
        return other is not None and mine == (other.layout.shape, other.layout.placements, other.sizes)


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: the local part of a DTensor. ``name``: its position in the state."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None: row by row."""
    memory: int
    """Number of its memory; -1 for a tensor that is made of others."""
    trains: bool
    is_parameter: bool
    sharding: Sharding | None = None
    inner: tuple[tuple[str, int], ...] = ()
    """Of a subclass: attributes, and numbers of the leaves that they are."""


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Elements that lie next to one another, sent as they lie."""

    name: str
    dtype: str
    elements: int


class Description(msgspec.Struct, frozen=True, array_like=True):
    """All of a state but the bytes of its tensors. ``notes``: of subclasses, in the order of their leaves."""

    skeleton: bytes
    notes: bytes
    leaves: tuple[Leaf, ...]
    memories: tuple[Memory, ...]


class Apart(NamedTuple):
    """A state taken apart. ``flat``: the elements of each memory, one-dimensional, on any device."""

    description: Description
    flat: list[torch.Tensor]
    tensors: list[torch.Tensor]
    """What each leaf is."""


def take_apart(state: Any) -> Apart:
    """Describe ``state``, and find the memory of its tensors; copies only tensors with gaps or overlaps.

    Raises:
        ConfigError: it has a value or a tensor that can't be sent; names its position.
    """
    taking = _TakenLeaves()
    skeleton = dump_around(state, name=_STATE, outside=taking.leaf)
    notes = dump_around(taking.notes, name=_STATE, outside=taking.leaf)
    description = Description(skeleton, notes, tuple(taking.leaves), tuple(taking.memories))
    return Apart(description, taking.flat, taking.tensors)


class _TakenLeaves:
    """Collects leaves."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.tensors: list[torch.Tensor] = []
        self.memories: list[Memory] = []
        self.flat: list[torch.Tensor] = []
        self.notes: list[Any] = []
        self._layouts = LayoutTable()
        self._known: dict[Any, tuple[int, tuple[int, ...] | None]] = {}

    def leaf(self, name: str, tensor: torch.Tensor) -> int:
        """Note a tensor; return its number."""
        parameter = isinstance(tensor, torch.nn.Parameter)
        if unfolds(tensor):
            self.notes.append(note_of(tensor, name))
            inner = tuple((key, self.leaf(f"{name}.{key}", getattr(tensor, key))) for key in compat.inner_names(tensor))
            sizes = tuple(tensor.shape)
            made = Leaf(name, "", sizes, None, -1, tensor.requires_grad, parameter, inner=inner)
        else:
            if is_sharded(tensor):
                raise ConfigError(f"{name} is a {type(tensor).__name__}, which can't be sent; use DTensor", field=name)
            check_tensor(name, tensor)
            memory, strides = self._memory(name, tensor)
            local = local_tensor(tensor)
            made = Leaf(
                name,
                known_dtype(local, name),
                tuple(local.shape),
                strides,
                memory,
                tensor.requires_grad,
                parameter,
                self._sharding(tensor, name),
            )
        self.leaves.append(made)
        self.tensors.append(tensor)
        return len(self.leaves) - 1

    def _memory(self, name: str, tensor: torch.Tensor) -> tuple[int, tuple[int, ...] | None]:
        local = local_tensor(tensor)
        key = (memory_of(tensor), local.shape, local.is_conj(), local.is_neg()) if local.numel() else None
        if key in self._known:
            return self._known[key]
        flat, strides = flat_of(local)
        found = len(self.memories), strides
        self.memories.append(Memory(name, known_dtype(local, name), flat.numel()))
        self.flat.append(flat)
        if key is not None:
            self._known[key] = found
        return found

    def _sharding(self, tensor: torch.Tensor, name: str) -> Sharding | None:
        index = self._layouts.index_of(tensor, name)
        if index is None:
            return None
        layout = self._layouts.layouts[index]
        assert isinstance(layout, MeshLayout), "only that of a DTensor has a number"
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names
        return Sharding(
            layout,
            mesh.device_type,
            None if names is None else tuple(names),
            compat.mesh_groups(mesh),
            tuple(tensor.shape),
            tensor.stride(),
        )


def flat_of(local: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return the elements of a plain tensor as they lie, and its strides; a copy, row by row, if it has gaps."""
    if not _is_dense(local):
        local = compat.clone(local)
    strides = None if local.is_contiguous() else local.stride()
    return local.as_strided((local.numel(),), (1,)), strides


def _is_dense(local: torch.Tensor) -> bool:
    """Return True if the values of a plain tensor lie next to one another, in any order, each once."""
    if local.is_conj() or local.is_neg():
        return False
    return local.is_contiguous() or local.stride() == torch.empty_like(local, device="meta").stride()


class Landing:
    """A described state, of which the tensors' memory is yet to be filled."""

    def __init__(self, description: Description, own: Apart | None = None) -> None:
        """own: the receiver's state; its tensors are received into where they are of the same kind.

        Raises `CheckpointCorrupt` for a description that contradicts itself, `ConfigError` if two positions of ``own``
        have one name.
        """
        self._description = description
        self._own: dict[str, tuple[Leaf, torch.Tensor]] = {}
        for leaf, tensor in zip(own.description.leaves, own.tensors, strict=True) if own is not None else ():
            if leaf.name in self._own:
                raise ConfigError(f"two keys of the own state look alike: {leaf.name}; rename one", field=leaf.name)
            self._own[leaf.name] = leaf, tensor
        self.flat: list[list[torch.Tensor]] = [[] for _ in description.memories]
        """For each memory, where its elements go to: one-dimensional, on any device; one or more."""
        self._plain: list[torch.Tensor | None] = []
        self._taken: set[int] = set()
        self._meshes: dict[Any, Any] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        made: dict[int, torch.Tensor] = {}
        for leaf in description.leaves:
            self._check(leaf)
            self._plain.append(None if leaf.memory < 0 else self._place(leaf, made))

    @property
    def in_place(self) -> bool:
        """Return True if memory of the receiver's own state is written to."""
        return bool(self._taken)

    def _check(self, leaf: Leaf) -> None:
        memories = self._description.memories
        if leaf.memory >= 0 and leaf.memory < len(memories):
            memory = memories[leaf.memory]
            alike = self._shapes.setdefault(leaf.memory, leaf.sizes) == leaf.sizes
            elements = torch.Size(leaf.sizes).numel() if min(leaf.sizes, default=0) >= 0 else -1
            if alike and (memory.dtype, memory.elements) == (leaf.dtype, elements):
                return
        elif leaf.memory < 0 and all(0 <= number < len(self._plain) for _, number in leaf.inner):
            return
        raise self._odd(leaf)

    def _odd(self, leaf: Leaf) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{leaf.name} isn't described as a tensor", path="the sender", tensor=leaf.name)

    def _target(self, leaf: Leaf) -> torch.Tensor | None:
        """Return the receiver's own tensor in the place of ``leaf``, if it can be received into."""
        if leaf.name not in self._own or leaf.memory < 0:
            return None
        mine, tensor = self._own[leaf.name]
        if (mine.dtype, mine.sizes, mine.strides) != (leaf.dtype, leaf.sizes, leaf.strides):
            return None
        if not (mine.sharding is None if leaf.sharding is None else leaf.sharding.is_like(mine.sharding)):
            return None
        local = local_tensor(tensor)
        return local if _is_dense(local) else None

    def _place(self, leaf: Leaf, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """Find the memory of a leaf, or make it: once for all that share it."""
        own = self._target(leaf)
        if own is not None:
            self._taken.add(len(self._plain))
            self.flat[leaf.memory].append(flat_of(own)[0])
            return own
        first = made.get(leaf.memory)
        if first is None:
            dtype = torch_dtype(leaf.dtype)
            if leaf.strides is None:
                first = torch.empty(leaf.sizes, dtype=dtype)
            else:
                first = torch.empty_strided(leaf.sizes, leaf.strides, dtype=dtype)
                if not _is_dense(first):
                    raise self._odd(leaf)
            made[leaf.memory] = first
            self.flat[leaf.memory].append(flat_of(first)[0])
            return first
        return first.view_as(first)

    def put_together(self, *, path: str) -> Any:
        """Return the state, once all memory is filled. ``path``: where it came from, for messages.

        Raises:
            CheckpointCorrupt: its skeleton is damaged.
            ConfigError: a tensor subclass that may not be made here.
        """
        notes = iter(load_around(self._description.notes, (), name=_STATE, path=path))
        tensors: list[torch.Tensor] = []
        for leaf, plain in zip(self._description.leaves, self._plain, strict=True):
            tensors.append(self._made(leaf, plain, tensors, notes))
        return load_around(self._description.skeleton, tensors, name=_STATE, path=path)

    def _made(self, leaf: Leaf, plain: torch.Tensor | None, tensors: Sequence[torch.Tensor], notes: Any) -> Any:
        if len(tensors) in self._taken:
            return self._own[leaf.name][1]
        if plain is None:
            inner = {key: tensors[number] for key, number in leaf.inner}
            found = refold(self._own.get(leaf.name, (leaf, None))[1], inner, next(notes))
        else:
            found = plain if leaf.sharding is None else self._sharded(plain, leaf.sharding)
        if leaf.is_parameter and not isinstance(found, torch.nn.Parameter):
            return torch.nn.Parameter(found, leaf.trains)
        return found.requires_grad_() if leaf.trains else found

    def _sharded(self, local: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        layout = sharding.layout
        key = sharding.device, layout.shape, layout.ranks, sharding.names
        if key not in self._meshes:
            ranks = torch.tensor(layout.ranks, dtype=torch.int).view(layout.shape)
            self._meshes[key] = compat.make_mesh(sharding.device, ranks, sharding.names, sharding.groups)
        placements = tuple(compat.make_placement(each.kind, each.dim, each.split) for each in layout.placements)
        return compat.make_dtensor(local, self._meshes[key], placements, sharding.sizes, sharding.strides)


prepare_decoding(Sharding, Leaf, Memory, Description)
