"""Links: connections between publisher ranks and receivers, with framed messages and no waiting. Torch-free.

    Link   one connection, of which only the hub waits for anything
    Hub    all links of a thread, what listens for new ones, and a bell that other threads may ring

Guarantees: `Hub.hear` blocks no longer than it is told, and nothing else here blocks but `connect`, which has a
deadline. A message that was put on a link is sent as soon as the other end takes it. That a peer's process ended, or
its host says so, is heard as `Ended` behind all that it had said; a peer that is silent is not: ask `Link.silent_s`.
Assumes: one thread uses a hub and its links; any may call `Hub.ring`.
Does not: know what is said (``sync.messages``); the framing is ``engine.wire``.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.engine.wire import FrameError, Inbox, Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.engine.messages import Message
    from holdfast.sync.deadline import Deadline

_BACKLOG: Final = 1024
_KEEPALIVE_S: Final = 10
"""A host that vanished without a word is noticed after a few times this, also on links where nobody speaks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more will be heard on this link."""

    why: str


class Link:
    """One connection. ``peer``: who is at its other end, for messages; ``kind``: the union of what may be said."""

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

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard, or since `expect`."""
        return time.monotonic() - self._heard_at

    @property
    def has_more(self) -> bool:
        """Whether something waits to be sent."""
        return bool(len(self._outbox)) and not self._mute

    def expect(self) -> None:
        """From now on silence counts."""
        self._heard_at = time.monotonic()

    def send(self, message: Message) -> None:
        """Send ``message`` as soon as the other end takes it; dropped where the link has ended."""
        if self._mute or self.ended is not None:
            return
        self._outbox.put(message)
        self.flush()

    def flush(self) -> None:
        """Send what is taken now. A link that is cut is heard of as `Ended`, after what the peer said last."""
        try:
            self._outbox.flush()
        except OSError:
            self._mute = True

    def receive(self) -> list[Message | Ended]:
        """What can be heard without waiting; after `Ended` nothing."""
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
        return [item.message for item in received]

    def close(self) -> None:
        """Idempotent; what was not sent yet is not sent."""
        self.ended = self.ended or "it was closed here"
        self._inbox.close()
        self.sock.close()

    def _end(self, why: str) -> Ended:
        self.ended = why
        return Ended(why)


class Hub:
    """Hears what is said on any of its links."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell_out, self._bell_in = socket.socketpair()
        for end in (self._bell_out, self._bell_in):
            end.settimeout(0.0)
        self._selector.register(self._bell_out, selectors.EVENT_READ, None)
        self._links: dict[Link, int] = {}

    def add(self, link: Link) -> None:
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._links[link] = selectors.EVENT_READ

    def drop(self, link: Link) -> None:
        """Close ``link``, which is heard no more; idempotent."""
        if self._links.pop(link, None) is not None:
            self._selector.unregister(link.sock)
        link.close()

    def listen(self, sock: socket.socket) -> None:
        """Hear of connections to ``sock`` too; `hear` yields each as a socket."""
        sock.settimeout(0.0)
        self._selector.register(sock, selectors.EVENT_READ, sock)

    def ring(self) -> None:
        """End a `hear` that waits, at once. Any thread may call this, also after `close`."""
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: nobody listens
            self._bell_in.send(b"!")

    def hear(self, timeout_s: float) -> Iterator[tuple[Link, Message | Ended] | socket.socket]:
        """What is said, or who connects, within ``timeout_s``; returns at once when there is something."""
        for link, interest in self._links.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_more else 0)
            if events != interest:
                self._selector.modify(link.sock, events, link)
                self._links[link] = events
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if isinstance(key.data, Link):
                link = key.data
                if link not in self._links:
                    continue  # dropped for what another said
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
    """A socket that listens on ``host`` ("" is every address of this one), on a port of the system's choice."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(hosts: tuple[str, ...], port: int, deadline: Deadline) -> socket.socket:
    """A connection to the first of ``hosts`` that answers. Raises `OSError`, of the last one that doesn't."""
    failure: OSError = OSError("no address is known")
    for place, host in enumerate(hosts):
        try:
            return socket.create_connection((host, port), max(0.05, deadline.left_s() / (len(hosts) - place)))
        except OSError as error:
            failure = error
    raise failure


def _accepted(sock: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            yield sock.accept()[0]
        except OSError:  # nobody is left, or who came has gone again
            return


def _tune(sock: socket.socket) -> None:
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        options += [(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE_S)] if hasattr(socket, name) else []
    for option in options:
        with contextlib.suppress(OSError):  # a Unix socket has none of them
            sock.setsockopt(*option)
