"""``holdfast recover --dry-run`` of what jobs left on an object store: it says what happens, and changes nothing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _object_server import Proxy, Server
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _on_stores import environment

import holdfast
from holdfast.cli.app import app
from holdfast.errors import OutcomeUnknown, StorageError
from holdfast.storage import object_storage
from holdfast.storage.leases import COORDINATOR_LEASE
from holdfast.storage.local import open_storage
from holdfast.storage.object_overlay import ObjectOverlay
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.protocol import PublishOutcome

UNCHANGING = {"GET", "HEAD"}


class Root:
    """The prefix ``url`` of a bucket of its own, reached through ``proxy``."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.server, self.proxy, self.bucket = server, proxy, server.bucket()
        self.url = f"s3://{self.bucket}/run"

    @property
    def storage(self) -> ObjectStorage:
        storage = open_storage(self.url)
        assert isinstance(storage, ObjectStorage)
        return storage

    def tree(self) -> dict[str, bytes]:
        """Every object of the bucket, seen past the proxy."""
        return {key: self.server.request("GET", f"/{self.bucket}/{key}")[1] for key in self.server.keys(self.bucket)}

    def save(self, step: int, fill: float = 1.0, **options: Any) -> None:
        state = {"one": torch.full((600, 700), fill), "step": step}
        holdfast.save(state, f"{self.url}/step-{step}", step=step, **options)


@pytest.fixture
def root(object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Root:
    for name, value in environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return Root(object_server, proxy)


def recover(root: Root, *options: str, path: str = "", status: int = 0) -> dict[str, Any]:
    ended = CliRunner().invoke(app, ["recover", path or root.url, "--json", *options])
    assert ended.exit_code == status, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def says_and_does(root: Root, *options: str, path: str = "", status: int = 0) -> dict[str, Any]:
    """Run it dry, see that nothing was even asked for that changes something, then do it; both say the same."""
    before = root.tree()
    root.proxy.clear()
    said = recover(root, "--dry-run", *options, path=path, status=status)
    assert {method for method, _ in root.proxy.seen} <= UNCHANGING, root.proxy.seen
    assert root.tree() == before
    done = recover(root, *options, path=path, status=status)
    assert (said.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert said == done
    return done


def test_prune_removes_what_an_interrupted_one_has_hidden(root: Root) -> None:
    for step in (1, 2, 3):
        root.save(step)
    root.storage.hide("step-1")  # and it ends before the objects are deleted
    before = root.tree()
    assert any(key.startswith("run/step-1/") for key in before)
    root.proxy.clear()
    for dry in (["--dry-run"], []):
        ended = CliRunner().invoke(app, ["prune", root.url, "--last", "1", "--json", *dry])
        assert ended.exit_code == 0, ended.output
        rows = {row["step"]: row["outcome"] for row in json.loads(ended.stdout)["steps"]}
        assert rows == {2: "goes" if dry else "gone", 3: "kept"}
        if dry:
            assert {method for method, _ in root.proxy.seen} <= UNCHANGING
            assert root.tree() == before
    left = [key for key in root.tree() if "step-" in key]
    assert left
    assert all(key.startswith("run/step-3/") for key in left)
    assert root.storage.unsettled() == []


def leave(root: Root, step: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Save up to the last step, which is not taken; returns the attempt."""

    def lost(self: ObjectStorage, directory: str, name: str, attempt: str, *_: Any, **__: Any) -> PublishOutcome:
        del self, directory, name
        return PublishOutcome("unknown", error=OutcomeUnknown("lost", attempt=attempt))

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "publish", lost)
        with pytest.raises(OutcomeUnknown) as unknown:
            root.save(step, **options)
    return str(unknown.value.attempt)


@pytest.mark.parametrize("interrupted", ["sealed", "reported", "half", "damaged", "overwriting", "beaten"])
def test_recover_does_what_its_dry_run_says(root: Root, interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root.save(1)
    store = root.storage.store
    soon = time.monotonic() + 60
    if interrupted in ("overwriting", "beaten"):
        root.save(2, fill=5.0)
    attempt = leave(root, 2, monkeypatch, overwrite=interrupted in ("overwriting", "beaten"))
    if interrupted != "sealed":
        store.delete([f"step-2/holdfast.{attempt}.json"], ends_s=soon)
    if interrupted == "half":
        store.delete([f"step-2/rank-00000.{attempt}.report"], ends_s=soon)
    if interrupted == "damaged":
        data = f"step-2/__0_0.{attempt}.distcp"
        found = bytearray(store.get(data, ends_s=soon)[0])
        found[5000] ^= 1
        store.put(data, bytes(found), ends_s=soon)
    if interrupted == "beaten":
        root.save(2, fill=6.0, overwrite=True)
        recover(root)  # what that has replaced stays for its readers, and what was left here is settled before
        attempt = ""
    whole = interrupted in ("sealed", "reported", "overwriting")
    left = f".step-2.{attempt}.incomplete"
    expected = (["step-2"], []) if whole else ([], [left] if attempt else [])
    done = says_and_does(root)
    assert (done["rolled_forward"], done["removed"], done["left"]) == (*expected, [])
    if whole or not attempt:
        found_there = holdfast.open(f"{root.url}/step-2")
        assert found_there.verify().ok
        assert float(found_there.read("one")[0, 0]) == (1.0 if whole else 6.0)
    else:
        with pytest.raises(holdfast.CheckpointNotFound):
            holdfast.open(f"{root.url}/step-2")
    assert says_and_does(root)["removed"] == []


def test_trash_and_several_attempts_and_one_path(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.save(1)
    root.save(3)
    root.storage.hide("step-3")
    first, second = leave(root, 2, monkeypatch), leave(root, 4, monkeypatch)
    root.storage.store.delete([f"step-4/__0_0.{second}.distcp"], ends_s=time.monotonic() + 60)
    one = says_and_does(root, path=f"{root.url}/step-2")
    assert (one["path"], one["rolled_forward"], one["removed"]) == (root.url, ["step-2"], [])
    done = says_and_does(root)
    assert sorted(name.split(".")[1::2] for name in done["removed"]) == [["step-3", "trash"], ["step-4", "incomplete"]]
    assert root.storage.unsettled() == []
    assert holdfast.open(f"{root.url}/step-2").manifest.attempt == first  # type: ignore[union-attr]


def test_what_is_in_work_is_left(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = leave(root, 2, monkeypatch)
    monkeypatch.setattr(ObjectStorage, "lease_quiet_s", 60.0)
    monkeypatch.setattr("holdfast.cli.recover._STORE_GRACE_S", -59.0)
    lease = root.storage.hold_lease(f"step-2//{attempt}", COORDINATOR_LEASE, rank=0)
    (left,) = says_and_does(root, "--wait", "0", status=1)["left"]
    lease.stop(wait_s=10.0)
    assert left["name"] == f".step-2.{attempt}.incomplete"
    assert "still being written by process" in left["why"]
    assert says_and_does(root)["rolled_forward"] == ["step-2"]


def test_what_was_replaced_long_ago(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age is asked of the store's clock, by an object; a dry run, and a listing, take this host's."""
    root.save(2)
    before = set(root.tree())
    root.save(2, fill=3.0, overwrite=True)
    assert says_and_does(root)["removed"] == [], "its readers may still read it"
    monkeypatch.setattr(object_storage, "REPLACED_FOR_S", -100.0)
    root.proxy.clear()
    listed = CliRunner().invoke(app, ["ls", root.url, "--json"])
    assert "trash" in {row["state"] for row in json.loads(listed.stdout)["entries"]}
    assert {method for method, _ in root.proxy.seen} <= UNCHANGING, root.proxy.seen
    (removed,) = says_and_does(root)["removed"]
    assert removed.startswith(".step-2.")
    assert not (before & set(root.tree())) - {"run/step-2/holdfast.json", "run/step-2/.metadata"}
    assert holdfast.open(f"{root.url}/step-2").verify().ok


def test_a_process_of_its_own(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(root, 2, monkeypatch)
    command = [sys.executable, "-m", "holdfast", "recover", root.url, "--dry-run"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "step-2: would be rolled forward: every rank had written its part\n")


# the store on which nothing changes ----------------------------------------------------------------------------


@pytest.fixture
def both(root: Root) -> Iterator[tuple[ObjectOverlay, ObjectStore]]:
    """An overlay over a store that is not changed, and one that is."""
    endless = time.monotonic() + 60
    stores = [ObjectStore(f"s3://{root.server.bucket()}/a") for _ in range(2)]
    for store in stores:
        for name in ("one", "two", "deep/three", "deep/four"):
            store.put(name, name.encode(), ends_s=endless)
    before = stores[0].objects("", ends_s=endless)
    root.proxy.clear()
    yield ObjectOverlay(stores[0]), stores[1]
    assert stores[0].objects("", ends_s=endless) == before
    bucket = stores[0].url.split("/")[2]
    changing = [row for row in root.proxy.seen if row[0] not in UNCHANGING and row[1].startswith(f"/{bucket}/")]
    assert not changing


def answer(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except StorageError as error:
        return error.errno


def test_an_overlay_answers_as_a_store_on_which_that_was_done(both: tuple[ObjectOverlay, ObjectStore]) -> None:
    until = time.monotonic() + 60

    def never(_: bytes) -> bool:
        return False

    def do(store: ObjectStore) -> list[Any]:
        done = [
            store.create("one", b"mine", ours=never, ends_s=until),
            store.create("new", b"mine", ours=never, ends_s=until),
            store.create("new", b"yours", ours=never, ends_s=until),
            store.create("new", b"yours", ours=b"mine".__eq__, ends_s=until),
        ]
        for name in ("two", "new"):
            tag = store.get_tagged(name, ends_s=until)[2]
            done.append(store.replace(name, b"newer", tag, ours=never, ends_s=until))
            done.append(store.replace(name, b"newest", tag, ours=never, ends_s=until))
        store.put("deep/five/six", b"123", ends_s=until)
        store.copy("deep/three", "copied", ends_s=until)
        store.copy("new", "deep/copied", ends_s=until)
        store.delete(["deep/three", "one", "absent"], ends_s=until)
        return done

    found = [do(store) for store in both]
    assert found[0] == found[1]
    names = ("one", "two", "new", "deep", "deep/three", "deep/four", "deep/five/six", "copied", "deep/copied", "absent")
    for store in both:
        told: list[Any] = []
        for name in names:
            told.append(store.size(name, ends_s=until))
            told.append(answer(lambda name=name, store=store: bytes(store.get(name, ends_s=until)[0])))
            told.append(answer(lambda name=name, store=store: bytes(store.get(name, 1, 3, ends_s=until)[0])))
            told.append(answer(lambda name=name, store=store: bytes(store.get(name, 99, 100, ends_s=until)[0])))
            told.append(answer(lambda name=name, store=store: store.modified_s(name, ends_s=until) > 1e9))
        for below in ("", "deep", "deep/five", "absent"):
            told.append(store.names(below, ends_s=until))
            told.append(store.any_below(below, ends_s=until))
            told.append([row[:2] for row in store.objects(below, ends_s=until)])
        found.append(told)
    assert found[2] == found[3]
    assert errno.ENOENT in found[2]
