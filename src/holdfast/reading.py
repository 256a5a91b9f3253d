"""From stored files into tensors: carries out a read plan. See ``plan.read`` for what, ``storage.reading`` for how.

A transfer that is one run of bytes on both sides, into host memory of the stored dtype, is read straight to where it
belongs. Everything else (strided boxes, other dtypes, device memory) passes through a scratch buffer of at most
8 MiB a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, strides
from holdfast.plan.read import Transfer, byte_span, dest_offset, is_direct, row_chunks
from holdfast.state.entries import torch_dtype
from holdfast.storage.reading import FileSet, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.plan.read import ReadPlan
    from holdfast.source import RecordReader, Source

SPAN_BYTES_MAX: Final = 8 << 20


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


def _read_records(files: FileSet, plan: ReadPlan, destinations: Sequence[Destination], records: RecordReader) -> None:
    """Each record is read and decoded once, and copied to all who want of it; transfers come in record order."""
    key: tuple[str, int] | None = None
    value = torch.empty(0)
    for transfer in plan.transfers:
        if key != (transfer.file, transfer.payload_offset):
            key, value = (transfer.file, transfer.payload_offset), records.load(files, transfer)
        part = value
        for dim, (offset, base, size) in enumerate(
            zip(transfer.region.offsets, transfer.stored.offsets, transfer.region.sizes, strict=True)
        ):
            part = part.narrow(dim, offset - base, size)
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
        start, end = byte_span(transfer)
        span = files.read_span(transfer.file, start, end)
        flat = torch.frombuffer(span, dtype=torch.uint8).view(dtype)
        copy_region(
            destination.tensor, transfer, flat.as_strided(transfer.region.sizes, strides(transfer.stored.sizes))
        )

    return job


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
    region = transfer.region
    dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
    size = region.sizes[dim]
    rows = max(1, size * SPAN_BYTES_MAX // (end - start))
    for row in range(0, size, rows):
        part = Box(
            (*region.offsets[:dim], region.offsets[dim] + row, *region.offsets[dim + 1 :]),
            (*region.sizes[:dim], min(rows, size - row), *region.sizes[dim + 1 :]),
        )
        yield from _bounded(transfer._replace(region=part))


def _region_of(tensor: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    view = tensor
    for dim, (offset, base, size) in enumerate(
        zip(transfer.region.offsets, transfer.dest_box.offsets, transfer.region.sizes, strict=True)
    ):
        view = view.narrow(dim, offset - base, size)
    return view


def copy_region(tensor: torch.Tensor, transfer: Transfer, value: torch.Tensor) -> None:
    """Put ``value``, of the region's shape, into its place in a destination, converting the dtype if need be."""
    with torch.no_grad():
        compat.copy_(_region_of(tensor, transfer), value)
