"""Tensors sharded as torch shards them reach their files over gloo: those that `safetensors.torch.save` makes."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from worlds import mesh_of

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_files import File, Place, memories_of

from holdfast import _torch_compat as compat
from holdfast.boxes import strides
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import open_group
from holdfast.errors import CheckpointExists, ConfigError, DeadlineExceeded, HoldfastError
from holdfast.export.plan import plan_export
from holdfast.export.rank_plan import RankExportPlan, sources_of
from holdfast.export.transfer import Exchange, fill_local
from holdfast.format.structure import Structure, TensorSpec, decode_structure, encode_structure
from holdfast.keymap.moves import KeyMapping, MappedTensor, Move
from holdfast.plan.placement import World
from holdfast.state.structure import LayoutTable

TIMEOUT_S = 40.0
BLOCK = 4096


def saved_file(name: str, tensors: dict[str, torch.Tensor]) -> tuple[File, bytes]:
    """The file that safetensors makes, and how it is laid out."""
    data = safetensors.torch.save({key: tensor.contiguous() for key, tensor in tensors.items()})
    base = 8 + int.from_bytes(data[:8], "little")
    rows = json.loads(data[8:base])
    places = [Place(key, *(base + at for at in row["data_offsets"])) for key, row in rows.items()]
    return File(name, data[:base], tuple(sorted(places, key=lambda place: place.start)), len(data)), data


def value(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator).to(dtype)


# the states --------------------------------------------------------------------------------------------------------

Case = dict[str, torch.Tensor]


def sharded(full: torch.Tensor, mesh: Any, *placements: Any) -> torch.Tensor:
    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)


def rows(world: int) -> Case:
    """As FSDP2 does it: uneven rows, fewer rows than ranks, one row."""
    mesh = mesh_of(world)
    tensors = {"w": value("w", 701, 33), "few": value("few", 3, 5), "one": value("one", 1, 700), "v": value("v", 999)}
    return {name: sharded(full, mesh, Shard(0)) for name, full in tensors.items()}


def columns(world: int) -> Case:
    mesh = mesh_of(world)
    tensors = {"w": value("w", 300, 130), "x": value("x", 40, 31, dtype=torch.bfloat16), "y": value("y", 200, 90)}
    return {name: sharded(full, mesh, Shard(1)) for name, full in tensors.items()} | {"bias": value("bias", 77)}


def both(world: int) -> Case:
    mesh = mesh_of(world // 2, 2, names=("dp", "tp"))
    return {
        "w": sharded(value("w", 130, 210), mesh, Shard(0), Shard(1)),
        "rows": sharded(value("rows", 101, 37), mesh, _StridedShard(0, split_factor=2), Shard(0)),
        "same": sharded(value("same", 64, 64), mesh, Replicate(), Shard(1)),
        "plain": value("plain", 50, 50, dtype=torch.float64),
    }


def experts(world: int) -> Case:
    """Each rank has experts that the others know nothing of."""
    rank = dist.get_rank()
    mine = {f"expert.{rank}.{n}": value(f"expert.{rank}.{n}", 70, 31) for n in range(2)}
    return {"gate": value("gate", 9, 64), **mine}


# carried out ---------------------------------------------------------------------------------------------------------


def agreed_world(case: Case) -> World:
    table = LayoutTable()
    specs = tuple(
        TensorSpec(name, (name,), tuple(t.shape), compat.dtype_name(t.dtype), table.index_of(t, name))
        for name, t in sorted(case.items())
    )
    mine = encode_structure(Structure(tuple(table.layouts), specs, ()))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return World({repr(data): decode_structure(data) for data in told}, [repr(data) for data in told])


def full_tensors(case: Case) -> dict[str, torch.Tensor]:
    mine = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in case.items()}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return {name: tensor for told_by in told for name, tensor in told_by.items()}


def mapped(name: str, full: torch.Tensor, dtype: torch.dtype) -> tuple[MappedTensor, torch.Tensor]:
    """Matrices are transposed, and everything is cast."""
    steps = strides(full.shape)
    order = tuple(reversed(range(full.ndim))) if name in ("w", "x") else tuple(range(full.ndim))
    out = full.permute(order).to(dtype).contiguous()
    loops = [(n, to, steps[d]) for n, to, d in zip(out.shape, strides(out.shape), order, strict=True) if n > 1]
    counts, to, by = zip(*loops, strict=True)
    return MappedTensor(name, tuple(out.shape), compat.dtype_name(dtype), (Move(name, counts, 0, to, 0, by),)), out


def export(case: Case, root: Path, *, bucket_bytes: int) -> RankExportPlan:
    """What a rank does, by the modules under test; ends with its parts in the files."""
    world, rank, size = agreed_world(case), dist.get_rank(), dist.get_world_size()
    full = full_tensors(case)
    dtypes = {name: torch.float32 if name in ("few", "plain") else torch.bfloat16 for name in full}
    made = {name: mapped(name, full[name], dtypes[name]) for name in sorted(full)}
    names = list(made)
    files = [
        saved_file(f"{n}.safetensors", {name: made[name][1] for name in names[n::2]}) for n in range(min(2, len(names)))
    ]
    plan = plan_export(
        [file for file, _ in files],
        KeyMapping(tuple(tensor for tensor, _ in made.values()), {}),
        sources_of(world, size),
        world=size,
        bucket_bytes=bucket_bytes,
        block_bytes=BLOCK,
    )
    mine = plan.rank(rank, memories_of(world, rank))
    memories = [
        compat.as_bytes(compat.local_tensor(case[memory.source]).contiguous().clone()) for memory in mine.memories
    ]
    image = torch.zeros(mine.image_bytes, dtype=torch.uint8)
    fill_local(mine, memories, image)
    exchange = open_exchange()
    for number in range(2):  # the second over the links of the first
        exchange.run(mine, memories, image, key=f"attempt/{number}", timeout_s=TIMEOUT_S)
    if rank == 0:
        for file, _ in files:
            (root / file.name).write_bytes(b"\xee" * file.size)
    dist.barrier()
    exchange.close()
    for part in mine.parts:
        with (root / part.file).open("r+b") as file:
            file.seek(part.offset)
            file.write(image[part.image_offset : part.image_offset + part.size].numpy().tobytes())
    dist.barrier()
    for file, data in files:
        assert (root / file.name).read_bytes() == data
    return mine


def open_exchange() -> Exchange:
    # The group's own numbers are alike on all its ranks. A count of this module's isn't: some ranks stand by in jobs.
    group = open_group(None, purpose="export")
    return Exchange.over_gloo(group.board, group.store, f"{group.prefix}/links", grace_s=1.0)


def exports_what_safetensors_saves(root: Path) -> None:
    root, world = Path(root), dist.get_world_size()
    threads = threading.active_count()
    for make in (rows, columns, experts, *((both,) if world % 2 == 0 else ())):
        place = root / make.__name__
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        once = export(make(world), place, bucket_bytes=16 << 20)
        assert len(once.rounds) == 1
        often = export(make(world), place, bucket_bytes=1024)
        assert make is not columns or len(often.rounds) > 10
    assert threading.active_count() <= threads + 2  # of boards


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_files_are_those_of_safetensors(tmp_path: Path, nproc: int) -> None:
    run_job(exports_what_safetensors_saves, nproc=nproc, args=[tmp_path])


# what goes wrong -----------------------------------------------------------------------------------------------------


def planned() -> tuple[RankExportPlan, list[torch.Tensor], torch.Tensor]:
    """Columns of a matrix: every rank has something for every other, in many rounds."""
    world = dist.get_world_size()
    case = {"y": sharded(value("y", 400, 100 * world), mesh_of(world), Shard(1))}
    tensor, out = mapped("y", full_tensors(case)["y"], torch.float32)
    file, _ = saved_file("y", {"y": out})
    known = agreed_world(case)
    plan = plan_export(
        [file], KeyMapping((tensor,), {}), sources_of(known, world), world=world, bucket_bytes=8192, block_bytes=BLOCK
    )
    mine = plan.rank(dist.get_rank())
    assert len(mine.rounds) > 10
    local = compat.as_bytes(compat.local_tensor(case["y"]).contiguous())
    return mine, [local], torch.zeros(mine.image_bytes, dtype=torch.uint8)


def same_error(kind: type[HoldfastError], act: Any, *, within_s: float) -> str:
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        act()
    took_s = time.monotonic() - began
    assert took_s < within_s, f"took {took_s:.1f} s"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, str(caught.value))
    assert len(set(told)) == 1, told
    return told[0]


def one_rank_never_comes() -> None:
    plan, memories, image = planned()
    exchange, rank = open_exchange(), dist.get_rank()
    if rank != 1:
        act = lambda: exchange.run(plan, memories, image, key="a", timeout_s=2.0)  # noqa: E731
        with pytest.raises(DeadlineExceeded, match="rank 1 did not answer"):
            act()
    dist.barrier()
    exchange.give_up("a")
    exchange.run(plan, memories, image, key="b", timeout_s=TIMEOUT_S)  # with new links
    dist.barrier()
    exchange.close()


def one_rank_fails_in_the_middle() -> None:
    plan, memories, image = planned()
    exchange, rank = open_exchange(), dist.get_rank()
    exchange.run(plan, memories, image, key="a", timeout_s=TIMEOUT_S)
    broken = memories if rank != 1 else [memories[0][: memories[0].numel() // 2]]
    text = same_error(
        ConfigError, lambda: exchange.run(plan, broken, image, key="b", timeout_s=TIMEOUT_S), within_s=10.0
    )
    assert "rank 1: the staged part of 'y'" in text
    exchange.run(plan, memories, image, key="c", timeout_s=TIMEOUT_S)
    if rank == 0:
        exchange.forget("b")
    dist.barrier()
    exchange.close()


def one_rank_hangs_in_the_middle() -> None:
    plan, memories, image = planned()
    exchange, rank = open_exchange(), dist.get_rank()
    exchange.run(plan, memories, image, key="a", timeout_s=TIMEOUT_S)
    if rank == 1:
        time.sleep(4.0)
        exchange.give_up("b")
    else:
        with pytest.raises(DeadlineExceeded, match=r"rank 1 did not answer for 1\.\d+ s") as caught:
            exchange.run(plan, memories, image, key="b", timeout_s=1.5)
        assert caught.value.waited_for == "rank 1"
    dist.barrier()
    exchange.run(plan, memories, image, key="c", timeout_s=TIMEOUT_S)
    dist.barrier()
    exchange.close()


def an_attempt_that_is_given_up() -> None:
    plan, memories, image = planned()
    exchange, rank = open_exchange(), dist.get_rank()
    exchange.run(plan, memories, image, key="a", timeout_s=TIMEOUT_S)
    reason = RankFailure.of(CheckpointExists("it is there already", path="/x"), rank=1)
    at = time.monotonic() + 1.0
    given_up = lambda: reason if time.monotonic() > at else None  # noqa: E731
    if rank == 0:  # the others wait for it
        time.sleep(1.0)
    else:
        with pytest.raises(CheckpointExists, match="there already"):
            exchange.run(plan, memories, image, key="b", timeout_s=TIMEOUT_S, given_up=given_up)
        assert time.monotonic() < at + 5.0
    exchange.give_up("b")
    dist.barrier()
    exchange.run(plan, memories, image, key="c", timeout_s=TIMEOUT_S)
    dist.barrier()
    exchange.close()


@pytest.mark.parametrize(
    "job",
    [one_rank_never_comes, one_rank_fails_in_the_middle, one_rank_hangs_in_the_middle, an_attempt_that_is_given_up],
)
@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_failed_exchange_ends_soon_with_its_cause_and_the_next_works(job: Any, nproc: int) -> None:
    run_job(job, nproc=nproc)
