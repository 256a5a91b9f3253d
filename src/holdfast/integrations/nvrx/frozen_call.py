"""Freeze a call: pickle it, with the bytes of all its tensors copied into one block of shared memory.

    freeze     trainer    pickle the call; copy each storage it refers to, from any device, into a block
    thaw       worker     unpickle it; its tensors are views of the block, on the CPU
    Blocks     trainer    blocks that nobody reads any more, for the next calls: copying into warm memory is quick

Guarantees: whatever changes after `freeze` has returned doesn't reach the worker. One descriptor a block, not one a
tensor. Tensors that shared a storage share one again. A block is used again only once nothing in the worker refers to
it (`thaw` returns what to ask).
Assumes: functions and classes are importable by name in the worker (those of the main script are).
"""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.cores import memory_cores, usable_cores
from holdfast.errors import ConfigError
from holdfast.format.manifest import PAGE_BYTES
from holdfast.staging.image import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cores import Cores

_ALIGNMENT: Final = 64
_KEPT: Final = 2
"""Blocks kept for later calls: as many as are in flight."""
_WASTE_MAX: Final = 2
"""A kept block is used for a call that needs at least its size divided by this."""


@dataclass(frozen=True, slots=True)
class FrozenCall:
    """A pickled call. layout: offset and size in ``block`` of each of its storages."""

    data: bytes
    layout: tuple[tuple[int, int], ...]
    block: Image | None


class Blocks:
    """Blocks of shared memory between two uses, near ``cores`` (see ``holdfast.cores``). Thread-safe."""

    def __init__(self, cores: Cores = "auto") -> None:
        self._cores = cores
        self._lock = threading.Lock()
        self._kept: list[Image] = []

    def take(self, nbytes: int) -> Image:
        """Return a block of at least ``nbytes`` bytes; the caller's until it is given back. Raises `StorageError`."""
        with self._lock:
            fitting = [block for block in self._kept if nbytes <= block.nbytes <= max(PAGE_BYTES, _WASTE_MAX * nbytes)]
            if fitting:
                block = min(fitting, key=lambda block: block.nbytes)
                self._kept.remove(block)
                return block
        made = Image(-(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES)
        cores = usable_cores(self._cores)
        if memory_cores(cores):
            made.warm_up(cores)
        return made

    def give_back(self, block: Image) -> list[Image]:
        """Keep a block that nobody reads any more; return those that are dropped for it, for the caller to close."""
        with self._lock:
            self._kept.append(block)
            dropped, self._kept = self._kept[:-_KEPT], self._kept[-_KEPT:]
        return dropped

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for block in kept:
            block.close()


def freeze(call: Any, blocks: Blocks, what: str) -> FrozenCall:
    """Pickle ``call`` and copy the contents of its tensors; returns when nothing of it is read any more.

    what: it, in words, for `ConfigError`, raised if it can't be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(call)
    except Exception as error:
        raise ConfigError(
            f"{what} can't be sent to the worker process ({type(error).__name__}: {error}). It and its arguments are "
            "pickled: use functions that can be imported by name (no lambdas, no functions inside of functions; "
            "functools.partial is fine), and leave out open files, locks and process groups",
            field="async_request",
        ) from error
    layout: list[tuple[int, int]] = []
    end = 0
    for storage in pickler.storages:
        layout.append((end, storage.nbytes()))
        end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    block = None
    if end:
        block = blocks.take(end)
        for storage, (offset, nbytes) in zip(pickler.storages, layout, strict=True):
            if nbytes:
                source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                block.bytes_view[offset : offset + nbytes].copy_(source)
    return FrozenCall(file.getvalue(), tuple(layout), block)


class _Pickler(pickle.Pickler):
    """Collects the storages of tensors instead of their bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            return self._number(obj._untyped_storage), obj.dtype
        if isinstance(obj, torch.UntypedStorage):
            return self._number(obj), None
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number


class _Use:
    """Stands for the use of a block by one call: alive while a tensor over it is."""


def thaw(data: bytes, layout: tuple[tuple[int, int], ...], address: int) -> tuple[Any, Callable[[], bool]]:
    """Return the call, and a function that tells whether tensors of it are still alive.

    address: of the mapped block; 0 if there is none.
    """
    use = _Use()
    storages: dict[int, torch.UntypedStorage] = {}

    def storage_of(number: int) -> torch.UntypedStorage:
        if number not in storages:
            offset, nbytes = layout[number]
            storages[number] = _storage_at(address + offset, nbytes, use)
        return storages[number]

    call = _Unpickler(io.BytesIO(data), storage_of).load()
    reference = weakref.ref(use)
    return call, lambda: reference() is not None


def _storage_at(address: int, nbytes: int, use: _Use) -> torch.UntypedStorage:
    if not nbytes:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.use = use  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storage_of: Callable[[int], torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storage_of = storage_of

    def persistent_load(self, pid: Any) -> Any:
        number, dtype = pid
        storage = self._storage_of(number)
        if dtype is None:
            return storage
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=storage, dtype=dtype, _internal=True)
