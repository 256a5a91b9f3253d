"""A drop-in DCP storage reader for Holdfast checkpoints and for what stock DCP wrote.

What a directory holds comes from its reports (or, in a stock directory, from its ``.metadata`` through the allow-list
unpickler), and is shown to DCP's planners as the metadata they know. What they ask for is read by a read plan like any
load of Holdfast's: coalesced, verified, straight into the destination's memory where that is possible.

Guarantees: with ``verify``, every byte that reaches a tensor of a Holdfast checkpoint was matched with its checksum;
nothing is unpickled here but metadata. What the planner does with the bytes of a plain value is the planner's:
DCP's own calls ``torch.load`` on them, which for a directory of somebody else's may run code.
Does not: read the rank-local metadata of ``use_collectives=False``, or keep ``planner_data`` that isn't DCP's mapping
of flat names.
"""

from __future__ import annotations

import io
import os
import uuid
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast import events
from holdfast.arguments import checked_path, is_path
from holdfast.boxes import Box, whole
from holdfast.errors import CheckpointNotFound, StateMismatch
from holdfast.opening import open_source
from holdfast.plan.read import Want, plan_reads
from holdfast.reading import Destination, read_into
from holdfast.state.entries import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.plan.read import StoredTensor
    from holdfast.source import Source
    from holdfast.storage.reading import FileSet

BATCH_BYTES: Final = 256 << 20
"""Tensors are asked of the planner in batches of about this size: it may allocate what it hands out."""


class Reader(StorageReader):
    """Reads the checkpoint in the directory ``path`` for ``dcp.load``: Holdfast's own, or one that stock DCP wrote.

    path: a checkpoint, a manager's root (its newest step), or a stock directory, XTuner's ``weights/`` and ``model/``
    with ``optimizer/`` included. A ``checkpoint_id`` given to ``dcp.load`` takes its place. verify: match every byte
    read with its checksum.

    What a load raises comes wrapped in DCP's ``CheckpointException``, the same on every rank: `CheckpointNotFound`,
    `CheckpointCorrupt`, `StateMismatch`, `StorageError`.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__()
        self._path = checked_path(path, field="path")
        self._verify = verify
        self._source: Source | None = None

    @property
    def checkpoint_id(self) -> str:
        """The directory the next load reads."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` can be a directory."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from ``checkpoint_id`` from now on, where one is given."""
        self._source = None
        if checkpoint_id is not None:
            self._path = checked_path(checkpoint_id, field="checkpoint_id")

    # Not `**kwargs`: DCP looks for that name, and then asks again for a rank's own metadata if the first answer was an
    # error. If the second one succeeded on one rank alone, that rank would leave the collectives of the others.
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        source = self._source = open_source(self._path)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtype(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in _boxes(tensor)],
            )
            for name, tensor in source.tensors.items()
        }
        entries.update((name, BytesStorageMetadata()) for name in source.objects)
        return Metadata(
            state_dict_metadata=entries,
            planner_data=dict(source.paths),
            storage_meta=StorageMeta(checkpoint_id=self._path, load_id=str(uuid.uuid4())),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Nothing to set up: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that ``plan`` asks for, and hand it to ``planner``; all is there when this returns."""
        source = self._source = self._source or open_source(self._path)
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with source.open_files(verify=self._verify) as files:
            for item in objects:
                planner.load_bytes(item, io.BytesIO(_record(source, files, item.storage_index.fqn)))
            for batch in _batches(tensors, source):
                _read_batch(source, files, batch, planner)
            events.count("bytes_read", files.bytes_read)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _boxes(tensor: StoredTensor) -> Sequence[Box]:
    return [shard.box for shard in tensor.shards] or [whole(tensor.shape)]


def _record(source: Source, files: FileSet, name: str) -> bytes:
    place = source.objects.get(name)
    if place is None:
        raise CheckpointNotFound(f"{source.directory} has no plain value {name!r}", path=source.directory)
    return bytes(files.read_span(place.file, place.offset, place.offset + place.nbytes))


def _batches(items: Sequence[ReadItem], source: Source) -> Iterator[list[ReadItem]]:
    """The items in the order of the shards they come from, cut between shards."""

    def place(item: ReadItem) -> tuple[str, tuple[int, ...]]:
        return item.storage_index.fqn, _offsets(item)

    batch: list[ReadItem] = []
    nbytes = 0
    for item in sorted(items, key=place):
        if nbytes >= BATCH_BYTES and place(item) != place(batch[-1]):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        stored = source.tensors.get(item.storage_index.fqn)
        nbytes += item.lengths.numel() * (stored.itemsize if stored is not None else 0)
    if batch:
        yield batch


def _read_batch(source: Source, files: FileSet, batch: Sequence[ReadItem], planner: LoadPlanner) -> None:
    targets: list[torch.Tensor] = []
    wants: list[Want] = []
    for number, item in enumerate(batch):
        name = item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise StateMismatch(
                f"{name}: the load planner gave a tensor of {list(target.shape)} for {list(item.lengths)}",
                mismatched=(name,),
            )
        targets.append(target)
        starts = zip(_offsets(item) or (0,) * len(item.lengths), item.storage_offsets, strict=True)
        box = Box(tuple(chunk + inside for chunk, inside in starts), tuple(item.lengths))
        wants.append(Want(name, box, number, box))
    destinations = [Destination(want.name, target) for want, target in zip(wants, targets, strict=True)]
    read_into(files, plan_reads(wants, source.tensors), destinations, source)
    for item, target in zip(batch, targets, strict=True):
        planner.commit_tensor(item, target)


def _offsets(item: ReadItem) -> tuple[int, ...]:
    return tuple(item.storage_index.offset or ())
