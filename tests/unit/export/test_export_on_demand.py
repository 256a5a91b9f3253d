"""Exports from what is not staged: the state itself, and checkpoints, a piece at a time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.boxes import Box
from holdfast.coordination.group import open_group
from holdfast.export.inputs import PIECE_BYTES, ROOMS, LiveState, OnDemand
from holdfast.export.rank_plan import BufferRegion, Copy
from holdfast.export.transfer import run_copies
from holdfast.loader.checkpoint import source_of
from holdfast.loader.read import read_boxes
from holdfast.saver.agreement import Agreement
from holdfast.state.tree import StateTree


def memories(count: int) -> list[BufferRegion]:
    return [BufferRegion(str(number), Box((0,), (64,)), (0,), (64,)) for number in range(count)]


def test_rooms_are_few_and_what_was_used_last_stays() -> None:
    made = []

    def make(memory: BufferRegion, room: torch.Tensor) -> torch.Tensor:
        made.append(int(memory.source))
        room[:64] = int(memory.source)
        return room[:64]

    ready = torch.full((64,), 7, dtype=torch.uint8)
    lazy = OnDemand(memories(9), find=lambda memory: ready if memory.source == "7" else None, make=make)
    assert len(lazy) == 9
    assert lazy.is_here(7)
    for number in range(ROOMS):
        assert not lazy.is_here(number)
        assert lazy[number][0] == number
    assert lazy[0][0] == 0
    assert lazy[ROOMS][0] == ROOMS, "in the room of the one that was used longest ago"
    assert [number for number in range(9) if lazy.is_here(number)] == [0, *range(2, ROOMS + 1), 7]
    assert lazy[7] is ready
    assert made == [*range(ROOMS), ROOMS]
    with pytest.raises(TypeError):
        lazy[1:2]


def test_copies_from_few_rooms_are_those_from_all_memories() -> None:
    chance = random.Random(3)
    every = [torch.randn(16).view(torch.uint8).clone() for _ in range(20)]
    copies = []
    for element in range(400):
        number = chance.randrange(20)
        copies.append(Copy((1,), number, "float32", 4 * chance.randrange(16), (1,), "bfloat16", 2 * element, (1,)))

    def make(memory: BufferRegion, room: torch.Tensor) -> torch.Tensor:
        room[:64] = every[int(memory.source)]
        return room[:64]

    expected, found = torch.zeros(800, dtype=torch.uint8), torch.zeros(800, dtype=torch.uint8)
    run_copies(copies, every, expected)
    run_copies(copies, OnDemand(memories(20), make=make), found)
    assert torch.equal(expected, found)


class Odd(nn.Module):
    """Parameters whose memory can't be read as it is, one of them in several pieces; and ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        side = 1100
        assert 4 * side * side > PIECE_BYTES
        self.plain = nn.Parameter(torch.randn(3, 5))
        self.large = nn.Parameter(torch.randn(side, side))
        self.turned = nn.Parameter(torch.randn(side, side).t())
        self.up_proj = nn.Linear(side, side, bias=False)  # of a name that is quantized
        self.up_proj.weight = nn.Parameter(torch.randn(side, side).t())
        self.astray = nn.Parameter(torch.randn(1 + 4 * 6)[1:].view(4, 6))
        self.narrow = nn.Parameter(torch.randn(8, 8)[:, 1:4])
        self.halves = nn.Parameter(torch.randn(9).to(torch.bfloat16)[1:])
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("none", torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float8_e4m3fn"])
def test_every_kind_of_memory_is_exported_and_a_checkpoint_gives_the_same(tmp_path: Path, dtype: str | None) -> None:
    torch.manual_seed(0)
    model = Odd()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    now = holdfast.export_hf({"model": model}, tmp_path / "now", dtype=dtype)
    stored = holdfast.save({"model": model}, tmp_path / "saved")
    later = holdfast.export_hf(stored, tmp_path / "later", dtype=dtype)
    assert (now / "model.safetensors").read_bytes() == (later / "model.safetensors").read_bytes()
    exported = holdfast.open(now)
    if dtype == "float8_e4m3fn":
        assert exported.read("up_proj.weight").dtype == torch.float8_e4m3fn
        del before["up_proj.weight"]
    for name, tensor in before.items():
        wanted = tensor.to(torch.bfloat16) if dtype == "bfloat16" and tensor.is_floating_point() else tensor
        assert torch.equal(exported.read(name), wanted), name


def test_a_state_that_is_changed_meanwhile_is_refused_by_name() -> None:
    group = open_group(None, purpose="test")
    model = nn.Linear(4, 4)

    def live() -> LiveState:
        tree = StateTree({"model": model}, rank=0, world=1)
        return LiveState(tree, group, Agreement(group.board), target="/there", timeout_s=5.0)

    unchanged = live()
    unchanged.verify()
    written = live()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(holdfast.StateChangedWhileStaging, match=r"model\.weight was changed") as caught:
        written.verify()
    assert caught.value.tensor == "model.weight"
    unnoticed = live()
    model.bias.data.mul_(2)  # moves no counter that anybody looks at
    with pytest.raises(holdfast.StateChangedWhileStaging, match=r"model\.bias was changed"):
        unnoticed.verify()


def test_boxes_are_read_into_memory_that_is_there(tmp_path: Path) -> None:
    stored = holdfast.save({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "saved")
    out = torch.empty(2, 4)
    (same,) = read_boxes(source_of(stored), [("w", Box((1, 0), (2, 4)))], into=[out])
    assert same is out
    assert torch.equal(out, torch.arange(4.0, 12.0).view(2, 4))


@pytest.mark.parametrize(
    ("field", "value"),
    [("io_class", "realtime"), ("io_level", 8), ("io_level", 3), ("host_writers", 0), ("writers", 17), ("nice", -1)],
)
def test_limits_of_an_export_are_checked_as_those_of_checkpoints(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(holdfast.ConfigError, match=rf"^HFExport\.{field}: expected .* found ") as caught:
        holdfast.HFExport(tmp_path, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
