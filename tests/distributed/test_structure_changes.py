"""A structure that changes, on all ranks or one, replans by itself and loses no step; one that stands still does not.

Counters say what was planned and rendered, and every object collective of torch is counted: there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from launch import run_job
from torch import nn
from torch.distributed.tensor import DTensor
from worlds import fsdp, make_model

import holdfast

OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


def count_object_collectives(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that are called while ``patch`` stands."""
    called: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return call

    for name in OBJECT_COLLECTIVES:
        wrapped = counted(name, getattr(c10d, name))
        patch.setattr(c10d, name, wrapped)
        patch.setattr(dist, name, wrapped)
    return called


class Run:
    """Saves step after step and remembers, by torch's own gathering, what each step held."""

    def __init__(self, root: Path) -> None:
        self.model = make_model(fsdp, "run")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.extra: dict[str, Any] = {"note": "x"}
        state = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}
        # One capture at a time, and so one set of file images: what is rendered for a plan is rendered once.
        config = holdfast.CheckpointConfig(
            every=1, keep=None, in_flight=1, stage_timeout=30, persist_timeout=30, commit_timeout=30
        )
        self.manager = holdfast.CheckpointManager(root, state, config=config)
        self.step = 0
        self.held: dict[int, dict[str, torch.Tensor]] = {}

    def train(self) -> None:
        tokens = torch.tensor([[1, 2, 3 + dist.get_rank()]])
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> tuple[int, int]:
        """One more step; returns how many plans it took, and how many headers were rendered."""
        self.step += 1
        before = holdfast.statistics()
        (handle,) = self.manager.step(self.step)
        self.held[self.step] = self.now()
        self.train()  # while the save is being staged: the optimizer waits
        handle.result(30)
        after = holdfast.statistics()
        return tuple(after[name] - before[name] for name in ("plans_made", "headers_rendered"))  # type: ignore[return-value]

    def now(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": param for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                tensors[f"optimizer.state.{name}.{key}"] = value
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in tensors.items()
        }
        return {
            **whole,
            **{f"extra.{name}": v.clone() for name, v in self.extra.items() if isinstance(v, torch.Tensor)},
        }


def unchanged_saves_plan_nothing(run: Run) -> None:
    plans, headers = run.save()
    assert plans == 1
    assert headers > 0
    assert run.save()[0] == 1, "the first optimizer step has made state: that is a new structure"
    for _ in range(3):
        assert run.save() == (0, 0)


def adapters_on_all_ranks_are_one_new_plan(run: Run) -> None:
    for block in run.model.blocks:  # type: ignore[union-attr]
        block.register_parameter("lora", nn.Parameter(torch.full((8, 2), 0.5)))
        run.optimizer.add_param_group({"params": [block.lora], "lr": 0.1})
    assert run.save()[0] == 1
    assert run.save() == (0, 0)


def one_rank_alone_grows_a_tensor(run: Run) -> None:
    """Every rank plans anew, though only one has changed; the others learn of it in the background."""
    if dist.get_rank() == 1:
        run.extra["mine"] = torch.arange(5.0)
    assert run.save()[0] == 1
    assert run.save() == (0, 0)
    if dist.get_rank() == 1:
        run.extra["mine"] = torch.arange(9.0)
    assert run.save()[0] == 1
    if dist.get_rank() == 1:
        del run.extra["mine"]
    assert run.save()[0] == 1
    assert run.save() == (0, 0)


def objects_that_outgrow_their_record_are_one_new_plan(run: Run) -> None:
    run.extra["note"] = "y" * 100
    assert run.save() == (0, 0)
    if dist.get_rank() == 0:
        run.extra["note"] = "z" * 10_000
    assert run.save()[0] == 1
    run.extra["note"] = "z"
    assert run.save() == (0, 0)


def no_step_is_lost(run: Run) -> None:
    assert run.manager.steps() == list(range(1, run.step + 1))
    for step, held in run.held.items():
        checkpoint = holdfast.open(Path(run.manager._root) / f"step-{step}")
        assert checkpoint.verify().ok
        for name, value in held.items():
            assert torch.equal(checkpoint.read(name), value), f"step {step}: {name}"


def job(place: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        called = count_object_collectives(patch)
        run = Run(Path(place))
        unchanged_saves_plan_nothing(run)
        adapters_on_all_ranks_are_one_new_plan(run)
        one_rank_alone_grows_a_tensor(run)
        objects_that_outgrow_their_record_are_one_new_plan(run)
        dist.barrier()
        no_step_is_lost(run)
        run.manager.close()
        assert called == []
        dist.all_gather_object([None, None], 1)
        assert called == ["all_gather_object"], "the count counts"


def test_structures_that_change_replan_and_others_do_not(tmp_path: Path) -> None:
    run_job(job, nproc=2, args=[tmp_path])
