"""Connect publisher ranks and receivers: framed messages without blocking. Torch-free.

    Link        one connection; only its event loop waits on it
    EventLoop   all links of a thread, the socket that listens for new ones, and a way for other threads to wake it

Guarantees: `EventLoop.hear` blocks no longer than its timeout (0.05 s more without a free descriptor), and nothing else
here blocks but `connect`, which has a deadline. A queued message is sent as soon as the other end accepts it. The end
of a peer's process, or of its host's connection, is received as `Ended` after all messages; a silent peer is not
detected: use `Link.silent_s`. Connections end with this process, whatever it has forked: children close their copies.
Assumes: one thread uses an event loop and its links; any may call `EventLoop.wake`.
Does not: know the messages (``session.messages``); the framing is ``engine.wire``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.engine.wire import FrameError, Inbox, Outbox, close_fds, send
from holdfast.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.coordination.deadline import Deadline
    from holdfast.engine.messages import EngineMessage

_BACKLOG: Final = 1024
_PASS_ON_S: Final = 0.1
"""How long a message with a descriptor may wait for the other end."""
_REFUSED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSED_S: Final = 0.05
"""How long a connection waits that the system can't let in now."""
_KEEPALIVE_S: Final = 10
"""TCP keep-alive interval: a vanished host is detected after a few times this, also on idle links."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a link: no more messages follow."""

    why: str


class Link:
    """One connection. ``peer``: the other end, for messages; ``kind``: the union of expected messages."""

    def __init__(self, sock: socket.socket, peer: str, kind: Any) -> None:
        sock.settimeout(0.0)
        _tune(sock)
        self.sock = sock
        self.peer = peer
        self.ended: str | None = None
        self._inbox: Inbox[Any] = Inbox(sock, kind)
        self._outbox = Outbox(sock)
        self._mute = False
        self._heard_at = time.monotonic()
        self.descriptors: deque[int] = deque()
        """Those that came with messages, in their order: for who handles these to take and close."""

    @property
    def silent_s(self) -> float:
        """Seconds since the last message, or since `expect`."""
        return time.monotonic() - self._heard_at

    @property
    def has_more(self) -> bool:
        """Return True if something waits to be sent."""
        return bool(len(self._outbox)) and not self._mute

    def expect(self) -> None:
        """Start counting silence."""
        self._heard_at = time.monotonic()

    def send(self, message: EngineMessage) -> None:
        """Send ``message`` as soon as the other end accepts it; dropped if the link has ended."""
        if self._mute or self.ended is not None:
            return
        self._outbox.put(message)
        self.flush()

    def pass_on(self, message: EngineMessage, fd: int) -> None:
        """Send ``message`` with a descriptor, now, or end the link: the other end doesn't read what it is sent."""
        if self._mute or self.ended is not None:
            return
        try:
            if len(self._outbox):
                raise TimeoutError
            send(self.sock, message, (fd,), timeout_s=_PASS_ON_S)
        except (OSError, FrameError):
            self._mute = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Send what is accepted now. A broken link is received as `Ended`, after the peer's last messages."""
        try:
            self._outbox.flush()
        except OSError:
            self._mute = True

    def receive(self) -> list[EngineMessage | Ended]:
        """Return received messages without waiting; nothing follows `Ended`."""
        if self.ended is not None:
            return []
        try:
            received = self._inbox.receive()
        except FrameError as error:
            return [self._end(f"it sent what is no message of ours ({error})")]
        except OSError as error:
            return [self._end(f"its connection broke ({error.strerror or error})")]
        if received is None:
            return [self._end("its connection ended")]
        if received:
            self._heard_at = time.monotonic()
            self.descriptors.extend(fd for item in received for fd in item.fds)
        return [item.message for item in received]

    def close(self) -> None:
        """Close the link; idempotent. Unsent messages are dropped."""
        self.ended = self.ended or "it was closed here"
        self._inbox.close()
        close_fds(tuple(self.descriptors))
        self.descriptors.clear()
        self.sock.close()

    def _end(self, why: str) -> Ended:
        self.ended = why
        return Ended(why)


class EventLoop:
    """Receives messages on all of its links."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        try:
            self._bell_out, self._bell_in = socket.socketpair()
        except OSError as error:
            self._selector.close()
            message = f"socketpair was refused ({error}); allow it in the sandbox, or raise `ulimit -n`"
            raise StorageError(message, path="socketpair", errno=error.errno) from error
        for end in (self._bell_out, self._bell_in):
            end.settimeout(0.0)
        self._selector.register(self._bell_out, selectors.EVENT_READ, None)
        self._links: dict[Link, int] = {}

    def add(self, link: Link) -> None:
        close_in_children(link.sock)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._links[link] = selectors.EVENT_READ

    def drop(self, link: Link) -> None:
        """Close ``link`` and stop receiving on it; idempotent."""
        if self._links.pop(link, None) is not None:
            self._selector.unregister(link.sock)
        link.close()

    def hand_over(self, link: Link) -> socket.socket:
        """Stop receiving on ``link`` and return its connection, which is the caller's from now on."""
        if self._links.pop(link, None) is not None:
            self._selector.unregister(link.sock)
        return link.sock

    def listen(self, sock: socket.socket) -> None:
        """Also accept connections to ``sock``; `hear` yields each as a socket."""
        close_in_children(sock)
        sock.settimeout(0.0)
        self._selector.register(sock, selectors.EVENT_READ, sock)

    def stop_listening(self, sock: socket.socket) -> None:
        """Accept no more connections to ``sock``, and close it."""
        self._selector.unregister(sock)
        sock.close()

    def wake(self) -> None:
        """End a waiting `hear` at once. Any thread may call this, also after `close`."""
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: nobody listens
            self._bell_in.send(b"!")

    def hear(self, timeout_s: float) -> Iterator[tuple[Link, EngineMessage | Ended] | socket.socket]:
        """Yield messages and new connections within ``timeout_s``; returns at once if there are any."""
        for link, interest in self._links.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_more else 0)
            if events != interest:
                self._selector.modify(link.sock, events, link)
                self._links[link] = events
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if isinstance(key.data, Link):
                link = key.data
                if link not in self._links:
                    continue  # dropped because of another link's message
                if events & selectors.EVENT_WRITE:
                    link.flush()
                if events & selectors.EVENT_READ:
                    for said in link.receive():
                        yield link, said
            elif key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._bell_out.recv(4096)
            else:
                yield from _accepted(key.data)

    def close(self) -> None:
        for link in list(self._links):
            self.drop(link)
        self._selector.close()
        self._bell_out.close()
        self._bell_in.close()


def listener(host: str) -> socket.socket:
    """Return a socket that listens on ``host`` ("": all addresses), on a port chosen by the system."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(hosts: tuple[str, ...], port: int, deadline: Deadline) -> socket.socket:
    """Return a connection to the first of ``hosts`` that answers. Raises the last `OSError`."""
    failure: OSError = OSError("no address is known")
    for place, host in enumerate(hosts):
        try:
            return socket.create_connection((host, port), max(0.05, deadline.left_s() / (len(hosts) - place)))
        except OSError as error:
            failure = error
    raise failure


_of_this_process: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Let forked children close their copy of ``sock``: else its other end doesn't see that this process has ended."""
    _of_this_process.add(sock)


def _close_in_child() -> None:
    for sock in list(_of_this_process):
        with contextlib.suppress(OSError):
            sock.close()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _accepted(sock: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            yield sock.accept()[0]
        except OSError as error:  # none left, or the new connection is already gone
            if error.errno in _REFUSED:
                time.sleep(_REFUSED_S)  # it stays to be taken, so `hear` would come back at once, again and again
            return


def _tune(sock: socket.socket) -> None:
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        options += [(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S)] if hasattr(socket, name) else []
    for option in options:
        with contextlib.suppress(OSError):  # a Unix socket has no such options
            sock.setsockopt(*option)
