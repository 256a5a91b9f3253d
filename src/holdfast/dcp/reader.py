"""A drop-in DCP storage reader for Holdfast checkpoints and for what stock DCP wrote.

The contents of a directory come from its reports (or, in a stock directory, from its ``.metadata`` through the
allow-list unpickler), and are shown to DCP's planners as stock metadata. What they request is read by a read plan, like
any load of Holdfast: coalesced, verified, straight into the destination's memory if possible.

Guarantees: with ``verify``, every byte that reaches a tensor of a Holdfast checkpoint was compared with its checksum;
only metadata is unpickled here. The planner decides what to do with the bytes of a plain value: DCP's own calls
``torch.load`` on them, which may run code for directories of others.
Does not: read the rank-local metadata of ``use_collectives=False``.
"""

from __future__ import annotations

import dataclasses
import io
import uuid
from functools import cached_property
from operator import add, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import Box, whole
from holdfast.dcp.planners import looked_up, read_extras
from holdfast.errors import CheckpointNotFound, StateMismatch
from holdfast.loader.read import ReadTarget, read_into
from holdfast.loader.sources.holdfast import telling_apart
from holdfast.loader.sources.open import open_source
from holdfast.plan.read import Want, plan_reads
from holdfast.staging.optimizer_hook import before_any_load
from holdfast.state.entries import torch_dtype
from holdfast.state.gc_pause import gc_paused_on_main_thread
from holdfast.validation import checked_path, is_path, is_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from holdfast.format.dcp_metadata_reader import StockExtras
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.storage.ranged_reads import FileSet

_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(Metadata))
STRICT_BYTES: Final = 64 << 20
"""Bytes read ahead for a planner that must handle one tensor after the other."""


class Reader(StorageReader):
    """Reads the checkpoint at ``path`` for ``dcp.load``: Holdfast's own, or one that stock DCP wrote.

    path: a directory, or a URL (``s3://``, ``gs://``, ``az://``, ``file://``, ``memory://``), of a checkpoint, of a
    manager's root (its newest step), or of what stock DCP wrote, including XTuner's ``weights/``, and ``model/`` with
    ``optimizer/``. A ``checkpoint_id`` given to ``dcp.load`` replaces it. verify: compare every byte read with its
    checksum.

    A load raises DCP's ``CheckpointException``, the same on every rank; it contains `CheckpointNotFound`,
    `CheckpointCorrupt`, `StateMismatch` or `StorageError`.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__()
        self._path = checked_path(path, field="path")
        self._verify = verify
        self._source: CheckpointSource | None = None
        self._load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """The directory or URL that the next load reads."""
        return self._path

    @property
    def path(self) -> Path | str:
        """The same as a `Path`, as in stock's reader; the URL of an object store as it is."""
        return self._path if is_store(self._path) else Path(self._path)

    @property
    def load_id(self) -> str:
        """The id in the returned metadata; a new one after `reset`."""
        return self._load_id

    @property
    def storage_data(self) -> dict[MetadataIndex, Any]:
        """The location of each record of the checkpoint that was read last; empty before."""
        return {} if self._source is None else _storage_data(self._source)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if ``checkpoint_id`` can be a directory."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from ``checkpoint_id`` from now on, if given."""
        self._source = None
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._path = checked_path(checkpoint_id, field="checkpoint_id")

    # Not `**kwargs`: DCP looks for that name, and then asks again for a rank's own metadata if the first answer was an
    # error. If the second one succeeded on one rank alone, that rank would leave the collectives of the others.
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """Read the checkpoint's contents as stock metadata. Raises `CheckpointNotFound`, `CheckpointCorrupt`.

        Inside ``dcp.load``, which would replace the error, accessing the result raises it instead.
        """
        try:
            with gc_paused_on_main_thread():
                source = self._source = open_source(self._path)
                metadata = _Metadata(_entries(source, extras := read_extras(source)), extras.planner_data)
        except Exception as error:
            self._source = None
            if compat.is_in_dcp_load():
                return _Unreadable(error)
            raise
        del metadata.storage_data  # made on first access
        metadata.source = source
        metadata.version = extras.version
        metadata.storage_meta = StorageMeta(checkpoint_id=self._path, save_id=extras.save_id, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's signature
        """Raise here if `read_metadata` couldn't open the checkpoint; nothing else to set up."""
        _ = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that ``plan`` requests and pass it to ``planner``; complete on return."""
        source = self._source = self._source or open_source(self._path)
        before_any_load()
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with telling_apart(source), source.open_files(verify=self._verify) as files:
            for item in objects:
                planner.load_bytes(item, io.BytesIO(_record(source, files, item.storage_index.fqn)))
            if looked_up(planner) is not None:
                tensors = _read_together(source, files, tensors, planner)
            _read_strictly(source, files, tensors, planner)
            events.count("bytes_read", files.bytes_read)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Metadata(Metadata):
    """Stock's metadata whose ``storage_data`` is made on first access: it is large and rarely used."""

    source: CheckpointSource

    @cached_property
    def storage_data(self) -> dict[MetadataIndex, Any]:
        return _storage_data(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, tuple(getattr(self, field.name) for field in dataclasses.fields(Metadata))


class _Unreadable(Metadata):
    """Stands for metadata that couldn't be read: any access raises the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            raise self._error
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"<metadata that couldn't be read: {self._error}>"


def _entries(source: CheckpointSource, extras: StockExtras) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    sizes: dict[tuple[int, ...], torch.Size] = {}

    def size(lengths: tuple[int, ...]) -> torch.Size:
        return sizes.get(lengths) or sizes.setdefault(lengths, torch.Size(lengths))

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    requires_grad, pin_memory = extras.requires_grad, extras.pin_memory
    for name, tensor in source.tensors.items():
        properties = TensorProperties(dtype=torch_dtype(tensor.dtype))
        if name in requires_grad:
            properties.requires_grad = True
        if name in pin_memory:
            properties.pin_memory = True
        boxes = [shard.box for shard in tensor.shards] or [whole(tensor.shape)]
        chunks = [ChunkStorageMetadata(size(box.offsets), size(box.sizes)) for box in boxes]
        entries[name] = TensorStorageMetadata(properties, size(tensor.shape), chunks)
    entries.update((name, BytesStorageMetadata()) for name in source.objects)
    return entries


def _storage_data(source: CheckpointSource) -> dict[MetadataIndex, Any]:
    """Return the location of each record, as stock's own reader needs it."""
    info = compat.storage_info_type()
    found: dict[MetadataIndex, Any] = {}
    for place in source.places():
        index = MetadataIndex(place.name, place.offsets)
        known = found.get(index)
        # A shard without elements may be listed at the offset of one that has some.
        if known is None or place.offsets is None or known.length < place.length:
            found[index] = info(place.file, place.offset, place.length)
    return found


def _record(source: CheckpointSource, files: FileSet, name: str) -> bytes:
    place = source.objects.get(name)
    if place is None:
        raise CheckpointNotFound(f"{source.directory} has no plain value {name!r}", path=source.directory)
    return bytes(files.read_span(place.file, place.offset, place.offset + place.nbytes))


def _read_together(
    source: CheckpointSource, files: FileSet, items: Sequence[ReadItem], planner: LoadPlanner
) -> list[ReadItem]:
    """Read all ``items`` together, except those that share memory; return these, in order.

    For planners that only look tensors up: they are all there already, and none has to be committed.
    """
    with gc_paused_on_main_thread():
        targets = [_target(item, planner) for item in items]
        shared = _sharing(items, targets)
        apart = [at for at, item in enumerate(items) if _key(item) not in shared]
        wants = [_want(items[at], number) for number, at in enumerate(apart)]
        destinations = [ReadTarget(want.name, targets[at]) for want, at in zip(wants, apart, strict=True)]
        plan = plan_reads(wants, source.tensors)
    read_into(files, plan, destinations, source)
    return [item for item in items if _key(item) in shared]


def _read_strictly(source: CheckpointSource, files: FileSet, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Resolve, fill and commit one item after the other, as stock storage does; their bytes are read ahead.

    A large item is read straight into the planner's memory.
    """
    for batch in _batches(items, source):
        wants = [_want(item, number) for number, item in enumerate(batch)]
        plan = plan_reads(wants, source.tensors)
        if len(batch) == 1 and compat.is_plain(target := _target(batch[0], planner)):
            read_into(files, plan, [ReadTarget(wants[0].name, target)], source)
            planner.commit_tensor(batch[0], target)
            continue
        values = [torch.empty(want.box.sizes, dtype=torch_dtype(source.tensors[want.name].dtype)) for want in wants]
        destinations = [ReadTarget(want.name, value) for want, value in zip(wants, values, strict=True)]
        read_into(files, plan, destinations, source)
        for item, value in zip(batch, values, strict=True):
            target = _target(item, planner)
            with torch.no_grad():
                compat.copy_(target, value)
            planner.commit_tensor(item, target)


def _batches(items: Sequence[ReadItem], source: CheckpointSource) -> Iterator[list[ReadItem]]:
    """Yield the items in order, at most `STRICT_BYTES` at a time, or a larger one alone."""
    batch: list[ReadItem] = []
    nbytes = 0
    for item in items:
        stored = source.tensors.get(item.storage_index.fqn)
        more = item.lengths.numel() * (stored.itemsize if stored is not None else 0)
        if batch and nbytes + more > STRICT_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += more
    if batch:
        yield batch


def _want(item: ReadItem, number: int) -> Want:
    """Return the read of a stored tensor for ``item``, into destination ``number`` of equal size."""
    lengths = tuple(item.lengths)
    offsets = item.storage_index.offset
    if offsets:
        box = Box(tuple(map(add, offsets, item.storage_offsets)), lengths)
    else:
        box = Box(tuple(item.storage_offsets), lengths)
    return Want(item.storage_index.fqn, box, number, box)


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """Return the planner's memory for ``item``. Raises `StateMismatch` if it has another shape."""
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths:
        name = item.storage_index.fqn
        raise StateMismatch(
            f"{name}: the load planner gave a tensor of {list(target.shape)} for {list(item.lengths)}",
            mismatched=(name,),
        )
    return target


def _key(item: ReadItem) -> tuple[str, Any]:
    """Return a key for the tensor of this rank that contains the item."""
    return item.dest_index.fqn, item.dest_index.offset


def _sharing(items: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> set[tuple[str, Any]]:
    """Return the keys of tensors whose memory may overlap another's: there, the order of reads matters.

    Compares first and last bytes, so two that interleave also count as overlapping.
    """
    spans: dict[tuple[str, Any], tuple[int, int]] = {}
    for item, target in zip(items, targets, strict=True):
        if not target.numel():
            continue
        first = target.data_ptr()
        reach = sum(step * (size - 1) for step, size in zip(target.stride(), target.shape, strict=True))
        span = (first, first + (reach + 1) * target.element_size())
        known = spans.get(key := _key(item))
        spans[key] = span if known is None else (min(known[0], span[0]), max(known[1], span[1]))
    found: set[tuple[str, Any]] = set()
    end, holder = -1, None
    for key, (first, stop) in sorted(spans.items(), key=itemgetter(1)):
        if first < end and holder is not None:
            found |= {key, holder}
        if stop > end:
            end, holder = stop, key
    return found
