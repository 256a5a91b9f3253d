"""A whole checkpoint directory from our formats, read by stock DCP; and stock DCP's metadata, read by us."""

import pickle
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from holdfast._torch_compat import memory_format_encoding_type, storage_info_type
from holdfast.format.dcp_metadata import render_metadata
from holdfast.format.dcp_metadata_reader import read_metadata
from holdfast.format.objects import dump_object, load_object, object_capacity, render_object
from holdfast.format.torch_record import measure, payload_bytes, render
from holdfast.plan.write import PlacedObject, PlacedTensor, PlannedFile, RankPlan, SavePlan

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.distributed is.*:UserWarning", "ignore:TypedStorage:UserWarning"
)

STATE = {
    "model": {"w": torch.randn(6, 4), "b": torch.arange(3, dtype=torch.int64), "empty": torch.zeros(0, 3)},
    "optimizer": {"state": [{"step": torch.tensor(7.0)}, {"step": torch.tensor(8.0)}]},
    "big": torch.randn(600, 600),
    "train": {"step": 12, "names": ("a", "b"), "pair": (torch.ones(2), 5)},
}


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


def write_checkpoint(directory, *, world):
    """Every tensor cut along dim 0 over the ranks, objects on rank 0."""
    ranks = []
    for rank in range(world):
        image, tensors, objects = bytearray(), [], []
        for path, value in leaves(STATE):
            name = ".".join(map(str, path))
            if not isinstance(value, torch.Tensor):
                if rank == 0:
                    payload = dump_object(value, name=name)
                    capacity = object_capacity(payload)
                    objects.append(PlacedObject(name, path, name, 0, len(image), capacity))
                    image += render_object(payload, capacity)
                continue
            shape = tuple(value.shape)
            if shape == () or 0 in shape:
                if rank != 0:
                    continue
                box, offsets = value, tuple(0 for _ in shape)
            else:
                first, last = shape[0] * rank // world, shape[0] * (rank + 1) // world
                box, offsets = value[first:last], (first, *(0 for _ in shape[1:]))
            dtype, sizes, at = str(value.dtype).removeprefix("torch."), tuple(box.shape), len(image)
            header, trailer = render(dtype, sizes, record_offset=at)
            nbytes = payload_bytes(dtype, sizes)
            payload_at = at + measure(dtype, sizes, record_offset=at).header_bytes
            image += header + box.contiguous().numpy().tobytes() + trailer
            tensors.append(
                PlacedTensor(
                    name,
                    path,
                    name,
                    dtype,
                    shape,
                    offsets,
                    sizes,
                    (0,) * len(sizes),
                    0,
                    at,
                    payload_at,
                    nbytes,
                    len(image),
                )
            )
        (directory / f"__{rank}_0.distcp").write_bytes(image)
        files = (PlannedFile(f"__{rank}_0.distcp", len(image)),)
        ranks.append(RankPlan(rank, files, tuple(tensors), tuple(objects)))
    (directory / ".metadata").write_bytes(render_metadata(SavePlan(world, tuple(ranks))))


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize("world", [1, 3])
def test_stock_load_reads_our_directory(tmp_path, world):
    write_checkpoint(tmp_path, world=world)
    into = {
        "model": {name: torch.full_like(value, 3) for name, value in STATE["model"].items()},
        "optimizer": {"state": [{"step": torch.tensor(0.0)}, {"step": torch.tensor(0.0)}]},
        "big": torch.zeros(600, 600),
        "train": {"step": 0, "names": (), "pair": ()},
    }
    dcp.load(into, checkpoint_id=str(tmp_path), no_dist=True)
    assert_same(into, STATE)


def test_stock_conversion_reads_our_directory(tmp_path):
    write_checkpoint(tmp_path, world=2)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=False), STATE)


def test_we_read_what_stock_wrote(tmp_path):
    dcp.save(STATE, checkpoint_id=str(tmp_path), no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    found = read_metadata(data, path=".metadata")
    stock = pickle.loads(data)
    assert found.state_dict_metadata == stock.state_dict_metadata
    assert found.storage_data == stock.storage_data
    assert found.planner_data == stock.planner_data
    for index, place in found.storage_data.items():
        path = found.planner_data[index.fqn]
        expected = STATE
        for key in path:
            expected = expected[key]
        record = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        assert_same(load_object(record, name=index.fqn, path=place.relative_path), expected)


def test_our_metadata_says_what_stocks_does(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write_checkpoint(ours, world=1)
    dcp.save(STATE, checkpoint_id=str(theirs), no_dist=True)
    found, stock = (pickle.loads((path / ".metadata").read_bytes()) for path in (ours, theirs))
    assert found.state_dict_metadata == stock.state_dict_metadata
    assert found.planner_data == stock.planner_data
    assert found.storage_data.keys() == stock.storage_data.keys()
    assert {str(index) for index in found.storage_data} == {str(index) for index in stock.storage_data}
    assert getattr(stock, "version", None) in (None, found.version)


def test_plans_that_others_keep_in_the_metadata_are_read_over(tmp_path, monkeypatch):
    """NVRx and Megatron-LM store all ranks' plans, to use them again; Megatron-LM once had classes of its own."""
    state = {"w": torch.arange(6.0).view(2, 3), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    prefix = dcp.FileSystemWriter(tmp_path).prepare_global_plan([plan])[0]
    file = tmp_path / ".metadata"
    plain = pickle.loads(file.read_bytes())

    def read(kind, plans):
        found = object.__new__(kind)
        vars(found).update(vars(plain), all_local_plans=plans, mcore_data={"w": {"shape": (2, 3)}})
        file.write_bytes(pickle.dumps(found))
        return read_metadata(file.read_bytes(), path=str(file))

    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreMetadata", type(plain)), ("MCoreSavePlan", type(plan))):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing", types.ModuleType("x"))
    for depth in ("megatron", "megatron.core", "megatron.core.dist_checkpointing.strategies"):
        monkeypatch.setitem(sys.modules, depth, types.ModuleType(depth))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = module.MCoreSavePlan(plan.items)
    for kind, plans in ((type(plain), [plan, prefix]), (module.MCoreMetadata, [own])):
        found = read(kind, plans)
        assert type(found) is type(plain)
        assert found.state_dict_metadata == plain.state_dict_metadata
        assert found.storage_data == plain.storage_data
        assert not hasattr(found, "all_local_plans")
    loaded = {"w": torch.zeros(2, 3), "step": 0}
    holdfast.load(loaded, tmp_path)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["step"] == 3


def test_the_private_names_are_where_the_pickles_say():
    assert storage_info_type().__module__ == "torch.distributed.checkpoint.filesystem"
    assert storage_info_type().__qualname__ == "_StorageInfo"
    assert memory_format_encoding_type().__module__ == "torch.distributed.checkpoint.metadata"
    assert memory_format_encoding_type()(0).name == "TORCH_CONTIGUOUS_FORMAT"
