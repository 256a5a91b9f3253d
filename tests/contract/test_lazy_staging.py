"""Lazy staging saves the state as it was at `save`, whatever way training goes on while it is copied.

Copies are held back at a gate until the training thread asks for them, so that every step of training that may run
before them does. What was saved is compared, bit for bit, with clones taken when `save` was called.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing.staging import Gate, held_copies

# torch's own compiler, when it is first imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

STEPS = 4


class Case:
    """One way of training: ``state`` is what is saved, ``before`` and ``update`` make one step together."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.manager: holdfast.CheckpointManager | None = None

    def before(self) -> None:
        """Forward and backward: runs while copies are held back."""

    def update(self) -> None:
        """Changes parameters and optimizer state."""


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))


class Plain(Case):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = net() if model is None else model
        self.optimizer = make(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(8, 24)).square().mean()
        return loss

    def before(self) -> None:
        self.loss().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class TwoOptimizers(Plain):
    def __init__(self) -> None:
        super().__init__(lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
        self.first = torch.optim.AdamW(self.model[0].parameters(), lr=0.1)  # type: ignore[index]
        self.second = torch.optim.SGD(self.model[2].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
        self.state = {"model": self.model, "optimizer": [self.first, self.second]}

    def update(self) -> None:
        self.second.step()
        self.first.step()
        self.model.zero_grad()


class InBackward(Plain):
    """An optimizer for each parameter, stepped by its gradient: updates and backward overlap."""

    def __init__(self) -> None:
        super().__init__(lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
        self.of = {param: torch.optim.AdamW([param], lr=0.1) for param in self.model.parameters()}
        for param in self.of:
            param.register_post_accumulate_grad_hook(self._step)
        self.state = {"model": self.model, "optimizer": list(self.of.values())}
        self.kept: torch.Tensor | None = None

    def _step(self, param: nn.Parameter) -> None:
        self.of[param].step()
        param.grad = None

    def before(self) -> None:
        self.kept = self.loss()

    def update(self) -> None:
        assert self.kept is not None
        self.kept.backward()


class Accumulating(Plain):
    def before(self) -> None:
        for _ in range(3):
            (self.loss() / 3).backward()


class Scaled(Plain):
    """A GradScaler, one of whose steps is skipped for an infinite gradient."""

    def __init__(self) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.1))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        self.state["scaler"] = self.scaler
        self.count = 0

    def before(self) -> None:
        self.count += 1
        self.scaler.scale(self.loss()).backward()
        if self.count == 2:
            self.model[0].weight.grad.fill_(torch.inf)  # type: ignore[index,union-attr]

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class CompiledStep(Plain):
    def __init__(self, backend: str) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True))
        torch._dynamo.reset()
        self.compiled = torch.compile(self.optimizer.step, backend=backend)

    def update(self) -> None:
        self.compiled()
        self.optimizer.zero_grad(set_to_none=False)


class CompiledModel(Plain):
    def __init__(self, backend: str) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.1))
        torch._dynamo.reset()
        self.compiled = torch.compile(self.model, backend=backend)
        self.state["model"] = self.compiled

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.compiled(torch.randn(8, 24)).square().mean()
        return loss


class Averaged(Plain):
    def __init__(self) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=0.1))
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.state["ema"] = self.average

    def update(self) -> None:
        # Before any optimizer has stepped: nothing but this call could hold the update back.
        if self.manager is not None:
            self.manager.before_update()
        self.average.update_parameters(self.model)
        super().update()


class MaxNorm(Plain):
    """The forward itself scales rows of the embedding down, in place."""

    def __init__(self) -> None:
        model = nn.Sequential(nn.Embedding(64, 24, max_norm=0.5), nn.Linear(24, 24))
        super().__init__(lambda params: torch.optim.SGD(params, lr=0.5), model=model)

    def loss(self) -> torch.Tensor:
        if self.manager is not None:
            self.manager.before_update()
        loss: torch.Tensor = self.model(torch.randint(0, 64, (32,))).square().mean()
        return loss


class Buffers(Plain):
    """Running statistics change in every forward; those saved are those of the moment of saving."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 24))
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.1), model=model)


class Frozen(Plain):
    """Some parameters have no gradient and never any state; others are tied."""

    def __init__(self) -> None:
        model = net()
        model.append(nn.Linear(24, 40))
        model[3].weight = model[0].weight.__class__(model[0].weight.detach().clone())
        model[0].weight.requires_grad_(False)
        model.append(nn.GELU())
        super().__init__(lambda params: torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.1), model=model)


def adamw(**options: Any) -> Callable[[], Case]:
    return lambda: Plain(lambda params: torch.optim.AdamW(params, lr=0.1, **options))


CASES: dict[str, Callable[[], Case]] = {
    "adamw-foreach": adamw(foreach=True),
    "adamw-fused": adamw(fused=True),
    "adamw-loop": adamw(foreach=False),
    "adamw-amsgrad": adamw(amsgrad=True, foreach=False),
    "sgd": lambda: Plain(lambda params: torch.optim.SGD(params, lr=0.1)),
    "sgd-momentum": lambda: Plain(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd-fused": lambda: Plain(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)),
    "adafactor": lambda: Plain(lambda params: torch.optim.Adafactor(params, lr=0.1)),
    "two-optimizers": TwoOptimizers,
    "in-backward": InBackward,
    "accumulating": lambda: Accumulating(lambda params: torch.optim.AdamW(params, lr=0.1)),
    "scaled": Scaled,
    "averaged": Averaged,
    "max-norm": MaxNorm,
    "buffers": Buffers,
    "frozen": Frozen,
    "compiled-step": lambda: CompiledStep("eager"),
    "compiled-model": lambda: CompiledModel("eager"),
}


def clones(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything tensor-like in the state, by the names that stock users know; written without Holdfast."""
    found: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            plain = getattr(value, "_orig_mod", value)
            for fqn, tensor in (*plain.named_parameters(), *plain.named_buffers()):
                found[f"{key}.{fqn}"] = tensor.detach().clone()
                names.setdefault(id(tensor), fqn)
    for optimizer in state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]:
        for param, kept in optimizer.state.items():
            for option, tensor in kept.items():
                if isinstance(tensor, torch.Tensor):
                    found[f"optimizer.state.{names[id(param)]}.{option}"] = tensor.detach().clone()
    return found


@contextlib.contextmanager
def saving(case: Case, root: Path) -> Iterator[tuple[holdfast.CheckpointManager, Gate]]:
    config = holdfast.CheckpointConfig(every=1, keep=None, stage_timeout=20.0)
    with holdfast.CheckpointManager(root, case.state, config=config) as manager, held_copies() as gate:
        case.manager = manager
        yield manager, gate


def check_all_saved_as_they_were(case: Case, root: Path) -> None:
    case.before()
    case.update()  # optimizers have state from here on
    expected = {}
    with saving(case, root) as (manager, gate):
        for step in range(1, STEPS + 1):
            expected[step] = clones(case.state)
            gate.close()
            handle = manager.save(step)
            case.before()
            case.update()
            assert not handle.done() or handle.exception() is None
        manager.wait()
        assert gate.passed >= STEPS, "copies took another way than through the gate: this test shows nothing"
    moved = [name for name in expected[1] if not torch.equal(expected[1][name], expected[STEPS][name])]
    assert moved, "training changed nothing"
    for step, tensors in expected.items():
        checkpoint = holdfast.open(root / f"step-{step}")
        assert {name for name in checkpoint.tensors if name.startswith(("model.", "ema.", "optimizer."))} == set(
            tensors
        )
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor), f"step {step}: {name}"


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_is_what_was(case: str, tmp_path: Path) -> None:
    check_all_saved_as_they_were(CASES[case](), tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a compiler")
def test_what_inductor_updates_is_held_back_too(tmp_path: Path) -> None:
    check_all_saved_as_they_were(CompiledStep("inductor"), tmp_path)


def test_the_loss_is_that_of_training_without_saving(tmp_path: Path) -> None:
    def losses(root: Path | None) -> list[float]:
        torch.manual_seed(3)
        case = Plain(lambda params: torch.optim.AdamW(params, lr=0.1))
        found = []
        with contextlib.ExitStack() as stack:
            manager = gate = None
            if root is not None:
                manager, gate = stack.enter_context(saving(case, root))
            for step in range(1, 6):
                loss = case.loss()
                loss.backward()
                case.update()
                found.append(loss.item())
                if manager is not None and gate is not None:
                    gate.close()
                    manager.step(step)
        return found

    assert losses(tmp_path) == losses(None)
