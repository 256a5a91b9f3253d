"""Reads stored files into tensors: carries out a read plan (``plan.read``) by ``storage.ranged_reads``.

`read_boxes` makes the plan as well, for boxes of a few tensors that are wanted in host memory.

A transfer that is one run of bytes on both sides, into host memory of the stored dtype, is read straight to where it
belongs. Everything else (strided boxes, other dtypes, device memory) passes through a scratch buffer of at most 8 MiB a
thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import Box, row_blocks, strides
from holdfast.keymap.moves import Move
from holdfast.plan.read import Transfer, Want, byte_span, dest_offset, is_direct, plan_reads, row_chunks
from holdfast.staging.copier import lies_as_it_is
from holdfast.state.entries import torch_dtype
from holdfast.state.gc_pause import gc_paused_on_main_thread
from holdfast.state.structure import part_of
from holdfast.storage.ranged_reads import FileSet, RangedRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.keymap.moves import MovedTensor
    from holdfast.loader.sources.holdfast import CheckpointSource, RecordReader
    from holdfast.plan.read import ReadPlan

SPAN_BYTES_MAX: Final = 8 << 20
SMALL_RUN_BYTES: Final = 1 << 10
RUNS_MAX: Final = 4096
"""More runs than this in one span, all of them small, are read with what lies between them: calls cost more."""


@dataclass(slots=True)
class ReadTarget:
    """Local memory to fill: ``tensor`` is plain, of any device, dtype and strides."""

    name: str
    tensor: torch.Tensor
    _bytes: memoryview | None = None

    def host_bytes(self, dtype: torch.dtype) -> memoryview | None:
        """Its memory as bytes, where stored bytes of ``dtype`` may go there as they are; else None."""
        tensor = self.tensor
        if tensor.dtype != dtype or not lies_as_it_is(tensor):
            return None
        if self._bytes is None:
            self._bytes = compat.host_memory(tensor)
            if not tensor.is_inference():
                increment_version(tensor)  # as torch would: who looks at the counter finds that it was written to
        return self._bytes


class FileReads(Protocol):
    """What reads go through: a `FileSet`, or what gathers them to be carried out together with other ranks'."""

    @property
    def gap_bytes_max(self) -> int: ...
    def is_hashed(self, name: str) -> bool: ...
    def jobs_for(
        self, name: str, pieces: Sequence[RangedRead], others: Sequence[tuple[int, Callable[[], None]]] = ()
    ) -> list[Callable[[], None]]: ...
    def read_span(self, name: str, start: int, end: int) -> memoryview: ...
    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview: ...
    def read(self, work: Iterable[Callable[[], None]]) -> None: ...


class BufferedJob(Protocol):
    """A job that reads by `read_span` or `read_runs`, of the ranges that it `needs` only: (file, start, end)."""

    def __call__(self) -> None: ...
    def needs(self) -> Iterator[tuple[str, int, int]]: ...


def read_into(files: FileReads, plan: ReadPlan, destinations: Sequence[ReadTarget], source: CheckpointSource) -> None:
    """Fill ``destinations`` (indexed by `Transfer.dest`) by ``plan``; returns when all is read and verified."""
    if source.records is not None:
        assert isinstance(files, FileSet)  # never shared: a record is read as a whole
        _read_records(files, plan, destinations, source.records)
        return
    work: list[Callable[[], None]] = []
    with gc_paused_on_main_thread():
        for name, transfers in plan.by_file().items():
            direct, through = _sort(transfers, destinations, source)
            others = [
                (byte_span(chunk)[0], _Through(files, chunk, destinations[chunk.dest], _dtype_of(source, chunk)))
                for transfer in through
                for chunk in _bounded(transfer)
            ]
            work.extend(files.jobs_for(name, direct, others))
    with torch.no_grad():
        files.read(work)


def read_boxes(
    source: CheckpointSource, wanted: Sequence[tuple[str, Box]], *, into: Sequence[torch.Tensor] | None = None
) -> Sequence[torch.Tensor]:
    """Boxes of tensors that ``source`` has, by name, each verified; every file is opened once.

    into: contiguous host memory of the boxes' shapes and dtypes, undefined if this raises; None for new memory, which
    isn't taken before all files are there, as large as they are said to be. Raises `CheckpointCorrupt`, `StorageError`.
    """
    stored = {name: source.tensors[name] for name, _ in wanted}
    plan = plan_reads([Want(name, box, at, box) for at, (name, box) in enumerate(wanted) if box.volume], stored)
    with source.open_files(verify=True) as files:
        nbytes = sum(box.volume * stored[name].itemsize for name, box in wanted)
        for file in {transfer.file for transfer in plan.transfers}:
            files.expect(file, nbytes)
        if into is None:
            into = [torch.empty(box.sizes, dtype=torch_dtype(stored[name].dtype)) for name, box in wanted]
        read_into(files, plan, [ReadTarget(name, out) for (name, _), out in zip(wanted, into, strict=True)], source)
    events.count("bytes_read", files.bytes_read)
    return into


def _read_records(files: FileSet, plan: ReadPlan, destinations: Sequence[ReadTarget], records: RecordReader) -> None:
    """Each record is read and decoded once, and copied to all who want of it; transfers come in record order."""
    key: tuple[str, int] | None = None
    value = torch.empty(0)
    for transfer in plan.transfers:
        if key != (transfer.file, transfer.payload_offset):
            key, value = (transfer.file, transfer.payload_offset), records.load(files, transfer)
        part = part_of(value, transfer.region, transfer.stored)
        copy_region(destinations[transfer.dest].tensor, transfer, part)


def _sort(
    transfers: Sequence[Transfer], destinations: Sequence[ReadTarget], source: CheckpointSource
) -> tuple[list[RangedRead], list[Transfer]]:
    """Pieces to read in place, sorted and without overlap, and the transfers that need a buffer."""
    direct: list[RangedRead] = []
    through: list[Transfer] = []
    end = 0
    tensors = source.tensors
    for transfer in transfers:
        memory = destinations[transfer.dest].host_bytes(torch_dtype(tensors[transfer.name].dtype))
        start = transfer.payload_offset
        if memory is not None and start >= end and transfer.region == transfer.stored == transfer.dest_box:
            direct.append(RangedRead(start, memory))  # whole, as nearly all: nothing to be worked out
            end = start + len(memory)
            continue
        start, stop = byte_span(transfer)
        # Two destinations may want the same bytes (tied names): the second takes them through a buffer.
        if memory is None or start < end or not is_direct(transfer):
            through.append(transfer)
            continue
        at = dest_offset(transfer)
        direct.append(RangedRead(start, memory if len(memory) == stop - start else memory[at : at + stop - start]))
        end = stop
    return direct, through


def _dtype_of(source: CheckpointSource, transfer: Transfer) -> torch.dtype:
    return torch_dtype(source.tensors[transfer.name].dtype)


@dataclass(slots=True)
class _Through:
    """Job: read one transfer through a buffer."""

    files: FileReads
    transfer: Transfer
    destination: ReadTarget
    dtype: torch.dtype

    def __call__(self) -> None:
        copy_region(self.destination.tensor, self.transfer, self._elements().read(self.files))

    def needs(self) -> Iterator[tuple[str, int, int]]:
        return self._elements().needs(self.files)

    def _elements(self) -> StridedRead:
        transfer = self.transfer
        start, _ = byte_span(transfer)
        return StridedRead(transfer.file, start, self.dtype, transfer.region.sizes, strides(transfer.stored.sizes))


class StridedRead(NamedTuple):
    """Elements of a file as a tensor of shape ``counts``, ``steps`` elements (> 0) apart in it, from byte ``start`` on.

    What lies between first and last should be bounded.
    """

    name: str
    start: int
    dtype: torch.dtype
    counts: Sequence[int]
    steps: Sequence[int]

    def read(self, files: FileReads) -> torch.Tensor:
        """Return the elements, valid until the calling thread's next read."""
        runs = self._scattered(files)
        if runs:
            gathered = files.read_runs(self.name, runs)
            return torch.frombuffer(gathered, dtype=torch.uint8).view(self.dtype).reshape(tuple(self.counts))
        span = torch.frombuffer(files.read_span(self.name, self.start, self._end()), dtype=torch.uint8)
        return span.view(self.dtype).as_strided(tuple(self.counts), tuple(self.steps))

    def needs(self, files: FileReads) -> Iterator[tuple[str, int, int]]:
        """Yield what `read` will read: (file, start, end)."""
        for start, end in self._scattered(files) or [(self.start, self._end())]:
            yield self.name, start, end

    def _end(self) -> int:
        last = sum((count - 1) * step for count, step in zip(self.counts, self.steps, strict=True))
        return self.start + (last + 1) * self.dtype.itemsize

    def _scattered(self, files: FileReads) -> list[tuple[int, int]]:
        """Return the runs to read one by one; none where all is read in one span."""
        counts, steps, itemsize = self.counts, self.steps, self.dtype.itemsize
        run = 1
        dim = len(counts)
        while dim and (steps[dim - 1] == run or counts[dim - 1] == 1):
            dim -= 1
            run *= counts[dim]
        if not _is_scattered(files, self.name, counts[:dim], steps[:dim], run * itemsize, itemsize):
            return []
        starts = [self.start]
        for count, step in zip(counts[:dim], steps[:dim], strict=True):
            starts = [at + index * step * itemsize for at in starts for index in range(count)]
        return [(at, at + run * itemsize) for at in starts]


def _is_scattered(
    files: FileReads, name: str, counts: Sequence[int], steps: Sequence[int], run_bytes: int, itemsize: int
) -> bool:
    """Return True if the gaps between runs are so large that runs are read one by one."""
    if not counts or steps[-1] * itemsize - run_bytes <= files.gap_bytes_max or files.is_hashed(name):
        return False
    return prod(counts) <= RUNS_MAX or run_bytes >= SMALL_RUN_BYTES


def _bounded(transfer: Transfer) -> Iterator[Transfer]:
    """The transfer in parts whose span fits the scratch buffer, even where it is one run."""
    start, end = byte_span(transfer)
    if end - start <= SPAN_BYTES_MAX:
        yield transfer
        return
    if not is_direct(transfer):
        for chunk in row_chunks(transfer, SPAN_BYTES_MAX):
            yield from _bounded(chunk) if is_direct(chunk) else (chunk,)
        return
    for part in row_blocks(transfer.region, SPAN_BYTES_MAX // transfer.itemsize):
        yield transfer._replace(region=part)


# tensors put together by a key map ----------------------------------------------------------------------------


def read_moved(files: FileReads, wanted: Sequence[tuple[MovedTensor, Box, torch.Tensor]]) -> None:
    """Fill each tensor with its box of a `MovedTensor`; returns when all is read."""
    jobs = [
        _MovedRead(files, moved, chunk, part_of(tensor, chunk, box))
        for moved, box, tensor in wanted
        for chunk in row_blocks(box, SPAN_BYTES_MAX // tensor.dtype.itemsize)
    ]
    with torch.no_grad():
        files.read(jobs)


@dataclass(slots=True)
class _MovedRead:
    """Job: put one box of a `MovedTensor` together."""

    files: FileReads
    moved: MovedTensor
    box: Box
    tensor: torch.Tensor

    def __call__(self) -> None:
        tensor = self.tensor
        in_place = lies_as_it_is(tensor)
        buffer = tensor if in_place else torch.empty(self.box.sizes, dtype=tensor.dtype)
        if not in_place and not self.moved.is_whole:
            compat.copy_(buffer, tensor)  # what isn't stored is to be what it was
        for part, elements in self._parts():
            _place(part, elements.read(self.files), buffer)
        if not in_place:
            compat.copy_(tensor, buffer)

    def needs(self) -> Iterator[tuple[str, int, int]]:
        for _, elements in self._parts():
            yield from elements.needs(self.files)

    def _parts(self) -> Iterator[tuple[Move, StridedRead]]:
        for part in self.moved.within(self.box):
            dtype = torch_dtype(part.dtype)
            for move in _spans(part.move, dtype.itemsize):
                loops = _read_loops(move)
                counts, steps = [count for count, _, _ in loops], [at for _, at, _ in loops]
                start = part.start + move.target_offset * dtype.itemsize
                yield move, StridedRead(part.file, start, dtype, counts, steps)


def _read_loops(move: Move) -> list[tuple[int, int, int]]:
    return [loop for loop in move.loops if loop[2]]  # one element that became several is among them only once


def _place(move: Move, value: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy the elements of one loop nest to their places in ``buffer``, which is contiguous."""
    loops = _read_loops(move)
    backwards = [dim for dim, (_, _, to) in enumerate(loops) if to < 0]
    first = move.source_offset + sum((count - 1) * to for count, _, to in loops if to < 0)
    flat = buffer.as_strided((buffer.numel(),), (1,))
    counts = [count for count, _, _ in loops]
    place = flat.as_strided(counts, [abs(to) for _, _, to in loops], flat.storage_offset() + first)
    compat.copy_(place, value.flip(backwards) if backwards else value)


def _spans(move: Move, itemsize: int) -> Iterator[Move]:
    """The move in parts between whose first and last element in the file there is no more than a buffer takes."""
    if (move.target_stop - move.target_offset) * itemsize <= SPAN_BYTES_MAX:
        yield move
        return
    (count, at, to), *inner = move.loops
    turns = max(1, SPAN_BYTES_MAX // (at * itemsize))
    for turn in range(0, count, turns):
        some = min(turns, count - turn)
        loops = [(some, at, to), *inner] if some > 1 else inner
        part = Move(
            move.source,
            tuple(loop[0] for loop in loops),
            move.target_offset + turn * at,
            tuple(loop[1] for loop in loops),
            move.source_offset + turn * to,
            tuple(loop[2] for loop in loops),
        )
        yield from _spans(part, itemsize)


def copy_region(tensor: torch.Tensor, transfer: Transfer, value: torch.Tensor) -> None:
    """Copy ``value``, of the region's shape, into a destination, converting the dtype if needed."""
    with torch.no_grad():
        compat.copy_(part_of(tensor, transfer.region, transfer.dest_box), value)
