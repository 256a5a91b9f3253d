"""The executor when several ranks write parts of one file: order, odd ends, small files, failures."""

import errno
import itertools
import os
import threading

import pytest
import xxhash

from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Progress, WriteOptions, write_files
from holdfast.engine.messages import AddPlan, FileRow
from holdfast.engine.syscalls import SystemCalls
from holdfast.errors import StorageError
from holdfast.format.manifest import BLOCK_BYTES, FilePart, join, parts_in
from holdfast.testing.parts import SharedSample

MB = 1 << 20
SIZES = {"model-00001-of-00002.safetensors": 7 * MB + 1234, "small": 3001, "tiny": 1, "even": 3 * MB, "page": 4096}


class Faulty(SystemCalls):
    """Real calls, recorded; one kind of them may fail as configured."""

    def __init__(self, **faults):
        self.faults = faults
        self.log = []
        self.lock = threading.Lock()

    def _hit(self, call, *details):
        with self.lock:
            self.log.append((call, *details))
            fault = self.faults.get(call)
            count = sum(entry[0] == call for entry in self.log)
        if callable(fault):
            fault = fault(count)
        if fault:
            raise OSError(fault, os.strerror(fault))

    def create(self, dir_fd, name, *, direct):
        self._hit("create", name)
        return super().create(dir_fd, name, direct=direct)

    def open_shared(self, dir_fd, name, *, direct):
        self._hit("open_direct" if direct else "open_buffered", name)
        return super().open_shared(dir_fd, name, direct=direct)

    def allocate_part(self, fd, offset, nbytes):
        self._hit("allocate_part", offset, nbytes)
        if not self.faults.get("no_fallocate"):
            super().allocate_part(fd, offset, nbytes)

    def pwrite(self, fd, data, offset):
        self._hit("pwrite", offset, len(data))
        limit = self.faults.get("short")
        return super().pwrite(fd, data[:limit] if limit else data, offset)

    def fsync(self, fd):
        self._hit("fsync")
        super().fsync(fd)

    def fsync_dir(self, fd):
        self._hit("fsync_dir")
        super().fsync_dir(fd)

    def unlink(self, dir_fd, name):
        self._hit("unlink", name)
        super().unlink(dir_fd, name)


def opened_below(path):
    """Descriptors of this process on files below ``path``."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [link for link in links if link.startswith(f"{path}/")]


@pytest.fixture
def directory(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    threads = threading.active_count()
    yield fd
    assert threading.active_count() <= threads
    assert opened_below(tmp_path) == []
    os.close(fd)


@pytest.fixture
def make():
    made = []

    def make(*args, **kwargs):
        made.append(SharedSample(*args, **kwargs))
        return made[-1]

    yield make
    for sample in made:
        sample.close()


def write(sample, rank, directory, calls=None, progress=None, **options):
    options = WriteOptions(**options)
    return write_files(
        directory, sample.views[rank], sample.plan(rank), options, progress=progress, calls=calls or SystemCalls()
    )


def sums_of(content):
    starts = range(0, len(content), BLOCK_BYTES)
    digests = (xxhash.xxh3_64_intdigest(content[at : at + BLOCK_BYTES]) for at in starts)
    return b"".join(digest.to_bytes(8, "little") for digest in digests)


def check(sample, tmp_path, written):
    """Check the files, and the ranks' reports about them, each alone and all together."""
    sample.check_files(tmp_path)
    for rank, found in enumerate(written):
        assert sorted(parts_in(found.files)) == sorted(sample.parts[rank])
        assert found.nbytes == sum(part.size for part in sample.parts[rank])
        assert found.tensor_sums == b""
    for file in join(file for found in written for file in found.files):
        assert file.gaps == ()
        assert file.extents == sums_of(sample.contents[file.name]), file.name


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_may_write_in_any_order(make, directory, tmp_path, order, direct):
    sample = make(SIZES, 3, seed=1)
    written = {rank: write(sample, rank, directory, direct=direct) for rank in order}
    check(sample, tmp_path, [written[rank] for rank in range(3)])
    if not direct:
        assert not any(found.direct for found in written.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("writers", [1, 3])
def test_ranks_may_write_at_once(make, directory, tmp_path, seed, writers):
    sample = make(SIZES, 4, seed=seed)
    written = [None] * 4

    def run(rank):
        written[rank] = write(sample, rank, directory, writers=writers)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    check(sample, tmp_path, written)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, MB - 1, MB, MB + 1, 2 * MB + 4096, 2 * MB + 8191])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_ends_where_it_should(make, directory, tmp_path, size, direct):
    sample = make({"a": size}, 2, seed=size)
    progress = [Progress(), Progress()]
    written = [write(sample, rank, directory, progress=progress[rank], direct=direct) for rank in range(2)]
    check(sample, tmp_path, written)
    assert os.path.getsize(tmp_path / "a") == size
    assert sum(found.written for found in progress) == size


def test_a_file_has_its_size_before_the_first_byte(make, directory, tmp_path):
    """Writes that extend a file wait for each other."""
    sizes = {"a": 3 * MB + 5}
    sample = make(sizes, 2, parts=[[FilePart("a", 0, MB, sizes["a"])], [FilePart("a", MB, 2 * MB + 5, sizes["a"])]])
    with pytest.raises(StorageError):
        write(sample, 0, directory, Faulty(pwrite=errno.EIO))
    assert os.path.getsize(tmp_path / "a") == sizes["a"]


@pytest.mark.parametrize("direct", [True, False])
def test_only_the_ranks_own_parts_are_touched(make, directory, tmp_path, direct):
    sample = make({"a": 5 * MB + 777}, 2, seed=3)
    before = bytes([7]) * len(sample.contents["a"])
    (tmp_path / "a").write_bytes(before)
    for rank in range(2):
        write(sample, rank, directory, direct=direct)
        expected = bytearray(before)
        for part in itertools.chain(*sample.parts[: rank + 1]):
            expected[part.offset : part.end] = sample.contents["a"][part.offset : part.end]
        assert (tmp_path / "a").read_bytes() == expected


def test_blocks_are_allocated_only_for_the_ranks_own_parts(make, directory):
    sample = make({"a": 5 * MB + 777, "b": 10}, 2, seed=3)
    calls = Faulty()
    write(sample, 0, directory, calls)
    reserved = sum(entry[2] for entry in calls.log if entry[0] == "allocate_part")
    assert reserved == sum(part.size for part in sample.parts[0] if not part.is_whole)
    first = next(number for number, entry in enumerate(calls.log) if entry[0] == "pwrite")
    assert all(entry[0] != "allocate_part" for entry in calls.log[first:])


def test_writes_are_aligned_but_for_the_last(make, directory, tmp_path):
    sample = make({"a": 3 * MB + 777}, 1)
    # The whole of a file that is one rank's is created, and never opened.
    calls = Faulty()
    write(sample, 0, directory, calls)
    assert [entry[0] for entry in calls.log if entry[0].startswith(("create", "open"))] == ["create"]
    odd = [entry for entry in calls.log if entry[0] == "pwrite" and (entry[1] % 4096 or entry[2] % 4096)]
    assert odd == [("pwrite", 3 * MB, 777)]
    sample.check_files(tmp_path)


def test_without_fallocate_it_is_the_same(make, directory, tmp_path):
    sample = make(SIZES, 2, seed=2)
    check(sample, tmp_path, [write(sample, rank, directory, Faulty(no_fallocate=True)) for rank in range(2)])


def test_direct_refused_on_open_is_buffered_and_nothing_removed(make, directory, tmp_path):
    sample = make({"a": 5 * MB + 777}, 2, seed=3)
    first = write(sample, 0, directory)
    calls = Faulty(open_direct=errno.EINVAL)
    second = write(sample, 1, directory, calls)
    check(sample, tmp_path, [first, second])
    assert not second.direct
    assert [entry for entry in calls.log if entry[0] == "unlink"] == []


def test_direct_refused_on_write_is_buffered(make, directory, tmp_path):
    sample = make(SIZES, 2, seed=4)
    calls = Faulty(pwrite=lambda count: errno.EINVAL if count == 1 else 0)
    written = [write(sample, 0, directory, calls), write(sample, 1, directory)]
    check(sample, tmp_path, written)
    assert not written[0].direct


@pytest.mark.parametrize(("short", "direct"), [(8192, True), (1_000_001, False), (5, False)])
def test_short_writes_are_continued(make, directory, tmp_path, short, direct):
    sizes = {"a": 2 * MB + 777, "b": 100} if short > 5 else {"a": 777, "b": 100}
    sample = make(sizes, 2, seed=5)
    calls = [Faulty(short=short) for _ in range(2)]
    check(sample, tmp_path, [write(sample, rank, directory, calls[rank], direct=direct) for rank in range(2)])


def test_a_tail_written_in_parts_is_complete(make, directory, tmp_path):
    sample = make({"a": MB + 777}, 2, parts=[[FilePart("a", 0, MB, MB + 777)], [FilePart("a", MB, 777, MB + 777)]])
    written = [write(sample, 0, directory), write(sample, 1, directory, Faulty(short=100))]
    check(sample, tmp_path, written)


@pytest.mark.parametrize("call", ["allocate_part", "pwrite", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_refusal_names_file_and_errno(make, directory, tmp_path, call, number):
    sample = make({"a": 5 * MB + 777}, 2, seed=3)
    write(sample, 0, directory)
    with pytest.raises(StorageError) as caught:
        write(sample, 1, directory, Faulty(**{call: number}))
    assert caught.value.errno == number
    assert caught.value.path == str(tmp_path / "a")
    assert f"of a file of {5 * MB + 777}" in str(caught.value)
    # What the other rank has written is still there.
    content = (tmp_path / "a").read_bytes()
    for part in sample.parts[0]:
        assert content[part.offset : part.end] == sample.contents["a"][part.offset : part.end]


def test_a_full_disk_is_noticed_before_the_first_byte(make, directory):
    own = [FilePart(name, 0, MB, 2 * MB) for name in "ab"]
    sample = make({"a": 2 * MB, "b": 2 * MB}, 1, parts=[own])
    calls = Faulty(allocate_part=lambda count: errno.ENOSPC if count == 2 else 0)
    with pytest.raises(StorageError):
        write(sample, 0, directory, calls)
    assert "pwrite" not in [entry[0] for entry in calls.log]


def test_every_file_and_the_directory_are_fsynced_by_every_rank(make, directory):
    sample = make(SIZES, 3, seed=6)
    for rank in range(3):
        calls = Faulty()
        write(sample, rank, directory, calls)
        names = {part.name for part in sample.parts[rank]}
        assert [entry[0] for entry in calls.log].count("fsync") == len(names)
        assert calls.log[-1] == ("fsync_dir",)


def test_a_file_that_is_longer_than_it_may_be_is_refused(make, directory, tmp_path):
    sample = make({"a": 2 * MB + 1}, 2, parts=[[FilePart("a", 0, MB, 2 * MB + 1)], []])
    (tmp_path / "a").write_bytes(bytes(2 * MB + 2))
    with pytest.raises(StorageError) as caught:
        write(sample, 0, directory)
    assert caught.value.errno == errno.EFBIG
    assert os.path.getsize(tmp_path / "a") == 2 * MB + 2


def test_a_link_is_not_followed(make, directory, tmp_path):
    sample = make({"a": 2 * MB}, 2, parts=[[FilePart("a", 0, MB, 2 * MB)], []])
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        write(sample, 0, directory)
    assert not (tmp_path / "elsewhere").exists()


def test_a_whole_file_of_one_rank_is_not_opened_if_it_exists(make, directory, tmp_path):
    sample = make({"a": 100}, 1)
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(StorageError) as caught:
        write(sample, 0, directory)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_a_rank_without_parts_writes_nothing(make, directory, tmp_path):
    sample = make({"a": 100}, 2, parts=[[FilePart("a", 0, 100, 100)], []])
    assert write(sample, 1, directory).files == ()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs")
def test_on_tmpfs_it_is_the_same(make, tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        fd = os.open(path, os.O_RDONLY)
        try:
            sample = make(SIZES, 3, seed=8)
            check(sample, path, [write(sample, rank, fd) for rank in range(3)])
        finally:
            os.close(fd)


# plans -----------------------------------------------------------------------------------------------------------


def compiled(rows, **options):
    return compile_plan(AddPlan(1, tuple(rows), b"", b"", b""), **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([FileRow("a", MB, 0, 4096, 2 * MB)], "multiple"),
        ([FileRow("a", 4096, 0, 0, 2 * MB)], "multiple"),
        ([FileRow("a", 2 * MB, 0, MB, 2 * MB)], "don't lie in"),
        ([FileRow("a", 0, 0, 0, 2 * MB)], "empty"),
        ([FileRow("a", MB, 100, 0, 2 * MB)], "off a multiple of 4096"),
        ([FileRow("a", MB, 0, 0, 2 * MB), FileRow("a", MB, MB, 0, 2 * MB)], "don't fit together"),
        ([FileRow("a", 2 * MB, 0, 0, 3 * MB), FileRow("a", 2 * MB, 2 * MB, MB, 3 * MB)], "don't fit together"),
        ([FileRow("a", MB, 0, 0, 2 * MB), FileRow("a", MB, MB, MB, 3 * MB)], "don't fit together"),
        ([FileRow("a", MB, 0, 0, 2 * MB), FileRow("b", MB, MB)], "whole files"),
        ([FileRow("a", MB, 0, 0, 2 * MB), FileRow("b", MB, 4096, 0, 2 * MB)], "overlaps"),
    ],
)
def test_invalid_parts_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        compiled(rows)


def test_a_large_part_is_hashed_by_several_threads():
    plan = compiled([FileRow("a", 10 * MB + 5, 4096, 2 * MB, 12 * MB + 5)], unit_bytes=3 * MB)
    assert [(unit.start - 4096, unit.end - 4096) for unit in plan.units] == [
        (0, 3 * MB),
        (3 * MB, 6 * MB),
        (6 * MB, 9 * MB),
        (9 * MB, 10 * MB + 5),
    ]
