"""The raw limit to hold saves against: as many bytes, written to the same file system by every rank at once.

Two threads, O_DIRECT where there is such a thing, one fsync, from memory that is warm; nothing is formatted, hashed or
agreed on. The file is removed again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 8 << 20
THREADS = 2


class RawWriter:
    """Writes ``nbytes``, rounded up to whole pages, again and again."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.direct = True
        self._buffer = mmap.mmap(-1, self.nbytes)
        view = memoryview(self._buffer)
        for offset in range(0, self.nbytes, mmap.PAGESIZE):
            view[offset : offset + 64] = os.urandom(64)

    def seconds(self) -> float:
        """Write all of it once; returns how long that took until it was durable."""
        begin = time.perf_counter()
        descriptor = self._open()
        try:
            threads = [threading.Thread(target=self._write, args=(descriptor, number)) for number in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.fsync(descriptor)
            took = time.perf_counter() - begin
            if os.fstat(descriptor).st_size != self.nbytes:
                raise OSError(f"{self.path}: only {os.fstat(descriptor).st_size} of {self.nbytes} bytes were written")
            return took
        finally:
            os.close(descriptor)
            self.path.unlink()

    def _open(self) -> int:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        if self.direct:
            with contextlib.suppress(OSError):
                return os.open(self.path, flags | os.O_DIRECT, 0o600)
            self.direct = False
        return os.open(self.path, flags, 0o600)

    def _write(self, descriptor: int, number: int) -> None:
        view = memoryview(self._buffer)
        for offset in range(number * CHUNK_BYTES, self.nbytes, THREADS * CHUNK_BYTES):
            done = offset
            end = min(self.nbytes, offset + CHUNK_BYTES)
            while done < end:
                done += os.pwrite(descriptor, view[done:end], done)
