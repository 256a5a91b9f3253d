"""Planners with code of their own behind `holdfast.dcp.Writer` and `Reader`: what they get is what stock storage gives.

DCP resolves one item, copies it, commits it, and only then asks for the next. Each planner here depends on that.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.dcp import Reader, Writer, reader

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import run_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def make(*, zero: bool = False) -> dict[str, Any]:
    """Small and large tensors, of several dtypes and strides, and plain values."""
    generator = torch.Generator().manual_seed(1)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(shape) if zero else torch.randn(shape, generator=generator)

    return {
        **{f"t{n}": tensor(3) for n in range(5)},
        "wide": tensor(40, 50).t(),
        "large": tensor(300, 1001),
        "half": tensor(7, 3).to(torch.bfloat16),
        "scalar": tensor(),
        "numbers": torch.zeros(6, dtype=torch.int64) if zero else torch.arange(6),
        "epoch": 0 if zero else 7,
        "note": "" if zero else "a longer text than the number before it",
        "list": [] if zero else [1, 2, 3],
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


# saving --------------------------------------------------------------------------------------------------------


class OneBuffer(DefaultSavePlanner):
    """Copies every tensor into the same staging buffer, and every plain value into the same stream."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.memory = torch.zeros(2_000_000, dtype=torch.uint8)
        self.stream = io.BytesIO()

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            self.stream.seek(0)
            self.stream.truncate()
            self.stream.write(value.getvalue())
            return self.stream
        return self.staged(value)

    def staged(self, value: torch.Tensor) -> torch.Tensor:
        buffer = self.memory[: value.nbytes].view(value.dtype).view(value.shape)
        return buffer.copy_(value)


class TransformedInPlace(OneBuffer):
    """Overrides what stock calls an extension point, not `resolve_data` itself."""

    resolve_data = DefaultSavePlanner.resolve_data

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - stock's name
        value = super().transform_object(write_item, object)
        return value if write_item.type == WriteItemType.BYTE_IO else self.staged(value)


class Overlapping(OneBuffer):
    """Rotates through a ring whose slots overlap the ones before."""

    at = 0

    def staged(self, value: torch.Tensor) -> torch.Tensor:
        self.at = (self.at + 8) % 512
        buffer = self.memory[self.at : self.at + value.nbytes].view(value.dtype).view(value.shape)
        return buffer.copy_(value)


class ScrapsTheLast(DefaultSavePlanner):
    """Hands out tensors of their own, and reclaims each as soon as the next is asked for."""

    last: torch.Tensor | None = None

    def resolve_data(self, write_item: Any) -> Any:
        if self.last is not None:
            self.last.zero_()
        value = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            return value
        self.last = value.clone()
        return self.last


class Patched(DefaultSavePlanner):
    """Replaces the method on the object, as a test double or a profiler does."""

    def __init__(self) -> None:
        super().__init__()
        inner = OneBuffer()
        self.lookup_object = lambda index: self.kept(inner, index)  # type: ignore[method-assign]

    def kept(self, inner: OneBuffer, index: Any) -> Any:
        value = DefaultSavePlanner.lookup_object(self, index)
        return inner.staged(value) if isinstance(value, torch.Tensor) else value


SAVE_PLANNERS: list[Callable[[], DefaultSavePlanner]] = [
    OneBuffer,
    TransformedInPlace,
    Overlapping,
    ScrapsTheLast,
    Patched,
    DefaultSavePlanner,
    lambda: OneBuffer(flatten_state_dict=False, flatten_sharded_tensors=False),
    lambda: OneBuffer(dedup_save_to_lowest_rank=True),
]


@pytest.mark.parametrize("planner", SAVE_PLANNERS, ids=range(len(SAVE_PLANNERS)))
def test_a_planner_may_reuse_what_it_has_handed_out(tmp_path: Path, planner: Callable[[], Any]) -> None:
    dcp.save(make(), storage_writer=Writer(tmp_path / "ours"), planner=planner(), no_dist=True)
    dcp.save(make(), storage_writer=FileSystemWriter(tmp_path / "stock"), planner=planner(), no_dist=True)
    for path in (tmp_path / "stock", tmp_path / "ours"):
        found = make(zero=True)
        dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
        assert_same(found, make())
    assert holdfast.open(tmp_path / "ours").verify().ok


class Made(dict[str, Any]):
    """A state dict that makes what it is asked for in one buffer."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.memory = torch.zeros(2_000_000, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if not isinstance(value, torch.Tensor):
            return value
        return self.memory[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)


class MakesValues(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = Made(self.state_dict)


def test_a_state_dict_that_makes_its_values(tmp_path: Path) -> None:
    dcp.save(make(), storage_writer=Writer(tmp_path / "a"), planner=MakesValues(), no_dist=True)
    found = make(zero=True)
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "a"), no_dist=True)
    assert_same(found, make())


# loading -------------------------------------------------------------------------------------------------------


class OneStaging(DefaultLoadPlanner):
    """Reads everything through one buffer, and copies it out when it is committed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.memory = torch.zeros(2_000_000, dtype=torch.uint8)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        wanted = super().resolve_tensor(read_item)
        return self.memory[: wanted.nbytes].view(wanted.dtype).view(wanted.shape)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


class RemembersTheItem(DefaultLoadPlanner):
    """Takes it that what is committed is what was resolved last."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.wanted = super().resolve_tensor(read_item)
        self.buffer = torch.full_like(self.wanted, 9)
        return self.buffer

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.wanted.copy_(self.buffer)


class OtherKinds(DefaultLoadPlanner):
    """Reads into another dtype, with other strides, one buffer for all."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(800_000, dtype=torch.float64)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        wanted = super().resolve_tensor(read_item)
        backwards = tuple(reversed(range(wanted.dim())))
        return self.memory[: 2 * wanted.numel() : 2].view(wanted.shape[::-1]).permute(backwards)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float64
        super().resolve_tensor(read_item).copy_(tensor)


class TransformsToStaging(OneStaging):
    resolve_tensor = DefaultLoadPlanner.resolve_tensor

    def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
        wanted = super().transform_tensor(read_item, tensor)
        return self.memory[: wanted.nbytes].view(wanted.dtype).view(wanted.shape)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        wanted = self.lookup_tensor(read_item.dest_index)
        DefaultLoadPlanner.transform_tensor(self, read_item, wanted).copy_(tensor)


LOAD_PLANNERS: list[Callable[[], DefaultLoadPlanner]] = [
    OneStaging,
    RemembersTheItem,
    OtherKinds,
    TransformsToStaging,
    DefaultLoadPlanner,
    lambda: OneStaging(flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True),
]


@pytest.mark.parametrize("by", ["ours", "stock"])
@pytest.mark.parametrize("planner", LOAD_PLANNERS, ids=range(len(LOAD_PLANNERS)))
def test_a_planner_may_read_everything_into_one_buffer(
    tmp_path: Path, planner: Callable[[], Any], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "STRICT_BYTES", 1 << 20)  # the large one alone, the others together
    writer = Writer(tmp_path / "a") if by == "ours" else FileSystemWriter(tmp_path / "a")
    dcp.save(make(), storage_writer=writer, no_dist=True)
    for storage_reader in (FileSystemReader(tmp_path / "a"), Reader(tmp_path / "a")):
        found = make(zero=True)
        dcp.load(found, storage_reader=storage_reader, planner=planner(), no_dist=True)
        assert_same(found, make())


def test_names_that_are_one_tensor_get_the_last_of_different_values(tmp_path: Path) -> None:
    """As from stock storage; never parts of both."""
    dcp.save(
        {"a": torch.full((1 << 18,), 1.0), "b": torch.full((1 << 18,), 2.0), "c": torch.full((9,), 3.0)},
        storage_writer=Writer(tmp_path / "a"),
        no_dist=True,
    )
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        results = []
        for storage_reader in (FileSystemReader(tmp_path / "a"), Reader(tmp_path / "a")):
            memory = torch.zeros(1 << 18)
            views = {"a": memory, "b": memory, "c": memory[100:109]}
            dcp.load({name: views[name] for name in order}, storage_reader=storage_reader, no_dist=True)
            results.append(memory)
        assert torch.equal(*results), order


def test_a_tensor_read_from_several_shards_is_not_taken_for_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its destinations interleave, and are read in one go all the same."""
    run_job(save_columns, nproc=2, args=[tmp_path])
    one_by_one: list[Any] = []
    monkeypatch.setattr(reader, "_read_strictly", lambda source, files, items, planner: one_by_one.extend(items))
    found = {"w": torch.zeros(6, 8)}
    dcp.load(found, storage_reader=Reader(tmp_path / "columns"), no_dist=True)
    assert one_by_one == []
    assert torch.equal(found["w"], torch.arange(48.0).view(6, 8))


def save_columns(root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(48.0).view(6, 8), mesh, [Shard(1)])}
    dcp.save(state, storage_writer=Writer(Path(root) / "columns"))


# several ranks, threads and processes --------------------------------------------------------------------------


def sharded(*, zero: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = make(zero=zero)
    state["wide"] = distribute_tensor(state["wide"].contiguous(), mesh, [Shard(0)])
    state["large"] = distribute_tensor(state["large"], mesh, [Shard(1)])
    return OrderedDict(state)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def save_and_load_on_two(root: str) -> None:
    for number, planner in enumerate((OneBuffer, Overlapping)):
        path = Path(root) / f"save{number}"
        dcp.save(sharded(), storage_writer=Writer(path), planner=planner())
        for load_planner in (OneStaging, RemembersTheItem, DefaultLoadPlanner):
            found = sharded(zero=True)
            dcp.load(found, storage_reader=Reader(path), planner=load_planner())
            assert_same(whole(found), make())
        dist.barrier()
    path = Path(root) / "thread"
    response = dcp.async_save(sharded(), storage_writer=Writer(path), planner=OneBuffer())
    getattr(response, "upload_completion", response).result(timeout=60)
    found = sharded(zero=True)
    dcp.load(found, storage_reader=Reader(path), planner=OneStaging())
    assert_same(whole(found), make())


def test_two_ranks_whose_planners_reuse_their_buffers(tmp_path: Path) -> None:
    run_job(save_and_load_on_two, nproc=2, args=[tmp_path])
    found = make(zero=True)
    dcp.load(found, storage_reader=Reader(tmp_path / "save1"), planner=OneStaging(), no_dist=True)
    assert_same(found, make())


def save_over_there(root: str) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/store", 1), rank=0, world_size=1)
    kind = state_dict_saver.AsyncCheckpointerType.PROCESS
    future: Any = dcp.async_save(
        make(), storage_writer=Writer(f"{root}/a"), planner=OneBuffer(), async_checkpointer_type=kind
    )
    getattr(future, "upload_completion", future).result(timeout=60)
    dist.destroy_process_group()


def test_a_process_whose_planner_reuses_its_buffers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=save_over_there, args=(str(tmp_path),))
    process.start()
    process.join(90)
    assert process.exitcode == 0
    found = make(zero=True)
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert_same(found, make())
