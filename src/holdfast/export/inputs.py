"""Provide the input of an export on one rank: a capture of the training state, the state itself, or a checkpoint.

Guarantees: the boxes of all ranks together cover every tensor; all ranks that ask for them find the same. Nothing large
is copied except pieces in transit (`OnDemand`).
Does not: plan the export (``export.build``) or copy (``export.transfer``).
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, overload

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, row_blocks
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import SaveFailed, StateChangedWhileStaging
from holdfast.export.rank_plan import ELEMENT_ALIGN_BYTES, BufferRegion, SourceBox, SourceTensor, sources_of
from holdfast.format.structure import digest_of, encode_structure, is_per_rank
from holdfast.loader.checkpoint import source_of
from holdfast.loader.read import read_boxes
from holdfast.plan.placement import World
from holdfast.saver.agreement import Agreement, PlanProposal
from holdfast.saver.delivery import verify_staging
from holdfast.staging.change_detection import WatchedTensors
from holdfast.staging.copier import lies_as_it_is
from holdfast.staging.image import tensor_over
from holdfast.state.structure import part_of, structure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from holdfast.coordination.group import Group
    from holdfast.format.structure import Structure
    from holdfast.loader.checkpoint import Checkpoint
    from holdfast.plan.write import PlacedTensor
    from holdfast.saver.agreement import PlanDecision
    from holdfast.saver.capture import Capture, DeliveryPlan
    from holdfast.state.tree import StateTree


# Source memory that is filled on demand, a piece at a time, in `ROOMS` buffers that are allocated once: many small
# allocations would fragment the heap. A piece stays valid until another is requested: see `OnDemand.is_here`.

PIECE_BYTES: Final = 4 << 20
ROOMS: Final = 3


class OnDemand(Sequence[torch.Tensor]):
    """The memories ``wanted``, each had when it is asked for, and again if it was dropped meanwhile.

    find: its bytes, where they lie ready; else None. make: puts them into the room it is given, of `PIECE_BYTES`, and
    returns that part of it.
    """

    def __init__(
        self,
        wanted: Sequence[BufferRegion],
        *,
        find: Callable[[BufferRegion], torch.Tensor | None] = lambda _: None,
        make: Callable[[BufferRegion, torch.Tensor], torch.Tensor],
    ) -> None:
        self._wanted = wanted
        self._find, self._make = find, make
        self._found: dict[int, torch.Tensor] = {}
        self._made: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        """Part and room, the one that was used last at the end."""

    def is_here(self, number: int) -> bool:
        """Return True if the piece can be provided without overwriting another."""
        return number in self._made or number in self._found or self._lies_ready(number)

    def __len__(self) -> int:
        return len(self._wanted)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            raise TypeError("memories are made one by one")
        if index in self._made:
            self._made.move_to_end(index)
            return self._made[index][0]
        if index in self._found or self._lies_ready(index):
            return self._found[index]
        if len(self._made) < ROOMS:
            room = tensor_over(mmap.mmap(-1, PIECE_BYTES))
        else:
            _, (_, room) = self._made.popitem(last=False)
        part = self._make(self._wanted[index], room)
        self._made[index] = part, room
        return part

    def _lies_ready(self, number: int) -> bool:
        found = self._find(self._wanted[number])
        if found is not None:
            self._found[number] = found
        return found is not None


def pieces_of(box: Box, itemsize: int) -> Iterator[Box]:
    """``box`` cut into pieces of at most `PIECE_BYTES`, each of them one run of it."""
    return row_blocks(box, PIECE_BYTES // itemsize)


_SMALL_BYTES: Final = 64 << 10
_SMALL_BYTES_KEPT: Final = 8 << 20


class Inventory(Protocol):
    """Ownership of the state's boxes, and the location of this rank's part; constant while the structure stays the
    same.
    """

    @property
    def world(self) -> int: ...
    def sources(self, wants: Callable[[str], bool]) -> dict[str, SourceTensor]: ...
    def is_alike(self, wants: Callable[[str], bool]) -> bool:
        """Return True if all ranks have tensors of the same names, or parts of them; stages of a pipeline differ."""
        ...

    def places(self) -> Mapping[tuple[str, Box], BufferRegion]:
        """Location on this rank of boxes of ``sources`` within larger buffers; each other box has its own buffer."""
        ...

    def signature(self) -> str:
        """Return a digest of all that the others here depend on, equal for another state of the same structure.

        "" where plans aren't kept beyond this one.
        """
        ...


class ExportInput(Protocol):
    """One moment of a state."""

    def stock(self) -> Inventory:
        """Raises why there is nothing to export."""

    def memories(self, wanted: Sequence[BufferRegion]) -> Sequence[torch.Tensor]:
        """The bytes of boxes that this rank holds, each a one-dimensional uint8 tensor."""

    def verify(self) -> None:
        """Raise if what was given was not of one moment."""


class _Captured:
    """Inventory from the plan of a save, in which each box of the state is on the rank that writes it."""

    def __init__(self, plan: DeliveryPlan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self.placed: dict[tuple[str, Box], PlacedTensor] = {}

    @property
    def world(self) -> int:
        return len(self.plan.digests)

    def sources(self, wants: Callable[[str], bool]) -> dict[str, SourceTensor]:
        found: dict[str, tuple[PlacedTensor, list[SourceBox]]] = {}
        for rank_plan in self.plan.ranks():
            for placed in rank_plan.tensors:
                if wants(placed.name):
                    box = Box(placed.offsets, placed.sizes)
                    found.setdefault(placed.name, (placed, []))[1].append(SourceBox(box, (rank_plan.rank,)))
                    if rank_plan.rank == self._rank:
                        self.placed[placed.name, box] = placed
        return {
            name: SourceTensor(name, placed.shape, placed.dtype, tuple(pieces))
            for name, (placed, pieces) in found.items()
        }

    def is_alike(self, wants: Callable[[str], bool]) -> bool:
        return _have_same_names([self.plan.structures[digest] for digest in set(self.plan.digests)], wants)

    def places(self) -> Mapping[tuple[str, Box], BufferRegion]:
        return {}

    def signature(self) -> str:
        return ""


class LastStock:
    """Cache of the inventory of captures: successive captures have the same plan and are asked at each export."""

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

    def memories(self, wanted: Sequence[BufferRegion]) -> list[torch.Tensor]:
        held = self.stock().placed
        return [self._capture.bytes_of(held[memory.source, memory.box]) for memory in wanted]

    def verify(self) -> None:
        verify_staging(self._capture)


class LiveState:
    """The state itself, which stands still: whoever trains it waits for the export.

    Tensors in host memory are read where they lie, others piece by piece. `stock` asks the other ranks what they hold;
    every rank calls it.
    """

    def __init__(self, tree: StateTree, group: Group, agreement: Agreement, *, target: str, timeout_s: float) -> None:
        """Collect the state on the training thread. Raises `ConfigError`, `StateMismatch` for what can't be
        exported.
        """
        collected = tree.collect()
        self._tensors = {entry.name: entry.tensor for entry in collected.tensors}
        self._encoded = encode_structure(structure_of(msgspec.structs.replace(collected, objects=()), {}))
        self._marks = WatchedTensors(self._tensors).mark()
        for device in {tensor.device for tensor in self._tensors.values() if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()  # other streams read from it
        self._rank, self.world = group.rank, group.world
        self._agreement, self._target, self._timeout_s = agreement, target, timeout_s
        self._verdict: PlanDecision | None = None

    def stock(self) -> LiveState:
        if self._verdict is None:
            ballot = PlanProposal(None, self._target, digest_of(self._encoded))
            self._agreement.cast(ballot, self._encoded)
            verdict = self._agreement.wait_verdict(timeout_s=self._timeout_s)
            if verdict.refusal is not None:
                raise verdict.refusal.cause()
            if verdict.kind != "replan":
                raise SaveFailed(f"the ranks agreed on {verdict.kind!r} for a first plan", step=None, rank=self._rank)
            self._verdict = verdict
        return self

    def signature(self) -> str:
        assert self._verdict is not None
        locals_ = ((name, compat.local_tensor(tensor)) for name, tensor in self._tensors.items())
        mine = [(name, tuple(local.shape), _lies_ready(local)) for name, local in locals_]
        return digest_of(msgspec.msgpack.encode((self._verdict.rank_digests(), mine)))

    @cached_property
    def _structures(self) -> Mapping[str, Structure]:
        """All ranks', by digest; asked for only where nothing is planned yet."""
        assert self._verdict is not None
        return self._agreement.wait_structures(self._verdict, own=self._encoded, timeout_s=self._timeout_s)

    @cached_property
    def _world(self) -> World:
        assert self._verdict is not None
        return World(self._structures, self._verdict.rank_digests())

    @cached_property
    def _local(self) -> Mapping[tuple[str, Box], tuple[int, ...]]:
        """Offsets of this rank's boxes in its local tensors."""
        found = {}
        held_by_rank = self._world.held_by(self._rank)
        for spec in self._world.structure_of(self._rank).tensors:
            for held in held_by_rank(spec) if not is_per_rank(spec.path) else ():
                for box in pieces_of(held.box, ITEMSIZE[spec.dtype]):
                    rows = zip(held.local_offsets, box.offsets, held.box.offsets, strict=True)
                    found[spec.name, box] = tuple(at + start - first for at, start, first in rows)
        return found

    def sources(self, wants: Callable[[str], bool]) -> dict[str, SourceTensor]:
        return {
            name: SourceTensor(
                name,
                source.shape,
                source.dtype,
                tuple(
                    SourceBox(box, piece.ranks)
                    for piece in source.pieces
                    for box in pieces_of(piece.box, ITEMSIZE[source.dtype])
                ),
            )
            for name, source in sources_of(self._world, self.world).items()
            if wants(name)
        }

    def is_alike(self, wants: Callable[[str], bool]) -> bool:
        return _have_same_names(self._structures.values(), wants)

    def places(self) -> Mapping[tuple[str, Box], BufferRegion]:
        found = {}
        for (name, box), offsets in self._local.items():
            local = compat.local_tensor(self._tensors[name])
            if box.volume and _lies_ready(local):
                found[name, box] = BufferRegion(name, box, offsets, tuple(local.shape))
        return found

    def memories(self, wanted: Sequence[BufferRegion]) -> OnDemand:
        ready: dict[str, bool] = {}

        def local_of(memory: BufferRegion) -> torch.Tensor:
            return compat.local_tensor(self._tensors[memory.source]).detach()

        def find(memory: BufferRegion) -> torch.Tensor | None:
            local = local_of(memory)
            if memory.source not in ready:
                ready[memory.source] = _lies_ready(local)
            return compat.as_bytes(local) if ready[memory.source] and memory.box.volume else None

        def bring(memory: BufferRegion, room: torch.Tensor) -> torch.Tensor:
            part = part_of(local_of(memory), Box(self._local[memory[:2]], memory.box.sizes))
            there = room[: part.nbytes]
            compat.copy_(there.view(part.dtype).view(part.shape), part)
            return there

        return OnDemand(wanted, find=find, make=bring)

    def verify(self) -> None:
        changed = self._marks.changed()
        if changed is not None:
            raise StateChangedWhileStaging(
                f"rank {self._rank}: {changed} was changed during the export; don't change the state "
                "until `export_hf` has returned. Nothing was published",
                tensor=changed,
                step=None,
            )


def _lies_ready(local: torch.Tensor) -> bool:
    """Return True if copies can read the tensor's memory as it is."""
    return (
        lies_as_it_is(local)
        and local.data_ptr() % ELEMENT_ALIGN_BYTES == 0
        and local.storage_offset() * local.element_size() % ELEMENT_ALIGN_BYTES == 0
    )


class StoredState:
    """A published checkpoint: its boxes are shared out among the ranks, and read when they are needed.

    names: those of its tensors that there are, each by the name that it has here.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], rank: int, world: int) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._tensors = {name: checkpoint.tensors[stored] for name, stored in names.items()}
        self._rank = rank
        self.world = world

    def stock(self) -> StoredState:
        return self

    def signature(self) -> str:
        rows = [
            (name, self._names[name], info.shape, compat.dtype_name(info.dtype), info.shards)
            for name, info in self._tensors.items()
        ]
        return digest_of(msgspec.msgpack.encode((self._rank, self.world, rows)))

    def sources(self, wants: Callable[[str], bool]) -> dict[str, SourceTensor]:
        """The largest boxes first, each to the rank with the fewest bytes so far; in pieces, to be read one by one."""
        tensors = {name: info for name, info in self._tensors.items() if wants(name)}
        boxes = [(name, box) for name, info in tensors.items() for box in _apart(info.shards)]
        boxes.sort(key=lambda row: (-row[1].volume * tensors[row[0]].dtype.itemsize, row))
        held = [0] * self.world
        pieces: dict[str, list[SourceBox]] = {name: [] for name in tensors}
        for name, box in boxes:
            rank = min(range(self.world), key=lambda number: (held[number], number))
            itemsize = tensors[name].dtype.itemsize
            held[rank] += box.volume * itemsize
            pieces[name] += [SourceBox(part, (rank,)) for part in pieces_of(box, itemsize)]
        return {
            name: SourceTensor(name, info.shape, compat.dtype_name(info.dtype), tuple(pieces[name]))
            for name, info in tensors.items()
        }

    def is_alike(self, wants: Callable[[str], bool]) -> bool:
        del wants
        return True  # any rank may read any of them

    def places(self) -> Mapping[tuple[str, Box], BufferRegion]:
        return {}

    def memories(self, wanted: Sequence[BufferRegion]) -> OnDemand:
        source, tensors = source_of(self._checkpoint), self._tensors
        few = self._small_ones(wanted)

        def read(memory: BufferRegion, room: torch.Tensor) -> torch.Tensor:
            box, dtype = memory.box, tensors[memory.source].dtype
            part = room[: box.volume * dtype.itemsize]
            read_boxes(source, [(self._names[memory.source], box)], into=[part.view(dtype).view(box.sizes)])
            return part

        return OnDemand(wanted, find=lambda memory: few.get(memory[:2]), make=read)

    def _small_ones(self, wanted: Sequence[BufferRegion]) -> dict[tuple[str, Box], torch.Tensor]:
        """Read as many small boxes as may be kept in one go: opening files one by one takes most of the time."""
        chosen, left = [], _SMALL_BYTES_KEPT
        for source, box, *_ in wanted:
            nbytes = box.volume * self._tensors[source].dtype.itemsize
            if nbytes <= min(left, _SMALL_BYTES):
                chosen.append((source, box))
                left -= nbytes
        read = read_boxes(source_of(self._checkpoint), [(self._names[name], box) for name, box in chosen])
        return {key: compat.as_bytes(tensor) for key, tensor in zip(chosen, read, strict=True)}

    def verify(self) -> None:
        """Every byte was matched with its checksum as it was read."""


def _have_same_names(structures: Iterable[Structure], wants: Callable[[str], bool]) -> bool:
    return len({frozenset(spec.name for spec in item.tensors if wants(spec.name)) for item in structures}) < 2


def _apart(boxes: Iterable[Box]) -> list[Box]:
    """Each once: a box may be stored twice."""
    return list(dict.fromkeys(boxes))
