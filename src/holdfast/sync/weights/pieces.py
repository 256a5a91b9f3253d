"""Which pieces a publisher rank sends of its tensors, where they are in memory, and copies to and from buckets.

A rank's weights are described by a `Structure`, as for a save; ranks exchange these, and each finds by itself what it
sends. DTensors are cut by their placements. What several ranks hold (replicas, plain tensors of equal name) is sent
once, its bytes divided among those who hold it; names that only some ranks have are sent by those. What lies here in
several parts, or travels as another dtype than it has here, is a `TensorParts`: its values are converted as they are
copied to where they are sent from.

Guarantees: the pieces of all ranks tile every tensor, or `Outgoing` raises. Bits arrive unchanged, for every dtype and
for views with any strides; conjugate and negated views arrive as their values, converted ones as ``Tensor.to`` makes
them. One call copies a bucket's entries and
releases the GIL once. It allocates only small views, except for conjugate or negated views of a dtype without a copy
kernel (complex32).
Assumes: nobody writes to the tensors meanwhile; the memory of a bucket is contiguous and starts on a multiple of 16
bytes. On an accelerator copies are enqueued on the current stream, and the caller has to wait for them.
Does not: talk to other ranks, checksum, or decide which parts go to whom (``weights.buckets``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, intersect
from holdfast.cores import take_turns
from holdfast.errors import ConfigError, StateMismatch
from holdfast.format.structure import PER_RANK, SOURCE_MARK, digest_of, encode_structure, source_name
from holdfast.plan.write import plan_rank
from holdfast.staging.copier import ByteMemory, CopyList, lies_as_it_is, row_ranges
from holdfast.state.entries import (
    Collected,
    TensorEntry,
    check_tensor,
    describe,
    dtype_name,
    joined,
    known_dtype,
    local_tensor,
    memory_of,
    shares_memory,
)
from holdfast.state.shards import is_sharded, parts_of
from holdfast.state.structure import LayoutTable, part_of, structure_of
from holdfast.sync.weights.buckets import Piece, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.format.structure import Structure
    from holdfast.state.entries import WholePlace
    from holdfast.sync.weights.buckets import BucketEntry, BucketPlan


class TensorParts:
    """A tensor that lies here in parts, or is sent as another dtype than it has here. Parts don't overlap."""

    __slots__ = ("dtype", "parts")

    def __init__(self, parts: Sequence[tuple[torch.Tensor, WholePlace | None]], dtype: torch.dtype) -> None:
        """parts: each a tensor and where it lies in the whole; None: it is the whole, or a DTensor."""
        self.parts = tuple(parts)
        self.dtype = dtype

    @property
    def look(self) -> tuple[Any, ...]:
        """Return all that its place among the weights depends on, but for its name."""
        return self.dtype, tuple((*describe(tensor), place) for tensor, place in self.parts)

    @property
    def memory(self) -> Any:
        """Return what is equal for two that are the same elements in memory, sent alike."""
        return self.dtype, *((memory_of(tensor), place) for tensor, place in self.parts)


Sendable = torch.Tensor | TensorParts
Weights = Mapping[str, Sendable]
"""Tensors by name: DTensors or plain ones, or what is made of such."""
_JOB_BYTES: Final = 16 << 20
"""Bytes copied by one thread at a time."""
_COPY_THREADS: Final = 4
"""More threads don't copy faster."""


class Local:
    """Memory that holds a box of a tensor: ``source`` has the box's sizes, and is sent as ``dtype``.

    columns_of: what it is some columns of, if there are others of the same.
    """

    __slots__ = ("box", "columns_of", "dtype", "source")

    def __init__(
        self, box: Box, source: torch.Tensor, dtype: torch.dtype | None = None, *, columns_of: Local | None = None
    ) -> None:
        self.box = box
        self.source = source
        self.columns_of = columns_of
        self.dtype = source.dtype if dtype is None else dtype

    @property
    def tensor(self) -> torch.Tensor:
        """Return it as it is sent: ``source`` itself, or a converted copy."""
        return self.source if self.source.dtype == self.dtype else self.source.to(self.dtype)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.box, self.tensor))


def named_tensors(weights: Any, *, what: str = "weights") -> dict[str, Sendable]:
    """Convert ``weights``, a mapping or an iterable of (name, tensor), to a dictionary in the order given.

    A `holdfast.Shard`, or a ``ShardedTensor`` of torch, becomes its parts.

    what: name of the argument, for messages.

    Raises:
        ConfigError: another type, a duplicate or invalid name, or a tensor that can't be sent; names it.
    """
    items: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else _iterated(weights)
    found: dict[str, Sendable] = {}
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(f"{what} has {type(item).__name__} in it; expected pairs (name, tensor)", field=what)
        name, tensor = item
        if not isinstance(name, str) or not name or name == PER_RANK or SOURCE_MARK in name:
            raise ConfigError(
                f"{what} has the name {name!r}; expected a string that isn't empty and has no NUL", field=what
            )
        if is_sharded(tensor):
            parts = [(part.tensor, part.place) for part in parts_of(tensor, name)]
            tensor = TensorParts(parts, parts[0][0].dtype) if parts else None
        if not isinstance(tensor, torch.Tensor | TensorParts):
            raise ConfigError(f"{name}: {what} has {type(tensor).__name__} there; expected a tensor", field=name)
        if name in found:
            raise ConfigError(f"{name}: {what} has this name twice; give each tensor its own", field=name)
        found[name] = tensor
    return found


def _iterated(weights: Any) -> Iterable[Any]:
    if isinstance(weights, torch.Tensor | torch.nn.Module | str | bytes):
        raise ConfigError(
            f"weights is a {type(weights).__name__}; expected a mapping of names to tensors, such as "
            "model.state_dict(), or an iterable of (name, tensor)",
            field="weights",
        )
    try:
        pairs: Iterable[Any] = iter(weights)
        return pairs
    except TypeError:
        raise ConfigError(
            f"weights is a {type(weights).__name__}; expected a mapping of names to tensors or an iterable of "
            "(name, tensor)",
            field="weights",
        ) from None


# What a publisher rank sends -----------------------------------------------------------------------------------


class WeightsSpec:
    """The structure of one publisher rank's weights; made once, and checked against each version.

    Attributes:
        structure: encoded and exchanged between ranks that don't know its digest.
        encoded: the structure's bytes.
        digest: of these bytes; equal for ranks whose weights have the same structure.
        ties: for each further name of a tensor's memory in this rank: the first name.
    """

    __slots__ = ("_looks", "_order", "digest", "encoded", "rank", "structure", "ties")

    def __init__(self, tensors: Weights, *, rank: int, group_ranks: Sequence[int]) -> None:
        """rank: this one's index among the publishers; group_ranks: their global ranks, in that order.

        Raises:
            ConfigError: a tensor can't be sent, or its placement isn't known; names it.
            StateMismatch: a DTensor doesn't hold what its placement says.
        """
        entries = entries_of(tensors)
        for entry in entries:
            check_tensor(entry.name.partition(SOURCE_MARK)[0], entry.tensor)
        collected = Collected(entries, (), unchanged=False, fingerprint=0, group_ranks=tuple(group_ranks), rank=rank)
        self.rank = rank
        self.structure: Structure = structure_of(collected, {})
        self.encoded = encode_structure(self.structure)
        self.digest = digest_of(self.encoded)
        self.ties = _ties(tensors)
        self._looks = {name: look_of(tensor) for name, tensor in tensors.items()}
        self._order = {name: place for place, name in enumerate(tensors)}

    def stands(self, tensors: Weights) -> bool:
        """Return True if names, shapes, dtypes, placements and ties are equal; objects and order may differ."""
        if len(tensors) != len(self._looks):
            return False
        looks = self._looks
        alike = all(looks.get(name) == look_of(tensor) for name, tensor in tensors.items())
        return alike and self.ties == _ties(tensors)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights, in order."""
        return tuple(self._order)

    def place_of(self, name: str) -> int:
        """Return the name's index among the weights."""
        return self._order[name]


def _ties(tensors: Weights) -> dict[str, str]:
    first: dict[object, str] = {}
    pairs = ((name, first.setdefault(memory_key(tensor), name)) for name, tensor in tensors.items())
    return {name: other for name, other in pairs if name != other}


def memory_key(tensor: Sendable) -> object:
    """Return what is equal for two that are the same elements in memory, sent alike."""
    return tensor.memory if isinstance(tensor, TensorParts) else memory_of(tensor)


def look_of(tensor: Sendable) -> tuple[Any, ...]:
    """Return all that its place among the weights depends on, but for its name."""
    if isinstance(tensor, TensorParts):
        return tensor.look
    try:
        return describe(tensor) if tensor.layout is torch.strided else (object(),)
    except RuntimeError:  # a nested tensor has no shape
        return (object(),)  # like no other, so that it is looked at, and refused by its name


def entries_of(weights: Weights, above: tuple[str, ...] = (), *, lazy: bool = False) -> tuple[TensorEntry, ...]:
    """Return an entry for each tensor, or each part of one, under the key ``above``."""
    found: list[TensorEntry] = []
    for key, value in weights.items():
        path = (*above, key)
        name = joined(path)
        if not isinstance(value, TensorParts):
            found.append(TensorEntry(name, path, value, lazy=lazy))
            continue
        for number, (tensor, place) in enumerate(value.parts):
            stored_as = None if tensor.dtype == value.dtype else dtype_name(value.dtype, name)
            found.append(
                TensorEntry(source_name(name, number), path, tensor, lazy=lazy, place=place, stored_as=stored_as)
            )
    return tuple(found)


class Outgoing:
    """The pieces that this publisher rank sends, in the order of its weights, and their memory."""

    __slots__ = ("_at", "table")

    def __init__(self, look: WeightsSpec, structures: Mapping[str, Structure], digests: Sequence[str]) -> None:
        """structures: of all publisher ranks, by digest; digests: each rank's.

        Raises:
            StateMismatch: ranks disagree on a tensor, or their pieces overlap or leave a gap; names it and the ranks.
            ConfigError: a part of a tensor is held only by ranks that don't publish.
        """
        placed = sorted(
            plan_rank(structures, digests, look.rank).tensors,
            key=lambda item: (look.place_of(item.name), item.offsets),
        )
        self.table = tuple(
            Piece(item.name, item.dtype, item.shape, item.offsets, item.sizes, look.ties.get(item.name, ""))
            for item in placed
        )
        self._at = [(int(item.source.partition(SOURCE_MARK)[2] or 0), item.local_offsets) for item in placed]

    def locals(self, tensors: Weights) -> list[Local]:
        """Return the current memory of each piece: views, in the order of `table`.

        Raises `StateMismatch` if a tensor holds something else than its placement says.
        """
        found = []
        for piece, (number, at) in zip(self.table, self._at, strict=True):
            tensor, dtype = tensors[piece.name], None
            if isinstance(tensor, TensorParts):
                tensor, dtype = tensor.parts[number][0], tensor.dtype
            local = local_tensor(tensor)
            if tuple(local.shape) != piece.sizes:
                if local.numel() or piece.box.volume:
                    ends = [start + size for start, size in zip(at, piece.sizes, strict=True)]
                    if local.dim() != len(ends) or any(map(int.__gt__, ends, local.shape)):
                        raise StateMismatch(
                            f"{piece.name}: this rank holds {list(local.shape)} of it, where its placement says that "
                            f"{list(piece.sizes)} lie at {list(at)}; create the DTensor with distribute_tensor",
                            mismatched=(piece.name,),
                        )
                    local = part_of(local, Box(at, piece.sizes))
                else:  # FSDP2 gives empty shards other sizes
                    local = local.new_empty(piece.sizes)
            found.append(Local(piece.box, local, dtype))
        return found


def global_rank() -> int:
    """Return the global rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# Memory of a receiver ------------------------------------------------------------------------------------------


def check_writable(name: str, local: torch.Tensor) -> None:
    """Raise `ConfigError` if nothing can be received into ``local``."""
    if shares_memory(local):
        raise ConfigError(
            f"{name}: elements of this tensor share memory (it was expanded or unfolded), so "
            "nothing can be received into it; pass a contiguous tensor",
            field=name,
        )


def check_apart(wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConfigError` if two of these tensors, none tied to another, share memory: one's values would be lost.

    Tensors with gaps are not looked at: rows that alternate share nothing.
    """
    spans: list[tuple[str, int, int, str]] = []
    for name, local in wanted.items():
        if compat.is_plain(local) and not local.is_meta and local.is_contiguous() and local.numel():
            spans.append((str(local.device), local.data_ptr(), local.data_ptr() + local.nbytes, name))
    spans.sort()
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(spans):
        if device == other_device and begin < end:
            raise ConfigError(
                f"{other}: shares memory with `{name}` without being the same tensor, so values of one of them "
                "would be lost; pass tensors of their own, or the same one twice (tied weights)",
                field=other,
            )


def places_of(
    tensors: Mapping[str, torch.Tensor], at: Mapping[str, WholePlace | None] | None = None, *, rank: int = 0
) -> tuple[list[Wanted], dict[str, list[Local]]]:
    """Return the boxes that a receiver's tensors have memory for, and that memory by name.

    A DTensor has memory for the boxes that the global rank ``rank`` holds, a plain tensor for all of it, or for its
    place in the whole, which ``at`` has by name. For no elements, an empty box is wanted, so that the name is known to
    be there.

    Raises:
        ConfigError: a tensor can't be received into, or its elements share memory; names it.
        StateMismatch: a DTensor doesn't hold what its placement says.
    """
    layouts = LayoutTable()
    wanted: list[Wanted] = []
    places: dict[str, list[Local]] = {}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        place = None if at is None else at.get(name)
        shape, dtype = tuple(tensor.shape) if place is None else place.shape, known_dtype(tensor, name)
        found = [Local(box, view) for box, view in layouts.views_of(tensor, name, rank, place)]
        for local in found:
            check_writable(name, local.source)
        places[name] = found
        boxes = [local.box for local in found] or [Box((0,) * len(shape), (0,) * len(shape))]
        wanted += [Wanted(name, dtype, shape, box) for box in boxes]
    return wanted, places


def destinations_of(table: Sequence[Piece], places: Mapping[str, Sequence[Local]]) -> list[Sequence[Local]]:
    """Return for each piece of ``table`` the memory that its parts go to, for `unpack`."""
    return [places.get(piece.name, ()) for piece in table]


# Where a bucket's entries are in the tensors' own memory -------------------------------------------------------


def source_of(entry: BucketEntry, pieces: Sequence[Local]) -> torch.Tensor:
    """Return the part of a publisher rank's tensors for an entry, as it is sent: a copy if it is converted."""
    source, dtype = _part(entry, pieces)
    return source.to(dtype)


def lying_source(entry: BucketEntry, pieces: Sequence[Local]) -> torch.Tensor | None:
    """Return `source_of`; None if it is converted, so that no memory holds it yet."""
    source, dtype = _part(entry, pieces)
    return source if source.dtype == dtype else None


def _part(entry: BucketEntry, pieces: Sequence[Local]) -> tuple[torch.Tensor, torch.dtype]:
    local = pieces[entry.piece]
    box, source = local.box, local.source
    return source if entry.sizes == box.sizes else part_of(source, entry.box, box), local.dtype


def target_of(entry: BucketEntry, destinations: Sequence[Sequence[Local]]) -> torch.Tensor | None:
    """Return the memory of a whole entry, if it goes to one place."""
    found: torch.Tensor | None = None
    for box, tensor in destinations[entry.piece]:
        shared = intersect(box, entry.box)
        if shared is None:
            continue
        if found is not None or shared != entry.box:
            return None
        found = tensor if shared == box else part_of(tensor, shared, box)
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a host tensor, if they are contiguous row by row: both ends decide this alike."""
    return compat.as_bytes(tensor) if lies_as_it_is(tensor) else None


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of `bytes_of`."""
    return tensor.data_ptr() if lies_as_it_is(tensor) else None


def note_write(tensor: torch.Tensor) -> None:
    """Increment the version of ``tensor``, whose memory is written to without torch."""
    if not tensor.is_inference():
        increment_version(tensor)


# Copies --------------------------------------------------------------------------------------------------------


def pack(bucket: BucketPlan, pieces: Sequence[Local], memory: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the entries of ``bucket`` into ``memory``, bytes on any device; leave the bytes between them unchanged.

    pieces: the memory of each piece of the table.
    """
    into, copies = _memory_of(bucket, memory), CopyList()
    for entry in bucket.entries:
        if entry.nbytes:
            source, dtype = _part(entry, pieces)
            copies.add(into.block(entry.at, entry.sizes, dtype), source)
    copies.make(non_blocking=non_blocking)


def unpack(
    bucket: BucketPlan, memory: torch.Tensor, destinations: Sequence[Sequence[Local]], *, non_blocking: bool = False
) -> None:
    """Copy the entries of ``bucket`` from ``memory`` into all places that take a part of them.

    destinations: for each piece of the publisher rank's table the memory of its tensor; may be empty.
    """
    out_of, copies = _memory_of(bucket, memory), CopyList()
    for entry in bucket.entries:
        if not entry.nbytes:
            continue
        for box, tensor in destinations[entry.piece]:
            shared = intersect(box, entry.box)
            if shared is None:
                continue
            target = tensor if shared == box else part_of(tensor, shared, box)
            source = out_of.block(entry.at, entry.sizes, target.dtype)
            copies.add(target, source if shared.sizes == entry.sizes else part_of(source, shared, entry.box))
    copies.make(non_blocking=non_blocking)


def _memory_of(bucket: BucketPlan, memory: torch.Tensor) -> ByteMemory:
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise AssertionError(f"a bucket's memory is {memory.dtype} {tuple(memory.shape)}, expected plain bytes")
    if memory.numel() < bucket.nbytes:
        raise AssertionError(f"a bucket of {bucket.nbytes} bytes in a memory of {memory.numel()}")
    return ByteMemory(memory)


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    check: Callable[[], None] | None = None,
) -> None:
    """Copy each source, bit for bit, into the target of equal shape and dtype.

    In host memory several threads copy if torch itself has only one, as set by torchrun; on a device it is enqueued.
    check: called after each part; what it raises ends the copying.
    """
    jobs: list[CopyList] = []
    room = 0
    for target, source in zip(targets, sources, strict=True):
        rows = row_ranges(target, _JOB_BYTES)
        for into, out_of in [(target.narrow(0, *cut), source.narrow(0, *cut)) for cut in rows] or [(target, source)]:
            if not jobs or room < into.nbytes:
                jobs.append(CopyList())
                room = _JOB_BYTES
            jobs[-1].add(into, out_of)
            room -= into.nbytes
    alone = torch.get_num_threads() > 1 or any(tensor.device.type != "cpu" for tensor in (*targets, *sources))

    def copy(job: CopyList) -> None:
        job.make()
        if check is not None:
            check()

    take_turns([partial(copy, job) for job in jobs], 1 if alone else copy_threads())


def copy_threads() -> int:
    """Return how many threads copy host memory at a time."""
    return min(_COPY_THREADS, len(os.sched_getaffinity(0)))
