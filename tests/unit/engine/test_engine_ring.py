"""A plan written through a ring of slots: same bytes and sums as from an image, no slot freed too early, no hang."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from holdfast.engine import messages
from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Progress, Stopped, WriteOptions, write_files
from holdfast.engine.ring import Ring, pieces_of
from holdfast.engine.syscalls import SystemCalls
from holdfast.errors import StorageError
from holdfast.testing.engine import Sample

MB = 1 << 20


@pytest.fixture(scope="module")
def sample():
    sample = Sample([3 * MB, 4096, 0, 21 * MB + 4096], tensor_bytes=300_000)
    yield sample
    sample.close()


@pytest.fixture
def directory(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


class Feeder:
    """Fills free slots from a sample on a thread; `upto` limits it."""

    def __init__(self, sample, slot_bytes, slots, upto=None):
        self.sample, self.slot_bytes, self.slots = sample, slot_bytes, slots
        self.memory = bytearray(slot_bytes * slots)
        self.freed = 0
        self.news = threading.Condition()
        self.ring = Ring(memoryview(self.memory), slot_bytes, self._note_freed)
        self.pieces = pieces_of(sample.rows, slot_bytes)[:upto]
        self.thread = threading.Thread(target=self._feed)

    def _note_freed(self, pieces):
        with self.news:
            assert pieces > self.freed
            self.freed = pieces
            self.news.notify_all()

    def _feed(self):
        for number, piece in enumerate(self.pieces):
            with self.news:
                if not self.news.wait_for(lambda number=number: self.freed > number - self.slots, 10):
                    return
            at = number % self.slots * self.slot_bytes
            self.memory[at : at + self.slot_bytes] = b"\xff" * self.slot_bytes  # what is still read shows
            self.memory[at : at + piece.end - piece.start] = self.sample.view[piece.start : piece.end]
            self.ring.filled(number + 1)


def write(sample, directory, feeder, progress=None, calls=None, **options):
    feeder.thread.start()
    try:
        return write_files(
            directory,
            memoryview(feeder.memory),
            compile_plan(sample.plan, unit_bytes=2 * MB),
            WriteOptions(**options),
            progress=progress,
            calls=calls or SystemCalls(),
            ring=feeder.ring,
        )
    finally:
        with feeder.news:
            feeder.freed = 10**9
            feeder.news.notify_all()
        feeder.thread.join()


@pytest.mark.parametrize(("slot_bytes", "slots"), [(MB, 1), (MB, 3), (4 * MB, 2), (64 * MB, 1)])
@pytest.mark.parametrize("writers", [1, 4])
def test_files_and_sums_are_those_of_an_image(sample, directory, tmp_path, slot_bytes, slots, writers):
    feeder = Feeder(sample, slot_bytes, slots)
    written = write(sample, directory, feeder, writers=writers, piece_bytes=64 << 10)
    sample.check_files(tmp_path)
    assert all(file.extents == sample.extent_sums(row) for file, row in zip(written.files, sample.rows, strict=True))
    assert written.tensor_sums == sample.tensor_sums()


def test_a_byte_budget_cuts_pieces_further(sample, directory, tmp_path):
    feeder = Feeder(sample, 4 * MB, 2)
    write(sample, directory, feeder, io_limit_bytes_per_s=100 * MB)
    sample.check_files(tmp_path)


def test_a_stop_ends_the_wait_for_pieces_that_never_come(sample, directory):
    feeder, progress = Feeder(sample, MB, 2, upto=4), Progress()
    threading.Timer(0.3, progress.stop).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        write(sample, directory, feeder, progress)
    assert time.monotonic() - began < 5


def test_a_write_that_fails_ends_the_wait_for_pieces(sample, directory):
    class Full(SystemCalls):
        def pwrite(self, fd, data, offset):
            if offset >= 2 * MB:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwrite(fd, data, offset)

    with pytest.raises(StorageError) as raised:
        write(sample, directory, Feeder(sample, MB, 2, upto=4), calls=Full())
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("row", "slot_bytes"),
    [
        (messages.FileRow("a", 4097, 0), MB),
        (messages.FileRow("a", 4096, 0, 0, 8192), MB),
        (messages.FileRow("a", 4096, 0), 4096),
        (messages.FileRow("a", 4096, 0), 0),
    ],
)
def test_plans_that_a_ring_cannot_carry_are_refused(row, slot_bytes):
    with pytest.raises(ValueError, match=r"ring|slot"):
        pieces_of([row], slot_bytes)


def test_a_ring_without_whole_slots_is_refused():
    for memory, slot_bytes in ((MB + 1, MB), (0, MB), (MB, 0)):
        with pytest.raises(ValueError, match="slots"):
            Ring(memoryview(bytearray(memory)), slot_bytes, lambda _: None).begin([], threading.Event())
