"""The rows that ranks post of their plans, the plan that the coordinator makes of them, and its costs."""

from __future__ import annotations

import pytest
from _protocol import run_ranks

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.failure import RankFailure
from holdfast.errors import StateMismatch
from holdfast.format.dcp_metadata import render_metadata
from holdfast.format.structure import (
    PER_RANK,
    MeshLayout,
    ObjectSpec,
    Placement,
    Structure,
    TensorSpec,
    digest_of,
    encode_structure,
)
from holdfast.plan.write import plan_rank, plan_save
from holdfast.saver import agreement as world_plan
from holdfast.saver.agreement import (
    PLANS_KEPT,
    Agreement,
    PlanProposal,
    Whole,
    WorldPlan,
    count_rows,
    planned_key,
    tell_planned,
)

SOON_S = 60.0
WORLD = 4
STRUCTURE = Structure(
    layouts=(MeshLayout((WORLD,), tuple(range(WORLD)), (Placement("shard", 0),)),),
    tensors=(
        TensorSpec("a", ("a",), (7, 3), "float32", 0),
        TensorSpec("b", ("b",), (5,), "int64"),
    ),
    objects=(ObjectSpec("rng.rank-*", ("rng", PER_RANK), 1024), ObjectSpec("step", ("step",), 1024)),
)
STRUCTURES, DIGESTS = {"d": STRUCTURE}, ["d"] * WORLD


def tell(boards, ranks=range(WORLD), number=3):
    for rank in reversed(ranks):
        tell_planned(boards[rank], number, plan_rank(STRUCTURES, DIGESTS, rank))


def test_posted_rows_equal_a_plan_of_all_ranks():
    boards = LocalBoard.of_world(WORLD)
    tell(boards)
    plan = WorldPlan(3, STRUCTURES, DIGESTS)
    whole = plan.complete(boards[0], timeout_s=SOON_S)
    expected = plan_save(STRUCTURES, DIGESTS)
    assert whole == Whole(
        tuple(tuple((file.name, file.size) for file in rank.files) for rank in expected.ranks),
        render_metadata(expected),
    )
    assert boards[0].keys() == []
    assert plan.complete(boards[0], timeout_s=0.0) is whole  # told once a plan, not once a save


def test_in_a_large_world_each_rank_plans_only_for_itself(monkeypatch):
    monkeypatch.setattr(world_plan, "METADATA_ROWS_MAX", count_rows(STRUCTURES, DIGESTS) - 1)
    monkeypatch.setattr(world_plan, "plan_save", None)
    boards = LocalBoard.of_world(WORLD)
    tell(boards)
    whole = WorldPlan(3, STRUCTURES, DIGESTS).complete(boards[0], timeout_s=SOON_S)
    assert isinstance(whole, Whole)
    assert whole.metadata is None
    assert len(whole.planned) == WORLD


def test_rows_are_counted_on_every_rank():
    assert count_rows(STRUCTURES, DIGESTS) == 16
    other = Structure((), STRUCTURE.tensors[1:], ())
    assert count_rows({"d": STRUCTURE, "e": other}, ["d", "e", "e"]) == 6


def test_a_rank_that_cannot_plan_fails_all_with_its_error():
    boards = LocalBoard.of_world(WORLD)
    tell(boards, range(3))
    tell_planned(boards[3], 3, StateMismatch("a is cut differently", mismatched=("a",)))
    reason = WorldPlan(3, STRUCTURES, DIGESTS).complete(boards[0], timeout_s=SOON_S)
    assert isinstance(reason, RankFailure)
    assert reason.rank == 3
    assert isinstance(reason.cause(), StateMismatch)
    assert boards[0].keys() == []


def test_a_late_rank_is_named_and_may_still_post():
    boards = LocalBoard.of_world(WORLD)
    tell(boards, [0, 2, 3])
    plan = WorldPlan(3, STRUCTURES, DIGESTS)
    reason = plan.complete(boards[0], timeout_s=0.05)
    assert isinstance(reason, RankFailure)
    assert "rank(s) 1 of 4 had not planned" in reason.message
    tell(boards, [1])
    assert isinstance(plan.complete(boards[0], timeout_s=SOON_S), Whole)


def test_rendering_the_metadata_is_retried_after_a_failure(monkeypatch):
    boards = LocalBoard.of_world(WORLD)
    tell(boards)
    plan = WorldPlan(3, STRUCTURES, DIGESTS)
    with monkeypatch.context() as patched:
        patched.setattr(world_plan, "plan_save", None)
        with pytest.raises(TypeError):
            plan.complete(boards[0], timeout_s=SOON_S)
    assert isinstance(plan.complete(boards[0], timeout_s=0.0), Whole)


def test_rows_of_old_plans_are_deleted_from_the_board():
    boards = LocalBoard.of_world(2)
    agreements = [Agreement(board) for board in boards]
    encoded = encode_structure(STRUCTURE)
    saves = PLANS_KEPT + 3

    def act(rank):
        for step in range(saves):
            number = agreements[rank].cast(PlanProposal(step, "/root", digest_of(encoded), replan=True), encoded)
            assert agreements[rank].wait_verdict(timeout_s=SOON_S).kind == "replan"
            tell_planned(boards[rank], number, StateMismatch("nobody collects this", mismatched=("a",)))

    assert run_ranks(act, 2) == [None, None]
    kept = {key for key in boards[0].keys() if key.startswith("planned/")}  # noqa: SIM118 - a method of the board
    assert kept >= {planned_key(number) for number in range(saves - PLANS_KEPT, saves)}
    assert len(kept) <= PLANS_KEPT + 1
    run_ranks(lambda rank: agreements[rank].leave(), 2)
    # A delivery may still collect them: a session is left as soon as its last save is staged.
    assert {key for key in boards[0].keys() if key.startswith("planned/")} == kept  # noqa: SIM118
    for agreement in agreements:
        agreement.forget_plans()
    assert boards[0].keys() == []
