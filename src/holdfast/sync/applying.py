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

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import check_tensor, known_dtype, local_tensor, torch_dtype
from holdfast.state.modules import ModuleSource
from holdfast.sync.layout import mismatch
from holdfast.sync.pieces import check_writable, copy_all, named_tensors
from holdfast.sync.refusing import allow_calls, refuse_calls
from holdfast.sync.seam import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.sync.seam import Destination

_WRAPPERS: Final = re.compile(rf"(?:^|(?<=\.))(?:{compat.COMPILED_MODULE}|{compat.CHECKPOINT_WRAPPED})\.")
"""What ``torch.compile`` and activation checkpointing add to names."""

Apply = Callable[[str, torch.Tensor], object]


class Applier:
    """Makes the destinations of one receiver, one at a time."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self._module: ModuleSource | None = None

    def destination(self, into: Any, *, streaming: bool, committed: Callable[[int], None] | None = None) -> Destination:
        """The destination of one receive. Raises `ConfigError` for what nothing can be received into.

        committed: called when a version is in place, before the destination says that it is no longer dirty.
        """
        committed = committed or _nothing
        if isinstance(into, nn.Module):
            if self._module is None or self._module.modules != (into,):
                self._module = ModuleSource((), (into,))
                self._kept = _Kept()
            return LiveTensors(into, _of_module(self._module, into), self._kept, committed, streaming=streaming)
        if isinstance(into, Mapping):
            live = [_Live((name,), tensor, needed=True) for name, tensor in named_tensors(into, what="into").items()]
            return LiveTensors(into, live, self._kept, committed, streaming=streaming)
        if callable(into):
            return Calls(into, self._kept, committed, streaming=streaming)
        raise ConfigError(
            f"into is a {type(into).__name__}; expected an nn.Module, a dictionary of tensors, or a function "
            "apply(name, tensor)",
            field="into",
        )


def _nothing(version: int) -> None:
    """Nobody else has to know of ``version``."""


class _Kept:
    """What a receiver keeps between versions: the shadow, and which version it, and what is live, holds whole."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.live: tuple[int, dict[int, _Stamp]] | None = None
        """By the ``id`` of the tensor."""

    def hold(self, version: int, names: Iterable[str]) -> None:
        """The shadow of ``names`` holds this version whole. What it has of others is of an older one, and goes."""
        self.version = version
        self.shadow = {name: self.shadow[name] for name in names}

    def forget(self) -> None:
        """What is held is no version that anybody knows."""
        self.version = self.live = None


class _Stamp(NamedTuple):
    """A live tensor as it was when a version was committed to it."""

    tensor: torch.Tensor
    writes: int
    local_writes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Stamp:
        return cls(tensor, compat.version_of(tensor), compat.version_of(local_tensor(tensor)))

    @property
    def stands(self) -> bool:
        """Whether nobody has written to it since, as far as torch counts."""
        return self[1:] == _Stamp.of(self.tensor)[1:]


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


def _by_own_names(module: nn.Module, lives: Sequence[_Live]) -> list[_Live]:
    names: dict[int, list[str]] = {}
    for name, tensor in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(id(tensor), []).append(name)
    return [_Live(tuple(names.get(id(live.tensor), live.names)), live.tensor, needed=live.needed) for live in lives]


def _by_unwrapped_names(lives: Sequence[_Live], published: Iterable[str]) -> list[_Live]:
    """By those of the published names that are theirs but for what wrappers at the publisher add."""
    theirs: dict[str, list[str]] = {}
    for name in published:
        theirs.setdefault(_WRAPPERS.sub("", name), []).append(name)
    return [
        _Live(tuple(_only(theirs.get(name), name) for name in live.names), live.tensor, needed=live.needed)
        for live in lives
    ]


def _only(names: Sequence[str] | None, otherwise: str) -> str:
    return names[0] if names is not None and len(names) == 1 else otherwise


def _names_of(lives: Sequence[_Live]) -> set[str]:
    return {name for live in lives for name in live.names}


class LiveTensors:
    """See the module; implements `Destination`."""

    def __init__(
        self, into: Any, live: Sequence[_Live], kept: _Kept, committed: Callable[[int], None], *, streaming: bool
    ) -> None:
        self.into = into
        self.streaming = streaming
        self.dirty = False
        self._committed = committed
        self._live = live
        self._kept = kept
        self._wanted: dict[str, torch.Tensor] = {}
        self._base = kept.version
        if streaming:
            self._base = self._streaming_base()

    @property
    def base(self) -> int | None:
        return self._base

    def _streaming_base(self) -> int | None:
        """The version that the live tensors hold, if they are those that it was committed to, and still hold it."""
        version, stamps = self._kept.live or (None, {})
        mine = {id(live.tensor) for live in self._live}
        return version if stamps.keys() <= mine and all(stamp.stands for stamp in stamps.values()) else None

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        wanted: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        known: set[str] = set()
        differing: dict[str, str] = {}
        for live in self._named_for(published):
            known.update(live.names)
            name = next((name for name in live.names if name in published), None)
            if name is None:
                if live.needed:
                    missing.append(live.names[0])
                continue
            check_tensor(name, live.tensor)
            if (local := local_tensor(live.tensor)).numel():
                check_writable(name, local)
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
        if self.streaming and self._kept.live is not None:
            stamps = self._kept.live[1]
            if any(id(tensor) not in stamps for tensor in wanted.values()):
                self._base = None
        return tuple(wanted)

    def _named_for(self, published: Mapping[str, TensorInfo]) -> Sequence[_Live]:
        """What is live, by the names that are published: those without wrappers, as here, or with what wrappers add."""
        if not isinstance(self.into, nn.Module) or published.keys() <= _names_of(self._live):
            return self._live
        for named in (_by_own_names(self.into, self._live), _by_unwrapped_names(self._live, published)):
            if published.keys() <= _names_of(named):
                return named
        return self._live

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

    def forget(self) -> None:
        self._base = None
        self._kept.forget()

    def complete(self, name: str) -> None:
        """Nothing is to be done before `commit`."""

    def commit(self, version: int) -> None:
        if not self.streaming:
            self._touch()
            lives = [local_tensor(live) for live in self._wanted.values()]
            copy_all(lives, [local_tensor(self._kept.shadow[name]) for name in self._wanted])
            _finish(lives)
            self._kept.hold(version, self._wanted)
        self._kept.live = version, {id(live): _Stamp.of(live) for live in self._wanted.values()}
        self._committed(version)
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

    def __init__(self, into: Apply, kept: _Kept, committed: Callable[[int], None], *, streaming: bool) -> None:
        self.into = into
        self.streaming = streaming
        self.dirty = False
        self.forget = kept.forget
        self._committed = committed
        self._published: Mapping[str, TensorInfo] = {}
        self._made: dict[str, torch.Tensor] = {}

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        self._published, self._made = published, {}
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

    def commit(self, version: int) -> None:
        for name in list(self._made):
            self.dirty = True
            self.into(name, self._made.pop(name))
        self._committed(version)
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
