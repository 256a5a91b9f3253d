"""Commits that write only what changed: bits equal whatever happened before, whole copies where nothing is known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import events
from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.versions import deltas, mirror
from holdfast.sync.weights import scatter
from holdfast.sync.weights.scatter import Changes, LiveStamp, LiveWrite, write_live

TIMEOUT_S = 20.0
MIB = 1 << 20
DTYPES = {
    dtype: torch.zeros(0, dtype=dtype).element_size()
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    )
}

Weights = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def bits_of(tensor: torch.Tensor) -> bytes:
    return raw(tensor.detach().contiguous().clone()).numpy().tobytes()


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return all(bits_of(tensor) == bits_of(expected[name]) for name, tensor in found.items())


def zeros(like: Weights) -> Weights:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def stepped(weights: Weights, seed: int, share: float = 0.005) -> Weights:
    """The weights after a step: some bytes of each tensor differ; floats get -0 and NaNs with payloads."""
    made, found = np.random.default_rng(seed), {}
    for name, tensor in weights.items():
        found[name] = changed = tensor.clone()
        memory = raw(changed).numpy()
        if not len(memory):
            continue
        where = made.choice(len(memory), max(1, int(share * len(memory))), replace=False)
        memory[where] = memory[where] ^ (1 if tensor.dtype is torch.bool else 1 + seed % 127)
        if tensor.dtype is torch.bfloat16:
            odd = changed.view(-1).view(torch.int16)
            odd[seed % len(odd)], odd[(7 * seed) % len(odd)] = -32768, 0x7FC1 + seed % 60
    return found


class Written:
    """Bytes of live tensors that commits of this process have scattered and copied since."""

    def __init__(self) -> None:
        self()

    def __call__(self) -> tuple[int, int]:
        now = events.statistics()
        before, self._before = getattr(self, "_before", now), now
        names = ("sync_bytes_scattered", "sync_bytes_copied")
        scattered, copied = (now[name] - before[name] for name in names)
        return scattered, copied


class Place:
    """Where versions are published, with deltas; ``publish`` returns once the delta is made."""

    def __init__(self, kind: str, path: Path, **options: Any) -> None:
        self.kind, self._path = kind, path
        self._options = {"delta": "sparse", "keep_versions": 8, "anchor_every": 100, **options}
        self.publisher = self.restarted()

    def _transport(self, **options: Any) -> Any:
        if self.kind == "directory":
            return DirectoryTransport(self._path / "versions")
        return ProcessGroupTransport(self._path / "meet", **options)

    def restarted(self, **options: Any) -> Publisher:
        self.publisher = Publisher(self._transport(), **{**self._options, **options})
        return self.publisher

    def receiver(self, into: Any = None, *, fan_out: bool = False, **options: Any) -> Receiver:
        transport = self._transport(**({"fan_out": True} if fan_out else {}))
        return Receiver(transport, into, **{"sparse_commit": True, **options})

    def publish(self, weights: Weights, version: int) -> None:
        self.publisher.publish(weights, version)
        if self.kind == "directory":
            return
        made = self.publisher._half._served.deltas  # type: ignore[attr-defined]
        until = time.monotonic() + TIMEOUT_S
        while made._next is not None or made._encoding is not None:
            assert time.monotonic() < until, "the delta isn't made"
            time.sleep(0.002)


@pytest.fixture(params=["links", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(request.param, tmp_path)
    yield found
    found.publisher.close()


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Place]:
    found = Place("links", tmp_path)
    yield found
    found.publisher.close()


def receive(mine: Receiver, into: Any = None) -> int:
    return mine.receive(into, timeout=TIMEOUT_S)


def state(seed: int = 0) -> Weights:
    made = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(MIB + 77, generator=made).bfloat16(),
        "rows": torch.randn(256, 128, generator=made),
        "norm": torch.randn(4000, generator=made).bfloat16(),
        "steps": torch.arange(3000),
    }


NBYTES = sum(tensor.nbytes for tensor in state().values())


# What is written ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "steps"])
@pytest.mark.parametrize("where", ["links", "directory"])
def test_bits_of_every_dtype_are_scattered(tmp_path: Path, where: str, kind: str) -> None:
    made = np.random.default_rng(0)
    weights = {}
    for dtype, itemsize in DTYPES.items():
        memory = torch.from_numpy(made.integers(0, 256, 5000 * itemsize, np.uint8))
        memory = memory & 1 if dtype is torch.bool else memory
        weights[str(dtype)] = memory.view(dtype)
    weights |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    place, into, written = Place(where, tmp_path, delta=kind), zeros(weights), Written()
    total = sum(tensor.nbytes for tensor in weights.values())
    with place.publisher, place.receiver(into) as mine:
        place.publish(weights, 1)
        receive(mine)
        assert written() == (0, total)
        for version in range(2, 6):
            weights = stepped(weights, version)
            place.publish(weights, version)
            before = {name: tensor._version for name, tensor in into.items()}
            receive(mine)
            assert same(into, weights)
            scattered, copied = written()
            assert total / 250 < scattered < total / 10
            assert copied < total / 20, "the scalar and what lies around it"
            assert all(into[name]._version > before[name] for name in into if into[name].numel() > 1)


def test_only_changed_elements_are_written(place: Place) -> None:
    weights = {"w": torch.zeros(100_000), "v": torch.ones(50_000)}
    into, written = zeros(weights), Written()
    with place.receiver(into) as mine:
        place.publish(weights, 1)
        receive(mine)
        written()
        weights["w"][[5, 77, 99_999]] = torch.tensor([1.0, -0.0, float("nan")])
        place.publish(weights, 2)
        receive(mine)
        assert same(into, weights)
        assert written() == (12, 0)


def test_where_much_changes_it_is_copied(place: Place) -> None:
    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into) as mine:
        place.publish(weights, 1)
        receive(mine)
        written()
        weights = {**stepped(weights, 1), "rows": torch.randn(256, 128)}
        place.publish(weights, 2)
        receive(mine)
        assert same(into, weights)
        scattered, copied = written()
        assert scattered > 1000
        assert weights["rows"].nbytes <= copied < NBYTES / 2


def test_a_module_and_its_slices(place: Place) -> None:
    module = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200))
    written, weights = Written(), {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rows = {"0.weight": holdfast.Shard(torch.zeros(70, 300), (200, 300), (50, 0))}
    columns = {"0.weight": holdfast.Shard(torch.zeros(200, 100), (200, 300), (0, 100))}
    with (
        place.receiver(module) as mine,
        place.receiver(rows, include="0.weight") as by_rows,
        place.receiver(columns, include="0.weight") as by_columns,
    ):
        for version in range(1, 5):
            place.publish(weights, version)
            written()
            receive(mine)
            assert same(dict(module.named_parameters()), weights)
            assert (written()[0] > 0) == (version > 1)
            receive(by_rows)
            assert bits_of(rows["0.weight"].tensor) == bits_of(weights["0.weight"][50:120])
            scattered, copied = written()
            if place.kind == "links":
                assert (scattered > 0, copied < 70 * 300) == (version > 1, version > 1)
            receive(by_columns)
            assert bits_of(columns["0.weight"].tensor) == bits_of(weights["0.weight"][:, 100:200])
            assert written() == (0, 200 * 100 * 4)
            weights = stepped(weights, version)


# What is known of live tensors --------------------------------------------------------------------------------------


def with_optimizer(tensor: torch.Tensor) -> None:
    parameter = nn.Parameter(tensor)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0).step()


def in_inference_mode(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.mul_(3)


def at_the_same_address(tensor: torch.Tensor) -> None:
    """Other memory, which lies where the freed one did."""
    address, shape = tensor.data_ptr(), tensor.shape
    tensor.data = torch.empty(0)
    kept = []
    for _ in range(1000):
        kept.append(torch.full(shape, 5.0))
        if kept[-1].data_ptr() == address:
            break
    tensor.data = kept[-1]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda tensor: tensor.add_(1),
    "a view": lambda tensor: tensor.view(-1)[3:9].zero_(),
    "detach": lambda tensor: tensor.detach()[:1].fill_(9),
    "indexed": lambda tensor: tensor.__setitem__(0, 4.0),
    "an optimizer": with_optimizer,
    "in inference mode": in_inference_mode,
    "out": lambda tensor: torch.ones(tensor.shape, out=tensor),
    "other data": lambda tensor: setattr(tensor, "data", torch.full(tensor.shape, 7.0)),
    "data at the same address": at_the_same_address,
    "set_": lambda tensor: tensor.set_(torch.ones(tensor.shape)),
    "shared": lambda tensor: raw(tensor.share_memory_()).numpy().fill(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_the_user_wrote_to_is_copied(place: Place, write: Callable[[torch.Tensor], Any]) -> None:
    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into) as mine:
        for version in range(1, 4):
            place.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert (written()[1] >= NBYTES / 2) == (version == 1)
            if version == 3:
                break
            weights = stepped(weights, version)
        write(into["rows"])
        weights = stepped(weights, 3)
        place.publish(weights, 4)
        receive(mine)
        assert same(into, weights)
        scattered, copied = written()
        assert into["rows"].nbytes <= copied < NBYTES / 2
        assert scattered > 0, "the others are as they were"


def test_tensors_of_inference_mode_are_copied(place: Place) -> None:
    weights, written = state(), Written()
    with torch.inference_mode():
        into = zeros(weights)
    with place.receiver(into) as mine:
        for version in (1, 2):
            place.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert written() == (0, NBYTES)
            weights = stepped(weights, version)
            with torch.inference_mode():
                into["norm"].add_(1)


def test_tensors_of_inference_mode_are_no_base_to_stream_to(tmp_path: Path) -> None:
    weights = state()
    place = Place("directory", tmp_path)
    with torch.inference_mode():
        into = zeros(weights)
    with place.publisher, place.receiver(into) as mine:
        for version in (1, 2):
            place.publish(weights, version)
            mine.receive(streaming=True, timeout=TIMEOUT_S)
            assert same(into, weights)
            with torch.inference_mode():
                into["norm"].add_(1)


def test_other_tensors_are_copied(place: Place) -> None:
    """Another dictionary, and one in which the same tensors have each other's names."""
    weights = {"a": torch.randn(5000), "b": torch.randn(5000)}
    into, other, written = zeros(weights), zeros(weights), Written()
    swapped = {"a": into["b"], "b": into["a"]}
    with place.receiver() as mine:
        for version, memory in enumerate((into, swapped, into, other, into, other), 1):
            place.publish(weights, version)
            receive(mine, memory)
            assert same(memory, weights)
            assert written() == (0, 40_000)
            weights = stepped(weights, version)


@pytest.mark.parametrize("swap", [False, True])
def test_other_rows_of_the_same_tensor_are_copied(place: Place, swap: bool) -> None:
    weights, memory = {"w": torch.randn(200, 100)}, torch.zeros(100, 100)
    written = Written()
    with place.receiver() as mine:
        for version in range(1, 5):
            start = 100 * (version % 2) if swap else 0
            place.publish(weights, version)
            receive(mine, {"w": holdfast.Shard(memory, (200, 100), (start, 0))})
            assert bits_of(memory) == bits_of(weights["w"][start : start + 100])
            scattered, _ = written()
            if swap or version == 1 or place.kind == "links":
                assert (scattered == 0) == (swap or version == 1)
            weights = stepped(weights, version)


def test_non_contiguous_tensors_are_copied(place: Place) -> None:
    weights, written = {"w": torch.randn(300, 100), "v": torch.randn(5000)}, Written()
    into = {"w": torch.zeros(100, 300).t(), "v": torch.zeros(10_000)[::2]}
    with place.receiver(into) as mine:
        for version in range(1, 4):
            place.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert written() == (0, 35_000 * 4)
            weights = stepped(weights, version)


def test_tied_names_published_apart_are_copied(place: Place) -> None:
    tensor = torch.zeros(20_000)
    into, written = {"a": tensor, "b": tensor}, Written()
    weights = {"a": torch.randn(20_000)}
    with place.receiver(into) as mine:
        for version in range(1, 4):
            weights["b"] = weights["a"].clone()
            place.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert written()[0] == 0 or place.kind == "directory", "they are known to be equal there"
            weights = stepped({"a": weights["a"]}, version)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(20_000))
        self.register_state_dict_post_hook(lambda _, found, *__: found.update({"x": found.pop("w") + 0}))
        self.register_load_state_dict_pre_hook(lambda _, found, *__: found.update({"w": found.pop("x")}))


def test_modules_with_hooks_load_all(place: Place) -> None:
    module, weights = Hooked(), {"x": torch.randn(20_000)}
    with place.receiver(module) as mine:
        for version in range(1, 4):
            place.publish(weights, version)
            receive(mine)
            assert bits_of(module.w) == bits_of(weights["x"])
            weights = stepped(weights, version)


def test_functions_and_streams_get_all(place: Place) -> None:
    weights, got = state(), {}
    into = zeros(weights)
    with place.receiver() as mine, place.receiver() as other:
        for version in range(1, 4):
            place.publish(weights, version)
            receive(mine, lambda name, tensor: got.update({name: tensor}))
            assert same(got, weights)
            other.receive(into, streaming=True, timeout=TIMEOUT_S)
            assert same(into, weights)
            into["norm"].add_(1)
            weights = stepped(weights, version)


def test_all_is_copied_unless_asked_otherwise_over_what_torch_does_not_count(place: Place) -> None:
    """Inference engines load by ``param.data.copy_``, which no version counter sees."""
    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into, sparse_commit=False) as mine:
        for version in (1, 2, 3):
            place.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert written()[0] == 0
            for tensor in into.values():
                tensor.data.zero_()
            weights = stepped(weights, version)


def test_within_a_host_all_is_copied(tmp_path: Path) -> None:
    weights, written = state(), Written()
    into = zeros(weights)
    with (
        Publisher(SharedMemoryTransport(tmp_path / "meet"), delta="sparse") as publisher,
        Receiver(SharedMemoryTransport(tmp_path / "meet"), into, sparse_commit=True) as mine,
    ):
        for version in (1, 2, 3):
            publisher.publish(weights, version)
            receive(mine)
            assert same(into, weights)
            assert written() == (0, NBYTES)
            weights = stepped(weights, version)


def test_a_checkpoint_that_was_loaded_is_copied_over(place: Place, tmp_path: Path) -> None:
    weights, written = state(), Written()
    into, other = zeros(weights), state(3)
    holdfast.save(other, tmp_path / "checkpoint")
    with place.receiver(into) as mine:
        for version in (1, 2):
            place.publish(weights, version)
            receive(mine)
            weights = stepped(weights, version)
        holdfast.load(into, tmp_path / "checkpoint")
        assert same(into, other)
        place.publish(weights, 3)
        written()
        receive(mine)
        assert same(into, weights)
        assert written() == (0, NBYTES)


def test_two_receivers_may_write_to_the_same_tensors(place: Place) -> None:
    weights, versions = state(), {}
    into = zeros(weights)
    with place.receiver(into) as mine, place.receiver(into) as other:
        for version in range(1, 9):
            versions[version] = weights
            place.publish(weights, version)
            if version % 2:
                receive(mine)
            else:
                other.receive(streaming=version % 4 == 0, timeout=TIMEOUT_S)
            assert same(into, weights)
            weights = stepped(weights, version)
        assert mine.receive(version=7, timeout=TIMEOUT_S) == 7
        assert same(into, versions[7])


# Which version they have --------------------------------------------------------------------------------------------


def test_the_same_version_again_is_copied(place: Place) -> None:
    """Who wrote where torch doesn't count, can put it right."""
    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into) as mine:
        for version in (1, 2):
            place.publish(weights, version)
            receive(mine)
            weights, before = stepped(weights, version), weights
        raw(into["large"]).numpy()[:1000] = 3
        written()
        assert mine.receive(version=2, timeout=TIMEOUT_S) == 2
        assert same(into, before)
        assert written() == (0, NBYTES)


def test_versions_fetched_and_not_committed(place: Place) -> None:
    weights = [state()]
    for version in range(1, 7):
        weights.append(stepped(weights[-1], version))
    into, written = zeros(weights[0]), Written()
    with place.receiver(into) as mine:
        for version in range(1, 7):
            place.publish(weights[version], version)
        for version, commits in ((1, True), (2, False), (3, False), (4, True), (5, False), (6, True)):
            assert mine.fetch(version, timeout=TIMEOUT_S) == version
            written()
            if commits:
                mine.commit()
                assert same(into, weights[version]), version
            if version == 4 and place.kind == "links":
                scattered, copied = written()
                assert scattered > 0, "from 1 to 2 and from 2 to 4"
                assert copied < NBYTES / 20


def test_a_rewind(place: Place) -> None:
    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into) as mine:
        for version in (1, 2, 3):
            place.publish(weights, version)
            receive(mine)
            weights = stepped(weights, version)
        assert mine.receive(version=2, timeout=TIMEOUT_S) == 2
        assert mine.receive(version=3, timeout=TIMEOUT_S) == 3
        place.publisher.close()
        if place.kind == "directory":
            return
        place.restarted(rewind=True)
        weights = state(5)
        for version in (2, 3, 4):
            place.publish(weights, version)
            written()
            mine.receive(version=version, timeout=TIMEOUT_S)
            assert same(into, weights)
            assert (written() == (0, NBYTES)) == (version == 2)
            weights = stepped(weights, version)


def test_a_commit_that_failed_is_made_up_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = scatter._Scatter._put, []

    def fail(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("for the test")

    weights, written = state(), Written()
    into = zeros(weights)
    with place.receiver(into) as mine:
        place.publish(weights, 1)
        receive(mine)
        weights = stepped(weights, 1)
        place.publish(weights, 2)
        mine.fetch(timeout=TIMEOUT_S)
        written()
        with monkeypatch.context() as patched:
            patched.setattr(scatter._Scatter, "_put", fail)
            with pytest.raises(MemoryError):
                mine.commit()
        assert mine.dirty
        assert not same(into, weights)
        mine.commit()
        assert same(into, weights)
        assert not mine.dirty
        assert written() == (0, NBYTES)
        weights = stepped(weights, 2)
        place.publish(weights, 3)
        receive(mine)
        assert same(into, weights)
        assert written()[0] > 0


@pytest.mark.parametrize("fan_out", [False, True])
def test_what_was_brought_over_a_delta_is_copied(links: Place, monkeypatch: pytest.MonkeyPatch, fan_out: bool) -> None:
    """A mirror that was torn: the extent that the delta didn't make right."""
    real, torn = mirror.RankReader.take, []

    def take(self: Any, nbytes: int) -> Any:
        image, holds = real(self, nbytes)
        if holds is not None and torn:
            torn.append(image)
            image.bytes_view[4096 + MIB + 100 : 4096 + MIB + 109] ^= 3
        return image, holds

    weights, written = state(), Written()
    into, other = zeros(weights), zeros(weights)
    with links.receiver(into, fan_out=fan_out) as mine, links.receiver(other, fan_out=fan_out) as first:
        for version in range(1, 4):
            links.publish(weights, version)
            receive(first)
            written()
            with monkeypatch.context() as patched:
                patched.setattr(mirror.RankReader, "take", take)
                torn.append(None)
                receive(mine)
                torn.clear()
            assert same(into, weights)
            if version > 1:
                scattered, copied = written()
                assert scattered > 0
                assert MIB <= copied < MIB + NBYTES / 10
            weights = stepped(weights, version)


def test_a_delta_of_no_use(links: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = deltas.BlockDeltas.find
    weights, written = state(), Written()
    into = zeros(weights)
    with links.receiver(into) as mine:
        for version in range(1, 6):
            links.publish(weights, version)
            with monkeypatch.context() as patched:
                if version in (2, 4):
                    patched.setattr(deltas.BlockDeltas, "find", lambda *some: real(*some)[:-7])
                receive(mine)
            assert same(into, weights)
            assert (written() == (0, NBYTES)) == (version in (1, 2, 4))
            weights = stepped(weights, version)


# Anything ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_is_as_a_model_says(place: Place, seed: int) -> None:
    choose = random.Random(seed)
    published, version = {1: state(seed)}, 1
    live = zeros(published[1])
    dicts = [live, {"rows": live["rows"]}]
    receivers = [place.receiver(dicts[0]), place.receiver(dicts[1], include="rows")]
    fetched: dict[int, int] = {}
    scattered = events.statistics()["sync_bytes_scattered"]

    def publish(*shares: float) -> None:
        nonlocal version
        version += 1
        share = choose.choice(shares)
        published[version] = stepped(published[version - 1], version, share)
        place.publish(published[version], version)

    def fetch(who: int) -> None:
        wanted = version if choose.random() < 0.8 else choose.randint(max(1, version - 3), version)
        assert receivers[who].fetch(wanted, timeout=TIMEOUT_S) == wanted
        fetched[who] = wanted

    def commit(who: int) -> None:
        if who in fetched:
            found = receivers[who].commit()
            assert found == fetched.pop(who)
            assert same(dicts[who], published[found]), found

    place.publish(published[1], 1)
    for _ in range(40):
        act = choose.choice(["publish", "fetch", "commit", "step", "step", "write", "replace"])
        who = choose.choice([0, 0, 1])
        if act in ("publish", "step"):
            publish(0.0, 0.001, 0.01, 0.01, 0.2)
        if act in ("fetch", "step"):
            fetch(who)
        if act in ("commit", "step"):
            commit(who)
        if act == "write":
            choose.choice(list(WRITES.values())[:7])(live[choose.choice(["large", "norm", "rows"])])
        if act == "replace" and not fetched:
            name = choose.choice(["large", "norm"])
            live[name] = torch.ones_like(live[name])
    for _ in range(3):
        publish(0.005)
        assert receive(receivers[0]) == version
        assert same(live, published[version])
    for one in receivers:
        one.close()
    assert events.statistics()["sync_bytes_scattered"] > scattered


# The module itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_scattering_equals_copying(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "_JOB_BYTES", 8 * random.Random(seed).choice([3, 16, 100, 1 << 20]))
    made = np.random.default_rng(seed)
    nbytes, block = 8 * 1000, 8 * 64
    memory = made.integers(0, 256, nbytes, np.uint8)
    before = memory.copy()
    steps = []
    for _ in range(int(made.integers(1, 4))):
        changes = Changes(nbytes)
        for start in range(0, nbytes, block):
            size = min(block, nbytes - start)
            unit = int(made.choice([1, 2, 4, 8]))
            count = int(made.choice([0, 0, 1, 3, 9, 40]))
            units = memory[start : start + size].view(f"<u{unit}")
            places = np.sort(made.choice(len(units), min(count, len(units)), replace=False)).astype(np.int64)
            units[places] = made.integers(0, 256, len(places))
            changes.note(start, size, places, units[places])
        steps.append(changes)
    low = 8 * int(made.integers(0, 400))
    high = 8 * int(made.integers(low // 8, 1001))
    others = [(at, at + 100) for at in range(50, nbytes, 999)]
    for start, end in others:
        memory[start:end] = made.integers(0, 256, len(memory[start:end]), np.uint8)
    target, source = torch.from_numpy(before[low:high].copy()), torch.from_numpy(memory[low:high])
    write_live([LiveWrite(target, source, low, steps, others)])
    assert target.numpy().tobytes() == source.numpy().tobytes()


def test_changes_take_bounded_memory() -> None:
    size = 1 << 16
    changes = Changes(100 * size)
    for block in range(100):
        places = np.arange(0, 1600, dtype=np.int64)
        changes.note(block * size, size, places, np.zeros(1600, np.uint64))
    assert changes.nbytes <= 100 * size / 4
    kept = [one.places is not None for one in changes.between(0, 100 * size)]
    assert len(kept) == 100
    assert 0 < sum(kept) < 100, "the rest is copied"


def test_a_stamp_keeps_no_memory() -> None:
    tensor = torch.zeros(10)
    storage = scatter.StorageWeakRef(tensor.untyped_storage())
    stamp = LiveStamp.of(tensor, "w", None, 1)
    assert stamp.stands
    tensor.data = torch.zeros(10)
    assert storage.expired()
    assert not stamp.stands
