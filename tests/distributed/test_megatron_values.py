"""Values of Megatron-core's sharded state dicts, told by what they have: parts, replicas, objects, factories."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import in_world, run_job

import holdfast


@dataclass
class ShardedTensor:
    """As megatron-core 0.16 has it."""

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: int = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


def whole(name: str, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) + len(name) * 1000


def part(key: str, shape: tuple[int, ...], offset: tuple[int, ...], data: torch.Tensor, **more: Any) -> ShardedTensor:
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), shape, offset, **more)


def split_in_two(key: str, data: torch.Tensor, replica_id: int, _: Any) -> dict[str, ShardedTensor]:
    """As SwiGLU's factory: two halves of one parameter are two tensors."""
    rank, world = rank_and_world()
    return {
        half: part(f"{key}_{half}", (one.shape[0] * world, 4), (one.shape[0] * rank, 0), one, replica_id=replica_id)
        for half, one in zip("wv", torch.chunk(data, 2), strict=True)
    }


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def model_state(*, fill: bool) -> dict[str, Any]:
    """Four layers in one tensor, each rank with two of them; rows over ranks; a replica; an array of objects."""
    rank, world = rank_and_world()
    layers, rows = whole("layers", 4, 3, 5), whole("rows", 8, 4)
    made: dict[str, Any] = {}
    mine = range(4 // world * rank, 4 // world * (rank + 1))
    for here, layer in enumerate(mine):
        made[f"layer_{here}"] = part(
            "layers.weight", (4, 3, 5), (layer, 0, 0), layers[layer].clone(), prepend_axis_num=1
        )
    each = 8 // world
    made["rows"] = part("rows", (8, 4), (each * rank, 0), rows[each * rank : each * (rank + 1)].clone())
    made["norm"] = part("norm", (3,), (0,), whole("norm", 3) + 100 * rank, replica_id=(0, rank))
    made["scalar"] = part("scalar", (), (), torch.tensor(5.0 + rank), replica_id=rank)
    made["extra"] = ShardedObject("extra", {"rank": rank, "seen": [rank]}, (world,), (rank,))
    made["shared"] = ShardedObject("shared", io.BytesIO(b"shared"), (1,), (0,), replica_id=rank)
    made["local"] = LocalNonpersistentObject("stays")
    fused = torch.cat([rows[each * rank : each * (rank + 1)] + 1, rows[each * rank : each * (rank + 1)] + 2])
    made["fused"] = ShardedTensorFactory("fused", fused, split_in_two, torch.cat)
    if not fill:
        for value in made.values():
            if isinstance(getattr(value, "data", None), torch.Tensor):
                value.data.zero_()
            elif isinstance(value, ShardedObject):
                value.data = None if world > 1 and value.key == "never" else {"rank": -1}
    return {"model": made, "iteration": 3}


def save_it(root: Path) -> None:
    state = model_state(fill=True)
    rank, _ = rank_and_world()
    if dist.is_initialized():
        with holdfast.CheckpointManager(root, state) as manager:
            manager.save(1).result()
            state["model"]["rows"].data.mul_(2)
            manager.save(2).result()
            state["model"]["rows"].data.div_(2)
            manager.save(3).result()
    else:
        holdfast.save(state, root)
    if rank == 0:
        tensors = holdfast.open(root).tensors
        shapes = {name: tuple(info.shape) for name, info in tensors.items() if name.startswith("model")}
        assert shapes == {
            "model.layers.weight": (4, 3, 5),
            "model.rows": (8, 4),
            "model.norm": (3,),
            "model.scalar": (),
            "model.fused_w": (8, 4),
            "model.fused_v": (8, 4),
        }


def load_it(root: Path, world: int) -> None:
    state, expected = model_state(fill=False), model_state(fill=True)
    rank, here = rank_and_world()
    if world != here:  # objects are of another array there
        del state["model"]["extra"]
    state["iteration"] = 0
    holdfast.load(state, root, strict=world == here)
    model = state["model"]
    for name, value in expected["model"].items():
        if name in ("norm", "scalar"):  # what the main replica had
            assert torch.equal(model[name].data, value.data - (100 * rank if name == "norm" else rank))
        elif hasattr(value, "data") and isinstance(value.data, torch.Tensor):
            assert torch.equal(model[name].data, value.data), name
    if world == here:
        assert model["extra"].data == {"rank": rank, "seen": [rank]}
    assert model["shared"].data.getvalue() == b"shared"
    assert model["local"].unwrap() == "stays"
    assert state["iteration"] == 3
    path = holdfast.open(root).path
    stock = {"model": {"layers.weight": torch.zeros(4, 3, 5), "fused_v": torch.zeros(8, 4)}}
    dcp.load(stock, checkpoint_id=path)
    assert torch.equal(stock["model"]["layers.weight"], whole("layers", 4, 3, 5))
    assert torch.equal(stock["model"]["fused_v"], whole("rows", 8, 4) + 2)


def worlds(tmp_path: str) -> None:
    root = Path(tmp_path)
    in_world(2, save_it, root / "two")
    in_world(1, save_it, root / "one")
    for world in (2, 1):
        in_world(world, load_it, root / "two", 2)
        in_world(world, load_it, root / "one", 1)


def test_a_sharded_state_dict_is_saved_and_loaded_in_any_world(tmp_path: Path) -> None:
    run_job(worlds, nproc=2, args=[tmp_path])


def no_main_replica(tmp_path: str) -> None:
    rank = dist.get_rank()
    value = part("norm", (3,), (0,), torch.ones(3), replica_id=rank + 1)
    with pytest.raises(holdfast.HoldfastError, match=r"'model\.norm' \[3\]: no rank of the group holds"):
        holdfast.save({"model": {"norm": value}, "more": 1}, Path(tmp_path) / "a")
    hole = part("rows", (8, 4), (6 * rank, 0), torch.ones(2 + rank - rank, 4))
    with pytest.raises(holdfast.HoldfastError, match=r"'model\.rows' \[8, 4\]: no rank of the group holds its part"):
        holdfast.save({"model": {"rows": hole}}, Path(tmp_path) / "a")


def test_what_nobody_holds_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run_job(no_main_replica, nproc=2, args=[tmp_path])


def test_another_size_is_loaded_where_it_may_be(tmp_path: Path) -> None:
    """A vocabulary padded otherwise."""
    holdfast.save({"model": {"embed": part("embed", (6, 2), (0, 0), whole("embed", 6, 2))}}, tmp_path / "a")
    for rows in (4, 8):
        data = torch.full((rows, 2), -1.0)
        value = part("embed", (rows, 2), (0, 0), data, allow_shape_mismatch=True)
        holdfast.load({"model": {"embed": value}}, tmp_path / "a")
        assert torch.equal(data[:6], whole("embed", 6, 2)[:rows])
        assert torch.equal(data[6:], torch.full((max(rows - 6, 0), 2), -1.0))
        value.allow_shape_mismatch = False
        with pytest.raises(holdfast.StateMismatch, match=rf"stored as \[6, 2\], the state has \[{rows}, 2\]"):
            holdfast.load({"model": {"embed": value}}, tmp_path / "a")


def copying(key: str, data: torch.Tensor, *_: Any) -> dict[str, ShardedTensor]:
    return {"a": part(f"{key}.a", (2,), (0,), data.clone())}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (part("w", (4,), (0,), torch.ones(4), flattened_range=slice(0, 4)), "w: .*range of a flattened tensor"),
        (ShardedTensor("w", None, torch.float32, (4,), (4,), (0,)), "w: .*no data"),
        (ShardedTensor("w", torch.ones(3), torch.float32, (4,), (4,), (0,)), r"w: .*says \[4\] at \[0\] of \[4\]"),
        (ShardedTensorFactory("f", torch.ones(2), copying, None), "f: .*makes copies"),
        (holdfast.PerRank(part("w", (4,), (0,), torch.ones(4))), "ShardedTensor inside a PerRank"),
    ],
    ids=["flattened", "no-data", "other-shape", "copies", "per-rank"],
)
def test_what_is_not_sound_is_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(holdfast.ConfigError, match=message):
        holdfast.save({"model": {"x": value}}, tmp_path / "a")


class GivesParts:
    def state_dict(self) -> dict[str, Any]:
        return {"w": part("w", (4,), (0,), torch.ones(4))}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def test_parts_in_what_an_object_gives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.ConfigError, match="a ShardedTensor of Megatron in what a state_dict"):
        holdfast.save({"model": GivesParts()}, tmp_path / "a")
