"""Whether bytes of a file are in the page cache: asked without bringing them in. Torch-free.

By ``mincore``: a read with ``RWF_NOWAIT`` starts to read ahead, and on a fast disk has the answer changed before it is
given. The kernel tells only who owns the file or may write it; others are told that all is cached.

Guarantees: never reads, never raises; "cached" wherever there is no telling.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any


class PageCache:
    """The page cache, as far as it concerns the file of descriptor ``fd`` with ``size`` bytes. Thread-safe."""

    def __init__(self, fd: int, size: int) -> None:
        self._map: mmap.mmap | None = None
        self._address = 0
        try:
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        except (OSError, ValueError):
            self._map = None

    def has(self, offset: int) -> bool:
        """Whether the byte at ``offset`` is in memory, or nobody can say."""
        mincore = _mincore()
        if self._map is None or mincore is None:
            return True
        page = (ctypes.c_ubyte * 1)()
        at = offset // mmap.PAGESIZE * mmap.PAGESIZE
        failed = mincore(ctypes.c_void_p(self._address + at), ctypes.c_size_t(1), page)
        return bool(failed) or bool(page[0] & 1)


@lru_cache(maxsize=1)
def _mincore() -> Any:
    return getattr(ctypes.CDLL(None), "mincore", None)
