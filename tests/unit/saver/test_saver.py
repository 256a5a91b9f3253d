"""The saving pipeline of two ranks in one process: what fails on one fails on both, and the next save works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.config import CheckpointConfig
from holdfast.coordination.board import LocalBoard
from holdfast.coordination.group import Group
from holdfast.errors import ConfigError, DeadlineExceeded, SaveFailed, StateChangedWhileStaging
from holdfast.format.structure import PER_RANK
from holdfast.saver.checkpointer import SaveRequest
from holdfast.saver.handle import SaveHandle
from holdfast.saver.saver import Saver
from holdfast.state.entries import PerRank
from holdfast.state.tree import StateTree
from holdfast.storage.local import LocalStorage
from holdfast.testing.staging import Gate, held_copies


class Job:
    """Two ranks, each with a saver and a state of its own."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        config = CheckpointConfig(
            **{"keep": None, "stage_timeout": 20.0, "persist_timeout": 20.0, "commit_timeout": 20.0, **options}
        )
        self.boards = LocalBoard.of_world(2)
        self.states: list[dict[str, Any]] = [
            {"shared": torch.arange(64.0), "own": PerRank(torch.full((32, 32), float(rank)))} for rank in range(2)
        ]
        self.trees = [StateTree(state, rank=rank, world=2) for rank, state in enumerate(self.states)]
        self.savers = [
            Saver(LocalStorage(str(root)), Group(rank, 2, (0, 1), board), config)
            for rank, board in enumerate(self.boards)
        ]

    def start(self, rank: int, step: int, *, name: str | None = None) -> SaveHandle:
        saver, request = self.savers[rank], SaveRequest(step, name or f"step-{step}", {}, True, overwrite=False)
        checkpoint = saver.checkpoint(request)
        saver.start(self.trees[rank], [checkpoint], step=step)
        return checkpoint.handle

    def save(self, step: int) -> list[SaveHandle]:
        return [self.start(rank, step) for rank in range(2)]

    def check(self, step: int) -> None:
        """Check that both ranks publish ``step``, with the right contents."""
        handles = self.save(step)
        for saver in self.savers:
            saver.before_update()
        checkpoints = [handle.result(30) for handle in handles]
        assert [checkpoint.step for checkpoint in checkpoints] == [step, step]
        checkpoint = holdfast.open(self.root / f"step-{step}")
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint.read("shared"), self.states[0]["shared"])
        for rank in range(2):
            name = next(name for name in checkpoint.tensors if name.startswith("own.") and name.endswith(str(rank)))
            assert checkpoint.read(name).unique().tolist() == [rank]

    def close(self) -> None:
        threads = [threading.Thread(target=saver.close, args=(30.0,)) for saver in self.savers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with held_copies(opens_for_updates=False) as gate:
        gate.open()
        yield gate


def fail_once(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    error: BaseException,
    *,
    after: bool = False,
    times: int = 1,
) -> None:
    """Make calls of ``owner``'s method raise ``times`` times; after: once they have done their work."""
    original: Callable[..., Any] = getattr(owner, method)
    left = [error] * times

    def fail(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if after or not left else None
        if left:
            raise left.pop()
        return result

    monkeypatch.setattr(owner, method, fail)


def test_two_ranks_save_together(job: Job) -> None:
    assert PER_RANK not in job.states[0]
    for step in range(1, 4):
        job.check(step)


@pytest.mark.parametrize("first", [False, True], ids=["same plan", "new plan"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["_copy", "_new_plan", "_make_buffer"])
def test_a_staging_failure_on_one_rank_fails_only_that_save_on_all(
    method: str, rank: int, first: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not first:
        job.check(1)
    if method != "_copy":
        for state in job.states:  # a structure that nobody has planned for
            state["grown"] = torch.zeros(7)
    fail_once(monkeypatch, job.savers[rank]._stager, method, MemoryError("no memory for it"))
    errors = [handle.exception(30) for handle in job.save(2)]
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert (error.step, error.rank) == (2, rank)
        assert "no memory for it" in str(error)
    assert str(errors[0]) == str(errors[1])
    for step in (3, 4):
        job.check(step)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["looking at the target", "casting", "having cast"])
def test_a_failure_before_the_proposal_fails_only_that_save_on_all(
    what: str, rank: int, planned: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any failure: the others wait for its proposal, and would otherwise stay one save ahead of it."""
    if planned:
        job.check(1)
    saver, error = job.savers[rank], ZeroDivisionError("a defect that nobody thought of")
    if what == "looking at the target":
        fail_once(monkeypatch, saver._checkpointer, "check_target", error)
    else:
        fail_once(monkeypatch, saver._stager._agreement.board, "append", error, after=what == "having cast")
    began = time.monotonic()
    errors = [handle.exception(30) for handle in job.save(2)]
    assert time.monotonic() - began < 10
    if what == "having cast" and errors == [None, None]:
        errors.clear()  # its ballot had been counted by the time it refused
    for told in errors:
        assert isinstance(told, SaveFailed)
        assert (told.step, told.rank) == (2, rank)
        assert "a defect that nobody thought of" in str(told)
    for step in (3, 4):
        job.check(step)


def test_a_refusal_that_fails_to_post_is_retried(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.check(1)
    job.states[1]["bad"] = object()
    fail_once(monkeypatch, job.savers[1]._stager._agreement.board, "append", ZeroDivisionError("a defect"))
    other = job.start(0, 2)
    with pytest.raises(ConfigError, match="bad"):
        job.start(1, 2)
    with pytest.raises(ConfigError, match="bad"):
        other.result(30)
    del job.states[1]["bad"]
    job.check(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_post_times_out(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, stage_timeout=1.0)
    fail_once(monkeypatch, job.savers[rank]._stager._agreement.board, "append", ZeroDivisionError("a defect"), times=2)
    for told in [handle.exception(30) for handle in job.save(2)]:
        assert isinstance(told, SaveFailed)
        assert f"rank(s) {rank} of 2 had not called this save" in str(told)
    job.check(3)
    job.close()


def test_a_refusal_reaches_the_other_rank(job: Job) -> None:
    job.check(1)
    job.states[1]["bad"] = object()
    other = job.start(0, 2)
    with pytest.raises(ConfigError, match="bad"):
        job.start(1, 2)
    with pytest.raises(ConfigError, match="bad"):
        other.result(30)
    del job.states[1]["bad"]
    job.check(3)


def test_ranks_that_disagree_on_the_step_are_refused(job: Job) -> None:
    handles = [job.start(0, 2), job.start(1, 3)]
    for handle in handles:
        with pytest.raises(ConfigError, match=r"rank 0 said step 2 .* rank 1 said step 3"):
            handle.result(30)
    job.check(4)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, stage_timeout=0.5, commit_timeout=1.0)
    job.check(1)
    error = job.start(0, 2).exception(30)
    assert isinstance(error, SaveFailed)
    assert isinstance(error.__cause__, DeadlineExceeded)
    assert "rank(s) 1 of 2 had not called this save" in str(error)
    late = job.start(1, 2).exception(30)
    assert isinstance(late, SaveFailed)
    assert "rank(s) 1 of 2 had not called this save" in str(late)
    job.check(3)
    job.close()


def test_a_state_that_changed_on_one_rank_fails_the_save_on_both(job: Job, gate: Gate) -> None:
    models = [torch.nn.Linear(4, 4, bias=False) for _ in job.states]
    models[1].load_state_dict(models[0].state_dict())
    for state, model in zip(job.states, models, strict=True):
        state["model"] = model
    job.check(1)
    gate.close()
    handles = job.save(2)
    models[1].weight.data.add_(1)
    gate.open()
    for handle in handles:
        error = handle.exception(30)
        assert isinstance(error, StateChangedWhileStaging)
        assert (error.tensor, error.step) == ("model.weight", 2)
        assert "rank 1" in str(error)
    models[1].load_state_dict(models[0].state_dict())
    job.check(3)


def test_a_busy_rank_makes_all_skip(tmp_path: Path, gate: Gate) -> None:
    job = Job(tmp_path, in_flight=1, when_busy="skip")
    job.check(1)
    gate.close()
    first = job.save(2)
    second = job.save(3)
    gate.open()
    assert [handle.result(30).step for handle in first] == [2, 2]
    assert [handle.exception(30) is None for handle in second] == [False, False]
    assert [handle.stage for handle in second] == ["skipped", "skipped"]
    job.check(4)
    job.close()


def test_many_saves_leave_a_clean_board(job: Job) -> None:
    for step in range(1, 4):
        job.check(step)
    before = len(job.boards[0].keys())
    for step in range(4, 24):
        job.check(step)
    assert len(job.boards[0].keys()) <= before + 2
