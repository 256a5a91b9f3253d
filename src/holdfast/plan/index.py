"""From a rank's plan to the index that its report carries: pure, torch-free.

Guarantees: entries stand in the order of the plan, which is the order of the report's tensor checksums; the same plan
gives the same bytes, so an index is rendered once a plan.
"""

from __future__ import annotations

from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from holdfast.format.manifest import IndexObject, IndexTensor, RankIndex

if TYPE_CHECKING:
    from holdfast.plan.write import RankPlan

# What an index says of each, under the same names in the plan. Taken at once, not one by one: there may be very many.
_tensor_row: Final = attrgetter(*IndexTensor.__struct_fields__)
_object_row: Final = attrgetter(*IndexObject.__struct_fields__)


def index_of(rank_plan: RankPlan) -> RankIndex:
    """What lies where in the files of ``rank_plan``; ``file`` indexes them in the plan's order."""
    return RankIndex(
        tensors=tuple(starmap(IndexTensor, map(_tensor_row, rank_plan.tensors))),
        objects=tuple(starmap(IndexObject, map(_object_row, rank_plan.objects))),
    )
