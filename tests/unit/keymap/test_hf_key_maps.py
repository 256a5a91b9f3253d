"""Key maps read backwards: what an export by a map has becomes the state again, whatever the map did to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.boxes import Box
from holdfast.errors import ConfigError, StateMismatch
from holdfast.keymap.moves import Move, MovedTensor, rebuilt
from holdfast.loader import read as reading
from holdfast.plan.read import StoredShard, StoredTensor

StateDict = dict[str, torch.Tensor]
HEADS, HEAD, WIDTH, EXPERTS, INNER = 4, 6, 8, 3, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, 2 * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, 2 * HEAD, bias=False)
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.norm = nn.Parameter(torch.empty(WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape))


def with_prefix(state: StateDict) -> StateDict:
    return {f"transformer.{name}": value for name, value in state.items()}


def experts_one_by_one(state: StateDict) -> StateDict:
    made = {}
    for name, value in state.items():
        if name == "gate_up":
            for number, expert in enumerate(value):
                made[f"experts.{number}.gate"], made[f"experts.{number}.up"] = expert.chunk(2)
        elif name == "down":
            made |= {f"experts.{number}.down": expert for number, expert in enumerate(value)}
        else:
            made[name] = value
    return made


def fused_attention(state: StateDict) -> StateDict:
    """Query, key and value head by head, as one matrix."""
    groups = [state["q.weight"].view(2, -1, WIDTH), *(state[f"{n}.weight"].view(2, -1, WIDTH) for n in "kv")]
    rest = {name: value for name, value in state.items() if not name.endswith(".weight")}
    return {"qkv": torch.cat(groups, 1).reshape(-1, WIDTH), **rest}


def fused_by_columns(state: StateDict) -> StateDict:
    rest = {name: value for name, value in state.items() if name not in ("k.weight", "v.weight")}
    return {"kv": torch.cat([state["k.weight"], state["v.weight"]], 1), **rest}


def rotary_interleaved(state: StateDict) -> StateDict:
    """Halves of each head become pairs, as in checkpoints of the original Llama."""
    heads = state["q.weight"].view(HEADS, 2, HEAD // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)
    return {**state, "q.weight": heads}


def transposed(state: StateDict) -> StateDict:
    return {name: value.transpose(-1, -2) if value.dim() > 1 else value for name, value in state.items()}


def experts_innermost(state: StateDict) -> StateDict:
    return {**state, "down": state["down"].permute(1, 2, 0), "gate_up": state["gate_up"].permute(2, 0, 1)}


def turned_around(state: StateDict) -> StateDict:
    return {**state, "norm": state["norm"].flip(0), "down": state["down"].flip(2)}


def twice(state: StateDict) -> StateDict:
    return {**state, "norm_again": state["norm"], "head": state["norm"][: WIDTH // 2]}


def in_bfloat16(state: StateDict) -> StateDict:
    return {name: value.to(torch.bfloat16) for name, value in transposed(state).items()}


def in_pieces(state: StateDict) -> StateDict:
    pieces = {f"norm.{number}": piece for number, piece in enumerate(state["norm"].split(3))}
    rows = {f"k.{number}": row for number, row in enumerate(state["k.weight"])}
    return {**{n: v for n, v in state.items() if n not in ("norm", "k.weight")}, **pieces, **rows}


MAPS = [
    with_prefix,
    experts_one_by_one,
    fused_attention,
    fused_by_columns,
    rotary_interleaved,
    transposed,
    experts_innermost,
    turned_around,
    twice,
    in_bfloat16,
    in_pieces,
]


def export(directory: Path, net: nn.Module, key_map: Callable[[StateDict], StateDict]) -> Path:
    tensors = key_map({name: value.detach().clone() for name, value in net.state_dict().items()})
    directory.mkdir(exist_ok=True)
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_is(found: nn.Module, saved: nn.Module, *, dtype: torch.dtype = torch.float32) -> None:
    for (name, value), expected in zip(found.state_dict().items(), saved.state_dict().values(), strict=True):
        assert torch.equal(value, expected.to(dtype).to(value.dtype)), name


@pytest.mark.parametrize("key_map", MAPS)
def test_the_way_back(tmp_path: Path, key_map: Any) -> None:
    saved, net = Net(), Net()
    holdfast.load({"net": net}, export(tmp_path, saved, key_map), key_map=key_map)
    assert_is(net, saved, dtype=torch.bfloat16 if key_map is in_bfloat16 else torch.float32)


@pytest.mark.parametrize("span", [16, 100])
@pytest.mark.parametrize("key_map", MAPS)
def test_the_way_back_through_small_buffers(
    tmp_path: Path, key_map: Any, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with tensors that are larger than a buffer, only that these are a few bytes."""
    monkeypatch.setattr(reading, "SPAN_BYTES_MAX", span)
    monkeypatch.setattr(reading, "RUNS_MAX", span // 16)
    saved, net = Net(), Net()
    net.down = nn.Parameter(net.down.detach().double())
    net.q.weight = nn.Parameter(torch.empty(WIDTH, HEADS * HEAD).t())  # in memory the other way round
    holdfast.load({"net": net}, export(tmp_path, saved, key_map), key_map=key_map)
    assert_is(net, saved, dtype=torch.bfloat16 if key_map is in_bfloat16 else torch.float32)


def test_a_map_of_several_steps(tmp_path: Path) -> None:
    saved, net = Net(), Net()
    steps = [experts_one_by_one, with_prefix, fused_with_prefix]
    directory = export(tmp_path, saved, lambda state: fused_with_prefix(with_prefix(experts_one_by_one(state))))
    holdfast.load({"net": net}, directory, key_map=steps)
    assert_is(net, saved)


def fused_with_prefix(state: StateDict) -> StateDict:
    pieces = [state.pop(f"transformer.{name}.weight") for name in "qkv"]
    return {"transformer.qkv": torch.cat(pieces), **state}


def test_names_that_change_places(tmp_path: Path) -> None:
    """What a name in the files means is what the map says, not what in the state is called so."""
    saved, net = Net(), Net()
    names = {name: name for name in saved.state_dict()} | {"k.weight": "v.weight", "v.weight": "k.weight"}
    directory = export(tmp_path, saved, lambda state: {names[name]: value for name, value in state.items()})
    holdfast.load({"net": net}, directory, key_map=names)
    assert_is(net, saved)


@pytest.mark.parametrize("scattered", [False, True])
def test_what_a_map_leaves_out_stays(tmp_path: Path, scattered: bool) -> None:
    from holdfast.export import Drop, Narrow

    saved, net = Net(), Net()
    if scattered:  # what is read for it passes through a buffer
        net.norm = nn.Parameter(torch.randn(2 * WIDTH)[::2])
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    directory = export(
        tmp_path,
        saved,
        lambda state: {n: v[2:5] if n == "norm" else v for n, v in state.items() if n != "k.weight"},
    )
    holdfast.load({"net": net}, directory, key_map=[Drop(r"^k\."), Narrow("^norm$", 2, 5)])
    expected = saved.state_dict() | {"k.weight": kept["k.weight"]}
    expected["norm"] = torch.cat([kept["norm"][:2], saved.norm[2:5], kept["norm"][5:]])
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_modules_of_one_state_are_mapped_alike(tmp_path: Path) -> None:
    saved, actor, reference = Net(), Net(), Net()
    export(tmp_path, saved, fused_attention)
    holdfast.load({"actor": actor, "reference": reference}, tmp_path, key_map=fused_attention)
    assert_is(actor, saved)
    assert_is(reference, saved)


def test_what_is_missing_or_has_another_shape_is_named(tmp_path: Path) -> None:
    saved, net = Net(), Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    export(tmp_path, saved, lambda state: {n: v for n, v in experts_one_by_one(state).items() if n != "experts.1.up"})
    with pytest.raises(StateMismatch, match=r"net\.gate_up is made of .*, but it has no experts\.1\.up") as caught:
        holdfast.load({"net": net}, tmp_path, key_map=experts_one_by_one)
    assert caught.value.missing == ("net.gate_up",)
    assert "net.experts.0.up" in caught.value.unexpected
    wrong = {"experts.2.gate": torch.ones(INNER, WIDTH + 1)}
    export(tmp_path, saved, lambda state: experts_one_by_one(state) | wrong)
    with pytest.raises(StateMismatch, match=r"experts\.2\.gate is \[5, 9\] there"):
        holdfast.load({"net": net}, tmp_path, key_map=experts_one_by_one)
    export(tmp_path, saved, lambda state: experts_one_by_one(state) | {"more": torch.ones(1)})
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"net": net}, tmp_path, key_map=experts_one_by_one)
    assert caught.value.unexpected == ("net.more",)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("key_map", "message"),
    [
        ("model", "is a string"),
        (3, "can't be used"),
        ({"nobody": "somebody"}, "which the state does not have"),
        (lambda state: {"norm": state["norm"] * 2}, "norm"),
        (lambda state: {"norm": state["norm"]}, "are not mapped to anything"),
    ],
)
def test_a_map_that_cannot_be_used(tmp_path: Path, key_map: Any, message: str) -> None:
    net = Net()
    export(tmp_path, Net(), dict)
    with pytest.raises(ConfigError, match=message):
        holdfast.load({"net": net}, tmp_path, key_map=key_map)


def test_what_was_quantized_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    from holdfast.export import Fp8

    export(tmp_path, Net(), dict)
    with pytest.raises(ConfigError, match="quantized with a scale per block"):
        holdfast.load({"net": Net()}, tmp_path, key_map=Fp8(r"q\.weight"))


# pieces ----------------------------------------------------------------------------------------------------------


def stored(name: str, shape: tuple[int, ...]) -> StoredTensor:
    volume = torch.Size(shape).numel()
    shard = StoredShard(Box((0,) * len(shape), shape), "f", 1000, volume * 4)
    return StoredTensor(name, "float32", shape, (shard,))


def test_a_box_of_a_run_is_read_as_a_shard() -> None:
    """Experts that were stored one by one: no element of them is moved on its own."""
    shape = (3, 4, 5)
    moves = []
    for expert, half in itertools.product(range(3), range(2)):
        moves.append(Move(f"{expert}.{half}", (10,), expert * 20 + half * 10, (1,), 0, (1,)))
    made = rebuilt("w", shape, moves, {move.source: stored(move.source, (2, 5)) for move in moves})
    assert isinstance(made, StoredTensor)
    assert [shard.box for shard in made.shards][:2] == [Box((0, 0, 0), (1, 2, 5)), Box((0, 2, 0), (1, 2, 5))]


@pytest.mark.parametrize(
    ("shape", "move", "box"),
    [
        ((6,), ((4,), 1, (1,), 0, (1,)), Box((1,), (4,))),
        ((3, 4), ((12,), 0, (1,), 0, (1,)), Box((0, 0), (3, 4))),
        ((3, 4), ((8,), 4, (1,), 2, (1,)), Box((1, 0), (2, 4))),
        ((3, 4), ((2, 3), 5, (4, 1), 0, (3, 1)), Box((1, 1), (2, 3))),
        ((2, 1, 3), ((2, 2), 1, (3, 1), 0, (2, 1)), Box((0, 0, 1), (2, 1, 2))),
        ((2, 3, 4), ((2, 8), 4, (12, 1), 0, (8, 1)), Box((0, 1, 0), (2, 2, 4))),
        ((), ((), 0, (), 7, ()), Box((), ())),
        ((5, 1), ((2,), 2, (1,), 0, (1,)), Box((2, 0), (2, 1))),
    ],
)
def test_runs_that_are_boxes(shape: tuple[int, ...], move: Any, box: Box) -> None:
    made = rebuilt(
        "w", shape, [*rest_of(shape, box), Move("s", *move)], {"s": stored("s", (40,)), "r": stored("r", (99,))}
    )
    assert isinstance(made, StoredTensor)
    shard = next(shard for shard in made.shards if shard.box == box)
    assert shard.payload_offset == 1000 + move[3] * 4


def rest_of(shape: tuple[int, ...], box: Box) -> list[Move]:
    """Every other element, one by one."""
    steps = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
    inside = {
        sum(i * step for i, step in zip(index, steps, strict=True))
        for index in itertools.product(*(range(o, o + s) for o, s in zip(*box, strict=True)))
    }
    return [Move("r", (), at, (), at, ()) for at in range(torch.Size(shape).numel()) if at not in inside]


@pytest.mark.parametrize(
    ("shape", "move"),
    [
        ((3, 4), ((4, 3), 0, (1, 4), 0, (3, 1))),  # not in the order of the tensor
        ((3, 4), ((6,), 1, (1,), 0, (1,))),  # across the end of a row
        ((3, 4), ((2, 2), 0, (2, 1), 0, (2, 1))),  # folded within a row and the next
        ((3, 4), ((3, 4), 0, (4, 1), 11, (-4, -1))),  # backwards
        ((3, 4), ((3, 2), 0, (4, 2), 0, (2, 1))),  # every other column
        ((3, 4), ((3, 4), 0, (4, 1), 0, (5, 1))),  # not neighbours where they are stored
    ],
)
def test_what_is_no_box_of_a_run_is_moved(shape: tuple[int, ...], move: Any) -> None:
    made = rebuilt("w", shape, [Move("s", *move)], {"s": stored("s", (40,))})
    assert isinstance(made, MovedTensor)
