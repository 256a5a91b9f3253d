"""A manager with its mirror in a bucket: copies there, what is loaded from them, and outages on the way."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _manager_runs import Run, visible
from _object_server import Proxy, Server

from holdfast import CheckpointConfig, CheckpointManager, Keep
from holdfast.catalog.course import PARENT
from holdfast.errors import CheckpointExists, ConfigError, SaveFailed
from holdfast.format.manifest import COPY_OF
from holdfast.saver import mirror as mirroring
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")
WAIT_S = 120.0


class Bucket:
    """A root on this machine, and its mirror in a bucket by way of the proxy."""

    def __init__(self, at: Path, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.server, self.proxy = at / "root", server, proxy
        self.name = server.bucket()
        self.url = f"s3://{self.name}/run"
        options = proxy.options
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
        monkeypatch.setenv("AWS_REGION", options["region"])
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        self.storage = ObjectStorage(ObjectStore(self.url, options))

    def manager(self, run: Run, **options: Any) -> CheckpointManager:
        config = CheckpointConfig(**{"every": 1, "keep": None, **options})
        return CheckpointManager(self.root, run.state, config=config, mirror=self.storage)

    def train(self, steps: range, **options: Any) -> dict[int, torch.Tensor]:
        run, weights = Run(), {}
        with self.manager(run, **options) as manager:
            for step in steps:
                run.train()
                weights[step] = run.weight()
                manager.step(step)[0].wait_mirrored(WAIT_S)
        return weights

    def objects(self) -> list[str]:
        return [key.removeprefix("run/") for key in self.server.keys(self.name)]

    def steps(self) -> list[str]:
        return sorted(key.partition("/")[0] for key in self.objects() if key.endswith("/holdfast.json"))


@pytest.fixture
def bucket(tmp_path: Path, object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(tmp_path, object_server, proxy, monkeypatch)


def test_copies_have_names_of_their_own_attempt_and_are_resumed_from(bucket: Bucket) -> None:
    weights = bucket.train(range(1, 3))
    assert bucket.steps() == ["step-1", "step-2"]
    there = read_manifest(bucket.storage, "step-2")
    assert there is not None
    assert len(there.extra[COPY_OF]) == 12
    named = [key for key in bucket.objects() if key.startswith("step-2/") and there.attempt in key]
    assert {key.rpartition(".")[2] for key in named} >= {"distcp", "report"}
    assert "step-2/.metadata" in bucket.objects()
    assert not [key for key in bucket.objects() if "lease" in key or ".plan" in key or "incomplete" in key]
    shutil.rmtree(bucket.root)
    run = Run(5)
    with bucket.manager(run) as manager:
        assert manager.restore() == 2
    assert torch.equal(run.weight(), weights[2])


def test_a_damaged_local_checkpoint_comes_from_the_bucket(bucket: Bucket) -> None:
    weights = bucket.train(range(1, 3))
    file = max((bucket.root / "step-2").glob("*.distcp"), key=lambda found: found.stat().st_size)
    file.write_bytes(bytes(len(file.read_bytes())))
    run = Run(5)
    with bucket.manager(run) as manager, pytest.warns(UserWarning, match="taking its copy at s3://"):
        assert manager.restore() == 2
    assert torch.equal(run.weight(), weights[2])


def on_another_machine(bucket: Bucket) -> Bucket:
    other = copy.copy(bucket)
    other.root = bucket.root.parent / "another"
    return other


def test_two_runs_of_one_bucket_are_told_of_each_other(bucket: Bucket) -> None:
    """Stores have no lock: another run publishes there while this one runs, and nothing of either is lost or mixed."""
    bucket.train(range(1, 3))
    other = on_another_machine(bucket)
    run, rival = Run(1), Run(2)
    with bucket.manager(run, on_error="warn") as manager:
        assert manager.restore() == 2
        with other.manager(rival) as second:
            assert second.restore() == 2
            for step in (3, 4):
                rival.train()
                second.step(step)[0].wait_mirrored(WAIT_S)
        for _ in range(3):
            run.train()
        (handle,) = manager.step(3)
        with pytest.raises((CheckpointExists, SaveFailed)):
            handle.wait_mirrored(WAIT_S)
        run.train()
        weight = run.weight()
        (handle,) = manager.step(5)
        with pytest.raises(SaveFailed, match="of another run"):
            handle.wait_mirrored(WAIT_S)
    assert bucket.steps() == ["step-1", "step-2", "step-3", "step-4"]
    for step in (3, 4):
        theirs = read_manifest(LocalStorage(other.root), f"step-{step}")
        copied = read_manifest(bucket.storage, f"step-{step}")
        assert theirs is not None
        assert copied is not None
        assert copied.extra[COPY_OF] == theirs.attempt
        assert copied.extra[PARENT] == theirs.extra[PARENT]
    with bucket.manager(Run(7)) as manager, pytest.warns(UserWarning, match="step 3, 4 .* by another run"):
        assert manager.restore() == 5, "newer than the other's"
    shutil.rmtree(bucket.root / "step-5")
    with bucket.manager(Run(7)) as manager, pytest.raises(ConfigError, match=r"step 4 .*is no successor of step 3 "):
        manager.restore()
    run = Run(8)
    with bucket.manager(run) as manager, pytest.warns(UserWarning, match="by another run"):
        assert manager.restore(4) == 4
    assert torch.equal(run.weight(), rival.weight())
    assert not torch.equal(run.weight(), weight)


def test_retention_in_the_bucket(bucket: Bucket) -> None:
    bucket.train(range(1, 6), keep=Keep(last=1), mirror_keep=Keep(last=1, every=2))
    assert visible(bucket.root) == ["step-5"]
    assert bucket.steps() == ["step-2", "step-4", "step-5"]
    kept = {key.partition("/")[0] for key in bucket.objects() if not key.startswith(".holdfast/")}
    assert kept == {"step-2", "step-4", "step-5"}, "no data of what was deleted"


def test_an_outage_of_the_bucket_is_caught_up_with(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(mirroring, "LAST_PAUSE_S", 0.2)
    run = Run()
    with bucket.manager(run, keep=Keep(last=1)) as manager:
        run.train()
        manager.step(1)[0].wait_mirrored(WAIT_S)
        bucket.proxy.rule = lambda method, _path: "denied" if method != "GET" else None
        handles = []
        for step in (2, 3):
            run.train()
            handles += manager.step(step)
            handles[-1].result()
        with pytest.raises((CheckpointExists, SaveFailed)):
            handles[0].wait_mirrored(WAIT_S)
        assert bucket.steps() == ["step-1"]
        bucket.proxy.rule = lambda _method, _path: None
    assert bucket.steps() == ["step-1", "step-2", "step-3"]
    assert not [key for key in bucket.objects() if "incomplete" in key]
