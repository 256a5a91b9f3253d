"""Weight versions of modules with state-dict hooks: published by the names that hooks give, or by their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hooked_modules import (
    Casts,
    Joins,
    Net,
    Overrides,
    Plain,
    Renames,
    SplitsIntoCopies,
    SplitsIntoViews,
    Transposes,
    assert_same_tensors,
)

import holdfast
from holdfast.errors import StateMismatch
from holdfast.sync import DirectoryTransport, Publisher, Receiver, SharedMemoryTransport

KINDS = [SplitsIntoCopies, SplitsIntoViews, Joins, Renames, Transposes, Overrides]


def made(kind: Any, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("streaming", [False, True], ids=["shadow", "streaming"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_module_receives_what_its_state_dict_is(kind: Any, streaming: bool, tmp_path: Path) -> None:
    model, other = made(kind, 1), made(kind, 2)
    with (
        Publisher(SharedMemoryTransport(tmp_path / "meet"), bypass_cpu=False) as publisher,
        Receiver(SharedMemoryTransport(tmp_path / "meet")) as receiver,
    ):
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(version)
            publisher.publish(tensors_of(model.state_dict()), version, timeout=60)
            assert receiver.receive(other, timeout=60, streaming=streaming) == version
            assert_same_tensors(model, other)
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        publisher.publish(own, 4, timeout=60)
        third = made(kind, 3)
        receiver.receive(third, timeout=60, streaming=streaming)
        assert_same_tensors(model, third)


def test_hooks_of_loading_run_when_a_version_is_in_place(tmp_path: Path) -> None:
    class Caches(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.cached = torch.zeros(())
            self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "cached", module.weight.sum()))

    model, other = made(Caches, 1), made(Caches, 2)
    with (
        Publisher(SharedMemoryTransport(tmp_path / "meet"), bypass_cpu=False) as publisher,
        Receiver(SharedMemoryTransport(tmp_path / "meet")) as receiver,
    ):
        publisher.publish(model.state_dict(), 1, timeout=60)
        receiver.receive(other, timeout=60)
    assert other.middle[0].cached == model.middle[0].weight.sum()


def test_what_would_not_come_back_is_a_mismatch_before_anything_is_touched(tmp_path: Path) -> None:
    class Loses(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_state_dict_post_hook(self._lose)

        @staticmethod
        def _lose(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[prefix + "half"] = state.pop(prefix + "weight").clone()

    model, other, before = made(Loses, 1), made(Loses, 2), made(Loses, 2)
    with (
        Publisher(SharedMemoryTransport(tmp_path / "meet"), bypass_cpu=False) as publisher,
        Receiver(SharedMemoryTransport(tmp_path / "meet")) as receiver,
    ):
        publisher.publish(model.state_dict(), 1, timeout=60)
        with pytest.raises(StateMismatch, match="half"):
            receiver.receive(other, timeout=60)
        assert_same_tensors(before, other)
        assert not receiver.dirty


@pytest.mark.parametrize("kind", [SplitsIntoCopies, Casts], ids=lambda kind: kind.__name__)
def test_versions_in_a_directory(kind: Any, tmp_path: Path) -> None:
    model, other, third = made(kind, 1), made(kind, 2), made(kind, 3)
    with Publisher(DirectoryTransport(tmp_path / "v"), bypass_cpu=False) as publisher:
        publisher.publish(model.state_dict(), 7, timeout=60)
    with Receiver(DirectoryTransport(tmp_path / "v")) as receiver:
        assert receiver.receive(other, timeout=60) == 7
    assert_same_tensors(model, other)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}) as manager:
        manager.save(3).result()
    with Receiver(DirectoryTransport(tmp_path / "run", name_template="step-{step}", prefix="model")) as receiver:
        assert receiver.receive(third, timeout=60) == 3
    assert_same_tensors(model, third)
