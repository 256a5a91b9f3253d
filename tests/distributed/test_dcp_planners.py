"""Planners of the user's own: what they rename, convert, cut, leave out, cache and hand over in buffers of their own.

In every combination of stock DCP and Holdfast (`dcp_ways`). Planners belong to ``dcp.save`` and ``dcp.load``, so the
writer and the reader are stock's, or Holdfast's in their place.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ways import BEHIND, FOUR, STOCK, Behaviours, Way, blank, equal, numbers
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import mesh_of

from holdfast.dcp import Reader, Writer

behaviours = Behaviours()


def plain() -> dict[str, Any]:
    return {
        "model": {"a": numbers(4, 6), "b": numbers(3, seed=2), "c": numbers(2, 2, seed=3)},
        "list": [numbers(2, seed=4), {"deep": numbers(1, seed=5)}, 7],
        "epoch": 3,
        "name": "run",
    }


def sharded() -> dict[str, Any]:
    """On two ranks: what is cut, unevenly; replicas, placed and plain; and plain values."""
    mesh = mesh_of(2)
    return {
        "rows": distribute_tensor(numbers(7, 3), mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(numbers(3, 5, seed=2), mesh, [Shard(1)], src_data_rank=None),
        "copies": distribute_tensor(numbers(4, seed=3), mesh, [Replicate()], src_data_rank=None),
        "plain": numbers(5, seed=4),
        "epoch": 3,
    }


def refused(call: Any, *words: str) -> CheckpointException:
    with pytest.raises(CheckpointException) as raised:
        call()
    assert all(word in str(raised.value) for word in words), str(raised.value)
    return raised.value


# names -----------------------------------------------------------------------------------------------------------


class SavesRenamed(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"old.{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class LoadsRenamed(DefaultLoadPlanner):
    """Asks the storage for ``old.x`` and puts it where ``x`` is."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        known = {name.removeprefix("old."): value for name, value in metadata.state_dict_metadata.items()}
        super().set_up_planner(state_dict, dataclasses.replace(metadata, state_dict_metadata=known), is_coordinator)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()

        def renamed(item: Any) -> Any:
            index = dataclasses.replace(item.storage_index, fqn=f"old.{item.storage_index.fqn}")
            return dataclasses.replace(item, storage_index=index)

        return dataclasses.replace(plan, items=[renamed(item) for item in plan.items])


@behaviours(world=1, own=False)
def renamed_on_saving_and_loading(way: Way) -> None:
    way.save(plain(), planner=SavesRenamed())
    equal(way.load(blank(plain()), planner=LoadsRenamed()), plain())


@behaviours(world=2, own=False)
def renamed_shards(way: Way) -> None:
    way.save(sharded(), planner=SavesRenamed())
    equal(way.load(blank(sharded()), planner=LoadsRenamed()), sharded())


@behaviours(world=1, own=False)
def lookups_under_another_name(way: Way) -> None:
    """A load planner that hands out the tensors of another object than the state it was given."""

    class Elsewhere(DefaultLoadPlanner):
        def __init__(self, others: dict[str, torch.Tensor]) -> None:
            super().__init__()
            self.others = others

        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return self.others[index.fqn]

    way.save({"a": numbers(3, 4), "b": numbers(5, seed=2)})
    others = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    way.load(state, planner=Elsewhere(others))
    equal(others, {"a": numbers(3, 4), "b": numbers(5, seed=2)})
    assert not state["a"].any()


# values ----------------------------------------------------------------------------------------------------------


class SavesHalf(DefaultSavePlanner):
    """Keeps floating-point tensors as bfloat16."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - DCP's name
        value = super().transform_object(write_item, object)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(torch.bfloat16)


@behaviours(world=2, own=False)
def converted_on_saving(way: Way) -> None:
    way.save(sharded(), planner=SavesHalf())
    found = way.load({"rows": torch.zeros(7, 3), "plain": torch.zeros(5)})
    equal(found, {"rows": numbers(7, 3).bfloat16().float(), "plain": numbers(5, seed=4).bfloat16().float()})


@behaviours(world=1)
def converted_by_the_dtype_of_the_destination(way: Way) -> None:
    way.save({"wide": numbers(6, 2), "narrow": numbers(6, 2).bfloat16(), "count": torch.arange(5)})
    state = {"wide": torch.zeros(6, 2, dtype=torch.bfloat16), "narrow": torch.zeros(6, 2), "count": torch.zeros(5)}
    way.load(state)
    equal(
        state,
        {"wide": numbers(6, 2).bfloat16(), "narrow": numbers(6, 2).bfloat16().float(), "count": torch.arange(5.0)},
    )


@behaviours(world=2, own=False)
def scaled_on_loading(way: Way) -> None:
    """Each tensor is read into one of the planner's, and committed from there."""

    class Doubles(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor * 2)

    way.save(sharded())
    found = way.load(blank(sharded()), planner=Doubles())
    for name in ("rows", "columns", "copies", "plain"):
        equal({name: found[name]}, {name: sharded()[name] * 2})


@behaviours(world=1, own=False)
def values_read_by_the_planner(way: Way) -> None:
    class Counts(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    seen: dict[str, Any] = {}
    way.save(plain())
    found = way.load(blank(plain()), planner=Counts())
    assert seen == {"epoch": 3, "name": "run", "list.2": 7}
    assert found["epoch"] == 0


@behaviours(world=1, own=False)
def one_buffer_for_all_that_is_saved(way: Way) -> None:
    class Reuses(DefaultSavePlanner):
        buffer = torch.zeros(24)

        def resolve_data(self, write_item: Any) -> Any:
            value = super().resolve_data(write_item)
            if write_item.type == WriteItemType.BYTE_IO:
                return value
            return self.buffer[: value.numel()].view(value.shape).copy_(value)

    way.save(plain(), planner=Reuses())
    equal(way.load(blank(plain())), plain())


@behaviours(world=1, own=False)
def one_buffer_for_all_that_is_loaded(way: Way) -> None:
    class Reuses(DefaultLoadPlanner):
        buffer = torch.zeros(24)

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            value = super().resolve_tensor(read_item)
            return self.buffer[: value.numel()].view(value.shape)

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor)

    way.save(plain())
    equal(way.load(blank(plain()), planner=Reuses()), plain())


# parts -----------------------------------------------------------------------------------------------------------


class SavesInPieces(DefaultSavePlanner):
    """Cuts every matrix into pieces of one row."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items: list[Any] = []
        for item in plan.items:
            if item.tensor_data is None or len(item.tensor_data.size) != 2:
                items.append(item)
                continue
            chunk = item.tensor_data.chunk
            for row in range(chunk.sizes[0]):
                offsets = torch.Size([chunk.offsets[0] + row, chunk.offsets[1]])
                piece = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([1, chunk.sizes[1]]))
                data = dataclasses.replace(item.tensor_data, chunk=piece)
                index = MetadataIndex(item.index.fqn, offsets)
                items.append(dataclasses.replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            return super().lookup_object(index)
        local, start = value, 0
        if hasattr(value, "to_local"):
            local = value.to_local()
            start = -(-value.shape[0] // 2) * dist.get_rank()
        assert index.offset is not None
        return local[index.offset[0] - start : index.offset[0] - start + 1]


@behaviours(world=1, own=False)
def tensors_saved_in_pieces(way: Way) -> None:
    way.save(plain(), planner=SavesInPieces())
    equal(way.load(blank(plain())), plain())


@behaviours(world=2, own=False)
def shards_saved_in_pieces(way: Way) -> None:
    rows = sharded()["rows"]
    way.save({"rows": rows}, planner=SavesInPieces())
    equal(way.load({"rows": blank(rows)}), {"rows": rows})
    turned = distribute_tensor(numbers(7, 3), mesh_of(2), [Shard(1)], src_data_rank=None)
    equal(way.load({"rows": blank(turned)}), {"rows": turned})


@behaviours(world=1, own=False)
def a_part_of_a_tensor(way: Way) -> None:
    """Only some columns are asked for, into a tensor of their size."""

    class Columns(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            self.state_dict = {"w": wide}
            plan = super().create_local_plan()
            cut = [
                dataclasses.replace(
                    item,
                    storage_offsets=torch.Size([item.storage_offsets[0], item.storage_offsets[1] + 2]),
                    lengths=torch.Size([item.lengths[0], 3]),
                )
                for item in plan.items
            ]
            self.state_dict = {"w": narrow}
            return dataclasses.replace(plan, items=cut)

    way.save({"w": numbers(4, 6)}, planner=SavesInPieces())
    wide, narrow = torch.zeros(4, 6), torch.zeros(4, 3)
    way.load({"w": wide}, planner=Columns())
    assert torch.equal(narrow, numbers(4, 6)[:, 2:5])


# more or less than is stored ------------------------------------------------------------------------------------


@behaviours(world=1, own=False)
def less_than_is_stored(way: Way) -> None:
    way.save(plain())
    state = {"model": {"b": torch.zeros(3)}, "epoch": 0}
    equal(way.load(state), {"model": {"b": plain()["model"]["b"]}, "epoch": 3})
    refused(lambda: way.load({"model": {"b": torch.zeros(3), "new": torch.zeros(1)}}), "model.new")


@behaviours(world=2, own=False)
def more_than_is_stored(way: Way) -> None:
    way.save(sharded())
    state = {**blank(sharded()), "new": torch.ones(2), "newer": 5}
    refused(lambda: way.load(dict(state)), "new")
    found = way.load(state, planner=DefaultLoadPlanner(allow_partial_load=True))
    equal(found, {**sharded(), "new": torch.ones(2), "newer": 5})


@behaviours(world=1, own=False)
def layers_of_another_width_are_left_out(way: Way) -> None:
    """Fine-tuning with a new head: what doesn't fit is not asked for, and stays."""

    class Fitting(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            stored = self.metadata.state_dict_metadata
            fitting = {
                name: value
                for name, value in self.state_dict.items()
                if name in stored and stored[name].size == value.shape
            }
            return create_default_local_load_plan(fitting, self.metadata)

    way.save(plain())
    state = {"model": {"a": torch.zeros(4, 6), "b": torch.ones(9), "new": torch.ones(2)}}
    found = way.load(state, planner=Fitting())["model"]
    equal(found, {"a": plain()["model"]["a"], "b": torch.ones(9), "new": torch.ones(2)})


@behaviours(world=2, own=False)
def another_shape_is_refused_by_name(way: Way) -> None:
    way.save(sharded())
    error = refused(lambda: way.load({"plain": torch.zeros(6)}), "plain")
    assert set(error.failures) == {0, 1}


@behaviours(world=1, own=False)
def everything_without_a_state_to_fill(way: Way) -> None:
    path = way.save(plain())

    def found(keys: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner(keys=keys)
        _load_state_dict(state, storage_reader=way.storage_reader(path), planner=planner, no_dist=True)
        return state

    equal(found(), plain())
    equal(found({"model"}), {"model": plain()["model"]})
    equal(found({"model.b", "epoch"}), {"model": {"b": plain()["model"]["b"]}, "epoch": 3})
    equal(_load_state_dict_from_keys("model", storage_reader=way.storage_reader(path)), {"model": plain()["model"]})
    equal(_load_state_dict_from_keys(storage_reader=way.storage_reader(path)), plain())


@behaviours(world=2, own=False)
def everything_of_shards_on_one_rank(way: Way) -> None:
    path = way.save(sharded())
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=way.storage_reader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    equal(state, whole())


def whole() -> dict[str, Any]:
    return {
        "rows": numbers(7, 3),
        "columns": numbers(3, 5, seed=2),
        "copies": numbers(4, seed=3),
        "plain": numbers(5, seed=4),
        "epoch": 3,
    }


# what planners are told, and tell -------------------------------------------------------------------------------


class Notes(DefaultSavePlanner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.calls.append("set up")
        self.storage_meta, self.coordinator = storage_meta, is_coordinator
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: Any) -> Any:
        self.calls.append("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self.calls.append("finish")
        return super().finish_plan(new_plan)


@behaviours(world=2, own=False)
def steps_of_a_save(way: Way) -> None:
    planner, rank = Notes(), dist.get_rank()
    path = way.save(sharded(), planner=planner, each=True)
    assert planner.calls == (["set up", "global", "finish"] if rank == 0 else ["set up", "finish"])
    assert planner.coordinator == (rank == 0)
    assert str(planner.storage_meta.checkpoint_id) == str(path)
    equal(way.load(blank(sharded()), path), sharded())


@behaviours(world=2, own=False)
def metadata_for_load_planners(way: Way) -> None:
    """Sizes, dtypes and pieces of tensors, which names are plain values, and where in the state each name is."""
    seen: dict[str, Any] = {}

    class Looks(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            seen["metadata"] = metadata
            super().set_up_planner(state_dict, metadata, is_coordinator)

    way.save({"top": sharded()})
    way.load({"top": blank(sharded())}, planner=Looks())
    metadata = seen["metadata"]
    names = {f"top.{name}" for name in sharded()}
    assert set(metadata.state_dict_metadata) == set(metadata.planner_data) == names
    assert metadata.planner_data["top.rows"] == ("top", "rows")
    for name, value in whole().items():
        found = metadata.state_dict_metadata[f"top.{name}"]
        assert isinstance(found, TensorStorageMetadata) == isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            assert (found.size, found.properties.dtype) == (value.shape, value.dtype)
    pieces = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in metadata.state_dict_metadata["top.rows"].chunks}
    assert pieces == {((0, 0), (4, 3)), ((4, 0), (3, 3))}
    assert len(metadata.state_dict_metadata["top.copies"].chunks) == 1


@behaviours(world=1, own=False)
def planner_data_of_another_kind(way: Way) -> None:
    """What a save planner notes for its load planner comes back as it was."""
    seen: dict[str, Any] = {}

    class SavesNotes(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data={"version": 3, "order": ["b", "a"]})

    class LoadsNotes(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            seen.update(metadata.planner_data)
            super().set_up_planner(state_dict, metadata, is_coordinator)

    way.save({"a": numbers(3), "b": numbers(2, seed=2)}, planner=SavesNotes())
    way.load({"a": torch.zeros(3), "b": torch.zeros(2)}, planner=LoadsNotes())
    assert seen == {"version": 3, "order": ["b", "a"]}


UNFLATTENED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


@behaviours(world=2, own=False)
def flat_states_without_flattening(way: Way) -> None:
    way.save(sharded(), planner=DefaultSavePlanner(**UNFLATTENED))
    equal(way.load(blank(sharded()), planner=DefaultLoadPlanner(**UNFLATTENED)), sharded())
    equal(way.load(blank(sharded())), sharded())


@behaviours(world=1, own=False)
def nested_states_without_flattening(way: Way) -> None:
    """A dictionary is one value then, its tensors included."""
    way.save(plain(), planner=DefaultSavePlanner(**UNFLATTENED))
    equal(way.load(blank(plain()), planner=DefaultLoadPlanner(**UNFLATTENED)), plain())


# replicas --------------------------------------------------------------------------------------------------------


@behaviours(world=2, own=False)
def replicas_are_stored_once(way: Way) -> None:
    state = {f"r{number}": numbers(64, seed=number) for number in range(8)}
    for lowest in (True, False):
        path = way.save(state, f"lowest-{lowest}", planner=DefaultSavePlanner(dedup_save_to_lowest_rank=lowest))
        equal(way.load(blank(state), path), state)
        stored = FileSystemReader(path).read_metadata().storage_data
        ranks = [place.relative_path.split("_")[2] for place in stored.values()]
        assert len(ranks) == len(state)
        assert set(ranks) == ({"0"} if lowest else {"0", "1"}), ranks


# cached plans ----------------------------------------------------------------------------------------------------


def forget_plans() -> None:
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{cache}", {}).clear()  # older torch caches less


def caching() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)


@behaviours(world=2, own=False)
def saves_with_cached_plans(way: Way) -> None:
    """The same structure three times, then another, then the first again; each save has its own values."""

    def state(number: int, *, more: bool = False) -> dict[str, Any]:
        found = {
            name: value + number if isinstance(value, torch.Tensor) else number for name, value in sharded().items()
        }
        return {**found, "more": numbers(3) + number} if more else found

    forget_plans()
    states = [state(0), state(1), state(2), state(3, more=True), state(4, more=True), state(5)]
    paths = [way.save(value, f"s{number}", planner=caching(), each=True) for number, value in enumerate(states)]
    forget_plans()
    for path, value in zip(paths, states, strict=True):
        equal(way.load(blank(value), path), value)


@behaviours(world=2, own=False, combinations=[(a, b) for a, b in FOUR if a == BEHIND])
def cached_plans_for_another_writer(way: Way) -> None:
    """Holdfast's writer and stock's in turns, whichever made the plan."""
    for first, second in ((Writer, FileSystemWriter), (FileSystemWriter, Writer)):
        forget_plans()
        for number, kind in enumerate((first, second, first, first, second)):
            path = way.own_path(f"{first.__name__}-{number}")
            state = {**sharded(), "epoch": number}
            dcp.save(state, storage_writer=kind(path), planner=caching())
            equal(way.load(blank(state), path), state)
    forget_plans()


# conversions -----------------------------------------------------------------------------------------------------


@behaviours(world=1, own=False)
def conversions_from_and_to_torch_save(way: Way) -> None:
    """By stock's tools, and by the same planners over Holdfast's writer and reader."""
    before, path, after = way.own_path("before.pt"), way.own_path("dcp"), way.own_path("after.pt")
    torch.save(plain(), before)
    if way.writer == STOCK:
        torch_save_to_dcp(before, path)
    else:
        _save_state_dict(torch.load(before, weights_only=False), storage_writer=Writer(path), no_dist=True)
    equal(way.load(blank(plain()), path), plain())
    if way.reader == STOCK:
        dcp_to_torch_save(path, after)
    else:
        state: dict[str, Any] = {}
        _load_state_dict(state, storage_reader=Reader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        torch.save(state, after)
    equal(torch.load(after, weights_only=False), plain())


@behaviours(world=2, own=False)
def a_file_of_torch_save_on_all_ranks_and_on(way: Way) -> None:
    """Rank 0 reads the file and broadcasts it; shards of it are saved as any others."""
    file = way.own_path("file.pt")
    tensors = {name: value for name, value in whole().items() if isinstance(value, torch.Tensor)}
    if dist.get_rank() == 0:
        torch.save({"model": tensors}, file)
    dist.barrier()
    state = {"model": blank(tensors)}
    dcp.load(
        state, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(), checkpoint_id=str(file)
    )
    equal(state, {"model": tensors})
    mesh, whole_values = mesh_of(2), state["model"].items()
    cut = {name: distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None) for name, value in whole_values}
    way.save(cut)
    equal(way.load(blank(cut)), cut)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("planners"))


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
@behaviours.every_case()
def test_planners(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
