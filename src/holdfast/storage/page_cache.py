"""Whether bytes of a file are in the page cache: asked without bringing them in. Torch-free.

By ``mincore``: a read with ``RWF_NOWAIT`` starts to read ahead, and on a fast disk has the answer changed before it is
given. The kernel tells only who owns the file or may write it; others are told that all is cached.

Guarantees: never reads, never raises, keeps no descriptor (as Python's own ``mmap`` would); "cached" wherever there is
no telling.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import lru_cache
from typing import Any, Final

_FAILED: Final = ctypes.c_void_p(-1).value
_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_size_t


class PageCache:
    """The page cache, as far as it concerns the file of descriptor ``fd`` with ``size`` bytes. Thread-safe."""

    def __init__(self, fd: int, size: int) -> None:
        self._address: int | None = None
        libc = _libc()
        if libc is None or size <= 0:
            return
        # Mapped to be asked about, never touched: no page of it is ever brought in.
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is not None and address != _FAILED:
            self._address = address
            weakref.finalize(self, libc.munmap, address, size).atexit = False

    def has(self, offset: int) -> bool:
        """Whether the byte at ``offset`` is in memory, or nobody can say."""
        if self._address is None:
            return True
        page = (ctypes.c_ubyte * 1)()
        at = offset // mmap.PAGESIZE * mmap.PAGESIZE
        failed = _libc().mincore(self._address + at, 1, page)
        return bool(failed) or bool(page[0] & 1)


@lru_cache(maxsize=1)
def _libc() -> Any:
    """The three calls, or None where they aren't all there."""
    libc: Any = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mmap", "munmap", "mincore")):
        return None
    # Declared, because an address doesn't fit what ctypes takes numbers for.
    libc.mmap.argtypes = (_ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.restype = _ADDRESS
    libc.munmap.argtypes = (_ADDRESS, _SIZE)
    libc.mincore.argtypes = (_ADDRESS, _SIZE, ctypes.c_void_p)
    return libc
