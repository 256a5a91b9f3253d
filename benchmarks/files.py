"""Files around a measurement: into the page cache, out of it, onto the disk, and away. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
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


def cached_fraction(path: Path, looks: int = 64) -> float:
    """How much of it is in the page cache, from a look here and there; the looking caches nothing."""
    found = tried = 0
    buffer = bytearray(1)
    for file in files_of(path):
        size = file.stat().st_size
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for number in range(min(looks, max(1, size >> 16))) if size else ():
                tried += 1
                with contextlib.suppress(BlockingIOError):
                    os.preadv(descriptor, [buffer], number * size // looks, os.RWF_NOWAIT)
                    found += 1
        finally:
            os.close(descriptor)
    return found / tried if tried else 0.0


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
