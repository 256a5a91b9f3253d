"""Engines that copy what was published, checked on the way: to a directory and to an object store."""

import contextlib
import errno
import json
import os
import sys

import pytest
import xxhash

from holdfast.engine.client import EngineClient
from holdfast.engine.messages import CopySource
from holdfast.errors import StorageError
from holdfast.format.manifest import decode_report
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.protocol import WriterTarget
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample, persist

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")
MB = 1 << 20
COPY = "ba9876543210"
WAIT_S = 60


@pytest.fixture
def client():
    with contextlib.closing(EngineClient(0, nice=19)) as client:
        yield client


@pytest.fixture
def published(client, tmp_path):
    """A directory with the files and the report of a sample, as an engine wrote them."""
    sample = Sample([20 * MB, 0, 4096, 9 * MB])
    directory = tmp_path / "step-7"
    directory.mkdir()
    image, plan = sample.register(client)
    persist(client, directory, image, plan)
    client.wait_persisted("t1", WAIT_S)
    client.staging_verified("t1")
    client.wait_reported("t1", WAIT_S)
    yield directory, sample
    sample.close()


def copy(client, directory, target, *, digest=None):
    """Copy and return what the engine reports."""
    data = (directory / REPORT_NAME).read_bytes()
    source = CopySource(REPORT_NAME, digest or xxhash.xxh3_128_hexdigest(data))
    fd = os.open(directory, os.O_RDONLY)
    try:
        names = {"report_name": REPORT_NAME, "lease_name": LEASE_NAME}
        client.copy(fd, source, target, attempt=COPY, nbytes=29 * MB + 4096, step=7, rank=0, world=6, **names)
    finally:
        os.close(fd)
    return client.wait_reported(COPY, WAIT_S)


def to_directory(path):
    path.mkdir()
    return WriterTarget("holdfast.engine.directory_writer", (str(path),))


def test_a_copy_in_a_directory_is_the_same_checkpoint_of_another_attempt(client, published, tmp_path):
    directory, sample = published
    found = copy(client, directory, to_directory(tmp_path / "copy"))
    report = sample.check(tmp_path / "copy")
    assert (report.attempt, report.rank, report.world, report.step) == (COPY, 0, 6, 7)
    assert found.nbytes == 29 * MB + 4096
    assert found.size == (tmp_path / "copy" / REPORT_NAME).stat().st_size
    names = [f"__0_{number}.distcp" for number in range(4)]
    assert sorted(os.listdir(tmp_path / "copy")) == sorted([REPORT_NAME, *names]), "no lease and nothing half is left"


def test_a_copy_in_a_bucket_has_its_attempt_in_its_names(client, published, object_server):
    directory, sample = published
    url, options = f"s3://{object_server.bucket()}/run", object_server.options
    target = WriterTarget("holdfast.storage.object_writer", (url, "step-7", COPY, json.dumps(options)))
    copy(client, directory, target)
    storage = ObjectStorage(ObjectStore(url, options))
    data = storage.read_file(f"step-7/rank-00000.{COPY}.report", max_bytes=MB)
    report = decode_report(data, path="")
    for row, file in zip(sample.rows, report.files, strict=True):
        stem = row.name.removesuffix(".distcp")
        assert file.name == f"{stem}.{COPY}.distcp"
        content = sample.view[row.image_offset : row.image_offset + row.size]
        assert storage.read_range(f"step-7/{file.name}", 0, row.size + 1) == content
        assert file.extents == sample.extent_sums(row)
    assert report.index == b"an index"
    assert report.tensor_sums == sample.tensor_sums()


@pytest.mark.parametrize("part", ["data", "report"])
def test_what_is_damaged_on_its_way_is_not_reported(client, published, object_server, proxy, part):
    """By a store that takes any checksum, as some do; the local files are not to blame."""
    directory, _ = published
    name = REPORT_NAME.partition(".")[0] if part == "report" else "__0_3"
    damaged = []

    def once(method, path):
        if method != "PUT" or name not in path or damaged:
            return None
        damaged.append(path)
        return "damage"

    proxy.rule = once
    url = f"s3://{object_server.bucket()}/run"
    target = WriterTarget("holdfast.storage.object_writer", (url, "step-7", COPY, json.dumps(proxy.options)))
    with pytest.raises(StorageError, match=f"{name}.*is not what was sent") as caught:
        copy(client, directory, target)
    assert damaged
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("at", [0, 13 * MB + 5, 20 * MB - 1])
def test_a_damaged_byte_anywhere_leaves_no_report(client, published, tmp_path, at):
    directory, _ = published
    with open(directory / "__0_0.distcp", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match=f"is damaged in bytes {at // MB * MB} to") as caught:
        copy(client, directory, to_directory(tmp_path / "copy"))
    assert caught.value.errno == errno.EBADMSG
    assert not (tmp_path / "copy" / REPORT_NAME).exists()


@pytest.mark.parametrize("what", ["short", "missing", "report"])
def test_what_is_short_or_missing_or_another_report_is_an_error(client, published, tmp_path, what):
    directory, _ = published
    if what == "short":
        os.truncate(directory / "__0_3.distcp", MB)
    elif what == "missing":
        os.unlink(directory / "__0_2.distcp")
    digest = "0" * 32 if what == "report" else None
    with pytest.raises(StorageError) as caught:
        copy(client, directory, to_directory(tmp_path / "copy"), digest=digest)
    assert caught.value.errno == (errno.ENOENT if what == "missing" else errno.EBADMSG)
    assert not (tmp_path / "copy" / REPORT_NAME).exists()
