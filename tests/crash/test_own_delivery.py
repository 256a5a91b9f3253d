"""A delivery that a user could have written, beside the checkpoints of a manager, and killed at its system calls.

`TensorFiles` publishes each parameter as files of raw bytes, in directories of its own: by attempts, so that each is
whole or not there, whoever is killed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import syscalls
import torch
import torch.distributed as dist
from kill_job import begin, build, fill, is_of, settings, tell
from nursery import Nursery
from supervised import Act
from test_kill_points import Family, Job, check_survivors, choose, run_all, show, sum_up  # noqa: F401 - a fixture

import holdfast
from holdfast.plan.write import PlacedTensor, RankPlan
from holdfast.saver.capture import Needs
from holdfast.saver.deliverer import DeliveryJob, RootDeliverer


class Files(DeliveryJob):
    def needs(self) -> Needs:
        return lambda name: name.startswith("model.")


class TensorFiles(RootDeliverer[Files]):
    """Publishes ``files-<step>`` below its root at every step."""

    def is_due(self, step: int) -> bool:
        return step > 0

    def new_job(self, step: int) -> Files:
        return Files(self.new_handle(step, self.place.storage.path(f"files-{step}")), target=f"files-{step}")

    def deliver(self, job: Files) -> str:
        capture = self.wait_capture(job)

        def files_of(rank_plan: RankPlan) -> dict[str, PlacedTensor]:
            return {f"{placed.name}@{placed.offsets[0]}": placed for placed in rank_plan.tensors if wants(placed.name)}

        wants = job.needs() or bool
        return self.place.publish_files(
            job,
            f"files-{job.step}",
            capture,
            sizes=lambda plan: [{f: placed.nbytes for f, placed in files_of(rank).items()} for rank in plan.ranks()],
            contents=lambda plan: {f: capture.bytes_of(placed) for f, placed in files_of(plan.rank_plan).items()},
        )


def manager_of(root: str | Path, state: dict[str, Any]) -> holdfast.CheckpointManager:
    home = Path(root)
    deliveries = [TensorFiles(home / "files")]
    return holdfast.CheckpointManager(home / "checkpoints", state, config=settings(every=2), deliveries=deliveries)


def seen_steps(root: Path, below: str) -> set[int]:
    """Return the visible steps; check that each is complete and has the state of its step."""
    found = set()
    for path in (root / below).iterdir():
        if not path.name.startswith("."):
            step = int(path.name.rpartition("-")[2])
            assert holdfast.open(path).verify().ok if below == "checkpoints" else sizes(path) == {step: 48 * 64}
            found.add(step)
    return found


def sizes(path: Path) -> Counter[int]:
    """How many elements of each value are in the files below ``path``."""
    values: Counter[int] = Counter()
    for file in path.glob("model.*"):
        values.update(map(int, torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32).tolist()))
    return values


def lives(root: str) -> None:
    """Two steps: at one the delivery is due alone, at the other with a checkpoint."""
    reins, world = begin()
    state = build(world)
    with reins.window("life"), contextlib.suppress(holdfast.HoldfastError), manager_of(root, state) as manager:
        for step in (3, 4):
            fill(state, step)
            for handle in manager.step(step):
                tell(reins, handle.exception(), step=step, kind=Path(handle.path).parent.name)
    if world > 1:
        dist.destroy_process_group()


def check(family: Family, act: Act, job: Job) -> tuple[bool, int]:
    outcome = job.finish()
    if outcome.hit:
        check_survivors(family, act, outcome)
    seen = {below: seen_steps(job.root, below) for below in ("checkpoints", "files")}
    for event in outcome.told("told"):
        assert (event["step"] in seen[event["kind"]]) == (event["error"] is None), event
    state = build()
    with manager_of(job.root, state) as manager:  # the next start settles both roots, and both can be written to
        settled = {below: seen_steps(job.root, below) for below in seen}
        assert all(seen[below] <= settled[below] for below in seen)
        step = manager.restore()
        assert step == max(settled["checkpoints"])
        assert is_of(state, step)
        fill(state, 90)
        assert [handle.exception(30) for handle in manager.step(90)] == [None, None]
    assert seen_steps(job.root, "files") == settled["files"] | {90}
    return bool(outcome.hit), 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("test_own_delivery") as found:
        yield found


@pytest.mark.parametrize(("world", "few"), [(1, 8), (2, 4)])
def test_kill_at_calls_of_a_delivery_that_a_user_wrote(
    world: int,
    few: int,
    nursery: Nursery,
    tmp_path: Path,
    show: list[str],  # noqa: F811
    tried: Counter[str],
) -> None:
    template, state, family = tmp_path / "template", build(), Family("lives", world, "kill all", few, 2, __name__)
    with manager_of(template, state) as manager:
        for step in (1, 2):
            fill(state, step)
            files = manager.step(step)[-1].result()
            assert sizes(Path(files)) == {step: 48 * 64}
    undisturbed = Job(nursery, family, template, tmp_path / "undisturbed", None)
    outcome = undisturbed.finish()
    assert [event["error"] for event in outcome.told("told", rank=0)] == [None] * 3, undisturbed.child.stderr()
    points = [point for point in outcome.seen["life"] if point.call not in syscalls.TALKING]
    acts = [Act(point, family.kind, window="life") for point in choose(points, family.few)]
    reached, _ = run_all(nursery, family, template, acts, tmp_path, check=check)
    sum_up(family, points, points, reached, tried, "both kinds whole or absent", time.monotonic(), show)
