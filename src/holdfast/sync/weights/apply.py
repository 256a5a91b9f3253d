"""Destinations of a version: the user's module, dictionary or function, through a shadow or directly.

    TargetFactory    makes the destinations of one receiver, and keeps shadows from one fetch to the next
    LiveTensors      a destination of tensors: a module's parameters (and published buffers), or a dictionary's
    CallbackTarget   a destination that is a function, called with whole tensors
    FetchedMemory    a version that lies in a destination's memory until it is committed

Guarantees: until `commit` (or, streaming, the first `memory`) nothing of the user's is changed. A destination is dirty
from the first byte written to a live tensor, or the first call, until all are written; meanwhile each call of a module
raises `WeightsDirty`. Tensors passed to a function belong to it: no later version is written there. A tied parameter is
received once; under a second name only for comparison, as it may be published there with other values. With a choice
of names, published tensors and the user's alike are left alone unless it takes their names. A shadow belongs
to one destination from `select` to the commit, or until it is abandoned: a fetched version is not overwritten by the
next fetch. Live tensors that were replaced since `select` are noticed before the commit writes anything.
Assumes: live tensors are not written to during a commit, or a streaming fetch. A module is used by calling it: its
submodules, or a compiled graph, can still be called, and their callers must check `Receiver.dirty`. One thread makes
destinations; another one may commit or abandon them.
Does not: know buckets or peers.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.boxes import whole
from holdfast.errors import ConfigError, StateMismatch, WeightsDirty, listed
from holdfast.state.entries import check_tensor, known_dtype, local_tensor, memory_of, torch_dtype
from holdfast.state.load_plan import StoredNames, scales_beside
from holdfast.state.modules import ModuleSource
from holdfast.state.restore_plan import HandBack
from holdfast.sync.protocol import TensorInfo
from holdfast.sync.weights.buckets import Wanted, mismatch
from holdfast.sync.weights.names import NameChoice
from holdfast.sync.weights.pieces import (
    TensorParts,
    check_apart,
    check_writable,
    global_rank,
    named_tensors,
    places_of,
)
from holdfast.sync.weights.scatter import LiveStamp, LiveWrite, write_live

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from holdfast.state.entries import WholePlace
    from holdfast.sync.protocol import Destination
    from holdfast.sync.weights.pieces import Sendable
    from holdfast.sync.weights.scatter import Changes


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


class CheckedApply(ABC):
    """A function that looks at what is published before any of it is fetched."""

    @abstractmethod
    def select(self, published: Mapping[str, TensorInfo]) -> None:
        """Raise `StateMismatch` if it can't take these tensors."""

    @abstractmethod
    def __call__(self, name: str, tensor: torch.Tensor) -> object:
        """Take a complete tensor."""


class TargetFactory:
    """Makes the destinations of one receiver, one at a time."""

    def __init__(self, choice: NameChoice | None = None, *, scatters: bool = False) -> None:
        """choice: the names to receive; None: all. scatters: commits may write only what changed."""
        self._choice = choice or NameChoice()
        self._scatters = scatters
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
            if not self._choice.takes_all:  # hooks load all or nothing
                hooked = None
            return LiveTensors(
                into,
                live,
                self._kept,
                committed,
                partial(_tensors_in, into),
                streaming=streaming,
                hooked=hooked,
                choice=self._choice,
                scatters=self._scatters,
            )
        if isinstance(into, Mapping):
            live = _of_mapping(named_tensors(into, what="into"))
            named = partial(_lying_in, into)
            return LiveTensors(
                into,
                live,
                self._kept,
                committed,
                named,
                streaming=streaming,
                choice=self._choice,
                scatters=self._scatters,
            )
        if callable(into):
            return CallbackTarget(into, self._kept, committed, streaming=streaming, choice=self._choice)
        raise ConfigError(
            f"into is a {type(into).__name__}; expected an nn.Module, a dictionary of tensors, or a function "
            "apply(name, tensor)",
            field="into",
        )


def _nothing(version: int) -> None:
    """Do nothing."""


_SHADOWS_KEPT: Final = 2
"""Shadows kept between versions: one may be held for a commit while the next version is being fetched."""


class _Shadow:
    """Tensors for one destination at a time; ``version``: the one that all of them hold, None if there is none."""

    __slots__ = ("publisher", "tensors", "version")

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.publisher = 0


class _ReceiverMemory:
    """State of a receiver between versions: idle shadows, and the complete versions in them and in the live tensors."""

    def __init__(self) -> None:
        self.publisher = 0
        """Which publisher versions come from now, counted: those of an earlier one are no base."""
        self.live: tuple[int, dict[int, LiveStamp]] | None = None
        """By ``id`` of the tensor."""
        self.parts: Mapping[str, WholePlace] = {}
        """Where the tensors that were last selected lie in the published ones, for those that are parts."""
        self._idle: list[_Shadow] = []
        self._lock = threading.Lock()

    def take(self) -> _Shadow:
        """Return a shadow that nobody uses: the one with the newest version of this publisher, if there is one."""
        with self._lock:
            if not self._idle:
                return _Shadow()
            best = max(self._idle, key=lambda shadow: -1 if (base := self.base_in(shadow)) is None else base)
            self._idle.remove(best)
            return best

    def give(self, shadow: _Shadow) -> None:
        """Take back a shadow."""
        with self._lock:
            self._idle.append(shadow)
            del self._idle[:-_SHADOWS_KEPT]

    def base_in(self, shadow: _Shadow) -> int | None:
        """Return the version of the present publisher in ``shadow``."""
        return shadow.version if shadow.publisher == self.publisher else None

    def forget(self) -> None:
        """Forget which versions are held, also those that are committed later: another publisher sends now."""
        self.publisher += 1
        self.live = None


class _Live:
    """One live tensor under all its names; ``needed``: how many of them have to be published.

    place: where it lies in the published tensor, if it is a part of that.
    """

    __slots__ = ("names", "needed", "place", "tensor")

    def __init__(
        self, names: tuple[str, ...], tensor: torch.Tensor, *, needed: int, place: WholePlace | None = None
    ) -> None:
        self.names = names
        self.tensor = tensor
        self.needed = needed
        self.place = place

    @property
    def info(self) -> TensorInfo:
        """Describe the published tensor that it is received from."""
        shape = self.tensor.shape if self.place is None else self.place.shape
        return TensorInfo(tuple(shape), known_dtype(self.tensor, self.names[0]))

    def chosen(self, choice: NameChoice) -> _Live | None:
        """Return it under those of its names that ``choice`` takes, if there are such."""
        names = tuple(name for name in self.names if choice.takes(_unwrapped(name)))
        return _Live(names, self.tensor, needed=min(self.needed, len(names)), place=self.place) if names else None


def _of_mapping(tensors: Mapping[str, Sendable]) -> list[_Live]:
    names: dict[object, list[str]] = {}
    lying: dict[str, tuple[torch.Tensor, WholePlace | None]] = {}
    for name, given in tensors.items():
        if isinstance(given, TensorParts) and len(given.parts) != 1:
            raise ConfigError(f"{name}: into has {len(given.parts)} parts of it; one can be received", field=name)
        lying[name] = tensor, place = given.parts[0] if isinstance(given, TensorParts) else (given, None)
        names.setdefault((memory_of(tensor), place), []).append(name)
    return [_Live(tuple(some), lying[some[0]][0], needed=len(some), place=lying[some[0]][1]) for some in names.values()]


def _lying_in(into: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a user's dictionary as they are now."""
    named = named_tensors(into, what="into").items()
    return {name: given.parts[0][0] if isinstance(given, TensorParts) else given for name, given in named}


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


def _tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


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
        theirs.setdefault(_unwrapped(name), []).append(name)
    return [
        _Live(tuple(_only(theirs.get(name), name) for name in live.names), live.tensor, needed=live.needed)
        for live in lives
    ]


def _unwrapped(name: str) -> str:
    return _WRAPPERS.sub("", name)


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
        named: Callable[[], Mapping[str, torch.Tensor]],
        *,
        streaming: bool,
        hooked: _Hooked | None = None,
        choice: NameChoice | None = None,
        scatters: bool = False,
    ) -> None:
        """``named``: returns the tensors of ``into`` by their names there, as they are now."""
        self.into = into
        self.streaming = streaming
        self.scatters = scatters and not streaming
        self._hooked = hooked
        self._back: Sequence[HandBack] = ()
        self.dirty = False
        self._committed = committed
        self._live = live
        self._kept = kept
        self._choice = choice or NameChoice()
        self._wanted: dict[str, torch.Tensor] = {}
        self._parts: dict[str, WholePlace] = {}
        """Where wanted tensors that are parts lie in the published ones."""
        self._twins: Mapping[str, str] = {}
        """Names whose values are only compared with those of another name of the same live tensor."""
        self._complete: set[str] = set()
        self._named = named
        self._places: dict[str, Hashable] = {}
        """Where each wanted tensor of ``into`` lay when it was selected."""
        self._publisher = kept.publisher
        self._shadow: _Shadow | None = None
        self._base = self._streaming_base() if streaming else None
        self._changed: Mapping[str, Changes] = {}
        self._changed_since: Hashable = None

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
        parts: dict[str, WholePlace] = {}
        twins: dict[str, str] = {}
        missing: list[str] = []
        known: set[str] = set()
        differing: dict[str, str] = {}
        lives, published = self._chosen(published)
        for live in lives:
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
            if live.place is not None:
                parts[name] = live.place
            mine = live.info
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
        check_apart({name: local_tensor(tensor) for name, tensor in wanted.items()})
        self._wanted, self._parts, self._twins, self._complete = wanted, parts, twins, set()
        if self._kept.parts != parts:
            self.forget()  # what is there lies elsewhere in the whole
            self._kept.parts = parts
        self._note_places()
        if self._shadow is None and (twins or not self.streaming):
            self._shadow = self._kept.take()
            if not self.streaming:
                self._base = self._kept.base_in(self._shadow)
        if self.streaming and twins:
            self._base = None  # nothing is kept of values that are only compared
        if self.streaming and self._kept.live is not None:
            stamps = self._kept.live[1]
            if any(id(tensor) not in stamps for tensor in wanted.values()):
                self._base = None
        return (*wanted, *twins)

    def _chosen(self, published: Mapping[str, TensorInfo]) -> tuple[Sequence[_Live], Mapping[str, TensorInfo]]:
        """Return the live tensors by published names, and the published ones, as far as they are to be received."""
        choice = self._choice
        if choice.takes_all:
            return self._named_for(published), published
        taken = _taken(published, choice)
        lives = self._named_for(taken)
        choice.check({*map(_unwrapped, published), *_names_of(lives)}, where="published, or in what is received into")
        if not taken:
            raise ConfigError(
                f"include: nothing that is published is chosen by it; there are {listed(sorted(published))}",
                field="include",
            )
        chosen = [live.chosen(choice) for live in lives]
        return [live for live in chosen if live is not None], taken

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

    @property
    def twins(self) -> Mapping[str, str]:
        return self._twins

    def wanted(self) -> Sequence[Wanted]:
        names = {name: name for name in self._wanted} | dict(self._twins)
        at = {name: self.place(name) for name in names}
        found, _ = places_of({name: self._wanted[other] for name, other in names.items()}, at, rank=global_rank())
        return found

    def memory(self, name: str) -> torch.Tensor:
        live = self._wanted[self._twins.get(name, name)]
        if self.streaming and name not in self._twins:
            if not self.dirty:
                self._touch()
            return live.detach()
        shadow = self._own_shadow()
        shadow.version = None
        memory = shadow.tensors.get(name)
        if memory is None or not _alike(memory, live):
            memory = shadow.tensors[name] = _empty_like(live)
            self._base = None
        return memory

    def place(self, name: str) -> WholePlace | None:
        return self._parts.get(self._twins.get(name, name))

    def _own_shadow(self) -> _Shadow:
        if self._shadow is None:
            raise AssertionError("there is a shadow from `select` to the commit")
        return self._shadow

    def forget(self) -> None:
        self._base = None
        self._kept.forget()
        self._publisher = self._kept.publisher

    def _note_places(self) -> None:
        wanted = {memory_of(live) for live in self._wanted.values()}
        places = ((name, memory_of(tensor)) for name, tensor in self._named().items())
        self._places = {name: place for name, place in places if place in wanted}

    def _check_places(self) -> None:
        """Raise `StateMismatch` if a tensor that is to be filled isn't the one in ``into`` any more."""
        if self._back:
            return  # `load_state_dict` finds the tensors of this moment
        now = self._named()
        replaced = [name for name, place in self._places.items() if name not in now or memory_of(now[name]) != place]
        if replaced:
            raise StateMismatch(
                f"{listed(replaced)} {'was' if len(replaced) == 1 else 'were'} replaced by another tensor since the "
                "version was fetched: the commit would not reach what is used now. Fetch it again",
                mismatched=tuple(replaced),
            )

    def complete(self, name: str) -> None:
        self._complete.add(name)
        for twin, other in self._twins.items():
            if name in (twin, other) and {twin, other} <= self._complete:
                mine, theirs = (local_tensor(self.memory(one)).contiguous() for one in (other, twin))
                if not torch.equal(compat.as_bytes(mine), compat.as_bytes(theirs)):
                    raise twins_differ(other, twin)

    def commit(self, version: int) -> None:
        content = self._publisher, version
        if self.streaming:
            self._check_places()
            self._is_live(version, content)
        else:
            # The same version again is copied: someone may have reason to.
            standing = {} if self._changed_since == content else self.standing()
            self.fill(version, partial(self._write_shadow, standing=standing), content)
            shadow = self._own_shadow()
            # Under other names it has what is older.
            shadow.tensors = {name: shadow.tensors[name] for name in (*self._wanted, *self._twins)}
            shadow.version, shadow.publisher = version, self._publisher
        self._give_back()

    def changed(self, changes: Mapping[str, Changes]) -> None:
        self._changed, self._changed_since = changes, (self._publisher, self._base)

    def _write_shadow(self, lives: Mapping[str, torch.Tensor], standing: Mapping[str, Hashable]) -> None:
        shadow = self._own_shadow()
        writes = []
        for name, live in lives.items():
            known = self._changed.get(name) if standing.get(name, self) == self._changed_since else None
            steps = None if known is None else (known,)
            writes.append(LiveWrite(local_tensor(live), local_tensor(shadow.tensors[name]), steps=steps))
        write_live(writes)

    def standing(self) -> Mapping[str, Hashable]:
        _, stamps = self._kept.live or (None, {})
        if not self.scatters or self._back or self._twins:
            return {}
        found: dict[str, Hashable] = {}
        for name, live in self._wanted.items():
            stamp = stamps.get(id(live))
            if stamp is not None and live.is_cpu and not compat.is_dtensor(live) and stamp.has(name, self.place(name)):
                found[name] = stamp.content
        return found

    def fill(self, version: int, write: Callable[[Mapping[str, torch.Tensor]], None], content: Hashable = None) -> None:
        self._check_places()
        self._touch()
        write({name: live.detach() for name, live in self._wanted.items()})
        _finish([local_tensor(live) for live in self._wanted.values()])
        self._is_live(version, content)

    def _is_live(self, version: int, content: Hashable) -> None:
        for back in self._back:
            back.load({key: one.value for key, one in back.given.items()})
        stamps = {id(live): LiveStamp.of(live, name, self.place(name), content) for name, live in self._wanted.items()}
        self._kept.live = (version, stamps) if self._publisher == self._kept.publisher else None
        self._committed(version)
        self.dirty = False
        allow_calls(self.into)

    def _touch(self) -> None:
        """Note that live tensors are about to be written to."""
        self.dirty = True
        self._kept.live = None
        refuse_calls(self.into)

    def abandon(self) -> None:
        self._wanted, self._parts, self._twins, self._places = {}, {}, {}, {}
        self._give_back()

    def _give_back(self) -> None:
        shadow, self._shadow, self._changed = self._shadow, None, {}
        if shadow is not None:
            self._kept.give(shadow)


class CallbackTarget:
    """See the module; implements `Destination`."""

    base = None
    scatters = False
    twins: Mapping[str, str] = {}

    def __init__(
        self,
        into: Apply,
        kept: _ReceiverMemory,
        committed: Callable[[int], None],
        *,
        streaming: bool,
        choice: NameChoice | None = None,
    ) -> None:
        self.into = into
        self.streaming = streaming
        self.dirty = False
        self.forget = kept.forget
        self._committed = committed
        self._choice = choice or NameChoice()
        self._published: Mapping[str, TensorInfo] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._passed: set[str] = set()

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        self._choice.check(tuple(map(_unwrapped, published)), where="published")
        taken = _taken(published, self._choice)
        if isinstance(self.into, CheckedApply):
            self.into.select(taken)
        self._published, self._made, self._passed = taken, {}, set()
        return tuple(taken)

    def place(self, name: str) -> WholePlace | None:
        del name
        return None

    def wanted(self) -> Sequence[Wanted]:
        return [Wanted(name, info.dtype, info.shape, whole(info.shape)) for name, info in self._published.items()]

    def memory(self, name: str) -> torch.Tensor:
        if name not in self._made:
            shape, dtype, _ = self._published[name]
            self._made[name] = torch.empty(shape, dtype=torch_dtype(dtype))
        return self._made[name]

    def complete(self, name: str) -> None:
        if self.streaming:
            self._pass(name)

    def commit(self, version: int) -> None:
        for name in list(self._made):
            self._pass(name)
        self._committed(version)
        self.dirty = False

    def changed(self, changes: Mapping[str, Changes]) -> None:
        """Do nothing: what is passed to a function is new memory, filled whole."""

    def standing(self) -> Mapping[str, Hashable]:
        return {}

    def fill(self, version: int, write: Callable[[Mapping[str, torch.Tensor]], None], content: Hashable = None) -> None:
        del content
        for name in self._published:
            if name not in self._passed:
                write({name: self.memory(name)})
                self._pass(name)
        self.commit(version)

    def _pass(self, name: str) -> None:
        """Call the function; if it raises, the tensor stays for the next try."""
        self.dirty = True
        self.into(name, self._made[name])
        self._passed.add(name)
        del self._made[name]

    def abandon(self) -> None:
        self._made = {}


def twins_differ(name: str, twin: str) -> StateMismatch:
    """Return the error for two names of one live tensor that are published with different values."""
    return StateMismatch(
        f"`{name}` and `{twin}` are published with different values, but are one tensor here (tied weights): only one "
        "can be kept. Publish one of them, publish equal values, or untie them here",
        mismatched=(name, twin),
    )


class FetchedMemory:
    """A version that lies complete and verified in a destination's memory; implements `FetchedVersion`."""

    def __init__(
        self,
        destination: Destination,
        version: int,
        meta: Mapping[str, Any],
        seconds: Mapping[str, float],
        tell: Callable[[float], None] | None = None,
    ) -> None:
        """tell: called by `tell_committed`."""
        self.version = version
        self.meta = meta
        self.seconds = seconds
        self._destination = destination
        self._tell = tell

    def commit(self) -> None:
        self._destination.commit(self.version)

    def tell_committed(self, seconds: float) -> None:
        if self._tell is not None:
            self._tell(seconds)

    def release(self) -> None:
        self._destination.abandon()


def _taken(published: Mapping[str, TensorInfo], choice: NameChoice) -> Mapping[str, TensorInfo]:
    """Return what ``choice`` takes. Raises `ConfigError` for quantized values without their scales, or scales alone."""
    if choice.takes_all:
        return published
    taken = {name: info for name, info in published.items() if choice.takes(_unwrapped(name))}
    names = StoredNames(published)
    for name, info in published.items():
        for scales in scales_beside(name, names) if info.dtype.startswith("float8") else ():
            if (name in taken) != (scales in taken):
                one, other = (name, scales) if name in taken else (scales, name)
                raise ConfigError(
                    f"include, exclude: `{one}` is chosen without `{other}`, but values and their scales are only "
                    "right together; choose both or neither",
                    field="include",
                )
    return taken


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
