"""A round ends once, alike for every rank: in an answer, or in an error that names who was silent."""

from __future__ import annotations

import threading
import time

import pytest
from _protocol import run_ranks

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Round, Rounds
from holdfast.coordination.votes import Votes
from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError

SOON_S = 30.0


def together(words):
    return b",".join(words)


def in_round(rounds, words, *, timeout_s=SOON_S, **options):
    """What each rank of ``words`` gets, a thread each."""

    def act(rank):
        if words[rank] is None:
            return None
        found = rounds[rank].next()
        found.say(words[rank])
        return found.wait(together, timeout_s=timeout_s, **options)

    return run_ranks(act, len(words))


def test_all_get_what_rank_0_makes_of_all_words_in_rank_order():
    rounds = [Rounds(board, "r") for board in LocalBoard.of_world(3)]
    for number in range(4):
        words = [b"%d.%d" % (number, rank) for rank in range(3)]
        assert in_round(rounds, words) == [b",".join(words)] * 3


@pytest.mark.parametrize("silent", [[1], [2, 3], [0], [0, 2]])
def test_silent_ranks_are_named_alike_by_all_that_speak(silent):
    boards = LocalBoard.of_world(4)
    rounds = [Rounds(board, "r", had_not="called that") for board in boards]
    words = [None if rank in silent else b"x" for rank in range(4)]
    found = in_round(rounds, words, timeout_s=0.4, grace_s=0.2)
    ends = [end for end, word in zip(found, words, strict=True) if word is not None]
    assert len({(end.rank, end.message) for end in ends}) == 1
    error = ends[0].cause()
    assert isinstance(error, DeadlineExceeded)
    shown = ", ".join(map(str, silent))
    assert error.waited_for == f"rank(s) {shown}"
    assert str(error).startswith(f"rank(s) {shown} of 4 had not called that within 0.")


def test_rank_0_raises_what_the_others_have_raised_when_it_comes_too_late():
    boards = LocalBoard.of_world(2)
    rounds = [Rounds(board, "r") for board in boards]
    (_, told) = in_round(rounds, [None, b"x"], timeout_s=0.1, grace_s=0.0)
    first = rounds[0].next()
    first.say(b"y")
    assert first.wait(together, timeout_s=SOON_S) == told
    assert "rank(s) 0 of 2" in told.message


def test_rank_0_is_named_where_all_have_spoken_and_it_does_not_answer():
    boards = LocalBoard.of_world(2)
    Round(boards[0], "r").say(b"x")
    other = Round(boards[1], "r", had_not="spoken")
    other.say(b"y")
    found = other.wait(together, timeout_s=0.05, grace_s=0.05)
    assert "rank(s) 0 of 2 had not answered within 0.1 s" in found.message


def test_a_rank_that_speaks_twice_is_not_taken_for_two():
    boards = LocalBoard.of_world(3)
    rounds = [Round(board, "r") for board in boards]
    rounds[0].say(b"a")
    rounds[1].say(b"b")
    rounds[1].say(b"c")
    later = threading.Timer(0.2, rounds[2].say, (b"d",))
    later.start()
    found = rounds[0].gather(timeout_s=SOON_S)
    later.join()
    assert found[0] == b"a"
    assert found[1] in (b"b", b"c")
    assert found[2] == b"d"


def test_a_word_that_comes_with_the_deadline_counts(monkeypatch):
    board = LocalBoard.of_world(2)
    late = Round(board[1], "r")

    def wait(*_, **__):
        late.say(b"b")
        raise DeadlineExceeded("over", waited_for="it", timeout_s=1.0)

    monkeypatch.setattr(board[0], "wait_entries", wait)
    Round(board[0], "r").say(b"a")
    assert Round(board[0], "r").gather(timeout_s=0.1) == [b"a", b"b"]


@pytest.mark.parametrize("breaking", [0, 1])
def test_a_rank_that_is_interrupted_ends_the_round_for_all(breaking):
    boards = LocalBoard.of_world(3)
    rounds = [Round(board, "r") for board in boards]

    def interrupt():
        raise KeyboardInterrupt

    def act(rank):
        if rank == 2:
            time.sleep(0.3)
            return None
        rounds[rank].say()
        given_up = interrupt if rank == breaking else None
        try:
            return rounds[rank].wait(together, timeout_s=SOON_S, given_up=given_up, watch=True)
        except KeyboardInterrupt:
            return None

    began = time.monotonic()
    found = run_ranks(act, 3)
    assert time.monotonic() - began < SOON_S / 2
    assert "KeyboardInterrupt" in found[1 - breaking].message


def test_what_rank_0_can_not_decide_fails_on_all():
    boards = LocalBoard.of_world(2)

    def refuse(_):
        raise ConfigError("not that", field="w")

    def act(rank):
        Round(boards[rank], "r").say()
        return Round(boards[rank], "r").wait(refuse, timeout_s=SOON_S)

    first, other = run_ranks(act, 2)
    assert isinstance(first, ConfigError)
    assert isinstance(other, RankFailure)
    assert isinstance(other.cause(), ConfigError)


@pytest.mark.parametrize("failed", [None, 2, 5])
def test_nothing_but_the_last_round_is_kept_and_nothing_once_all_have_left(failed):
    boards = LocalBoard.of_world(3)
    rounds = [Rounds(board, "r") for board in boards]
    for number in range(6):
        silent = number == failed
        in_round(rounds, [b"x", None if silent else b"y", b"z"], timeout_s=0.1 if silent else SOON_S, grace_s=0.1)
        if silent:
            rounds[1].next()
        elif number - 1 != failed:
            assert len(boards[0].keys()) <= 2
    run_ranks(lambda rank: rounds[rank].leave(), 3)
    assert boards[0].keys() == []


def test_rounds_that_failed_before_a_rank_came_to_them_can_be_passed_over():
    rounds = [Rounds(board, "r") for board in LocalBoard.of_world(2)]
    for _ in range(2):
        in_round(rounds, [b"x", None], timeout_s=0.01)
    assert rounds[1].skip_failed() == 2
    assert rounds[1].skip_failed() == 0
    assert in_round(rounds, [b"x", b"y"]) == [b"x,y"] * 2


# Votes ---------------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_vote_is_named():
    boards = LocalBoard.of_world(3)
    found = run_ranks(lambda rank: rank == 1 or Votes(boards[rank]).raise_together(timeout_s=0.2), 3)
    assert [str(found[0])] == [str(found[2])]
    assert isinstance(found[0], DeadlineExceeded)
    assert "rank(s) 1 of 3" in str(found[0])


def test_the_error_of_a_rank_counts_more_than_the_silence_of_another():
    boards = LocalBoard.of_world(3)

    def act(rank):
        error = ConfigError("no such key", field="k") if rank == 2 else None
        return rank == 1 or Votes(boards[rank]).raise_together(error, timeout_s=0.2)

    found = run_ranks(act, 3)
    assert [type(found[0]), type(found[2])] == [ConfigError, ConfigError]
    assert str(found[0]) == "on rank 2: no such key"


def test_all_raise_what_rank_0_can_not_decide():
    boards = LocalBoard.of_world(2)

    def refuse():
        raise HoldfastError("nothing there")

    found = run_ranks(lambda rank: Votes(boards[rank]).decide(refuse, timeout_s=SOON_S), 2)
    assert [str(error) for error in found] == ["nothing there"] * 2


def test_rank_0_does_not_go_on_alone_where_nobody_waits_for_its_decision_any_more():
    boards = LocalBoard.of_world(2)
    with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 0 of 2"):
        Votes(boards[1]).decide(lambda: b"", timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 0 of 2"):
        Votes(boards[0]).decide(lambda: b"x", timeout_s=SOON_S)
