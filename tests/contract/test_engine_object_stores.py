"""Engines that write attempts to an object store, whole processes of them: what is there then, and what is not."""

import contextlib
import json
import os
import signal
import sys
import threading
import time

import pytest

from holdfast.engine import messages
from holdfast.engine.client import EngineClient
from holdfast.errors import EngineDied, StorageError
from holdfast.format.manifest import decode_report
from holdfast.storage.leases import decode_record
from holdfast.storage.protocol import WriterTarget
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample

ID = "0123456789ab"
MB = 1 << 20
WAIT_S = 60
REPORT = f"step-1/rank-00000.{ID}.report"
LEASE = f"step-1/lease-00000.{ID}"
MEMORY_MB = 256
"""What an engine may take beside the image."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")


class Bucket:
    """A bucket of its own, by way of the proxy, and what is in it past the proxy."""

    def __init__(self, server, proxy):
        import boto3

        self.name, self.proxy = server.bucket(), proxy
        self._options = proxy.options
        keys = {"aws_access_key_id": "somebody", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=server.endpoint, **keys)

    def target(self, directory="step-1", attempt=ID):
        args = (f"s3://{self.name}/run", directory, attempt, json.dumps(self._options))
        return WriterTarget("holdfast.storage.object_writer", args)

    def names(self):
        found = self.client.list_objects_v2(Bucket=self.name, Prefix="run/").get("Contents", [])
        return sorted(row["Key"].removeprefix("run/") for row in found)

    def read(self, key):
        return self.client.get_object(Bucket=self.name, Key=f"run/{key}")["Body"].read()

    def put(self, key):
        self.client.put_object(Bucket=self.name, Key=f"run/{key}", Body=b"x")

    def uploads(self):
        """The multipart uploads that were begun and not ended."""
        return [row["Key"] for row in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])]

    def check(self, sample):
        """That files and report are those of the sample; the report."""
        report = decode_report(self.read(REPORT), path=REPORT)
        names = [f"__0_{number}.{ID}.distcp" for number in range(len(sample.rows))]
        assert [(file.name, file.size) for file in report.files] == [
            (name, row.size) for name, row in zip(names, sample.rows, strict=True)
        ]
        for name, row, file in zip(names, sample.rows, report.files, strict=True):
            assert self.read(f"step-1/{name}") == sample.view[row.image_offset : row.image_offset + row.size], name
            assert file.extents == sample.extent_sums(row), name
        assert report.tensor_sums == sample.tensor_sums()
        assert self.names() == sorted([REPORT, *(f"step-1/{name}" for name in names)])
        return report


@pytest.fixture
def bucket(object_server, proxy):
    return Bucket(object_server, proxy)


@pytest.fixture(scope="module")
def sample():
    sample = Sample([20 * MB, 0, 4096, 9 * MB])
    yield sample
    sample.close()


@pytest.fixture(scope="module")
def small():
    sample = Sample([4096])
    yield sample
    sample.close()


@pytest.fixture
def engine():
    clients = []

    def start(**limits):
        clients.append(EngineClient(0, **limits))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def persist(client, target, sample, attempt=ID):
    image, plan = sample.register(client)
    names = {"report_name": REPORT_NAME, "lease_name": LEASE_NAME}
    client.persist(target, attempt=attempt, plan=plan, image=image, step=7, world=6, **names)


def wait_until(condition, seconds=WAIT_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_files_and_report_are_stored_under_the_names_of_the_attempt(bucket, engine, sample):
    client = engine()
    persist(client, bucket.target(f"step-1//{ID}"), sample)
    persisted = client.wait_persisted(ID, WAIT_S)
    assert (persisted.nbytes, persisted.direct) == (sample.nbytes, False)
    assert REPORT not in bucket.names(), "the staging is not verified"
    record = decode_record(bucket.read(LEASE))
    assert (record.pid, record.rank) == (client.pid, 0)
    client.staging_verified(ID)
    reported = client.wait_reported(ID, WAIT_S)
    report = bucket.check(sample)
    assert (report.attempt, report.step, report.rank, report.world) == (ID, 7, 0, 6)
    assert reported.size == len(bucket.read(REPORT))
    assert bucket.uploads() == []


def test_a_cancelled_attempt_stores_no_more_and_leaves_no_upload(bucket, engine, sample, small):
    client = engine(io_limit_bytes_per_s=4 * MB, writers=1)
    persist(client, bucket.target(), sample)
    wait_until(lambda: client.progress(ID)[0] > 0)
    began = time.monotonic()
    assert client.cancel(ID) is False
    assert time.monotonic() - began < 2
    wait_until(lambda: not bucket.names() and not bucket.uploads())
    persist(client, bucket.target(attempt="ba9876543210"), small, "ba9876543210")
    client.wait_persisted("ba9876543210", WAIT_S)
    assert not [key for key in bucket.names() if ID in key]


def test_a_cancel_while_the_report_is_put_takes_it_back(bucket, engine, sample):
    client = engine()
    persist(client, bucket.target(), sample)
    client.wait_persisted(ID, WAIT_S)
    reached = threading.Event()

    def rule(method, path):
        if method == "PUT" and path.endswith(".report"):
            reached.set()
            time.sleep(0.5)

    bucket.proxy.rule = rule
    client.staging_verified(ID)
    assert reached.wait(WAIT_S)
    assert client.cancel(ID) is False
    assert REPORT not in bucket.names()


def test_an_engine_that_is_killed_leaves_nothing_but_data_of_its_attempt(bucket, engine, sample, small):
    client = engine(io_limit_bytes_per_s=8 * MB, writers=1)
    persist(client, bucket.target(), sample)
    wait_until(lambda: client.progress(ID)[0] > 8 * MB)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        client.wait_persisted(ID, WAIT_S)
    assert all(f".{ID}" in key and not key.endswith(".report") for key in bucket.names())
    assert f"step-1/__0_0.{ID}.distcp" not in bucket.names(), "it was not whole"
    persist(client, bucket.target(), small)  # the next engine
    client.wait_persisted(ID, WAIT_S)


def test_requests_that_fail_now_and_then_are_sent_again(bucket, engine, sample):
    bucket.proxy.rule = lambda _method, _path: {0: "busy", 3: "before", 6: "after"}.get(len(bucket.proxy.seen) % 9)
    client = engine()
    persist(client, bucket.target(), sample)
    client.staging_verified(ID)
    client.wait_reported(ID, WAIT_S)
    bucket.proxy.rule = lambda _method, _path: None
    wait_until(lambda: LEASE not in bucket.names())
    bucket.check(sample)
    assert client.progress(ID) == (sample.nbytes, sample.nbytes)


def test_wrong_credentials_and_no_bucket_are_told_at_once(bucket, engine, sample):
    client = engine()
    began = time.monotonic()
    bucket.proxy.rule = lambda _method, _path: "denied"
    persist(client, bucket.target(), sample)
    with pytest.raises(StorageError, match="check the credentials"):
        client.wait_persisted(ID, WAIT_S)
    bucket.proxy.rule = lambda _method, _path: None
    bucket.name = "nobody-has-made-it"
    persist(client, bucket.target(), sample, "ba9876543210")
    with pytest.raises(StorageError, match="make the bucket"):
        client.wait_persisted("ba9876543210", WAIT_S)
    assert time.monotonic() - began < 10


def test_a_writer_that_can_not_be_opened_says_why(engine, sample):
    client = engine()
    persist(client, WriterTarget("nobody.has.written.it", ("x",)), sample)
    with pytest.raises(StorageError, match=r"can't open the writer of nobody\.has\.written\.it: ModuleNotFoundError"):
        client.wait_persisted(ID, WAIT_S)


def test_a_part_of_a_file_is_refused(bucket, engine):
    """Ranks can't write parts of one object."""
    with contextlib.closing(Sample([2 * MB])) as sample:
        sample.tensors = []
        sample.rows = [messages.FileRow("model.safetensors", MB, 0, MB, 2 * MB)]
        client = engine()
        persist(client, bucket.target(), sample)
        with pytest.raises(StorageError, match=r"1048576 bytes of a file of 2097152, in 1 part.* whole, by one rank"):
            client.wait_persisted(ID, WAIT_S)
        sample.rows = [
            messages.FileRow("model.safetensors", MB, MB, MB, 2 * MB),
            messages.FileRow("model.safetensors", MB, 0, 0, 2 * MB),
        ]
        persist(client, bucket.target(), sample, "ba9876543210")
        client.wait_persisted("ba9876543210", WAIT_S)
        assert bucket.read("step-1/model.0123456789ab.safetensors") == sample.view


def test_a_ring_is_refused(bucket, engine, sample):
    client = engine()
    image, plan = sample.register(client)
    names = {"report_name": REPORT_NAME, "lease_name": LEASE_NAME}
    client.persist(bucket.target(), attempt=ID, plan=plan, image=image, step=7, world=6, slot_bytes=MB, **names)
    with pytest.raises(StorageError, match="whole images only"):
        client.wait_persisted(ID, WAIT_S)


def test_trash_is_removed_by_the_engine(bucket, engine):
    for key in ("a/one", "a/b/two", "ab/three"):
        bucket.put(key)
    client = engine()
    client.remove(bucket.target("", ""), "a")
    client.wait_removed("a", WAIT_S)
    assert bucket.names() == ["ab/three"]
    bucket.proxy.rule = lambda _method, _path: "denied"
    client.remove(bucket.target("", ""), "ab")
    with pytest.raises(StorageError, match="can't remove ab"):
        client.wait_removed("ab", WAIT_S)


def test_the_bandwidth_is_limited(bucket, engine, sample):
    client = engine(io_limit_bytes_per_s=16 * MB)
    persist(client, bucket.target(), sample)
    persisted = client.wait_persisted(ID, WAIT_S)
    assert persisted.seconds > (sample.nbytes - 8 * MB) / (16 * MB) * 0.9


def test_it_takes_little_memory_beside_the_image(object_server, proxy, engine):
    del proxy
    with contextlib.closing(Sample([320 * MB], tensor_bytes=8 * MB)) as sample:
        bucket = Bucket.__new__(Bucket)
        bucket.name, bucket._options = object_server.bucket(), object_server.options
        client = engine()
        persist(client, bucket.target(), sample)
        peak = 0
        while client.progress(ID)[0] < sample.nbytes or client._attempts[ID].persisted is None:
            with open(f"/proc/{client.pid}/status") as status:
                anon = next(line for line in status if line.startswith("RssAnon"))
            peak = max(peak, int(anon.split()[1]) >> 10)
            with contextlib.suppress(Exception):
                client.wait_persisted(ID, 0.01)
            assert client._attempts[ID].error is None
        assert peak < MEMORY_MB, f"{peak} MiB"
        object_server.request("DELETE", f"/{bucket.name}/run/step-1/__0_0.{ID}.distcp")
