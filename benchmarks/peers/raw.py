"""The machine's limit: as many bytes as the state has, written, read and copied with nothing around it.

Two threads, `O_DIRECT` where there is such a thing, one fsync of file and directory; system calls and copies take no
interpreter lock. A rank writes and reads the bytes it holds. With several ranks each has a file, and the limit is when
all are done.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.contender import Contender, Pending
from benchmarks.files import sync_below

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.state import BenchState, Shared

CHUNK_BYTES = 8 << 20
PAGE_BYTES = 4096
THREADS = 2


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """``work(0 .. count - 1)`` at once; the first error is raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, count)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def chunks_of(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of a file that lie next to each other, joined, then cut into chunks."""
    joined: list[list[int]] = []
    for offset, size in sorted(ranges):
        if joined and offset - sum(joined[-1]) < PAGE_BYTES:
            joined[-1][1] = max(joined[-1][1], offset + size - joined[-1][0])
        else:
            joined.append([offset, size])
    return [
        (start, min(CHUNK_BYTES, offset + size - start))
        for offset, size in joined
        for start in range(offset, offset + size, CHUNK_BYTES)
    ]


class Raw(Contender):
    """Writes the mapped state itself; what it wrote is laid out as it lies in memory."""

    direct = True
    part = 1.0
    """Of the state's bytes, written."""

    def start(self) -> None:
        self._threads = max(1, THREADS // self.world)

    def save(self, path: Path) -> Pending:
        # Each rank writes a contiguous part of the file image, page by page: this is what it would be at best.
        view = memoryview(self.held_state.shared.map)
        pages = int(len(view) * self.part) // PAGE_BYTES
        first, last = (pages * rank // self.world * PAGE_BYTES for rank in (self.rank, self.rank + 1))
        chunks = [(start, min(CHUNK_BYTES, last - start)) for start in range(first, last, CHUNK_BYTES)]
        path.mkdir(exist_ok=True)
        descriptor = self._open(path / f"{self.rank}.bin")

        def write(number: int) -> None:
            for start, size in chunks[number :: self._threads]:
                done = 0
                while done < size:
                    done += os.pwrite(descriptor, view[start + done : start + size], start - first + done)

        try:
            in_threads(self._threads, write)
        finally:
            os.close(descriptor)
            view.release()
        sync_below(path)
        return Pending()

    def _open(self, path: Path) -> int:
        flags = os.O_CREAT | os.O_WRONLY
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError:
                type(self).direct = False
        return os.open(path, flags, 0o600)

    def load(self, state: BenchState, path: Path) -> None:
        """From what one rank has saved, whatever the world is now: byte for byte the same places."""
        descriptor = os.open(path / "0.bin", os.O_RDONLY)
        view = memoryview(state.shared.map)
        chunks = chunks_of(state.ranges)

        def read(number: int) -> None:
            for start, size in chunks[number :: self._threads]:
                done = 0
                while done < size:
                    got = os.preadv(descriptor, [view[start + done : start + size]], start + done)
                    if got == 0:
                        raise EOFError(f"{path} ends at {start + done}")
                    done += got

        try:
            in_threads(self._threads, read)
        finally:
            os.close(descriptor)
            view.release()

    def read_part(self, name: str, rows: tuple[int, int], path: Path) -> Any:
        entry = next(entry for entry in self.held_state.entries if entry.name == name)
        row_bytes = entry.nbytes // entry.shape[0]
        buffer = bytearray(rows[1] * row_bytes)
        descriptor = os.open(path / "0.bin", os.O_RDONLY)
        try:
            os.preadv(descriptor, [buffer], entry.offset + rows[0] * row_bytes)
        finally:
            os.close(descriptor)
        return torch.frombuffer(buffer, dtype=torch.float32).view(rows[1], *entry.shape[1:])

    def memcpy(self, scratch: Shared) -> float:
        """Seconds to copy what this rank holds to other memory, in two threads that hold no lock."""
        target, source = scratch.bytes.data_ptr(), self.held_state.shared.bytes.data_ptr()
        chunks = chunks_of(self.held_state.ranges)

        def copy(number: int) -> None:
            for start, size in chunks[number :: self._threads]:
                ctypes.memmove(target + start, source + start, size)

        begin = time.perf_counter()
        in_threads(self._threads, copy)
        return time.perf_counter() - begin

    def facts(self) -> dict[str, Any]:
        return {"direct": type(self).direct}
