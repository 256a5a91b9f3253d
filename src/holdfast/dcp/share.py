"""Write what DCP's plan assigns to one rank: lay it out, and stream it through a ring of slots to the engine.

The engine of the process writes, hashes and reports, as for `holdfast.save`; see ``staging.stream`` and
``engine.ring``. Nothing is kept of a state but the slots. For a caller that trains meanwhile, and for an object store,
which takes whole objects only, `StagedShare` copies all of it first.

Guarantees: objects that couldn't be loaded back are refused before a byte is written; the report is the last thing
written, and says that all of it is durable. On any error there is no report, or it can't be said (then the engine is
retired). Each tensor is asked of the planner once, when those before it in the plan were copied: it may hand out one
buffer for all. Only what stock's planner looks up in the state dict, and is nobody's buffer, waits for others to be
copied with it.
Does not: bound how long a save takes, but how long the storage may take for the next slot, or make no progress.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import Box
from holdfast.dcp.planners import is_live, looked_up, stored_path
from holdfast.dtypes import ITEMSIZE
from holdfast.engine.client import EngineClient
from holdfast.engine.ring import pieces_of
from holdfast.engine.shared import process_engine
from holdfast.errors import CheckpointCorrupt, ConfigError, DeadlineExceeded, HoldfastError
from holdfast.format import torch_record
from holdfast.format.manifest import PAGE_BYTES, ManifestReport, report_name
from holdfast.format.objects import ALLOWED_OBJECTS, load_object
from holdfast.format.structure import ObjectSpec, TensorSpec
from holdfast.plan.write import RankPlan, lay_out
from holdfast.saver.checkpointer import rows_of, write_plan
from holdfast.saver.delivery import ENGINE_GRACE_S
from holdfast.saver.process_session import process_session
from holdfast.staging.image import Image
from holdfast.staging.stream import SLOT_BYTES, PieceRenderer
from holdfast.state.entries import check_tensor, local_tensor
from holdfast.state.gc_pause import gc_paused_on_main_thread
from holdfast.storage.leases import lease_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.cores import Cores
    from holdfast.plan.write import PlacedObject, PlacedTensor
    from holdfast.storage.protocol import WriterTarget

_log = logging.getLogger("holdfast.dcp")
FILE_BYTES_MIN: Final = 256 << 20
FILES_MOST: Final = 8
"""A rank that writes more than that many files of `FILE_BYTES_MIN` writes about that many larger ones."""
STALL_S: Final = 1800.0
"""How long the storage may take to free the next slot, and to make all durable once nothing more is written."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A rank's assignment: its attempt, its part in that, and where it writes."""

    attempt: str
    step: int | None
    rank: int
    world: int
    target: int | WriterTarget
    """The descriptor of the attempt's directory, or its writer on an object store."""
    stored_as: Callable[[str], str]
    """Returns the name that a file of the attempt has there."""


def check_items(plan: SavePlan) -> None:
    """Raise `ConfigError`, naming the key, if a tensor of ``plan`` has a dtype that can't be stored."""
    for item in plan.items:
        if item.tensor_data is not None:
            _dtype_of(item)


def write_share(plan: SavePlan, planner: SavePlanner, assignment: Assignment, *, writers: int) -> list[WriteResult]:
    """Write the items of ``plan`` to the place of ``assignment`` and report; returns when everything is durable.

    The last result is the rank's line of the manifest. Raises `ConfigError` for what can't be stored, `StorageError`,
    `EngineDied`, `DeadlineExceeded`, and what the planner raises.
    """
    # Whether the caller waits, or trains meanwhile, isn't known here: as fast as it can.
    if not isinstance(assignment.target, int):
        staged = StagedShare(plan, planner, assignment.rank, image_of=_warm_image)
        try:
            return staged.write(assignment, writers=writers, nice=0)
        finally:
            staged.image.close()
    with gc_paused_on_main_thread():
        share = _Share(plan, planner, assignment.rank)
    engine = EngineClient(assignment.rank, writers=writers, nice=0, host=process_engine())
    try:
        line = _stream(engine, share, assignment)
    finally:
        engine.close(ENGINE_GRACE_S)
    return _results_of(share, line, assignment)


def _warm_image(nbytes: int) -> Image:
    image = Image(nbytes)
    image.warm_up()
    return image


class StagedShare:
    """A rank's share, copied: what the state becomes after it was made doesn't matter.

    image_of: makes the memory for so many bytes, whole pages. Raises `ConfigError` for what can't be stored, and what
    the planner raises.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, rank: int, *, image_of: Callable[[int], Image]) -> None:
        with gc_paused_on_main_thread():
            self._share = _Share(plan, planner, rank)
            pieces = pieces_of(rows_of(self._share.rank_plan), SLOT_BYTES)
            self.image = image_of(max(PAGE_BYTES, self._share.rank_plan.nbytes))
            renderer = PieceRenderer(self._share.rank_plan, self._share)
            for piece in pieces:
                renderer.fill(piece.start, piece.end, self.image.bytes_view[piece.start : piece.end])
            self._share.forget_state()

    def write(
        self, assignment: Assignment, *, writers: int, cores: Cores = "auto", nice: int = 10
    ) -> list[WriteResult]:
        """Have it written to the place of ``assignment`` and reported; as `write_share`, on any thread.

        nice: the engine's while it writes; 10 where training goes on meanwhile.
        """
        engine = EngineClient(assignment.rank, writers=writers, nice=nice, cores=cores, host=process_engine())
        try:
            with _attempted(engine, self._share, assignment, self.image):
                engine.staging_verified(assignment.attempt)
                line = _reported(engine, assignment)
        finally:
            engine.close(ENGINE_GRACE_S)
        return _results_of(self._share, line, assignment)


def _results_of(share: _Share, line: ManifestReport, assignment: Assignment) -> list[WriteResult]:
    events.count("bytes_persisted", line.nbytes)
    with gc_paused_on_main_thread():
        return [*share.results(assignment.stored_as), WriteResult(MetadataIndex(line.name), line.size, line)]


@contextlib.contextmanager
def _attempted(
    engine: EngineClient, share: _Share, assignment: Assignment, image: Image, slot_bytes: int = 0
) -> Iterator[None]:
    """Have the engine begin the attempt, and cancel it if the block fails."""
    attempt, rank = assignment.attempt, assignment.rank
    try:
        engine.persist(
            assignment.target,
            attempt=attempt,
            plan=engine.add_plan(**write_plan(share.rank_plan)),
            image=engine.add_image(image.fd, image.nbytes),
            step=assignment.step,
            world=assignment.world,
            report_name=report_name(rank),
            lease_name=lease_name(rank),
            slot_bytes=slot_bytes,
        )
        yield
    except BaseException:
        try:
            engine.cancel(attempt, timeout_s=ENGINE_GRACE_S)
        except HoldfastError as late:
            _log.warning("attempt %s: %s", attempt, late)
        raise


def _reported(engine: EngineClient, assignment: Assignment) -> ManifestReport:
    """Wait for the report, as long as bytes are being written; return the rank's line of the manifest."""
    rank, written = assignment.rank, -1
    while True:
        try:
            found = engine.wait_reported(assignment.attempt, timeout_s=STALL_S)
        except DeadlineExceeded:
            before, (written, _) = written, engine.progress(assignment.attempt)
            if written == before:
                raise
        else:
            name = assignment.stored_as(report_name(rank))
            return ManifestReport(rank, name, found.size, found.digest, found.nbytes)


def _stream(engine: EngineClient, share: _Share, assignment: Assignment) -> ManifestReport:
    """Have the engine write the share, piece by piece; return the rank's line of the manifest."""
    attempt, kept = assignment.attempt, process_session()
    pieces = pieces_of(rows_of(share.rank_plan), SLOT_BYTES)
    ring = kept.take_ring(len(pieces))
    is_written = False
    try:
        with _attempted(engine, share, assignment, ring.image, SLOT_BYTES):
            renderer = PieceRenderer(share.rank_plan, share)
            for number, piece in enumerate(pieces):
                if (freed := number - ring.slots + 1) > 0:
                    engine.wait_freed(attempt, freed, timeout_s=STALL_S)
                with gc_paused_on_main_thread():
                    renderer.fill(piece.start, piece.end, ring.slot(number))
                engine.slot_filled(attempt, number + 1)
            engine.staging_verified(attempt)
            line = _reported(engine, assignment)
            is_written = True
    finally:
        kept.give_ring_back(ring, reuse=is_written)
    return line


class _Share:
    """The items of one rank, laid out."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, rank: int) -> None:
        self._planner: SavePlanner | None = planner
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        self._objects: dict[str, tuple[WriteItem, bytes]] = {}
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                self._objects[name] = (item, _record_of(item, planner))
                continue
            # A shard without elements may be listed at the offset of one that has some.
            known = self._items.setdefault((name, _chunk(item).offsets), item)
            if known is not item and 0 in _chunk(known).sizes:
                self._items[name, _chunk(item).offsets] = item
        shards: list[tuple[TensorSpec, Box]] = []
        for (name, offsets), item in self._items.items():
            data = item.tensor_data
            assert data is not None
            spec = TensorSpec(name, stored_path(paths.get(name), name), tuple(data.size), _dtype_of(item))
            shards.append((spec, Box(tuple(offsets), tuple(data.chunk.sizes))))
        nbytes = sum(torch_record.payload_bytes(spec.dtype, box.sizes) for spec, box in shards)
        objects = [
            ObjectSpec(name, stored_path(paths.get(name), name), len(record))
            for name, (_, record) in self._objects.items()
        ]
        self.rank_plan: RankPlan = lay_out(
            rank, shards, objects, file_bytes_max=max(FILE_BYTES_MIN, nbytes // FILES_MOST)
        )
        self._known = looked_up(planner)
        self._last: tuple[PlacedTensor, torch.Tensor, bool] | None = None
        """What was asked of the planner last: a large tensor is needed for several pieces."""

    def tensor(self, placed: PlacedTensor) -> tuple[torch.Tensor, bool]:
        """Return what ``placed`` stores, of which the planner is asked once; see `PieceSource`."""
        if self._last is None or self._last[0] is not placed:
            self._last = None  # a planner may need the memory
            self._last = (placed, *self._resolved(placed))
        return self._last[1:]

    def record(self, placed: PlacedObject) -> bytes:
        return self._objects[placed.name][1]

    def results(self, stored_as: Callable[[str], str]) -> list[WriteResult]:
        """Return the location of every item, for stock's ``.metadata``, in files called as they are stored."""
        info = compat.storage_info_type()
        names = [stored_as(file.name) for file in self.rank_plan.files]
        found = []
        for place in self.rank_plan.tensors:
            length = place.record_end - place.record_offset
            item = self._items[place.name, place.offsets]
            found.append(WriteResult(item.index, length, info(names[place.file], place.record_offset, length)))
        for kept in self.rank_plan.objects:
            item = self._objects[kept.name][0]
            found.append(WriteResult(item.index, kept.capacity, info(names[kept.file], kept.offset, kept.capacity)))
        return found

    def forget_state(self) -> None:
        """Refer to nothing of the state any more: all of it was copied."""
        self._planner = self._known = self._last = None
        self._objects = {name: (item, b"") for name, (item, _) in self._objects.items()}

    def _resolved(self, place: PlacedTensor) -> tuple[torch.Tensor, bool]:
        """Resolve the item; also return True if the result stays valid while the planner resolves others."""
        name = place.name
        assert self._planner is not None
        value = self._planner.resolve_data(self._items[name, place.offsets])
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name}: the save planner gave a {type(value).__name__} for a tensor", field=name)
        check_tensor(name, value)
        tensor = local_tensor(value)
        found = (compat.dtype_name(tensor.dtype), tuple(tensor.shape))
        if found != (place.dtype, place.sizes):
            raise ConfigError(
                f"{name}: the save planner announced {place.dtype} {list(place.sizes)} and gave {found[0]} "
                f"{list(found[1])}; change TensorWriteData.properties where resolve_data converts",
                field=name,
            )
        return tensor, self._known is not None and is_live(value, self._known.get(name))


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    dtype = compat.dtype_name(item.tensor_data.properties.dtype)
    if dtype not in ITEMSIZE:
        name = item.index.fqn
        raise ConfigError(f"{name}: dtype {dtype} can't be stored; convert the tensor first", field=name)
    return dtype


def _record_of(item: WriteItem, planner: SavePlanner) -> bytes:
    """Return the record of a plain value that the planner resolved, if it can be loaded back."""
    name = item.index.fqn
    value = planner.resolve_data(item)
    if not isinstance(value, io.BytesIO):
        raise ConfigError(f"{name}: the save planner gave a {type(value).__name__} for a plain value", field=name)
    record = value.getvalue()
    try:
        load_object(record, name=name, path="")
    except CheckpointCorrupt as error:
        raise ConfigError(
            f"{name}: this value can't be stored in a checkpoint ({error.__cause__}), because "
            "loading it would run code that the file names. Convert it to one of the supported "
            "types: "
            f"{'; '.join(ALLOWED_OBJECTS)}; or save it with a FileSystemWriter",
            field=name,
        ) from error
    return record


def open_directory(path: str) -> int:
    """Open an attempt directory. Raises `ConfigError` if this rank doesn't see it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{os.uname().nodename} doesn't see {path}, which the coordinator has just made. If the coordinator has "
            "failed meanwhile, that is the cause; else checkpoints need a path on a file system that all ranks share",
            field="path",
        ) from error
