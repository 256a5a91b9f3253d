"""Changes of a state while it is staged: which are noticed, which aren't, and how later saves go on."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, HoldfastError, SaveFailed, StateChangedWhileStaging
from holdfast.saver import stager as stage
from holdfast.saver.snapshot import Snapshot
from holdfast.staging import copy_job as stager
from holdfast.staging import image
from holdfast.staging.change_detection import SPOTS_MAX, WatchedTensors
from holdfast.staging.copies import BATCH_BYTES, Copies, CopyBatch, CopyItem, split_rows
from holdfast.staging.copy_job import Staging
from holdfast.staging.image import Image
from holdfast.testing.staging import Gate, held_copies


def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def manager_of(state: dict[str, Any], root: Path, **options: Any) -> holdfast.CheckpointManager:
    config = holdfast.CheckpointConfig(**{"every": 1, "keep": None, "stage_timeout": 20.0, **options})
    return holdfast.CheckpointManager(root, state, config=config)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Holds copies back until it is opened."""
    with held_copies(opens_for_updates=False) as gate:
        gate.open()
        yield gate


# what is noticed -------------------------------------------------------------------------------------------------

Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def weight(model: nn.Sequential) -> nn.Parameter:
    parameter = model[0].weight
    assert isinstance(parameter, nn.Parameter)
    return parameter


def exp_avg(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    tensor = optimizer.state[weight(model)]["exp_avg"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _under_no_grad(change: Change) -> Change:
    def run(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            change(model, optimizer)

    return run


def _swap_tensors(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    torch.utils.swap_tensors(weight(model), nn.Parameter(torch.zeros(16, 16)))


def _fused_kernel(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """An update that no optimizer hook sees."""
    state, param = optimizer.state[weight(model)], weight(model)
    with torch.no_grad():
        torch._fused_adamw_(
            [param], [torch.ones_like(param)], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


NOTICED: dict[str, tuple[Change, str]] = {
    "add_": (_under_no_grad(lambda model, _: weight(model).add_(1)), "model.0.weight"),
    "copy_ of equal values": (_under_no_grad(lambda m, _: weight(m).copy_(weight(m).clone())), "model.0.weight"),
    "one element": (_under_no_grad(lambda model, _: weight(model)[3].zero_()), "model.0.weight"),
    "through a view": (_under_no_grad(lambda model, _: weight(model).view(-1)[5:6].fill_(9)), "model.0.weight"),
    "through detach()": (lambda model, _: weight(model).detach().mul_(2), "model.0.weight"),
    "an initializer": (lambda model, _: nn.init.zeros_(weight(model)), "model.0.weight"),
    ".data.add_()": (lambda model, _: weight(model).data.add_(1), "model.0.weight"),
    ".data = other": (lambda model, _: setattr(weight(model), "data", torch.zeros(16, 16)), "model.0.weight"),
    ".data = a smaller one": (lambda model, _: setattr(weight(model), "data", torch.zeros(2, 16)), "model.0.weight"),
    "set_": (_under_no_grad(lambda model, _: weight(model).set_(torch.zeros(16, 16))), "model.0.weight"),
    "swap_tensors": (_swap_tensors, "model.0.weight"),
    "numpy view": (lambda model, _: weight(model).detach().numpy().fill(3), "model.0.weight"),
    "optimizer state": (lambda model, optimizer: exp_avg(model, optimizer).zero_(), "optimizer.state.0.weight.exp_avg"),
    "load_state_dict": (
        lambda m, _: m.load_state_dict({k: 2 * v for k, v in m.state_dict().items()}),
        "model.0.weight",
    ),
    "a fused kernel": (_fused_kernel, "model.0.weight"),
    "module.half()": (lambda model, _: model[2].half(), "model.2.weight"),
}  # fmt: skip


@pytest.mark.parametrize("how", NOTICED)
def test_a_change_before_the_copy_fails_the_save_and_names_the_tensor(how: str, tmp_path: Path, gate: Gate) -> None:
    change, name = NOTICED[how]
    model, optimizer = small()
    manager = manager_of({"model": model, "optimizer": optimizer}, tmp_path)
    manager.save(1).result()
    gate.close()
    handle = manager.save(2)
    assert gate.wait_arrived()
    change(model, optimizer)
    gate.open()
    with pytest.raises(
        StateChangedWhileStaging, match=rf"step 2, rank 0: {name} was changed .*before_update"
    ) as caught:
        handle.result()
    assert (caught.value.tensor, caught.value.step, handle.stage) == (name, 2, "failed")
    assert manager.steps() == [1]
    manager.step(3)  # which raises what `result` has not
    expected = weight(model).detach().clone()
    manager.wait()
    assert torch.equal(manager.save(4).result().read("model.0.weight"), expected)
    manager.close()
    assert [entry.name for entry in tmp_path.iterdir() if ".incomplete" in entry.name] == []


def _write_a_byte_that_no_word_covers(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    before = list(WatchedTensors({"w": weight(model)}).mark()._words)
    flat = weight(model).data.view(-1)
    for place in range(flat.numel()):
        kept = flat[place].item()
        flat[place] = 100.0
        if list(WatchedTensors({"w": weight(model)}).mark()._words) == before:
            return
        flat[place] = kept
    raise AssertionError("every element is covered by a word")


# What can't be noticed. If one of these is one day: good, move it up.
NOT_NOTICED: dict[str, Change] = {
    "a write by .data where no word was noted": _write_a_byte_that_no_word_covers,
    "a write by .data that puts equal bits": lambda model, _: weight(model).data.copy_(weight(model).detach().clone()),
    "a write by .data to less than 8 bytes": lambda m, optimizer: optimizer.state[weight(m)]["step"].data.zero_(),
}  # fmt: skip


@pytest.mark.parametrize("how", NOT_NOTICED)
def test_change_detection_is_no_proof(how: str, tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        gate.close()
        handle = manager.save(1)
        NOT_NOTICED[how](model, optimizer)
        gate.open()
        assert handle.exception() is None


def test_a_change_after_the_copy_is_allowed(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        expected = weight(model).detach().clone()
        handle = manager.save(1)
        manager.before_update()
        weight(model).data = torch.zeros(16, 16)
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
        assert torch.equal(handle.result().read("model.0.weight"), expected)


def test_buffers_and_plain_values_may_change_at_once(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    progress = {"tokens": 5, "history": [1, 2]}
    state = {"model": model, "optimizer": optimizer, "train": progress, "small": torch.arange(4)}
    with manager_of(state, tmp_path) as manager:
        mean = model[1].running_mean.clone()  # type: ignore[operator,union-attr]
        gate.close()
        handle = manager.save(1)
        model[1].running_mean.fill_(77)  # type: ignore[operator,union-attr]
        state["small"].fill_(9)  # type: ignore[attr-defined]
        progress["tokens"], progress["history"] = 6, []
        gate.open()
        checkpoint = handle.result()
    assert torch.equal(checkpoint.read("model.1.running_mean"), mean)
    assert torch.equal(checkpoint.read("small"), torch.arange(4))
    assert (checkpoint.objects["train.tokens"], checkpoint.objects["train.history"]) == (5, [1, 2])


class Replay:
    """Acts like dataloaders, replay buffers and averages: changes at any moment, without notice."""

    def __init__(self) -> None:
        self.memory = np.zeros(1 << 19, np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"shared": torch.from_numpy(self.memory), "shards": [torch.zeros(1 << 19)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory[:] = state["shared"].numpy()


def test_only_what_updates_change_is_staged_late(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    replay, plain = Replay(), torch.zeros(1 << 19)
    with manager_of({"model": model, "optimizer": optimizer, "replay": replay, "plain": plain}, tmp_path) as manager:
        for step in range(1, 4):
            gate.close()
            handle = manager.save(step)
            replay.memory += 1
            plain.add_(1)
            gate.open()
            checkpoint = handle.result()
            for name in ("replay.shared", "plain"):
                assert checkpoint.read(name).unique().tolist() == [step - 1]


def test_an_average_updated_without_notice(tmp_path: Path, gate: Gate) -> None:
    model, _ = small()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    with manager_of({"model": model, "ema": average}, tmp_path, on_error="warn") as manager:
        gate.close()
        handle = manager.save(1)
        average.update_parameters(model)
        gate.open()
        error = handle.exception()
        assert isinstance(error, StateChangedWhileStaging)
        assert error.tensor.startswith("ema.")
        with pytest.warns(UserWarning, match="ema"):
            manager.wait()


def test_an_embedding_that_rescales_itself_in_forward(tmp_path: Path, gate: Gate) -> None:
    embedding = nn.Embedding(32, 8, max_norm=0.1)
    with manager_of({"model": embedding}, tmp_path, on_error="warn") as manager:
        gate.close()
        handle = manager.save(1)
        embedding(torch.arange(32))
        gate.open()
        error = handle.exception()
        assert isinstance(error, StateChangedWhileStaging)
        assert error.tensor == "model.weight"
        with pytest.warns(UserWarning, match="model.weight"):
            manager.wait()


def test_eager_staging_needs_no_before_update(tmp_path: Path) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path, staging="eager") as manager:
        for step in range(1, 4):
            expected = weight(model).detach().clone()
            handle = manager.save(step)
            with torch.no_grad():
                weight(model).add_(1)
            weight(model).data = torch.zeros(16, 16)
            assert torch.equal(handle.result().read("model.0.weight"), expected)
            train(model, optimizer)


@pytest.fixture(scope="module")
def one_rank_mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("through", ["outer", "local", "local .data", "swapped local"])
def test_a_dtensor_is_watched_outside_and_inside(through: str, one_rank_mesh: Any, tmp_path: Path, gate: Gate) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Module()
    model.x = nn.Parameter(distribute_tensor(torch.randn(1 << 10, 1 << 9), one_rank_mesh, [Shard(0)]), False)
    dtensor: Any = model.x
    with manager_of({"model": model}, tmp_path, on_error="warn") as manager:
        gate.close()
        handle = manager.save(1)
        if through == "outer":
            dtensor.add_(1)
        elif through == "local":
            dtensor.to_local()[3:4].zero_()
        elif through == "local .data":
            dtensor.to_local().data.add_(1)
        else:
            dtensor._local_tensor = torch.zeros(1 << 10, 1 << 9)
        gate.open()
        error = handle.exception()
        assert isinstance(error, StateChangedWhileStaging)
        assert error.tensor == "model.x"
        with pytest.warns(UserWarning, match="model.x was changed"):
            manager.wait()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupt_is_raised_on_the_copying_thread(
    interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    staging = Staging(WatchedTensors({"x": source}))
    staging.load(Copies.of([CopyItem("x", source, None, target)]), Copies.of([]))

    def copy(batch: CopyBatch, *, non_blocking: bool = False) -> None:
        raise interrupt

    monkeypatch.setattr(CopyBatch, "copy", copy)
    if issubclass(interrupt, Exception):
        staging.help_copy()
    else:
        with pytest.raises(interrupt):
            staging.help_copy()
    with pytest.raises(interrupt):  # and whoever waits for the copies, here or elsewhere, is told
        staging.run(timeout_s=5.0)
    assert staging.wait_idle(5.0)


def test_an_inconsistent_dtensor_is_refused(one_rank_mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, zeros

    local = torch.ones(6, 2)
    longer = DTensor.from_local(local, one_rank_mesh, [Shard(0)], run_check=False, shape=(4, 2), stride=(2, 1))
    with pytest.raises(holdfast.StateMismatch, match=r"x: this rank holds \[6, 2\] of \[4, 2\]") as caught:
        holdfast.save({"x": longer}, tmp_path / "a")
    assert caught.value.mismatched == ("x",)
    holdfast.save({"x": zeros(4, 2, device_mesh=one_rank_mesh, placements=[Shard(0)])}, tmp_path / "b")
    with pytest.raises(holdfast.StateMismatch, match=r"x: this rank holds \[6, 2\]"):
        holdfast.load({"x": longer}, tmp_path / "b")
    assert local.sum() == 12


class DeviceWork:
    """Simulates pending copies of a device where there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = threading.Event()
        self.done.set()
        self.ordered = 0
        load = Staging.load

        def enqueue_too(staging: Staging, live: Copies, held: Copies) -> None:
            load(staging, live, held)
            staging._device_copies.append(stager._DeviceCopies(torch.device("cuda"), self))

        def order(_: Staging) -> None:
            self.ordered += 1

        monkeypatch.setattr(Snapshot, "from_device", True)
        monkeypatch.setattr(Image, "pin", lambda _: None)
        monkeypatch.setattr(Staging, "load", enqueue_too)
        monkeypatch.setattr(Staging, "order_device_updates", order)

    def query(self) -> bool:
        return self.done.is_set()


def test_an_update_is_ordered_behind_a_device_and_waits_for_host_copies_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        manager.save(1).result()
        device = DeviceWork(monkeypatch)
        expected = weight(model).detach().clone()
        device.done.clear()
        handle = manager.save(2)
        train(model, optimizer)
        assert device.ordered == 1
        assert not handle.done()
        device.done.set()
        assert torch.equal(handle.result().read("model.0.weight"), expected)


def test_an_eager_save_returns_when_devices_have_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path, staging="eager") as manager:
        manager.save(1).result()
        device = DeviceWork(monkeypatch)
        device.done.clear()
        threading.Timer(0.5, device.done.set).start()
        handle = manager.save(2)
        assert device.done.is_set()
        handle.result()


@pytest.mark.parametrize("ends", [True, False])
def test_memory_that_a_device_writes_to_is_not_freed(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    monkeypatch.setattr(stage, "DEVICE_GRACE_S", 0.2)
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        manager.save(1).result()
        device = DeviceWork(monkeypatch)
        saver: Any = manager._saver
        staging = Staging(WatchedTensors({}))
        staging.load(Copies.of([]), Copies.of([]))
        if not ends:
            device.done.clear()
        buffer = saver._stager.pool.take_buffer()
        saver._stager.put_back(buffer, staging)
        assert saver._stager.pool.idle_buffers == int(ends)
        assert saver._stager.stuck == ([] if ends else [buffer])
        device.done.set()
        manager.save(2).result()


# deadlines and threads -------------------------------------------------------------------------------------------


def test_a_capture_that_is_not_staged_in_time_fails_and_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        manager.save(1).result()
        manager._saver._config = holdfast.CheckpointConfig(stage_timeout=0.2)  # type: ignore[union-attr]
        gate.close()
        handle = manager.save(2)
        assert gate.wait_arrived()
        train(model, optimizer)
        assert not handle.done()
        gate.open()
        error = handle.exception(20)
        assert isinstance(error, holdfast.SaveFailed)
        assert isinstance(error.__cause__, holdfast.DeadlineExceeded)
        with pytest.raises(holdfast.SaveFailed, match="step 2"):
            manager.wait()
        expected = weight(model).detach().clone()
        handle = manager.save(3)
        train(model, optimizer)
        assert torch.equal(handle.result().read("model.0.weight"), expected)


def test_waits_keep_their_deadline_while_copies_are_slow(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        gate.close()
        handle = manager.save(1)
        assert gate.wait_arrived()
        for wait in (handle.wait_staged, handle.result, handle.exception, manager.wait_staged, manager.wait):
            with pytest.raises(holdfast.DeadlineExceeded) as caught:
                wait(0.05)
            assert caught.value.timeout_s <= 0.05
        gate.open()
        assert handle.result().step == 1


def test_another_thread_waiting_for_the_result_does_not_confirm_the_state(tmp_path: Path, gate: Gate) -> None:
    """It can't: the training thread may be in the middle of a write that has not been counted yet."""
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        gate.close()
        handle = manager.save(1)
        assert gate.wait_arrived()
        errors: list[BaseException | None] = []
        waiter = threading.Thread(target=lambda: errors.append(handle.exception()))
        waiter.start()
        (capture,) = manager._saver._in_flight.values()  # type: ignore[union-attr]
        assert capture is not None
        gate.open()
        assert capture.staged.wait(20)
        assert not capture.confirmed.is_set()
        waiter.join(20)
        assert errors == [None]


def test_threads_that_confirm_the_same_capture_at_once(tmp_path: Path) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path) as manager:
        for step in range(1, 6):
            handle = manager.save(step)
            errors: list[BaseException] = []

            def pass_it(errors: list[BaseException] = errors) -> None:
                try:
                    manager.before_update()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=pass_it) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not errors
            handle.result()


def test_saves_that_nobody_confirms_leave_nothing_behind(tmp_path: Path) -> None:
    model, _ = small()
    with manager_of({"model": model}, tmp_path, in_flight=4) as manager:
        for handle in [manager.save(step) for step in range(1, 3)]:
            assert handle._future.exception(20) is None
        assert manager._saver._unconfirmed == []  # type: ignore[union-attr]
        assert not manager._saver._in_flight  # type: ignore[union-attr]


# a state that changes between saves ------------------------------------------------------------------------------


def test_every_save_has_the_state_of_its_moment(tmp_path: Path) -> None:
    """Change everything that may change between two saves, one thing after the other, under one manager."""
    model, optimizer = small()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "log": [0]}
    step = 0

    def save_and_check() -> holdfast.Checkpoint:
        nonlocal step
        step += 1
        expected = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
        expected |= {
            f"optimizer.state.{name}.{key}": tensor.clone()
            for name, param in model.named_parameters()
            for key, tensor in optimizer.state.get(param, {}).items()
        }
        handle = manager.save(step)
        if model[0].weight.dtype == torch.float32:
            train(model, optimizer)
        checkpoint = handle.result()
        names = {name for name in checkpoint.tensors if not name.startswith("rng.")}
        assert names == set(expected), f"save {step}"
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor), f"save {step}: {name}"
        return checkpoint

    with manager_of(state, tmp_path) as manager:
        save_and_check()
        save_and_check()
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        save_and_check()
        optimizer.state.pop(weight(model))
        model[0].weight = nn.Parameter(torch.full((16, 16), 5.0))
        optimizer.param_groups[0]["params"] = list(model.parameters())
        save_and_check()
        weight(model).data = torch.full((16, 16), 6.0)
        save_and_check()
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(model.parameters())
        save_and_check()
        save_and_check()
        model.register_parameter("lora", nn.Parameter(torch.ones(3)))
        save_and_check()
        optimizer.add_param_group({"params": [model.lora], "lr": 0.5})
        assert "optimizer.param_groups.1.lr" in save_and_check().objects
        state["log"] = list(range(5_000))
        assert save_and_check().objects["log"] == list(range(5_000))
        state["more"] = {"a": 1}
        assert save_and_check().objects["more.a"] == 1
        del state["more"]
        del model.lora
        optimizer.param_groups.pop()
        assert "more.a" not in save_and_check().objects
        model[1].register_buffer("extra", torch.ones(2))
        save_and_check()
        model.double()
        assert save_and_check().tensors["model.0.weight"].dtype == torch.float64
        model.float()
        save_and_check()


def test_a_parameter_replaced_by_one_of_equal_shape_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    model = nn.Linear(8, 8, bias=False)
    with manager_of({"model": model}, tmp_path) as manager:
        for step in range(1, 8):
            model.weight = nn.Parameter(torch.full((8, 8), float(step)))
            assert manager.save(step).result().read("model.weight").unique().tolist() == [step]


def test_with_two_buffers_each_copies_what_the_state_holds_now(tmp_path: Path, gate: Gate) -> None:
    """The less used buffer still caches the copies of an older structure."""
    model = nn.Linear(8, 8, bias=False)
    with manager_of({"model": model}, tmp_path, in_flight=2) as manager:
        gate.close()
        first, second = manager.save(1), manager.save(2)
        gate.open()
        first.result(), second.result()
        for step in range(3, 8):
            model.weight = nn.Parameter(torch.full((8, 8), float(step)))
            handles = [manager.save(step), manager.save(step + 100)]
            for handle in handles:
                assert handle.result().read("model.weight").unique().tolist() == [step]


def test_an_unchanged_structure_plans_nothing_and_renders_nothing(tmp_path: Path) -> None:
    model, optimizer = small()
    with manager_of({"model": model, "optimizer": optimizer}, tmp_path, in_flight=1) as manager:
        manager.save(1).result()
        before = holdfast.statistics()
        for step in range(2, 6):
            train(model, optimizer)
            manager.save(step).result()
        after = holdfast.statistics()
    for counter in ("plans_made", "headers_rendered"):
        assert before[counter] > 0
        assert after[counter] == before[counter]


def test_a_structure_change_seen_by_a_refused_save_is_in_the_next(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    state: dict[str, Any] = {"model": model, "x": 1}
    with manager_of(state, tmp_path) as manager:
        manager.save(1).result()
        model.register_parameter("lora", nn.Parameter(torch.ones(3)))
        state["x"] = object()
        with pytest.raises(ConfigError, match="x"):
            manager.save(2)
        state["x"] = 2
        assert "model.lora" in manager.save(3).result().tensors


def test_a_parameter_replaced_before_a_restore_is_in_the_next_save(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with manager_of({"model": model}, tmp_path) as manager:
        manager.save(1).result()
        model.weight = nn.Parameter(torch.zeros(4, 4))
        manager.restore(1)
        with torch.no_grad():
            model.weight.fill_(9)
        assert manager.save(2).result().read("model.weight").unique().tolist() == [9]


# the parts -------------------------------------------------------------------------------------------------------


def test_copies_arrive_bit_for_bit() -> None:
    sources = {
        "large": torch.randn(300, 300),
        "strided": torch.randn(300, 300).t(),
        "narrow": torch.randn(100, 300)[:, 7:50],
        "small": torch.randn(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "fp8": torch.randn(70, 70).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(90, 90, dtype=torch.complex64).conj(),
        "negated": torch.randn(20, dtype=torch.complex64).conj().imag,
        "nan": torch.full((9,), torch.nan),
        "inference": torch.inference_mode()(torch.ones)(6),
    }
    targets = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in sources.items()}
    CopyBatch(CopyItem(name, sources[name], None, targets[name]) for name in sources).copy()
    for name, source in sources.items():
        expected = source.resolve_conj().resolve_neg().contiguous()
        if expected.numel():
            assert torch.equal(targets[name].view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)), name


def test_copies_convert_where_the_plan_says_so() -> None:
    source = torch.randn(200, 200)
    target = torch.empty(200, 200, dtype=torch.bfloat16)
    CopyBatch([CopyItem("x", source, None, target)]).copy()
    assert torch.equal(target, source.bfloat16())


def test_a_large_tensor_is_cut_into_rows_that_cover_it() -> None:
    target = torch.empty(1000, 7)
    item = CopyItem("x", torch.randn(1000, 7), None, target)
    parts = split_rows(item, 4096)
    assert all(part.target.nbytes <= 4096 for part in parts)
    CopyBatch(parts).copy()
    assert torch.equal(target, item.tensor)
    assert split_rows(CopyItem("x", torch.ones(()), None, torch.ones(())), 1) != []
    assert BATCH_BYTES > 4096


def staging_of(sources: dict[str, torch.Tensor]) -> tuple[Staging, dict[str, torch.Tensor]]:
    targets = {name: torch.zeros_like(tensor) for name, tensor in sources.items()}
    staging = Staging(WatchedTensors(sources))
    staging.load(Copies.of([CopyItem(name, sources[name], None, targets[name]) for name in sources]), Copies.of([]))
    return staging, targets


def test_an_abandoned_staging_stops_writing() -> None:
    staging, targets = staging_of({"x": torch.ones(8)})
    staging.abandon()
    staging.run(timeout_s=1)
    assert staging.wait_idle(1)
    assert targets["x"].sum() == 0


def test_memory_is_busy_while_anyone_copies() -> None:
    staging, _ = staging_of({"x": torch.ones(8)})
    with held_copies(opens_for_updates=False) as gate:
        helper = threading.Thread(target=staging.help_copy)
        helper.start()
        assert gate.wait_arrived()
        assert not staging.wait_idle(0.01)
        gate.open()
        assert staging.wait_idle(20)
        helper.join(20)


def test_a_failed_copy_is_raised_by_the_waiting_thread() -> None:
    staging = Staging(WatchedTensors({"x": torch.ones(3)}))
    staging.load(Copies.of([CopyItem("x", torch.ones(3), None, torch.zeros(4).expand(2, 4))]), Copies.of([]))
    with pytest.raises(HoldfastError, match="x"):
        staging.run(timeout_s=1)
    assert staging.wait_idle(1)
    assert staging.lost() is None


def test_freed_memory_is_refused_by_name() -> None:
    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="y: its memory was freed") as caught:
        WatchedTensors({"x": torch.ones(2), "empty": torch.zeros(0), "y": freed}).mark()
    assert caught.value.field == "y"


def test_words_are_recorded_for_a_bounded_number_of_tensors() -> None:
    tensors = {str(number): torch.zeros(4) for number in range(SPOTS_MAX * 2 + 3)}
    marks = WatchedTensors(tensors).mark()
    assert SPOTS_MAX / 2 <= len(marks._words) <= SPOTS_MAX


def test_words_are_spread_over_a_large_tensor() -> None:
    tensor = torch.zeros(40 << 20, dtype=torch.uint8)
    assert len(WatchedTensors({"x": tensor}).mark()._words) == 2


def test_words_follow_a_tensor_whose_memory_is_no_longer_contiguous() -> None:
    tensor = torch.zeros(64, 2)
    watched = WatchedTensors({"x": tensor})
    assert watched.mark()._words
    tensor.data = torch.zeros(1, 2).expand(64, 2)
    assert watched.mark()._words == []


def test_inference_tensors_are_watched_without_a_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(64)
        marks = WatchedTensors({"x": tensor, "y": torch.ones(3)}).mark()
        assert marks.written() is None
        tensor.add_(1)
        assert marks.written() is None
        assert marks.differing({"x": tensor.data_ptr()}) == "x"


LARGE = 300_007


def _large_blocks() -> dict[str, torch.Tensor]:
    """Yield blocks above every threshold, for every word width they can be copied in, and some that can't."""
    whole = torch.randint(0, 256, (LARGE + 64,), dtype=torch.uint8)
    with torch.inference_mode():
        inferred = torch.randn(300, 301)
    return {
        "8 bytes": torch.randn(400, 400),
        "4 bytes": torch.randn(281, 361),
        "2 bytes": torch.randn(40_961).bfloat16(),
        "1 byte": torch.randint(0, 256, (LARGE,), dtype=torch.uint8),
        "an odd place of its storage": whole[3 : 3 + LARGE],
        "an even place of its storage": whole[6 : 6 + LARGE - 1],
        "bool": torch.rand(LARGE) > 0.5,
        "float8": torch.randn(LARGE).to(torch.float8_e4m3fn),
        "complex": torch.randn(200, 300, dtype=torch.complex64),
        "conjugate": torch.randn(200, 300, dtype=torch.complex64).conj(),
        "transposed": torch.randn(300, 301).t(),
        "expanded": torch.randn(1, 1000).expand(300, 1000),
        "a parameter": nn.Parameter(torch.randn(400, 401)),
        "inference": inferred,
    }


@pytest.mark.parametrize("kind", _large_blocks())
@pytest.mark.parametrize("max_bytes", [BATCH_BYTES, 100_000])
def test_large_blocks_of_every_kind_arrive_bit_for_bit(kind: str, max_bytes: int) -> None:
    source = _large_blocks()[kind]
    target = torch.zeros(source.shape, dtype=source.dtype)
    parts = split_rows(CopyItem("x", source, None, target), max_bytes)
    batch = CopyBatch(parts)
    for _ in range(2):
        target.view(torch.uint8).zero_()
        batch.copy()
        assert torch.equal(compat.as_bytes(target), compat.as_bytes(compat.clone(source)))


def test_a_large_block_is_looked_up_for_every_copy() -> None:
    source, target = torch.randn(400, 400), torch.zeros(400, 400)
    batch = CopyBatch([CopyItem("x", source, None, target)])
    batch.copy()
    source.data = torch.randn(400, 401)[:, :400].contiguous()
    batch.copy()
    assert torch.equal(target, source)
    source.data = source.data.t()
    batch.copy()
    assert torch.equal(target, source)


def test_large_blocks_wake_no_team_of_threads() -> None:
    """Each piece is too short for torch to use a team of threads."""
    item = CopyItem("x", torch.randn(1000, 1000), None, torch.zeros(1000, 1000))
    CopyBatch([item]).copy()
    assert sum(piece.nbytes for piece in item.cut[1]) == item.target.nbytes
    assert max(piece.numel() for piece in item.cut[1]) < 32_768


def test_a_thread_that_helps_early_waits_for_copies_to_make() -> None:
    source, target = torch.randn(64), torch.zeros(64)
    staging = Staging(WatchedTensors({"x": source}))
    helper = threading.Thread(target=staging.help_copy, args=(20.0,))
    helper.start()
    helper.join(0.05)
    assert helper.is_alive()
    staging.load(Copies.of([CopyItem("x", source, None, target)]), Copies.of([]))
    helper.join(20)
    assert not helper.is_alive()
    assert torch.equal(source, target)


def test_a_thread_waiting_for_copies_to_make_is_released_on_abandon() -> None:
    staging = Staging(WatchedTensors({"x": torch.ones(2)}))
    helper = threading.Thread(target=staging.help_copy, args=(20.0,))
    helper.start()
    staging.abandon()
    helper.join(20)
    assert not helper.is_alive()


def test_a_differing_word_is_found_if_only_some_tensors_have_copies() -> None:
    tensors = {name: torch.full((64,), float(number)) for number, name in enumerate("abc")}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    marks = WatchedTensors(tensors).mark()
    everywhere = {name: copy.data_ptr() for name, copy in copies.items()}
    assert marks.differing(everywhere) is None
    copies["c"].fill_(9.0)
    assert marks.differing(everywhere) == "c"
    assert marks.differing({"b": everywhere["b"], "c": everywhere["c"]}) == "c"
    assert marks.differing({"b": everywhere["b"]}) is None


def test_pages_are_faulted_in_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_POPULATE_STEP_BYTES", 1 << 20)
    made = image.Image((5 << 20) + 4096)
    made.warm_up()
    with open(f"/proc/self/fd/{made.fd}", "rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 == made.nbytes
    assert int(made.bytes_view.sum()) == 0
    made.close()


def test_refused_host_memory_raises_a_named_error(tmp_path: Path) -> None:
    """A limit of file sizes also applies to memory files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = holdfast.CheckpointConfig(every=None, on_error="warn")
    with holdfast.CheckpointManager(tmp_path, {"w": torch.ones(1 << 18)}, config=config) as manager:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
        try:
            with pytest.warns(UserWarning, match="bytes of host memory for a file image: File too large"):
                error = manager.save(1, final=True).exception()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert isinstance(error, SaveFailed)
        assert error.errno == errno.EFBIG
        assert manager.save(2).result().verify().ok
