"""No way of changing the state while it is staged makes a checkpoint that is silently wrong.

Each way is tried while copies are held back, and again at random moments of copies that run. Whatever becomes of the
save, it is one of: the change had to wait (`WAITS`), the save failed and named the tensor (`FOUND`), or what was
changed had been copied by then (`EAGER`). What was published is compared, bit for bit, with what was there when `save`
was called. Ways that nothing notices are in docs/reliability.md, and in ``test_staging``'s NOT_NOTICED.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.testing.staging import Gate, held_copies

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(?s).*was changed .*before_update:UserWarning"),  # `on_error` says so
]

WAITS, FOUND, EAGER = "the change waited", "the save failed", "copied before"
ROUNDS = int(os.environ.get("HOLDFAST_RACES", "1"))
"""Of each way, at random moments; `make test-crash-full` asks for more."""


class Training:
    """All that may be changed: parameters, optimizer state, buffers, an average, plain tensors and values."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], width: int) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 8), nn.Embedding(16, 8)
        )
        self.optimizer = make(self.model[:3].parameters())
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model[:3], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.spare = nn.Parameter(torch.full((width, width), 7.0))
        self.plain = torch.arange(64.0)
        self.values = {"seen": 0, "history": [1.0, 2.0]}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "plain": self.plain,
            "values": self.values,
        }
        self.manager: holdfast.CheckpointManager | None = None
        self.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model[:3])
        self.optimizer.step()  # the average is another value from here on
        self.backward()

    @property
    def weight(self) -> nn.Parameter:
        found = self.model[0].weight
        assert isinstance(found, nn.Parameter)
        return found

    def kept(self, name: str) -> torch.Tensor:
        found = self.optimizer.state[self.weight][name]
        assert isinstance(found, torch.Tensor)
        return found

    def backward(self) -> None:
        self.model[:3](torch.randn(4, self.model[0].in_features)).square().mean().backward()

    def now(self) -> dict[str, Any]:
        """Every value by its name in a checkpoint; written without Holdfast."""
        found: dict[str, Any] = {"plain": self.plain.clone(), "values.seen": self.values["seen"]}
        names = {}
        for key, module in (("model", self.model), ("average", self.average)):
            for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
                found[f"{key}.{fqn}"] = tensor.detach().clone()
                names.setdefault(id(tensor), fqn)
        for param, kept in self.optimizer.state.items():
            for option, tensor in kept.items():
                if isinstance(tensor, torch.Tensor):
                    found[f"optimizer.state.{names[id(param)]}.{option}"] = tensor.detach().clone()
        return found


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=0.1, **options)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


Change = Callable[[Training], object]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, a loop": adamw(foreach=False),
    "AdamW, foreach": adamw(foreach=True),
    "AdamW, fused": adamw(fused=True),
    "AdamW, amsgrad": adamw(amsgrad=True),
    "Adam, maximize": lambda params: torch.optim.Adam(params, lr=0.1, maximize=True),
    "SGD, a loop": sgd(foreach=False),
    "SGD, foreach": sgd(foreach=True),
    "SGD, fused": sgd(fused=True),
    "Adagrad, fused": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True, momentum=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1),
}


def fused_kernel(case: Training) -> None:
    weight = case.weight
    torch._fused_adamw_(
        [weight], [torch.ones_like(weight)], [case.kept("exp_avg")], [case.kept("exp_avg_sq")], [], [case.kept("step")],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def said_before(change: Change) -> Change:
    def run(case: Training) -> None:
        assert case.manager is not None
        case.manager.before_update()
        change(case)

    return run


def average_by_hand(case: Training) -> None:
    for own, other in zip(case.average.module.parameters(), case.model[:3].parameters(), strict=True):
        own.lerp_(other, 0.1)


def average_by_foreach(case: Training) -> None:
    torch._foreach_lerp_(list(case.average.module.parameters()), list(case.model[:3].parameters()), 0.1)


def compiled_edit(case: Training) -> None:
    torch._dynamo.reset()
    torch.compile(lambda tensor: tensor.mul_(2), backend="eager")(case.weight)


def raw_pointer(case: Training) -> None:
    ctypes.memset(case.weight.data_ptr(), 1, case.weight.nbytes)


def nothing(_case: Training) -> None:
    """Also a way: a save that nobody disturbs."""


def rescale_in_forward(case: Training) -> None:
    case.model[3].max_norm = 1e-3
    case.model[3](torch.arange(16))


WAYS: dict[str, tuple[str, Change]] = {
    "nothing at all": (EAGER, nothing),
    # the hook in front of optimizers, and what says so by itself
    "optimizer.step()": (WAITS, lambda case: case.optimizer.step()),
    "optimizer.step() twice": (WAITS, lambda case: (case.optimizer.step(), case.optimizer.step())),
    "step() with a closure": (WAITS, lambda case: case.optimizer.step(lambda: torch.zeros(()))),
    "an average, before_update()": (WAITS, said_before(lambda case: case.average.update_parameters(case.model[:3]))),
    "add_, before_update()": (WAITS, said_before(lambda case: case.weight.add_(1))),
    ".data.add_, before_update()": (WAITS, said_before(lambda case: case.weight.data.add_(1))),
    "a NumPy view, before_update()": (WAITS, said_before(lambda case: case.weight.detach().numpy().fill(3))),
    # averages
    "AveragedModel": (FOUND, lambda case: case.average.update_parameters(case.model[:3])),
    "an average by lerp_": (FOUND, average_by_hand),
    "an average by foreach": (FOUND, average_by_foreach),
    # in place
    "add_": (FOUND, lambda case: case.weight.add_(1)),
    "copy_": (FOUND, lambda case: case.weight.copy_(case.spare)),
    "mul_ of optimizer state": (FOUND, lambda case: case.kept("exp_avg").mul_(3)),
    "add_ to a step count": (FOUND, lambda case: case.kept("step").add_(1)),
    "one element": (FOUND, lambda case: case.weight[3].__setitem__(4, 2.0)),
    "index_put_": (FOUND, lambda case: case.weight.index_put_((torch.tensor([1]),), torch.tensor(9.0))),
    "masked_fill_": (FOUND, lambda case: case.weight.masked_fill_(case.weight > 0, 4.0)),
    "a view": (FOUND, lambda case: case.weight.view(-1)[5:6].fill_(9)),
    "detach()": (FOUND, lambda case: case.weight.detach().mul_(2)),
    "out=": (FOUND, lambda case: torch.add(case.weight.detach(), 1, out=case.weight.detach())),
    "an initializer": (FOUND, lambda case: nn.init.normal_(case.weight)),
    "clamp_ of every parameter": (FOUND, lambda case: [p.clamp_(-1e-6, 1e-6) for p in case.model.parameters()]),
    "foreach": (FOUND, lambda case: torch._foreach_add_(list(case.model.parameters()), 1.0)),
    "compiled": (FOUND, compiled_edit),
    "max_norm in forward": (FOUND, rescale_in_forward),
    "load_state_dict": (
        FOUND,
        lambda case: case.model.load_state_dict({k: 2 * v for k, v in case.model.state_dict().items()}),
    ),
    # other memory
    ".data = other": (FOUND, lambda case: setattr(case.weight, "data", torch.zeros_like(case.weight))),
    "set_": (FOUND, lambda case: case.weight.set_(torch.zeros_like(case.weight))),
    "swap_tensors": (FOUND, lambda case: torch.utils.swap_tensors(case.weight, nn.Parameter(case.spare.detach()))),
    "vector_to_parameters": (
        FOUND,
        lambda case: nn.utils.vector_to_parameters(
            torch.zeros(sum(p.numel() for p in case.model.parameters())), case.model.parameters()
        ),
    ),
    "half()": (FOUND, lambda case: case.model[2].half()),
    # what is taken at once
    "BatchNorm in forward": (EAGER, lambda case: case.model[:3](torch.randn(4, case.model[0].in_features))),
    "a buffer": (EAGER, lambda case: case.model[1].running_mean.add_(1)),
    "a plain tensor": (EAGER, lambda case: case.plain.mul_(2)),
    "a plain tensor's NumPy view": (EAGER, lambda case: case.plain.numpy().fill(0)),
    "plain values": (EAGER, lambda case: (case.values.update(seen=5), case.values["history"].append(3.0))),
    "a learning rate": (EAGER, lambda case: case.optimizer.param_groups[0].update(lr=7.0)),
    "gradients": (EAGER, lambda case: case.optimizer.zero_grad()),
}  # fmt: skip
BY_WORDS: dict[str, Change] = {
    ".data.add_": lambda case: case.weight.data.add_(1),
    ".data.copy_": lambda case: case.weight.data.copy_(case.spare),
    "a NumPy view": lambda case: case.weight.detach().numpy().fill(3),
    "DLPack": lambda case: torch.from_dlpack(case.weight.detach()).mul_(2),
    "its storage": lambda case: case.weight.untyped_storage().fill_(1),
    "a raw pointer": raw_pointer,
    "a fused kernel": fused_kernel,  # by itself: it is the optimizer that counts the step
}
"""Moves neither counter nor address: found by the words noted, if a copy has words of after the change."""


@pytest.fixture
def gate() -> Iterator[Gate]:
    with held_copies(opens_for_updates=True) as gate:
        gate.open()
        yield gate


def manager_of(case: Training, root: Path, **options: Any) -> holdfast.CheckpointManager:
    config = holdfast.CheckpointConfig(every=None, keep=None, stage_timeout=20.0, on_error="warn", **options)
    case.manager = holdfast.CheckpointManager(root, case.state, config=config)
    return case.manager


def outcome_of(handle: holdfast.SaveHandle, expected: dict[str, Any], changed: dict[str, Any]) -> str:
    """ "published" and right, or "failed" by the name of something that was changed; anything else fails the test."""
    error = handle.exception(60)
    if error is not None:
        assert isinstance(error, holdfast.StateChangedWhileStaging), error
        differs = [name for name in expected if same(expected[name], changed.get(name)) is False]
        assert error.tensor in differs, (error.tensor, differs)
        return "failed"
    checkpoint = holdfast.open(handle.path)
    for name, value in expected.items():
        found = checkpoint.read(name) if isinstance(value, torch.Tensor) else checkpoint.objects[name]
        assert same(found, value), f"silently wrong: {name}"
    assert set(checkpoint.tensors) - {name for name in checkpoint.tensors if name.startswith("rng.")} <= set(expected)
    return "published"


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def play(change: Change, case: Training) -> None:
    with torch.no_grad():
        change(case)


def check_held(case: Training, change: Change, gate: Gate, root: Path, *, staging: str = "lazy") -> str:
    """Save, and change the state before a byte of it has been copied."""
    with manager_of(case, root, staging=staging) as manager:
        expected = case.now()
        if staging == "lazy":
            gate.close()
        handle = manager.save(1)
        play(change, case)
        changed = case.now()
        gate.open()
        found = outcome_of(handle, expected, changed)
        manager.wait()
        # And it is over with that save.
        if not any(dtype != torch.float32 for dtype in {p.dtype for p in case.model.parameters()}):
            expected = case.now()
            assert outcome_of(manager.save(2), expected, expected) == "published"
    return found


@pytest.mark.parametrize("way", [*WAYS, *BY_WORDS])
def test_a_change_before_the_copy(way: str, gate: Gate, tmp_path: Path) -> None:
    kind, change = WAYS.get(way) or (FOUND, BY_WORDS[way])
    found = check_held(Training(adamw(fused=True), 32), change, gate, tmp_path)
    assert found == ("failed" if kind == FOUND else "published")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_waits(name: str, gate: Gate, tmp_path: Path) -> None:
    case = Training(OPTIMIZERS[name], 32)
    before = case.weight.detach().clone()
    assert check_held(case, lambda case: case.optimizer.step(), gate, tmp_path) == "published"
    assert not torch.equal(before, case.weight), "no update at all"


@pytest.mark.parametrize("way", [*WAYS, *BY_WORDS])
def test_eager_staging_knows_no_race(way: str, gate: Gate, tmp_path: Path) -> None:
    change = WAYS[way][1] if way in WAYS else BY_WORDS[way]
    assert check_held(Training(adamw(fused=True), 32), change, gate, tmp_path, staging="eager") == "published"


@pytest.mark.timeout(60 + 60 * ROUNDS)
def test_changes_at_random_moments(tmp_path: Path, tried: Counter[str]) -> None:
    """Of copies that run: whatever was torn is found. ``HOLDFAST_RACES`` rounds of each way."""
    rng = random.Random(os.environ.get("HOLDFAST_SEED", "1"))
    case = Training(adamw(fused=True), 1024)
    counts: Counter[str] = Counter()
    ways = [way for way in WAYS if way not in ("half()", "compiled", "swap_tensors", "max_norm in forward")]
    rounds = 0
    with manager_of(case, tmp_path / "root", in_flight=1) as manager:
        for _ in range(ROUNDS):
            rng.shuffle(ways)
            for way in ways:
                rounds += 1
                case.backward()
                with torch.no_grad():
                    case.weight.uniform_()  # no two saves hold equal bytes
                expected = case.now()
                handle = manager.save(rounds)
                pause_s = rng.choice((0.0, 0.0, rng.uniform(0, 0.02)))
                time.sleep(pause_s)
                play(WAYS[way][1], case)
                found = outcome_of(handle, expected, case.now())
                assert found == "published" or WAYS[way][0] == FOUND, way
                counts[found] += 1
        manager.wait()
    assert counts["published"]
    assert counts["failed"]
    tried["changes at random moments of staging"] += rounds
