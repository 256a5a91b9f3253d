"""Let publisher ranks and receivers find each other: a few small named values, written by publisher rank 0.

    a path                 a shared directory: one small file per name, replaced atomically
    a Store                any ``torch.distributed`` Store that both sides reach
    "tcp://host:port"      a TCPStore, which publisher rank 0 hosts there; works between two jobs of torchrun

Guarantees: values are read atomically. A call takes at most some seconds, whatever the state of the other side; through
`RendezvousClient`, at most its caller's timeout.
Assumes: one publisher per rendezvous. Values left by a publisher that died are replaced by the next one.
Does not: wait for a name to appear; the caller polls.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from holdfast.coordination.board import StoreBoard
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import BoardLost
from holdfast.errors import ConfigError, StorageError
from holdfast.format.decoding import prepare_decoding
from holdfast.sync.session.futures import BlockingCall, CloseSignal
from holdfast.validation import checked_directory

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES: Final = "publishers"
"""Name under which rank 0 stores the `Places`."""
_PREFIX: Final = "holdfast/sync"
_TCP: Final = "tcp://"
_CALL_S: Final = 5.0
# torch limits one attempt to connect to 5 s, and some kernels lose one in fifty: leave time for two more.
_CONNECT_S: Final = 16.0
_CHECK_S: Final = 0.2
_temporaries = itertools.count()


class ListenAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address on which one publisher rank listens."""

    hosts: tuple[str, ...]
    port: int
    machine: str
    """Identifies the host; equal on both sides of a loopback connection."""


class Places(msgspec.Struct, frozen=True, array_like=True):
    """All ranks of a publisher, until it ends or restarts. ``token``: what connecting peers must send."""

    incarnation: str
    token: str
    ranks: tuple[ListenAddress, ...]


class Rendezvous(Protocol):
    """Thread-safe, one call at a time. Raises `StorageError` or `BoardLost` if it can't be reached."""

    @property
    def shown(self) -> str:
        """Name of the rendezvous in messages."""
        ...

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if there is none now."""
        ...

    def delete(self, key: str) -> None:
        """Remove ``key``, if it exists."""
        ...

    def close(self) -> None: ...


def open_rendezvous(where: Any, *, hosting: bool) -> Rendezvous:
    """Return the rendezvous for the user's ``where``; ``hosting``: this process is publisher rank 0.

    Doesn't wait for the other side. Raises `ConfigError`, and `StorageError` for an address that can't be listened on.
    """
    if isinstance(where, str) and where.startswith(_TCP):
        return TcpRendezvous(where, hosting=hosting)
    if isinstance(where, (str, os.PathLike)):
        return DirectoryRendezvous(checked_directory(where, field="rendezvous"))
    if all(hasattr(where, method) for method in ("set", "check", "compare_set", "delete_key")):
        return StoreRendezvous(where)
    raise ConfigError(
        f"rendezvous must be the path of a shared directory, 'tcp://host:port' or a torch.distributed Store, "
        f"not {where!r}",
        field="rendezvous",
    )


class DirectoryRendezvous:
    """See the module. The directory is made with its first value."""

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

    def delete(self, key: str) -> None:
        with self._refusals(), contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(key))

    def close(self) -> None:
        pass

    def _at(self, key: str) -> str:
        return os.path.join(self._path, f"holdfast-{key}")

    def _written(self, value: bytes) -> str:
        """Write ``value`` to a file of this process's own and return its path."""
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
            lacks = error.errno in (errno.EMFILE, errno.ENFILE)
            todo = "raise `ulimit -n`" if lacks else "both sides need write access"
            raise StorageError(
                f"the rendezvous at {self._path} can't be used: {error.strerror}; {todo}",
                path=self._path,
                errno=error.errno,
            ) from error


class StoreRendezvous:
    """See the module. The Store still belongs to its owner."""

    def __init__(self, store: Any, shown: str = "the given Store") -> None:
        self.shown = shown
        self._board = StoreBoard(store, 0, 1, _PREFIX, call_timeout_s=_CALL_S)

    def put(self, key: str, value: bytes) -> None:
        self._board.set(key, value)

    def get(self, key: str) -> bytes | None:
        return self._board.try_get(key)

    def delete(self, key: str) -> None:
        self._board.delete(key)

    def close(self) -> None:
        self._board.close()


class TcpRendezvous:
    """See the module. A lost connection is made again with the next call: its host may have been restarted."""

    def __init__(self, where: str, *, hosting: bool) -> None:
        host, _, port = where.removeprefix(_TCP).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"rendezvous {where!r}: expected 'tcp://host:port'", field="rendezvous")
        self.shown = where
        self._host, self._port = host.strip("[]"), int(port)
        self._inner: StoreRendezvous | None = None
        self._connecting: BlockingCall | None = None
        self._has_connected = threading.Event()
        # The Store ends with the object that hosts it; users have a separate connection.
        self._hosted = self._store(hosting=True) if hosting else None
        if self._hosted is not None:
            self._inner = StoreRendezvous(self._hosted, where)

    def put(self, key: str, value: bytes) -> None:
        self._call(lambda inner: inner.put(key, value))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._call(lambda inner: inner.get(key))
        return found

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
                return compat.tcp_store(self._host, self._port, hosting=True, timeout=timedelta(seconds=_CONNECT_S))
            # torch tries long and with many warnings to reach a host that refuses; this fails at once.
            socket.create_connection((self._host, self._port), _CALL_S).close()
            return self._connected()
        except (OSError, RuntimeError) as error:
            if not hosting:
                raise BoardLost(f"nothing answers at {self.shown}: {error}") from error
            raise StorageError(
                f"publisher rank 0 can't listen at {self.shown}: {error}; use an address of its host and a free port",
                path=self.shown,
                errno=getattr(error, "errno", None),
            ) from error

    def _connected(self) -> Any:
        """Return a client of the Store. If the listener doesn't answer, torch waits forever; this doesn't."""
        from holdfast import _torch_compat as compat

        if self._connecting is None:
            self._has_connected.clear()
            self._connecting = BlockingCall(
                lambda: compat.tcp_store(self._host, self._port, hosting=False, timeout=timedelta(seconds=_CONNECT_S)),
                self._has_connected.set,
            )
        if not self._has_connected.wait(_CONNECT_S):
            raise BoardLost(
                f"the process that listens at {self.shown} doesn't answer; it may be stopped, or not a Store"
            )
        made, self._connecting = self._connecting, None
        return made.result()


class Unanswered(BoardLost):
    """A call did not return while its caller waited: its result is unknown yet."""


class RendezvousClient:
    """Calls a rendezvous whose host may have stopped: each call has its caller's timeout; one at a time.

    A call that doesn't return in time is left on its thread; the next call waits for it first.
    """

    def __init__(self, rendezvous: Rendezvous, leaving: CloseSignal) -> None:
        self.shown = rendezvous.shown
        self._rendezvous = rendezvous
        self._leaving = leaving
        self._last: BlockingCall | None = None
        self._came_back = threading.Event()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        found: bytes | None = self._ask(lambda: self._rendezvous.get(key), timeout_s)
        return found

    def _ask(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Call ``function``; raises `Unanswered` on timeout, and `ConfigError` if the receiver is closed."""
        deadline = Deadline.after(timeout_s)
        if self._last is not None:
            self._wait(self._last, deadline)
        self._came_back.clear()
        self._last = call = BlockingCall(function, self._came_back.set)
        self._wait(call, deadline)
        return call.result()

    def _wait(self, call: BlockingCall, deadline: Deadline) -> None:
        while not call.done:
            self._leaving.check()
            if deadline.passed():
                raise Unanswered(f"{self.shown} did not answer in {deadline.timeout_s:.3g} s")
            self._came_back.wait(min(deadline.left_s(), _CHECK_S))
        self._last = None


def hosts_here(advertised: str | None) -> tuple[str, ...]:
    """Return addresses by which other hosts may reach this one, the likeliest first."""
    if advertised is not None:
        return (advertised,)
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only finds the route
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return tuple(dict.fromkeys(found)) or ("127.0.0.1",)


def this_machine() -> str:
    """Return an id shared by all processes that reach each other through the loopback interface."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


prepare_decoding(Places)
