"""Before step 0: is there room for what a manager will save, may it delete what retention wants deleted, and is its
root the same one for all ranks?

Guarantees: refuses only what can't work, with the figures: a rank whose own tensors don't fit on the disk, or whose
images don't fit into the host's memory. What may become too little is a warning: other jobs, retention and optimizer
state that doesn't exist yet change it. Reads sizes only; no tensor is copied, no ``state_dict()`` called.
Does not: know quotas that the system doesn't tell (of projects, of buckets), or what other ranks hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from holdfast.coordination.deadline import Deadline
from holdfast.errors import ConfigError, HoldfastError
from holdfast.storage.entries import attempt_id
from holdfast.storage.locks import DIRECTORY
from holdfast.storage.object_storage import ObjectStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")
_CGROUP_LIMIT: Final = "/sys/fs/cgroup/memory.max"
_MEMINFO: Final = "/proc/meminfo"
_SIGN: Final = "ranks-"
_SEEN_S: Final = 5.0
"""File systems of networks may show a new file a moment later on other hosts."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What is known of a state before training: bytes that this rank holds, and of all ranks together."""

    own: int
    all: int


def known_bytes(state: Mapping[str, Any]) -> StateBytes:
    """Return the bytes of the modules and of the optimizer state that ``state`` has already."""
    own = everywhere = 0
    for tensor in {id(tensor): tensor for value in state.values() for tensor in _tensors_of(value)}.values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor, without importing it
        own += local.numel() * local.element_size()
        everywhere += tensor.numel() * tensor.element_size()
    return StateBytes(own, everywhere)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for held in list(value.state.values()):
            if isinstance(held, dict):
                yield from (item for item in held.values() if isinstance(item, torch.Tensor))


def put_sign(storage: Storage) -> str:
    """Put a file into the root, for the other ranks to look for; returns its name. On rank 0. Raises `StorageError`."""
    name = f"{DIRECTORY}/{_SIGN}{attempt_id()}"
    storage.write_file(name, b"")
    return name


def remove_signs(storage: Storage) -> None:
    """Remove what `put_sign` has put there; what can't be removed stays for the next start."""
    with contextlib.suppress(HoldfastError):
        for name in storage.list_dir(DIRECTORY):
            if name.startswith(_SIGN):
                storage.unlink(f"{DIRECTORY}/{name}")


def check_sign(storage: Storage, name: str, rank: int) -> None:
    """Raise `ConfigError` if this rank doesn't see the sign ``name``: its root is another one than rank 0's."""
    deadline = Deadline.after(_SEEN_S)
    while not storage.exists(name):
        if not deadline.passed():
            time.sleep(0.05)
            continue
        message = (
            f"rank {rank} on {os.uname().nodename} doesn't see {storage.path(name)}, which rank 0 has just made: all "
            "ranks need one root, on a file system that they share, and not a disk of each node's own. Without such a "
            "file system save to a bucket: a root may be a URL"
        )
        raise ConfigError(message, field="root")


def check_disk(root: str, known: StateBytes) -> None:
    """Raise `ConfigError` if what rank 0 alone writes can't fit below ``root``; warn if two checkpoints don't."""
    place = root
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place)
    except OSError as error:
        _log.debug("free space below %s is not known: %s", root, error)
        return
    free = found.f_bavail * found.f_frsize
    freed = 0 if free > 2 * known.all else _bytes_below(root)  # at most: retention may delete all that is there
    if known.own > free + freed:
        raise ConfigError(
            f"{root} has {_mib(free)} free, and {_mib(freed)} in checkpoints that retention could delete; this rank "
            f"alone writes at least {_mib(known.own)} for each checkpoint: free some, or choose another root",
            field="root",
        )
    if 2 * known.all > free + freed:
        _log.warning(
            "%s has %s free; two checkpoints take at least %s: saves will fail when it is full, unless it is freed",
            *(root, _mib(free), _mib(2 * known.all)),
        )


def check_deletes(storage: Storage, keep: object) -> None:
    """Raise `ConfigError` if retention by ``keep`` deletes what nothing may be deleted from."""
    if keep is not None and isinstance(storage, ObjectStorage) and not storage.may_delete:
        raise ConfigError(
            f"{storage.root}: nothing may be deleted there, but keep={keep!r} deletes older steps: allow it, or pass "
            "keep=None to keep them all",
            field="keep",
        )


def check_memory(known: StateBytes, in_flight: int) -> None:
    """Raise `ConfigError` if the images of ``in_flight`` captures can't fit into this host's memory."""
    total, available = _host_memory()
    needed = known.own * in_flight
    if total is not None and needed > total:
        raise ConfigError(
            f"the images of {in_flight} captures of this rank take at least {_mib(needed)} of host memory, and this "
            f"host has {_mib(total)}: use in_flight=1, more ranks, or a host with more memory",
            field="in_flight",
        )
    if available is not None and needed > available:
        _log.warning(
            "the images of %d captures take at least %s of host memory, and %s are available now: saves may fail",
            *(in_flight, _mib(needed), _mib(available)),
        )


def _host_memory() -> tuple[int | None, int | None]:
    """Return the bytes of memory that this process may use in all, and those available now; None where not known."""
    rows: dict[str, int] = {}
    try:
        with open(_MEMINFO, encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                rows[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None, None
    total, available = rows.get("MemTotal"), rows.get("MemAvailable")
    try:
        with open(_CGROUP_LIMIT, encoding="ascii") as file:
            limit = int(file.read())
    except (OSError, ValueError):
        return total, available
    return min(limit, total or limit), min(limit, available or limit)


def _bytes_below(root: str) -> int:
    found = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                found += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
    return found


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
