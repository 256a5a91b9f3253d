"""Weight versions on an object store: what is published is what is received, whole, the right one, or not at all."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _object_server import Proxy, Server
from test_sync_directory_transport import KINDS, Model, bits, holds, save_steps, tiny_llama, weights_of

import holdfast
from holdfast.boxes import Box
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    OutcomeUnknown,
    StateMismatch,
    StorageError,
)
from holdfast.loader.read import read_boxes
from holdfast.loader.sources.object_store import open_object
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.sync import DirectoryTransport, Publisher, Receiver
from holdfast.sync.transports import object_store as object_publishing
from holdfast.sync.transports import object_store as object_upload

SOON_S = 0.05
"""For what is not going to happen."""


class Place:
    """A prefix in a bucket of its own, by way of a proxy or straight."""

    def __init__(self, server: Server, way: Proxy | Server) -> None:
        self.server, self.way = server, way
        self.bucket = server.bucket()
        self.url = f"s3://{self.bucket}/runs/versions"

    def transport(self, **options: Any) -> DirectoryTransport:
        return DirectoryTransport(self.url, store_options=self.way.options, **options)

    def straight(self) -> Place:
        """The same, not by way of the proxy."""
        other = copy.copy(self)
        other.way = self.server
        return other

    def below(self, prefix: str = "") -> list[str]:
        start = f"runs/versions/{prefix}"
        return [key.removeprefix(start) for key in self.server.keys(self.bucket) if key.startswith(start)]

    def read(self, name: str) -> bytes:
        status, data = self.server.request("GET", f"/{self.bucket}/runs/versions/{name}")
        assert status == 200
        return data

    def write(self, name: str, data: bytes) -> None:
        assert self.server.request("PUT", f"/{self.bucket}/runs/versions/{name}", data)[0] == 200

    def remove(self, name: str) -> None:
        assert self.server.request("DELETE", f"/{self.bucket}/runs/versions/{name}")[0] == 204

    def copy_in(self, directory: Path, name: str, *, besides: Callable[[str], bool] = lambda _: False) -> None:
        """What some tool would copy there, the manifest not the last."""
        for path in sorted(directory.rglob("*"), key=lambda path: path.name != "holdfast.json"):
            if path.is_file() and not besides(path.name):
                self.write(f"{name}/{path.relative_to(directory)}", path.read_bytes())

    def copy_out(self, name: str, directory: Path) -> Path:
        directory.mkdir()
        for key in self.below(f"{name}/"):
            (directory / key).write_bytes(self.read(f"{name}/{key}"))
        return directory


@pytest.fixture
def place(object_server: Server) -> Place:
    return Place(object_server, object_server)


@pytest.fixture
def behind(object_server: Server, proxy: Proxy) -> Place:
    return Place(object_server, proxy)


def publish(place: Place, *versions: int, **options: Any) -> None:
    with Publisher(place.transport(), **options) as publisher:
        for version in versions:
            publisher.publish(weights_of(version), version)


# what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_kind_of_tensor_arrives_bit_for_bit(place: Place, tmp_path: Path) -> None:
    with Publisher(place.transport()) as publisher:
        done = publisher.publish(KINDS.items(), 1)
        assert (done.version, done.receivers, done.lost) == (1, 0, 0)
        assert done.bytes_sent > (1 << 18)
        assert publisher.versions == (1,)
    expected = {name: bits(kind) for name, kind in KINDS.items()}
    for streaming in (False, True):
        into = {name: torch.zeros_like(tensor) for name, tensor in KINDS.items()}
        assert Receiver(place.transport()).receive(into, streaming=streaming) == 1
        assert {name: bits(tensor) for name, tensor in into.items()} == expected
        called: dict[str, torch.Tensor] = {}
        assert Receiver(place.transport()).receive(called.__setitem__, streaming=streaming) == 1
        assert {name: bits(tensor) for name, tensor in called.items()} == expected
    # Wherever it is copied to, it is an ordinary checkpoint, also to who reads no manifest.
    copied = place.copy_out("version-1", tmp_path / "version-1")
    checkpoint = holdfast.open(copied)
    assert checkpoint.verify().ok
    assert checkpoint.step == 1
    stock = {"layers.0.weight": torch.zeros(1 << 16), "int64": torch.zeros(5, dtype=torch.int64)}
    dcp.load(stock, checkpoint_id=copied, no_dist=True)
    assert all(bits(tensor) == expected[name] for name, tensor in stock.items())


def test_one_version_after_the_other_and_no_more_than_are_kept(place: Place) -> None:
    model, receiver = Model(), Receiver(place.transport(prefix="model"))
    with Publisher(place.transport(prefix="model"), keep_versions=2) as publisher:
        for version in (0, 1, 7):
            publisher.publish(weights_of(version), version)
            assert receiver.receive(model, streaming=version == 1) == version
            assert holds(model, version)
            assert not receiver.dirty
        publisher.pin(1)
        with pytest.raises(CheckpointNotFound):
            publisher.pin(0)
        publisher.publish(weights_of(8), 8)
        publisher.publish({**weights_of(9), "more": torch.ones(2)}, 9)
        assert publisher.versions == (1, 8, 9)
        with pytest.raises(ConfigError, match="empty"):
            publisher.publish({}, 10)
    assert {key.partition("/")[0] for key in place.below()} == {".holdfast", "version-1", "version-8", "version-9"}
    assert receiver.receive(model, version=1) == 1
    assert holds(model, 1)
    for version in (0, 7):
        with pytest.raises(CheckpointNotFound, match=f"version {version} is not kept"):
            receiver.receive(model, version=version)
    with pytest.raises(StateMismatch, match="more"):
        receiver.receive(model)
    assert holds(model, 1)
    with Publisher(place.transport(prefix="model"), keep_versions=1) as publisher:
        for version in (9, 4):
            with pytest.raises(ConfigError, match=f"version {version} is not newer than 9"):
                publisher.publish(weights_of(1), version)
        publisher.unpin(1)
        publisher.publish(weights_of(10), 10)
        assert publisher.versions == (10,)


def test_a_version_that_is_yet_to_come_is_waited_for(place: Place) -> None:
    model, received = Model(), []
    receiver = Receiver(place.transport())
    with pytest.raises(DeadlineExceeded, match=r"a version.*none") as late:
        receiver.receive(model, timeout=SOON_S)
    assert late.value.timeout_s == SOON_S
    thread = threading.Thread(target=lambda: received.append(receiver.receive(model, version=3)))
    thread.start()
    publish(place, 3)
    thread.join(20.0)
    assert received == [3]
    assert holds(model, 3)


def test_slices_are_read_in_ranges(behind: Place, proxy: Proxy) -> None:
    """A receiver of some columns, or of some tensors, doesn't fetch what others need."""
    weights = {f"layers.{number}": torch.randn(1 << 20) for number in range(4)}  # of 4 MiB each
    with Publisher(behind.transport()) as publisher:
        publisher.publish(weights, 1)
    store_path = next(key for key in behind.below("version-1/") if key.endswith(".distcp"))
    storage = ObjectStorage(ObjectStore(behind.url, proxy.options))
    storage.until(time.monotonic() + 30.0)
    source = open_object(storage, "version-1")
    with source.open_files(verify=True) as files:
        assert set(source.files) == {store_path}
        assert files.bytes_read == 0
    before = holdfast.statistics()["bytes_read"]
    (part,) = read_boxes(source, [("layers.2", Box((1000,), (5,)))])
    assert torch.equal(part, weights["layers.2"][1000:1005])
    assert holdfast.statistics()["bytes_read"] - before <= 2 << 20


# what others have saved ------------------------------------------------------------------------------------------


def test_checkpoints_that_were_copied_there_are_versions_once_they_are_whole(place: Place, tmp_path: Path) -> None:
    source = Model(1.0)
    save_steps(tmp_path, source)
    place.copy_in(tmp_path / "step-10", "step-10")
    place.copy_in(tmp_path / "step-20", "step-20", besides=lambda name: name.endswith("0_0.distcp"))
    model, receiver = Model(), Receiver(place.transport(name_template="step-{step}", prefix="model"))
    assert receiver.receive(model) == 10
    assert torch.equal(model.up.weight, torch.full((4, 3), 10.0))
    with pytest.raises(DeadlineExceeded, match=r"step-20 is not whole, it lacks .*\.distcp"):
        receiver.receive(model, version=20, timeout=SOON_S)
    place.copy_in(tmp_path / "step-20", "step-20")
    assert receiver.receive(model) == 20
    assert torch.equal(model.up.weight, torch.full((4, 3), 20.0))
    with pytest.raises(StateMismatch, match="prefix='model'"):
        Receiver(place.transport(name_template="step-{step}")).receive(model)
    with pytest.raises(ConfigError, match="key_map"):
        Receiver(place.transport(name_template="step-{step}", prefix="model", key_map={})).receive(model)


def test_exports_that_were_copied_there_are_versions(place: Place, tmp_path: Path) -> None:
    source, model = tiny_llama(), tiny_llama()
    for step, most in ((4, 5 << 30), (5, 6_000)):  # in one file, and in some with an index
        holdfast.export_hf({"model": source}, tmp_path / f"hf-{step}", assets=source.config, max_shard_bytes=most)
        place.copy_in(tmp_path / f"hf-{step}", f"hf-{step}")
        receiver = Receiver(place.transport(name_template="hf-{step}"))
        assert receiver.receive(model) == step
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), source.parameters(), strict=True))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with torch.no_grad():
            source.model.norm.weight.add_(1.0)
    named: dict[str, torch.Tensor] = {}
    Receiver(place.transport(name_template="hf-{step}")).receive(named.__setitem__, version=4, streaming=True)
    assert torch.equal(named["model.norm.weight"], torch.ones(16))


# what goes wrong -------------------------------------------------------------------------------------------------


def test_damage_is_found_and_nothing_is_committed(place: Place) -> None:
    publish(place, 3, 5)
    receiver, model = Receiver(place.transport()), Model()
    receiver.receive(model, version=3)
    names = {key.rpartition(".")[2]: key for key in place.below("version-5/")}
    whole = {kind: place.read(f"version-5/{name}") for kind, name in names.items()}
    assert set(names) == {"distcp", "report", "json", "metadata"}
    at = whole["distcp"].index(bits(weights_of(5)["up.weight"])) + 7
    damaged = {
        "distcp": [whole["distcp"][:at] + b"\x10" + whole["distcp"][at + 1 :], whole["distcp"][:-1], None],
        "report": [whole["report"][:50] + b"?" + whole["report"][51:], None],
        "json": [whole["json"].replace(b'"world": 1', b'"world": 2')],
    }
    for kind, ways in damaged.items():
        for data in ways:
            if data is None:
                place.remove(f"version-5/{names[kind]}")
            else:
                place.write(f"version-5/{names[kind]}", data)
            with pytest.raises(CheckpointCorrupt, match="version-5") as error:
                receiver.receive(model)
            assert error.value.path.startswith(place.url)
            place.write(f"version-5/{names[kind]}", whole[kind])
    assert holds(model, 3)
    assert (receiver.version, receiver.dirty) == (3, False)
    assert receiver.receive(model) == 5
    for key in place.below("version-5/"):
        place.write(f"version-8/{key}", place.read(f"version-5/{key}"))
    with pytest.raises(CheckpointCorrupt, match="holds step 5, not 8"):
        receiver.receive(model)


def test_a_version_that_is_deleted_while_it_is_read(behind: Place, proxy: Proxy) -> None:
    """As the retention of a publisher would come in between: the manifest goes first."""
    model, receiver = Model(), Receiver(behind.transport())
    read: list[str] = []

    def vanish(version: int, then: Callable[[], object]) -> Callable[[str, str], None]:
        def rule(method: str, path: str) -> None:
            if method == "GET" and path.endswith(".distcp") and f"version-{version}/" in path and path not in read:
                read.append(path)
                for name in sorted(behind.below(f"version-{version}/"), key=lambda name: name != "holdfast.json"):
                    behind.remove(f"version-{version}/{name}")
                then()

        return rule

    with Publisher(behind.straight().transport(), keep_versions=3) as publisher:
        for version in (3, 4):
            publisher.publish(weights_of(version), version)
        proxy.rule = vanish(4, lambda: None)
        with pytest.raises(CheckpointNotFound, match="version 4 was deleted while it was read"):
            receiver.receive(model, version=4)
        assert (receiver.version, receiver.dirty, len(read)) == (None, False, 1)
        publisher.publish(weights_of(5), 5)
        proxy.rule = vanish(5, lambda: publisher.publish(weights_of(6), 6))
        assert receiver.receive(model, streaming=True) == 6, "the next newer one"
        assert (holds(model, 6), receiver.dirty, len(read)) == (True, False, 2)


def test_an_upload_that_fails_leaves_nothing_and_the_next_goes_through(behind: Place, proxy: Proxy) -> None:
    publish(behind, 1)
    receiver, model = Receiver(behind.transport()), Model()
    with Publisher(behind.transport()) as publisher:
        for ending in (".distcp", "holdfast.json"):
            proxy.rule = lambda method, path, ending=ending: (
                "denied" if method == "PUT" and path.endswith(ending) else None
            )
            with pytest.raises(StorageError, match="credentials"):
                publisher.publish(weights_of(2), 2)
            assert behind.below("version-2/") == []
            assert publisher.versions == (1,)
        proxy.rule = lambda _method, _path: None
        assert receiver.receive(model) == 1
        publisher.publish(weights_of(2), 2)
        assert receiver.receive(model) == 2
        assert holds(model, 2)


CHILD = """
import json, sys, torch
from holdfast.sync import DirectoryTransport, Publisher
url, options = sys.argv[1], json.loads(sys.argv[2])
publisher = Publisher(DirectoryTransport(url, store_options=options))
publisher.publish({"up.weight": torch.full((4, 3), 1.0), "up.bias": torch.full((4,), 1 / 8)}, 1)
publisher.publish({"up.weight": torch.full((4, 3), 9.0), "up.bias": torch.full((4,), 9 / 8)}, 2)
"""


@pytest.mark.parametrize("at", [".report", pytest.param(".distcp", marks=pytest.mark.slow)])
def test_a_publisher_that_is_killed_in_an_upload_has_published_nothing(behind: Place, proxy: Proxy, at: str) -> None:
    reached = threading.Event()

    def rule(method: str, path: str) -> str | None:
        if method == "PUT" and "version-2/" in path and path.endswith(at):
            reached.set()
            return "hang"
        return None

    proxy.rule = rule
    arguments = [behind.url, json.dumps(proxy.options)]
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=environment)
    try:
        assert reached.wait(60.0)
    finally:
        child.kill()
        child.wait()
    proxy.rule = lambda _method, _path: None
    model, receiver = Model(), Receiver(behind.transport())
    assert receiver.receive(model) == 1
    with pytest.raises(DeadlineExceeded):
        receiver.receive(model, timeout=SOON_S)
    assert holds(model, 1)
    left = [name for name in behind.below("version-2/") if name.endswith(".distcp")]
    assert len(left) == (at == ".report")
    with Publisher(behind.transport()) as publisher:
        assert publisher.versions == (1,)
        publisher.publish(weights_of(2), 2)
    assert receiver.receive(model) == 2
    assert holds(model, 2)
    assert not set(left) & set(behind.below("version-2/")), "what was left is gone"


def test_what_a_publisher_that_died_has_left_is_not_seen_and_goes(place: Place, monkeypatch) -> None:
    for name, data in (("__0_0.0123456789ab.distcp", b"half"), ("rank-00000.0123456789ab.report", b"")):
        for version in (3, 4):
            place.write(f"version-{version}/{name}", data)
    with pytest.raises(DeadlineExceeded):
        Receiver(place.transport()).receive(Model(), timeout=SOON_S)
    publish(place, 3)
    assert not [key for key in place.below("version-3/") if "0123456789ab" in key], "nobody will commit it any more"
    model = Model()
    assert Receiver(place.transport()).receive(model) == 3
    assert holds(model, 3)
    place.remove("version-3/.metadata")
    Publisher(place.transport()).close()
    assert len(place.below("version-4/")) == 2, "somebody may be at work there"
    assert ".metadata" in place.below("version-3/"), "which one that died has not come to put"
    monkeypatch.setattr(object_publishing, "LEFT_S", -600.0)
    Publisher(place.transport()).close()
    assert place.below("version-4/") == ["holdfast.0123456789ab.json"], "which keeps it from being published after all"
    Publisher(place.transport()).close()
    assert place.below("version-4/") == []
    assert ".metadata" in place.below("version-3/")


@pytest.mark.parametrize("fate", ["before", "after", "busy"])
def test_a_manifest_whose_answer_is_lost_is_found_out(behind: Place, proxy: Proxy, fate: str) -> None:
    puts = []

    def rule(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("holdfast.json"):
            puts.append(path)
            return fate if len(puts) == 1 else None
        return None

    proxy.rule = rule
    publish(behind, 1)
    assert len(puts) > 1 or fate == "after"
    model = Model()
    assert Receiver(behind.transport()).receive(model) == 1
    assert holds(model, 1)


def test_what_nobody_can_tell_is_said_so(behind: Place, proxy: Proxy, monkeypatch) -> None:
    puts = []

    def rule(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("holdfast.json"):
            puts.append(path)
        return None if not puts else "after" if method == "PUT" else "busy"

    with Publisher(behind.transport()) as publisher:
        proxy.rule = rule
        monkeypatch.setattr(object_publishing, "DOUBT_S", 0.3)
        with pytest.raises(OutcomeUnknown, match="may have been published"):
            publisher.publish(weights_of(1), 1, timeout=1.0)
        monkeypatch.undo()
        proxy.rule = lambda _method, _path: None
        assert publisher.versions == (1,), "it was there"
        publisher.publish(weights_of(2), 2)
        assert publisher.versions == (1, 2)


def test_a_version_is_published_once(place: Place, monkeypatch) -> None:
    """Two publishers that should not both be: the second to put the manifest has published nothing."""
    with Publisher(place.transport()) as one, Publisher(place.transport()) as other:
        put = object_upload.Upload.put

        def late(self: object_upload.Upload, *args: Any, **options: Any) -> Any:
            line = put(self, *args, **options)
            monkeypatch.setattr(object_upload.Upload, "put", put)
            other.publish(weights_of(4), 4)
            return line

        monkeypatch.setattr(object_upload.Upload, "put", late)
        with pytest.raises(CheckpointExists, match="version-4"):
            one.publish(weights_of(5), 4)
        with pytest.raises(ConfigError, match="not newer than 4"):
            one.publish(weights_of(5), 4)
        one.publish(weights_of(5), 5)
    model = Model()
    assert Receiver(place.transport()).receive(model, version=4) == 4
    assert holds(model, 4)
    assert len(place.below("version-4/")) == 4, "and nothing is left of the second"


def test_no_answer_is_an_error_in_time(behind: Place, proxy: Proxy) -> None:
    publish(behind, 1)
    began = time.monotonic()
    with Publisher(behind.transport()) as publisher:
        proxy.rule = lambda _method, _path: "hang"
        with pytest.raises(DeadlineExceeded, match="version-2"):
            publisher.publish(weights_of(2), 2, timeout=0.5)
        model = Model()
        with pytest.raises(DeadlineExceeded, match="receiving from s3://"):
            Receiver(behind.transport()).receive(model, timeout=0.5)
        assert not model.up.weight.any()
        proxy.rule = lambda _method, _path: None
        publisher.publish(weights_of(2), 2)
    assert time.monotonic() - began < 20.0


def test_what_is_not_there_is_named(object_server: Server) -> None:
    nowhere = DirectoryTransport("s3://nobody-has-made-it/a", store_options=object_server.options)
    with pytest.raises(StorageError, match=r"s3://nobody-has-made-it/a.*make the bucket"):
        Publisher(nowhere)
    with pytest.raises(StorageError, match=r"s3://nobody-has-made-it/a.*make the bucket"):
        Receiver(nowhere).receive(Model())
    with pytest.raises(ConfigError, match="store_options"):
        DirectoryTransport("s3://b/a", store_options="endpoint")  # type: ignore[arg-type]


def test_the_environment_says_where_and_as_whom(place: Place, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", place.server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with Publisher(DirectoryTransport(place.url)) as publisher:
        publisher.publish(weights_of(1), 1)
    model = Model()
    assert Receiver(DirectoryTransport(place.url)).receive(model) == 1
    handed = pickle.loads(pickle.dumps(place.transport()))
    assert Receiver(handed).receive(model) == 1
    assert "secret" not in repr(handed)
