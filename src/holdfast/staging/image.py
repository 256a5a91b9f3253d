"""File images: host memory that is, byte for byte, what a file will hold.

An `Image` is one memfd, mapped shared by the trainer (which fills it) and by the engine (which writes it out). All
files of one rank's save plan lie in it one behind the other, each starting on a page.

Guarantees: the size is sealed, so the engine can never fault on a page that went away; the memory is page-faulted
before it is used and kept for ever, because a copy into fresh memory runs at a sixth of the speed of one into warm
memory; no name exists in any file system, so nothing is left behind by a crash.
Assumes Linux for memfd; elsewhere an unlinked temporary file stands in (untested, documented so).
Does not know what the bytes mean: ``staging.layout`` does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import mmap
import os
import tempfile
import weakref
from typing import Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import StorageError

PAGE_BYTES: Final = 4096

_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK_AND_GROW: Final = 0x0002 | 0x0004
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_STEP_BYTES: Final = 64 << 20
_WARM_UP_THREADS: Final = 4
"""Faulting pages in is the kernel clearing them: more threads than that wait for each other."""


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("holdfast-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:  # pragma: no cover - macOS
        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
        if hasattr(os, "memfd_create"):
            # Sealed sizes are what makes it safe for another process to map this memory.
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK_AND_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Image:
    """One block of shared host memory of ``nbytes`` bytes (a positive multiple of 4096); `StorageError` without it.

    ``bytes_view`` is the memory as a one-dimensional uint8 tensor; views of it stay valid as long as they are
    referenced, even after `close`, which only gives up the descriptor.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise AssertionError(f"an image takes whole pages, got {nbytes} bytes")
        self.nbytes = nbytes
        try:
            self.fd = _anonymous_file(nbytes)
            self._close_fd = weakref.finalize(self, os.close, self.fd)
            self._map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise StorageError(
                f"the system refuses {nbytes} bytes of host memory for a file image: {error.strerror}; free memory or "
                "raise its limits (of the container, `ulimit -v` and `-f`), or lower `in_flight`",
                path="memfd:holdfast-image",
                errno=error.errno,
            ) from error
        self.bytes_view: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., Image] | None = None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def warm_up(self) -> None:
        """Fault in every page; returns when the memory is warm. Releases the GIL; call it off the training thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = self.bytes_view.data_ptr()
        libc.madvise(address, self.nbytes, _MADV_HUGEPAGE)  # advice only: a kernel without it says EINVAL

        def fault_in(start: int) -> None:
            length = min(_POPULATE_STEP_BYTES, self.nbytes - start)
            if libc.madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
                # Kernels before 5.14: touching does the same. The image is still all zeros here, so writing
                # zeros changes nothing.
                self.bytes_view[start : start + length].zero_()

        starts = range(0, self.nbytes, _POPULATE_STEP_BYTES)
        threads = min(_WARM_UP_THREADS, os.cpu_count() or 1, len(starts))
        if threads < 2:
            for start in starts:
                fault_in(start)
            return
        with concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="holdfast-warm-up") as pool:
            list(pool.map(fault_in, starts))

    def pin(self) -> None:
        """Register the memory with CUDA so that device copies into it are asynchronous; once, idempotent."""
        if self._unpin is not None:
            return
        cudart: Any = compat.cudart()
        address = self.bytes_view.data_ptr()
        status = int(cudart.cudaHostRegister(address, self.nbytes, 0))
        if status != 0:
            raise RuntimeError(
                f"cudaHostRegister refused {self.nbytes} bytes of host memory for a file image (CUDA error {status}); "
                "raise the locked-memory limit (ulimit -l) or lower `in_flight`"
            )

        def unpin(host_map: mmap.mmap) -> None:
            with contextlib.suppress(RuntimeError):  # at interpreter exit the CUDA context may be gone already
                cudart.cudaHostUnregister(address)
            del host_map  # kept until here, so the mapping outlives the registration

        self._unpin = weakref.finalize(self, unpin, self._map)

    def close(self) -> None:
        """Give up the descriptor (idempotent). The mapping lives as long as tensors refer to it."""
        self._close_fd()
        if self._unpin is not None:
            self._unpin()
