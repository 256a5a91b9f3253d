"""The executor under every failure of a system call, injected in front of the real file system."""

import errno
import os
import threading
import time

import pytest
import xxhash

from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Progress, Stopped, Throttle, WriteOptions, write_files, write_report
from holdfast.engine.syscalls import SystemCalls
from holdfast.errors import StorageError
from holdfast.testing.engine import Sample

MB = 1 << 20


class Faulty(SystemCalls):
    """Real calls, except that one kind of them fails as configured."""

    def __init__(self, **faults):
        self.faults = faults
        self.log = []
        self.lock = threading.Lock()

    def _hit(self, call):
        with self.lock:
            self.log.append(call)
            fault = self.faults.get(call)
            count = self.log.count(call)
        if callable(fault):
            fault = fault(count)
        if fault:
            raise OSError(fault, os.strerror(fault))

    def create(self, dir_fd, name, *, direct):
        if direct:
            self._hit("create_direct")
        self._hit("create")
        return super().create(dir_fd, name, direct=direct)

    def allocate(self, fd, nbytes):
        self._hit("allocate")
        super().allocate(fd, nbytes)

    def pwrite(self, fd, data, offset):
        self._hit("pwrite")
        limit = self.faults.get("short")
        return super().pwrite(fd, data[:limit] if limit else data, offset)

    def make_buffered(self, fd):
        self._hit("make_buffered")
        super().make_buffered(fd)

    def fsync(self, fd):
        self._hit("fsync")
        super().fsync(fd)

    def fsync_dir(self, fd):
        self._hit("fsync_dir")
        super().fsync_dir(fd)

    def rename(self, dir_fd, source, target):
        self._hit("rename")
        super().rename(dir_fd, source, target)


@pytest.fixture(scope="module")
def sample():
    sample = Sample([3 * MB, 4096, 0, 20 * MB + 4096])
    yield sample
    sample.close()


@pytest.fixture
def directory(tmp_path, descriptors):
    fd = os.open(tmp_path, os.O_RDONLY)
    threads, fds = threading.active_count(), descriptors()
    yield fd
    assert threading.active_count() == threads
    assert not descriptors() - fds
    os.close(fd)


def write(sample, directory, calls=None, progress=None, **options):
    plan = compile_plan(sample.plan, unit_bytes=4 * MB)
    return write_files(
        directory, sample.view, plan, WriteOptions(**options), progress=progress, calls=calls or SystemCalls()
    )


def check(sample, tmp_path, written):
    sample.check_files(tmp_path)
    assert [file.name for file in written.files] == [row.name for row in sample.rows]
    assert all(file.extents == sample.extent_sums(row) for file, row in zip(written.files, sample.rows, strict=True))
    assert written.tensor_sums == sample.tensor_sums()
    assert written.nbytes == sample.nbytes


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("writers", [1, 4])
def test_the_files_equal_the_image(sample, directory, tmp_path, direct, writers):
    calls, progress = Faulty(), Progress()
    written = write(sample, directory, calls, progress, direct=direct, writers=writers)
    check(sample, tmp_path, written)
    assert progress.written == sample.nbytes
    assert calls.log.count("fsync") == len(sample.rows)
    assert calls.log[-1] == "fsync_dir"
    if not direct:
        assert not written.direct
        assert "create_direct" not in calls.log


def test_direct_refused_on_open_is_buffered(sample, directory, tmp_path):
    calls = Faulty(create_direct=errno.EINVAL)
    written = write(sample, directory, calls)
    check(sample, tmp_path, written)
    assert not written.direct
    assert calls.log.count("create_direct") == 1  # asked once an attempt directory


def test_direct_refused_on_the_first_write_is_buffered(sample, directory, tmp_path):
    written = write(sample, directory, Faulty(pwrite=lambda count: errno.EINVAL if count == 1 else 0))
    check(sample, tmp_path, written)
    assert not written.direct


def test_an_unaligned_image_falls_back_to_buffered(sample, directory, tmp_path):
    shifted = bytearray(sample.nbytes + 1)
    shifted[1:] = sample.view
    written = write_files(directory, memoryview(shifted)[1:], compile_plan(sample.plan), WriteOptions())
    check(sample, tmp_path, written)


def test_short_writes_are_continued(sample, directory, tmp_path):
    check(sample, tmp_path, write(sample, directory, Faulty(short=8192)))


def test_short_writes_off_the_block_are_continued(sample, directory, tmp_path):
    check(sample, tmp_path, write(sample, directory, Faulty(short=1_000_001), direct=False))


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("create", errno.EROFS),
        ("allocate", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("pwrite", errno.ENOSPC),
        ("fsync", errno.EIO),
    ],
)
def test_a_refusal_names_file_and_errno(sample, directory, tmp_path, call, number):
    with pytest.raises(StorageError) as caught:
        write(sample, directory, Faulty(**{call: number}))
    assert caught.value.errno == number
    assert os.path.dirname(caught.value.path) == str(tmp_path)
    assert os.path.basename(caught.value.path) in {row.name for row in sample.rows}
    assert os.strerror(number) in str(caught.value)


def test_a_full_disk_is_noticed_before_the_first_byte(sample, directory):
    calls = Faulty(allocate=errno.ENOSPC)
    with pytest.raises(StorageError):
        write(sample, directory, calls)
    assert "pwrite" not in calls.log


def test_a_failed_fsync_is_final(sample, directory):
    last = len(sample.rows)
    calls = Faulty(fsync=lambda count: errno.EIO if count == last else 0)
    with pytest.raises(StorageError):
        write(sample, directory, calls)
    assert calls.log.count("fsync") == last
    assert "fsync_dir" not in calls.log


def test_a_failed_fsync_of_the_directory_is_a_failure(sample, directory, tmp_path):
    with pytest.raises(StorageError) as caught:
        write(sample, directory, Faulty(fsync_dir=errno.EIO))
    assert caught.value.path == str(tmp_path)


def test_a_zero_byte_write_is_an_error_not_a_loop(sample, directory):
    class Stuck(SystemCalls):
        def pwrite(self, fd, data, offset):
            return 0

    with pytest.raises(StorageError, match="wrote 0 bytes"):
        write(sample, directory, Stuck())


def test_an_existing_file_is_not_touched(sample, directory, tmp_path):
    (tmp_path / sample.rows[1].name).write_bytes(b"mine")
    with pytest.raises(StorageError) as caught:
        write(sample, directory)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / sample.rows[1].name).read_bytes() == b"mine"


def test_a_link_is_not_followed(sample, directory, tmp_path):
    (tmp_path / sample.rows[0].name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        write(sample, directory)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".", "..", "a\0b", "x" * 256])
def test_a_name_can_not_leave_the_directory(sample, directory, name):
    plan = sample.plan.__class__(1, (sample.rows[1].__class__(name, 4096, 0),), b"", b"", b"")
    with pytest.raises(StorageError) as caught:
        write_files(directory, sample.view, compile_plan(plan), WriteOptions())
    assert caught.value.errno == errno.EINVAL


def test_an_image_that_is_too_short_is_refused(sample, directory, tmp_path):
    with pytest.raises(StorageError, match="of an image of 4096"):
        write_files(directory, sample.view[:4096], compile_plan(sample.plan), WriteOptions())
    assert not os.listdir(tmp_path)


def test_stop_ends_the_execution(sample, directory):
    progress = Progress()
    threading.Timer(0.1, progress.stop).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        write(sample, directory, progress=progress, io_limit_bytes_per_s=MB)
    assert time.monotonic() - started < 5
    assert progress.written < sample.nbytes
    time.sleep(0.05)  # the timer's thread


def test_the_byte_budget_holds(sample, directory, tmp_path):
    started = time.monotonic()
    written = write(sample, directory, io_limit_bytes_per_s=46 * MB)
    assert time.monotonic() - started > 0.4
    check(sample, tmp_path, written)


def test_a_throttle_spaces_its_reservations():
    now = [100.0]
    throttle = Throttle(1000, clock=lambda: now[0])
    assert [throttle.reserve(500) for _ in range(3)] == [0.0, 0.5, 1.0]
    now[0] = 110.0
    assert throttle.reserve(500) == 0.0  # what was not used is not saved up
    assert throttle.reserve(500) == 0.5
    assert throttle.chunk_bytes == 4096
    assert Throttle(None).reserve(1 << 40) == 0.0


def test_a_report_is_complete(directory, tmp_path):
    data = os.urandom(100_000)
    size, digest = write_report(directory, "r.report", [data[:5], b"", data[5:]])
    assert (size, digest) == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert os.listdir(tmp_path) == ["r.report"]
    assert (tmp_path / "r.report").read_bytes() == data


@pytest.mark.parametrize("call", ["create", "pwrite", "fsync", "rename"])
def test_a_failed_report_does_not_exist(directory, tmp_path, call):
    with pytest.raises(StorageError) as caught:
        write_report(directory, "r.report", [b"x" * 5000], calls=Faulty(**{call: errno.EIO}))
    assert caught.value.path == str(tmp_path / "r.report")
    assert not (tmp_path / "r.report").exists()


def test_a_refused_report_does_not_exist(directory, tmp_path):
    with pytest.raises(Stopped):
        write_report(directory, "r.report", [b"x"], may_publish=lambda: False)
    assert os.listdir(tmp_path) == []
