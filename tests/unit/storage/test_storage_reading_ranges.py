"""How much of a file is read for a range of it: whole extents where they are hashed, else what was asked for."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.storage.files import OPEN_FILES_MAX, PageCache, StoredFile
from holdfast.storage.ranged_reads import JOB_BYTES, FileSet, RangedRead

SIZE = 3 * EXTENT_BYTES + 5000


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = os.urandom(SIZE)
    (tmp_path / "f").write_bytes(data)
    return data


def sums_of(content: bytes) -> bytes:
    parts = [content[at : at + EXTENT_BYTES] for at in range(0, len(content), EXTENT_BYTES)]
    return b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)


def files(directory: Path, content: bytes, *, verify: bool = True, sums: bool = True, size: int = SIZE) -> FileSet:
    stored = {"f": StoredFile("f", size, sums_of(content) if sums else None)}
    return FileSet(directory, stored, verify=verify, threads=1, blame=lambda *_: None)


RANGES = [(0, 1), (10, 10), (EXTENT_BYTES - 3, EXTENT_BYTES + 3), (2 * EXTENT_BYTES, SIZE), (SIZE - 1, SIZE)]


@pytest.mark.parametrize(("start", "end"), RANGES)
@pytest.mark.parametrize(("verify", "sums"), [(True, True), (False, True), (True, False)])
def test_spans_and_pieces(tmp_path: Path, content: bytes, start: int, end: int, verify: bool, sums: bool) -> None:
    with files(tmp_path, content, verify=verify, sums=sums) as opened:
        assert bytes(opened.read_span("f", start, end)) == content[start:end]
        whole = min(SIZE, -(-max(end, start + 1) // EXTENT_BYTES) * EXTENT_BYTES) - start // EXTENT_BYTES * EXTENT_BYTES
        assert opened.bytes_read == (whole if verify and sums else end - start)
    with files(tmp_path, content, verify=verify, sums=sums) as opened:
        middle = (start + end) // 2
        halves = [bytearray(middle - start), bytearray(end - middle)]
        pieces = [RangedRead(start, memoryview(halves[0])), RangedRead(middle, memoryview(halves[1]))]
        opened.read(opened.jobs_for("f", [piece for piece in pieces if piece.memory]))
        assert b"".join(halves) == content[start:end]


def test_what_was_just_read_is_not_read_again(tmp_path: Path, content: bytes) -> None:
    with files(tmp_path, content) as opened:
        assert bytes(opened.read_span("f", 10, 20)) == content[10:20]
        assert bytes(opened.read_span("f", EXTENT_BYTES - 5, EXTENT_BYTES)) == content[EXTENT_BYTES - 5 : EXTENT_BYTES]
        assert opened.bytes_read == EXTENT_BYTES
        # Many small pieces go through the same buffer: what it held before is gone.
        memory = [bytearray(10) for _ in range(5)]
        pieces = [RangedRead(EXTENT_BYTES + 20 * at, memoryview(part)) for at, part in enumerate(memory)]
        opened.read(opened.jobs_for("f", pieces))
        assert [bytes(part) for part in memory] == [content[piece.start : piece.end] for piece in pieces]
        assert opened.bytes_read == 2 * EXTENT_BYTES
        assert bytes(opened.read_span("f", 10, 20)) == content[10:20]
        assert opened.bytes_read == 3 * EXTENT_BYTES


def test_spans_lie_on_pages_as_their_files_do(tmp_path: Path, content: bytes) -> None:
    # The kernel copies to anywhere else at a fraction of the speed, on some processors.
    with files(tmp_path, content) as opened:
        span = opened.read_span("f", 4096, 5000)
        assert np.frombuffer(span, dtype=np.uint8).ctypes.data % 4096 == 0


@pytest.mark.parametrize("verify", [True, False])
def test_pieces_with_gaps_cross_extents_and_are_read_once(tmp_path: Path, content: bytes, verify: bool) -> None:
    ranges = [(3, 70_003), (70_003, 140_000), (150_000, EXTENT_BYTES + 9), (2 * EXTENT_BYTES + 7, SIZE)]
    memory = [bytearray(end - start) for start, end in ranges]
    pieces = [RangedRead(start, memoryview(part)) for (start, _), part in zip(ranges, memory, strict=True)]
    with files(tmp_path, content, verify=verify) as opened:
        opened.read(opened.jobs_for("f", pieces))
        assert opened.bytes_read == (SIZE if verify else SIZE - 3)
    assert [bytes(part) for part in memory] == [content[start:end] for start, end in ranges]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("count", [1, 7, 400])
def test_pieces_that_lie_across_two_jobs_are_read_once(tmp_path: Path, verify: bool, count: int) -> None:
    size = JOB_BYTES + EXTENT_BYTES + 5000
    content = np.random.default_rng(count).bytes(size)
    (tmp_path / "f").write_bytes(content)
    cuts = [3 + (size - 3) * at // count for at in range(count + 1)]
    memory = [bytearray(end - start) for start, end in pairwise(cuts)]
    pieces = [RangedRead(start, memoryview(part)) for start, part in zip(cuts, memory, strict=False)]
    with files(tmp_path, content, verify=verify, size=size) as opened:
        jobs = opened.jobs_for("f", pieces)
        assert len(jobs) == 2
        opened.read(jobs)
        assert opened.bytes_read == (size if verify else size - 3)
    assert b"".join(memory) == content[3:]


def test_extents_that_nobody_wants_are_not_read(tmp_path: Path, content: bytes) -> None:
    memory = [bytearray(10), bytearray(10)]
    pieces = [RangedRead(5, memoryview(memory[0])), RangedRead(2 * EXTENT_BYTES, memoryview(memory[1]))]
    with files(tmp_path, content) as opened:
        opened.read(opened.jobs_for("f", pieces))
        assert opened.bytes_read == 2 * EXTENT_BYTES


@pytest.mark.parametrize("flipped", [0, 100_000, EXTENT_BYTES - 1, 3 * EXTENT_BYTES + 100, SIZE - 1])
def test_a_flipped_byte_is_found_wherever_it_lies(tmp_path: Path, content: bytes, flipped: int) -> None:
    damaged = bytearray(content)
    damaged[flipped] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    extent = flipped // EXTENT_BYTES
    with files(tmp_path, content) as opened:
        for size in (SIZE, 100_000, 999):  # one destination, several, many
            memory = bytearray(SIZE)
            pieces = [RangedRead(at, memoryview(memory)[at : at + size]) for at in range(0, SIZE, size)]
            with pytest.raises(CheckpointCorrupt, match="don't match their checksum") as caught:
                opened.read(opened.jobs_for("f", pieces))
            assert caught.value.byte_range == (extent * EXTENT_BYTES, min(SIZE, (extent + 1) * EXTENT_BYTES))


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_cached(path: Path, offset: int) -> bool:
    with path.open("rb") as file:
        return PageCache(file.fileno(), path.stat().st_size).has(offset)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("size", [SIZE, 100_001, 999])
def test_what_is_not_cached_is_read_around_the_cache(tmp_path: Path, content: bytes, verify: bool, size: int) -> None:
    evict(tmp_path / "f")
    if is_cached(tmp_path / "f", 5):
        pytest.skip("this file system keeps nothing outside of the page cache")
    memory = bytearray(SIZE)
    pieces = [RangedRead(at, memoryview(memory)[at : at + size]) for at in range(7, SIZE, size)]
    stored = {"f": StoredFile("f", SIZE, sums_of(content))}
    with FileSet(str(tmp_path), stored, verify=verify, threads=2, blame=lambda *_: None, direct=True) as opened:
        opened.read(opened.jobs_for("f", pieces))
    assert memory[7:] == content[7:]
    assert not any(is_cached(tmp_path / "f", at) for at in range(0, SIZE, 4096))
    (tmp_path / "f").read_bytes()
    assert all(is_cached(tmp_path / "f", at) for at in range(0, SIZE, 4096))


def test_a_flipped_byte_is_found_around_the_cache(tmp_path: Path, content: bytes) -> None:
    damaged = bytearray(content)
    damaged[EXTENT_BYTES + 3] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    evict(tmp_path / "f")
    stored = {"f": StoredFile("f", SIZE, sums_of(content))}
    with (
        FileSet(str(tmp_path), stored, verify=True, threads=2, blame=lambda *_: None, direct=True) as opened,
        pytest.raises(CheckpointCorrupt, match="don't match their checksum") as caught,
    ):
        opened.read(opened.jobs_for("f", [RangedRead(0, memoryview(bytearray(SIZE)))]))
    assert caught.value.byte_range == (EXTENT_BYTES, 2 * EXTENT_BYTES)


def test_where_the_cache_cannot_be_avoided_files_are_read_all_the_same(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file system without O_DIRECT refuses to open with it; there is none here to try.
    monkeypatch.setattr(os, "O_DIRECT", os.O_DIRECTORY)
    evict(tmp_path / "f")
    memory = bytearray(SIZE)
    stored = {"f": StoredFile("f", SIZE, sums_of(content))}
    with FileSet(str(tmp_path), stored, verify=True, threads=2, blame=lambda *_: None, direct=True) as opened:
        opened.read(opened.jobs_for("f", [RangedRead(0, memoryview(memory))]))
    assert memory == content


def test_no_job_is_begun_after_one_has_failed(tmp_path: Path, content: bytes) -> None:
    begun: list[int] = []

    def fail() -> None:
        raise OSError("no")

    with files(tmp_path, content) as opened, pytest.raises(OSError, match="no"):
        opened.read([fail, *(functools.partial(begun.append, number) for number in range(5))])
    assert begun == []


def meet(tmp_path: Path, count: int, *, evicted: bool) -> None:
    """Have ``count`` jobs wait for each other: that takes as many threads."""
    if evicted:
        evict(tmp_path / "f")
        if is_cached(tmp_path / "f", 0):
            pytest.skip("this file system keeps nothing outside of the page cache")
    together = threading.Barrier(count)
    stored = {"f": StoredFile("f", SIZE, None)}
    with FileSet(str(tmp_path), stored, verify=False, threads=count, blame=lambda *_: None) as opened:
        jobs = opened.jobs_for("f", [RangedRead(0, memoryview(bytearray(9)))])
        opened.read([*[functools.partial(together.wait, 20.0)] * count, *jobs])


def test_a_disk_is_read_by_as_many_threads_as_there_are(tmp_path: Path, content: bytes) -> None:
    meet(tmp_path, len(os.sched_getaffinity(0)) + 2, evicted=True)


def test_memory_is_read_by_no_more_threads_than_cores(tmp_path: Path, content: bytes) -> None:
    cores = len(os.sched_getaffinity(0))
    meet(tmp_path, cores, evicted=False)
    seen = set()

    def note() -> None:
        seen.add(threading.get_ident())
        time.sleep(0.02)

    with FileSet(str(tmp_path), {}, verify=False, threads=cores + 2, blame=lambda *_: None) as opened:
        opened.read([note] * (4 * cores))
    assert len(seen) <= cores


def test_unverified_reading_goes_straight_to_memory(tmp_path: Path, content: bytes) -> None:
    memory = bytearray(100)
    with files(tmp_path, content, sums=False) as opened:
        opened.read_unverified("f", 77, memoryview(memory))
        assert (bytes(memory), opened.bytes_read) == (content[77:177], 100)


@pytest.mark.parametrize(("start", "nbytes"), [(SIZE - 3, 4), (SIZE + 1, 0), (-1, 2)])
def test_ranges_outside_a_file_are_corruption(tmp_path: Path, content: bytes, start: int, nbytes: int) -> None:
    with files(tmp_path, content, sums=False) as opened:
        with pytest.raises(CheckpointCorrupt, match="are needed"):
            opened.read_unverified("f", start, memoryview(bytearray(nbytes)))
        with pytest.raises(CheckpointCorrupt, match="are needed"):
            opened.read_span("f", start, start + nbytes)


def test_a_file_that_is_gone_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").unlink()
    for size in (SIZE, -1):
        with (
            files(tmp_path, content, sums=False, size=size) as opened,
            pytest.raises(CheckpointCorrupt, match="f is missing"),
        ):
            opened.read_span("f", 0, 1)


def test_few_files_are_open_at_a_time_however_many_are_read(
    tmp_path: Path, descriptors: Callable[[], frozenset[tuple[str, str]]]
) -> None:
    held, before = descriptors(), len(os.listdir("/proc/self/fd"))
    count = 3 * OPEN_FILES_MAX
    for number in range(count):
        (tmp_path / str(number)).write_bytes(b"%04d" % number)
    stored = {str(number): StoredFile(str(number), 4, None) for number in range(count)}
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    memory = [bytearray(4) for _ in range(count)]
    with FileSet(tmp_path, stored, verify=True, threads=4, blame=lambda *_: None) as opened:
        jobs = [
            job
            for number in range(count)
            for job in (*opened.jobs_for(str(number), [RangedRead(0, memoryview(memory[number]))]), look)
        ]
        opened.read(jobs)
        assert bytes(opened.read_span("0", 0, 4)) == b"0000"  # opened again
    assert memory == [b"%04d" % number for number in range(count)]
    assert OPEN_FILES_MAX <= most <= OPEN_FILES_MAX + 8
    assert not descriptors() - held


@pytest.mark.parametrize("own_job_s", [0.5, 0.0])
def test_an_interrupt_waits_for_no_job_that_has_not_begun(tmp_path: Path, content: bytes, own_job_s: float) -> None:
    """In a job of the caller's own, or while it waits for the jobs of others."""
    ran: list[str] = []
    both = threading.Barrier(2)

    def job() -> None:
        own = threading.current_thread() is threading.main_thread()
        both.wait(20.0)
        time.sleep(own_job_s if own else 0.3)
        ran.append("own" if own else "other")

    stored = {"f": StoredFile("f", SIZE, None)}
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    with FileSet(str(tmp_path), stored, verify=False, threads=2, blame=lambda *_: None) as opened:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            opened.read([job, job] if own_job_s == 0.0 else [job, job, *([functools.partial(ran.append, "late")] * 50)])
    interrupt.join()
    assert ran.count("other") == 1
    assert "late" not in ran
