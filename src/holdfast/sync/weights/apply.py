"""Destinations of a version: the user's module, dictionary or function, through a shadow or directly.

    TargetFactory    makes the destinations of one receiver, and keeps the shadow from one receive to the next
    LiveTensors      a destination of tensors: a module's parameters (and published buffers), or a dictionary's
    CallbackTarget   a destination that is a function, called with whole tensors

Guarantees: until `commit` (or, streaming, the first `memory`) nothing of the user's is changed. A destination is dirty
from the first byte written to a live tensor, or the first call, until all are written; meanwhile each call of a module
raises `WeightsDirty`. Tensors passed to a function belong to it: no later version is written there. A tied parameter is
received once; under a second name only for comparison, as it may be published there with other values.
Assumes: live tensors are not written or replaced during a receive. A module is used by calling it: its submodules, or a
compiled graph, can still be called, and their callers must check `Receiver.dirty`.
Does not: know buckets or peers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, StateMismatch, WeightsDirty
from holdfast.state.entries import check_tensor, known_dtype, local_tensor, memory_of, torch_dtype
from holdfast.state.modules import ModuleSource
from holdfast.state.restore_plan import HandBack
from holdfast.sync.protocol import TensorInfo
from holdfast.sync.weights.buckets import mismatch
from holdfast.sync.weights.pieces import check_writable, copy_all, named_tensors

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from holdfast.sync.protocol import Destination


_refused: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def refuse_calls(into: Any) -> None:
    """Make calls of ``into`` raise `WeightsDirty`, if it is a module."""
    if isinstance(into, nn.Module) and into not in _refused:
        _refused[into] = into.register_forward_pre_hook(_refuse, prepend=True)


def allow_calls(into: Any) -> None:
    """Allow calls of ``into`` again, if they were refused."""
    if isinstance(into, nn.Module):
        handle = _refused.pop(into, None)
        if handle is not None:
            handle.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    del args
    raise WeightsDirty(
        f"this {type(module).__name__} may hold parts of two versions: a receive with "
        "streaming=True is in progress or has failed. Wait for it, or receive a complete "
        "version, before calling the module"
    )


_WRAPPERS: Final = re.compile(rf"(?:^|(?<=\.))(?:{compat.COMPILED_MODULE}|{compat.CHECKPOINT_WRAPPED})\.")
"""Prefixes that ``torch.compile`` and activation checkpointing add to names."""

Apply = Callable[[str, torch.Tensor], object]


class TargetFactory:
    """Makes the destinations of one receiver, one at a time."""

    def __init__(self) -> None:
        self._kept = _ReceiverMemory()
        self._module: ModuleSource | None = None

    def destination(self, into: Any, *, streaming: bool, committed: Callable[[int], None] | None = None) -> Destination:
        """Return the destination of one receive. Raises `ConfigError` if nothing can be received into ``into``.

        committed: called when a version is in place, before the destination reports that it is no longer dirty.
        """
        committed = committed or _nothing
        if isinstance(into, nn.Module):
            if any(map(compat.is_fsdp1_module, into.modules())):
                raise ConfigError(
                    "into has a module of FSDP1 (FullyShardedDataParallel), whose weights can't be received into: use "
                    "fully_shard, or a module that isn't wrapped",
                    field="into",
                )
            if self._module is None or self._module.modules != (into,):
                self._module = ModuleSource((), (into,))
                self._kept = _ReceiverMemory()
            live, hooked = _of_module(self._module, into)
            return LiveTensors(into, live, self._kept, committed, streaming=streaming, hooked=hooked)
        if isinstance(into, Mapping):
            live = _of_mapping(named_tensors(into, what="into"))
            return LiveTensors(into, live, self._kept, committed, streaming=streaming)
        if callable(into):
            return CallbackTarget(into, self._kept, committed, streaming=streaming)
        raise ConfigError(
            f"into is a {type(into).__name__}; expected an nn.Module, a dictionary of tensors, or a function "
            "apply(name, tensor)",
            field="into",
        )


def _nothing(version: int) -> None:
    """Do nothing."""


class _ReceiverMemory:
    """State of a receiver between versions: the shadow, and the complete versions in it and in the live tensors."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.live: tuple[int, dict[int, _Stamp]] | None = None
        """By ``id`` of the tensor."""

    def hold(self, version: int, names: Iterable[str]) -> None:
        """Note that the shadow of ``names`` holds all of this version; drop other names, which hold an older one."""
        self.version = version
        self.shadow = {name: self.shadow[name] for name in names}

    def forget(self) -> None:
        """Forget which versions are held."""
        self.version = self.live = None


class _Stamp(NamedTuple):
    """State of a live tensor when a version was committed to it."""

    tensor: torch.Tensor
    writes: int
    local_writes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Stamp:
        return cls(tensor, compat.version_of(tensor), compat.version_of(local_tensor(tensor)))

    @property
    def stands(self) -> bool:
        """Return True if it was not written to since, according to torch's version counters."""
        return self[1:] == _Stamp.of(self.tensor)[1:]


class _Live:
    """One live tensor under all its names; ``needed``: how many of them have to be published."""

    __slots__ = ("names", "needed", "tensor")

    def __init__(self, names: tuple[str, ...], tensor: torch.Tensor, *, needed: int) -> None:
        self.names = names
        self.tensor = tensor
        self.needed = needed


def _of_mapping(tensors: Mapping[str, torch.Tensor]) -> list[_Live]:
    names: dict[Hashable, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(memory_of(tensor), []).append(name)
    return [_Live(tuple(some), tensors[some[0]], needed=len(some)) for some in names.values()]


class _Hooked(NamedTuple):
    """A module with state-dict hooks: its live tensors by the hooks' names, and how to load them back."""

    live: Sequence[_Live]
    back: Sequence[HandBack]


def _of_module(source: ModuleSource, module: nn.Module) -> tuple[list[_Live], _Hooked | None]:
    """Collect the live tensors of ``module`` by the names of parameters and buffers, and by those of hooks."""
    asked = source.ask_for_load()
    source.refresh(asked=asked)
    hooked = None
    if asked.parts:
        back = [HandBack(source, part) for part in asked.parts]
        hooked = _Hooked(_with_transient(source.wanted(), module), back)
    own = [(entry.name, entry.tensor, entry.lazy) for entry in source.own]
    source.let_go()
    return _with_transient(own, module), hooked


def _with_transient(rows: Iterable[tuple[str, torch.Tensor, bool]], module: nn.Module) -> list[_Live]:
    names: dict[Hashable, list[str]] = {}
    tensors: dict[Hashable, tuple[torch.Tensor, bool]] = {}
    for name, tensor, needed in rows:
        key = memory_of(tensor)
        names.setdefault(key, []).append(name)
        tensors.setdefault(key, (tensor, needed))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if (key := memory_of(buffer)) not in tensors:  # not saved in checkpoints, but may be published
            names.setdefault(key, []).append(name)
            tensors[key] = buffer, False
    return [_Live(tuple(names[key]), tensor, needed=int(needed)) for key, (tensor, needed) in tensors.items()]


def _by_own_names(module: nn.Module, lives: Sequence[_Live]) -> list[_Live]:
    names: dict[Hashable, list[str]] = {}
    for name, tensor in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(memory_of(tensor), []).append(name)
    return [
        _Live(tuple(names.get(memory_of(live.tensor), live.names)), live.tensor, needed=live.needed) for live in lives
    ]


def _by_unwrapped_names(lives: Sequence[_Live], published: Iterable[str]) -> list[_Live]:
    """Map live tensors to published names that differ only by the prefixes of the publisher's wrappers."""
    theirs: dict[str, list[str]] = {}
    for name in published:
        theirs.setdefault(_WRAPPERS.sub("", name), []).append(name)
    return [
        _Live(tuple(_only(theirs.get(name), name) for name in live.names), live.tensor, needed=live.needed)
        for live in lives
    ]


def _only(names: Sequence[str] | None, otherwise: str) -> str:
    return names[0] if names is not None and len(names) == 1 else otherwise


def _have_shapes(lives: Sequence[_Live], published: Mapping[str, TensorInfo]) -> bool:
    shapes = {name: tuple(live.tensor.shape) for live in lives for name in live.names}
    return all(tuple(info.shape) == shapes[name] for name, info in published.items())


def _names_of(lives: Sequence[_Live]) -> set[str]:
    return {name for live in lives for name in live.names}


class LiveTensors:
    """See the module; implements `Destination`."""

    def __init__(
        self,
        into: Any,
        live: Sequence[_Live],
        kept: _ReceiverMemory,
        committed: Callable[[int], None],
        *,
        streaming: bool,
        hooked: _Hooked | None = None,
    ) -> None:
        self.into = into
        self.streaming = streaming
        self._hooked = hooked
        self._back: Sequence[HandBack] = ()
        self.dirty = False
        self._committed = committed
        self._live = live
        self._kept = kept
        self._wanted: dict[str, torch.Tensor] = {}
        self._twins: dict[str, str] = {}
        """Names whose values are only compared with those of another name of the same live tensor."""
        self._complete: set[str] = set()
        self._base = kept.version
        if streaming:
            self._base = self._streaming_base()

    @property
    def base(self) -> int | None:
        return self._base

    def _streaming_base(self) -> int | None:
        """Return the version in the live tensors, if they still are the tensors and values that were committed."""
        version, stamps = self._kept.live or (None, {})
        mine = {id(live.tensor) for live in (*self._live, *(self._hooked.live if self._hooked is not None else ()))}
        return version if stamps.keys() <= mine and all(stamp.stands for stamp in stamps.values()) else None

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        wanted: dict[str, torch.Tensor] = {}
        twins: dict[str, str] = {}
        missing: list[str] = []
        known: set[str] = set()
        differing: dict[str, str] = {}
        for live in self._named_for(published):
            known.update(live.names)
            there = [name for name in live.names if name in published]
            if len(there) < live.needed:
                missing += [name for name in live.names if name not in published][: live.needed - len(there)]
            if not there:
                continue
            name = there[0]
            twins.update((other, name) for other in there[1:] if not _say_same(published, name, other))
            check_tensor(name, live.tensor)
            if (local := local_tensor(live.tensor)).numel():
                check_writable(name, local)
            wanted[name] = live.tensor
            mine = TensorInfo(tuple(live.tensor.shape), known_dtype(live.tensor, name))
            for published_as in live.names:
                theirs = published.get(published_as, mine)
                if theirs[:2] != mine[:2]:
                    differing[published_as] = (
                        f"`{published_as}` is published as {theirs.dtype} {list(theirs.shape)}, but is "
                        f"{mine.dtype} {list(mine.shape)} here"
                    )
        for back in self._back:
            differing |= {name: f"`{name}`: {reason}" for name, reason in back.unfit().items()}
        unexpected = sorted(published.keys() - known)
        if missing or unexpected or differing:
            raise mismatch(missing, unexpected, differing)
        self._wanted, self._twins, self._complete = wanted, twins, set()
        if self.streaming and twins:
            self._base = None  # nothing is kept of values that are only compared
        if self.streaming and self._kept.live is not None:
            stamps = self._kept.live[1]
            if any(id(tensor) not in stamps for tensor in wanted.values()):
                self._base = None
        return (*wanted, *twins)

    def _named_for(self, published: Mapping[str, TensorInfo]) -> Sequence[_Live]:
        """Return the live tensors by published names: without wrapper prefixes, with ours, or with the publisher's."""
        if self._hooked is not None:
            live = self._hooked.live
            for named in (live, _by_unwrapped_names(live, published)):
                if published.keys() <= _names_of(named) and _have_shapes(named, published):
                    self._back = self._hooked.back
                    return named
        if not isinstance(self.into, nn.Module) or published.keys() <= _names_of(self._live):
            return self._live
        for named in (_by_own_names(self.into, self._live), _by_unwrapped_names(self._live, published)):
            if published.keys() <= _names_of(named):
                return named
        return self._live if self._hooked is None else self._hooked.live

    def memory(self, name: str) -> torch.Tensor:
        live = self._wanted[self._twins.get(name, name)]
        if self.streaming and name not in self._twins:
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
        self._complete.add(name)
        for twin, other in self._twins.items():
            if name in (twin, other) and {twin, other} <= self._complete:
                mine, theirs = (local_tensor(self.memory(one)).contiguous() for one in (other, twin))
                if not torch.equal(compat.as_bytes(mine), compat.as_bytes(theirs)):
                    raise StateMismatch(
                        f"`{other}` and `{twin}` are published with different values, but are one tensor here (tied "
                        "weights): only one can be kept. Publish one of them, publish equal values, or untie them here",
                        mismatched=(other, twin),
                    )

    def commit(self, version: int) -> None:
        if not self.streaming:
            self._touch()
            lives = [local_tensor(live) for live in self._wanted.values()]
            copy_all(lives, [local_tensor(self._kept.shadow[name]) for name in self._wanted])
            _finish(lives)
            self._kept.hold(version, (*self._wanted, *self._twins))
        for back in self._back:
            back.load({key: one.value for key, one in back.given.items()})
        self._kept.live = version, {id(live): _Stamp.of(live) for live in self._wanted.values()}
        self._committed(version)
        self.dirty = False
        allow_calls(self.into)

    def _touch(self) -> None:
        """Note that live tensors are about to be written to."""
        self.dirty = True
        self._kept.live = None
        refuse_calls(self.into)

    def abandon(self) -> None:
        self._wanted, self._twins = {}, {}


class CallbackTarget:
    """See the module; implements `Destination`."""

    base = None

    def __init__(
        self, into: Apply, kept: _ReceiverMemory, committed: Callable[[int], None], *, streaming: bool
    ) -> None:
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
            shape, dtype, _ = self._published[name]
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


def _say_same(published: Mapping[str, TensorInfo], one: str, other: str) -> bool:
    """Return True if two names are known to be published with the same values."""
    return (published[one].same_as or one) == (published[other].same_as or other)


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
    """Wait for copies on devices: readers of `Receiver.version` may use any stream."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
