"""Both ends of the connections on which bytes of versions are read, of publisher ranks or of receivers that have them.

Guarantees: each connection is answered on a thread of its own; a reader that takes nothing for the timeout loses it,
and nobody else waits for it. Who asks waits as long as bytes come, and `peer_timeout_s` if none do.
Assumes: whoever asks was let in, or says in each message that it may be.
Does not: know what is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.engine.wire import Inbox, encode
from holdfast.errors import HoldfastError, PeerLost
from holdfast.sync.session.links import close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from holdfast.engine.messages import EngineMessage

_log = logging.getLogger("holdfast")
_LOOK_S: Final = 1.0
_SLICE_S: Final = 0.2
SIZE_BYTES: Final = 8
"""Say how many bytes follow."""


class MemoryReadFailed(HoldfastError):
    """Memory of another process could not be read; says why."""


class MemoryReads(Protocol):
    """Memory that others read without this process taking part, and reads of theirs (RDMA); thread-safe."""

    def register(self, memory: torch.Tensor) -> None:
        """Allow ``memory`` to be offered, and read into, until `deregister`. Raises `ConfigError`."""

    def deregister(self, memory: torch.Tensor) -> None:
        """End that, or once nothing can be read into it any more; until then it stays mapped."""

    def is_quiet(self, memory: torch.Tensor) -> bool:
        """Return True if no read, one that was cut off included, may still write to ``memory``."""

    def offer(self, memory: torch.Tensor) -> bytes:
        """Return what others need to read ``memory``; also `drive`s."""

    def drive(self) -> None:
        """Let reads by others progress, for some seconds."""

    def read(self, offered: bytes, start: int, into: torch.Tensor, check: Callable[[], None]) -> None:
        """Read what was offered, from ``start`` on. check: called while waiting; may raise, to cut it off.

        Raises `MemoryReadFailed`.
        """

    def close(self) -> None:
        """End everything; idempotent. What may still be written to stays until it can't."""


# Who answers -------------------------------------------------------------------------------------------------------


class ReadThreads:
    """Answers what is asked on connections until `close`.

    kind: the union of what may be asked. answer: by connection, reader and message; ends the connection by an
    `OSError`. who: answers, for messages.
    """

    def __init__(self, kind: Any, answer: Callable[[socket.socket, str, Any], None], who: str) -> None:
        self._kind = kind
        self._answer = answer
        self._who = who
        self._socks: set[socket.socket] = set()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._socks)

    def start(self, sock: socket.socket, reader: str, first: Any | None = None) -> None:
        """Answer what is asked on ``sock`` from now on, ``first`` at first."""

        def serve() -> None:
            try:
                inbox: Inbox[Any] = Inbox(sock, self._kind)
                asked = _next_read(sock, inbox, lambda: self._stopping) if first is None else first
                while asked is not None and not self._stopping:
                    self._answer(sock, reader, asked)
                    asked = _next_read(sock, inbox, lambda: self._stopping)
            except OSError as error:
                if not self._stopping:
                    _log.warning("%s no longer reads from %s: %s", reader, self._who, error)
            finally:
                self._socks.discard(sock)
                sock.close()

        _send_at_once(sock)
        self._socks.add(sock)
        try:
            threading.Thread(target=serve, name=f"holdfast-versions-to-{reader}", daemon=True).start()
        except RuntimeError:  # no more threads: it will ask again
            self._socks.discard(sock)
            sock.close()

    def close(self) -> None:
        """End all connections; idempotent, doesn't wait."""
        self._stopping = True
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def send_range(sock: socket.socket, fd: int, start: int, end: int, timeout_s: float) -> None:
    """Send a range of a file; raises `TimeoutError` if the other end takes nothing for so long, else `OSError`."""
    while start < end:
        try:
            start += os.sendfile(sock.fileno(), fd, start, end - start)
        except (BlockingIOError, InterruptedError):
            _wait_writable(sock, timeout_s)


def send_all(sock: socket.socket, data: bytes | memoryview, timeout_s: float) -> None:
    """Send bytes, as `send_range` does."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except (BlockingIOError, InterruptedError):
            _wait_writable(sock, timeout_s)


def _wait_writable(sock: socket.socket, timeout_s: float) -> None:
    waiter = select.poll()
    waiter.register(sock, select.POLLOUT)
    if not waiter.poll(timeout_s * 1000):
        raise TimeoutError(f"it took nothing for {timeout_s:g} s")


def send_sized(sock: socket.socket, data: bytes, timeout_s: float) -> None:
    """Send how many bytes follow, and these."""
    send_all(sock, sized(data), timeout_s)


def sized(data: bytes) -> bytes:
    """Return how many bytes follow, and these."""
    return len(data).to_bytes(SIZE_BYTES, "little") + data


def _send_at_once(sock: socket.socket) -> None:
    """Let small answers not wait until earlier ones were acknowledged."""
    with contextlib.suppress(OSError):  # a Unix socket has no such option
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _next_read(sock: socket.socket, inbox: Inbox[Any], stopping: Callable[[], bool]) -> Any | None:
    """Wait for the next request on a connection; None once it has ended."""
    waiter = select.poll()
    waiter.register(sock, select.POLLIN)
    while not stopping():
        if not waiter.poll(_LOOK_S * 1000):
            continue
        found = inbox.receive()
        if found is None:
            return None
        if found:
            return found[0].message
    return None


# Who asks ---------------------------------------------------------------------------------------------------------


class ReadConnections:
    """Connections to one place, each for one read at a time; thread-safe.

    who: answers there, for messages. connect: makes a connection, or raises `OSError`. introduce: sent first on each.
    """

    def __init__(
        self,
        who: str,
        connect: Callable[[], socket.socket],
        introduce: EngineMessage | None,
        *,
        peer_timeout_s: float,
    ) -> None:
        self._who = who
        self._connect = connect
        self._introduce = introduce
        self._peer_timeout_s = peer_timeout_s
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._all: set[socket.socket] = set()

    @contextlib.contextmanager
    def asking(self, asked: EngineMessage, version: int) -> Iterator[socket.socket]:
        """Yield a connection on which ``asked`` was sent; it is free afterwards, or gone with an error."""
        sock = self._connection(version)
        try:
            send_all(sock, bytes(encode(asked)), self._peer_timeout_s)
            yield sock
        except BaseException as error:
            self._drop(sock)
            if isinstance(error, OSError) and not isinstance(error, HoldfastError):
                raise self.lost(f"its connection broke ({error.strerror or error})", version) from error
            raise
        with self._lock:
            self._free.append(sock)

    def receive(self, sock: socket.socket, memory: memoryview, check: Callable[[], None], version: int) -> None:
        """Fill ``memory``. check: called while nothing comes; may raise. Raises `PeerLost`."""
        waiter, silent_s = select.poll(), time.monotonic()
        waiter.register(sock, select.POLLIN)
        while memory:
            try:
                count = sock.recv_into(memory)
            except (BlockingIOError, InterruptedError):
                check()
                if not waiter.poll(_SLICE_S * 1000) and time.monotonic() - silent_s > self._peer_timeout_s:
                    raise self.lost(f"it sent nothing for {self._peer_timeout_s:g} s", version) from None
                continue
            if not count:
                raise self.lost("its connection ended", version)
            memory, silent_s = memory[count:], time.monotonic()

    def receive_sized(self, sock: socket.socket, most: int, check: Callable[[], None], version: int) -> bytes:
        """Return what was sent by `send_sized`, of at most ``most`` bytes."""
        head = bytearray(SIZE_BYTES)
        self.receive(sock, memoryview(head), check, version)
        nbytes = int.from_bytes(head, "little")
        if nbytes > most:
            raise self.lost(f"it announced {nbytes} bytes where there can be {most}", version)
        found = bytearray(nbytes)
        self.receive(sock, memoryview(found), check, version)
        return bytes(found)

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is being read."""
        with self._lock:
            return len(self._free) == len(self._all)

    def close(self) -> None:
        """End all connections, and all reads; idempotent."""
        with self._lock:
            socks, free = list(self._all), set(self._free)
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if sock in free:
                sock.close()

    def lost(self, why: str, version: int) -> PeerLost:
        """Return the error for an end that is gone, or that can't be understood."""
        return PeerLost(
            f"{self._who} was lost while it sent version {version}: {why}. Receive again when a publisher is there",
            peer=self._who,
            phase="transfer",
            version=version,
        )

    def _connection(self, version: int) -> socket.socket:
        with self._lock:
            if self._free:
                return self._free.pop()
        try:
            sock = self._connect()
        except OSError as error:
            raise self.lost(f"it can't be reached ({error.strerror or error})", version) from error
        close_in_children(sock)
        sock.settimeout(0.0)
        _send_at_once(sock)
        with self._lock:
            self._all.add(sock)
        try:
            if self._introduce is not None:
                send_all(sock, bytes(encode(self._introduce)), self._peer_timeout_s)
        except OSError as error:
            self._drop(sock)
            raise self.lost(f"its connection broke ({error.strerror or error})", version) from error
        return sock

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._all.discard(sock)
        sock.close()
