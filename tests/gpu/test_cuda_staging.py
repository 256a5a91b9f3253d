"""Staging from CUDA: side stream, pinned images, ordering by events. Needs a device; skipped without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def _training_state(width: int = 1024, depth: int = 8) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return {"model": model, "optimizer": optimizer}


def _train_step(state: dict[str, object], width: int = 1024) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    model(torch.randn(64, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(state: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = {f"model.{name}": value.detach().cpu().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = value.detach().cpu().clone()
    return found


@pytest.mark.parametrize("staging", ["lazy", "eager"])
def test_a_capture_is_the_state_at_save_while_fused_steps_go_on(tmp_path: Path, staging: str) -> None:
    state = _training_state()
    config = holdfast.CheckpointConfig(every=1, keep=None, staging=staging)  # type: ignore[arg-type]
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        expected = {}
        for step in range(1, 6):
            _train_step(state)
            expected[step] = _values(state)
            manager.step(step)
        manager.wait()
    for step, values in expected.items():
        checkpoint = holdfast.open(tmp_path / f"step-{step}")
        for name, value in values.items():
            assert torch.equal(checkpoint.read(name), value), f"step {step}: {name}"


def test_the_update_is_ordered_behind_the_copies_by_an_event_and_no_thread_waits(tmp_path: Path) -> None:
    state = _training_state(width=4096, depth=16)
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=1))
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        for step in range(1, 4):  # plans and warms up
            _train_step(state, 4096)
            manager.step(step)
            manager.wait()
        torch.cuda.synchronize()
        _train_step(state, 4096)
        expected = _values(state)
        began = time.perf_counter()
        (handle,) = manager.step(4)
        manager.before_update()
        held_s = time.perf_counter() - began
        _train_step(state, 4096)
        checkpoint = handle.result()
        for name, value in expected.items():
            assert torch.equal(checkpoint.read(name), value), name
        assert held_s < 0.5 * handle.stats.bytes / 20e9 + 0.05, f"the training thread was held {held_s * 1e3:.1f} ms"


def test_a_change_outside_an_optimizer_step_is_found(tmp_path: Path) -> None:
    state = _training_state()
    _train_step(state)
    with holdfast.CheckpointManager(tmp_path, state, config=holdfast.CheckpointConfig(on_error="warn")) as manager:
        manager.save(1).result()
        handle = manager.save(2)
        model = state["model"]
        assert isinstance(model, nn.Sequential)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        error = handle.exception()
        assert isinstance(error, holdfast.StateChangedWhileStaging)
        assert error.tensor == "model.0.weight"
        with pytest.warns(UserWarning, match="model.0.weight"):
            manager.wait()


def test_a_checkpoint_loads_into_device_memory_bit_for_bit(tmp_path: Path) -> None:
    state = _training_state()
    _train_step(state)
    expected = _values(state)
    holdfast.save(state, tmp_path / "checkpoint")
    other = _training_state()
    with torch.no_grad():
        for parameter in other["model"].parameters():  # type: ignore[attr-defined]
            parameter.zero_()
    holdfast.load(other, tmp_path / "checkpoint")
    found = _values(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_images_are_pinned(tmp_path: Path) -> None:
    from holdfast.staging.image import Image

    del tmp_path
    image = Image(1 << 20)
    image.warm_up()
    image.pin()
    assert image.pinned
    assert image.bytes_view.is_pinned()
    image.close()


def test_an_export_at_once_reads_device_memory_in_pieces(tmp_path: Path) -> None:
    state = _training_state(width=2048, depth=2)
    for dtype in (None, torch.bfloat16):
        path = holdfast.export_hf({"model": state["model"]}, tmp_path / f"export-{dtype}", dtype=dtype)
        exported = holdfast.open(path)
        for name, value in _values(state).items():
            if name.startswith("model."):
                wanted = value if dtype is None else value.to(dtype)
                assert torch.equal(exported.read(name.removeprefix("model.")), wanted), name
