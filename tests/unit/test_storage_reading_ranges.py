"""How much of a file is read for a range of it: whole extents where they are hashed, else what was asked for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import xxhash

from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.storage.reading import OPEN_FILES_MAX, FileSet, Piece, StoredFile

SIZE = 3 * EXTENT_BYTES + 5000


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = os.urandom(SIZE)
    (tmp_path / "f").write_bytes(data)
    return data


def files(directory: Path, content: bytes, *, verify: bool = True, sums: bool = True, size: int = SIZE) -> FileSet:
    parts = [content[at : at + EXTENT_BYTES] for at in range(0, len(content), EXTENT_BYTES)]
    extents = b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts) if sums else None
    stored = {"f": StoredFile("f", size, extents)}
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
        pieces = [Piece(start, memoryview(halves[0])), Piece(middle, memoryview(halves[1]))]
        opened.read(opened.jobs_for("f", [piece for piece in pieces if piece.memory]))
        assert b"".join(halves) == content[start:end]


def test_unverified_reading_goes_straight_to_memory(tmp_path: Path, content: bytes) -> None:
    memory = bytearray(100)
    with files(tmp_path, content, sums=False) as opened:
        opened.read_unverified("f", 77, memoryview(memory))
        assert (bytes(memory), opened.bytes_read) == (content[77:177], 100)


@pytest.mark.parametrize(("start", "nbytes"), [(SIZE - 3, 4), (SIZE + 1, 0), (-1, 2)])
def test_ranges_outside_a_file_are_corruption(tmp_path: Path, content: bytes, start: int, nbytes: int) -> None:
    with files(tmp_path, content, sums=False) as opened:
        with pytest.raises(CheckpointCorrupt, match="were to be read"):
            opened.read_unverified("f", start, memoryview(bytearray(nbytes)))
        with pytest.raises(CheckpointCorrupt, match="were to be read"):
            opened.read_span("f", start, start + nbytes)


def test_a_file_that_is_gone_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").unlink()
    for size in (SIZE, -1):
        with (
            files(tmp_path, content, sums=False, size=size) as opened,
            pytest.raises(CheckpointCorrupt, match="f is missing"),
        ):
            opened.read_span("f", 0, 1)


def test_few_files_are_open_at_a_time_however_many_are_read(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
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
            for job in (*opened.jobs_for(str(number), [Piece(0, memoryview(memory[number]))]), look)
        ]
        opened.read(jobs)
        assert bytes(opened.read_span("0", 0, 4)) == b"0000"  # opened again
    assert memory == [b"%04d" % number for number in range(count)]
    assert OPEN_FILES_MAX <= most <= OPEN_FILES_MAX + 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_interrupt_waits_for_no_job_that_has_not_begun(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.storage.reading.wait", interrupted)
    with files(tmp_path, content) as opened, pytest.raises(KeyboardInterrupt):
        opened.read([lambda: (time.sleep(0.05), ran.append(1))[1] for _ in range(100)])
    assert len(ran) < 5
