"""Both ways with stock DCP: containers, shared memory, whole training states, its conversion tools, huge records."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Save = Callable[[dict[str, Any], Path], object]
Load = Callable[[dict[str, Any], Path], object]

SAVES: dict[str, Save] = {
    "holdfast": lambda state, path: holdfast.save(state, path),
    "stock": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "writer": lambda state, path: dcp.save(state, storage_writer=Writer(path), no_dist=True),
}
LOADS: dict[str, Load] = {
    "holdfast": lambda state, path: holdfast.load(state, path),
    "stock": lambda state, path: dcp.load(state, checkpoint_id=path, no_dist=True),
    "reader": lambda state, path: dcp.load(state, storage_reader=Reader(path), no_dist=True),
}
WAYS = [(save, load) for save in SAVES for load in LOADS if (save, load) != ("stock", "stock")]
both_ways = pytest.mark.parametrize(("save", "load"), WAYS)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return type(found) is np.ndarray and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


# containers ----------------------------------------------------------------------------------------------------


def nested(*, blank: bool) -> dict[str, Any]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape) if blank else torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)

    def value(kept: Any, other: Any) -> Any:
        return other if blank else kept

    return {
        "dict": {"a": {"b": {"c": tensor(2, 3)}}, "n": value(1, 0)},
        "list": [tensor(3), {"x": tensor(2), "y": value("text", "")}, [tensor(1), value(7, 0)]],
        "numbers": value([1, 2.5, None, "x"], []),
        "tuple": value((1, "two", 3.0), None),
        "tuple with tensors": value((tensor(2), {"deep": tensor(1)}, 5), None),
        "deep": {"tuple": value((tensor(2, 2), 1), None), "set": value({1, 2}, None)},
        "array": value(np.arange(6.0).reshape(2, 3), None),
        "dtype": value(torch.bfloat16, None),
        "size": value(torch.Size([1, 2]), None),
        "bytes": value(b"\x00\xff", b""),
        "bool": value(True, False),
        "none": None,
        "dots.in.names": {"a.b": tensor(4)},
    }


@both_ways
def test_nested_containers(tmp_path: Path, save: str, load: str) -> None:
    expected, found = nested(blank=False), nested(blank=True)
    SAVES[save](expected, tmp_path / "a")
    LOADS[load](found, tmp_path / "a")
    for name, value in expected.items():
        assert same(found[name], value), name


def test_the_metadata_of_a_save_is_what_stock_writes(tmp_path: Path) -> None:
    state = nested(blank=False)
    for name in ("holdfast", "stock"):
        SAVES[name](state, tmp_path / name)
    ours, stock = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("holdfast", "stock"))
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    if hasattr(stock, "version"):  # older torch writes none
        assert FileSystemReader(tmp_path / "holdfast").read_metadata().version == stock.version


# memory --------------------------------------------------------------------------------------------------------


def overlapping() -> dict[str, torch.Tensor]:
    """Views of one storage, one of them much smaller than it, and one tensor under two names."""
    base = torch.arange(40_000.0)
    matrix = base.view(200, 200)
    return {
        "all": base,
        "matrix": matrix,
        "corner": matrix[:3, :2],
        "column": matrix[:, 7],
        "backwards": matrix.flip(0),
        "again": base,
        "other dtype": base.view(torch.int32),
    }


@both_ways
def test_shared_memory_is_stored_by_what_each_name_shows(tmp_path: Path, save: str, load: str) -> None:
    expected = overlapping()
    SAVES[save]({"views": expected}, tmp_path / "a")
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in expected.items()}
    LOADS[load]({"views": found}, tmp_path / "a")
    assert same(found, expected)


@both_ways
def test_destinations_that_share_memory(tmp_path: Path, save: str, load: str) -> None:
    """Loading fills what the names show, and nothing around it."""
    SAVES[save]({"a": torch.ones(4, 3), "b": torch.full((4,), 2.0)}, tmp_path / "a")
    around = torch.zeros(6, 8)
    LOADS[load]({"a": around[1:5, 2:5], "b": around[1:5, 6]}, tmp_path / "a")
    expected = torch.zeros(6, 8)
    expected[1:5, 2:5] = 1
    expected[1:5, 6] = 2
    assert torch.equal(around, expected)


@both_ways
def test_another_dtype_converts(tmp_path: Path, save: str, load: str) -> None:
    values = torch.tensor([1.5, -2.25, float("inf"), 3.0e38, 1e-40])
    SAVES[save]({"x": values}, tmp_path / "a")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        found = {"x": torch.zeros(5, dtype=dtype)}
        LOADS[load](found, tmp_path / "a")
        assert torch.equal(found["x"], values.to(dtype))


# whole states --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and head are one parameter, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
    for _ in range(steps):
        model(torch.arange(8) % 11).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@both_ways
def test_a_tied_model_and_its_optimizer(tmp_path: Path, save: str, load: str) -> None:
    model, optimizer = trained(1, 3)
    expected = get_state_dict(model, optimizer)
    if save == "holdfast":
        holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    else:
        SAVES[save]({"model": expected[0], "optimizer": expected[1]}, tmp_path / "a")

    other, other_optimizer = trained(2, 1)
    if load == "holdfast":
        holdfast.load({"model": other, "optimizer": other_optimizer}, tmp_path / "a")
    else:
        model_state, optimizer_state = get_state_dict(other, other_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        LOADS[load](state, tmp_path / "a")
        set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert other.head.weight is other.embedding.weight
    assert same(list(get_state_dict(other, other_optimizer)), list(expected))


# stock's tools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["holdfast", "writer"])
def test_conversion_to_one_file(tmp_path: Path, save: str) -> None:
    state = nested(blank=False)
    SAVES[save](state, tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=False)
    assert same(found, state)


@pytest.mark.parametrize("save", SAVES)
def test_the_reader_serves_planners_that_start_from_nothing(tmp_path: Path, save: str) -> None:
    state = nested(blank=False)
    SAVES[save](state, tmp_path / "a")
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=Reader(tmp_path / "a"), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert same(found, state)
    part: dict[str, Any] = {}
    only = _EmptyStateDictLoadPlanner(keys={"dict.a", "bool"})
    _load_state_dict(part, storage_reader=Reader(tmp_path / "a"), planner=only, no_dist=True)
    assert same(part, {"dict": {"a": state["dict"]["a"]}, "bool": True})


# huge ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("save", "load"), [("holdfast", "stock"), ("stock", "holdfast"), ("writer", "reader")])
def test_a_record_over_4_gib(tmp_path: Path, save: str, load: str) -> None:
    """Offsets and sizes past 32 bits, in records and behind them; takes 13 GiB of memory and 5 of disk."""
    count = (1 << 32) + 4096 + 3
    huge = torch.arange(251, dtype=torch.uint8).repeat(count // 251 + 1)[:count]
    small = torch.arange(7.0)
    SAVES[save]({"a huge": huge, "b small": small}, tmp_path / "a")
    del huge
    found = {"a huge": torch.zeros(count, dtype=torch.uint8), "b small": torch.zeros(7)}
    LOADS[load](found, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(found["b small"], small)
    pattern = torch.arange(251, dtype=torch.uint8)
    whole = found["a huge"][: count // 251 * 251].view(-1, 251)
    for start in range(0, len(whole), 1 << 20):
        assert bool((whole[start : start + (1 << 20)] == pattern).all()), start
    assert torch.equal(found["a huge"][len(whole) * 251 :], pattern[: count % 251])
