"""Which pieces a publisher rank sends of its tensors, where they lie, and the copies into and out of buckets.

What a rank's weights look like is a `Structure`, as for a save; ranks exchange them, and each finds by itself what it
sends. DTensors are cut by their placements. What several ranks hold (replicas, plain tensors of equal name) is sent by
one of them, the bytes shared out among those who have the same; names that only some ranks have are sent by those.

Guarantees: the pieces of all ranks tile every tensor, or `Outgoing` raises. Bits arrive as they are, for every dtype
and for views with any strides; of conjugate and negated views what they show. One call copies a bucket's entries and
gives the interpreter's lock up once. No memory is taken for it but small views, except for conjugate or negated views
of a dtype without a copy kernel (complex32).
Assumes: nobody writes to the tensors meanwhile; the memory of a bucket is contiguous and starts on a multiple of 16
bytes. On an accelerator copies are enqueued on the current stream: to wait for them is the caller's.
Does not: talk to other ranks, checksum, or decide which parts go to whom (``sync.layout``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, intersect, strides, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.export.nest import typed
from holdfast.plan.structure import PER_RANK, digest_of, encode_structure
from holdfast.plan.write import plan_rank
from holdfast.state.entries import (
    Collected,
    TensorEntry,
    check_tensor,
    describe,
    known_dtype,
    local_tensor,
    shares_memory,
    torch_dtype,
)
from holdfast.state.structure import LayoutTable, part_of, structure_of
from holdfast.storage.turns import take_turns
from holdfast.sync.layout import Piece, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.plan.structure import Structure
    from holdfast.sync.layout import BucketPlan

Weights = Mapping[str, torch.Tensor]
"""Tensors by name: DTensors or plain ones."""


_JOB_BYTES: Final = 16 << 20
"""Copied by one thread at a time."""
_COPY_THREADS: Final = 4
"""More don't copy faster."""


class Local(NamedTuple):
    """Memory that holds a box of a tensor: ``tensor`` has the box's sizes."""

    box: Box
    tensor: torch.Tensor


def named_tensors(weights: Any, *, what: str = "weights") -> dict[str, torch.Tensor]:
    """``weights``, a mapping or an iterable of (name, tensor), as a dictionary in the order given.

    what: the argument that it is, for messages.

    Raises:
        ConfigError: it is something else, a name comes twice or can't be used, or a tensor can't be sent; names it.
    """
    items: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else _iterated(weights)
    found: dict[str, torch.Tensor] = {}
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(f"{what} has {type(item).__name__} in it; expected pairs (name, tensor)", field=what)
        name, tensor = item
        if not isinstance(name, str) or not name or name == PER_RANK:
            raise ConfigError(f"{what} has the name {name!r}; expected a string that isn't empty", field=what)
        if not isinstance(tensor, torch.Tensor):
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


class Look:
    """What the weights of one publisher rank look like; made once, and asked with each version whether it stands.

    Attributes:
        structure: to be exchanged between the ranks, encoded, where they don't know its digest.
        encoded: the structure's bytes.
        digest: of them; equal for ranks whose weights look alike.
    """

    __slots__ = ("_looks", "_order", "digest", "encoded", "rank", "structure")

    def __init__(self, tensors: Weights, *, rank: int, group_ranks: Sequence[int]) -> None:
        """rank: this one's place among the publishers; group_ranks: their global ranks, in that order.

        Raises:
            ConfigError: a tensor can't be sent, or its placement isn't known; names it.
            StateMismatch: a DTensor doesn't hold what its placement says.
        """
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        entries = _entries(tensors)
        collected = Collected(entries, (), unchanged=False, fingerprint=0, group_ranks=tuple(group_ranks), rank=rank)
        self.rank = rank
        self.structure: Structure = structure_of(collected, {})
        self.encoded = encode_structure(self.structure)
        self.digest = digest_of(self.encoded)
        self._looks = {name: describe(tensor) for name, tensor in tensors.items()}
        self._order = {entry.name: place for place, entry in enumerate(entries)}

    def stands(self, tensors: Weights) -> bool:
        """Whether names, shapes, dtypes and placements are the same; other tensor objects and another order do."""
        if len(tensors) != len(self._looks):
            return False
        looks = self._looks
        return all(looks.get(name) == describe(tensor) for name, tensor in tensors.items())

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weights, in their order."""
        return tuple(self._order)

    def place_of(self, name: str) -> int:
        """The name's place among the weights."""
        return self._order[name]


def _entries(tensors: Weights) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(name, (name,), tensor, lazy=False) for name, tensor in tensors.items())


class Outgoing:
    """The pieces that this publisher rank sends, in the order of its weights, and where it has them."""

    __slots__ = ("_at", "table")

    def __init__(self, look: Look, structures: Mapping[str, Structure], digests: Sequence[str]) -> None:
        """structures: of all publisher ranks, by digest; digests: each rank's.

        Raises:
            StateMismatch: ranks disagree on a tensor, or their pieces overlap or leave a gap; names it and who has
                what.
            ConfigError: a part of a tensor is held only by ranks that don't publish.
        """
        placed = sorted(
            plan_rank(structures, digests, look.rank).tensors,
            key=lambda item: (look.place_of(item.name), item.offsets),
        )
        self.table = tuple(Piece(item.name, item.dtype, item.shape, item.offsets, item.sizes) for item in placed)
        self._at = [item.local_offsets for item in placed]

    def locals(self, tensors: Weights) -> list[Local]:
        """For each piece the memory that holds it now: views, in the order of `table`.

        Raises `StateMismatch` where a tensor holds something else than its placement says.
        """
        found = []
        for piece, at in zip(self.table, self._at, strict=True):
            local = local_tensor(tensors[piece.name])
            if tuple(local.shape) != piece.sizes:
                if local.numel() or piece.box.volume:
                    ends = [start + size for start, size in zip(at, piece.sizes, strict=True)]
                    if local.dim() != len(ends) or any(map(int.__gt__, ends, local.shape)):
                        raise StateMismatch(
                            f"{piece.name}: this rank holds {list(local.shape)} of it, where its placement says that "
                            f"{list(piece.sizes)} lie at {list(at)}; make the DTensor anew by distribute_tensor",
                            mismatched=(piece.name,),
                        )
                    local = part_of(local, Box(at, piece.sizes))
                else:  # FSDP2 makes empty shards of other sizes
                    local = local.new_empty(piece.sizes)
            found.append(Local(piece.box, local))
        return found


# What a receiver has places for --------------------------------------------------------------------------------


def check_writable(name: str, local: torch.Tensor) -> None:
    """Raise `ConfigError` if nothing can be received into ``local``."""
    if shares_memory(local):
        raise ConfigError(
            f"{name}: elements of this tensor share memory (it was expanded or unfolded), so nothing can be received "
            "into it; give a contiguous one",
            field=name,
        )


def places_of(tensors: Weights, *, rank: int = 0) -> tuple[list[Wanted], dict[str, list[Local]]]:
    """What the tensors of a receiver have places for, and by name the memory that it goes to.

    A DTensor has places for the boxes that the global rank ``rank`` holds of it, a plain tensor for all of it. Where
    there are no elements, what is wanted is an empty box, so that the name is known to be there.

    Raises:
        ConfigError: a tensor can't be received into, or its elements share memory; names it.
        StateMismatch: a DTensor doesn't hold what its placement says.
    """
    layouts = LayoutTable()
    wanted: list[Wanted] = []
    places: dict[str, list[Local]] = {}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        shape, dtype = tuple(tensor.shape), known_dtype(tensor, name)
        found = [Local(box, view) for box, view in layouts.views_of(tensor, name, rank)]
        for _, view in found:
            check_writable(name, view)
        places[name] = found
        boxes = [box for box, _ in found] or [Box((0,) * len(shape), (0,) * len(shape))]
        wanted += [Wanted(name, dtype, shape, box) for box in boxes]
    return wanted, places


def whole_places(pieces: Iterable[Piece], device: torch.device | str = "cpu") -> dict[str, list[Local]]:
    """New memory for the whole of every tensor that ``pieces`` are of."""
    found: dict[str, list[Local]] = {}
    for piece in pieces:
        if piece.name not in found:
            memory = torch.empty(piece.shape, dtype=torch_dtype(piece.dtype), device=device)
            found[piece.name] = [Local(whole(piece.shape), memory)]
    return found


def destinations_of(table: Sequence[Piece], places: Mapping[str, Sequence[Local]]) -> list[Sequence[Local]]:
    """For each piece of ``table`` the memory that parts of it go to, as `unpack` takes it."""
    return [places.get(piece.name, ()) for piece in table]


# Copies --------------------------------------------------------------------------------------------------------


def pack(bucket: BucketPlan, pieces: Sequence[Local], memory: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy the entries of ``bucket`` into ``memory``, bytes on any device; what lies between them stays as it is.

    pieces: for each piece of the table the memory that holds it.
    """
    words = _Words(bucket, memory)
    copies = _Copies(non_blocking=non_blocking)
    for entry in bucket.entries:
        if entry.nbytes:
            box, tensor = pieces[entry.piece]
            source = tensor if entry.sizes == box.sizes else part_of(tensor, entry.box, box)
            copies.add(words.at(entry.at, entry.sizes, source.dtype), source)
    copies.make()


def unpack(
    bucket: BucketPlan, memory: torch.Tensor, destinations: Sequence[Sequence[Local]], *, non_blocking: bool = False
) -> None:
    """Copy the entries of ``bucket`` from ``memory`` into all places that take a part of them.

    destinations: for each piece of the publisher rank's table the memory that its tensor goes to; may be none.
    """
    words = _Words(bucket, memory)
    copies = _Copies(non_blocking=non_blocking)
    for entry in bucket.entries:
        if not entry.nbytes:
            continue
        for box, tensor in destinations[entry.piece]:
            shared = intersect(box, entry.box)
            if shared is None:
                continue
            target = tensor if shared == box else part_of(tensor, shared, box)
            source = words.at(entry.at, entry.sizes, target.dtype)
            copies.add(target, source if shared.sizes == entry.sizes else part_of(source, shared, entry.box))
    copies.make()


class _Copies:
    """Copies of bits, made in one call but for views that show something else than their memory."""

    __slots__ = ("_alone", "_non_blocking", "_sources", "_targets")

    def __init__(self, *, non_blocking: bool) -> None:
        self._non_blocking = non_blocking
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._alone: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        odd = target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg()
        if odd or target.is_inference():
            self._alone.append((target, source))
        else:
            self._targets.append(compat.bits(target))
            self._sources.append(compat.bits(source))

    def make(self) -> None:
        with torch.no_grad():
            if self._targets:
                compat.foreach_copy_(self._targets, self._sources, non_blocking=self._non_blocking)
        for target, source in self._alone:
            # Tensors made in inference mode can't be written to outside of it.
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                compat.copy_(target, source)


class _Words:
    """A bucket's memory as elements."""

    __slots__ = ("_memory", "_typed")

    def __init__(self, bucket: BucketPlan, memory: torch.Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise AssertionError(f"a bucket's memory is {memory.dtype} {tuple(memory.shape)}, expected plain bytes")
        if memory.numel() < bucket.nbytes:
            raise AssertionError(f"a bucket of {bucket.nbytes} bytes in a memory of {memory.numel()}")
        self._memory = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def at(self, offset: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        words = self._typed.get(dtype)
        if words is None:
            words = self._typed[dtype] = typed(self._memory, dtype)
        return words.as_strided(sizes, strides(sizes), words.storage_offset() + offset // dtype.itemsize)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source, bit for bit, into the target of equal shape and dtype.

    In host memory by several threads where torch itself has but one, as torchrun sets it; on a device it is enqueued.
    """
    jobs: list[_Copies] = []
    room = 0
    for whole_target, whole_source in zip(targets, sources, strict=True):
        for target, source in _in_rows(whole_target, whole_source):
            if not jobs or room < target.nbytes:
                jobs.append(_Copies(non_blocking=False))
                room = _JOB_BYTES
            jobs[-1].add(target, source)
            room -= target.nbytes
    alone = torch.get_num_threads() > 1 or any(tensor.device.type != "cpu" for tensor in (*targets, *sources))
    take_turns([copies.make for copies in jobs], 1 if alone else min(_COPY_THREADS, len(os.sched_getaffinity(0))))


def _in_rows(target: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Both, cut into rows of the first dimension where they are more than one job."""
    rows = target.shape[0] if target.dim() else 0
    if target.nbytes <= _JOB_BYTES or rows < 2:
        return [(target, source)]
    at_once = max(1, _JOB_BYTES * rows // target.nbytes)
    cuts = [(start, min(at_once, rows - start)) for start in range(0, rows, at_once)]
    return [(target.narrow(0, *cut), source.narrow(0, *cut)) for cut in cuts]
