"""Training goes on from a restored state exactly as it would have, under every parallelism; replicas are stored once.

Here values come from real steps (forward, backward, optimizer, scheduler), saved lazily while the next step runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import in_world, run_job
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import ROWS, assert_same, ddp, fsdp, fsdp_tp, hsdp, inside, make_state, mesh_of, tensor_parallel

import holdfast

KINDS = {"fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel, "fsdp-tp": fsdp_tp, "ddp": ddp}
BALANCE = 1.25


class Loader:
    """A dataloader by its name: its position is each rank's own."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == dist.get_rank()
        self.position = state["position"]


def training_state(how: Any, tag: str) -> dict[str, Any]:
    """With an empty optimizer, and what is each rank's own."""
    state = make_state(how, tag, fresh=True)
    return {**state, "dataloader": Loader(), "own": holdfast.PerRank({"drawn": 0})}


def train_step(state: dict[str, Any], *, alike: bool) -> float:
    """``alike``: all ranks see the same tokens, as ranks of one tensor-parallel group must."""
    tokens = torch.randint(0, ROWS, (2, 3))
    if alike:
        dist.broadcast(tokens, 0)
    state["own"].value["drawn"] += int(tokens.sum())
    state["dataloader"].position += 1 + dist.get_rank()
    loss = state["model"](tokens).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["lr_scheduler"].step()
    state["optimizer"].zero_grad()
    state["train"]["step"] += 1
    return float(loss.detach())


def config() -> holdfast.CheckpointConfig:
    return holdfast.CheckpointConfig(every=2, stage_timeout=30, persist_timeout=30, commit_timeout=30)


def goes_on_as_before(root: Path, kind: str) -> None:
    # DDP lays out its buckets anew after a first step, which changes the order in which unequal gradients are summed.
    how, alike = KINDS[kind], "tp" in kind or kind == "ddp"
    torch.manual_seed(dist.get_rank())
    state = training_state(how, "begun")
    losses = []
    with holdfast.CheckpointManager(root / kind, state, config=config()) as manager:
        assert manager.restore() is None
        for step in range(1, 5):
            losses.append(train_step(state, alike=alike))
            manager.step(step)
        manager.wait()
        assert manager.steps() == [2, 4]
    torch.manual_seed(99)
    again = training_state(how, "other")
    with holdfast.CheckpointManager(root / kind, again, config=config()) as manager:
        assert manager.restore(2) == 2
        assert again["train"]["step"] == state["train"]["step"] - 2
        assert [train_step(again, alike=alike) for _ in range(2)] == losses[2:]
    assert_same(inside(again), inside(state), f"{kind}, two steps after restoring")
    assert again["own"].value == state["own"].value
    assert again["dataloader"].position == state["dataloader"].position


# a language model ------------------------------------------------------------------------------------------------


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=36, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="eager",
        )
    )  # fmt: skip


def sharded_llama(*, tensor_parallel: bool) -> nn.Module:
    torch.manual_seed(4)
    model = small_llama()
    world = dist.get_world_size()
    mesh = mesh_of(world // 2, 2, names=("dp", "tp")) if tensor_parallel else mesh_of(world)
    plan = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        if tensor_parallel:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"] if tensor_parallel else mesh)
    return fully_shard(model, mesh=mesh["dp"] if tensor_parallel else mesh)


def llama_state(*, tensor_parallel: bool) -> dict[str, Any]:
    model = sharded_llama(tensor_parallel=tensor_parallel)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Everything gathered by torch: what loading must give, in whatever layout."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in inside(state).items()}


def llama_is_saved(root: Path) -> None:
    state = llama_state(tensor_parallel=True)
    tokens = torch.arange(8)[None]
    for _ in range(2):
        state["model"](input_ids=tokens, labels=tokens).loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    holdfast.save(state, root / "llama", timeout=60)
    stock = {
        "model": get_model_state_dict(state["model"]),
        "optimizer": get_optimizer_state_dict(state["model"], state["optimizer"]),
    }
    dcp.save(stock, checkpoint_id=root / "llama-stock")
    expected = whole_tensors(state)
    if dist.get_rank() == 0:
        torch.save(expected, root / "llama.pt")


def llama_is_loaded(root: Path) -> None:
    expected = torch.load(root / "llama.pt", weights_only=True)
    for name in ("llama", "llama-stock"):
        state = llama_state(tensor_parallel=False)
        holdfast.load(state, root / name, timeout=60)
        assert_same(whole_tensors(state), expected, name)
    state = llama_state(tensor_parallel=False)
    model, optimizer = state["model"], state["optimizer"]
    stock = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(stock, checkpoint_id=root / "llama")
    set_model_state_dict(model, stock["model"])
    set_optimizer_state_dict(model, optimizer, stock["optimizer"])
    assert_same(whole_tensors(state), expected, "llama by stock DCP")


# replicas --------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that headers don't count, with tensors of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96 + 16 * index, 128) for index in range(12))


def replicas_are_stored_once(root: Path, kind: str) -> None:
    """One copy on disk, and every rank writes its share of it."""
    state = {"model": KINDS[kind](Wide())}
    checkpoint = holdfast.save(state, root / f"once-{kind}", timeout=60)
    payload = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert payload == 4 * sum(param.numel() for param in Wide().parameters())
    directory = Path(checkpoint.path)
    written = [(directory / f"__{rank}_0.distcp").stat().st_size for rank in range(dist.get_world_size())]
    assert payload < sum(written) < 1.06 * payload
    assert max(written) < BALANCE * min(written), written


def four_ranks(root: Path) -> None:
    for kind in KINDS:
        goes_on_as_before(root, kind)
    for kind in ("ddp", "hsdp"):
        replicas_are_stored_once(root, kind)
    llama_is_saved(root)


def job(place: str) -> None:
    in_world(4, four_ranks, Path(place))
    in_world(2, llama_is_loaded, Path(place))


def test_training_goes_on_from_any_parallelism(tmp_path: Path) -> None:
    run_job(job, nproc=4, args=[tmp_path])
