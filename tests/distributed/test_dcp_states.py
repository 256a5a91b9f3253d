"""What a state may hold, how it is named and laid out in a directory, and who else reads and writes that.

In every combination of stock DCP and Holdfast (`dcp_ways`), in one process without a process group.
"""

from __future__ import annotations

import collections
import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ways import BEHIND, FOUR, NINE, OWN, STOCK, Behaviours, Way, blank, equal, numbers
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

import holdfast
from holdfast.dcp import Reader, Writer

behaviours = Behaviours()


def comes_back(way: Way, state: dict[str, Any]) -> None:
    way.save(state)
    equal(way.load(blank(state)), state)


# tensors ---------------------------------------------------------------------------------------------------------

KINDS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


@behaviours(world=1)
def kinds_of_numbers(way: Way) -> None:
    comes_back(way, {str(kind).split(".")[1]: (numbers(3, 5) * 9).abs().to(kind) for kind in KINDS})


@behaviours(world=1)
def numbers_that_are_none(way: Way) -> None:
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45]
    state = {str(kind): torch.tensor(special, dtype=kind) for kind in (torch.float32, torch.float64, torch.bfloat16)}
    way.save(state)
    found = way.load(blank(state))
    for name, value in state.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


@behaviours(world=1)
def tensors_of_every_size(way: Way) -> None:
    shapes = ((), (0,), (0, 4), (4, 0), (1,), (1, 1, 1), (3,), (100_003,), (2, 3, 4, 5, 6))
    comes_back(way, {"x".join(map(str, shape)) or "scalar": numbers(*shape) for shape in shapes})


@behaviours(world=1)
def views_and_strides(way: Way) -> None:
    """What is saved is what an index shows, whatever memory is behind it."""
    base = numbers(6, 8)
    views = {
        "turned": base.t(),
        "steps": base[::2, 1::3],
        "inside": base[2:4, 3:7],
        "expanded": base[:1].expand(5, 8),
        "last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.complex(base, base + 1).conj(),
        "imaginary": torch.complex(base, base + 1).conj().imag,
    }
    way.save(views)
    expected = {name: value.clone().contiguous().resolve_conj().resolve_neg() for name, value in views.items()}
    equal(way.load({name: torch.zeros_like(value) for name, value in expected.items()}), expected)


@behaviours(world=1)
def destinations_that_are_views(way: Way) -> None:
    """Loading writes through a view, and nothing beside it."""
    way.save({"a": numbers(3, 4), "b": numbers(4, 3, seed=2)})
    base, turned = torch.zeros(5, 9), torch.zeros(3, 4)
    way.load({"a": base[1:4, 2:9:2], "b": turned.t()})
    assert torch.equal(base[1:4, 2:9:2], numbers(3, 4))
    assert base.count_nonzero() == 12
    assert torch.equal(turned.t(), numbers(4, 3, seed=2))


@behaviours(world=1)
def tensors_that_share_memory(way: Way) -> None:
    shared = numbers(4, 4)
    comes_back(way, {"one": shared, "same": shared, "part": shared[1:3], "deep": {"again": shared}})


@behaviours(world=1)
def parameters_and_tensors_with_gradients(way: Way) -> None:
    """They are filled in place, stay the same objects, and remember nothing of it."""
    way.save({"p": nn.Parameter(numbers(3)), "result": numbers(3).requires_grad_() * 2})
    parameter, leaf = nn.Parameter(torch.zeros(3)), torch.zeros(3, requires_grad=True)
    state = {"p": parameter, "result": leaf}
    way.load(state)
    assert state["p"] is parameter
    assert parameter.grad_fn is None and leaf.is_leaf and leaf.requires_grad
    assert torch.equal(parameter, numbers(3)) and torch.equal(leaf, numbers(3) * 2)


# containers and values -------------------------------------------------------------------------------------------


@behaviours(world=1)
def containers_in_one_another(way: Way) -> None:
    state = {
        "dict": {"a": {"b": {"c": numbers(2, 3)}}, "n": 1},
        "list": [numbers(3), {"x": numbers(2, seed=2), "y": "text"}, [numbers(1), 7]],
        "values": [1, 2.5, None, "x"],
        "dots.in.names": {"a.b": numbers(4)},
        "ordered": collections.OrderedDict(b=numbers(1), a=numbers(2)),
    }
    way.save(state)
    equal(way.load(blank(state)), state)


@behaviours(world=1)
def plain_values(way: Way) -> None:
    state = {
        "int": 3,
        "long": 1 << 80,
        "float": 0.1,
        "text": "äöü\n",
        "bytes": b"\x00\xff",
        "bool": True,
        "none": None,
        "tuple": (1, "two", (3.0,)),
        "tensors": (numbers(2), {"deep": numbers(1)}),
        "array": np.arange(6.0).reshape(2, 3),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "set": {1, 2},
    }
    way.save(state)
    found = way.load(dict.fromkeys(state))
    array, tensors = found.pop("array"), found.pop("tensors")
    assert np.array_equal(array, state["array"])
    assert torch.equal(tensors[0], numbers(2)) and torch.equal(tensors[1]["deep"], numbers(1))
    assert found == {name: value for name, value in state.items() if name not in ("array", "tensors")}


@behaviours(world=1, own=False)  # which refuses a state without anything
def nothing_at_all(way: Way) -> None:
    way.save({})
    assert way.load({}) == {}


@behaviours(world=1)
def empty_containers(way: Way) -> None:
    state = {"dict": {}, "list": [], "deep": {"er": {}}, "x": numbers(1)}
    way.save(state)
    found = way.load({"x": torch.zeros(1)})
    equal(found, {"x": numbers(1)})


@behaviours(world=1)
def names_in_another_order(way: Way) -> None:
    names = [f"n{number}" for number in range(20)]
    way.save({name: numbers(3, seed=number) for number, name in enumerate(names)})
    state = {name: torch.zeros(3) for name in reversed(names)}
    equal(way.load(state), {name: numbers(3, seed=int(name[1:])) for name in reversed(names)})


@behaviours(world=1)
def many_small_tensors(way: Way) -> None:
    comes_back(way, {"layers": {f"{number}": {"w": numbers(3, seed=number)} for number in range(300)}})


# objects that keep a state ---------------------------------------------------------------------------------------


class Progress:
    """As a trainer has one: numbers, a tensor, and lists that grow."""

    def __init__(self) -> None:
        self.step, self.losses, self.mean, self.loads = 0, [], torch.zeros(2), 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "losses": self.losses, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses, self.mean = int(state["step"]), list(state["losses"]), state["mean"]
        self.loads += 1


@behaviours(world=1)
def stateful_objects(way: Way) -> None:
    saved, found = Progress(), Progress()
    saved.step, saved.losses, saved.mean = 3, [0.5, 0.25], numbers(2)
    way.save({"progress": saved, "x": numbers(1)})
    state = {"progress": found, "x": torch.zeros(1)}
    way.load(state)
    assert state["progress"] is found
    assert (found.step, found.losses, found.loads) == (3, [0.5, 0.25], 1)
    assert torch.equal(found.mean, saved.mean)


@behaviours(world=1, combinations=[*FOUR, (OWN, OWN)])
def stateful_objects_without_anything(way: Way) -> None:
    """Loading calls them all the same, `holdfast.load` where the save noted them, which stock's doesn't."""

    class Silent:
        loads = 0

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert not state
            self.loads += 1

    way.save({"silent": Silent(), "x": numbers(1)})
    found = Silent()
    way.load({"silent": found, "x": torch.zeros(1)})
    assert found.loads == 1


@behaviours(world=1)
def dictionaries_are_filled_in_place(way: Way) -> None:
    way.save({"model": {"w": numbers(3)}, "n": 5})
    model = {"w": torch.zeros(3)}
    tensor = model["w"]
    state: dict[str, Any] = {"model": model, "n": 0}
    way.load(state)
    assert state["model"] is model and model["w"] is tensor
    assert torch.equal(tensor, numbers(3)) and state["n"] == 5


@behaviours(world=1)
def modules_by_their_state(way: Way) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.EmbeddingBag(5, 2))

    torch.manual_seed(1)
    saved = Net()
    saved[1](saved[0](numbers(6, 3)))
    way.save({"model": saved})
    found = Net()
    way.load({"model": found})
    equal({"model": dict(found.state_dict())}, {"model": dict(saved.state_dict())})


# wrong states ----------------------------------------------------------------------------------------------------


def refused(way: Way, state: dict[str, Any], *words: str, path: Path | str = "a") -> BaseException:
    with pytest.raises((CheckpointException, holdfast.HoldfastError)) as raised:
        way.load(state, path)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    return raised.value


@behaviours(world=1)
def a_name_that_is_not_stored(way: Way) -> None:
    way.save({"model": {"a": numbers(3)}})
    state = {"model": {"a": torch.zeros(3), "b": torch.zeros(3)}}
    refused(way, state, "model.b")


@behaviours(world=1)
def another_shape(way: Way) -> None:
    way.save({"model": {"a": numbers(3, 4)}})
    for shape in ((4, 3), (12,), (3, 4, 1), (3, 5), ()):
        refused(way, {"model": {"a": torch.zeros(shape)}}, "model.a")


# directories -----------------------------------------------------------------------------------------------------


@behaviours(world=1)
def no_checkpoint_there(way: Way) -> None:
    empty = way.own_path("empty")
    empty.mkdir()
    for path in (way.own_path("missing"), empty):
        refused(way, {"a": torch.zeros(1)}, path=path)


@behaviours(world=1)
def data_that_is_gone(way: Way) -> None:
    path = way.save({"a": numbers(50), "n": 1}, each=True)
    for file in path.glob("*.distcp"):
        file.unlink()
    refused(way, {"a": torch.zeros(50), "n": 0}, path=path)


@behaviours(world=1)
def data_that_was_cut_short(way: Way) -> None:
    path = way.save({"a": numbers(50_000)}, each=True)
    for file in path.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    refused(way, {"a": torch.zeros(50_000)}, path=path)


@behaviours(world=1, combinations=[(a, b) for a, b in NINE if a == STOCK or b == STOCK])
def metadata_that_makes_no_sense(way: Way) -> None:
    """Stock's readers know nothing else, and of what stock's writer has written nobody does."""
    for damage in (b"", b"garbage", None):
        path = way.save({"a": numbers(5)}, f"{damage!r}", each=True)
        if damage is None:
            (path / ".metadata").unlink()
        else:
            (path / ".metadata").write_bytes(damage)
        with pytest.raises((CheckpointException, holdfast.HoldfastError)):
            way.load({"a": torch.zeros(5)}, path)


@behaviours(world=1)
def places_by_every_name(way: Way) -> None:
    """As a string, with a slash behind, relative, and below directories that aren't there yet."""
    here = Path.cwd()
    top = way.own_path("top")
    top.mkdir()
    os.chdir(top)
    try:
        for number, path in enumerate((f"{top}/text", f"{top}/slash/", "relative/to/here", top / "deep" / "er" / "x")):
            state = {"a": numbers(3, seed=number)}
            if way.writer == OWN:
                holdfast.save(state, path)
            else:
                dcp.save(state, storage_writer=way.storage_writer(path))  # type: ignore[arg-type]
            found = {"a": torch.zeros(3)}
            if way.reader == OWN:
                holdfast.load(found, path)
            else:
                dcp.load(found, storage_reader=way.storage_reader(path))  # type: ignore[arg-type]
            equal(found, state)
    finally:
        os.chdir(here)


@behaviours(world=1, own=False)
def ids_take_the_place_of_paths(way: Way) -> None:
    """``checkpoint_id`` of each call, with one writer and one reader for several."""
    writer = way.storage_writer(way.own_path("unused"))
    reader = way.storage_reader(way.own_path("unused"))
    for number in range(3):
        dcp.save({"a": numbers(3, seed=number)}, storage_writer=writer, checkpoint_id=way.own_path(f"{number}"))
    for number in range(3):
        found = {"a": torch.zeros(3)}
        dcp.load(found, storage_reader=reader, checkpoint_id=way.own_path(f"{number}"))
        equal(found, {"a": numbers(3, seed=number)})
    assert not way.own_path("unused").exists()


@behaviours(world=1, own=False)
def overwriting(way: Way) -> None:
    """Refused or done, as the writer was told, whoever has written what is there."""
    path, state = way.own_path("a"), {"a": numbers(3, seed=2)}
    for first in (FileSystemWriter, Writer):
        place = way.own_path(first.__name__)
        dcp.save({"a": numbers(3), "old": numbers(1)}, storage_writer=first(place))
        kind: Any = FileSystemWriter if way.writer == STOCK else Writer
        if kind is FileSystemWriter and first is Writer:
            continue  # stock writes into a directory, and leaves there what it doesn't know
        with pytest.raises(CheckpointException, match=r"(?i)exists"):
            dcp.save(state, storage_writer=kind(place, overwrite=False))
        equal(way.load({"a": torch.zeros(3), "old": torch.zeros(1)}, place), {"a": numbers(3), "old": numbers(1)})
        dcp.save(state, storage_writer=kind(place, overwrite=True))
        equal(way.load({"a": torch.zeros(3)}, place), state)
    assert not path.exists()


@behaviours(world=1, combinations=[(STOCK, reader) for reader in (STOCK, BEHIND, OWN)])
def stock_overwrites_what_holdfast_wrote(way: Way) -> None:
    """Never what was there before: what was written last, or a refusal."""
    path = way.own_path("a")
    holdfast.save({"a": numbers(3)}, path)
    dcp.save({"a": numbers(3, seed=2)}, storage_writer=FileSystemWriter(path))
    found = {"a": torch.zeros(3)}
    try:
        way.load(found, path)
    except (CheckpointException, holdfast.CheckpointCorrupt):
        assert way.reader != STOCK
    else:
        equal(found, {"a": numbers(3, seed=2)})


@behaviours(world=1, combinations=[(STOCK, reader) for reader in (STOCK, BEHIND, OWN)])
def every_way_stock_lays_out_files(way: Way) -> None:
    state = {f"t{number}": numbers(40 + number, seed=number) for number in range(7)} | {"n": 1}
    for number, options in enumerate(
        ({"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False, "per_thread_copy_ahead": 0})
    ):
        path = way.own_path(f"{number}")
        dcp.save(state, storage_writer=FileSystemWriter(path, **options))  # type: ignore[arg-type]
        equal(way.load(blank(state), path), state)


@behaviours(world=1, own=False)
def calls_of_older_programs(way: Way) -> None:
    """``save_state_dict`` and ``load_state_dict``, which stock keeps for them."""
    path, state = way.own_path("a"), {"a": numbers(3), "n": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dcp.save_state_dict(state, way.storage_writer(path), no_dist=True)
        found = blank(state)
        dcp.load_state_dict(found, way.storage_reader(path), no_dist=True)
    equal(found, state)


@behaviours(world=1, own=False)
def metadata_that_a_save_returns(way: Way) -> None:
    """The same as a reader finds."""
    path = way.own_path("a")
    told = dcp.save({"m": {"a": numbers(3, 2)}, "n": 4}, storage_writer=way.storage_writer(path))
    found = way.storage_reader(path).read_metadata()
    for metadata in (told, found):
        entries = metadata.state_dict_metadata
        assert set(entries) == {"m.a", "n"}
        assert isinstance(entries["m.a"], TensorStorageMetadata) and isinstance(entries["n"], BytesStorageMetadata)
        assert entries["m.a"].size == torch.Size([3, 2])
        assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entries["m.a"].chunks] == [((0, 0), (3, 2))]
        assert metadata.planner_data == {"m.a": ("m", "a"), "n": ("n",)}


@behaviours(world=1, own=False)
def ids_of_saves_and_loads(way: Way) -> None:
    path = way.own_path("a")
    writer, reader = way.storage_writer(path), way.storage_reader(path)
    dcp.save({"a": numbers(3)}, storage_writer=writer)
    found = reader.read_metadata().storage_meta
    assert str(found.checkpoint_id) == str(path)
    assert found.save_id == writer.save_id
    assert found.load_id == reader.load_id


@behaviours(world=1, own=False)
def files_by_fsspec(way: Way) -> None:
    """Stock's other writer and reader of the same format."""
    path, state = way.own_path("a"), {"a": numbers(30), "n": 4}
    dcp.save(state, storage_writer=FsspecWriter(str(path)) if way.writer == STOCK else Writer(path))
    found = blank(state)
    dcp.load(found, storage_reader=FsspecReader(str(path)) if way.reader == STOCK else Reader(path))
    equal(found, state)


@behaviours(world=1, combinations=[(a, b) for a in (STOCK, OWN) for b in (STOCK, OWN)])
def directories_of_hugging_face(way: Way) -> None:
    """Stock's writer and reader of safetensors, Holdfast's export, and its load."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
    except ImportError:
        return  # torch before 2.8
    path, weights = way.own_path("hf"), {"up": numbers(40, 5), "down": numbers(5, 40, seed=2).bfloat16()}
    if way.writer == STOCK:
        dcp.save(weights, storage_writer=HuggingFaceStorageWriter(str(path), fqn_to_index_mapping={"up": 1, "down": 2}))
    else:
        module = nn.Module()
        for name, value in weights.items():
            module.register_parameter(name, nn.Parameter(value))
        holdfast.export_hf({"model": module}, path)
    found = blank(weights)
    if way.reader == STOCK:
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)))
    else:
        holder = nn.Module()
        for name, value in found.items():
            holder.register_parameter(name, nn.Parameter(value))
        holdfast.load({"model": holder}, path)
    equal(found, weights)


@behaviours(world=1)
def blobs_of_bytes(way: Way) -> None:
    """A state may keep files in memory."""
    state = {"blob": io.BytesIO(b"as it was"), "x": numbers(1)}
    way.save(state)
    found: dict[str, Any] = way.load({"blob": io.BytesIO(), "x": torch.zeros(1)})
    assert found["blob"].getvalue() == b"as it was"
    entry = FileSystemReader(way.path()).read_metadata().state_dict_metadata["blob"]
    assert isinstance(entry, BytesStorageMetadata)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("states"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@behaviours.every_case()
def test_states(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
