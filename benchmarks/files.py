"""Files around a measurement: into the page cache, out of it, onto the disk, and away. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 8 << 20


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files below a directory."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def nbytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def sync_below(path: Path) -> None:
    """fsync what is there and the directory it is in: what a save that stops short of it must be charged for."""
    folders = [path, *(found for found in path.rglob("*") if found.is_dir())] if path.is_dir() else []
    for target in [*files_of(path), *folders, path.parent]:
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def warm(path: Path) -> None:
    """Read everything once: it is in the page cache then, as far as memory goes."""
    buffer = bytearray(CHUNK_BYTES)
    for file in files_of(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def evict(path: Path) -> None:
    """Drop it from the page cache. Must be durable before: dirty pages stay."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_fraction(path: Path) -> float:
    """How much of it is in the page cache, by mincore: looking reads nothing, and starts no readahead."""
    found = pages = 0
    for file in files_of(path):
        size = file.stat().st_size
        if not size:
            continue
        with file.open("rb") as stream:
            # Private and writable, never written: that is how its address can be had.
            mapped = mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = -(-size // mmap.PAGESIZE)
        there = (ctypes.c_ubyte * count)()
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), there)
        del first
        mapped.close()
        if failed:
            raise OSError(f"mincore: the kernel doesn't say what of {file} is in the page cache")
        pages += count
        found += bytes(there).count(1)
    return found / pages if pages else 0.0


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
