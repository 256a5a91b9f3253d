"""A rank's export image, made: scales first, then what the rank has itself, then what others have for it.

Guarantees: ends by ``deadline``, or early where the attempt is given up. Does not: make it durable (the engine does).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from holdfast.errors import DeadlineExceeded
from holdfast.export.fill import fill_local
from holdfast.export.scales import find_scales

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from holdfast.export.exchange import Exchange
    from holdfast.export.rank_plan import RankPlan
    from holdfast.outcome import AbortReason


def make_image(
    plan: RankPlan,
    memories: Sequence[torch.Tensor],
    image: torch.Tensor,
    exchange: Exchange | None,
    *,
    key: str,
    deadline: float,
    given_up: Callable[[], AbortReason | None],
) -> None:
    """Fill ``image`` by ``plan`` from ``memories``; every rank calls it, under the same ``key``.

    deadline: monotonic. given_up: says why the attempt is given up, if it is. Raises what ends it, or
    `DeadlineExceeded`.
    """

    def check() -> None:
        reason = given_up()
        if reason is not None:
            raise reason.cause()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"rank {plan.rank}: an export was not ready to be written in the time that `persist_timeout` allows",
                waited_for="the export image",
                timeout_s=0.0,
            )

    def left_s() -> float:
        return max(1.0, deadline - time.monotonic())

    if exchange is None:
        fill_local(plan, memories, image, scales=find_scales(plan, memories, image, between=check), between=check)
        return
    scales = exchange.find_scales(plan, memories, image, key=key, timeout_s=left_s(), given_up=given_up)
    fill_local(plan, memories, image, scales=scales, between=check)
    exchange.run(plan, memories, image, key=key, timeout_s=left_s(), scales=scales, given_up=given_up)
