"""What happens, told to whoever listens: hooks and counters. Torch-free.

Guarantees: a hook never disturbs a save: what it raises is logged and dropped. Hooks run in the order they were added,
on the thread where the event happened (often a background one), one event at a time per thread. Counters only go up,
and a snapshot is consistent with itself. With no hook added an event costs one tuple read.
Does not: queue or batch events: a hook that is slow holds up the thread that tells it. Forked children start with the
counters their parent had.
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
_lock = threading.RLock()  # what counts may be a signal handler, in the middle of another count
_counters: dict[str, int] = {}
# Replaced as a whole under the lock, so that `emit` can walk it without one.
_hooks: tuple[tuple[object, Callable[[Event], object]], ...] = ()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: what, as ``noun.verb``: ``save.staged``, ``save.published``, ``save.failed``, ...
        time_ns: when, nanoseconds since the epoch by this host's wall clock; not for measuring durations.
        step: of the save or load it belongs to, None where it belongs to none.
        rank: this process's rank in the saving group, None where there is no group.
        attempt: id of the attempt it belongs to, None where it belongs to none.
        path: of what it is about, None where there is none.
        fields: whatever else is known, by name; units end the names.
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
    """All counters of this process at one moment; ``statistics()["saves_published"]`` is 0 for what never happened."""

    counters: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.counters.get(name, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.counters)

    def __len__(self) -> int:
        return len(self.counters)


def add_hook(hook: Callable[[Event], object]) -> Callable[[], None]:
    """Call ``hook`` with every `Event` of this process from now on; returns at once.

    Returns a function that removes it again (idempotent; an event being told on another thread may still reach it).
    ``hook`` is called on background threads too, must not block, and whatever it raises is logged and dropped.
    The same function may be added twice and is then called twice. Any thread may call this.
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
    """Tell every hook that ``kind`` happened; returns when all have been told, and never raises for a hook."""
    hooks = _hooks
    if not hooks:
        return
    event = Event(kind, step=step, rank=rank, attempt=attempt, path=path, fields=MappingProxyType(fields))
    for _, hook in hooks:
        _tell(hook, event)


def _tell(hook: Callable[[Event], object], event: Event) -> None:
    try:
        hook(event)
    except Exception:  # noqa: BLE001 - a listener is not part of the save, whatever it raises
        _log.exception("a hook raised on %s; it is ignored", event.kind)


def count(name: str, amount: int = 1) -> None:
    """Add ``amount`` (0 or more) to the counter ``name``. Any thread may call this."""
    assert amount >= 0
    with _lock:
        _counters[name] = _counters.get(name, 0) + amount


def statistics() -> Statistics:
    """All counters of this process now: an immutable snapshot, consistent with itself. Any thread may call this."""
    with _lock:
        return Statistics(MappingProxyType(dict(_counters)))
