"""A version that is due together with a checkpoint: it takes the checkpoint's capture, and nothing is copied twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, ConfigError
from holdfast.staging import buffer as layout
from holdfast.staging.image import Image
from holdfast.sync import DirectoryTransport, Publisher, Receiver, SharedMemoryTransport

TIMEOUT_S = 120.0


class Run:
    """A model that is trained, its manager and publisher, and somebody who receives."""

    def __init__(self, place: Path, *, every: int = 1, keep_versions: int = 2, in_flight: int = 1) -> None:
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.manager = CheckpointManager(
            place / "checkpoints",
            {"model": self.model, "optimizer": self.optimizer},
            config=CheckpointConfig(every=every, in_flight=in_flight),
        )
        self.publisher = Publisher(
            SharedMemoryTransport(place / "meet"), bypass_cpu=False, keep_versions=keep_versions, manager=self.manager
        )
        self.receiver = Receiver(SharedMemoryTransport(place / "meet"))
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def train(self) -> dict[str, torch.Tensor]:
        """One step; a copy of what the weights are then."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        return {name: tensor.detach().clone() for name, tensor in self.weights.items()}

    def publish(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Returns how many bytes were copied for it."""
        before = holdfast.statistics()["sync_bytes_staged"]
        self.publisher.publish(self.weights if weights is None else weights, version, TIMEOUT_S)
        return holdfast.statistics()["sync_bytes_staged"] - before

    def receives(self, version: int, expected: dict[str, torch.Tensor]) -> None:
        assert self.receiver.receive(self.into, version, TIMEOUT_S) == version
        assert all(torch.equal(self.into[name], tensor) for name, tensor in expected.items())

    def close(self) -> None:
        self.receiver.close()
        self.publisher.close()
        self.manager.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_a_step_that_is_due_for_both_is_copied_once(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2, keep_versions=3)
    was = {}
    for step in range(1, 9):
        was[step] = run.train()
        captures = holdfast.statistics()["captures"]
        run.manager.step(step)
        assert holdfast.statistics()["captures"] - captures == (step % 2 == 0)
        assert run.publish(step) == (0 if step % 2 == 0 else run.nbytes)
        if step == 2:
            run.publisher.pin(2)
        run.receives(step, was[step])
    for version in (7, 2, 6, 8):
        run.receives(version, was[version])
    run.manager.wait()
    checkpoint = holdfast.open(tmp_path / "checkpoints" / "step-8")
    assert all(torch.equal(checkpoint.read(f"model.{name}"), tensor) for name, tensor in was[8].items())
    assert checkpoint.verify().ok
    run.manager.close()
    run.receives(6, was[6])  # it has outlived who captured it
    was[9] = run.train()
    assert run.publish(9) == run.nbytes
    run.receives(9, was[9])
    run.close()


def test_what_a_save_copies_at_once_is_copied_for_the_version_too(run: Run) -> None:
    run.train()
    run.manager.step(1)
    buffers = sum(buffer.nbytes for buffer in run.model.buffers())
    with torch.no_grad():
        run.model[1].running_mean.fill_(7.0)  # after the save took it
    extra = {"extra": torch.arange(5.0), "half": run.model[0].bias.detach().bfloat16()}
    weights = {**run.model.state_dict(), **extra}
    assert run.publish(1, weights) == buffers + sum(tensor.nbytes for tensor in extra.values())
    run.into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    run.receives(1, weights)


def written_in_data(weight: torch.Tensor) -> None:
    weight.data.add_(1)


def given_other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


def written_by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] += 1


@pytest.mark.parametrize(
    "change", [written_in_data, given_other_memory, written_by_numpy], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("ended", [False, True], ids=["staged", "published"])
def test_weights_whose_change_no_counter_tells_are_copied(
    run: Run, change: Callable[[torch.Tensor], None], ended: bool
) -> None:
    run.train()
    handle = run.manager.save(1)
    run.manager.wait_staged()
    if ended:
        handle.result()
    change(run.model[2].weight)
    assert run.publish(1) == run.nbytes
    run.receives(1, {name: tensor.detach() for name, tensor in run.weights.items()})


def test_weights_that_may_have_changed_since_the_save_are_copied(run: Run) -> None:
    run.train()
    run.manager.step(1)
    was = run.train()
    assert run.publish(1) == run.nbytes
    run.receives(1, was)
    run.manager.step(2)
    run.manager.wait_staged()
    with torch.no_grad():
        run.model[2].weight[1] += 1.0
    assert run.publish(2) == run.nbytes
    run.receives(2, {name: tensor.detach() for name, tensor in run.weights.items()})
    run.manager.step(3)
    run.manager.before_update()
    assert run.publish(3) == run.nbytes
    run.manager.step(4)
    assert run.publish(4) == 0
    assert run.publish(5) == 0  # it is still the same moment
    run.receives(5, {name: tensor.detach() for name, tensor in run.weights.items()})


def test_a_save_that_fails_leaves_the_version_its_own_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    was = run.train()

    def fail(*_: object) -> None:
        raise RuntimeError("no copies today")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.staging.copy_job.copy_batch", fail)
        (handle,) = run.manager.step(1)
        assert run.publish(1) == run.nbytes
        run.receives(1, was)
        assert handle.exception() is not None
    with pytest.raises(holdfast.HoldfastError, match="no copies today"):
        run.manager.wait()


def test_memory_goes_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Image]] = []

    class Counted(Image):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(weakref.ref(self))

    monkeypatch.setattr(layout, "Image", Counted)
    run = Run(tmp_path, in_flight=1, keep_versions=2)
    for step in range(1, 13):
        was = run.train()
        run.manager.step(step)
        assert run.publish(step) == 0
        if step % 5 == 0:
            run.receives(step, was)
    # One for a capture under way, and one for each version that is kept; not a new one a save.
    assert len(made) <= 4
    run.publisher.close()
    for step in range(13, 16):
        run.train()
        run.manager.step(step)
        run.manager.wait()
    assert len(made) <= 4
    gc.collect()
    assert sum(image() is not None for image in made) <= 2
    run.close()


def test_what_cannot_be_shared_is_refused_by_name(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match="bypass_cpu=False") as caught:
        Publisher(SharedMemoryTransport(tmp_path / "other"), manager=run.manager)
    assert caught.value.field == "manager"
    with pytest.raises(ConfigError, match="manager must be a CheckpointManager"):
        Publisher(SharedMemoryTransport(tmp_path / "other"), bypass_cpu=False, manager=run)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="checkpoint of its own"):
        Publisher(DirectoryTransport(tmp_path / "versions"), bypass_cpu=False, manager=run.manager)
    assert not (tmp_path / "other").exists()
