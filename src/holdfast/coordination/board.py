"""Votes and deadlines over a small shared key space. Torch-free: a Store is passed in and used by duck typing.

    LocalBoard   the ranks of one process: one rank, or one thread per rank
    StoreBoard   a ``torch.distributed`` Store (TCPStore, FileStore, ...) under a prefix

Two kinds of keys: one value (`Board.set`, `Board.get`), and a list (`Board.append`, `Board.wait_entries`) that all
ranks add to and one rank reads whole: a coordinator of 16,384 ranks reads one value, not 16,384. A request costs a
TCPStore's server 15 to 30 us, so polling a key is one request, and so is posting a value.

Guarantees: nothing here waits without a deadline, even if the Store's host vanishes without closing its connection. A
lost connection is reconnected (``coordination.store``). Waiting blocks no other user of the Store: waits are short
polls with increasing pauses; with more ranks they are rarer, so that one Store can serve 16,384 ranks.
Assumes: a key is written before other ranks learn its name, and deleted only when no rank will read it again.
Does not: issue collectives, pickle anything, or read the wall clock.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from holdfast.coordination.store import BoardLost, Outage, StoreClient
from holdfast.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Board", "BoardLost", "LocalBoard", "StoreBoard"]

CALL_TIMEOUT_S: Final = 30.0
"""Timeout of one request; after it the Store counts as lost."""
_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 0.02
_LOOKS_PER_S: Final = 16_000
"""Upper limit on polls per second by all waiting ranks together: a fifth of what a TCPStore can serve."""
_BULK_KEYS: Final = 1024
_NEVER: Final = b"\x00holdfast: no key ever has this value"
_LENGTH_BYTES: Final = 4
_T = TypeVar("_T")


class Board(Protocol):
    """A key space that all ranks of a group share. Thread-safe.

    Values are bytes and may be empty, except for `compare_set`. Every method raises `BoardLost` if the board can't be
    reached; those that wait raise `DeadlineExceeded`, naming what was missing, when their deadline passes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, *, timeout_s: float, waiting_for: str) -> bytes:
        """Wait for ``key`` and return its value."""
        ...

    def try_get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it is absent; doesn't wait."""
        ...

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Set ``key`` if it is absent; return its value: the first writer's, on every rank."""
        ...

    def add(self, key: str, amount: int = 1) -> int:
        """Add to the number at ``key`` (0 if absent) and return the sum. Such a key is for `add` alone.

        The only call that is not retried when a connection ends: after `BoardLost` it may have been counted.
        """
        ...

    def gather(self, keys: Sequence[str], *, timeout_s: float, waiting_for: str) -> list[bytes]:
        """Wait for all ``keys`` and return their values, in order."""
        ...

    def append(self, key: str, value: bytes) -> None:
        """Add ``value`` to the list at ``key``; other ranks can read it when this returns.

        Equal values count once: a lost connection may repeat the request. Such a key is for lists alone.
        """
        ...

    def wait_entries(
        self, key: str, count: int, *, timeout_s: float, waiting_for: str, unless: str | None = None
    ) -> list[bytes] | None:
        """Wait for ``count`` entries of the list at ``key``, in any order; None once the key ``unless`` exists."""
        ...

    def try_entries(self, key: str) -> list[bytes]:
        """Return the list at ``key`` as it is now; doesn't wait."""
        ...

    def delete_list(self, key: str) -> None:
        """Remove the list at ``key``, to which no rank adds any more; nothing happens if it is absent."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``, if it exists."""
        ...

    def clone(self) -> Board:
        """Return a client of the same board for another thread, closed separately."""
        ...

    def close(self) -> None:
        """Close this client; idempotent. Waits on it end with `BoardLost`."""
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
    """A `Board` in this process's memory: ``LocalBoard()`` for one rank, `of_world` for several."""

    def __init__(self, rank: int = 0, world: int = 1, _memory: _Memory | None = None) -> None:
        assert 0 <= rank < world
        self.rank = rank
        self.world = world
        self._memory = _memory if _memory is not None else _Memory()
        self._closed = False

    @classmethod
    def of_world(cls, world: int) -> list[LocalBoard]:
        """Return a board for each rank, over one memory."""
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
        """Return all keys, sorted; for tests that look for leftovers."""
        with self._memory.changed:
            return sorted([*self._memory.values, *self._memory.lists])

    def _check(self) -> None:
        if self._closed:
            raise BoardLost("this board was closed")


class StoreBoard:
    """A `Board` over ``store``, under ``prefix``, for ``rank`` of ``world``.

    ``store`` is any ``torch.distributed`` Store that all ranks reach. If torch can clone it (2.8 and later), this uses
    its own connection, shared by all clones of the board: no call on it blocks, and a Store's host has a limit of open
    files. With older versions it uses the given connection, where another user's blocking wait delays ours.
    ``call_timeout_s`` limits each single request; a board that doesn't answer within it is lost.
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
        # A TCPStore sends no response to `set`: only a request after it shows that the connection was not lost.
        full = self._full(key)
        self._call(lambda store: (store.set(full, value), store.check([full])))

    def get(
        self, key: str, *, timeout_s: float, waiting_for: str, accept: Callable[[bytes], bool] | None = None
    ) -> bytes:
        """Wait for a value of ``key`` that ``accept`` returns True for; see `Board.get`."""
        for _ in self._looks(timeout_s):
            value = self.try_get(key)
            if value is not None and (accept is None or accept(value)):
                return value
        raise _late(waiting_for, timeout_s)

    def try_get(self, key: str) -> bytes | None:
        return self._call(functools.partial(_peek, key=self._full(key)))

    def compare_set(self, key: str, value: bytes) -> bytes:
        assert value  # this request can't tell an empty value from an absent one
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

    @property
    def client(self) -> StoreClient:
        """Return the connection that clones share."""
        return self._client

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
        """Yield at growing intervals: first at once, last after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        # With many ranks the first polls are rare too, or all ranks together would flood the Store.
        pause_s = max(_FIRST_LOOK_S, self._slowest_look_s / 16)
        while True:
            yield
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._closed.wait(min(pause_s, left))
            pause_s = min(pause_s * 1.5, self._slowest_look_s)


def _peek(store: Any, *, key: str) -> bytes | None:
    """Return the value of ``key``, or None, in one request: a Store's `get` would wait for an absent key.

    A `compare_set` whose comparison never holds changes nothing and returns the current value; for an absent key it
    returns the expected value.
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


# Lists. A Store with `append` holds all entries, with their lengths, in the value of one key, and their count in
# another, which is polled. Any other Store has one key per entry. A repeated entry counts twice, and is read once.


def _append(store: Any, *, key: str, value: bytes) -> None:
    if _is_extended(store):
        store.append(f"{key}/entries", len(value).to_bytes(_LENGTH_BYTES, "little") + value)
        # A TCPStore sends no response to `append`, but handles the next request on this connection after it.
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
