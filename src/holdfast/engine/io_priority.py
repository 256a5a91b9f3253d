"""Which share of a disk a thread may take beside others: the I/O class of Linux. Torch-free.

Guarantees: nothing but the calling thread, and those it starts later, is changed.
Assumes: a scheduler of the block device that heeds it (bfq does; mq-deadline puts classes in order; none ignores it),
and writes with `O_DIRECT`: write-back of the page cache is done by the kernel's own threads.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

CLASSES: Final = {"none": 0, "best_effort": 2, "idle": 3}
LEVEL_USUAL: Final = 4
"""What the kernel takes where nobody says: halfway from 0, the first to be served, to 7."""
_CLASS_SHIFT: Final = 13
_WHO_PROCESS: Final = 1
_SET: Final = {"x86_64": 251, "ppc64le": 273, "s390x": 282, "aarch64": 30, "riscv64": 30, "loongarch64": 30}
"""The number of the system call, which the C library has no name for."""


def io_priority(io_class: str, level: int | None) -> int:
    """As the kernel has it; ``level`` counts for ``best_effort`` alone."""
    within = (LEVEL_USUAL if level is None else level) if io_class == "best_effort" else 0
    return CLASSES[io_class] << _CLASS_SHIFT | within


def set_io_class(io_class: str, level: int | None) -> str | None:
    """Give the calling thread this class; why it could not be done, None if it was. Nothing is done for ``none``."""
    if io_class == "none":
        return None
    machine = os.uname().machine
    if os.uname().sysname != "Linux" or machine not in _SET:
        return f"I/O classes are not known on {os.uname().sysname} {machine}"
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (_WHO_PROCESS, 0, io_priority(io_class, level))
    if system.syscall(ctypes.c_long(_SET[machine]), *map(ctypes.c_int, arguments)) != 0:
        return f"ioprio_set: {os.strerror(ctypes.get_errno())}"
    return None
