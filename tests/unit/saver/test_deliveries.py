"""Deliveries of one capture: the tensors they need are copied, failures stay separate, and the two kinds of leases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_saver import Job, job  # noqa: F401 - a fixture

import holdfast
from holdfast import CheckpointConfig, CheckpointManager
from holdfast.errors import ConfigError, DeadlineExceeded, SaveFailed
from holdfast.saver.capture import AwaitedDelivery, Needs, WorkingLease
from holdfast.saver.checkpointer import SaveRequest
from holdfast.saver.deliverer import Deliverer, DeliveryJob, DeliverySession, RootDeliverer

WAIT_S = 20.0


class Some(AwaitedDelivery):
    """A delivery of the tensors whose names begin with one of ``needed``; of all if that is empty."""

    def __init__(self, *needed: str, target: str = "some") -> None:
        super().__init__()
        self.needed, self.target = needed, target

    def needs(self) -> Needs:
        return (lambda name: name.startswith(self.needed)) if self.needed else None

    def values(self) -> dict[str, float]:
        """The first element of each tensor in the images."""
        assert self.wait(WAIT_S)
        assert self.capture.plan is not None
        assert self.capture.error is None
        return {
            placed.name: self.capture.bytes_of(placed).view(torch.float32)[0].item()
            for placed in self.capture.plan.rank_plan.tensors
            if placed.dtype == "float32"
        }


def managed(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(root, state, config=CheckpointConfig(every=1, stage_timeout=20.0, **options))


def test_a_capture_copies_what_any_of_its_deliveries_needs(tmp_path: Path) -> None:
    state = {key: torch.nn.Parameter(torch.full((300, 300), float(number))) for number, key in enumerate("abc", 1)}
    modules = {key: torch.nn.ParameterList([value]) for key, value in state.items()}
    with managed(tmp_path, modules, keep=None) as manager:
        saver = manager._saver
        assert saver is not None
        first, second = Some("a"), Some("c", target="other")
        saver.start(manager._tree, [first, second], step=1)
        saver.before_update()
        assert first.values() == second.values()
        assert first.values() == {"a.0": 1.0, "b.0": 0.0, "c.0": 3.0}
        first.release()
        second.release()
        whole = Some()
        saver.start(manager._tree, [Some("a", target="x"), whole], step=2)
        saver.before_update()
        assert whole.values() == {"a.0": 1.0, "b.0": 2.0, "c.0": 3.0}


def test_a_working_lease_occupies_a_slot_and_a_keeping_lease_does_not(tmp_path: Path) -> None:
    state = {"w": torch.full((64, 64), 1.0)}
    with managed(tmp_path, state, keep=None, in_flight=1, when_busy="skip") as manager:
        saver = manager._saver
        assert saver is not None
        delivery = Some()
        saver.start(manager._tree, [delivery], step=1)
        saver.before_update()
        assert delivery.values()["w"] == 1.0
        assert manager.save(2).exception() is not None
        lease = delivery.lease
        assert lease is not None
        placed = next(one for one in lease.capture.plan.rank_plan.tensors if one.name == "w")  # type: ignore[union-attr]
        kept, held = lease.keep(), lease.capture.bytes_of(placed).view(torch.float32)
        delivery.release()
        state["w"].fill_(2.0)
        for step in (3, 4):
            assert manager.save(step).result(WAIT_S).step == step
        assert held.unique().tolist() == [1.0], "the buffer is used again while it is kept"
        assert saver._stager.pool.idle_buffers == 1
        kept.release()
        kept.release()
        assert saver._stager.pool.idle_buffers == 1, "one is enough for one capture"
        assert manager.save(5).result(WAIT_S).read("w").unique().tolist() == [2.0]


def start(job: Job, rank: int, step: int, *deliveries: Any) -> holdfast.SaveHandle:  # noqa: F811
    checkpoint = job.savers[rank].checkpoint(SaveRequest(step, f"step-{step}", {}, resumable=True, overwrite=False))
    job.savers[rank].start(job.trees[rank], [checkpoint, *deliveries], step=step)
    return checkpoint.handle


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["begin", "prepare"])
def test_a_delivery_that_fails_to_prepare_refuses_the_capture_on_every_rank(
    method: str,
    rank: int,
    job: Job,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job.check(1)
    deliveries = [Some(), Some()]

    def refuse() -> None:
        raise ConfigError("there is no room for it", field="room")

    monkeypatch.setattr(deliveries[rank], method, refuse)
    handles = [start(job, 1 - rank, 2, deliveries[1 - rank])]
    if method == "prepare":
        handles.append(start(job, rank, 2, deliveries[rank]))
    else:
        with pytest.raises(ConfigError, match="no room"):
            start(job, rank, 2, deliveries[rank])
    for handle in handles:
        with pytest.raises(ConfigError, match="no room"):
            handle.result(WAIT_S)
    for delivery in deliveries:
        assert delivery.wait(WAIT_S)
        assert "no room" in str(delivery.error)
    job.check(3)


def test_ranks_that_start_different_deliveries_are_all_refused(job: Job) -> None:  # noqa: F811
    handles = [start(job, 0, 1, Some(target="hf-1")), start(job, 1, 1)]
    for handle in handles:
        with pytest.raises(ConfigError, match=r"ranks disagree on what to save.*hf-1"):
            handle.result(WAIT_S)
    job.check(2)


def test_a_delivery_that_fails_to_take_its_capture_does_not_affect_the_checkpoint(job: Job) -> None:  # noqa: F811
    class Bad(Some):
        def offer(self, lease: WorkingLease) -> None:
            raise ZeroDivisionError("a defect")

        def refuse(self, error: BaseException, *, skipped: bool) -> None:
            super().refuse(error, skipped=skipped)
            raise ZeroDivisionError("another")

    bad = [Bad(), Bad()]
    handles = [start(job, rank, 1, bad[rank]) for rank in range(2)]
    for saver in job.savers:
        saver.before_update()
    assert [handle.result(WAIT_S).step for handle in handles] == [1, 1]
    assert [str(one.error) for one in bad] == ["a defect"] * 2
    job.check(2)


class Steps(RootDeliverer[DeliveryJob]):
    """Delivers steps and records them; fails at chosen steps."""

    fails = ""

    def open(self, session: DeliverySession, **options: Any) -> None:
        super().open(session, **options)
        if self.fails == "open":
            raise ConfigError("it can't be opened", field="deliveries")

    def is_due(self, step: int) -> bool:
        return True

    def new_job(self, step: int) -> DeliveryJob:
        if self.fails == "new_job":
            raise ConfigError("nothing can be delivered", field="deliveries")
        return DeliveryJob(self.new_handle(step, f"steps/{step}"), target=f"steps/{step}")

    def deliver(self, job: DeliveryJob) -> int:  # noqa: F811
        assert self.wait_capture(job).error is None
        if self.fails == "deliver":
            raise SaveFailed("it can't be delivered", step=job.step, rank=None)
        assert job.step is not None
        return job.step


def test_a_manager_runs_deliverers_and_reports_their_failures(tmp_path: Path) -> None:
    state, steps = {"w": torch.ones(8)}, Steps(tmp_path / "steps")
    config = CheckpointConfig(every=2, on_error="warn", in_flight=1)
    with CheckpointManager(tmp_path / "root", state, config=config, deliveries=[steps]) as manager:
        assert [handle.result(WAIT_S) for handle in manager.step(1)] == [1]
        checkpoint, other = manager.step(2)
        assert (checkpoint.result(WAIT_S).step, other.result(WAIT_S), other.stage) == (2, 2, "published")
        steps.fails = "new_job"
        with pytest.raises(ConfigError, match="nothing can be delivered"):
            manager.step(4)
        steps.fails = "deliver"
        checkpoint, other = manager.step(6)
        assert checkpoint.result(WAIT_S).step == 6
        with pytest.raises(SaveFailed, match="can't be delivered"):
            other.result(WAIT_S)
    assert sorted(os.listdir(tmp_path / "root")) == [".holdfast", "step-2", "step-6"]


@pytest.mark.parametrize("wrong", ["no deliverer", "twice", "open"])
def test_invalid_deliverers_are_refused_and_release_everything(wrong: str, tmp_path: Path) -> None:
    state, steps = {"w": torch.ones(8)}, Steps(tmp_path / "steps")
    steps.fails = wrong
    given: list[Any] = {"no deliverer": [steps, "files"], "twice": [steps, steps], "open": [steps]}[wrong]
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(tmp_path / "root", state, deliveries=given)
    assert caught.value.field == "deliveries"
    again: list[Deliverer[Any]] = [Steps(tmp_path / "steps")]
    with CheckpointManager(tmp_path / "root", state, deliveries=again) as manager:
        assert [handle.result(WAIT_S) for handle in manager.step(1)] == [1]


def test_waiting_for_a_missing_capture_raises_deadline_exceeded(tmp_path: Path) -> None:
    state, steps = {"w": torch.ones(8)}, Steps(tmp_path / "steps")
    config = CheckpointConfig(every=None, stage_timeout=0.1, persist_timeout=0.1, commit_timeout=0.1)
    with CheckpointManager(tmp_path / "root", state, config=config, deliveries=steps):
        job = steps.submit(steps.new_job(1))
        with pytest.raises(DeadlineExceeded, match="the delivery of step 1 got no capture"):
            job.handle.result(WAIT_S)
