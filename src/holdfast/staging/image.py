"""File images: host memory that is, byte for byte, what a file will hold.

An `Image` is one memfd, mapped shared by the trainer (which fills it) and by the engine (which writes it out). It holds
all files of one rank's save plan one after the other, each starting on a page.

Guarantees: the size is sealed, so the engine can never fault on a page that went away; the memory is page-faulted
before use and then kept, because copying into fresh memory runs at a sixth of the speed; it has no name in any file
system, so a crash leaves nothing behind.
Assumes Linux for memfd; if a sandbox refuses it, and on other systems (untested), an unlinked file is used instead,
whose blocks are allocated beforehand.
Does not know what the bytes mean: ``staging.buffer`` does.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import queue
import tempfile
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast.cores import from_cores, memory_cores, take_turns
from holdfast.errors import StorageError
from holdfast.format.manifest import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

# Mapped memory as tensors (`tensor_over`), unmapped on a thread that runs no C++ code (`unmap_unused` waits for it).
# A tensor's deleter is C++ code that has to get the GIL back: on a thread that is exiting, that aborts the process, and
# unmapping releases the GIL for long. So the deleter only queues the mapping, in C, and a thread that waits in C unmaps
# it.


class _MappedBlock:
    """Represents a mapping for the tensors over it."""


class _Mapping(weakref.ref[_MappedBlock]):
    """A mapping to unmap once its block is gone."""

    __slots__ = ("mapped",)
    mapped: mmap.mmap


_mappings: Final[dict[int, _Mapping]] = {}
ctypes.pythonapi.Py_IncRef(
    ctypes.py_object(_mappings)
)  # never ended: a thread may copy while the interpreter is finalized
_unused: Final[queue.SimpleQueue[weakref.ref[_MappedBlock]]] = queue.SimpleQueue()
_unmapping = threading.Lock()
_has_thread = False


def tensor_over(mapped: mmap.mmap) -> torch.Tensor:
    """Return the bytes of ``mapped`` (may be read-only) as a tensor; the mapping lives as long as it does."""
    _start_thread()
    block = _MappedBlock()
    mapping = _Mapping(block, _unused.put)  # runs in C, from the deleter to the queue
    mapping.mapped = mapped
    _mappings[id(mapping)] = mapping
    # By address: torch warns about read-only memory, and the warning could only be silenced for all threads.
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    at_address = (ctypes.c_uint8 * len(mapped)).from_address(address)
    at_address.block = block  # type: ignore[attr-defined]
    return torch.frombuffer(at_address, dtype=torch.uint8)


def unmap_unused() -> None:
    """Return once all unreferenced mappings are unmapped."""
    with _unmapping, contextlib.suppress(queue.Empty):
        while True:
            _unmap(_unused.get_nowait())


def _unmap(mapping: weakref.ref[_MappedBlock]) -> None:
    _mappings.pop(id(mapping)).mapped.close()


def _start_thread() -> None:
    global _has_thread  # noqa: PLW0603 - one thread a process
    if not _has_thread:
        _has_thread = True
        with contextlib.suppress(RuntimeError):  # no thread available: the next caller unmaps it
            _thread.start_new_thread(_unmap_for_ever, ())


def _unmap_for_ever() -> None:
    while True:
        mapping = _unused.get()
        with _unmapping:
            _unmap(mapping)
        del mapping


def _begin_anew_in_child() -> None:
    global _unmapping, _has_thread
    _unmapping, _has_thread = threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_in_child)


_log = logging.getLogger("holdfast.staging")

_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK_AND_GROW: Final = 0x0002 | 0x0004
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_STEP_BYTES: Final = 64 << 20
_NO_MEMFD: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL})
_WARM_UP_THREADS: Final = 4
"""Page faults are the kernel clearing pages: more threads would wait for each other."""


def _anonymous_file(nbytes: int) -> int:
    try:
        fd = os.memfd_create("holdfast-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except AttributeError:  # pragma: no cover - macOS
        return _unlinked_file(nbytes, tempfile.gettempdir())
    except OSError as error:
        if error.errno not in _NO_MEMFD:
            raise
        return _in_place_of_memfd(nbytes, error)
    try:
        os.ftruncate(fd, nbytes)
        # A sealed size makes it safe for another process to map this memory.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK_AND_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _in_place_of_memfd(nbytes: int, refusal: OSError) -> int:
    """Return a file in memory if possible, else in the temporary directory: sandboxes may refuse memfd_create."""
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]  # noqa: S108 - unlinked
    for number, place in enumerate(places):
        try:
            fd = _unlinked_file(nbytes, place)
        except OSError:
            if number + 1 == len(places):
                raise
            continue
        _log.warning(
            "memfd_create was refused (%s): file images are unlinked files in %s instead", refusal.strerror, place
        )
        return fd
    raise refusal


def _unlinked_file(nbytes: int, directory: str) -> int:
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
        fd = os.dup(file.fileno())
    try:
        # Allocate blocks: if the disk were full later, writing to the mapping would kill this process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:  # pragma: no cover - macOS
            os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Image:
    """One block of shared host memory of ``nbytes`` bytes (whole pages, at least one). Raises `StorageError`.

    ``bytes_view`` is the memory as a one-dimensional uint8 tensor; views of it stay valid while they are referenced,
    even after `close`, which only closes the descriptor.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % PAGE_BYTES:
            raise AssertionError(f"an image takes whole pages, got {nbytes} bytes")
        self.nbytes = nbytes
        unmap_unused()  # really free released memory before allocating more
        try:
            self.fd = _anonymous_file(nbytes)
            self._close_fd = weakref.finalize(self, os.close, self.fd)
            self._close_fd.atexit = False  # saves in flight at exit may still pass it on
            mapped = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise StorageError(
                f"the system refused {nbytes} bytes of host memory for a file image: {error.strerror}; free memory or "
                "raise its limits (of the container, `ulimit -v` and `-f`), or lower `in_flight`",
                path="memfd:holdfast-image",
                errno=error.errno,
            ) from error
        self.bytes_view = tensor_over(mapped)
        self._unpin: weakref.finalize[..., Image] | None = None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def warm_up(self, cores: Sequence[int] = ()) -> None:
        """Fault in every page; return when the memory is warm. Releases the GIL; not for the training thread.

        cores: if any, and the machine has several NUMA nodes, the memory is on theirs, where there is room.
        """
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
        with from_cores(memory_cores(cores)):
            take_turns((partial(fault_in, start) for start in starts), min(_WARM_UP_THREADS, os.cpu_count() or 1))

    def pin(self) -> None:
        """Register the memory with CUDA so that device copies into it are asynchronous; idempotent."""
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

        def unpin(view: torch.Tensor) -> None:
            with contextlib.suppress(RuntimeError):  # at interpreter exit the CUDA context may be gone already
                cudart.cudaHostUnregister(address)
            del view  # kept until here, so the mapping outlives the registration

        self._unpin = weakref.finalize(self, unpin, self.bytes_view)

    def close(self) -> None:
        """Close the descriptor (idempotent). The mapping lives while tensors refer to it."""
        self._close_fd()
        if self._unpin is not None:
            self._unpin()
