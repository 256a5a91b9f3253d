"""Where publisher ranks and receivers find one another: a few small values under names, written by publisher rank 0.

    a path                 a shared directory: one small file a name, replaced atomically
    a Store                any ``torch.distributed`` Store that both sides reach
    "tcp://host:port"      a TCPStore, which publisher rank 0 hosts there: two jobs of torchrun need no more

Guarantees: a value is read whole or not at all. `Rendezvous.settle` gives every caller the first writer's value. No
call here takes longer than some seconds, whatever became of the other side; by way of `Asking`, than its caller has.
Assumes: one publisher a rendezvous. What a publisher that died has left behind is replaced by the next one.
Does not: wait for a name to appear; whoever looks for it does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.arguments import checked_path
from holdfast.coordination import StoreBoard
from holdfast.errors import ConfigError, StorageError
from holdfast.store_client import BoardLost
from holdfast.sync.deadline import Deadline
from holdfast.sync.waiting import Aside, Leaving

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES: Final = "publishers"
"""The name under which rank 0 puts the `Places`."""
COMMIT: Final = b"commit"
ABORT: Final = b"abort"
_PREFIX: Final = "holdfast/sync"
_TCP: Final = "tcp://"
_CALL_S: Final = 5.0
_CHECK_S: Final = 0.2
_temporaries = itertools.count()


def decision_key(incarnation: str, session: int) -> str:
    """The name under which it is settled whether the fleet of a session commits: `COMMIT` or `ABORT`."""
    return f"decision-{incarnation}-{session}"


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one publisher rank listens."""

    hosts: tuple[str, ...]
    port: int
    machine: str
    """Of which host; equal on both sides of a loopback connection."""


class Places(msgspec.Struct, frozen=True, array_like=True):
    """All ranks of a publisher in one of its lives. ``token``: what whoever connects must show."""

    incarnation: str
    token: str
    ranks: tuple[Place, ...]


class Rendezvous(Protocol):
    """Any thread may call anything, one at a time. Raises `StorageError` or `BoardLost` where it can't be reached."""

    @property
    def shown(self) -> str:
        """What it is called in messages."""
        ...

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, or None if there is none now."""
        ...

    def settle(self, key: str, value: bytes) -> bytes:
        """Put ``value`` unless there is one, and return the one there is then. Such a key is for this alone."""
        ...

    def delete(self, key: str) -> None:
        """Absent is fine."""
        ...

    def close(self) -> None: ...


def open_rendezvous(where: Any, *, hosting: bool) -> Rendezvous:
    """The rendezvous that users name by ``where``; ``hosting``: this process is publisher rank 0.

    Doesn't wait for the other side. Raises `ConfigError`, and `StorageError` for an address that can't be listened on.
    """
    if isinstance(where, str) and where.startswith(_TCP):
        return TcpRendezvous(where, hosting=hosting)
    if isinstance(where, (str, os.PathLike)):
        return DirectoryRendezvous(checked_path(where, field="rendezvous"))
    if all(hasattr(where, method) for method in ("set", "check", "compare_set", "delete_key")):
        return StoreRendezvous(where)
    raise ConfigError(
        f"rendezvous must be the path of a shared directory, 'tcp://host:port' or a torch.distributed Store, "
        f"not {where!r}",
        field="rendezvous",
    )


class DirectoryRendezvous:
    """See the module. The directory is made with the first value put there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.shown = path

    def put(self, key: str, value: bytes) -> None:
        with self._refusals():
            os.replace(self._written(value), self._at(key))

    def get(self, key: str) -> bytes | None:
        with self._refusals():
            try:
                with open(self._at(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def settle(self, key: str, value: bytes) -> bytes:
        with self._refusals():
            written = self._written(value)
            try:
                os.link(written, self._at(key))
            except FileExistsError:
                with open(self._at(key), "rb") as file:
                    return file.read()
            finally:
                os.unlink(written)
            return value

    def delete(self, key: str) -> None:
        with self._refusals(), contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(key))

    def close(self) -> None:
        pass

    def _at(self, key: str) -> str:
        return os.path.join(self._path, f"holdfast-{key}")

    def _written(self, value: bytes) -> str:
        """A file of this process's own that holds ``value``."""
        os.makedirs(self._path, exist_ok=True)
        path = os.path.join(self._path, f".{socket.gethostname()}-{os.getpid()}-{next(_temporaries)}")
        with open(path, "wb") as file:
            file.write(value)
        return path

    @contextlib.contextmanager
    def _refusals(self) -> Any:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the rendezvous at {self._path} can't be used: {error.strerror}; both sides have to write there",
                path=self._path,
                errno=error.errno,
            ) from error


class StoreRendezvous:
    """See the module. The Store stays its owner's."""

    def __init__(self, store: Any, shown: str = "the given Store") -> None:
        self.shown = shown
        self._board = StoreBoard(store, 0, 1, _PREFIX, call_timeout_s=_CALL_S)

    def put(self, key: str, value: bytes) -> None:
        self._board.set(key, value)

    def get(self, key: str) -> bytes | None:
        return self._board.try_get(key)

    def settle(self, key: str, value: bytes) -> bytes:
        return self._board.compare_set(key, value)

    def delete(self, key: str) -> None:
        self._board.delete(key)

    def close(self) -> None:
        self._board.close()


class TcpRendezvous:
    """See the module. A connection that was lost is made anew with the next call: its host may have been restarted."""

    def __init__(self, where: str, *, hosting: bool) -> None:
        host, _, port = where.removeprefix(_TCP).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"rendezvous {where!r}: expected 'tcp://host:port'", field="rendezvous")
        self.shown = where
        self._host, self._port = host.strip("[]"), int(port)
        self._inner: StoreRendezvous | None = None
        self._connecting: Aside | None = None
        self._has_connected = threading.Event()
        # The Store ends with the object that hosts it; what uses it has a connection of its own.
        self._hosted = self._store(hosting=True) if hosting else None
        if self._hosted is not None:
            self._inner = StoreRendezvous(self._hosted, where)

    def put(self, key: str, value: bytes) -> None:
        self._call(lambda inner: inner.put(key, value))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._call(lambda inner: inner.get(key))
        return found

    def settle(self, key: str, value: bytes) -> bytes:
        return bytes(self._call(lambda inner: inner.settle(key, value)))

    def delete(self, key: str) -> None:
        self._call(lambda inner: inner.delete(key))

    def close(self) -> None:
        self._disconnect()
        self._hosted = None

    def _disconnect(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()

    def _call(self, function: Callable[[StoreRendezvous], Any]) -> Any:
        if self._inner is None:
            self._inner = StoreRendezvous(self._store(hosting=False), self.shown)
        try:
            return function(self._inner)
        except BoardLost:
            self._disconnect()
            raise

    def _store(self, *, hosting: bool) -> Any:
        from holdfast import _torch_compat as compat

        try:
            if hosting:
                return compat.tcp_store(self._host, self._port, hosting=True, timeout=timedelta(seconds=_CALL_S))
            # torch tries long and loudly to reach a host that refuses; this says so at once.
            socket.create_connection((self._host, self._port), _CALL_S).close()
            return self._connected()
        except (OSError, RuntimeError) as error:
            if not hosting:
                raise BoardLost(f"nothing answers at {self.shown}: {error}") from error
            raise StorageError(
                f"publisher rank 0 can't listen at {self.shown}: {error}; give an address of its host, and a free port",
                path=self.shown,
                errno=getattr(error, "errno", None),
            ) from error

    def _connected(self) -> Any:
        """A client of the Store. Where who listens there doesn't answer, torch waits for ever; this doesn't."""
        from holdfast import _torch_compat as compat

        if self._connecting is None:
            self._has_connected.clear()
            self._connecting = Aside(
                lambda: compat.tcp_store(self._host, self._port, hosting=False, timeout=timedelta(seconds=_CALL_S)),
                self._has_connected.set,
            )
        if not self._has_connected.wait(_CALL_S):
            raise BoardLost(f"what listens at {self.shown} doesn't answer; it may be stopped, or no Store")
        made, self._connecting = self._connecting, None
        return made.result()


class Unanswered(BoardLost):
    """A call did not come back while its caller waited: what it would have said isn't known yet."""


class Asking:
    """Calls on a rendezvous whose host may have stopped: each for as long as its caller has, one at a time.

    What doesn't come back in time is left behind on a thread of its own; the next call waits for it first.
    """

    def __init__(self, rendezvous: Rendezvous, leaving: Leaving) -> None:
        self.shown = rendezvous.shown
        self._rendezvous = rendezvous
        self._leaving = leaving
        self._last: Aside | None = None
        self._came_back = threading.Event()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        found: bytes | None = self._ask(lambda: self._rendezvous.get(key), timeout_s)
        return found

    def settle(self, key: str, value: bytes, timeout_s: float) -> bytes:
        return bytes(self._ask(lambda: self._rendezvous.settle(key, value), timeout_s))

    def _ask(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Raises as the calls do, `Unanswered` where it takes too long; `ConfigError` if the receiver is closed."""
        deadline = Deadline.after(timeout_s)
        if self._last is not None:
            self._wait(self._last, deadline)
        self._came_back.clear()
        self._last = call = Aside(function, self._came_back.set)
        self._wait(call, deadline)
        return call.result()

    def _wait(self, call: Aside, deadline: Deadline) -> None:
        while not call.done:
            self._leaving.check()
            if deadline.passed():
                raise Unanswered(f"{self.shown} did not answer in {deadline.timeout_s:.3g} s")
            self._came_back.wait(min(deadline.left_s(), _CHECK_S))
        self._last = None


def hosts_here(advertised: str | None) -> tuple[str, ...]:
    """Addresses by which other hosts may reach this one, the likeliest first."""
    if advertised is not None:
        return (advertised,)
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks which way the packet would go
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return tuple(dict.fromkeys(found)) or ("127.0.0.1",)


def this_machine() -> str:
    """The same in all processes that reach one another through the loopback interface."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
