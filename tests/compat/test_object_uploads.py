"""Uploads to an object store: what each part is sent with, how long one is tried, and what one that ended leaves."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from _object_server import KEYS, Proxy, Server

from holdfast.engine import messages
from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import WriteOptions
from holdfast.engine.write_job import WriteJob, WriteJobInputs
from holdfast.errors import StorageError
from holdfast.storage import object_store, object_writer
from holdfast.storage.leases import decode_record, new_record
from holdfast.storage.object_leases import ObjectLease
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.object_writer import open_writer
from holdfast.storage.protocol import AttemptWriter
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample

ID = "0123456789ab"
LONG_S = 30.0
MB = 1 << 20
DATA = memoryview(bytes(range(256)) * (40 * MB // 256))


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def store(object_server: Server, proxy: Proxy) -> ObjectStore:
    return ObjectStore(f"s3://{object_server.bucket()}/run", proxy.options)


def uploads_in(server: Server, store: ObjectStore) -> list[str]:
    """The multipart uploads of the store's bucket that have not ended."""
    keys = {"aws_access_key_id": "somebody", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=server.endpoint, **keys)
    return [row["Key"] for row in client.list_multipart_uploads(Bucket=store.url.split("/")[2]).get("Uploads", [])]


def puts(proxy: Proxy) -> int:
    return [method for method, _ in proxy.seen].count("PUT")


# checksums -------------------------------------------------------------------------------------------------------


class Picky:
    """A server that stores nothing, refuses requests with some headers, and notes those of the rest."""

    def __init__(self) -> None:
        self.refused: tuple[str, ...] = ()
        self.seen: list[dict[str, str]] = []
        self.status = 400
        self.refuses_all = False
        self.says = "InvalidArgument"
        picky = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                picky.seen.append(headers)
                refused = picky.refuses_all or any(f"x-amz-checksum-{kind}" in headers for kind in picky.refused)
                body = f"<Error><Code>{picky.says}</Code></Error>".encode() if refused else b""
                self.send_response(picky.status if refused else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_POST = do_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Picky]:
    monkeypatch.setattr(object_store, "_weaker", {})
    found = Picky()
    yield found
    found.close()


@pytest.mark.parametrize("status", [400, 501])
@pytest.mark.parametrize(
    ("refused", "header", "payload"),
    [
        ((), "x-amz-checksum-crc64nvme", "UNSIGNED-PAYLOAD"),
        (("crc64nvme",), "x-amz-checksum-sha256", "UNSIGNED-PAYLOAD"),
        (("crc64nvme", "sha256"), "x-amz-content-sha256", None),
    ],
)
def test_a_server_that_refuses_a_checksum_gets_the_next_and_is_remembered(
    picky: Picky, refused: tuple[str, ...], header: str, payload: str | None, status: int, caplog
) -> None:
    picky.refused, picky.status = refused, status
    options = {**KEYS, "endpoint": picky.endpoint}
    with caplog.at_level(logging.WARNING, "holdfast.storage"):
        ObjectStore("s3://b/a", options).put("name", b"data", ends_s=soon())
        tried = len(picky.seen)
        assert tried == 1 + len(refused) or status == 501, "obstore itself repeats what gets a 5xx"
        ObjectStore("s3://b/c", options).put("name", b"data", ends_s=soon())
        assert ObjectStore("s3://b/c", options).create("name", b"data", ours=lambda _: False, ends_s=soon())
    assert len(picky.seen) == tried + 2
    assert len(caplog.records) == bool(refused)
    for headers in picky.seen[-3:]:
        assert header in headers
        signed = headers["x-amz-content-sha256"]
        assert signed == payload if payload else len(signed) == 64


def test_checksums_that_are_asked_for_are_those_that_are_sent(picky: Picky, monkeypatch) -> None:
    options = {**KEYS, "endpoint": picky.endpoint}
    ObjectStore("s3://b/a", {**options, "checksum_algorithm": "SHA256"}).put("name", b"data", ends_s=soon())
    assert "x-amz-checksum-sha256" in picky.seen[-1]
    assert picky.seen[-1]["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "SHA256")
    ObjectStore("s3://b/a", options).put("name", b"data", ends_s=soon())
    assert "x-amz-checksum-sha256" in picky.seen[-1]


def test_a_refusal_for_another_reason_changes_no_checksum(picky: Picky) -> None:
    picky.refuses_all = True
    store = ObjectStore("s3://b/a", {**KEYS, "endpoint": picky.endpoint})
    for act in (
        lambda: store.put("name", b"data", ends_s=soon()),
        lambda: store.create("name", b"data", ours=lambda _: False, ends_s=soon()),
    ):
        with pytest.raises(StorageError, match="InvalidArgument") as error:
            act()
        assert error.value.errno == errno.EINVAL
    assert object_store._weaker == {}


def test_data_that_is_damaged_on_its_way_is_sent_again_with_the_same_checksum(picky: Picky, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 1.0)
    picky.refuses_all, picky.says = True, "BadDigest"
    store = ObjectStore("s3://b/a", {**KEYS, "endpoint": picky.endpoint})
    with pytest.raises(StorageError, match="not what was sent") as error:
        store.put("name", b"data", ends_s=soon())
    assert error.value.errno == errno.EBADMSG
    assert len(picky.seen) > 2
    assert all("x-amz-checksum-crc64nvme" in headers for headers in picky.seen)
    threading.Timer(0.2, lambda: setattr(picky, "refuses_all", False)).start()
    store.put("name", b"data", ends_s=soon())


@pytest.mark.parametrize(
    ("says", "code"),
    [("ExpiredToken", errno.EACCES), ("RequestTimeTooSkewed", errno.EACCES), ("NoSuchBucket", errno.ENODEV)],
)
@pytest.mark.parametrize("size", [4, 9 * MB])
def test_what_no_retry_can_mend_is_told_at_once(picky: Picky, says: str, code: int, size: int) -> None:
    """S3 answers 400 where a token has expired."""
    picky.refuses_all, picky.says = True, says
    store = ObjectStore("s3://b/a", {**KEYS, "endpoint": picky.endpoint})
    with pytest.raises(StorageError, match=says) as error:
        store.put("name", DATA[:size], ends_s=float("inf"))
    assert error.value.errno == code
    assert len(picky.seen) == 1
    assert object_store._weaker == {}


# how long it is tried --------------------------------------------------------------------------------------------


def test_what_before_part_raises_ends_the_upload(store: ObjectStore, object_server: Server) -> None:
    class Enough(Exception):
        pass

    sizes: list[int] = []

    def before_part(nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) == 3:
            raise Enough

    with pytest.raises(Enough):
        store.put("large", DATA, ends_s=soon(), before_part=before_part)
    assert sizes == [8 * MB] * 3
    assert store.size("large", ends_s=soon()) is None
    assert uploads_in(object_server, store) == []
    sizes[:] = [0, 0]
    with pytest.raises(Enough):
        store.put("small", b"data", ends_s=soon(), before_part=before_part)
    assert store.size("small", ends_s=soon()) is None


@pytest.mark.parametrize("fate", ["busy", "before"])
def test_an_upload_without_progress_is_given_up(
    store: ObjectStore, object_server: Server, proxy: Proxy, monkeypatch, fate: str
) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 1.0)
    monkeypatch.setattr(object_store, "PART_S", 0.5)
    monkeypatch.setattr(object_store, "SLOWEST_BYTES_PER_S", 1 << 30)
    proxy.rule = lambda method, _path: fate if method == "PUT" and puts(proxy) > 2 else None
    began = time.monotonic()
    with pytest.raises(StorageError, match="run/large") as error:
        store.put("large", DATA, ends_s=float("inf"))
    assert error.value.errno in object_store.AGAIN
    assert 0.5 < time.monotonic() - began < 10
    assert store.size("large", ends_s=soon()) is None
    assert uploads_in(object_server, store) == []


def test_an_upload_lasts_as_long_as_parts_are_finished(store: ObjectStore, proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 1.0)
    monkeypatch.setattr(object_store, "UPLOADS_AT_A_TIME", 1)
    monkeypatch.setattr(object_store, "PART_S", 1.5)
    monkeypatch.setattr(object_store, "SLOWEST_BYTES_PER_S", 1 << 30)

    def rule(method: str, _path: str) -> None:
        if method == "PUT":
            time.sleep(0.9)

    proxy.rule = rule
    began = time.monotonic()
    store.put("large", DATA, ends_s=float("inf"))
    assert time.monotonic() - began > 5 * 0.9 > 4.0  # the patience: twice what a part may take
    assert store.size("large", ends_s=soon()) == len(DATA)


def test_an_upload_that_the_store_has_forgotten_is_begun_again(
    store: ObjectStore, object_server: Server, proxy: Proxy
) -> None:
    """As where the answer to its end was lost, and the store says there is no such upload."""
    ended: list[str] = []

    def rule(method: str, path: str) -> str | None:
        if method == "POST" and puts(proxy) and not ended:
            ended.append(path)
            return "after"
        return None

    proxy.rule = rule
    store.put("large", DATA, ends_s=soon())
    assert ended
    assert store.get("large", ends_s=soon())[0] == DATA
    assert uploads_in(object_server, store) == []


# the writer and its lease ----------------------------------------------------------------------------------------


def test_objects_have_the_name_of_the_attempt(store: ObjectStore) -> None:
    writer: AttemptWriter = open_writer(store.url, f"step-1//{ID}", ID, json.dumps(dict(store._config)))
    assert writer.path == f"{store.url}/step-1"
    assert writer.stored_as("__0_0.distcp") == f"__0_0.{ID}.distcp" == writer.stored_as(f"__0_0.{ID}.distcp")
    writer.upload("__0_0.distcp", memoryview(b"data"), before_part=lambda _nbytes: None)
    writer.upload("empty", memoryview(b""), before_part=lambda _nbytes: None)
    writer.put(REPORT_NAME, b"one")
    writer.put(REPORT_NAME, b"two")
    assert store.get(f"step-1/rank-00000.{ID}.report", ends_s=soon())[0] == b"two"
    assert store.size(f"step-1/empty.{ID}", ends_s=soon()) == 0
    writer.remove(REPORT_NAME)
    writer.remove(REPORT_NAME)
    assert store.names("step-1", ends_s=soon()) == [f"__0_0.{ID}.distcp", f"empty.{ID}"]
    root = open_writer(store.url, "", "", json.dumps(dict(store._config)))
    root.remove_tree("step-1")
    assert store.names("", ends_s=soon()) == []


def test_a_lease_is_renewed_and_removed_and_survives_a_store_that_is_down(
    store: ObjectStore, proxy: Proxy, caplog
) -> None:
    lease = ObjectLease(store, f"a/lease-00003.{ID}", new_record(3), renewal_s=0.2)

    def counter() -> int:
        record = decode_record(bytes(store.get(f"a/lease-00003.{ID}", ends_s=soon())[0]))
        assert record is not None
        assert (record.pid, record.rank) == (os.getpid(), 3)
        return record.counter

    def wait_for(condition) -> None:
        end = soon(10.0)
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    wait_for(lambda: counter() >= 2)
    with caplog.at_level(logging.WARNING, "holdfast.storage"):
        proxy.rule = lambda method, _path: "denied" if method == "PUT" else None
        wait_for(lambda: "not renewed now" in caplog.text)
    proxy.rule = lambda _method, _path: None
    seen = counter()
    wait_for(lambda: counter() > seen)
    lease.stop(wait_s=10.0)
    assert store.size(f"a/lease-00003.{ID}", ends_s=soon()) is None
    proxy.rule = lambda _method, _path: "denied"
    with pytest.raises(StorageError, match="check the credentials"):
        ObjectLease(store, "a/lease", new_record(0))


# a job ------------------------------------------------------------------------------------------------------------


class Job:
    """One attempt in this process, and what it has said."""

    def __init__(self, store: ObjectStore, sample: Sample) -> None:
        self.said: list[messages.EngineMessage] = []
        self._news = threading.Condition()
        args = (store.url, "step-1", ID, json.dumps(dict(store._config)))
        writer = {"module": object_writer.__name__, "args": args}
        persist = messages.Persist(ID, 1, 1, 7, 0, 1, REPORT_NAME, LEASE_NAME, **writer)
        options = WriteOptions()
        job = WriteJobInputs(persist, -1, sample.view, lambda: compile_plan(sample.plan), b"an index", options)
        self.attempt = WriteJob(job, self._post)
        self.attempt.start()

    def _post(self, message: messages.EngineMessage) -> None:
        with self._news:
            self.said.append(message)
            self._news.notify_all()

    def wait(self, kind: type) -> messages.EngineMessage:
        with self._news:
            assert self._news.wait_for(lambda: any(isinstance(item, kind) for item in self.said), LONG_S), self.said
            return next(item for item in self.said if isinstance(item, kind))


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    sample = Sample([20 * MB, 4096])
    yield sample
    sample.close()


@pytest.mark.parametrize("last", [".distcp", ".report"])
def test_a_store_that_is_busy_for_ever_fails_the_attempt_in_time(
    store: ObjectStore, proxy: Proxy, sample: Sample, monkeypatch, last: str
) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 1.0)
    monkeypatch.setattr(object_store, "PART_S", 0.5)
    monkeypatch.setattr(object_store, "SLOWEST_BYTES_PER_S", 1 << 30)
    proxy.rule = lambda method, path: "busy" if method != "DELETE" and path.endswith(last) else None
    began = time.monotonic()
    job = Job(store, sample)
    job.attempt.verify()
    failed = job.wait(messages.AttemptFailed)
    assert time.monotonic() - began < 15
    assert isinstance(failed, messages.AttemptFailed)
    assert failed.errno == errno.EAGAIN
    assert "the store is overloaded or down" in failed.detail
    assert failed.path.startswith(f"{store.url}/step-1/")
    assert failed.report_left is (last == ".report"), "a report that was sent may come to exist"
    assert not [key for key in store.names("step-1", ends_s=soon()) if key.endswith(".report")]


def test_a_cancel_ends_an_upload_and_leaves_nothing_of_it(
    store: ObjectStore, object_server: Server, proxy: Proxy, sample: Sample
) -> None:
    """Cancelled while its last part is under way, an object is removed once it is there."""
    reached = threading.Event()

    def rule(method: str, path: str) -> None:
        if method == "POST" and puts(proxy) and path.endswith(".distcp"):
            reached.set()
            time.sleep(0.5)

    proxy.rule = rule
    job = Job(store, sample)
    assert reached.wait(LONG_S)
    assert job.attempt.cancel()
    end = soon(10.0)
    while any(thread.name.startswith("holdfast") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert f"__0_0.{ID}.distcp" not in store.names("step-1", ends_s=soon())
    assert uploads_in(object_server, store) == []
    assert job.said == []


@pytest.mark.parametrize("last", [".distcp", ".report"])
def test_what_comes_after_the_attempt_was_given_up_goes(
    store: ObjectStore, object_server: Server, proxy: Proxy, sample: Sample, last: str
) -> None:
    """By a rank that never learns of it: whoever gave the attempt up has looked for its objects before."""
    storage = ObjectStorage(ObjectStore(store.url, object_server.options))
    place = storage.directory_of("step-1", ID)
    given_up: list[str] = []

    def rule(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(last) and not given_up:
            given_up.append(path)
            assert storage.withdraw(place, "step-1", ID).certain
            storage.remove_tree(place)

    proxy.rule = rule
    job = Job(store, sample)
    job.attempt.verify()
    job.wait(messages.Reported)
    end = soon(10.0)
    while storage.list_dir(place) != [f"holdfast.{ID}.json"]:
        assert time.monotonic() < end, storage.list_dir(place)
        time.sleep(0.05)
    assert given_up
    assert storage.unsettled() == []
