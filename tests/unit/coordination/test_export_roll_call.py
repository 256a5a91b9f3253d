"""Whoever is to blame for a failed exchange is named alike by everyone who can still speak."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.votes import Answer, RollCall, blame, meet
from holdfast.errors import ConfigError, DeadlineExceeded, SaveFailed

OWN = RankFailure.of(ConfigError("its memory is too short", field="w"), rank=2)


@pytest.mark.parametrize(
    ("answers", "rank", "kind", "text"),
    [
        # It says itself that it failed; that others noticed is its doing.
        (
            [Answer(0, 7, waited_for=2, detail="closed"), Answer(1, 3, waited_for=0), Answer(2, 1, own=OWN)],
            2,
            ConfigError,
            "too short",
        ),
        # Silent, and the connection to it ended.
        ([Answer(0, 7, waited_for=1, detail="reset"), Answer(2, 8)], 1, SaveFailed, r"rank 1 ended.*\(reset\)"),
        # Silent, and somebody waited for it; another waited for who waited.
        (
            [Answer(0, 7, waited_for=1, late_s=5.0), Answer(2, 6, waited_for=0, late_s=5.0)],
            1,
            DeadlineExceeded,
            "rank 1 did not answer for 5 s",
        ),
        # Several are gone: on one machine, perhaps.
        ([Answer(0, 7, waited_for=2)], 1, SaveFailed, "ranks 1, 2 ended"),
        # All answer: the first who had to wait knows best.
        (
            [
                Answer(0, 9, waited_for=1, late_s=4.0),
                Answer(1, 2, waited_for=2, late_s=4.5),
                Answer(2, 9, waited_for=0),
            ],
            2,
            DeadlineExceeded,
            r"rank 2 did not answer for 4\.5 s",
        ),
    ],
)
def test_blame(answers: list[Answer], rank: int, kind: type, text: str) -> None:
    reason = blame(answers, 3)
    assert reason.rank == rank
    with pytest.raises(kind, match=text):
        raise reason.cause()


def settled(answers: dict[int, Answer], done: set[int], world: int) -> list[str]:
    boards = LocalBoard.of_world(world)
    for rank in done:
        RollCall(boards[rank], "key").say_done()

    def act(rank: int) -> str:
        return str(RollCall(boards[rank], "key", grace_s=0.3).settle(answers[rank]))

    with ThreadPoolExecutor(len(answers)) as pool:
        texts = list(pool.map(act, answers))
    assert RollCall(boards[0], "key").is_stopped()
    RollCall(boards[0], "key").forget()
    assert boards[0].keys() == []
    return texts


def test_all_raise_the_same_and_those_who_were_done_are_not_to_blame() -> None:
    answers = {0: Answer(0, 4, waited_for=3, late_s=2.0), 2: Answer(2, 3, waited_for=0)}
    texts = settled(answers, {1}, 4)
    assert len(set(texts)) == 1
    assert "rank 3 did not answer for 2 s" in texts[0]


def test_without_rank_zero_the_first_to_give_it_up_decides() -> None:
    answers = {1: Answer(1, 4, waited_for=0, detail="closed"), 2: Answer(2, 3, waited_for=0, detail="closed")}
    texts = settled(answers, set(), 3)
    assert len(set(texts)) == 1
    assert "rank 0 ended" in texts[0]


# meeting -----------------------------------------------------------------------------------------------------------


def met(world: int, coming: set[int], **options: Any) -> list[Any]:
    boards = LocalBoard.of_world(world)

    def act(rank: int) -> Any:
        try:
            return meet(boards[rank], "place", **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(act, sorted(coming)))


def test_ranks_meet() -> None:
    assert met(4, {0, 1, 2, 3}, timeout_s=20.0) == [None] * 4


def test_who_does_not_come_is_named_by_all() -> None:
    ends = met(4, {0, 2}, timeout_s=0.3)
    assert [str(end) for end in ends] == [str(ends[0])] * 2
    assert isinstance(ends[0], DeadlineExceeded)
    assert ends[0].waited_for == "ranks 1, 3"
    (alone,) = met(2, {0}, timeout_s=0.2)
    assert alone.waited_for == "rank 1"


def test_a_meeting_ends_when_the_attempt_is_given_up() -> None:
    began = time.monotonic()
    ends = met(3, {0, 1}, timeout_s=30.0, given_up=lambda: OWN)
    assert [str(end) for end in ends] == ["its memory is too short"] * 2
    assert time.monotonic() - began < 10.0
