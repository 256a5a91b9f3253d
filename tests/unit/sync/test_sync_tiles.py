"""Tiles of columns: every slice has the bits of the published tensor, and columns bring their own bytes only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast import events
from holdfast.boxes import Box, runs
from holdfast.coordination.board import LocalBoard
from holdfast.coordination.group import Group
from holdfast.errors import ConfigError
from holdfast.export import Fp8, Transpose
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.sync import (
    DirectoryTransport,
    NixlTransport,
    ProcessGroupTransport,
    Publisher,
    Receiver,
    SharedMemoryTransport,
)
from holdfast.sync.versions import publishing
from holdfast.sync.versions.block import BlockLayout, RankVersion
from holdfast.sync.weights.buckets import Piece

TIMEOUT_S = 30.0
MIB = 1 << 20
KINDS = {"shared memory": SharedMemoryTransport, "TCP": ProcessGroupTransport, "NIXL": NixlTransport}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=made)

    found = {
        "even": values(640, 1024).bfloat16(),
        "odd": values(513, 1031),
        "bytes": (values(600, 3001) * 50).to(torch.int8),
        "experts": values(5, 130, 1040).bfloat16(),
        "kernel": values(1100, 200, 2, 2),
        "transposed": values(1040, 700).t(),
        "conjugate": torch.complex(values(600, 600), values(600, 600)).conj(),
        "wide": torch.complex(values(300, 600), values(300, 600)).to(torch.complex128)[:, 3:599],
        "columns": values(700, 2000)[:, 5:1801],
        "inner": values(6, 90, 1200)[:, 1:88],
        "fp8": values(1100, 2048).to(torch.float8_e4m3fn),
        "narrow": values(4096, 300),
        "small": values(16, 4096),
        "vector": values(MIB + 3),
        "scalar": torch.tensor(seed + 0.5),
        "none": torch.empty(0, 4096),
        "nothing": torch.empty(2048, 0),
    }
    return {**found, "tied": found["even"]}


def cut(tensor: torch.Tensor, dim: int, part: int, of: int) -> tuple[torch.Tensor, list[int]]:
    """What ``torch.chunk`` gives the part, maybe nothing, and where that begins."""
    width = -(-tensor.shape[dim] // of)
    start = min(part * width, tensor.shape[dim])
    offsets = [0] * tensor.dim()
    offsets[dim] = start
    return tensor.narrow(dim, start, min(width, tensor.shape[dim] - start)), offsets


def slices(weights: Mapping[str, torch.Tensor], dims: tuple[int, ...], part: int, of: int) -> dict[str, Any]:
    """Memory for the part of each matrix along ``dims``, and for all of the rest."""
    into: dict[str, Any] = {}
    for name, tensor in weights.items():
        view, at = tensor, [0] * tensor.dim()
        for dim in dims if tensor.dim() > 1 and name != "tied" else ():
            view, offsets = cut(view, dim, part, of)
            at = [a + b for a, b in zip(at, offsets, strict=True)]
        memory = torch.zeros(view.shape, dtype=tensor.dtype)
        into[name] = memory if view.shape == tensor.shape else holdfast.Shard(memory, tensor.shape, at)
    return into


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def assert_slices(into: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    assert into.keys() <= weights.keys()
    for name, given in into.items():
        view, mine = weights[name], given
        if isinstance(given, holdfast.Shard):
            mine = given.tensor
            for dim, (start, size) in enumerate(zip(given.global_offset, mine.shape, strict=True)):
                view = view.narrow(dim, start, size)
        assert mine.dtype == view.dtype
        assert mine.shape == view.shape, name
        assert torch.equal(bits_of(mine), bits_of(view)), name


@pytest.fixture(params=["shared memory", "TCP", "NIXL"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "NIXL" and find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    return lambda: KINDS[request.param](tmp_path / "meet")


class Brought:
    """Bytes that receivers of this process have read over a network since."""

    def __init__(self) -> None:
        self._before = events.statistics()["sync_bytes_brought"]

    def __call__(self) -> int:
        now = events.statistics()["sync_bytes_brought"]
        found, self._before = now - self._before, now
        return found


@pytest.mark.parametrize("tiles", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 8])
def test_every_slice_has_the_published_bits(transport: Callable[[], Any], tiles: int) -> None:
    weights = state()
    with Publisher(transport(), column_tiles=tiles) as publisher, Receiver(transport()) as receiver:
        publisher.publish(weights, 1)
        for dims in ((), (0,), (-1,), (1,), (0, -1)):
            for part, of in ((0, 8), (3, 8), (7, 8), (1, 2), (2, 3)) if dims else ((0, 1),):
                into = slices(weights, dims, part, of)
                receiver.receive(into, version=1, timeout=TIMEOUT_S)
                assert_slices(into, weights)
                receiver.receive(slices(weights, dims, part, of), version=1, timeout=TIMEOUT_S, streaming=True)
        found: dict[str, torch.Tensor] = {}
        receiver.receive(found.__setitem__, version=1, timeout=TIMEOUT_S)
        assert list(found) == list(weights)
        assert_slices(found, weights)


def test_a_module_is_filled_from_tiles(transport: Callable[[], Any]) -> None:
    trained, served = (nn.Sequential(nn.Linear(1024, 1300), nn.LayerNorm(1300)) for _ in range(2))
    with Publisher(transport(), column_tiles={"0.weight": 4}) as publisher, Receiver(transport()) as receiver:
        publisher.publish(trained, 1)
        receiver.receive(served, timeout=TIMEOUT_S)
    assert_slices(served.state_dict(), trained.state_dict())


def test_publishers_of_other_tiles_follow_one_another(transport: Callable[[], Any]) -> None:
    with Receiver(transport()) as receiver:
        for version, tiles in enumerate((1, 8, {"*": 3}, {"even": 2, "*": 1}, 5), 1):
            weights = state(version)
            with Publisher(transport(), column_tiles=tiles) as publisher:
                publisher.publish(weights, version)
                into = slices(weights, (-1,), 1, 8)
                assert receiver.receive(into, timeout=TIMEOUT_S) == version
                assert_slices(into, weights)


def test_a_dtensor_of_columns_is_filled(transport: Callable[[], Any]) -> None:
    weights = state()
    names = [name for name, tensor in weights.items() if tensor.dim() > 1 and name != "tied"]
    with Publisher(transport(), column_tiles=8, include=names) as publisher:
        publisher.publish(weights, 1)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        try:
            mesh = DeviceMesh("cpu", list(range(8)))
            into, expected = {}, {}
            for name in names:
                local, _ = cut(weights[name], 1, 5, 8)
                expected[name] = local
                into[name] = DTensor.from_local(
                    torch.zeros(local.shape, dtype=local.dtype),
                    mesh,
                    [Shard(1)],
                    run_check=False,
                    shape=weights[name].shape,
                    stride=torch.empty(weights[name].shape, device="meta").stride(),
                )
            with Receiver(transport()) as receiver:
                receiver.receive(into, timeout=TIMEOUT_S)
            assert_slices({name: tensor.to_local() for name, tensor in into.items()}, expected)
        finally:
            dist.destroy_process_group()


# What is converted on the way. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_casts_go_through_tiles(transport: Callable[[], Any], threads: int) -> None:
    weights = {name: tensor for name, tensor in state().items() if tensor.dtype in (torch.float32, torch.bfloat16)}
    expected = {name: tensor.bfloat16() for name, tensor in weights.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Publisher(transport(), column_tiles=8, dtype=torch.bfloat16) as publisher:
            publisher.publish(weights, 1)
            with Receiver(transport()) as receiver:
                for dims in ((), (-1,), (0,)):
                    into = slices(expected, dims, 2, 4)
                    receiver.receive(into, version=1, timeout=TIMEOUT_S)
                    assert_slices(into, expected)
    finally:
        torch.set_num_threads(before)


def test_key_maps_and_their_boxes_are_cut(transport: Callable[[], Any]) -> None:
    weights = {name: state()[name] for name in ("odd", "columns", "even")}
    options: Any = {"key_map": [Transpose("odd"), Transpose("even")], "dtype": torch.bfloat16}
    expected = {name: (tensor if name == "columns" else tensor.t()).bfloat16() for name, tensor in weights.items()}
    with Publisher(transport(), column_tiles=4, **options) as publisher, Receiver(transport()) as receiver:
        publisher.publish(weights, 1)
        for dims in ((), (1,), (0,)):
            into = slices(expected, dims, 3, 4)
            receiver.receive(into, version=1, timeout=TIMEOUT_S)
            assert_slices(into, expected)


def test_fp8_and_its_scales_are_those_of_whole_matrices(transport: Callable[[], Any]) -> None:
    weights = {"up.weight": torch.randn(1100, 2100), "bias": torch.randn(9)}
    found: list[dict[str, torch.Tensor]] = []
    with Receiver(transport()) as receiver:
        for version, tiles in enumerate((1, 8), 1):
            made: dict[str, torch.Tensor] = {}
            with Publisher(transport(), key_map=Fp8("weight$"), column_tiles=tiles) as publisher:
                publisher.publish(weights, version)
                receiver.receive(made.__setitem__, timeout=TIMEOUT_S)
                into = slices(made, (1,), 4, 8)
                receiver.receive(into, version=version, timeout=TIMEOUT_S)
                assert_slices(into, made)
            found.append(made)
    assert found[0]["up.weight"].dtype == torch.float8_e4m3fn
    assert_slices(*found)


def test_a_capture_is_cut_as_the_weights_are(transport: Callable[[], Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2048, 512), nn.Linear(512, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        holdfast.CheckpointManager(tmp_path / "checkpoints", {"model": model, "optimizer": optimizer}) as manager,
        Publisher(transport(), bypass_cpu=False, manager=manager, column_tiles=8) as publisher,
        Receiver(transport()) as receiver,
    ):
        before = events.statistics()["sync_bytes_staged"]
        manager.save(1)
        publisher.publish(model.state_dict(), 1)
        assert events.statistics()["sync_bytes_staged"] == before
        into = slices(model.state_dict(), (1,), 5, 8)
        receiver.receive(into, timeout=TIMEOUT_S)
    assert_slices(into, model.state_dict())


# Several ranks. --------------------------------------------------------------------------------------------------


class Ranks:
    """Publisher ranks on threads of this process."""

    def __init__(self, place: Path, world: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.setattr(publishing, "open_group", lambda group, **_: group)
        self._pool = ThreadPoolExecutor(world)
        boards = enumerate(LocalBoard.of_world(world))
        groups = [Group(rank, world, tuple(range(world)), board) for rank, board in boards]
        made = [ProcessGroupTransport(place, process_group=group) for group in groups]
        self.publishers = list(self._pool.map(lambda one: Publisher(one, **options), made))

    def publish(self, weights: list[dict[str, Any]], version: int) -> list[BaseException | None]:
        def one(publisher: Publisher, mine: dict[str, Any]) -> BaseException | None:
            try:
                publisher.publish(mine, version, timeout=TIMEOUT_S)
            except holdfast.HoldfastError as error:
                return error
            return None

        return list(self._pool.map(one, self.publishers, weights))

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._pool.shutdown()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world: int, **options: Any) -> Ranks:
        made.append(Ranks(tmp_path / "meet", world, monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("dim", [0, -1])
def test_shards_of_ranks_are_cut_further(tmp_path: Path, ranks: Callable[..., Ranks], dim: int) -> None:
    """As FSDP2 and column-parallel trainers have them: uneven, some empty."""
    weights = {name: tensor for name, tensor in state().items() if tensor.dim() > 1 and tensor.numel()}
    world, given = 3, []
    for rank in range(world):
        parts = ((name, tensor, *cut(tensor, dim, rank, world)) for name, tensor in weights.items())
        given.append({name: holdfast.Shard(view, tensor.shape, at) for name, tensor, view, at in parts})
    assert ranks(world, column_tiles=8).publish(given, 1) == [None] * world
    with Receiver(ProcessGroupTransport(tmp_path / "meet")) as receiver:
        for dims, part, of in (((), 0, 1), ((-1,), 6, 8), ((0,), 3, 4), ((0, -1), 1, 2)):
            into = slices(weights, dims, part, of)
            receiver.receive(into, version=1, timeout=TIMEOUT_S)
            assert_slices(into, weights)


def test_a_word_has_to_match_a_name_of_some_rank(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    stages = [{"first.weight": torch.randn(256, 4096)}, {"last.weight": torch.randn(256, 4096)}]
    made = ranks(2, column_tiles={"last.*": 8})
    assert made.publish(stages, 1) == [None, None], "the other stage has no such name"
    errors = ranks(2, column_tiles={"lst.*": 8}).publish(stages, 2)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("'lst.*' matches nothing that is published" in str(error) for error in errors)


# What a slice costs. ---------------------------------------------------------------------------------------------


def large(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.down_proj": torch.randn(1024, 4096, generator=made).bfloat16() for n in range(6)}


@pytest.mark.parametrize("part", [0, 5, 7])
def test_an_eighth_of_the_columns_brings_an_eighth(tmp_path: Path, part: int) -> None:
    weights, brought = large(), Brought()
    place, nbytes = tmp_path / "meet", sum(tensor.nbytes for tensor in weights.values())
    counts = []
    for version, tiles in enumerate((1, 8), 1):
        with Publisher(ProcessGroupTransport(place), column_tiles=tiles) as publisher:
            publisher.publish(weights, version)
            with Receiver(ProcessGroupTransport(place)) as receiver:
                into = slices(weights, (1,), part, 8)
                receiver.receive(into, timeout=TIMEOUT_S)
                assert_slices(into, weights)
                counts.append(brought())
    assert counts[0] >= nbytes
    assert counts[1] <= nbytes // 8 + 2 * EXTENT_BYTES, "the tiles of one number lie together"


def test_small_parts_of_many_ranks_bring_no_more(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    """Tiles of less than an extent: rows of each matrix lie on four ranks."""
    weights, brought, world = large(), Brought(), 4
    given = []
    for rank in range(world):
        parts = ((name, tensor, *cut(tensor, 0, rank, world)) for name, tensor in weights.items())
        given.append({name: holdfast.Shard(view, tensor.shape, at) for name, tensor, view, at in parts})
    assert ranks(world, column_tiles=8).publish(given, 1) == [None] * world
    into = slices(weights, (1,), 3, 8)
    with Receiver(ProcessGroupTransport(tmp_path / "meet")) as receiver:
        receiver.receive(into, timeout=TIMEOUT_S)
    assert_slices(into, weights)
    assert brought() <= sum(tensor.nbytes for tensor in weights.values()) // 8 + 2 * world * EXTENT_BYTES


def test_experts_bring_the_rows_or_the_columns_that_are_taken(tmp_path: Path) -> None:
    weights = {"up": torch.randn(3, 4096, 512), "down": torch.randn(3, 512, 4096)}
    dims, nbytes, brought = {"up": 1, "down": 2}, 2 * 3 * 8 * MIB, Brought()
    with Publisher(ProcessGroupTransport(tmp_path / "meet"), column_tiles={"down": 4}) as publisher:
        publisher.publish(weights, 1)
        into = {}
        for name, tensor in weights.items():
            view, at = cut(tensor, dims[name], 1, 4)
            into[name] = holdfast.Shard(torch.zeros(view.shape), tensor.shape, at)
        with Receiver(ProcessGroupTransport(tmp_path / "meet")) as receiver:
            receiver.receive(into, timeout=TIMEOUT_S)
    assert_slices(into, weights)
    assert brought() <= nbytes // 4 + 6 * EXTENT_BYTES


def test_deltas_go_on_from_tiles(tmp_path: Path) -> None:
    weights, brought = large(), Brought()
    place = tmp_path / "meet"
    counts = []
    with (
        Publisher(ProcessGroupTransport(place), column_tiles=8, delta="sparse") as publisher,
        Receiver(ProcessGroupTransport(place)) as receiver,
    ):
        for version in range(1, 4):
            publisher.publish(weights, version)
            made, until = publisher._half._served.deltas, time.monotonic() + TIMEOUT_S  # type: ignore[attr-defined]
            while (made._next is not None or made._encoding is not None) and time.monotonic() < until:
                time.sleep(0.002)
            into = slices(weights, (1,), 2, 8)
            receiver.receive(into, timeout=TIMEOUT_S)
            assert_slices(into, weights)
            counts.append(brought())
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            for tensor in weights.values():
                tensor.view(torch.int16)[torch.rand(tensor.shape) < 0.01] += 1
    assert max(counts[1:]) < counts[0] / 2, "what changed anywhere, not the tiles themselves"


def test_tied_names_are_cut_alike_and_lie_once(tmp_path: Path) -> None:
    weight, brought = torch.randn(512, 4096), Brought()
    place = tmp_path / "meet"
    with Publisher(ProcessGroupTransport(place), column_tiles={"embed": 4}) as publisher:
        publisher.publish({"embed": weight, "head": weight}, 1)
        with Receiver(ProcessGroupTransport(place)) as receiver:
            into = {name: torch.zeros(512, 4096) for name in ("embed", "head")}
            receiver.receive(into, timeout=TIMEOUT_S)
    assert_slices(into, {"embed": weight, "head": weight})
    assert brought() <= weight.nbytes + EXTENT_BYTES


# The rest. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "8", None, {"a": 0}, {"a": "2"}, {"": 2}, {3: 2}])
def test_what_is_no_number_of_tiles_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="column_tiles"):
        Publisher(SharedMemoryTransport(tmp_path), column_tiles=given)


def test_a_directory_has_no_tiles(tmp_path: Path) -> None:
    weights = large()
    with Publisher(DirectoryTransport(tmp_path), column_tiles=8) as publisher:
        publisher.publish(weights, 1)
    stored = holdfast.open(tmp_path / "version-1")
    assert_slices({name: stored.read(name) for name in weights}, weights)
    files = sorted(path for path in (tmp_path / "version-1").iterdir() if path.suffix == ".distcp")
    with Publisher(DirectoryTransport(tmp_path / "plain")) as publisher:
        publisher.publish(weights, 1)
    plain = sorted(path for path in (tmp_path / "plain" / "version-1").iterdir() if path.suffix == ".distcp")
    assert files
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in plain]


def test_runs_are_bridged_where_little_is_between() -> None:
    outer = Box((2, 0, 5), (3, 4, 6))
    numbers = torch.arange(72).view(3, 4, 6)
    for box in (Box((3, 1, 6), (2, 2, 3)), Box((2, 0, 5), (3, 4, 2)), Box((2, 3, 5), (3, 1, 6)), outer):
        view = numbers
        for dim, (start, size) in enumerate(zip(*box, strict=True)):
            view = view.narrow(dim, start - outer.offsets[dim], size)
        expected = set(view.reshape(-1).tolist())
        for bridge in (0, 1, 3, 4, 17, 18, 100):
            found = list(runs(box, outer, bridge=bridge))
            covered = {at for start, length in found for at in range(start, start + length)}
            assert expected <= covered
            assert bridge or covered == expected
            gaps = [other - one - 1 for one, other in pairwise(sorted(expected))]
            assert len(covered) <= len(expected) + sum(gap for gap in gaps if gap <= bridge)


def test_extents_are_those_that_hold_a_byte_of_a_box() -> None:
    sizes = (5, 700, 512)
    layout = BlockLayout((Piece("a", "float32", (3,), (0,), (3,)), Piece("b", "float32", sizes, (0, 0, 0), sizes)))
    version = RankVersion.__new__(RankVersion)
    version.layout = layout
    pitches = torch.empty(sizes, device="meta").stride()
    for box in (
        Box((0, 0, 0), sizes),
        Box((2, 0, 0), (2, 700, 512)),
        Box((0, 690, 0), (5, 10, 512)),
        Box((1, 0, 500), (3, 700, 12)),
        Box((0, 699, 511), (5, 1, 1)),
    ):
        expected = set()
        for expert in range(box.offsets[0], box.stops[0]):
            for row in range(box.offsets[1], box.stops[1]):
                first = expert * pitches[0] + row * pitches[1] + box.offsets[2]
                at, end = (layout.starts[1] + 4 * number for number in (first, first + box.sizes[2]))
                expected.update(range(at // EXTENT_BYTES, (end - 1) // EXTENT_BYTES + 1))
        assert version.extents_of([(1, box)]) == sorted(expected)
