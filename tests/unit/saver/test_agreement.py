"""Proposals, decisions and votes among ranks that are threads of this process."""

from __future__ import annotations

import pickle
import time

import pytest
from _protocol import run_ranks

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.votes import Votes
from holdfast.errors import DeadlineExceeded, SaveFailed
from holdfast.format.structure import Structure, digest_of, encode_structure
from holdfast.saver.agreement import Agreement, PlanProposal

SOON_S = 30.0
ENCODED = encode_structure(Structure((), (), ()))
DIGEST = digest_of(ENCODED)


def agree(agreement, step, *, timeout_s=SOON_S):
    agreement.cast(PlanProposal(step, "/root", DIGEST), ENCODED)
    return agreement.wait_verdict(timeout_s=timeout_s)


def agreements(world):
    return [Agreement(board) for board in LocalBoard.of_world(world)]


def test_a_structure_is_planned_once():
    ranks = agreements(3)
    for step, kind in ((1, "replan"), (2, "same"), (3, "same")):
        verdicts = run_ranks(lambda rank, step=step: agree(ranks[rank], step), 3)
        assert [verdict.kind for verdict in verdicts] == [kind] * 3
        assert len(set(verdicts)) == 1


def test_a_missing_rank_is_named():
    ranks = agreements(3)
    verdicts = run_ranks(lambda rank: agree(ranks[rank], 1, timeout_s=2.0) if rank != 1 else None, 3)
    assert verdicts[0] == verdicts[2]
    error = verdicts[0].refusal.error(step=1)
    assert isinstance(error, SaveFailed)
    assert isinstance(error.cause, DeadlineExceeded)
    assert isinstance(pickle.loads(pickle.dumps(error)).cause, DeadlineExceeded)
    assert "rank(s) 1 of 3 had not called this save" in str(error)


def test_messages_name_what_was_to_be_agreed_on():
    ranks = [Agreement(board, "export") for board in LocalBoard.of_world(2)]
    verdict = run_ranks(lambda rank: agree(ranks[rank], None, timeout_s=0.2) if rank == 0 else None, 2)[0]
    assert "rank(s) 1 of 2 had not called this export" in str(verdict.refusal.cause())
    failed = verdict.refusal.error(step=None, what="export")
    assert str(failed).startswith("the export failed on rank 0: ")
    assert str(failed).endswith("earlier exports are as they were")

    def cast(rank):
        ranks[rank].cast(PlanProposal(None, f"/root/{rank}", DIGEST), ENCODED)
        return ranks[rank].wait_verdict(timeout_s=SOON_S)

    ranks = [Agreement(board, "export") for board in LocalBoard.of_world(2)]
    message = str(run_ranks(cast, 2)[0].refusal.cause())
    assert "what to export: rank 0 said /root/0, rank 1 said /root/1; call export with" in message


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("before", [0, 2])
def test_a_save_after_a_rank_has_left_is_refused_at_once(leaver, before):
    ranks = agreements(3)
    for step in range(before):
        run_ranks(lambda rank, step=step: agree(ranks[rank], step), 3)
    began = time.monotonic()

    def act(rank):
        if rank == leaver:
            return ranks[rank].leave()
        # Nor does it wait another time.
        return [agree(ranks[rank], step, timeout_s=60) for step in (7, 8, 9)]

    verdicts = run_ranks(act, 3)
    assert time.monotonic() - began < SOON_S
    others = [of_rank for rank, of_rank in enumerate(verdicts) if rank != leaver]
    assert others[0] == others[1]
    for verdict in others[0]:
        error = verdict.refusal.error(step=7)
        assert isinstance(error, SaveFailed)
        assert error.rank == leaver
        assert f"rank {leaver} has closed its session" in str(error)


@pytest.mark.parametrize("saves", [0, 1, 3])
def test_nothing_stays_on_the_board_when_all_have_left(saves):
    boards = LocalBoard.of_world(3)
    ranks = [Agreement(board) for board in boards]
    for step in range(saves):
        run_ranks(lambda rank, step=step: agree(ranks[rank], step), 3)
    run_ranks(lambda rank: ranks[rank].leave(), 3)
    assert boards[0].keys() == []


def test_nothing_stays_on_the_board_after_a_refused_first_save():
    """No decision names the structures then, and each rank knows only its own."""
    boards = LocalBoard.of_world(3)
    ranks = [Agreement(board) for board in boards]

    def act(rank):
        ranks[rank].cast(PlanProposal(1, f"/path/{rank}", f"digest-{rank}"), b"structure")
        verdict = ranks[rank].wait_verdict(timeout_s=SOON_S)
        ranks[rank].leave()
        return verdict.kind

    assert run_ranks(act, 3) == ["refused"] * 3
    assert boards[0].keys() == []


def test_leaving_a_lost_board_raises_nothing():
    board = LocalBoard()
    board.close()
    Agreement(board).leave()


@pytest.mark.parametrize("failing", [None, 0, 2])
def test_nothing_stays_of_votes_when_all_have_left(failing):
    boards = LocalBoard.of_world(3)

    def act(rank):
        votes = Votes(boards[rank])
        try:
            votes.raise_together(timeout_s=SOON_S)
            votes.decide(lambda: b"x", timeout_s=SOON_S)
            votes.raise_together(OSError("no") if rank == failing else None, timeout_s=SOON_S)
            votes.decide(lambda: b"y", timeout_s=SOON_S)
        finally:
            votes.leave()
        return rank

    results = run_ranks(act, 3)
    assert results == [0, 1, 2] if failing is None else all(isinstance(result, Exception) for result in results)
    assert boards[0].keys() == []
