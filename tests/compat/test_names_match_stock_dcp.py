"""Names are those of stock ``get_state_dict``, flattened by stock's planner: for every wrapper and optimizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from hooked_modules import KINDS, DropsFrozen, assert_same_tensors
from hooked_modules import Net as Hooked

import holdfast
from holdfast.state.tree import StateTree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(x)))


def stock_names(model: nn.Module, *optimizers: torch.optim.Optimizer) -> set[str]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers:
        state["optimizer"] = get_optimizer_state_dict(model, list(optimizers))
    return set(flatten_state_dict(state)[0])


def our_names(state: dict[str, Any]) -> set[str]:
    collected = StateTree(state, rank=0, world=1).collect()
    names = [entry.name for entry in (*collected.tensors, *collected.objects)]
    assert len(set(names)) == len(names)
    return set(names)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OPTIMIZERS = [
    lambda params: torch.optim.AdamW(params, amsgrad=True),
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adafactor(params),
    lambda params: torch.optim.NAdam(params),
    lambda params: torch.optim.Adam([{"params": params[:2], "lr": torch.tensor(0.1)}, {"params": params[2:]}]),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_plain(make: Any) -> None:
    model = Net()
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    step(model, optimizer)
    assert our_names({"model": model, "optimizer": optimizer}) == stock_names(model, optimizer)


def test_two_optimizers_over_one_model() -> None:
    model = Net()
    optimizers = [torch.optim.AdamW(model.layers.parameters()), torch.optim.SGD(model.head.parameters(), momentum=0.9)]
    step(model, *optimizers)
    assert our_names({"model": model, "optimizer": optimizers}) == stock_names(model, *optimizers)


def test_pipeline_stages_note_options_under_each_parameter() -> None:
    """As stock does when told to flatten: group numbers of different ranks would mean different groups."""
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": model.layers.parameters(), "lr": 0.1}, {"params": model.head.parameters()}]
    )
    step(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    stock = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
    }
    ours = our_names({"model": [model], "optimizer": optimizer})
    assert ours == set(flatten_state_dict(stock)[0])
    assert "optimizer.param_groups.head.weight.lr" in ours


@pytest.mark.parametrize("wrap", ["checkpoint", "compile", "compile_child", "compile_in_place", "both"])
def test_wrappers_leave_no_trace(wrap: str) -> None:
    model: Any = Net()
    if wrap in {"checkpoint", "both"}:
        model.layers[0] = checkpoint_wrapper(model.layers[0])
    if wrap in {"compile", "both"}:
        model = torch.compile(model, backend="eager")
    elif wrap == "compile_child":
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
    elif wrap == "compile_in_place":
        model.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    ours = our_names({"model": model, "optimizer": optimizer})
    assert ours == stock_names(model, optimizer)
    assert ours >= {"model.layers.0.up.weight", "optimizer.state.layers.1.up.weight.exp_avg"}
    assert not any("_orig" in name or "_checkpoint" in name for name in ours)


def test_ddp(alone: None) -> None:
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    ours = our_names({"model": model, "optimizer": optimizer})
    assert ours == stock_names(model, optimizer)
    assert "model.head.weight" in ours


def test_fsdp2(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = Net()
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    step(model, optimizer)
    assert our_names({"model": model, "optimizer": optimizer}) == stock_names(model, optimizer)


def test_tied_weights_have_both_names() -> None:
    model = Net()
    model.tail = model.head
    model.layers[1].up.weight = model.layers[0].up.weight
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    ours = our_names({"model": model, "optimizer": optimizer})
    assert ours == stock_names(model, optimizer)
    assert ours >= {"model.tail.weight", "model.head.weight", "model.layers.1.up.weight"}


def test_nested_values_and_extra_state() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3, "history": torch.zeros(2)}

        def set_extra_state(self, state: Any) -> None: ...

    model = nn.Sequential(Counting(2, 2))
    sums = [torch.zeros(2), {"deep": [1, 2], "t": (1, 2)}, [[torch.ones(1)], [3]]]
    nested = {"a": {1: 2, "list": [1, 2], "empty": [], "sums": sums}, "none": None}
    state = {"model": get_model_state_dict(model), **nested}
    assert our_names({"model": model, **nested}) == set(flatten_state_dict(state)[0])


def test_a_small_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    ours = our_names({"model": model, "optimizer": optimizer})
    assert ours == stock_names(model, optimizer)
    assert {"model.lm_head.weight", "model.model.embed_tokens.weight"} <= ours


def test_schedulers_and_scalers_as_stateful() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu")
    stock = flatten_state_dict({"lr": scheduler.state_dict(), "scaler": scaler.state_dict()})[0]
    ours = our_names({"optimizer": optimizer, "lr": scheduler, "scaler": scaler})
    assert {name for name in ours if not name.startswith("optimizer.")} == set(stock)


def test_hooked_models_inside_ddp(alone: None, tmp_path: Any) -> None:
    """``module.`` of the wrapper is no part of the names, wherever the hooks are."""
    for kind in KINDS:
        for at, make in enumerate((lambda kind=kind: Hooked(kind), kind)):
            model, other = make(), make()
            ddp = nn.parallel.DistributedDataParallel(model)
            expected = set(flatten_state_dict({"model": dict(model.state_dict())})[0])
            assert {name for name in our_names({"model": ddp}) if not name.endswith("__keys__")} == expected, kind
            path = tmp_path / f"{kind.__name__}-{at}"
            holdfast.save({"model": ddp}, path)
            holdfast.load({"model": nn.parallel.DistributedDataParallel(other)}, path)
            assert_same_tensors(model, other, but=("seen",) if kind is DropsFrozen else ())


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Bilinear": (2, 3, 4), "Embedding": (4, 2), "EmbeddingBag": (4, 2), "MultiheadAttention": (4, 2),
    "Transformer": (4, 2, 1, 1, 8), "TransformerEncoderLayer": (4, 2), "TransformerDecoderLayer": (4, 2),
    "GroupNorm": (2, 4), "AdaptiveLogSoftmaxWithLoss": (4, 20, [5]),
}  # fmt: skip


def modules_of_torch() -> dict[str, nn.Module]:
    """One of each class in ``torch.nn`` that can be made of a few numbers."""
    found: dict[str, nn.Module] = {}
    for name, kind in vars(nn).items():
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or name.startswith("Lazy"):
            continue
        for arguments in (ARGUMENTS.get(name, ()), (), (2,), (2, 3), (2, 3, 2)):
            try:
                found[name] = kind(*arguments)
            except (TypeError, ValueError, AssertionError):
                continue
            break
    found["weight_norm"] = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    found["spectral_norm"] = nn.utils.spectral_norm(nn.Linear(2, 3))
    found["orthogonal"] = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    found["average"] = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(2), use_buffers=True)
    found["quantized"] = nn.Sequential(torch.ao.nn.quantized.QFunctional(), nn.Linear(2, 2))
    return found


@pytest.mark.filterwarnings("ignore")
def test_modules_of_torch(alone: None) -> None:
    found = {name: module for name, module in modules_of_torch().items() if module.state_dict()}
    assert len(found) > 30
    for name, module in found.items():
        assert our_names({"model": module}) == stock_names(module), name
