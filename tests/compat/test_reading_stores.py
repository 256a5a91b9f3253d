"""Checkpoints, exports, stock and Hugging Face directories on an object store, read in every way they are on a disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _object_server import KEYS, Proxy, Server
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.dcp import Reader
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointReplaced,
    ConfigError,
    StorageError,
)
from holdfast.format.manifest import (
    ManifestFile,
    ManifestReport,
    RankIndex,
    decode_manifest,
    decode_report,
    encode_index,
    encode_manifest,
    encode_report,
    encode_void,
    report_name,
)
from holdfast.format.sealed import xxh3_128
from holdfast.loader.sources import object_store as reading
from holdfast.storage import object_store
from holdfast.storage.object_storage import ObjectStorage, with_attempt
from holdfast.storage.object_store import ObjectStore

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import run_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MIB = 1 << 20
EMPTY_INDEX = encode_index(RankIndex((), ()))


class Bucket:
    """A bucket of its own, at ``url``, that the environment leads to; ``server``: past the proxy."""

    def __init__(self, server: Server) -> None:
        self.server, self.name = server, server.bucket()
        self.url = f"s3://{self.name}/runs"

    def copy_in(self, directory: Path, name: str) -> str:
        """Copy a directory object by object; returns its URL."""
        store = ObjectStore(self.url, self.server.options)
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                store.put(f"{name}/{path.relative_to(directory)}", path.read_bytes(), ends_s=time.monotonic() + 30)
        return f"{self.url}/{name}"

    def copy_out(self, name: str, directory: Path) -> Path:
        start = f"runs/{name}/"
        for key in self.server.keys(self.name):
            if key.startswith(start):
                path = directory / key.removeprefix(start)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.read(key.removeprefix("runs/")))
        return directory

    def read(self, name: str) -> bytes:
        status, data = self.server.request("GET", f"/{self.name}/runs/{name}")
        assert status == 200
        return data

    def write(self, name: str, data: bytes) -> None:
        assert self.server.request("PUT", f"/{self.name}/runs/{name}", data)[0] == 200

    def remove(self, name: str) -> None:
        assert self.server.request("DELETE", f"/{self.name}/runs/{name}")[0] == 204

    def below(self, name: str) -> list[str]:
        return [key.removeprefix("runs/") for key in self.server.keys(self.name) if key.startswith(f"runs/{name}/")]


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEYS["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secret_access_key"],
        "AWS_REGION": KEYS["region"],
    }


@pytest.fixture
def bucket(object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return Bucket(object_server)


class Net(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(7, 300)
        self.down = nn.Linear(300, 5, bias=False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * fill + number)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def state_of(fill: float = 0.0) -> dict[str, Any]:
    return {"model": Net(fill), "lr": {"now": fill, "kept": [1, 2, 3]}, "big": torch.full((3 * MIB // 4, 3), fill)}


def saved(directory: Path, fill: float = 2.0, **options: Any) -> dict[str, Any]:
    state = state_of(fill)
    holdfast.save(state, directory, **options)
    return state


def holds(loaded: dict[str, Any], state: dict[str, Any]) -> bool:
    same_rest = loaded["lr"] == state["lr"] and torch.equal(loaded["big"], state["big"])
    return same(loaded["model"], state["model"]) and same_rest


def as_written_there(directory: Path) -> str:
    """Give a published directory the names that an object store has, with the id of its attempt; returns the id."""
    manifest = decode_manifest((directory / "holdfast.json").read_bytes(), path="")
    attempt = manifest.attempt
    renamed: dict[str, str] = {}
    lines = []
    for line in manifest.reports:
        report = decode_report((directory / line.name).read_bytes(), path="")
        files = []
        for file in report.files:
            renamed[file.name] = with_attempt(file.name, attempt)
            files.append(replace_struct(file, name=renamed[file.name]))
        data = encode_report(replace_struct(report, files=tuple(files)))
        (directory / line.name).unlink()
        name = report_name(line.rank, attempt)
        (directory / name).write_bytes(data)
        lines.append(replace_struct(line, name=name, size=len(data), digest=xxh3_128(data)))
    for old, new in renamed.items():
        (directory / old).rename(directory / new)
    small = []
    for file in manifest.files:
        data = (directory / file.name).read_bytes()
        if file.name == "model.safetensors.index.json":
            index = json.loads(data)
            index["weight_map"] = {key: renamed[value] for key, value in index["weight_map"].items()}
            data = json.dumps(index).encode()
            (directory / file.name).write_bytes(data)  # the face
        if file.name != ".metadata":
            name = with_attempt(file.name, attempt)
            (directory / name).write_bytes(data)
            small.append(ManifestFile(name, len(data), xxh3_128(data)))
        else:
            (directory / file.name).unlink()
    manifest = replace_struct(manifest, reports=tuple(lines), files=tuple(small))
    (directory / "holdfast.json").write_bytes(encode_manifest(manifest))
    return attempt


def replace_struct(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def requests(proxy: Proxy) -> Counter[str]:
    return Counter(method for method, _ in proxy.seen)


# checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written_there", [False, True])
def test_a_checkpoint_is_read_in_every_way(bucket: Bucket, tmp_path: Path, written_there: bool) -> None:
    state = saved(tmp_path / "one", step=7, metrics={"loss": 0.5}, files={"tokens.json": b"{}", "README": b"read"})
    if written_there:
        as_written_there(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    checkpoint = holdfast.open(url + "/")
    assert (checkpoint.path, os.fspath(checkpoint), checkpoint.step) == (url, url, 7)
    assert checkpoint.metrics == {"loss": 0.5}
    assert set(checkpoint.files) == {"tokens.json", "README"}
    assert (checkpoint.read_file("README"), checkpoint.read_file("tokens.json")) == (b"read", b"{}")
    assert checkpoint.tensors["big"].shape == (3 * MIB // 4, 3)
    assert torch.equal(checkpoint.read("big", slice(5, 9)), torch.full((4, 3), 2.0))
    assert torch.equal(checkpoint.read("model.up.weight"), state["model"].up.weight)
    assert dict(checkpoint.objects) == {"lr.now": 2.0, "lr.kept": [1, 2, 3]}
    nested = checkpoint.state()
    assert nested["lr"] == state["lr"]
    assert torch.equal(nested["model"]["down.weight"], state["model"].down.weight)
    with pytest.raises(ConfigError, match="object store"):
        checkpoint.map("big")
    told: list[tuple[int, int]] = []
    report = checkpoint.verify(lambda done, total: told.append((done, total)))
    assert (report.ok, report.checksummed, report.problems) == (True, True, ())
    assert told[-1] == (report.nbytes, report.nbytes)
    loaded = state_of()
    assert holdfast.load(loaded, url).step == 7
    assert holds(loaded, state)
    part = state_of(1.0)
    holdfast.load(part, url, include="model.up", exclude="model.up.bias")
    assert torch.equal(part["model"].up.weight, state["model"].up.weight)
    assert torch.equal(part["model"].up.bias, Net(1.0).up.bias)
    assert torch.equal(part["big"], torch.full((3 * MIB // 4, 3), 1.0))
    # Copied to a disk it is an ordinary checkpoint.
    down = bucket.copy_out("one", tmp_path / "down")
    loaded = state_of()
    holdfast.load(loaded, down)
    assert holds(loaded, state)
    assert holdfast.open(down).verify() == replace(report, problems=())
    assert holdfast.open(down).read_file("README") == b"read"


def test_dcp_metadata_is_made_there(bucket: Bucket, tmp_path: Path) -> None:
    state = saved(tmp_path / "one")
    as_written_there(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    checkpoint = holdfast.open(url)
    assert checkpoint.verify().ok
    assert "one/.metadata" not in bucket.below("one")
    assert checkpoint.write_dcp_metadata() == f"{url}/.metadata"
    assert checkpoint.verify().ok
    into = {"model": Net().state_dict()}
    dcp.load(into, checkpoint_id=bucket.copy_out("one", tmp_path / "down"), no_dist=True)
    assert torch.equal(into["model"]["up.weight"], state["model"].up.weight)
    bucket.write("one/.metadata", b"something else")
    assert [Path(row.path).name for row in checkpoint.verify().problems] == [".metadata"]


def test_dtypes_and_slices_of_many_small_tensors_fetch_each_byte_once(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    state = {"many": {f"t{number}": torch.full((4096, 8), float(number)) for number in range(100)}}
    holdfast.save(state, tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    stored = sum(path.stat().st_size for path in (tmp_path / "one").glob("*.distcp"))
    into = {"many": {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in state["many"].items()}}
    before = holdfast.statistics()["bytes_read"]
    holdfast.load(into, url)
    assert all(torch.equal(into["many"][name], tensor.bfloat16()) for name, tensor in state["many"].items())
    assert holdfast.statistics()["bytes_read"] - before <= stored
    assert requests(proxy)["HEAD"] == 0


def test_requests_are_few_and_several_at_a_time(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    state = {"big": torch.arange(12 * MIB, dtype=torch.float32)}
    holdfast.save(state, tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    into = {"big": torch.zeros(12 * MIB)}
    arrived: list[float] = []

    def rule(_method: str, path: str) -> str | None:
        if not path.endswith(".distcp"):
            return None
        arrived.append(time.monotonic())
        return "late"

    proxy.rule = rule
    before = holdfast.statistics()["bytes_read"]
    holdfast.load(into, url)
    assert torch.equal(into["big"], state["big"])
    assert arrived[5] - arrived[0] < proxy.stall_s  # six before the first was answered
    size = (tmp_path / "one" / "__0_0.distcp").stat().st_size
    assert holdfast.statistics()["bytes_read"] - before == size
    # manifest, .metadata, report, and 7 ranges of 8 MiB
    assert requests(proxy) == {"GET": 3 + -(-size // (8 * MIB))}


# roots -----------------------------------------------------------------------------------------------------------


def steps(root: Path, *numbers: int) -> None:
    for number in numbers:
        holdfast.save({"value": torch.full((5,), float(number))}, root / f"step-{number}", step=number)


def test_a_root_is_its_newest_step(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    steps(tmp_path, 5, 40, 300)
    dcp.save({"value": torch.full((5,), 7.0)}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    for path in tmp_path.iterdir():
        bucket.copy_in(path, f"root/{path.name}")
    url = f"{bucket.url}/root"
    proxy.seen.clear()
    checkpoint = holdfast.open(url)
    assert (checkpoint.step, checkpoint.path) == (300, f"{url}/step-300")
    assert torch.equal(checkpoint.read("value"), torch.full((5,), 300.0))
    assert [path for method, path in proxy.seen if method == "GET"].count(f"/{bucket.name}") == 1  # the list
    # the root's and each step's manifest, a look at what stock DCP wrote, a report and its data
    assert len(proxy.seen) == 1 + 1 + 4 + 1 + 2
    bucket.write("root/step-300/holdfast.json", encode_void("step-300", "0123456789ab", why="given up"))
    assert holdfast.open(url).step == 40
    bucket.write("root/step-40/holdfast.json", b"{}")
    newest = holdfast.open(url)  # the damaged one is passed over aloud
    assert newest.path == f"{url}/step-7"
    assert torch.equal(newest.read("value"), torch.full((5,), 7.0))
    bucket.remove("root/step-7/.metadata")
    assert holdfast.open(url).step == 5


def test_what_a_run_that_went_back_published_is_the_newest(bucket: Bucket, tmp_path: Path) -> None:
    value = {"value": torch.zeros(3)}
    config = holdfast.CheckpointConfig(every=50, keep=holdfast.Keep(last=None), mode="sync")
    for start, stop in ((0, 400), (200, 250)):
        with holdfast.CheckpointManager(tmp_path / "root", value, config=config) as manager:
            if start:
                manager.restore(step=start)
            for step in range(start + 50, stop + 1, 50):
                manager.step(step)
    for path in (tmp_path / "root").glob("step-*"):
        bucket.copy_in(path, f"root/{path.name}")
    assert holdfast.open(tmp_path / "root").step == 250
    assert holdfast.open(f"{bucket.url}/root").step == 250


def test_what_is_not_there_is_not_found(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("", "/nothing"):
        with pytest.raises(CheckpointNotFound, match="no objects"):
            holdfast.open(bucket.url + name)
    saved(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    bucket.write("one/holdfast.json", encode_void("one", "0123456789ab", why="given up"))
    for call in (holdfast.open, lambda url: holdfast.load(state_of(), url)):
        with pytest.raises(CheckpointNotFound, match="given up"):
            call(url)
    down = bucket.copy_out("one", tmp_path / "down")
    with pytest.raises(CheckpointNotFound, match="given up"):
        holdfast.open(down)
    bucket.remove("one/holdfast.json")
    with pytest.raises(CheckpointCorrupt, match=r"holdfast\.json is missing"):
        holdfast.open(url)


# damage ----------------------------------------------------------------------------------------------------------


def test_damage_is_found_and_named(bucket: Bucket, tmp_path: Path) -> None:
    state = saved(tmp_path / "one")
    as_written_there(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    data = next(name for name in bucket.below("one") if name.endswith(".distcp") and "__0_0" in name)
    whole = bucket.read(data)
    at = whole.index(state["model"].up.weight.detach().numpy().tobytes()) + 9
    bucket.write(data, whole[:at] + bytes((whole[at] ^ 4,)) + whole[at + 1 :])
    for call in (lambda: holdfast.load(state_of(), url), lambda: holdfast.open(url).read("model.up.weight")):
        with pytest.raises(CheckpointCorrupt) as caught:
            call()
        assert caught.value.tensor == "model.up.weight"
        assert caught.value.path == f"{bucket.url}/{data}"
    (problem,) = holdfast.open(url).verify().problems
    assert problem.tensor == "model.up.weight"
    assert problem.byte_range is not None
    assert problem.byte_range[0] <= at < problem.byte_range[1]
    bucket.write(data, whole[:-1])
    with pytest.raises(CheckpointCorrupt, match=f"committed as an object of {len(whole)}"):
        holdfast.load(state_of(), url)
    assert len(holdfast.open(url).verify().problems) == 1
    bucket.remove(data)
    with pytest.raises(CheckpointCorrupt, match="missing"):
        holdfast.load(state_of(), url)
    (problem,) = holdfast.open(url).verify().problems
    assert (problem.path, problem.tensor) == (f"{bucket.url}/{data}", None)
    bucket.write(data, whole)
    report = next(name for name in bucket.below("one") if name.endswith(".report"))
    bucket.remove(report)
    with pytest.raises(CheckpointCorrupt, match="missing"):
        holdfast.load(state_of(), url)
    assert [row.path for row in holdfast.open(url).verify().problems] == [f"{bucket.url}/{report}"]


def test_what_was_replaced_meanwhile_is_told_from_damage(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    for name, fill in (("old", 1.0), ("new", 3.0)):
        saved(tmp_path / name, fill)
        as_written_there(tmp_path / name)
    url = bucket.copy_in(tmp_path / "old", "one")
    opened = holdfast.open(url)
    assert len(opened.tensors) == 4
    old = bucket.below("one")

    def replace_it() -> None:
        bucket.copy_in(tmp_path / "new", "one")
        for name in set(old) - {"one/holdfast.json"}:
            bucket.remove(name)

    replace_it()
    with pytest.raises(CheckpointReplaced, match="replaced by another save"):
        opened.read("big")
    (problem,) = opened.verify().problems
    assert "replaced" in problem.message
    # A load that meets it begins anew, and takes what is there by then.
    for name in bucket.below("one"):
        bucket.remove(name)
    bucket.copy_in(tmp_path / "old", "one")
    done = []

    def rule(_method: str, path: str) -> str | None:
        if path.endswith(".distcp") and not done:
            done.append(path)
            replace_it()
        return None

    proxy.rule = rule
    loaded = state_of()
    holdfast.load(loaded, url)
    assert done
    assert holds(loaded, state_of(3.0))
    opened = holdfast.open(url)
    assert len(opened.tensors) == 4
    for name in bucket.below("one"):
        bucket.remove(name)
    with pytest.raises(CheckpointNotFound, match="deleted while it was read") as caught:
        opened.read("big")
    assert not isinstance(caught.value, CheckpointReplaced)


# stores that can't be used ---------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_used_is_no_missing_checkpoint(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 1.0)
    saved(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    calls: list[Callable[[str], object]] = [holdfast.open, lambda where: holdfast.load(state_of(), where, timeout=20)]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StorageError, match="make the bucket") as caught:
            call("s3://nobody-has-made-it/one")
        assert caught.value.errno == errno.ENODEV
        proxy.rule = lambda _method, _path: "denied"
        with pytest.raises(StorageError, match="check the credentials") as caught:
            call(url)
        assert caught.value.errno == errno.EACCES
        proxy.rule = lambda _method, _path: "busy"
        with pytest.raises(StorageError, match=r"runs/one.*try again later") as caught:
            call(url)
        assert caught.value.errno == errno.EAGAIN
        proxy.rule = lambda _method, _path: None
        with monkeypatch.context() as changed:
            changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            with pytest.raises(StorageError, match=r"runs/one.*check the endpoint") as caught:
                call(url)
            assert caught.value.errno == errno.EHOSTUNREACH
        assert time.monotonic() - began < 30.0
    assert holdfast.open(url).verify().ok


@pytest.mark.parametrize("fate", ["before", "after", "busy"])
def test_a_load_survives_what_is_lost(bucket: Bucket, proxy: Proxy, tmp_path: Path, fate: str) -> None:
    state = saved(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    lost = Counter[str]()

    def rule(_method: str, path: str) -> str | None:
        lost[path] += 1
        return fate if lost[path] % 2 else None

    proxy.rule = rule
    loaded = state_of()
    holdfast.load(loaded, url)
    assert holds(loaded, state)


def test_a_storage_may_bring_its_own_options(object_server: Server, tmp_path: Path) -> None:
    bucket = Bucket(object_server)
    steps(tmp_path, 5)
    bucket.copy_in(tmp_path / "step-5", "step-5")
    storage = ObjectStorage(ObjectStore(bucket.url, object_server.options))
    from holdfast.loader.sources.open import open_source

    source = open_source(f"{bucket.url}/step-5", storage=storage)
    assert source.step == 5
    assert open_source(bucket.url, storage=storage).step == 5


# exports and directories of others -------------------------------------------------------------------------------


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("written_there", [False, True])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 20_000])
def test_an_export_is_loaded(bucket: Bucket, tmp_path: Path, shard_bytes: int, written_there: bool) -> None:
    model = tiny_llama()
    holdfast.export_hf({"model": model}, tmp_path / "hf", assets=model.config, max_shard_bytes=shard_bytes)
    if written_there:
        as_written_there(tmp_path / "hf")
    url = bucket.copy_in(tmp_path / "hf", "hf")
    into = tiny_llama()
    with torch.no_grad():
        for parameter in into.parameters():
            parameter.zero_()
    for place in (url, bucket.copy_out("hf", tmp_path / "down")):
        holdfast.load({"model": into}, place)
        assert same(into, model)
        checkpoint = holdfast.open(place)
        assert checkpoint.verify().problems == ()
        assert json.loads(checkpoint.read_file("config.json"))["hidden_size"] == 32
        assert torch.equal(checkpoint.read("model.norm.weight"), model.model.norm.weight)
    data = next(name for name in bucket.below("hf") if name.endswith(".safetensors"))
    whole = bucket.read(data)
    bucket.write(data, whole[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointCorrupt, match="hf/model"):
        holdfast.load({"model": into}, url)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hugging_face_directory_of_others_is_loaded(bucket: Bucket, tmp_path: Path, sharded: bool) -> None:
    net = Net(3.0)
    tensors = {name: value.contiguous() for name, value in net.state_dict().items()}
    (tmp_path / "hf").mkdir()
    if sharded:
        files = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(tensors, 1)}
        for name, file in files.items():
            save_file({name: tensors[name]}, tmp_path / "hf" / file)
        (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(tensors, tmp_path / "hf" / "model.safetensors")
    url = bucket.copy_in(tmp_path / "hf", "hf")
    into = Net()
    holdfast.load({"model": into}, url)
    assert same(into, net)
    checkpoint = holdfast.open(url)
    assert torch.equal(checkpoint.read("up.weight", (slice(None), slice(2, 4))), net.up.weight[:, 2:4])
    assert checkpoint.verify().ok
    assert not checkpoint.verify().checksummed
    if sharded:
        bucket.remove("hf/model-00002-of-00003.safetensors")
        with pytest.raises(CheckpointCorrupt, match=r"model-00002-of-00003.safetensors is missing; .* names it"):
            holdfast.open(url)


@pytest.mark.parametrize("layout", ["", "weights", "split"])
def test_what_stock_dcp_wrote_is_loaded(bucket: Bucket, proxy: Proxy, tmp_path: Path, layout: str) -> None:
    net = Net(3.0)
    if layout == "split":
        dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "stock" / "model", no_dist=True)
        dcp.save({"optimizer": {"lr": 0.5}}, checkpoint_id=tmp_path / "stock" / "optimizer", no_dist=True)
    else:
        dcp.save({"model": net.state_dict(), "note": "so"}, checkpoint_id=tmp_path / "stock" / layout, no_dist=True)
    url = bucket.copy_in(tmp_path / "stock", "stock")
    into = {"model": Net()}
    holdfast.load(into, url)
    assert same(into["model"], net)
    checkpoint = holdfast.open(url)
    assert torch.equal(checkpoint.read("model.up.weight", 3), net.up.weight[3])
    assert checkpoint.verify().ok
    assert not checkpoint.verify().checksummed
    if layout != "split":
        assert checkpoint.state()["note"] == "so"
    name = next(name for name in bucket.below("stock") if name.endswith(".distcp"))
    bucket.remove(name)
    with pytest.raises(CheckpointCorrupt, match="missing"):
        holdfast.load(into, url)
    assert not holdfast.open(url).verify().ok


def test_stock_dcp_load_reads_through_the_reader(bucket: Bucket, tmp_path: Path) -> None:
    state = saved(tmp_path / "one")
    as_written_there(tmp_path / "one")
    dcp.save({"model": state["model"].state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    for name in ("one", "stock"):
        url = bucket.copy_in(tmp_path / name, name)
        assert Reader.validate_checkpoint_id(url)
        into = {"model": Net().state_dict()}
        reader = Reader(url)
        dcp.load(into, storage_reader=reader, no_dist=True)
        assert (reader.checkpoint_id, str(reader.path)) == (url, url)
        assert torch.equal(into["model"]["down.weight"], state["model"].down.weight)


# places that are directories -------------------------------------------------------------------------------------


def test_urls_of_directories(tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/holdfast-{os.getuid()}/memory")
    name = f"test-{os.getpid()}"
    try:
        for url, place in ((f"file://{tmp_path}/a/", tmp_path / "a"), (f"memory://{name}/a", shared / name / "a")):
            state = state_of(4.0)
            assert holdfast.save(state, url, step=3).path == str(place)
            assert (place / "holdfast.json").is_file()
            loaded = state_of()
            holdfast.load(loaded, url)
            assert holds(loaded, state)
            assert holdfast.open(os.path.dirname(url.rstrip("/"))).step == 3
            into = {"model": Net().state_dict()}
            dcp.load(into, storage_reader=Reader(url), no_dist=True)
            assert torch.equal(into["model"]["up.weight"], state["model"].up.weight)
    finally:
        shutil.rmtree(shared / name, ignore_errors=True)


# several ranks ---------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.one = nn.Linear(64, 129)
        self.two = nn.Linear(129, 33)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) * fill)


def sharded(model: nn.Module) -> nn.Module:
    if not dist.is_initialized():  # one rank alone
        return model
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def save_sharded(directory: str) -> None:
    holdfast.save({"model": sharded(Wide(2.0)), "step": 4}, directory)


def load_sharded(url: str, endpoint: str) -> None:
    os.environ.update(environment(endpoint))
    model = sharded(Wide(0.0))
    state: dict[str, Any] = {"model": model, "step": 0}
    holdfast.load(state, url)
    assert state["step"] == 4
    for found, expected in zip(model.parameters(), Wide(2.0).parameters(), strict=True):
        assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, expected)
    try:
        holdfast.load(state, url + "-that-is-not-there")
    except CheckpointNotFound:
        pass
    else:
        raise AssertionError("something was found")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_loads_it(bucket: Bucket, tmp_path: Path, before: int, after: int) -> None:
    run_job(save_sharded, nproc=before, args=[tmp_path / "one"])
    as_written_there(tmp_path / "one")
    url = bucket.copy_in(tmp_path / "one", "one")
    run_job(load_sharded, nproc=after, args=[url, bucket.server.endpoint])


def test_reports_of_many_ranks_are_read_together(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    saved(tmp_path / "one")
    directory = tmp_path / "one"
    manifest = decode_manifest((directory / "holdfast.json").read_bytes(), path="")
    first = decode_report((directory / "rank-00000.report").read_bytes(), path="")
    world, lines = 40, []
    for rank in range(world):
        report = first if rank == 0 else replace_struct(first, files=(), tensor_sums=b"", index=EMPTY_INDEX)
        data = encode_report(replace_struct(report, rank=rank, world=world))
        (directory / report_name(rank)).write_bytes(data)
        nbytes = sum(file.size for file in report.files)
        lines.append(ManifestReport(rank, report_name(rank), len(data), xxh3_128(data), nbytes))
    changed = replace_struct(manifest, world=world, reports=tuple(lines))
    (directory / "holdfast.json").write_bytes(encode_manifest(changed))
    url = bucket.copy_in(directory, "one")
    proxy.stall_s = 0.2
    proxy.rule = lambda _method, path: "late" if path.endswith(".report") else None
    began = time.monotonic()
    assert len(holdfast.open(url).tensors) == 4
    assert time.monotonic() - began < proxy.stall_s * world / 2
    assert reading.REQUESTS_AT_A_TIME >= 8


# command line ----------------------------------------------------------------------------------------------------


def run(*arguments: object, status: int = 0) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_the_command_line_takes_urls(bucket: Bucket, tmp_path: Path) -> None:
    steps(tmp_path / "root", 5, 40)
    dcp.save({"value": torch.zeros(5)}, checkpoint_id=tmp_path / "root" / "step-7", no_dist=True)
    for path in (tmp_path / "root").iterdir():
        bucket.copy_in(path, f"root/{path.name}")
    url = f"{bucket.url}/root"
    here, there = run("ls", tmp_path / "root"), run("ls", url)
    rows = [{**row, "path": "", "created": "", "age_s": 0} for row in there["entries"]]
    assert rows == [{**row, "path": "", "created": "", "age_s": 0} for row in here["entries"]]
    assert [row["path"] for row in there["entries"]] == [f"{url}/step-{step}" for step in (5, 7, 40)]
    shown = run("show", url)
    assert (shown["path"], shown["step"]) == (f"{url}/step-40", 40)
    assert shown["tensors"] == run("show", tmp_path / "root")["tensors"]
    assert run("show", url, "--step", 5)["step"] == 5
    checked = run("verify", url)
    assert [row["path"] for row in checked["checkpoints"]] == [f"{url}/step-5", f"{url}/step-40"]
    data = next(name for name in bucket.below("root/step-40") if name.endswith(".distcp"))
    bucket.write(data, bucket.read(data)[:-1] + b"!")
    checked = run("verify", url, status=1)
    assert [row["ok"] for row in checked["checkpoints"]] == [True, False]
    assert run("verify", f"{url}/step-5")["ok"]
    assert run("ls", f"{url}/step-7")["entries"][0]["state"] == "stock"
    assert run("ls", f"{url}/nothing", status=2)["error"]["kind"] == "ConfigError"
    assert run("recover", url)["removed"] == []


def test_the_command_line_settles_what_is_left(bucket: Bucket, tmp_path: Path) -> None:
    steps(tmp_path, 5)
    url = bucket.copy_in(tmp_path / "step-5", "root/step-5").rpartition("/")[0]
    storage = ObjectStorage(ObjectStore(url, bucket.server.options))
    storage.begin("step-9", "0123456789ab", recoverable=True)
    storage.write_file("step-9//0123456789ab/__0_0.distcp", b"half")
    left = ".step-9.0123456789ab.incomplete"
    rows = {row["name"]: row for row in run("ls", url)["entries"]}
    assert (rows[left]["state"], rows[left]["nbytes"], rows[left]["step"]) == ("left-behind", 4, 9)
    before = bucket.below("root")
    said = run("recover", "--dry-run", url)
    assert bucket.below("root") == before
    assert run("recover", f"{url}/step-5")["removed"] == []
    done = run("recover", url)
    assert (done["removed"], done["left"]) == (said["removed"], said["left"]) == ([left], [])
    assert [row["name"] for row in run("ls", url)["entries"]] == ["step-5"]
    assert [name for name in bucket.below("root/step-9") if name.endswith(".distcp")] == []


@pytest.mark.parametrize("written_there", [False, True])
def test_the_command_line_verifies_exports(bucket: Bucket, tmp_path: Path, written_there: bool) -> None:
    model = tiny_llama()
    holdfast.export_hf({"model": model}, tmp_path / "hf", assets=model.config, max_shard_bytes=20_000)
    if written_there:
        as_written_there(tmp_path / "hf")
    url = bucket.copy_in(tmp_path / "hf", "hf")
    (found,) = run("verify", url)["checkpoints"]
    assert (found["kind"], found["ok"], found["problems"]) == ("export", True, [])
    index = bucket.read("hf/model.safetensors.index.json")
    bucket.write("hf/model.safetensors.index.json", index.replace(b"lm_head", b"lm_tail"))
    (found,) = run("verify", url, status=1)["checkpoints"]
    assert any("lm_tail" in row["message"] or "index" in row["message"] for row in found["problems"])
