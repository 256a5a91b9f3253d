"""The commit protocol on an object store: sealed or void, published once, replaced by tag, recovered by markers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _object_server import Proxy, Server

import holdfast
from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.catalog.root import published
from holdfast.commit.recovery import recover
from holdfast.errors import CheckpointExists, ConfigError, StorageError
from holdfast.format.manifest import (
    FORMAT,
    MANIFEST_NAME,
    Manifest,
    ManifestFile,
    ManifestReport,
    decode_manifest,
    encode_manifest,
    format_of,
    report_name,
    void_in,
)
from holdfast.format.sealed import xxh3_128
from holdfast.saver.startup import settle_root
from holdfast.storage import entries as entries_of
from holdfast.storage import object_storage
from holdfast.storage.entries import is_occupied, published_attempt, read_manifest
from holdfast.storage.object_storage import ObjectStorage, with_attempt, without_attempt
from holdfast.storage.object_store import ObjectStore

FIRST, SECOND = "0123456789ab", "ba9876543210"
NAME = "step-1"


@pytest.fixture
def storage(object_server: Server) -> ObjectStorage:
    return ObjectStorage(ObjectStore(f"s3://{object_server.bucket()}/run", object_server.options))


def manifest(attempt: str, **files: bytes) -> bytes:
    rows = tuple(
        ManifestFile(with_attempt(f"{name}.json", attempt), len(data), xxh3_128(data)) for name, data in files.items()
    )
    return encode_manifest(
        Manifest(
            format=format_of("checkpoint"),
            name=NAME,
            attempt=attempt,
            step=1,
            world=1,
            created="2026-01-01T00:00:00+00:00",
            metrics={},
            resumable=True,
            versions={},
            reports=(ManifestReport(0, report_name(0, attempt), 6, "0" * 32, len(attempt)),),
            files=rows,
        )
    )


def begin(storage: ObjectStorage, attempt: str, **files: bytes) -> str:
    place = storage.directory_of(NAME, attempt)
    storage.begin(NAME, attempt, recoverable=True)
    storage.write_file(f"{place}/.plan", b"plan")
    storage.write_file(f"{place}/__0_0.distcp", attempt.encode())
    storage.write_file(f"{place}/{report_name(0)}", b"report")
    for name, data in files.items():
        storage.write_file(f"{place}/{name}.json", data)
    return place


def publish(
    storage: ObjectStorage, attempt: str, *, overwrite: bool = False, **files: bytes
) -> object_storage.PublishOutcome:
    place = begin(storage, attempt, **files)
    storage.seal(place, manifest(attempt, **files))
    return storage.publish(place, NAME, attempt, manifest(attempt, **files), overwrite=overwrite)


def test_names_have_the_attempt_once() -> None:
    for plain, stored in {
        "__0_0.distcp": f"__0_0.{FIRST}.distcp",
        ".plan": f".plan.{FIRST}",
        "lease-00001": f"lease-00001.{FIRST}",
        "sub/config.json": f"sub/config.{FIRST}.json",
        "additional_chat_templates/tools.jinja": f"additional_chat_templates/tools.jinja.{FIRST}",
        "LICENSE": f"LICENSE.{FIRST}",
        "model.safetensors.index.json": f"model.safetensors.index.{FIRST}.json",
    }.items():
        assert with_attempt(plain, FIRST) == stored
        assert with_attempt(stored, FIRST) == stored
        assert without_attempt(stored, FIRST) == plain


def test_nothing_is_visible_before_the_manifest_and_all_of_it_after(storage: ObjectStorage) -> None:
    place = begin(storage, FIRST, config=b"{}")
    assert not is_occupied(storage, NAME)
    assert read_manifest(storage, NAME) is None
    assert [(entry.name, entry.attempt, entry.kind) for entry in storage.unsettled()] == [(NAME, FIRST, "incomplete")]
    storage.seal(place, manifest(FIRST, config=b"{}"))
    assert read_manifest(storage, NAME) is None
    assert storage.publish(place, NAME, FIRST, manifest(FIRST, config=b"{}"), overwrite=False).kind == "published"
    assert published_attempt(storage, NAME) == FIRST
    assert storage.read_file(f"{NAME}/config.json", max_bytes=99) == b"{}", "as other readers look for it"
    assert storage.list_dir(NAME) == sorted(
        [f"__0_0.{FIRST}.distcp", "config.json", f"config.{FIRST}.json", MANIFEST_NAME, report_name(0, FIRST)]
    )
    assert storage.unsettled() == []


def test_the_second_at_a_name_is_refused_and_harms_nothing(storage: ObjectStorage) -> None:
    assert publish(storage, FIRST).kind == "published"
    outcome = publish(storage, SECOND)
    assert outcome.kind == "refused"
    assert isinstance(outcome.error, CheckpointExists)
    withdrawn = storage.withdraw(storage.directory_of(NAME, SECOND), NAME, SECOND)
    assert withdrawn.certain
    for trash in withdrawn.trash:
        storage.remove_tree(trash)
    assert published_attempt(storage, NAME) == FIRST
    assert storage.read_file(f"{storage.directory_of(NAME, FIRST)}/__0_0.distcp", max_bytes=99) == FIRST.encode()
    assert storage.size(f"{storage.directory_of(NAME, SECOND)}/__0_0.distcp") is None
    assert storage.unsettled() == []


def test_an_attempt_that_a_start_took_for_dead_can_not_be_published(storage: ObjectStorage) -> None:
    """Whatever its clock says, and however late its requests arrive."""
    place = begin(storage, FIRST)
    report = recover(storage, clock=lambda: 0.0, sleep=lambda _: None)
    assert report.removed == (place,)
    assert void_in(storage.read_file(f"{place}/{MANIFEST_NAME}", max_bytes=9999)) == FIRST
    assert storage.size(f"{place}/__0_0.distcp") is None
    with pytest.raises(StorageError, match="another process has recovered"):
        storage.seal(place, manifest(FIRST))
    assert storage.unsettled() == []
    assert not is_occupied(storage, NAME)
    assert publish(storage, SECOND).kind == "published"


def test_what_is_published_is_never_made_void(storage: ObjectStorage) -> None:
    assert publish(storage, FIRST).kind == "published"
    outcome = storage.withdraw(storage.directory_of(NAME, FIRST), NAME, FIRST)
    assert not outcome.certain
    assert storage.size(f"{storage.directory_of(NAME, FIRST)}/{MANIFEST_NAME}") is None
    assert published_attempt(storage, NAME) == FIRST


def test_a_start_puts_the_faces_that_a_crash_prevented(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            ObjectStorage, "_put_faces", lambda *_: (_ for _ in ()).throw(StorageError("x", path="", errno=5))
        )
        assert publish(storage, FIRST, config=b"{}").kind == "published"
    assert storage.size(f"{NAME}/config.json") is None
    recover(storage, clock=lambda: 0.0, sleep=lambda _: None)
    assert storage.size(f"{NAME}/config.json") == 2
    assert storage.unsettled() == []
    assert published_attempt(storage, NAME) == FIRST


def test_what_is_replaced_stays_for_its_readers(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert publish(storage, FIRST, config=b"old", notes=b"old").kind == "published"
    assert publish(storage, SECOND, overwrite=True, config=b"new").kind == "published"
    assert published_attempt(storage, NAME) == SECOND
    assert storage.read_file(f"{NAME}/config.json", max_bytes=9) == b"new"
    assert storage.size(f"{NAME}/notes.json") is None
    old = f"{storage.directory_of(NAME, FIRST)}/__0_0.distcp"
    recover(storage, clock=lambda: 0.0, sleep=lambda _: None)
    assert storage.size(old) is not None
    monkeypatch.setattr(object_storage, "REPLACED_FOR_S", -60.0)
    recover(storage, clock=lambda: 0.0, sleep=lambda _: None)
    assert storage.size(old) is None
    assert storage.size(f"{storage.directory_of(NAME, SECOND)}/__0_0.distcp") is not None
    assert storage.unsettled() == []


def test_what_is_hidden_goes_with_all_that_belongs_to_it(storage: ObjectStorage) -> None:
    assert publish(storage, FIRST, config=b"{}").kind == "published"
    trash = storage.hide(NAME)
    assert trash is not None
    assert read_manifest(storage, NAME) is None
    assert [entry.kind for entry in storage.unsettled()] == ["trash"]
    for entry in trash:
        storage.remove_tree(entry)
    assert storage.list_dir(NAME) == []
    assert storage.unsettled() == []


def test_a_checkpoint_whose_deletion_broke_off_at_once_stays_whole(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marked as trash, and still visible: the next start must not take its objects. Retention asks again."""
    place, data = begin(storage, FIRST), manifest(FIRST)
    storage.seal(place, data)
    assert storage.publish(place, NAME, FIRST, data, overwrite=False).kind == "published"

    def killed(_name: str) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(storage, "unlink", killed)
        with pytest.raises(InterruptedError):
            storage.hide(NAME)
    recover(storage, clock=time.monotonic, sleep=time.sleep)
    assert storage.read_file(f"{NAME}/{with_attempt('__0_0.distcp', FIRST)}", max_bytes=99) == FIRST.encode()
    assert published_attempt(storage, NAME) == FIRST
    monkeypatch.setattr(object_storage, "REPLACED_FOR_S", -10.0)
    assert storage.unsettled() == []
    assert storage.store.names(".holdfast/attempts", ends_s=storage.ends_s) == [], "nobody may be deleting it any more"
    trash = storage.hide(NAME)
    assert trash is not None
    for entry in trash:
        storage.remove_tree(entry)
    assert not storage.exists(NAME)
    assert storage.unsettled() == []


def test_a_removal_that_broke_off_at_its_end_is_finished_by_the_next_start(storage: ObjectStorage) -> None:
    place, data = begin(storage, FIRST), manifest(FIRST)
    storage.seal(place, data)
    assert storage.publish(place, NAME, FIRST, data, overwrite=False).kind == "published"
    (trash,) = storage.hide(NAME) or ()
    storage.remove(NAME, [row.name for row in storage.list_tree(NAME)])
    report, left = settle_root(storage, timeout_s=5.0)
    assert (report.removed, left) == ((trash,), [trash]), "for the engine to remove"
    storage.remove_tree(trash)
    assert settle_root(storage, timeout_s=5.0)[1] == []
    assert storage.unsettled() == []


def test_what_was_removed_from_a_live_attempt_is_noticed_before_it_is_published(storage: ObjectStorage) -> None:
    place = begin(storage, FIRST)
    storage.unlink(f"{place}/__0_0.distcp")
    whole = decode_manifest(manifest(FIRST), path="")
    with pytest.raises(StorageError, match="0 bytes of data, expected 12"):
        storage.require_all(place, whole)
    storage.write_file(f"{place}/__0_0.distcp", FIRST.encode())
    storage.unlink(f"{place}/{report_name(0)}")
    with pytest.raises(StorageError, match=rf"rank-00000.{FIRST}.report is missing"):
        storage.require_all(place, whole)
    storage.write_file(f"{place}/{report_name(0)}", b"report")
    storage.require_all(place, whole)


def test_a_store_that_ignores_conditions_is_refused(storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(store: ObjectStore, name: str, data: bytes, *, ours: Any, ends_s: float) -> bool:
        del ours
        store.put(name, data, ends_s=ends_s)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "create", replace)
        with pytest.raises(ConfigError, match=r"8 succeeded, and a later one too.*If-None-Match"):
            storage.make_root()
    storage.make_root()
    assert storage.list_dir(".holdfast") == [], "nothing is left of the probes"


def use(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a root in a new bucket, to which the environment leads from now on."""
    keys = {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in {**keys, "ENDPOINT_URL": object_server.endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"s3://{object_server.bucket()}/run"


def test_an_engine_that_runs_already_gets_credentials_that_came_later(
    object_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment is that of its start."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    state = {"weights": torch.arange(10)}
    holdfast.save(state, tmp_path / "before")
    url = use(object_server, monkeypatch)
    holdfast.save(state, f"{url}/after")
    assert torch.equal(holdfast.open(f"{url}/after").read("weights"), state["weights"])


@pytest.mark.parametrize("moment", [".plan", MANIFEST_NAME])
def test_a_start_leaves_an_attempt_alone_while_no_engine_works_on_it(
    object_server: Server, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before the first engine has its part, and after the last one is done: what lives there is the coordinator."""
    url = use(object_server, monkeypatch)
    create, waited = ObjectStore.create, []

    class Waits(Exception):
        """A recovery waits for the attempt, and is broken off."""

    def wait(_seconds: float) -> None:
        raise Waits

    def recover_first(store: ObjectStore, name: str, data: bytes, **more: Any) -> bool:
        if f"{moment.removesuffix('.json')}." in name and not waited:
            with pytest.raises(Waits):
                recover(ObjectStorage(ObjectStore(url)), clock=time.monotonic, sleep=wait)
            waited.append(name)
        return create(store, name, data, **more)

    monkeypatch.setattr(ObjectStore, "create", recover_first)
    holdfast.save({"weights": torch.arange(10)}, f"{url}/one", timeout=30.0)
    assert len(waited) == 1
    assert holdfast.open(f"{url}/one").verify().ok
    left = ObjectStore(url).names("one", ends_s=time.monotonic() + 10)
    assert not [name for name in left if name.startswith("lease-")]


def test_pids_are_looked_for_only_where_they_mean_the_same(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one host have its boot in common, and not its pids."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    place = storage.directory_of(NAME, FIRST)
    lease = storage.hold_lease(place, "lease-00000", rank=0)
    seen = storage.observe_lease(place, "lease-00000")
    assert seen is not None
    assert seen.flock_free is True
    link = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if path == "/proc/self/ns/pid" else link(path))
    seen = storage.observe_lease(place, "lease-00000")
    assert seen is not None
    assert seen.flock_free is None
    lease.stop(wait_s=10.0)


# requests ----------------------------------------------------------------------------------------------------------


def test_a_start_asks_once_and_for_several_at_a_time(
    object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is round trips here, not bytes."""
    steps, bucket = 32, object_server.bucket()
    storage = ObjectStorage(ObjectStore(f"s3://{bucket}/run", proxy.options))
    for step in range(steps):
        manifest = Manifest(
            format=FORMAT,
            name=f"step-{step}",
            attempt=f"{step:012x}",
            step=step,
            world=1,
            created="2026-01-01T00:00:00+00:00",
            metrics={},
            resumable=True,
            versions={},
            reports=(ManifestReport(0, report_name(0), 1, "0" * 32, 0),),
            files=(),
        )
        storage.write_file(f"step-{step}/holdfast.json", encode_manifest(manifest))
    catalog = Catalog(storage, "step-{step}", Keep(last=3))

    def asked(call: Callable[[], object]) -> tuple[object, int, float]:
        proxy.clear()
        proxy.stall_s, proxy.rule = 0.1, lambda _method, _path: "late"
        began = time.monotonic()
        found = call()
        return found, len(proxy.seen), time.monotonic() - began

    found, requests, _ = asked(lambda: read_manifest(storage, "step-3"))
    assert isinstance(found, Manifest)
    assert requests == 1
    assert asked(lambda: published_attempt(storage, "step-3"))[:2] == (f"{3:012x}", 1)
    found, requests, took_s = asked(lambda: published(storage, "step-{step}"))
    assert found == [(step, f"step-{step}") for step in range(steps)]
    assert requests == steps + 1, "a listing, and a look at each"
    assert took_s < 0.1 * steps / 2
    found, requests, took_s = asked(catalog.entries)
    assert isinstance(found, dict)
    assert [entry.step for entry in found.values()] == list(range(steps))
    assert requests <= 3 * steps + 2, "the pins, the names; and of each whether it is there, its attempt and the rest"
    assert took_s < 0.1 * 3 * steps / 2
    again, requests, _ = asked(catalog.entries)
    assert again == found
    assert requests <= 2 * steps + 2
    monkeypatch.setattr(entries_of, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(StorageError) as large:
        read_manifest(storage, "step-3")
    assert large.value.errno == errno.EFBIG
    assert read_manifest(storage, "step-99") is None
    assert published_attempt(storage, "step-99") is None


def test_one_that_cannot_be_asked_fails_the_listing(object_server: Server, proxy: Proxy) -> None:
    storage = ObjectStorage(ObjectStore(f"s3://{object_server.bucket()}/run", proxy.options))
    for step in range(20):
        storage.write_file(f"step-{step}/holdfast.json", b"{}")
    proxy.rule = lambda _method, path: "denied" if "step-13/" in path else None
    with pytest.raises(StorageError, match="step-13") as refused:
        published(storage, "step-{step}")
    assert refused.value.errno == errno.EACCES
