"""FSDP1 (``FullyShardedDataParallel``): modules and optimizers in the state as they are, for any other sharding."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import in_world, run_job
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import holdfast
from holdfast.sync.weights.apply import TargetFactory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 13)
        self.down = nn.Linear(13, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 1)  # fewer rows than ranks
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        return self.head(x)


KINDS = ("flat", "orig", "mesh", "fsdp2", "plain")


def make_state(kind: str, seed: int, *, groups: int = 2) -> dict[str, Any]:
    """FSDP1 with its own flat parameters has no groups but one."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if kind == "fsdp2":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    elif kind != "plain":
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": kind != "flat"}
        if kind == "mesh":
            options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    params = list(model.parameters())
    given: Any = params
    if kind != "flat" and groups > 1:
        given = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(given, lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, Any], steps: range) -> list[float]:
    """On the same tokens on every rank, so that all worlds do the same."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = state["model"](torch.randint(0, 7, (4, 3))).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def save_and_resume(root: Path, kind: str) -> None:
    state = make_state(kind, 0)
    train(state, range(3))
    wrapped = isinstance(state["model"], FSDP)
    before = FSDP.get_state_dict_type(state["model"]).state_dict_type if wrapped else None
    with holdfast.CheckpointManager(root / kind, state) as manager:
        handle = manager.save(3)
        losses = train(state, range(3, 6))
        handle.result()
    if wrapped:
        assert FSDP.get_state_dict_type(state["model"]).state_dict_type is before
    for steps in (0, 2):  # fresh, and one that has been trained otherwise
        other = make_state(kind, 1)
        train(other, range(steps))
        group = other["optimizer"].param_groups[0]
        holdfast.load(other, root / kind)
        assert group is other["optimizer"].param_groups[0]
        assert train(other, range(3, 6)) == losses
    checkpoint = holdfast.open(root / kind)
    assert checkpoint.verify().ok
    names = {name for name, _ in Net().named_parameters()}
    assert {f"model.{name}" for name in [*names, "seen"]} == {n for n in checkpoint.tensors if n.startswith("model.")}
    moments = {f"optimizer.state.{name}.exp_avg" for name in names}
    assert moments <= set(checkpoint.tensors)
    assert list(checkpoint.tensors["optimizer.state.blocks.1.up.weight.exp_avg"].shape) == [13, 8]


def with_stock(root: Path, kind: str) -> None:
    """Stock reads what Holdfast wrote into FSDP1, and Holdfast what stock wrote from it."""
    state = make_state(kind, 1)
    train(state, range(1))
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    theirs = {"model": model, "optimizer": optimizer}
    # By default it takes a checkpoint for one of torch 2.3 where a rank has no shard of a parameter, its own ones too.
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load(theirs, checkpoint_id=holdfast.open(root / kind).path, planner=planner)
    set_state_dict(
        state["model"], state["optimizer"], model_state_dict=theirs["model"], optim_state_dict=theirs["optimizer"]
    )
    state["scheduler"].load_state_dict(holdfast.open(root / kind).state()["scheduler"])
    expected = make_state(kind, 0)
    train(expected, range(3))
    assert train(state, range(3, 5)) == train(expected, range(3, 5))
    model, optimizer = get_state_dict(expected["model"], expected["optimizer"])
    dcp.save(
        {"model": model, "optimizer": optimizer, "scheduler": expected["scheduler"].state_dict()},
        checkpoint_id=root / f"stock-{kind}",
    )
    fresh = make_state(kind, 2)
    holdfast.load(fresh, root / f"stock-{kind}")
    assert train(fresh, range(5, 7)) == train(expected, range(5, 7))


def load_from(root: Path, stored: str, kind: str) -> None:
    state = make_state(kind, 1, groups=1)
    holdfast.load(state, root / stored)
    expected = make_state(kind, 0, groups=1)
    train(expected, range(3))
    torch.testing.assert_close(train(state, range(3, 6)), train(expected, range(3, 6)), rtol=1e-5, atol=1e-6)


def save_from(root: Path, name: str, kind: str) -> None:
    state = make_state(kind, 0, groups=1)
    train(state, range(3))
    holdfast.save(state, root / name)


def same_world(tmp_path: str) -> None:
    for kind in ("flat", "orig", "mesh", "fsdp2"):
        in_world(2, save_and_resume, Path(tmp_path), kind)
    for kind in ("flat", "orig"):
        in_world(2, with_stock, Path(tmp_path), kind)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_job(same_world, nproc=2, args=[tmp_path])


def other_worlds(tmp_path: str) -> None:
    root = Path(tmp_path)
    in_world(2, save_from, root, "flat-2", "flat")
    in_world(2, save_from, root, "fsdp2-2", "orig")
    in_world(1, save_from, root, "plain-1", "plain")
    with_group(1, save_from, root, "flat-1", "flat")
    for stored in ("flat-2", "fsdp2-2", "plain-1", "flat-1"):
        in_world(1, load_from, root, stored, "plain")
        with_group(1, load_from, root, stored, "orig")
        in_world(2, load_from, root, stored, "flat")
        in_world(2, load_from, root, stored, "fsdp2")
    in_world(3, load_from, root, "flat-2", "orig")


def with_group(world: int, function: Any, *args: Any) -> None:
    in_world(world, in_group, function.__name__, *args)


def in_group(name: str, *args: Any) -> None:
    """FSDP1 wants a group, of one rank too, where it shards nothing."""
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    globals()[name](*args)
    if made:
        dist.destroy_process_group()


def test_a_checkpoint_loads_in_other_worlds_and_other_shardings(tmp_path: Path) -> None:
    run_job(other_worlds, nproc=3, args=[tmp_path])


def refusals(tmp_path: str) -> None:
    root = Path(tmp_path)
    state = make_state("flat", 0)
    train(state, range(1))
    with pytest.raises(holdfast.ConfigError, match=r"optimizer: its parameters are slices .* put the module into"):
        holdfast.save({"optimizer": state["optimizer"]}, root / "alone")
    with pytest.raises(holdfast.ConfigError, match="several optimizers, of FSDP1"):
        holdfast.save({**state, "optimizer": [state["optimizer"], state["optimizer"]]}, root / "list")
    with pytest.raises(holdfast.ConfigError, match=r"FSDP1 .*can't be exported"):
        holdfast.export_hf(state["model"], root / "hf")
    with pytest.raises(holdfast.ConfigError, match=r"FSDP1 .*can't be received into"):
        TargetFactory().destination(state["model"], streaming=False)
    dist.barrier()  # rank 0 tidies
    assert not any(root.iterdir())
    holdfast.save(state, root / "good")
    torch.manual_seed(0)
    other = {**make_state("flat", 1), "more": torch.zeros(2)}
    before = [param.clone() for param in other["model"].parameters()]
    with pytest.raises(holdfast.StateMismatch, match="more"):
        holdfast.load(other, root / "good")
    bigger = Net()
    bigger.head = nn.Linear(8, 2)
    wrapped = FSDP(bigger, device_id=torch.device("cpu"))
    with pytest.raises(
        holdfast.StateMismatch, match=r"model\.head\.weight .*stored as \[1, 8\], the state has \[2, 8\]"
    ):
        holdfast.load({"model": wrapped}, root / "good")
    assert all(map(torch.equal, before, other["model"].parameters()))
    with pytest.raises(holdfast.StateMismatch, match=r"param_groups\.1"):
        holdfast.load(make_state("orig", 0), root / "good")
    swapped = make_state("orig", 0)
    holdfast.save(swapped, root / "groups")
    swapped["optimizer"].param_groups.reverse()
    for group in swapped["optimizer"].param_groups:
        group["weight_decay"] = 7.0
    holdfast.load(swapped, root / "groups")
    assert [group["weight_decay"] for group in swapped["optimizer"].param_groups] == [0.0, 0.1]
    moved = swapped["optimizer"].param_groups[0]["params"].pop()
    swapped["optimizer"].param_groups[1]["params"].append(moved)
    with pytest.raises(holdfast.StateMismatch, match="are not those of one group in the checkpoint"):
        holdfast.load(swapped, root / "groups")
    unstepped = make_state("orig", 0)
    holdfast.save(unstepped, root / "unstepped")
    stepped = make_state("orig", 1)
    train(stepped, range(2))
    holdfast.load(stepped, root / "unstepped")
    assert train(stepped, range(2)) == train(make_state("orig", 0), range(2))


def test_what_can_not_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    run_job(refusals, nproc=2, args=[tmp_path])


def from_hugging_face(tmp_path: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=33, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()
    torch.manual_seed(1)
    wrapped = FSDP(LlamaForCausalLM(config), device_id=torch.device("cpu"))
    holdfast.load({"model": wrapped}, tmp_path)
    with FSDP.summon_full_params(wrapped):
        for name, value in wrapped.module.named_parameters():
            assert torch.equal(value, model.get_parameter(name)), name


def test_a_hugging_face_directory_loads_into_it(tmp_path: Path) -> None:
    run_job(from_hugging_face, nproc=2, args=[tmp_path])
