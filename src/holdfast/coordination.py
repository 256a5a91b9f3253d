"""Votes and deadlines over a small shared key space. Torch-free: a Store is passed in and used by duck typing.

    LocalBoard   the ranks of one process: one rank, or one thread a rank
    StoreBoard   a ``torch.distributed`` Store (TCPStore, FileStore, ...) under a prefix

Two kinds of keys: one value (`Board.set`, `Board.get`), and a list (`Board.append`, `Board.wait_entries`) that all
ranks add to and one rank reads whole: what a coordinator wants of 16,384 ranks is one thing to read, not 16,384. What a
TCPStore answers costs its server 15 to 30 us, so a look at a key is one request, and telling something is, too.

Guarantees: nothing here waits without a deadline, even if the Store's host vanishes without closing its connection. A
connection that was lost is made anew (``store_client``). Waiting blocks no other user of the Store, as waits are short
looks that back off; the more ranks there are the rarer they get, so that a Store of 16,384 ranks serves them.
Assumes: a key is written before anyone is told of it, and deleted only when nobody will look for it again.
Does not: issue collectives, pickle anything, or read the wall clock.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from holdfast.errors import DeadlineExceeded
from holdfast.store_client import BoardLost, Outage, StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Board", "BoardLost", "LocalBoard", "StoreBoard"]

CALL_TIMEOUT_S: Final = 30.0
"""After so long without an answer to one request a Store is lost."""
_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 0.02
_LOOKS_PER_S: Final = 16_000
"""What all ranks together may ask of the Store while they wait: a fifth of what a TCPStore answers."""
_BULK_KEYS: Final = 1024
_NEVER: Final = b"\x00holdfast: no key ever has this value"
_LENGTH_BYTES: Final = 4
_T = TypeVar("_T")


class Board(Protocol):
    """A key space that all ranks of a group share. Any thread may call anything.

    Values are bytes and may be empty, but for `compare_set`. Every method raises `BoardLost` if the board can't be
    reached; those that wait raise `DeadlineExceeded`, naming what they waited for, when their deadline passes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, *, timeout_s: float, waiting_for: str) -> bytes:
        """The value of ``key``, as soon as it is there."""
        ...

    def try_get(self, key: str) -> bytes | None:
        """The value of ``key``, or None if it isn't there now; doesn't wait."""
        ...

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Set ``key`` if it is absent; return what it holds now: the first writer's value, for everyone."""
        ...

    def add(self, key: str, amount: int = 1) -> int:
        """Add to the number ``key`` holds (0 if absent) and return the sum. Such a key is for `add` alone.

        The one call that is not repeated when a connection ends: after `BoardLost` it may have been counted.
        """
        ...

    def gather(self, keys: Sequence[str], *, timeout_s: float, waiting_for: str) -> list[bytes]:
        """The values of all ``keys``, in order, as soon as all are there."""
        ...

    def append(self, key: str, value: bytes) -> None:
        """Add ``value`` to the list at ``key``; it is there when this returns.

        Equal values count once: it may be told twice when a connection ends. Such a key is for lists alone.
        """
        ...

    def wait_entries(
        self, key: str, count: int, *, timeout_s: float, waiting_for: str, unless: str | None = None
    ) -> list[bytes] | None:
        """The list at ``key``, in any order, once ``count`` entries are in; None once the key ``unless`` is there."""
        ...

    def try_entries(self, key: str) -> list[bytes]:
        """The list at ``key`` as it is now; doesn't wait."""
        ...

    def delete_list(self, key: str) -> None:
        """Remove the list at ``key``, which nobody adds to any more; absent is fine."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``; absent is fine."""
        ...

    def clone(self) -> Board:
        """The same board for another thread, to be closed by itself."""
        ...

    def close(self) -> None:
        """Let go of this client; idempotent. Waits on it end with `BoardLost`."""
        ...


def _late(waiting_for: str, timeout_s: float, detail: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(
        f"waited {timeout_s:.3g} s for {waiting_for}{detail}: a rank is slow, hangs or has died; look at its log, "
        "or raise the deadline",
        waited_for=waiting_for,
        timeout_s=timeout_s,
    )


def _missing(keys: Sequence[str], absent: Sequence[int]) -> str:
    shown = ", ".join(keys[index] for index in absent[:8])
    return f" ({len(absent)} of {len(keys)} missing: {shown}{', ...' if len(absent) > 8 else ''})"


@dataclass(slots=True)
class _Memory:
    values: dict[str, bytes] = field(default_factory=dict)
    lists: dict[str, dict[bytes, None]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class LocalBoard:
    """A `Board` in this process's memory. ``LocalBoard()`` is one rank's; `of_world` makes one a rank, shared."""

    def __init__(self, rank: int = 0, world: int = 1, _memory: _Memory | None = None) -> None:
        assert 0 <= rank < world
        self.rank = rank
        self.world = world
        self._memory = _memory if _memory is not None else _Memory()
        self._closed = False

    @classmethod
    def of_world(cls, world: int) -> list[LocalBoard]:
        """One board a rank over one memory."""
        memory = _Memory()
        return [cls(rank, world, memory) for rank in range(world)]

    def set(self, key: str, value: bytes) -> None:
        with self._memory.changed:
            self._check()
            self._memory.values[key] = bytes(value)
            self._memory.changed.notify_all()

    def get(self, key: str, *, timeout_s: float, waiting_for: str) -> bytes:
        return self.gather([key], timeout_s=timeout_s, waiting_for=waiting_for)[0]

    def try_get(self, key: str) -> bytes | None:
        with self._memory.changed:
            self._check()
            return self._memory.values.get(key)

    def compare_set(self, key: str, value: bytes) -> bytes:
        assert value
        with self._memory.changed:
            self._check()
            current = self._memory.values.setdefault(key, bytes(value))
            self._memory.changed.notify_all()
            return current

    def add(self, key: str, amount: int = 1) -> int:
        with self._memory.changed:
            self._check()
            total = int(self._memory.values.get(key, b"0")) + amount
            self._memory.values[key] = b"%d" % total
            self._memory.changed.notify_all()
            return total

    def gather(self, keys: Sequence[str], *, timeout_s: float, waiting_for: str) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        values = self._memory.values
        with self._memory.changed:
            while True:
                self._check()
                absent = [index for index, key in enumerate(keys) if key not in values]
                if not absent:
                    return [values[key] for key in keys]
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _late(waiting_for, timeout_s, _missing(keys, absent))
                self._memory.changed.wait(left)

    def append(self, key: str, value: bytes) -> None:
        with self._memory.changed:
            self._check()
            self._memory.lists.setdefault(key, {})[bytes(value)] = None
            self._memory.changed.notify_all()

    def wait_entries(
        self, key: str, count: int, *, timeout_s: float, waiting_for: str, unless: str | None = None
    ) -> list[bytes] | None:
        deadline = time.monotonic() + timeout_s
        with self._memory.changed:
            while True:
                self._check()
                if unless in self._memory.values:
                    return None
                found = self._memory.lists.get(key, {})
                if len(found) >= count:
                    return list(found)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _late(waiting_for, timeout_s, f" ({len(found)} of {count} are there)")
                self._memory.changed.wait(left)

    def try_entries(self, key: str) -> list[bytes]:
        with self._memory.changed:
            self._check()
            return list(self._memory.lists.get(key, {}))

    def delete_list(self, key: str) -> None:
        with self._memory.changed:
            self._check()
            self._memory.lists.pop(key, None)

    def delete(self, key: str) -> None:
        with self._memory.changed:
            self._check()
            self._memory.values.pop(key, None)

    def clone(self) -> LocalBoard:
        return LocalBoard(self.rank, self.world, self._memory)

    def close(self) -> None:
        with self._memory.changed:
            self._closed = True
            self._memory.changed.notify_all()

    def keys(self) -> list[str]:
        """All keys there are now, sorted; for tests that look for leftovers."""
        with self._memory.changed:
            return sorted([*self._memory.values, *self._memory.lists])

    def _check(self) -> None:
        if self._closed:
            raise BoardLost("this board was closed")


class StoreBoard:
    """A `Board` over ``store``, under ``prefix``, for ``rank`` of ``world``.

    ``store`` is any ``torch.distributed`` Store that all ranks reach. A connection of our own is made from it where
    torch can (2.8 and later) and shared by all clones, as no call on it waits and a Store's host has a limit of open
    files; with older versions the Store's own is used, and another user's blocking wait on it holds up ours.
    ``call_timeout_s`` bounds each single request; a board that doesn't answer within it is lost.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        prefix: str,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        _client: StoreClient | None = None,
    ) -> None:
        assert 0 <= rank < world
        self.rank = rank
        self.world = world
        self.prefix = prefix
        self._client = _client if _client is not None else StoreClient(store, call_timeout_s, Outage())
        self._client.enter()
        self._closed = threading.Event()
        self._slowest_look_s = max(_LAST_LOOK_S, world / _LOOKS_PER_S)

    def set(self, key: str, value: bytes) -> None:
        # A TCPStore answers no `set`: without the question one that a dropped connection has swallowed goes unnoticed.
        full = self._full(key)
        self._call(lambda store: (store.set(full, value), store.check([full])))

    def get(self, key: str, *, timeout_s: float, waiting_for: str) -> bytes:
        for _ in self._looks(timeout_s):
            value = self.try_get(key)
            if value is not None:
                return value
        raise _late(waiting_for, timeout_s)

    def try_get(self, key: str) -> bytes | None:
        return self._call(functools.partial(_peek, key=self._full(key)))

    def compare_set(self, key: str, value: bytes) -> bytes:
        assert value  # a Store can't tell an empty value from an absent one here
        return bytes(self._call(lambda store: store.compare_set(self._full(key), "", value)))

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._call(lambda store: store.add(self._full(key), amount), again=False))

    def gather(self, keys: Sequence[str], *, timeout_s: float, waiting_for: str) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        found: list[bytes] = []
        for start in range(0, len(keys), _BULK_KEYS):
            full = [self._full(key) for key in keys[start : start + _BULK_KEYS]]
            are_there = functools.partial(_are_there, keys=full)
            if not any(self._call(are_there) for _ in self._looks(deadline - time.monotonic())):
                absent = [index for index, key in enumerate(keys) if self.try_get(key) is None]
                if absent:
                    raise _late(waiting_for, timeout_s, _missing(keys, absent))
            found.extend(self._call(functools.partial(_read_all, keys=full)))
        return found

    def append(self, key: str, value: bytes) -> None:
        self._call(functools.partial(_append, key=self._full(key), value=value))

    def wait_entries(
        self, key: str, count: int, *, timeout_s: float, waiting_for: str, unless: str | None = None
    ) -> list[bytes] | None:
        told = 0
        found: list[bytes] = []
        for _ in self._looks(timeout_s):
            if unless is not None and self.try_get(unless) is not None:
                return None
            told = self._call(functools.partial(_count, key=self._full(key)))
            if told >= count:
                found = self._call(functools.partial(_entries, key=self._full(key), told=told))
                if len(found) >= count:
                    return found
        raise _late(waiting_for, timeout_s, f" ({len(found) or told} of {count} are there)")

    def try_entries(self, key: str) -> list[bytes]:
        full = self._full(key)
        return self._call(lambda store: _entries(store, key=full, told=_count(store, key=full)))

    def delete_list(self, key: str) -> None:
        self._call(functools.partial(_delete_list, key=self._full(key)))

    def delete(self, key: str) -> None:
        self._call(lambda store: store.delete_key(self._full(key)))

    def clone(self) -> StoreBoard:
        if self._closed.is_set():
            raise BoardLost("this board was closed")
        return StoreBoard(None, self.rank, self.world, self.prefix, _client=self._client)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._client.leave()

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _call(self, function: Callable[[Any], _T], *, again: bool = True) -> _T:
        if self._closed.is_set():
            raise BoardLost("this board was closed")
        result: _T = self._client.call(function, again=again)
        return result

    def _looks(self, timeout_s: float) -> Iterator[None]:
        """Once now, then at growing intervals, for the last time when ``timeout_s`` has passed."""
        deadline = time.monotonic() + timeout_s
        # Where looks are rare the first are, too: else all ranks together would flood the Store with them.
        pause_s = max(_FIRST_LOOK_S, self._slowest_look_s / 16)
        while True:
            yield
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._closed.wait(min(pause_s, left))
            pause_s = min(pause_s * 1.5, self._slowest_look_s)


def _peek(store: Any, *, key: str) -> bytes | None:
    """The value of ``key``, or None, in one request: a Store's `get` waits for an absent key.

    A comparison that never holds changes nothing and is answered with the value there is; for an absent key, with
    what was expected.
    """
    value = bytes(store.compare_set(key, _NEVER, _NEVER))
    if value == _NEVER or (not value and not store.check([key])):
        return None
    return value


def _are_there(store: Any, *, keys: list[str]) -> bool:
    return bool(store.check(keys))


def _is_extended(store: Any) -> bool:
    return bool(getattr(store, "has_extended_api", bool)())


def _read_all(store: Any, *, keys: list[str]) -> list[bytes]:
    if _is_extended(store):
        return [bytes(value) for value in store.multi_get(keys)]
    return [bytes(store.get(key)) for key in keys]


# Lists. A Store that can append holds all entries, with their lengths, in the value of one key, and how many were told
# in another, to look at over and over. Any other Store has a key an entry. What is told twice counts twice, and is read
# once.


def _append(store: Any, *, key: str, value: bytes) -> None:
    if _is_extended(store):
        store.append(f"{key}/entries", len(value).to_bytes(_LENGTH_BYTES, "little") + value)
        # A TCPStore doesn't answer an `append`; what it answers next on this connection, it has done after it.
        store.add(f"{key}/told", 1)
    else:
        store.set(f"{key}/{store.add(f'{key}/told', 1)}", value)


def _count(store: Any, *, key: str) -> int:
    return int(_peek(store, key=f"{key}/told") or 0)


def _entries(store: Any, *, key: str, told: int) -> list[bytes]:
    if not told:
        return []
    if not _is_extended(store):
        return list(dict.fromkeys(_read_all(store, keys=[f"{key}/{number}" for number in range(1, told + 1)])))
    data = _peek(store, key=f"{key}/entries") or b""
    found: dict[bytes, None] = {}
    at = 0
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        found[data[at + _LENGTH_BYTES : end]] = None
        at = end
    return list(found)


def _delete_list(store: Any, *, key: str) -> None:
    if _is_extended(store):
        store.delete_key(f"{key}/entries")
    else:
        for number in range(1, _count(store, key=key) + 1):
            store.delete_key(f"{key}/{number}")
    store.delete_key(f"{key}/told")
