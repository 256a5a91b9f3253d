"""Report events to hooks and count them. Torch-free.

Guarantees: a hook never disturbs a save: exceptions in hooks are logged and dropped. Hooks run in the order they were
added, on the thread where the event happened (often a background one), one event at a time per thread. Counters only go
up, and a snapshot is consistent. Without hooks an event costs one tuple read.
Does not: queue or batch events: a slow hook delays the thread that reports the event. Forked children start with the
counters of their parent.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_log = logging.getLogger("holdfast.events")
_lock = threading.RLock()  # reentrant: a signal handler may count in the middle of another count
_counters: dict[str, int] = {}
# Replaced as a whole under the lock, so that `emit` can walk it without one.
_hooks: tuple[tuple[object, Callable[[Event], object]], ...] = ()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a save, load or weight sync.

    Attributes:
        kind: what, as ``noun.verb``: ``save.staged``, ``save.published``, ``save.failed``, ...
        time_ns: when, nanoseconds since the epoch by this host's wall clock; not for measuring durations.
        step: step of the save or load it belongs to, or None.
        rank: this process's rank in the saving group, None where there is no group.
        attempt: id of the attempt it belongs to, or None.
        path: path it is about, or None.
        fields: further values by name; names end with the unit.
    """

    kind: str
    time_ns: int = field(default_factory=time.time_ns)
    step: int | None = None
    rank: int | None = None
    attempt: str | None = None
    path: str | None = None
    fields: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class Statistics:
    """All counters of this process at one moment; ``statistics()["saves_published"]`` is 0 if it never happened."""

    counters: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.counters.get(name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.counters)

    def __len__(self) -> int:
        return len(self.counters)


def add_hook(hook: Callable[[Event], object]) -> Callable[[], None]:
    """Call ``hook`` with every `Event` of this process from now on; returns at once.

    Returns a function that removes it again (idempotent; an event in progress on another thread may still reach it).
    ``hook`` is also called on background threads and must not block; whatever it raises is logged and dropped. The same
    function may be added twice and is then called twice. Thread-safe.
    """
    global _hooks  # noqa: PLW0603 - one process, one list of listeners
    token = object()
    with _lock:
        _hooks = (*_hooks, (token, hook))

    def remove() -> None:
        global _hooks  # noqa: PLW0603
        with _lock:
            _hooks = tuple(entry for entry in _hooks if entry[0] is not token)

    return remove


def emit(
    kind: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    attempt: str | None = None,
    path: str | None = None,
    **fields: Any,
) -> None:
    """Call every hook with an event of ``kind``; returns when all have returned, and never raises a hook's error."""
    hooks = _hooks
    if not hooks:
        return
    event = Event(kind, step=step, rank=rank, attempt=attempt, path=path, fields=MappingProxyType(fields))
    for _, hook in hooks:
        _tell(hook, event)


def _tell(hook: Callable[[Event], object], event: Event) -> None:
    try:
        hook(event)
    except Exception:  # noqa: BLE001 - listeners can't fail a save
        _log.exception("a hook raised on %s; it is ignored", event.kind)


def count(name: str, amount: int = 1) -> None:
    """Add ``amount`` (0 or more) to the counter ``name``. Any thread may call this."""
    assert amount >= 0
    with _lock:
        _counters[name] = _counters.get(name, 0) + amount


def statistics() -> Statistics:
    """Return all counters of this process: an immutable, consistent snapshot. Any thread may call this."""
    with _lock:
        return Statistics(MappingProxyType(dict(_counters)))
