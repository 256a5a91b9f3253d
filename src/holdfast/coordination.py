"""Votes and deadlines over a small shared key space. Torch-free: a Store is passed in and used by duck typing.

    LocalBoard   the ranks of one process: one rank, or one thread a rank
    StoreBoard   a ``torch.distributed`` Store (TCPStore, FileStore, ...) under a prefix

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
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.errors import DeadlineExceeded
from holdfast.store_client import BoardLost, Outage, StoreClient, clone_store

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Board", "BoardLost", "LocalBoard", "StoreBoard"]

_FIRST_LOOK_S: Final = 0.001
_LAST_LOOK_S: Final = 0.02
_LOOKS_PER_S: Final = 16_000
"""What all ranks together may ask of the Store while they wait: a fifth of what a TCPStore answers."""
_BULK_KEYS: Final = 1024


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

    def delete(self, key: str) -> None:
        """Remove ``key``; absent is fine."""
        ...

    def clone(self) -> Board:
        """The same board for another thread, over a connection of its own where the Store can make one."""
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
            return sorted(self._memory.values)

    def _check(self) -> None:
        if self._closed:
            raise BoardLost("this board was closed")


class StoreBoard:
    """A `Board` over ``store``, under ``prefix``, for ``rank`` of ``world``.

    ``store`` is any ``torch.distributed`` Store that all ranks reach. A connection of our own is made from it where
    torch can (2.8 and later); with older versions it is shared, and another user's blocking wait on it holds up ours.
    ``call_timeout_s`` bounds each single request; a board that doesn't answer within it is lost.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        prefix: str,
        *,
        call_timeout_s: float = 30.0,
        _client: StoreClient | None = None,
    ) -> None:
        assert 0 <= rank < world
        self.rank = rank
        self.world = world
        self.prefix = prefix
        self._client = _client if _client is not None else StoreClient(clone_store(store), call_timeout_s, Outage())
        self._slowest_look_s = max(_LAST_LOOK_S, world / _LOOKS_PER_S)

    def set(self, key: str, value: bytes) -> None:
        # A TCPStore answers no `set`: without the question one that a dropped connection has swallowed goes unnoticed.
        full = self._full(key)
        self._client.call(lambda store: (store.set(full, value), store.check([full])))

    def get(self, key: str, *, timeout_s: float, waiting_for: str) -> bytes:
        deadline = time.monotonic() + timeout_s
        value = self._look(key, deadline)
        if value is None:
            raise _late(waiting_for, timeout_s)
        return value

    def try_get(self, key: str) -> bytes | None:
        full = self._full(key)

        def read(store: Any) -> bytes | None:
            # `get` alone would wait for an absent key.
            return bytes(store.get(full)) if store.check([full]) else None

        value: bytes | None = self._client.call(read)
        return value

    def compare_set(self, key: str, value: bytes) -> bytes:
        assert value  # a Store can't tell an empty value from an absent one here
        return bytes(self._client.call(lambda store: store.compare_set(self._full(key), "", value)))

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._client.call(lambda store: store.add(self._full(key), amount), again=False))

    def gather(self, keys: Sequence[str], *, timeout_s: float, waiting_for: str) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        for key in keys:
            if not self._wait_there(key, deadline):
                absent = [index for index, other in enumerate(keys) if not self._there(other)]
                if absent:
                    raise _late(waiting_for, timeout_s, _missing(keys, absent))
        found: list[bytes] = []
        for start in range(0, len(keys), _BULK_KEYS):
            full = [self._full(key) for key in keys[start : start + _BULK_KEYS]]
            found.extend(self._client.call(functools.partial(_read_all, keys=full)))
        return found

    def delete(self, key: str) -> None:
        self._client.call(lambda store: store.delete_key(self._full(key)))

    def clone(self) -> StoreBoard:
        client = self._client
        store = client.call(clone_store)
        clone = StoreClient(store, client.call_timeout_s, client.outage)
        return StoreBoard(store, self.rank, self.world, self.prefix, _client=clone)

    def close(self) -> None:
        self._client.close()

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _there(self, key: str) -> bool:
        return bool(self._client.call(lambda store: store.check([self._full(key)])))

    def _look(self, key: str, deadline: float) -> bytes | None:
        """The value of ``key`` once it is there, None if the deadline passes first."""
        pause_s = _FIRST_LOOK_S
        while (value := self.try_get(key)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._client.closed.wait(min(pause_s, left))
            pause_s = min(pause_s * 1.5, self._slowest_look_s)
        return value

    def _wait_there(self, key: str, deadline: float) -> bool:
        pause_s = _FIRST_LOOK_S
        while not self._there(key):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._client.closed.wait(min(pause_s, left))
            pause_s = min(pause_s * 1.5, self._slowest_look_s)
        return True


def _read_all(store: Any, *, keys: list[str]) -> list[bytes]:
    if hasattr(store, "has_extended_api") and store.has_extended_api():
        return [bytes(value) for value in store.multi_get(keys)]
    return [bytes(store.get(key)) for key in keys]
