"""What an export is made from, on one rank: a capture of the training state, that state itself, or a checkpoint.

Guarantees: the boxes of all ranks together are the whole of every tensor; all ranks that ask for them find the same.
Nothing of size is copied for it but pieces on their way (``export.on_demand``).
Does not: decide what becomes of them (``export.recipe``) or copy (``export.fill``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.agreement import Agreement, Ballot
from holdfast.boxes import Box
from holdfast.checkpoint import source_of
from holdfast.delivery import verify_staging
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import SaveFailed, StateChangedWhileStaging
from holdfast.export.on_demand import OnDemand, pieces_of
from holdfast.export.sources import Memory, Piece, Source, sources_of
from holdfast.plan.shares import World
from holdfast.plan.structure import digest_of, encode_structure, is_per_rank
from holdfast.plan.write import plan_save
from holdfast.reading import read_boxes
from holdfast.staging.tripwire import WatchList
from holdfast.state.structure import structure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.capture import Capture, DeliveryPlan
    from holdfast.checkpoint import Checkpoint
    from holdfast.group import Group
    from holdfast.plan.write import PlacedTensor
    from holdfast.state.tree import StateTree

_ALIGN_BYTES: Final = 16
"""What copies ask of a memory."""
_SMALL_BYTES: Final = 64 << 10
_SMALL_BYTES_KEPT: Final = 8 << 20


class Stock(Protocol):
    """Who holds what of the state, and where this rank has its part: the same as long as the structure stands."""

    @property
    def world(self) -> int: ...
    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]: ...
    def places(self) -> Mapping[tuple[str, Box], Memory]:
        """Where this rank has boxes of ``sources`` that lie in larger memories; others are each in one of its own."""
        ...


class Material(Protocol):
    """One moment of a state."""

    def stock(self) -> Stock:
        """Raises why there is nothing to export."""

    def memories(self, wanted: Sequence[Memory]) -> Sequence[torch.Tensor]:
        """The bytes of boxes that this rank holds, each a one-dimensional uint8 tensor."""

    def verify(self) -> None:
        """Raise if what was given was not of one moment."""


class _Captured:
    """By the plan of a save, which has each box of the state on the rank that writes it."""

    def __init__(self, plan: DeliveryPlan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self.placed: dict[tuple[str, Box], PlacedTensor] = {}

    @property
    def world(self) -> int:
        return len(self.plan.digests)

    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]:
        found: dict[str, tuple[PlacedTensor, list[Piece]]] = {}
        for rank_plan in plan_save(self.plan.structures, self.plan.digests).ranks:
            for placed in rank_plan.tensors:
                if wants(placed.name):
                    box = Box(placed.offsets, placed.sizes)
                    found.setdefault(placed.name, (placed, []))[1].append(Piece(box, (rank_plan.rank,)))
                    if rank_plan.rank == self._rank:
                        self.placed[placed.name, box] = placed
        return {
            name: Source(name, placed.shape, placed.dtype, tuple(pieces)) for name, (placed, pieces) in found.items()
        }

    def places(self) -> Mapping[tuple[str, Box], Memory]:
        return {}


class LastStock:
    """What captures hold: one after the other they have the same plan, and are asked for it at each export."""

    def __init__(self) -> None:
        self._last: _Captured | None = None

    def of(self, plan: DeliveryPlan, rank: int) -> _Captured:
        if self._last is None or self._last.plan is not plan:
            self._last = _Captured(plan, rank)
        return self._last


class CapturedState:
    """A capture, which others use at the same time."""

    def __init__(self, capture: Capture, stock: LastStock) -> None:
        self._capture = capture
        self._stock = stock

    def stock(self) -> _Captured:
        if self._capture.error is not None:
            raise self._capture.error
        plan = self._capture.plan
        if plan is None:
            raise AssertionError("a capture without error has a plan")
        return self._stock.of(plan, self._capture.rank)

    def memories(self, wanted: Sequence[Memory]) -> list[torch.Tensor]:
        buffer = self._capture.buffer
        if buffer is None:
            raise self._capture.error or AssertionError("a capture without error has a buffer")
        held = self.stock().placed
        views = []
        for memory in wanted:
            placed = held[memory.source, memory.box]
            start = buffer.file_offsets[placed.file] + placed.payload_offset
            views.append(buffer.image.bytes_view[start : start + placed.nbytes])
        return views

    def verify(self) -> None:
        verify_staging(self._capture)


class LiveState:
    """The state itself, which stands still: whoever trains it waits for the export.

    Tensors in host memory are read where they lie, others piece by piece. `stock` asks the other ranks what they hold;
    every rank calls it.
    """

    def __init__(self, tree: StateTree, group: Group, agreement: Agreement, *, target: str, timeout_s: float) -> None:
        """On the training thread. Raises `ConfigError`, `StateMismatch` for what can't be exported."""
        collected = tree.collect()
        self._tensors = {entry.name: entry.tensor for entry in collected.tensors}
        self._encoded = encode_structure(structure_of(msgspec.structs.replace(collected, objects=()), {}))
        self._marks = WatchList(self._tensors).mark()
        for device in {tensor.device for tensor in self._tensors.values() if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()  # other streams read from it
        self._rank, self.world = group.rank, group.world
        self._agreement, self._target, self._timeout_s = agreement, target, timeout_s
        self._world: World | None = None
        self._local: dict[tuple[str, Box], tuple[int, ...]] = {}
        """Where boxes of this rank begin in its local tensors."""

    def stock(self) -> LiveState:
        if self._world is None:
            ballot = Ballot(None, self._target, digest_of(self._encoded))
            self._agreement.cast(ballot, self._encoded)
            verdict = self._agreement.wait_verdict(timeout_s=self._timeout_s)
            if verdict.refusal is not None:
                raise verdict.refusal.cause()
            if verdict.kind != "replan":
                raise SaveFailed(f"the ranks agreed on {verdict.kind!r} for a first plan", step=None, rank=self._rank)
            structures = self._agreement.wait_structures(verdict, own=self._encoded, timeout_s=self._timeout_s)
            self._world = World(structures, verdict.rank_digests())
        return self

    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]:
        assert self._world is not None
        held_by_rank = self._world.held_by(self._rank)
        for spec in self._world.structure_of(self._rank).tensors:
            for held in held_by_rank(spec) if wants(spec.name) and not is_per_rank(spec.path) else ():
                for box in pieces_of(held.box, ITEMSIZE[spec.dtype]):
                    rows = zip(held.local_offsets, box.offsets, held.box.offsets, strict=True)
                    self._local[spec.name, box] = tuple(at + start - first for at, start, first in rows)
        return {
            name: Source(
                name,
                source.shape,
                source.dtype,
                tuple(
                    Piece(box, piece.ranks)
                    for piece in source.pieces
                    for box in pieces_of(piece.box, ITEMSIZE[source.dtype])
                ),
            )
            for name, source in sources_of(self._world, self.world).items()
            if wants(name)
        }

    def places(self) -> Mapping[tuple[str, Box], Memory]:
        found = {}
        for (name, box), offsets in self._local.items():
            local = compat.local_tensor(self._tensors[name])
            if box.volume and _lies_ready(local):
                found[name, box] = Memory(name, box, offsets, tuple(local.shape))
        return found

    def memories(self, wanted: Sequence[Memory]) -> OnDemand:
        places = self.places()

        def local_of(memory: Memory) -> torch.Tensor:
            return compat.local_tensor(self._tensors[memory.source]).detach()

        def find(memory: Memory) -> torch.Tensor | None:
            return compat.as_bytes(local_of(memory)) if (memory.source, memory.box) in places else None

        def bring(memory: Memory, room: torch.Tensor) -> torch.Tensor:
            part = local_of(memory)
            for dim, (offset, size) in enumerate(zip(self._local[memory[:2]], memory.box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            there = room[: part.nbytes]
            compat.bits(there.view(part.dtype).view(part.shape)).copy_(compat.bits(part))
            return there

        return OnDemand(wanted, find=find, make=bring)

    def verify(self) -> None:
        marks = self._marks
        changed = marks.written() or marks.moved() or marks.differing(marks.by_name())
        if changed is not None:
            raise StateChangedWhileStaging(
                f"rank {self._rank}: {changed} was changed while the state was exported: nothing may change it until "
                "`export_hf` has returned. Nothing was published",
                tensor=changed,
                step=None,
            )


def _lies_ready(local: torch.Tensor) -> bool:
    """Whether copies can read the tensor's memory as it is."""
    return (
        local.device.type == "cpu"
        and local.is_contiguous()
        and not local.is_conj()
        and not local.is_neg()
        and local.data_ptr() % _ALIGN_BYTES == 0
        and local.storage_offset() * local.element_size() % _ALIGN_BYTES == 0
    )


class StoredState:
    """A published checkpoint: its boxes are shared out among the ranks, and read when they are needed."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self.world = world

    def stock(self) -> StoredState:
        return self

    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]:
        """The largest boxes first, each to the rank with the fewest bytes so far; in pieces, to be read one by one."""
        tensors = {name: info for name, info in self._checkpoint.tensors.items() if wants(name)}
        boxes = [(name, box) for name, info in tensors.items() for box in _apart(info.shards)]
        boxes.sort(key=lambda row: (-row[1].volume * tensors[row[0]].dtype.itemsize, row))
        held = [0] * self.world
        pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
        for name, box in boxes:
            rank = min(range(self.world), key=lambda number: (held[number], number))
            itemsize = tensors[name].dtype.itemsize
            held[rank] += box.volume * itemsize
            pieces[name] += [Piece(part, (rank,)) for part in pieces_of(box, itemsize)]
        return {
            name: Source(name, info.shape, compat.dtype_name(info.dtype), tuple(pieces[name]))
            for name, info in tensors.items()
        }

    def places(self) -> Mapping[tuple[str, Box], Memory]:
        return {}

    def memories(self, wanted: Sequence[Memory]) -> OnDemand:
        source, tensors = source_of(self._checkpoint), self._checkpoint.tensors
        few = self._small_ones(wanted)

        def read(memory: Memory, room: torch.Tensor) -> torch.Tensor:
            box, dtype = memory.box, tensors[memory.source].dtype
            part = room[: box.volume * dtype.itemsize]
            read_boxes(source, [(memory.source, box)], into=[part.view(dtype).view(box.sizes)])
            return part

        return OnDemand(wanted, find=lambda memory: few.get(memory[:2]), make=read)

    def _small_ones(self, wanted: Sequence[Memory]) -> dict[tuple[str, Box], torch.Tensor]:
        """Of the small boxes as many as may be kept, read together: one by one, opening files is what takes time."""
        tensors = self._checkpoint.tensors
        chosen, left = [], _SMALL_BYTES_KEPT
        for source, box, *_ in wanted:
            nbytes = box.volume * tensors[source].dtype.itemsize
            if nbytes <= min(left, _SMALL_BYTES):
                chosen.append((source, box))
                left -= nbytes
        read = read_boxes(source_of(self._checkpoint), chosen)
        return {key: compat.as_bytes(tensor) for key, tensor in zip(chosen, read, strict=True)}

    def verify(self) -> None:
        """Every byte was matched with its checksum as it was read."""


def _apart(boxes: Iterable[Box]) -> list[Box]:
    """Each once: a box may be stored twice."""
    return list(dict.fromkeys(boxes))
