"""Modules whose ``state_dict()`` isn't their parameters and buffers, one of each kind; for tests of all paths.

Each has what `nn.Linear(4, 6)` has, and forwards alike, however it keeps and names it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn


class Plain(nn.Module):
    """The ground for the others: no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(6))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return nn.functional.linear(x, self.weight, self.bias)


class SplitsIntoCopies(Plain):
    """As fused query, key and value are kept in one, and saved as three."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(prefix + "weight")
        for name, part in zip("qkv", whole.reshape(3, 2, 4).unbind(0), strict=True):
            state[f"{prefix}{name}.weight"] = part.clone()

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        keys = [f"{prefix}{name}.weight" for name in "qkv"]
        if all(key in state for key in keys):
            state[prefix + "weight"] = torch.cat([state.pop(key) for key in keys])


class SplitsIntoViews(SplitsIntoCopies):
    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, part in zip("qkv", state.pop(prefix + "weight").chunk(3), strict=True):
            state[f"{prefix}{name}.weight"] = part

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(6))
        self.register_buffer("seen", torch.zeros(3))
        self._register_state_dict_hook(SplitsIntoViews._split)
        self._register_load_state_dict_pre_hook(self._join_one)

    def _join_one(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._join(self, state, prefix)


class Joins(Plain):
    """Two parameters, saved as one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._joined)
        self._register_load_state_dict_pre_hook(self._apart)

    @staticmethod
    def _joined(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        bias = state.pop(prefix + "bias")
        state[prefix + "both"] = torch.cat([state.pop(prefix + "weight"), bias[:, None]], 1)

    def _apart(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        both = state.pop(prefix + "both")
        state[prefix + "weight"], state[prefix + "bias"] = both[:, :4], both[:, 4]


class Renames(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._in)

    @staticmethod
    def _out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}linear.{key[len(prefix) :]}"] = state.pop(key)

    @staticmethod
    def _in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            state[key.replace(f"{prefix}linear.", prefix)] = state.pop(key)


class DropsFrozen(Plain):
    """An adapter beside a frozen weight that is had elsewhere; nothing says so to ``load_state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(6, 4), requires_grad=False)
        self.register_state_dict_post_hook(self._drop)

    @staticmethod
    def _drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[prefix + "base"], state[prefix + "seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight + self.base, self.bias)


class Adds(Plain):
    """Something computed, and plain objects, which loading takes off again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "norm"] = module.weight.detach().norm()
        state[prefix + "about"] = {"calls": module.calls, "sizes": (4, 6)}

    @staticmethod
    def _take(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.pop(prefix + "norm", None)
        module.calls = state.pop(prefix + "about", {"calls": -1})["calls"]


class Transposes(Plain):
    """Saved as a view with other strides."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Casts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._cast)

    @staticmethod
    def _cast(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].double()


class Overrides(Plain):
    """Both methods, as a subclass would: the whole under another prefix."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        prefix = options.pop("prefix", "")
        return super().state_dict(*args, prefix=f"{prefix}inner.", **options)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        given = OrderedDict((key.removeprefix("inner."), value) for key, value in state_dict.items())
        return super().load_state_dict(given, strict=strict, assign=assign)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for key in list(state):
            state[key.replace(f"{prefix}inner.", prefix)] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *rest)


class Prepares(Plain):
    """A hook in front of ``state_dict()`` that brings a parameter up to date, and one behind ``load_state_dict()``."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = self.weight.detach() * 2
        self.register_state_dict_pre_hook(self._before)
        self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _before(module: Any, prefix: str, keep_vars: bool) -> None:
        module.derived = module.weight.detach() * 2

    @staticmethod
    def _after(module: Any, incompatible: Any) -> None:
        module.derived = module.weight.detach() * 2


KINDS: list[type[Plain]] = [
    SplitsIntoCopies, SplitsIntoViews, Joins, Renames, DropsFrozen, Adds, Transposes, Casts, Overrides, Prepares,
]  # fmt: skip


class Net(nn.Module):
    """A hooked module among others, below the root."""

    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(kind(), nn.ReLU())
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.middle(self.first(x))))


class All(nn.Module):
    """One net of each kind, to be trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({kind.__name__: Net(kind) for kind in KINDS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([net(x) for net in self.nets.values()])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def assert_same_tensors(left: nn.Module, right: nn.Module, *, but: tuple[str, ...] = ()) -> None:
    """Parameters and buffers as they are in memory, whatever ``state_dict()`` makes of them."""
    mine = dict([*left.named_parameters(), *left.named_buffers()])
    theirs = dict([*right.named_parameters(), *right.named_buffers()])
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if not name.endswith(but or ("\0",)):
            assert torch.equal(tensor, theirs[name]), name
