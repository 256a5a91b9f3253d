"""From a rank's plan to the index that its report carries: pure, torch-free.

Guarantees: entries stand in the order of the plan, which is the order of the report's tensor checksums; the same plan
gives the same bytes, so an index is rendered once a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.format.manifest import IndexObject, IndexTensor, RankIndex

if TYPE_CHECKING:
    from holdfast.plan.write import RankPlan


def index_of(rank_plan: RankPlan) -> RankIndex:
    """What lies where in the files of ``rank_plan``; ``file`` indexes them in the plan's order."""
    return RankIndex(
        tensors=tuple(
            IndexTensor(
                name=tensor.name,
                path=tensor.path,
                dtype=tensor.dtype,
                shape=tensor.shape,
                offsets=tensor.offsets,
                sizes=tensor.sizes,
                file=tensor.file,
                record_offset=tensor.record_offset,
                payload_offset=tensor.payload_offset,
                nbytes=tensor.nbytes,
                record_end=tensor.record_end,
            )
            for tensor in rank_plan.tensors
        ),
        objects=tuple(
            IndexObject(name=item.name, path=item.path, file=item.file, offset=item.offset, capacity=item.capacity)
            for item in rank_plan.objects
        ),
    )
