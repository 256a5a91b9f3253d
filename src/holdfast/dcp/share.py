"""Writes what DCP's plan assigns to one rank, in this process: lay out, fill, write, hash, report.

Unlike a session of Holdfast's own, DCP hands over tensors once and has copied them already where it is asynchronous.
So there is no image of everything: files pass through two windows, one being filled while the other is written, each
at most an eighth of what the rank writes (a larger tensor has a window of its own size).

Guarantees: objects that couldn't be loaded back are refused before a byte is written; the report is the last thing
written, and says that all of it is durable. On any error there is no report. Tensors are asked of the planner one
window at a time.
"""

from __future__ import annotations

import io
import os
import struct
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import Box
from holdfast.dtypes import ITEMSIZE
from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Progress, WriteOptions, Written, write_files, write_report
from holdfast.engine.messages import AddPlan, FileRow
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format import torch_record
from holdfast.format.manifest import ManifestReport, Report, encode_index, report_name, report_parts
from holdfast.format.objects import ALLOWED_OBJECTS, load_object
from holdfast.plan.index import index_of
from holdfast.plan.structure import ObjectSpec, PathItem, TensorSpec
from holdfast.plan.write import PlacedTensor, RankPlan, lay_out
from holdfast.staging.copies import CopyBatch, CopyItem
from holdfast.staging.image import Image
from holdfast.state.entries import check_tensor, local_tensor
from holdfast.storage.lease import Heartbeat, hold, lease_name, new_record

WINDOW_BYTES_MIN: Final = 256 << 20
WINDOW_SHARE: Final = 8
_WINDOWS: Final = 2
_LEASE_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank was told: the attempt it writes for, and its place in it."""

    attempt: str
    step: int | None
    rank: int
    world: int


def check_items(plan: SavePlan) -> None:
    """Raise `ConfigError`, naming the key, if a tensor of ``plan`` has a dtype that can't be stored."""
    for item in plan.items:
        if item.tensor_data is not None:
            _dtype_of(item)


def write_share(
    dir_fd: int, plan: SavePlan, planner: SavePlanner, assignment: Assignment, options: WriteOptions
) -> list[WriteResult]:
    """Write the items of ``plan`` into the directory ``dir_fd`` and report; returns when all of it is durable.

    The last result is the rank's line of the manifest. Raises `ConfigError` for what can't be stored, `StorageError`,
    and what the planner raises.
    """
    lease = Heartbeat(hold(dir_fd, lease_name(assignment.rank), new_record(assignment.rank)))
    try:
        share = _Share(plan, planner, assignment.rank)
        written = _write_files(dir_fd, share, options)
        report = Report(
            attempt=assignment.attempt,
            step=assignment.step,
            rank=assignment.rank,
            world=assignment.world,
            files=tuple(file for part in written for file in part.files),
            tensor_sums=b"".join(part.tensor_sums for part in written),
            index=encode_index(index_of(share.rank_plan)),
        )
        name = report_name(assignment.rank)
        size, digest = write_report(dir_fd, name, report_parts(report))
    finally:
        lease.stop(wait_s=_LEASE_WAIT_S)
    nbytes = share.rank_plan.nbytes
    events.count("bytes_persisted", nbytes)
    line = ManifestReport(assignment.rank, name, size, digest, nbytes)
    return [*share.results(), WriteResult(MetadataIndex(name), size, line)]


class _Share:
    """The items of one rank, laid out."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, rank: int) -> None:
        self._planner = planner
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        self._objects: dict[str, tuple[WriteItem, bytes]] = {}
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        shards: list[tuple[TensorSpec, Box]] = []
        for item in plan.items:
            name = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                self._objects[name] = (item, _record_of(item, planner))
                continue
            data, dtype = item.tensor_data, _dtype_of(item)
            assert data is not None
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            if self._items.setdefault((name, box.offsets), item) is item:
                shards.append((TensorSpec(name, _path(paths.get(name), name), tuple(data.size), dtype), box))
        nbytes = sum(torch_record.payload_bytes(spec.dtype, box.sizes) for spec, box in shards)
        objects = [
            ObjectSpec(name, _path(paths.get(name), name), len(record)) for name, (_, record) in self._objects.items()
        ]
        self.rank_plan: RankPlan = lay_out(
            rank, shards, objects, file_bytes_max=max(WINDOW_BYTES_MIN, nbytes // WINDOW_SHARE)
        )

    def fill(self, file: int, memory: torch.Tensor) -> tuple[bytes, bytes]:
        """Make ``memory`` the content of a file; returns offsets and sizes of its payloads, as `AddPlan` has them."""
        host = compat.host_memory(memory)
        placed = [tensor for tensor in self.rank_plan.tensors if tensor.file == file]
        copies: list[CopyItem] = []
        end = 0
        for place in placed:
            header, trailer = torch_record.render(place.dtype, place.sizes, record_offset=place.record_offset)
            payload_end = place.payload_offset + place.nbytes
            host[end : place.record_offset] = bytes(place.record_offset - end)
            host[place.record_offset : place.payload_offset] = header
            host[payload_end : place.record_end] = trailer
            end = place.record_end
            if place.nbytes:
                view = memory[place.payload_offset : payload_end].view(getattr(torch, place.dtype)).view(place.sizes)
                copies.append(CopyItem(place.name, self._tensor(place), None, view))
        for kept in self.rank_plan.objects:
            if kept.file == file:
                host[end : kept.offset] = bytes(kept.offset - end)
                end = kept.offset + kept.capacity
                host[kept.offset : end] = self._objects[kept.name][1]
        host[end:] = bytes(len(host) - end)
        CopyBatch(copies).copy()
        count = len(placed)
        offsets = struct.pack(f"<{count}Q", *(place.payload_offset for place in placed))
        return offsets, struct.pack(f"<{count}Q", *(place.nbytes for place in placed))

    def results(self) -> list[WriteResult]:
        """Where everything is, for stock's ``.metadata``."""
        info = compat.storage_info_type()
        names = [file.name for file in self.rank_plan.files]
        found = []
        for place in self.rank_plan.tensors:
            length = place.record_end - place.record_offset
            item = self._items[place.name, place.offsets]
            found.append(WriteResult(item.index, length, info(names[place.file], place.record_offset, length)))
        for kept in self.rank_plan.objects:
            item = self._objects[kept.name][0]
            found.append(WriteResult(item.index, kept.capacity, info(names[kept.file], kept.offset, kept.capacity)))
        return found

    def _tensor(self, place: PlacedTensor) -> torch.Tensor:
        name = place.name
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
        return tensor


def _write_files(dir_fd: int, share: _Share, options: WriteOptions) -> list[Written]:
    """Write every file of the share, the next one being filled meanwhile."""
    progress = Progress()
    windows: deque[Image] = deque()
    pending: deque[Future[Written]] = deque()
    written: list[Written] = []
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-write") as worker:
        try:
            for number, file in enumerate(share.rank_plan.files):
                if len(pending) == _WINDOWS:
                    written.append(pending.popleft().result())
                window = windows.popleft() if len(windows) == _WINDOWS else None
                if window is None or window.nbytes < file.size:
                    if window is not None:
                        window.close()
                    window = Image(file.size)
                windows.append(window)
                memory = window.bytes_view[: file.size]
                offsets, sizes = share.fill(number, memory)
                row = AddPlan(number, (FileRow(file.name, file.size, 0),), offsets, sizes, b"")
                pending.append(worker.submit(_write_file, dir_fd, memory, row, options, progress))
            written.extend(future.result() for future in pending)
        except BaseException:
            progress.stop()  # leaving the pool waits for its thread
            raise
        finally:
            worker.shutdown(wait=True)
            for window in windows:
                window.close()
    return written


def _write_file(dir_fd: int, memory: torch.Tensor, row: AddPlan, options: WriteOptions, progress: Progress) -> Written:
    return write_files(dir_fd, compat.host_memory(memory), compile_plan(row), options, progress=progress)


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    dtype = compat.dtype_name(item.tensor_data.properties.dtype)
    if dtype not in ITEMSIZE:
        name = item.index.fqn
        raise ConfigError(f"{name}: dtype {dtype} can't be stored; convert the tensor first", field=name)
    return dtype


def _record_of(item: WriteItem, planner: SavePlanner) -> bytes:
    """What the planner made of a plain value: kept as it is, if it can be loaded back from there."""
    name = item.index.fqn
    value = planner.resolve_data(item)
    if not isinstance(value, io.BytesIO):
        raise ConfigError(f"{name}: the save planner gave a {type(value).__name__} for a plain value", field=name)
    record = value.getvalue()
    try:
        load_object(record, name=name, path="")
    except CheckpointCorrupt as error:
        raise ConfigError(
            f"{name}: this value can't be kept in a checkpoint ({error.__cause__}), because it couldn't be loaded back "
            "without running code that the file names. Convert it to what can be kept, exactly one of: "
            f"{'; '.join(ALLOWED_OBJECTS)}; or leave it to a FileSystemWriter",
            field=name,
        ) from error
    return record


def _path(path: Any, name: str) -> tuple[PathItem, ...]:
    """Where the state dict had it, if the planner says so and it is nothing but keys and indices."""
    if isinstance(path, tuple) and path and all(type(item) in (str, int) for item in path):
        return path
    return (name,)


def open_directory(path: str) -> int:
    """A descriptor of an attempt directory. Raises `ConfigError` where this rank doesn't see it."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{os.uname().nodename} doesn't see {path}, which the coordinator has just made; checkpoints need a path "
            "on a file system that all ranks share",
            field="path",
        ) from error
