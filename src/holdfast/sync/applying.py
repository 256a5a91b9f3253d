"""Where a version goes: the user's module, dictionary or function, through a shadow or straight into it.

    Applier       of one receiver: makes a destination a receive, and keeps the shadow for the next one
    LiveTensors   a destination of tensors: a module's parameters (and buffers that are published), or a dictionary's
    Calls         a destination that is a function, which is called with whole tensors

Guarantees: until `commit` (or, streaming, the first `memory`) nothing of the user's is touched. A destination is dirty
from the first byte written to a live tensor, or the first call, until all of them are; a module refuses to be called
meanwhile (``sync.refusing``). What a function is given is its own: no later version is written there. A parameter that
is tied is received once.
Assumes: nobody writes to live tensors, or replaces them, during a receive.
Does not: know buckets or peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import known_dtype, local_tensor, torch_dtype
from holdfast.state.modules import ModuleSource
from holdfast.sync.layout import mismatch
from holdfast.sync.pieces import copy_all, named_tensors
from holdfast.sync.refusing import allow_calls, refuse_calls
from holdfast.sync.seam import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sync.seam import Destination

Apply = Callable[[str, torch.Tensor], object]


class Applier:
    """Makes the destinations of one receiver, one at a time."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self._module: ModuleSource | None = None

    def destination(self, into: Any, *, streaming: bool) -> Destination:
        """The destination of one receive. Raises `ConfigError` for what nothing can be received into."""
        if isinstance(into, nn.Module):
            if self._module is None or self._module.modules != (into,):
                self._module = ModuleSource((), (into,))
                self._kept = _Kept()
            return LiveTensors(into, _of_module(self._module, into), self._kept, streaming=streaming)
        if isinstance(into, Mapping):
            live = [_Live((name,), tensor, needed=True) for name, tensor in named_tensors(into).items()]
            return LiveTensors(into, live, self._kept, streaming=streaming)
        if callable(into):
            return Calls(into, streaming=streaming)
        raise ConfigError(
            f"into is a {type(into).__name__}; expected an nn.Module, a dictionary of tensors, or a function "
            "apply(name, tensor)",
            field="into",
        )

    def committed(self, destination: Destination, version: int) -> None:
        """``version`` is in place now."""
        if isinstance(destination, LiveTensors):
            self._kept.live = destination.into, version
            if not destination.streaming:
                self._kept.version = version


class _Kept:
    """What a receiver keeps between versions: the shadow, and which version it, and what is live, holds whole."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.live: tuple[Any, int] | None = None


class _Live:
    """One live tensor under all its names; ``needed``: one of them has to be published."""

    __slots__ = ("names", "needed", "tensor")

    def __init__(self, names: tuple[str, ...], tensor: torch.Tensor, *, needed: bool) -> None:
        self.names = names
        self.tensor = tensor
        self.needed = needed


def _of_module(source: ModuleSource, module: nn.Module) -> list[_Live]:
    source.refresh()
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for entry in source.tensors:
        names.setdefault(id(entry.tensor), []).append(entry.name)
        tensors.setdefault(id(entry.tensor), (entry.tensor, entry.lazy))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if id(buffer) not in tensors:  # not kept in checkpoints, but it may be published
            names.setdefault(id(buffer), []).append(name)
            tensors[id(buffer)] = buffer, False
    return [_Live(tuple(names[key]), tensor, needed=needed) for key, (tensor, needed) in tensors.items()]


class LiveTensors:
    """See the module; implements `Destination`."""

    def __init__(self, into: Any, live: Sequence[_Live], kept: _Kept, *, streaming: bool) -> None:
        self.into = into
        self.streaming = streaming
        self.dirty = False
        self._live = live
        self._kept = kept
        self._wanted: dict[str, torch.Tensor] = {}
        self._base = kept.version
        if streaming:
            self._base = kept.live[1] if kept.live is not None and kept.live[0] is into else None

    @property
    def base(self) -> int | None:
        return self._base

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        wanted: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        known: set[str] = set()
        differing: dict[str, str] = {}
        for live in self._live:
            known.update(live.names)
            name = next((name for name in live.names if name in published), None)
            if name is None:
                if live.needed:
                    missing.append(live.names[0])
                continue
            wanted[name] = live.tensor
            mine = TensorInfo(tuple(live.tensor.shape), known_dtype(live.tensor, name))
            for published_as in live.names:
                theirs = published.get(published_as, mine)
                if theirs != mine:
                    differing[published_as] = (
                        f"`{published_as}` is published as {theirs.dtype} {list(theirs.shape)}, but is "
                        f"{mine.dtype} {list(mine.shape)} here"
                    )
        unexpected = sorted(published.keys() - known)
        if missing or unexpected or differing:
            raise mismatch(missing, unexpected, differing)
        self._wanted = wanted
        return tuple(wanted)

    def memory(self, name: str) -> torch.Tensor:
        live = self._wanted[name]
        if self.streaming:
            if not self.dirty:
                self._touch()
            return live.detach()
        self._kept.version = None
        memory = self._kept.shadow.get(name)
        if memory is None or not _alike(memory, live):
            memory = self._kept.shadow[name] = _empty_like(live)
            self._base = None
        return memory

    def complete(self, name: str) -> None:
        """Nothing is to be done before `commit`."""

    def commit(self) -> None:
        if not self.streaming:
            self._touch()
            lives = [local_tensor(live) for live in self._wanted.values()]
            copy_all(lives, [local_tensor(self._kept.shadow[name]) for name in self._wanted])
            _finish(lives)
        self.dirty = False
        allow_calls(self.into)

    def _touch(self) -> None:
        """Live tensors are about to be written to."""
        self.dirty = True
        self._kept.live = None
        refuse_calls(self.into)

    def abandon(self) -> None:
        self._wanted = {}


class Calls:
    """See the module; implements `Destination`."""

    base = None

    def __init__(self, into: Apply, *, streaming: bool) -> None:
        self.into = into
        self.streaming = streaming
        self.dirty = False
        self._published: Mapping[str, TensorInfo] = {}
        self._made: dict[str, torch.Tensor] = {}

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        self._published = published
        return tuple(published)

    def memory(self, name: str) -> torch.Tensor:
        if name not in self._made:
            shape, dtype = self._published[name]
            self._made[name] = torch.empty(shape, dtype=torch_dtype(dtype))
        return self._made[name]

    def complete(self, name: str) -> None:
        if self.streaming:
            self.dirty = True
            self.into(name, self._made.pop(name))

    def commit(self) -> None:
        for name in list(self._made):
            self.dirty = True
            self.into(name, self._made.pop(name))
        self.dirty = False

    def abandon(self) -> None:
        self._made = {}


def _alike(kept: torch.Tensor, live: torch.Tensor) -> bool:
    if compat.is_dtensor(kept) != compat.is_dtensor(live):
        return False
    if compat.is_dtensor(live) and compat.dtensor_spec(kept) != compat.dtensor_spec(live):
        return False
    mine, theirs = local_tensor(kept), local_tensor(live)
    return mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device


def _empty_like(live: torch.Tensor) -> torch.Tensor:
    if compat.is_dtensor(live):
        return torch.empty_like(live.detach())
    return torch.empty(live.shape, dtype=live.dtype, device=live.device)


def _finish(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies on devices: who reads `Receiver.version` may use any stream."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
