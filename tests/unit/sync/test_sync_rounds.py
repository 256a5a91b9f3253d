"""What publisher ranks tell one another: all stay in the same rounds, whatever goes wrong on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import RankFailure
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.sync.weights.agreed import RankSpec, SpecExchange
from holdfast.sync.weights.pieces import WeightsSpec

TIMEOUT_S = 120.0
WORLD = 3


class Ranks:
    """Ranks that publish together, each on a thread of its own. Their weights have ``size`` elements."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.boards = LocalBoard.of_world(WORLD)
        self._ends = [SpecExchange(board) for board in self.boards]
        self._pool = pool

    def publish(
        self, rank: int, version: int, *, timeout_s: float = TIMEOUT_S, size: int = 1
    ) -> Future[list[RankSpec]]:
        look = WeightsSpec({"a": torch.zeros(size)}, rank=rank, group_ranks=range(WORLD))
        mine = RankSpec(rank, version, look.digest, look.encoded)
        return self._pool.submit(self._ends[rank].exchange, mine, Deadline.after(timeout_s))

    def fail(self, rank: int, version: int) -> None:
        error = ConfigError("no tensor", field="weights")
        self._ends[rank].fail(RankSpec(rank, version, "", failure=RankFailure.of(error, rank=rank)))

    def all_publish(self, version: int, sizes: tuple[int, ...] = (1,) * WORLD) -> None:
        """And each knows afterwards what all of them have."""
        pending = [self.publish(rank, version, size=size) for rank, size in enumerate(sizes)]
        for end, said in zip(self._ends, [it.result(TIMEOUT_S) for it in pending], strict=True):
            assert [(look.rank, look.version) for look in said] == [(rank, version) for rank in range(WORLD)]
            shapes = [end.structures[look.digest].tensors[0].shape for look in said]
            assert [shape[0] for shape in shapes] == list(sizes)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ThreadPoolExecutor(WORLD) as pool:
        yield Ranks(pool)


def test_ranks_hear_of_one_another_and_leave_nothing_behind(ranks: Ranks) -> None:
    for version in range(5):
        ranks.all_publish(version, (1, 2 + version // 2, 2))
        assert len(ranks.boards[0].keys()) <= 2


def test_a_rank_that_has_no_weights_ends_it_for_all_at_once(ranks: Ranks) -> None:
    others = [ranks.publish(rank, 1, size=7) for rank in (0, 2)]
    ranks.fail(1, 1)
    for other in others:
        with pytest.raises(ConfigError, match="no tensor"):
            other.result(TIMEOUT_S)
    ranks.all_publish(1, (7, 7, 7))


def test_who_comes_too_late_goes_on_to_the_round_that_is_next(ranks: Ranks) -> None:
    waiting = [ranks.publish(0, 1, timeout_s=0.2, size=2), ranks.publish(1, 1, size=3)]
    for rank in waiting:  # the second could wait longer, but what for
        with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 2 of 3 had not published this version within 0\.2 s"):
            rank.result(TIMEOUT_S)
    ranks.all_publish(1, (2, 3, 4))
    with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 1, 2 of 3"):
        ranks.publish(0, 2, timeout_s=0.1, size=5).result(TIMEOUT_S)
    ranks.fail(1, 2)  # all that waited know that it failed, so it says no more
    ranks.all_publish(3, (5, 6, 2))
    ranks.all_publish(4, (5, 6, 2))
    assert len(ranks.boards[0].keys()) <= 2


def test_ranks_that_publish_different_versions_are_told(ranks: Ranks) -> None:
    pending = [ranks.publish(rank, version) for rank, version in enumerate((3, 3, 4))]
    for rank in pending:
        with pytest.raises(ConfigError, match="rank 0 publishes version 3, but rank 2 version 4"):
            rank.result(TIMEOUT_S)
    ranks.all_publish(5)


@pytest.mark.parametrize("failing", range(WORLD))
def test_who_could_not_publish_hears_next_time_what_it_has_missed(ranks: Ranks, failing: int) -> None:
    ranks.fail(failing, 1)
    others = [ranks.publish(rank, 1, size=7 + rank) for rank in range(WORLD) if rank != failing]
    for other in others:
        with pytest.raises(ConfigError, match="no tensor"):
            other.result(TIMEOUT_S)
    ranks.all_publish(1, (7, 8, 9))
