"""`holdfast.integrations.torchft` with real managers: a replica killed and healed, and all of them started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("torchft")

from jobs import HASTE, ROOT, losses, run_script
from torchft.coordination import LighthouseServer

import holdfast
from holdfast.integrations.torchft import ReplicaCheckpoints

JOB = Path(__file__).with_name("torchft_job.py")
STEPS = 9


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1500)
    yield server.address()
    for replica in Replica.started:
        if replica.process.poll() is None:
            os.killpg(replica.process.pid, signal.SIGKILL)
            replica.process.wait(20)
    server.shutdown()


class Replica:
    started: ClassVar[list[Replica]] = []

    def __init__(self, out: Path, number: int, lighthouse: str, *args: object) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(JOB.parent)])
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), str(out), str(number), str(STEPS), lighthouse, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **HASTE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self.started.append(self)

    def ended(self, *, killed: bool = False) -> str:
        try:
            output, _ = self.process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output, _ = self.process.communicate(timeout=20)
            raise AssertionError(f"a replica had not ended\n{output[-6000:]}") from None
        assert self.process.returncode == (-signal.SIGKILL if killed else 0), output[-6000:]
        return output


def losses_of(out: Path) -> list[dict[int, str]]:
    return [losses([out / f"losses-{number}.jsonl"]) for number in (0, 1)]


def run_both(out: Path, lighthouse: str, *args: object, killed: bool = False) -> list[str]:
    out.mkdir(exist_ok=True)
    replicas = [Replica(out, number, lighthouse, *args) for number in (0, 1)]
    return [replica.ended(killed=killed) for replica in replicas]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[int, str]]]:
    """Return a function: the losses of a run that nothing interrupts, healed as TorchFT does it, run once."""

    @cache
    def run(*options: str) -> list[dict[int, str]]:
        server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1500)
        whole = tmp_path_factory.mktemp("whole")
        run_both(whole, server.address(), *options)
        server.shutdown()
        found = losses_of(whole)
        assert [len(each) for each in found] == [STEPS, STEPS]
        return found

    return run


@pytest.mark.parametrize("options", [["in_place"], ["holdfast", "--async-quorum"]], ids=" ".join)
def test_a_killed_replica_is_healed_by_our_transport(
    tmp_path: Path, lighthouse: str, uninterrupted: Callable[..., list[dict[int, str]]], options: list[str]
) -> None:
    transport = ["--transport", *options]
    replicas = [Replica(tmp_path, 0, lighthouse, *transport), Replica(tmp_path, 1, lighthouse, *transport, "--kill", 5)]
    replicas[1].ended(killed=True)
    replicas[1] = Replica(tmp_path, 1, lighthouse, *transport)
    outputs = [replica.ended() for replica in replicas]
    assert "HEALED " + ("in place" if "in_place" in options else "anew") + " at 5" in outputs[1]
    assert losses_of(tmp_path) == uninterrupted(*options[1:])


def test_a_bucket_that_is_damaged_once_costs_a_step_and_no_difference(
    tmp_path: Path, lighthouse: str, uninterrupted: Callable[..., list[dict[int, str]]]
) -> None:
    options = ["--transport", "holdfast", "--timeout", 4]
    replicas = [Replica(tmp_path, 0, lighthouse, *options, "--spoil", 5)]
    Replica(tmp_path, 1, lighthouse, *options, "--kill", 5).ended(killed=True)
    replicas.append(Replica(tmp_path, 1, lighthouse, *options))
    outputs = [replica.ended() for replica in replicas]
    assert re.search(r"FAILED CheckpointCorrupt bucket 0 of 1 .*\['user'\]\['default'\]", outputs[1]), outputs[1]
    assert outputs[1].index("FAILED") < outputs[1].index("HEALED anew at 5")
    assert losses_of(tmp_path) == uninterrupted()


def test_a_killed_replica_is_healed_and_a_killed_run_starts_again(
    tmp_path: Path, lighthouse: str, uninterrupted: Callable[..., list[dict[int, str]]]
) -> None:
    expected = uninterrupted()
    healed = tmp_path / "healed"
    healed.mkdir()
    replicas = [Replica(healed, 0, lighthouse), Replica(healed, 1, lighthouse, "--kill", 5)]
    replicas[1].ended(killed=True)
    replicas[1] = Replica(healed, 1, lighthouse)
    outputs = [replica.ended() for replica in replicas]
    assert "RESTORED 3 at 5" in outputs[1]
    assert losses_of(healed) == expected

    again = tmp_path / "again"
    run_both(again, lighthouse, "--kill", 5, killed=True)
    outputs = run_both(again, lighthouse, "--dataloader", "restored")
    assert all("RESTORED 3 at 3" in output for output in outputs)
    assert losses_of(again) == expected
    full = holdfast.open(again / "checkpoints" / f"step-{STEPS}")
    assert full.verify().ok
    assert full.state()["torchft"] == {"step": STEPS, "batches_committed": 2 * STEPS}


def test_the_example_kills_a_replica_and_lets_it_come_back(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "torchft_replicas.py", "--out", tmp_path).stdout
    assert "replica 1 begins at batch 0" in output
    assert re.search(r"replica 1 begins at batch [1-7], with", output), output
    assert all(f"replica {number} ends at step 12" in output for number in (0, 1))
    assert holdfast.open(tmp_path / "step-10").state()["torchft"]["step"] == 10


class Manager:
    """The part of `torchft.Manager` that is used, with a quorum of the test's."""

    def __init__(self, rank: int | None = 0) -> None:
        self.at, self.rank = 0, rank
        self._load_state_dict_fns: dict[str, Any] = {}

    def current_step(self) -> int:
        return self.at

    def participating_rank(self) -> int | None:
        return self.rank

    def state_dict(self) -> dict[str, int]:
        return {"step": self.at, "batches_committed": 2 * self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["step"]


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def replica(root: Path, number: int, rank: int | None, **options: Any) -> tuple[Manager, Position, ReplicaCheckpoints]:
    manager, loader = Manager(rank), Position()
    config = holdfast.CheckpointConfig(every=2)
    options = {"replica_id": number, "dataloader": loader, "config": config, "lock_timeout": 2.0, **options}
    return manager, loader, ReplicaCheckpoints(root, manager, {"train": {"lr": 1.0}}, **options)


def test_the_full_checkpoint_is_of_whoever_is_first_at_that_moment(tmp_path: Path) -> None:
    replicas = [replica(tmp_path, 0, 0), replica(tmp_path, 1, 1)]
    for step in range(1, 9):
        for number, (manager, loader, _) in enumerate(replicas):
            manager.at, loader.at = step, 10 * step + number
            manager.rank = (number + step // 4) % 2  # another is first from step 4 on, and the first again from 8 on
        for _, _, checkpoints in sorted(replicas, key=lambda each: -each[0].rank):
            checkpoints.step()
    for _, _, checkpoints in replicas:
        checkpoints.close()
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert names == ["step-4", "step-6", "step-8"]
    for number in (0, 1):
        manager, loader, checkpoints = replica(tmp_path, number, None)
        assert checkpoints.restore() == 8
        assert (manager.at, loader.at) == (8, 80 + number)
        checkpoints.close()


def test_a_replica_that_keeps_the_folder_costs_a_warning(tmp_path: Path) -> None:
    first, second = replica(tmp_path, 0, 0), replica(tmp_path, 1, 0, lock_timeout=0.5)
    first[0].at = second[0].at = 2
    assert first[2].step() is not None
    with pytest.warns(UserWarning, match="step 2 is not saved"):
        assert second[2].step() is None
    first[2].close()
    second[0].at = 4
    handle = second[2].step()
    assert handle is not None
    assert handle.result(60).step == 4
    second[2].close()


def test_a_damaged_position_is_passed_over(tmp_path: Path) -> None:
    manager, loader, checkpoints = replica(tmp_path, 0, None)
    for step in (1, 2, 3):
        manager.at = loader.at = step
        checkpoints.step()
    checkpoints.close()
    folder = tmp_path / "ft-replicat-0"
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "step-1",
        "step-2",
        "step-3",
    ]
    damage(folder / "step-3")
    _, loader, checkpoints = replica(tmp_path, 0, None)
    with pytest.warns(UserWarning, match="falling back to step 2"):
        checkpoints.restore()
    assert loader.at == 2
    checkpoints.close()
    for step in (1, 2):
        damage(folder / f"step-{step}")
    _, loader, checkpoints = replica(tmp_path, 0, None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert checkpoints.restore() is None
    assert "begins anew" in str(told[-1].message)
    assert loader.at == 0
    checkpoints.close()


def damage(path: Path) -> None:
    for file in path.iterdir():
        if file.is_file() and not file.name.startswith("."):
            file.write_bytes(bytes(len(file.read_bytes())))


def test_the_position_of_the_step_that_was_loaded(tmp_path: Path) -> None:
    manager, loader, checkpoints = replica(tmp_path, 0, 0)
    for step in (1, 2, 3):
        manager.at = loader.at = step
        checkpoints.step()
    checkpoints.close()
    manager, loader, checkpoints = replica(tmp_path, 0, 0)
    assert checkpoints.restore(dataloader="restored") == 2
    assert (manager.at, loader.at) == (2, 2)
    manager.at, loader.at = 3, 30
    checkpoints.step()
    checkpoints.step()  # not committed: the step is the same
    checkpoints.close()
    _, loader, checkpoints = replica(tmp_path, 0, 0)
    checkpoints.restore()
    assert loader.at == 30
    checkpoints.close()


def test_what_a_peer_gives_is_loaded_once_copies_are_made(tmp_path: Path) -> None:
    manager, order = Manager(), []
    manager._load_state_dict_fns["default"] = lambda state: order.append(state)
    checkpoints = ReplicaCheckpoints(tmp_path, manager, {"train": {"lr": 1.0}}, replica_id=0)
    checkpoints.before_update = lambda: order.append("copied")
    manager._load_state_dict_fns["default"]("given")
    assert order == ["copied", "given"]
    checkpoints.close()
    with pytest.raises(holdfast.ConfigError, match="torchft"):
        ReplicaCheckpoints(tmp_path, manager, {"torchft": 1}, replica_id=0)
