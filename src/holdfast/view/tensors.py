"""One checkpoint in columns: what a page needs of a hundred thousand tensors, small and quick to decode. Torch-free.

    files     [name, bytes, rank]           rank: who wrote it, or None
    objects   [name, file, offset, bytes]   file: a number in ``files``, as everywhere
    extra     [name, bytes]                 small files that the manifest lists
    dtypes    [name, bytes of an element];  shapes [[...]];  boxes [offsets, sizes]: each once
    tensors   names, and for each the numbers of its dtype and shape, and how many shards it has
    shards    for each in that order the numbers of its box and file, its offset in that; and checksums, 8 bytes each

Guarantees: reads the manifest and the reports, checked against their digests, no data; equal checksums of equal boxes
mean equal bytes. Memory for the reports of one rank at a time.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from holdfast.dtypes import ITEMSIZE
from holdfast.format.manifest import SUM_BYTES
from holdfast.loader.sources.holdfast import HoldfastSource
from holdfast.loader.sources.open import open_source
from holdfast.state.gc_pause import gc_paused

if TYPE_CHECKING:
    from collections.abc import Hashable

    from holdfast.loader.sources.holdfast import CheckpointSource


def tensors_of(path: str) -> dict[str, Any]:
    """Return the columns of the checkpoint at ``path``. Raises as `open_source`, and as reading its reports."""
    source = open_source(path, exports=False)
    with gc_paused():
        columns = _Columns()
        if isinstance(source, HoldfastSource) and not source.manifest.chain:
            _add_reports(source, columns)
        else:
            _add_listed(source, columns)
        return columns.document(source)


class _Numbers:
    """Numbers distinct values in the order in which they come."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        return self._known.setdefault(value, len(self._known))

    def values(self) -> list[Any]:
        return list(self._known)


class _Columns:
    """Collects shards, in any order, and writes them tensor by tensor."""

    def __init__(self) -> None:
        self.files: list[tuple[str, int, int | None]] = []
        self.objects: list[tuple[str, int, int, int]] = []
        self.dtypes, self.shapes, self.boxes = _Numbers(), _Numbers(), _Numbers()
        self.kinds: dict[str, tuple[int, int]] = {}
        """Number of the dtype and of the shape of each tensor."""
        self.shards: dict[str, list[tuple[int, int, int, bytes]]] = {}
        """Box, file, offset and checksum of each of its shards."""
        self.summed = True

    def document(self, source: CheckpointSource) -> dict[str, Any]:
        names = sorted(self.kinds)
        # Replicas of one box may each have been stored; the picture shows all, in the order of ranks.
        shards = [shard for name in names for shard in sorted(self.shards[name])]
        manifest = source.manifest
        return {
            "path": source.directory,
            "step": source.step,
            "world": source.world,
            "attempt": None if manifest is None else manifest.attempt,
            "extra": [] if manifest is None else [[file.name, file.size] for file in manifest.files],
            "files": self.files,
            "objects": sorted(self.objects),
            "dtypes": [[name, ITEMSIZE.get(name, 1)] for name in self.dtypes.values()],
            "shapes": self.shapes.values(),
            "boxes": self.boxes.values(),
            "tensors": {
                "name": names,
                "dtype": [self.kinds[name][0] for name in names],
                "shape": [self.kinds[name][1] for name in names],
                "shards": [len(self.shards[name]) for name in names],
            },
            "shards": {
                "box": [shard[0] for shard in shards],
                "file": [shard[1] for shard in shards],
                "at": [shard[2] for shard in shards],
                "sums": base64.b64encode(b"".join(shard[3] for shard in shards)).decode() if self.summed else None,
            },
        }


def _add_reports(source: HoldfastSource, columns: _Columns) -> None:
    for rank in range(source.manifest.world):
        report, index = source.report_of(rank)
        first = len(columns.files)
        columns.files += [(file.name, file.size, rank) for file in report.files]
        columns.objects += [(row.name, first + row.file, row.offset, row.capacity) for row in index.objects]
        sums, kinds, shards = report.tensor_sums, columns.kinds, columns.shards
        dtype_of, shape_of, box_of = columns.dtypes.of, columns.shapes.of, columns.boxes.of
        for number, row in enumerate(index.tensors):
            name = row.name
            if name not in kinds:
                kinds[name] = (dtype_of(row.dtype), shape_of(row.shape))
                shards[name] = []
            at = number * SUM_BYTES
            box = box_of((row.offsets, row.sizes))
            shards[name].append((box, first + row.file, row.payload_offset, sums[at : at + SUM_BYTES]))


def _add_listed(source: CheckpointSource, columns: _Columns) -> None:
    """Add what any source lists: of deltas, exports and stock checkpoints, where ranks and checksums aren't told."""
    columns.summed = False
    files = _Numbers()
    for name, tensor in source.tensors.items():
        columns.kinds[name] = (columns.dtypes.of(tensor.dtype), columns.shapes.of(tensor.shape))
        columns.shards[name] = [
            (columns.boxes.of(tuple(shard.box)), files.of(shard.file), shard.payload_offset, b"")
            for shard in tensor.shards
        ]
    columns.objects += [(row.name, files.of(row.file), row.offset, row.nbytes) for row in source.objects.values()]
    sizes = source.files
    columns.files += [(name, sizes[name].size if name in sizes else 0, None) for name in files.values()]
