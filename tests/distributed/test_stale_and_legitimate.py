"""What a stranger's training looks like, on two ranks: set-ups that must not warn, and mistakes that must."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import run_job
from test_suspicious_ranks import found_in, net, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Case = tuple[dict[str, Any], Callable[[int], None]]
SAVES = 4


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def plain(model: nn.Module, **state: Any) -> Case:
    optimizer = adam(model)
    return {"model": model, "optimizer": optimizer, **state}, lambda _: train(model, optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.T.contiguous())
        self.again = nn.Linear(16, 32, bias=False)
        self.again.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x) + self.again(x))


class Routed(nn.Module):
    """Only the first expert gets tokens; the base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](self.base(x))


class Lookup(nn.Module):
    """An embedding with sparse gradients, of which ten rows are used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().flatten().long().clamp(max=9))


def accumulated(_root: Path) -> Case:
    model = fully_shard(net())
    optimizer = adam(model)

    def step(number: int) -> None:
        model(torch.randn(4, 16)).square().sum().backward()
        if number % 3 == 1:
            optimizer.step()
            optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def warming(_root: Path) -> Case:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: max(0.0, number - 2.0))

    def step(_number: int) -> None:
        train(model, optimizer)
        schedule.step()

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, step


def averaged(*, beside: bool, every: int) -> Callable[[Path], Case]:
    def case(_root: Path) -> Case:
        model = DistributedDataParallel(net())
        average, optimizer = copy.deepcopy(model.module), adam(model)

        def step(number: int) -> None:
            train(model, optimizer)
            if every and number % every == 0:
                with torch.no_grad():
                    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(value, 0.1)

        return {**({"model": model} if beside else {}), "average": average, "optimizer": optimizer}, step

    return case


def normalized(_root: Path) -> Case:
    """Statistics of a batch norm differ over ranks: each sees its own data."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)))
    optimizer = adam(model)

    def step(number: int) -> None:
        torch.manual_seed(100 * number + dist.get_rank())
        train(model, optimizer)

    return {"model": model, "optimizer": optimizer, "seen": torch.tensor([dist.get_rank()])}, step


def sparse(_root: Path) -> Case:
    model = DistributedDataParallel(Lookup())
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    def step(_number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def optimizer_only(_root: Path) -> Case:
    model = fully_shard(net())
    optimizer = adam(model)
    return {"optimizer": optimizer}, lambda _: train(model, optimizer)


def moved(_root: Path) -> Case:
    model = net()
    optimizer = adam(model)
    model.to(torch.float64).to(torch.float32)
    return {"model": model, "optimizer": optimizer}, lambda _: train(model, optimizer)


LEGITIMATE: dict[str, Callable[[Path], Case]] = {
    "tied, with a mask": lambda _: plain(DistributedDataParallel(Tied())),
    "tied, sharded": lambda _: plain(fully_shard(Tied())),
    "experts without tokens": lambda _: plain(DistributedDataParallel(Routed(), find_unused_parameters=True)),
    "experts without tokens, sharded": lambda _: plain(fully_shard(Routed())),
    "accumulation": accumulated,
    "warm-up": warming,
    "an average beside the model": averaged(beside=True, every=1),
    "an average beside the model, seldom": averaged(beside=True, every=3),
    "an average alone": averaged(beside=False, every=1),
    "batch norm": normalized,
    "sparse": sparse,
    "the optimizer alone": optimizer_only,
    "moved": moved,
}


def copied_of_wrapped(_root: Path) -> Case:
    """The module was wrapped anew, and the old one is in the state."""
    old = net()
    model = DistributedDataParallel(copy.deepcopy(old))
    optimizer = adam(model)
    return {"model": old, "optimizer": optimizer}, lambda _: train(model, optimizer)


def copied_before_sharding(_root: Path) -> Case:
    old = net()
    model = fully_shard(copy.deepcopy(old))
    optimizer = adam(model)
    return {"model": old, "optimizer": optimizer}, lambda _: train(model, optimizer)


def sharded_twice(_root: Path) -> Case:
    old, model = fully_shard(net()), fully_shard(net())
    optimizer = adam(model)
    return {"model": old, "optimizer": optimizer}, lambda _: train(model, optimizer)


def with_momentum(_root: Path) -> Case:
    old, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return {"model": old, "optimizer": optimizer}, lambda _: train(model, optimizer)


def without_state(_root: Path) -> Case:
    old, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {"model": old, "optimizer": optimizer}, lambda _: train(model, optimizer)


def dictionaries(_root: Path) -> Case:
    """As a loop that took the state dict once, and copied it to the host, would have it."""
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {"model": values, "optimizer": optimizer}, lambda _: train(model, optimizer)


STALE: dict[str, Callable[[Path], Case]] = {
    "wrapped anew": copied_of_wrapped,
    "copied before it was sharded": copied_before_sharding,
    "sharded twice": sharded_twice,
    "momentum": with_momentum,
    "no optimizer state": without_state,
    "a copied dictionary": dictionaries,
    "an average that stands still": averaged(beside=False, every=0),
}


def damaged(kind: str, where: str) -> Callable[[Path], Case]:
    """One bit, or a NaN, on rank 1 at the third save."""

    def case(_root: Path) -> Case:
        if kind == "ddp":
            model: nn.Module = DistributedDataParallel(net())
        else:
            shape = (2, 1) if kind == "hsdp" else (2,)
            names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
            model = fully_shard(net(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        optimizer = adam(model)

        def step(number: int) -> None:
            train(model, optimizer)
            if number != 3 or dist.get_rank() != 1:
                return
            weight = next(iter(model.parameters()))
            value = weight if "weight" in where else optimizer.state[weight]["exp_avg_sq"]
            local = (value.to_local() if hasattr(value, "to_local") else value).detach().view(-1)
            if "nan" in where:
                local[3] = float("nan")
            else:
                local.view(torch.int32)[7] ^= 1 << 20

        return {"model": model, "optimizer": optimizer}, step

    return case


DAMAGED = {
    f"{where}, {kind}": damaged(kind, where)
    for kind in ("ddp", "hsdp", "fsdp")
    for where in ("weight flipped", "state flipped", "weight nan", "state nan")
    if kind != "fsdp" or "nan" in where
}


def run_cases(root: str, names: str, saves: str) -> dict[str, list[list[str]]]:
    cases = {"LEGITIMATE": LEGITIMATE, "STALE": STALE, "DAMAGED": DAMAGED}[names]
    found = {}
    for number, (name, case) in enumerate(cases.items()):
        torch.manual_seed(0)
        where = Path(root) / str(number)
        found[name] = found_in(str(where), *case(where), steps=int(saves))
    return found


def check_legitimate(root: str) -> None:
    found = run_cases(root, "LEGITIMATE", "4")
    assert {name: told for name, told in found.items() if any(told)} == {}, found


def check_stale(root: str) -> None:
    found = run_cases(root, "STALE", "4")
    assert {name: told for name, told in found.items() if told[0] or told[2:] != [["stale"]] * 2} == {}, found


def check_damaged(root: str) -> None:
    found = run_cases(root, "DAMAGED", "14")
    whats = {name: {what for one in told for what in one} for name, told in found.items()}
    assert {name: found[name] for name in found if any(found[name][:2])} == {}, found
    wanted = {name: "nonfinite" if "nan" in name else "replicas" for name in found}
    assert {name: found[name] for name in found if wanted[name] not in whats[name]} == {}, found


def test_legitimate_training_is_no_alarm(tmp_path: Path) -> None:
    run_job(check_legitimate, nproc=2, args=[tmp_path])


def test_stale_handles_are_told_of(tmp_path: Path) -> None:
    run_job(check_stale, nproc=2, args=[tmp_path])


def test_damage_on_one_rank_is_told_of(tmp_path: Path) -> None:
    run_job(check_damaged, nproc=2, args=[tmp_path])
