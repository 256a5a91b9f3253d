"""`holdfast.Shard` and torch's `ShardedTensor`: one logical tensor of all ranks' parts, for any other sharding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import in_world, run_job
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast

WHOLE = torch.arange(35, dtype=torch.float32).view(7, 5)


def part_here(start: int = 0, *, fill: bool = True) -> holdfast.Shard:
    """Rows of the whole: the first ``3 + start`` on rank 0, the others on rank 1."""
    rows = slice(0, 3 + start) if dist.get_rank() == 0 else slice(3 + start, 7)
    tensor = WHOLE[rows].clone() if fill else torch.zeros_like(WHOLE[rows])
    return holdfast.Shard(tensor, WHOLE.shape, (rows.start, 0))


def sharded_tensor(*, fill: bool = True) -> ShardedTensor:
    """Two parts on each rank, columns and rows mixed."""
    boxes = [[(0, 0, 7, 1), (4, 1, 3, 4)], [(0, 1, 2, 4), (2, 1, 2, 4)]][dist.get_rank()]
    shards = []
    for row, column, rows, columns in boxes:
        value = WHOLE[row : row + rows, column : column + columns].clone()
        shards.append(TorchShard.from_tensor_and_offsets(value if fill else value * 0, [row, column], dist.get_rank()))
    return init_from_local_shards(shards, *WHOLE.shape)


def assert_filled(value: Any) -> None:
    if isinstance(value, holdfast.Shard):
        box = [slice(at, at + n) for at, n in zip(value.global_offset, value.tensor.shape, strict=True)]
        assert torch.equal(value.tensor, WHOLE[tuple(box)])
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            rows, columns = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            assert torch.equal(shard.tensor, WHOLE[rows[0] : sum(rows), columns[0] : sum(columns)])
    else:
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, WHOLE)


def empty_ones() -> dict[str, Any]:
    """The whole in every form of this world."""
    if not dist.is_initialized():
        return {"plain": torch.zeros_like(WHOLE)}
    mesh = init_device_mesh("cpu", (2,))
    return {
        "shard": part_here(1, fill=False),
        "sharded": sharded_tensor(fill=False),
        "dtensor": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Shard(1)]),
        "plain": torch.zeros_like(WHOLE),
    }


def save_parts(root: Path) -> None:
    holdfast.save({"value": part_here()}, root / "shard")
    holdfast.save({"value": sharded_tensor()}, root / "sharded")
    mesh = init_device_mesh("cpu", (2,))
    holdfast.save({"value": distribute_tensor(WHOLE, mesh, [Shard(0)])}, root / "dtensor")
    dcp.save({"value": sharded_tensor()}, checkpoint_id=root / "stock")


def load_everything(root: Path) -> None:
    for name in ("shard", "sharded", "dtensor", "stock"):
        for value in empty_ones().values():
            holdfast.load({"value": value}, root / name)
            assert_filled(value)
            if not isinstance(value, holdfast.Shard):  # stock knows nothing of those
                local = value.local_shards() if isinstance(value, ShardedTensor) else [value]
                for one in local:
                    getattr(one, "tensor", one).zero_()
                dcp.load({"value": value}, checkpoint_id=root / name)
                assert_filled(value)
        metadata = dcp.FileSystemReader(root / name).read_metadata().state_dict_metadata["value"]
        assert isinstance(metadata, TensorStorageMetadata)
        assert metadata.size == WHOLE.shape
        assert list(holdfast.open(root / name).tensors["value"].shape) == [7, 5]


def every_way(tmp_path: str) -> None:
    root = Path(tmp_path)
    in_world(2, save_parts, root)
    in_world(2, load_everything, root)
    in_world(1, load_everything, root)


def test_parts_are_one_tensor_for_any_other_sharding(tmp_path: Path) -> None:
    run_job(every_way, nproc=2, args=[tmp_path])


def keeps_saving(root: Path) -> None:
    """The same memory in step after step, each saved as it was; nested, replicated, and beside other values."""
    part, replica, torchs = part_here(), holdfast.Shard(torch.zeros(2), (2,), (0,)), sharded_tensor()
    state = {"nested": {"list": [part, replica], "step": 0}, "sharded": torchs}
    config = holdfast.CheckpointConfig(every=1)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        for step in (1, 2, 3):
            part.tensor.copy_(part_here().tensor * step)
            replica.tensor.fill_(step)
            for shard in torchs.local_shards():
                shard.tensor.mul_(0).add_(step)
            state["nested"]["step"] = step  # type: ignore[index]
            manager.save(step)
            part.tensor.zero_()
            manager.wait()
    for step in (1, 2, 3):
        loaded = {"nested": {"list": [torch.zeros(7, 5), torch.zeros(2)], "step": 0}, "sharded": torch.zeros(7, 5)}
        holdfast.load(loaded, root / f"step_{step:08d}" if (root / f"step_{step:08d}").exists() else root)
        if step == 3:
            assert torch.equal(loaded["nested"]["list"][0], WHOLE * 3)  # type: ignore[index]
            assert torch.equal(loaded["nested"]["list"][1], torch.full((2,), 3.0))  # type: ignore[index]
            assert torch.equal(loaded["sharded"], torch.full((7, 5), 3.0))  # type: ignore[arg-type]
    (checkpoint,) = [holdfast.open(root)]
    assert checkpoint.verify().ok
    rows = [row for row in checkpoint.tensors if row.startswith("nested")]
    assert sorted(rows) == ["nested.list.0", "nested.list.1"]


def in_steps(tmp_path: str) -> None:
    keeps_saving(Path(tmp_path))


def test_parts_are_saved_as_they_are_at_each_step(tmp_path: Path) -> None:
    run_job(in_steps, nproc=2, args=[tmp_path])


def refusals(tmp_path: str) -> None:
    root, rank = Path(tmp_path), dist.get_rank()
    hole = holdfast.Shard(WHOLE[:3].clone() if rank == 0 else WHOLE[4:].clone(), (7, 5), (4 * rank, 0))
    with pytest.raises(holdfast.HoldfastError, match=re.escape("'value' [7, 5]: no rank of the group holds")):
        holdfast.save({"value": hole}, root / "hole")
    overlap = holdfast.Shard(WHOLE[:4].clone() if rank == 0 else WHOLE[3:].clone(), (7, 5), (3 * rank, 0))
    with pytest.raises(holdfast.HoldfastError, match=r"'value'.*overlap.*rank 0"):
        holdfast.save({"value": overlap}, root / "overlap")
    other = holdfast.Shard(
        WHOLE[:3].clone() if rank == 0 else WHOLE[3:].clone(), (7, 5) if rank else (8, 5), (3 * rank, 0)
    )
    with pytest.raises(holdfast.HoldfastError, match="'value' differs between ranks"):
        holdfast.save({"value": other}, root / "other")
    mixed = part_here() if rank == 0 else WHOLE.clone()
    with pytest.raises(holdfast.HoldfastError, match="'value' differs between ranks"):
        holdfast.save({"value": mixed}, root / "mixed")
    dist.barrier()  # rank 0 tidies
    assert not any(root.iterdir())
    holdfast.save({"value": part_here()}, root / "good")
    wrong = holdfast.Shard(torch.zeros(4, 5), (8, 5), (4 * rank, 0))
    with pytest.raises(holdfast.StateMismatch, match=re.escape("stored as [7, 5], the state has [8, 5]")):
        holdfast.load({"value": wrong}, root / "good")


def test_parts_that_are_not_the_whole_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_job(refusals, nproc=2, args=[tmp_path])


@pytest.mark.parametrize(
    ("shape", "offset", "tensor"),
    [
        ((7, 5), (5, 0), WHOLE[:3]),
        ((7, 5), (0,), WHOLE[:3]),
        ((7,), (0,), WHOLE[:3]),
        ((7, 5), (-1, 0), WHOLE[:3]),
        ((7, 5), (0, 0), [1.0]),
    ],
)
def test_a_part_outside_the_whole_is_refused_at_once(shape: Any, offset: Any, tensor: Any) -> None:
    with pytest.raises(holdfast.ConfigError, match="Shard"):
        holdfast.Shard(tensor, shape, offset)


def test_one_rank_alone_may_hold_the_whole_in_parts(tmp_path: Path) -> None:
    holdfast.save({"value": holdfast.Shard(WHOLE, (7, 5), (0, 0))}, tmp_path / "a")
    loaded = torch.zeros(7, 5)
    holdfast.load({"value": loaded}, tmp_path / "a")
    assert torch.equal(loaded, WHOLE)
    with pytest.raises(holdfast.ConfigError, match="no rank of the group holds its part"):
        holdfast.save({"value": holdfast.Shard(WHOLE[:2], (7, 5), (0, 0))}, tmp_path / "b")
