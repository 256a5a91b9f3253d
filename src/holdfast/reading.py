"""From stored files into tensors: carries out a read plan. See ``plan.read`` for what, ``storage.reading`` for how.

`read_boxes` makes the plan as well, for boxes of a few tensors that are wanted in host memory.

A transfer that is one run of bytes on both sides, into host memory of the stored dtype, is read straight to where it
belongs. Everything else (strided boxes, other dtypes, device memory) passes through a scratch buffer of at most
8 MiB a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import Box, strides
from holdfast.export.moves import Move
from holdfast.plan.read import Transfer, Want, byte_span, dest_offset, is_direct, plan_reads, row_chunks
from holdfast.state.entries import torch_dtype
from holdfast.state.structure import part_of
from holdfast.storage.cutting import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.export.refill import MovedPart, MovedTensor
    from holdfast.plan.read import ReadPlan
    from holdfast.source import RecordReader, Source
    from holdfast.storage.reading import FileSet

SPAN_BYTES_MAX: Final = 8 << 20
SMALL_RUN_BYTES: Final = 1 << 10
RUNS_MAX: Final = 4096
"""More runs than this in one span, all of them small, are read with what lies between them: calls cost more."""


@dataclass(slots=True)
class Destination:
    """Local memory to fill: ``tensor`` is plain, of any device, dtype and strides."""

    name: str
    tensor: torch.Tensor
    _bytes: memoryview | None = None

    def host_bytes(self, dtype: torch.dtype) -> memoryview | None:
        """Its memory as bytes, where stored bytes of ``dtype`` may go there as they are; else None."""
        tensor = self.tensor
        if not tensor.is_cpu or tensor.dtype != dtype or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        if self._bytes is None:
            self._bytes = compat.host_memory(tensor)
        return self._bytes


def read_into(files: FileSet, plan: ReadPlan, destinations: Sequence[Destination], source: Source) -> None:
    """Fill ``destinations`` (indexed by `Transfer.dest`) by ``plan``; returns when all is read and verified."""
    if source.records is not None:
        _read_records(files, plan, destinations, source.records)
        return
    work: list[Callable[[], None]] = []
    for name, transfers in plan.by_file().items():
        direct, through = _sort(transfers, destinations, source)
        work.extend(files.jobs_for(name, direct))
        work.extend(
            _through_job(files, chunk, destinations[chunk.dest], source)
            for transfer in through
            for chunk in _bounded(transfer)
        )
    with torch.no_grad():
        files.read(work)


def read_boxes(
    source: Source, wanted: Sequence[tuple[str, Box]], *, into: Sequence[torch.Tensor] | None = None
) -> Sequence[torch.Tensor]:
    """Boxes of tensors that ``source`` has, by name, each verified; every file is opened once.

    into: contiguous host memory of the boxes' shapes and dtypes, undefined if this raises; None for new memory, which
    isn't taken before all files are there, as large as they are said to be. Raises `CheckpointCorrupt`, `StorageError`.
    """
    stored = {name: source.tensors[name] for name, _ in wanted}
    plan = plan_reads([Want(name, box, at, box) for at, (name, box) in enumerate(wanted) if box.volume], stored)
    with source.open_files(verify=True) as files:
        for file in {transfer.file for transfer in plan.transfers}:
            files.require(file)
        if into is None:
            into = [torch.empty(box.sizes, dtype=torch_dtype(stored[name].dtype)) for name, box in wanted]
        read_into(files, plan, [Destination(name, out) for (name, _), out in zip(wanted, into, strict=True)], source)
    events.count("bytes_read", files.bytes_read)
    return into


def _read_records(files: FileSet, plan: ReadPlan, destinations: Sequence[Destination], records: RecordReader) -> None:
    """Each record is read and decoded once, and copied to all who want of it; transfers come in record order."""
    key: tuple[str, int] | None = None
    value = torch.empty(0)
    for transfer in plan.transfers:
        if key != (transfer.file, transfer.payload_offset):
            key, value = (transfer.file, transfer.payload_offset), records.load(files, transfer)
        part = part_of(value, transfer.region, transfer.stored)
        copy_region(destinations[transfer.dest].tensor, transfer, part)


def _sort(
    transfers: Sequence[Transfer], destinations: Sequence[Destination], source: Source
) -> tuple[list[Piece], list[Transfer]]:
    """Pieces to read in place, sorted and without overlap, and the transfers that need a buffer."""
    direct: list[Piece] = []
    through: list[Transfer] = []
    end = 0
    tensors = source.tensors
    for transfer in transfers:
        memory = destinations[transfer.dest].host_bytes(torch_dtype(tensors[transfer.name].dtype))
        start = transfer.payload_offset
        if memory is not None and start >= end and transfer.region == transfer.stored == transfer.dest_box:
            direct.append(Piece(start, memory))  # whole, as nearly all: nothing to be worked out
            end = start + len(memory)
            continue
        start, stop = byte_span(transfer)
        # Two destinations may want the same bytes (tied names): the second takes them through a buffer.
        if memory is None or start < end or not is_direct(transfer):
            through.append(transfer)
            continue
        at = dest_offset(transfer)
        direct.append(Piece(start, memory if len(memory) == stop - start else memory[at : at + stop - start]))
        end = stop
    return direct, through


def _through_job(files: FileSet, transfer: Transfer, destination: Destination, source: Source) -> Callable[[], None]:
    dtype = torch_dtype(source.tensors[transfer.name].dtype)

    def job() -> None:
        start, _ = byte_span(transfer)
        value = read_strided(files, transfer.file, start, dtype, transfer.region.sizes, strides(transfer.stored.sizes))
        copy_region(destination.tensor, transfer, value)

    return job


def read_strided(
    files: FileSet, name: str, start: int, dtype: torch.dtype, counts: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Elements of a file as a tensor of shape ``counts``, ``steps`` elements (> 0) apart in it, from byte ``start`` on.

    Valid until the calling thread's next read; what lies between first and last should be bounded.
    """
    itemsize = dtype.itemsize
    run = 1
    dim = len(counts)
    while dim and (steps[dim - 1] == run or counts[dim - 1] == 1):
        dim -= 1
        run *= counts[dim]
    if _is_scattered(files, name, counts[:dim], steps[:dim], run * itemsize, itemsize):
        starts = [start]
        for count, step in zip(counts[:dim], steps[:dim], strict=True):
            starts = [at + index * step * itemsize for at in starts for index in range(count)]
        gathered = files.read_runs(name, [(at, at + run * itemsize) for at in starts])
        return torch.frombuffer(gathered, dtype=torch.uint8).view(dtype).reshape(tuple(counts))
    last = sum((count - 1) * step for count, step in zip(counts, steps, strict=True))
    span = files.read_span(name, start, start + (last + 1) * itemsize)
    return torch.frombuffer(span, dtype=torch.uint8).view(dtype).as_strided(tuple(counts), tuple(steps))


def _is_scattered(
    files: FileSet, name: str, counts: Sequence[int], steps: Sequence[int], run_bytes: int, itemsize: int
) -> bool:
    """Whether runs are to be read one by one, because of what lies between them."""
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
    for part in _chunks(transfer.region, transfer.itemsize):
        yield transfer._replace(region=part)


# tensors put together by a key map ----------------------------------------------------------------------------


def read_moved(files: FileSet, wanted: Sequence[tuple[MovedTensor, Box, torch.Tensor]]) -> None:
    """Fill each tensor with its box of a `MovedTensor`; returns when all is read."""
    jobs = [
        _moved_job(files, moved, chunk, part_of(tensor, chunk, box))
        for moved, box, tensor in wanted
        for chunk in _chunks(box, tensor.dtype.itemsize)
    ]
    with torch.no_grad():
        files.read(jobs)


def _moved_job(files: FileSet, moved: MovedTensor, box: Box, tensor: torch.Tensor) -> Callable[[], None]:
    def job() -> None:
        in_place = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        buffer = tensor if in_place else torch.empty(box.sizes, dtype=tensor.dtype)
        if not in_place and not moved.is_whole:
            compat.copy_(buffer, tensor)  # what isn't stored is to be what it was
        for part in moved.within(box):
            for move in _spans(part.move, torch_dtype(part.dtype).itemsize):
                _read_move(files, part._replace(move=move), buffer)
        if not in_place:
            compat.copy_(tensor, buffer)

    return job


def _read_move(files: FileSet, part: MovedPart, buffer: torch.Tensor) -> None:
    """Read the elements of one loop nest into their places in ``buffer``, which is contiguous."""
    move, dtype = part.move, torch_dtype(part.dtype)
    # One element that became several is among them only once.
    loops = [(count, at, to) for count, at, to in move.loops if to]
    counts = [count for count, _, _ in loops]
    start = part.start + move.target_offset * dtype.itemsize
    value = read_strided(files, part.file, start, dtype, counts, [at for _, at, _ in loops])
    backwards = [dim for dim, (_, _, to) in enumerate(loops) if to < 0]
    first = move.source_offset + sum((count - 1) * to for count, _, to in loops if to < 0)
    flat = buffer.as_strided((buffer.numel(),), (1,))
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


def _chunks(box: Box, itemsize: int) -> Iterator[Box]:
    """``box`` in parts of whole rows that a buffer takes."""
    if box.volume * itemsize <= SPAN_BYTES_MAX:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[dim]
    rows = max(1, size * SPAN_BYTES_MAX // (box.volume * itemsize))
    for row in range(0, size, rows):
        part = Box(
            (*box.offsets[:dim], box.offsets[dim] + row, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], min(rows, size - row), *box.sizes[dim + 1 :]),
        )
        yield from _chunks(part, itemsize)


def _region_of(tensor: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    return part_of(tensor, transfer.region, transfer.dest_box)


def copy_region(tensor: torch.Tensor, transfer: Transfer, value: torch.Tensor) -> None:
    """Put ``value``, of the region's shape, into its place in a destination, converting the dtype if need be."""
    with torch.no_grad():
        compat.copy_(_region_of(tensor, transfer), value)
