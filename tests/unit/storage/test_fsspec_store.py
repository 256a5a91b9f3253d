"""`CallStore` without a server: deadlines, lost answers, conditions that are ignored, packages that are missing."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import holdfast
from holdfast.errors import ConfigError, StorageError
from holdfast.storage import fsspec_store
from holdfast.storage.fsspec_store import CallStore, Row, Source, errno_of
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import PutInDoubt
from holdfast.validation import located


class Fake:
    """`Files` in a dictionary; `before` is called with the name of each call, and may raise or wait."""

    refusal = ""
    has_tags = True

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.before: Callable[[str], None] = lambda _call: None
        self.after: Callable[[str], None] = lambda _call: None
        self.keeps_conditions = True

    def read(self, name: str, start: int, end: int | None) -> bytes:
        self.before("read")
        try:
            return self.data[name][start:end]
        except KeyError as error:
            raise FileNotFoundError(name) from error

    def look(self, name: str) -> Row:
        self.before("look")
        return Row(name, len(self.read(name, 0, None)), 1.0, is_file=True)

    def below(self, name: str, *, deep: bool) -> Iterable[Row]:
        del name, deep
        return [Row(key, len(data), 1.0, is_file=True) for key, data in self.data.items()]

    def put(self, name: str, data: bytes) -> None:
        self.before("put")
        self.data[name] = data

    def create(self, name: str, data: bytes) -> None:
        self.before("create")
        with self.lock:
            if name in self.data and self.keeps_conditions:
                raise FileExistsError(name)
            self.data[name] = data
        self.after("create")

    def tag(self, name: str) -> str | None:
        return str(hash(self.read(name, 0, None)))

    def replace(self, name: str, data: bytes, tag: str) -> None:
        if self.tag(name) != tag:
            raise RuntimeError("status_code: 412")
        self.data[name] = data

    def upload(self, name: str, source: Source) -> None:
        parts = []
        while part := source.read(8 << 20):
            self.before("part")
            parts.append(part)
        self.data[name] = b"".join(parts)

    def copy(self, name: str, to: str) -> None:
        self.data[to] = self.data[name]

    def remove(self, names: list[str]) -> None:
        for name in names:
            self.data.pop(name, None)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def store(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> CallStore:
    monkeypatch.setattr(fsspec_store, "_client_of", lambda *_: None)
    monkeypatch.setattr(fsspec_store, "_MscFiles", lambda _client, _url: fake)
    return CallStore("msc://fake/run")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def once(error: BaseException) -> Callable[[str], None]:
    """Raise ``error`` at the first call."""
    left = [error]

    def fail(_call: str) -> None:
        if left:
            raise left.pop()

    return fail


@pytest.mark.parametrize("call", ["get", "put", "create", "upload"])
def test_a_call_that_hangs_is_left_behind_at_its_deadline(store: CallStore, fake: Fake, call: str) -> None:
    waiting = threading.Event()

    def hang(_call: str) -> None:
        waiting.wait(30)

    fake.before = hang
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("a", ends_s=soon(1.5)),
        "put": lambda: store.put("a", b"1", ends_s=soon(1.5)),
        "create": lambda: store.create("a", b"1", ours=b"1".__eq__, ends_s=soon(1.5)),
        "upload": lambda: store.put("a", bytes(9 << 20), ends_s=soon(1.5)),
    }
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match="no answer") as caught:
        calls[call]()
    assert time.monotonic() - begun_s < 15.0  # of 30
    assert caught.value.errno == errno.ETIMEDOUT
    waiting.set()
    if call == "upload":  # what it has left behind reads no more, and stores nothing
        time.sleep(0.2)
        assert fake.data == {}


def test_failures_that_pass_are_tried_again(store: CallStore, fake: Fake) -> None:
    fake.data["a"] = b"1"
    fake.before = once(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert bytes(store.get("a", ends_s=soon())[0]) == b"1"
    fake.before = once(RuntimeError("status_code: 503"))
    store.put("b", b"2", ends_s=soon())
    fake.before = once(TimeoutError())
    store.put("c", bytes(20 << 20), ends_s=soon())
    assert (fake.data["b"], len(fake.data["c"])) == (b"2", 20 << 20)
    fake.before = once(PermissionError("denied"))
    with pytest.raises(StorageError, match="check the credentials"):
        store.get("a", ends_s=soon())


def test_a_lost_answer_is_told_by_what_is_there(store: CallStore, fake: Fake) -> None:
    fake.after = once(ConnectionResetError("reset"))
    assert store.create("a", b"mine", ours=b"mine".__eq__, ends_s=soon())
    fake.before = once(ConnectionResetError("reset"))
    assert not store.create("a", b"other", ours=b"other".__eq__, ends_s=soon())
    assert fake.data["a"] == b"mine"

    def never(call: str) -> None:
        if call == "create":
            raise ConnectionResetError("reset")

    fake.before = never
    with pytest.raises(PutInDoubt, match="can't be told"):
        store.create("b", b"mine", ours=b"mine".__eq__, ends_s=soon(1.0))


def test_only_what_was_read_is_replaced(store: CallStore, fake: Fake) -> None:
    store.create("a", b"1", ours=b"1".__eq__, ends_s=soon())
    tag = store.get_tagged("a", ends_s=soon())[2]
    assert store.replace("a", b"2", tag, ours=b"2".__eq__, ends_s=soon())
    assert not store.replace("a", b"3", tag, ours=b"3".__eq__, ends_s=soon())
    assert fake.data["a"] == b"2"


def test_a_store_that_ignores_the_condition_is_refused(store: CallStore, fake: Fake) -> None:
    ObjectStorage(store).make_root()
    fake.keeps_conditions = False
    fresh = CallStore("msc://another/run")
    with pytest.raises(ConfigError, match="If-None-Match"):
        ObjectStorage(fresh).make_root()
    fake.before = lambda call: (_ for _ in ()).throw(NotImplementedError("not here")) if call == "create" else None
    with pytest.raises(ConfigError, match=r"on condition \(not here\)"):
        ObjectStorage(fresh).make_root()


def test_what_ends_an_upload_is_raised_and_nothing_is_stored(store: CallStore, fake: Fake) -> None:
    sizes: list[int] = []

    def stop(nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) == 2:
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        store.put("a", bytes(20 << 20), ends_s=soon(), before_part=stop)
    assert sizes == [8 << 20, 8 << 20]
    assert fake.data == {}


def test_an_upload_that_fails_is_discarded_not_finished() -> None:
    """A file of fsspec that is collected while it is open finishes itself with what it has."""
    told: list[str] = []

    class File:
        closed = False

        def write(self, _data: bytes) -> None:
            told.append("write")

        def close(self) -> None:
            told.append("close")

        def discard(self) -> None:
            told.append("discard")

    class FileSystem:
        file = File()

        def open(self, *_: object, **__: object) -> File:
            return self.file

    def stop(_nbytes: int) -> None:
        if told:
            raise KeyError("stopped")

    files = fsspec_store._FsspecFiles((FileSystem(), "bucket"), "fsspec+s3://bucket/run")
    with pytest.raises(KeyError):
        files.upload("a", Source(memoryview(bytes(20 << 20)), stop))
    assert told == ["write", "discard"]
    assert FileSystem.file.closed


class Answer(Exception):
    """An error of botocore's kind."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class EndpointConnectionError(Exception):
    """Named as botocore's."""


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("a"), errno.ENOENT),
        (caused(FileNotFoundError("a"), Answer(404, "NoSuchBucket")), errno.ENODEV),
        (FileExistsError("a"), errno.EEXIST),
        (caused(OSError(errno.EINVAL, "x"), Answer(412, "PreconditionFailed")), errno.EEXIST),
        (caused(OSError(errno.EBUSY, "x"), Answer(409, "ConditionalRequestConflict")), errno.EAGAIN),
        (caused(OSError(errno.EINVAL, "x"), Answer(416, "InvalidRange")), errno.ERANGE),
        (caused(OSError(errno.EBUSY, "x"), Answer(503, "SlowDown")), errno.EAGAIN),
        (caused(OSError(errno.EINVAL, "x"), Answer(400, "BadDigest")), errno.EBADMSG),
        (Answer(400, "ExpiredToken"), errno.EACCES),
        (Answer(400, "InvalidArgument"), errno.EINVAL),
        (RuntimeError("Failed to GET: status_code: 500, error_type: ClientError"), errno.EAGAIN),
        (RuntimeError("Failed to GET: status_code: 501"), errno.EINVAL),
        (caused(RuntimeError("Failed"), EndpointConnectionError("no route")), errno.EHOSTUNREACH),
        (TimeoutError("slow"), errno.ETIMEDOUT),
        (PermissionError("no"), errno.EACCES),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (ValueError("what"), errno.EINVAL),
    ],
)
def test_errors_of_packages_have_errnos(error: BaseException, expected: int) -> None:
    assert errno_of(error) == expected


@pytest.mark.parametrize(
    ("url", "missing", "extra"),
    [
        ("fsspec+s3://bucket/run", "fsspec.core", r"pip install 'holdfast\[fsspec\]'"),
        ("msc://profile/run", "multistorageclient", r"pip install 'holdfast\[msc\]'"),
    ],
)
def test_a_missing_package_is_named(url: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    fsspec_store._client_of.cache_clear()
    state = {"w": torch.zeros(1)}
    for ask in (
        lambda: open_storage(url),
        lambda: holdfast.open(f"{url}/one"),
        lambda: holdfast.save(state, f"{url}/a"),
    ):
        with pytest.raises(ConfigError, match=extra):
            ask()


def test_urls_that_nobody_knows_are_refused() -> None:
    for url in (
        "ftp://host/x",
        "sftp://host/x",
        "fsspec+://x/y",
        "fsspec+s3://",
        "msc://",
        "msc://a/../b",
        "fsspec://a",
    ):
        with pytest.raises(ConfigError, match="can't be used"):
            located(url)
    with pytest.raises(ConfigError, match="Protocol not known"):
        open_storage("fsspec+nosuch://x/y")
    assert located("msc://profile/run/") == "msc://profile/run"
    assert located("fsspec+s3://bucket/run/") == "fsspec+s3://bucket/run"
    assert open_storage("fsspec+memory://bucket/run").root == "fsspec+memory://bucket/run"


@pytest.fixture
def in_memory(tmp_path: Path) -> str:
    """A checkpoint that was put into fsspec's memory of this process."""
    holdfast.save({"w": torch.arange(3e5)}, tmp_path / "one")
    files = fsspec.filesystem("memory")
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            files.pipe_file(f"/bucket/run/{path.relative_to(tmp_path)}", path.read_bytes())
    yield "fsspec+memory://bucket/run"
    files.rm("/bucket", recursive=True)


def test_any_file_system_is_read_and_those_without_the_condition_are_not_written_to(in_memory: str) -> None:
    found = {"w": torch.zeros(300_000)}
    holdfast.load(found, f"{in_memory}/one")
    assert torch.equal(found["w"], torch.arange(3e5))
    assert holdfast.open(f"{in_memory}/one").verify().ok
    with pytest.raises(ConfigError, match="MemoryFileSystem can't create a file only if it is absent; use s3://"):
        holdfast.save(found, f"{in_memory}/two")
    with pytest.raises(ConfigError, match="can be read, but not written to"):
        holdfast.CheckpointManager(in_memory, found)
    assert open_storage(in_memory).list_dir("") == ["one"]
