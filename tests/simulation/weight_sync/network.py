"""Connections that carry bytes between hosts, in virtual time, and what of the operating system goes with them.

Guarantees: bytes of a connection arrive in order, in pieces, late if the schedule says so; a connection holds
`ROOM_BYTES` that nobody has read, and who sends more waits. A file is sent as Linux does it: what a page has when the
*reader* takes it, which may be long after it was sent. A connection may break after any byte; each side then reads what
was on its way, and no more.
"""

from __future__ import annotations

import errno
import os as real_os
import select as real_select
from socket import AF_INET, IPPROTO_TCP, SHUT_RDWR, TCP_NODELAY

from greenlet import getcurrent
from simulator.scheduler import Current

from holdfast.sync.session import links
from weight_sync import fabric
from weight_sync.fabric import alive, step

ROOM_BYTES = 128
PIECE_BYTES = 96
"""Most that one call sends of a file."""
_ENDED, _RESET = "it has ended", "it was reset"


class Pages:
    """A part of a file that is on its way: by reference."""

    def __init__(self, view, start, end):
        self.view, self.start, self.end = view, start, end

    def __len__(self):
        return self.end - self.start

    def between(self, start, end):
        return self.view[self.start + start : self.start + end].numpy()


class Words(bytes):
    """Bytes that are on their way."""

    def between(self, start, end):
        return self[start:end]


class Stream(fabric.Endpoint):
    """One end of a connection of bytes, in place of a socket that never blocks."""

    family = AF_INET

    def __init__(self, process):
        super().__init__(process)
        self.number = next(Current.sim.numbers)
        self.queued = 0
        """Bytes that have been sent to here, and were not read."""
        self.taken = 0
        """Of the first that has arrived."""
        self.ended = None
        self.is_shut = False
        self.waiting = []

    def __hash__(self):
        return self.number  # sets of them are in the same order each time

    def __eq__(self, other):
        return self is other

    # what the code calls ---------------------------------------------------------------------------------------------

    def settimeout(self, seconds):
        pass

    def setsockopt(self, *option):
        pass

    def fileno(self):
        return self

    def send(self, data, flags=0):
        del flags
        alive()
        self.refuse_if_gone()
        count = min(ROOM_BYTES - self.peer.queued, len(data))
        if count <= 0:
            raise BlockingIOError(errno.EAGAIN, "it would block")
        self.carry(Words(data[:count]))
        return count

    def recv_into(self, memory):
        step()
        alive()
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self.unread or self.is_shut:
            return self._nothing()
        first = self.unread[0]
        count = min(len(memory), len(first) - self.taken)
        memory[:count] = first.between(self.taken, self.taken + count)
        self.taken += count
        if self.taken == len(first):
            self.unread.popleft()
            self.taken = 0
        self.queued -= count
        self.peer.ring()
        return count

    def recvmsg_into(self, buffers, *_):
        return self.recv_into(buffers[0]), [], 0, None

    def shutdown(self, how):
        del how
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self.is_shut = True
        self.ring()
        if not self.peer.closed:
            self.post(_ENDED)

    def close(self):
        if not self.closed:
            self.closed = True
            if not self.peer.closed:
                self.post(_RESET if self.unread else _ENDED)

    # how it goes -----------------------------------------------------------------------------------------------------

    def refuse_if_gone(self):
        if self.closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.is_shut or self.ended is not None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def carry(self, item):
        sim = Current.sim
        self.peer.queued += len(item)
        if sim.lines is not None:
            what = "pages of a file" if isinstance(item, Pages) else bytes(item)
            sim.log("bytes", f"to {self.peer.process.name}, {len(item)} by connection {self.number}: {what}")
        self.post(item)
        if sim.faults.breaks and sim.faults.breaks_now():
            sim.log("breaks", f"connection {self.number}")
            self.cut()

    def cut(self):
        for one in (self, self.peer):
            if not one.closed:
                one.peer.post(_RESET)

    def arrive(self, item):
        self.on_the_way -= 1
        if self.closed:
            return
        if item in (_ENDED, _RESET):
            self.ended = self.ended or item
        else:
            self.unread.append(item)
        self.ring()

    def ring(self):
        if self.loop is not None:
            self.loop.ring()
        for task in self.waiting:
            Current.sim.wake(task)

    def is_ready(self, wanted):
        if self.closed or self.is_shut or self.ended is not None:
            return True
        return bool(self.unread) if wanted == real_select.POLLIN else self.peer.queued < ROOM_BYTES

    def _nothing(self):
        if self.ended == _RESET:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        if self.is_shut or self.ended is not None:
            return 0
        raise BlockingIOError(errno.EAGAIN, "it would block")


class socket(fabric.socket):
    """In place of the module."""

    SHUT_RDWR, IPPROTO_TCP, TCP_NODELAY = SHUT_RDWR, IPPROTO_TCP, TCP_NODELAY


class _Poll:
    def __init__(self):
        self._sock = self._wanted = None

    def register(self, sock, wanted):
        self._sock, self._wanted = sock, wanted

    def poll(self, timeout_ms):
        alive()
        sock, task = self._sock, getcurrent()
        if not sock.is_ready(self._wanted):
            sock.waiting.append(task)
            try:
                Current.sim.park(timeout_ms / 1000.0)
            finally:
                sock.waiting.remove(task)
        return sock.is_ready(self._wanted)


class select:
    """In place of the module."""

    POLLIN, POLLOUT = real_select.POLLIN, real_select.POLLOUT
    poll = _Poll


class os:
    """In place of the module, for descriptors of blocks; `Current.sim.files` has those that are open."""

    path, fsencode, fspath, getpid, geteuid = (
        real_os.path,
        real_os.fsencode,
        real_os.fspath,
        real_os.getpid,
        real_os.geteuid,
    )
    PathLike = real_os.PathLike

    @staticmethod
    def dup(image):
        sim, process = Current.sim, alive()
        sim.checker.opens(process, image)
        fd = next(sim.numbers)
        sim.files[fd] = image
        return fd

    @staticmethod
    def close(fd):
        del Current.sim.files[fd]

    @staticmethod
    def sendfile(sock, fd, start, count):
        step()
        sim, process = Current.sim, alive()
        sock.refuse_if_gone()
        count = min(ROOM_BYTES - sock.peer.queued, count, PIECE_BYTES)
        if count <= 0:
            raise BlockingIOError(errno.EAGAIN, "it would block")
        pages = Pages(sim.files[fd].bytes_view, start, start + count)
        sock.carry(_other_than(pages) if sim.faults.lies_now(process) else pages)
        return count


def _other_than(pages):
    """Return what is on its way if a process, or its memory, has gone bad."""
    wrong = bytearray(pages.between(0, len(pages)).tobytes())
    wrong[Current.sim.rng.randrange(len(wrong))] ^= 1
    return Words(wrong)


def take_file(fd):
    """Return the image that a descriptor stands for, and close it."""
    return Current.sim.files.pop(fd) if isinstance(fd, int) else fd


# connecting --------------------------------------------------------------------------------------------------------


class Listener(fabric.Listener):
    """In place of a socket that listens on a port."""

    def __init__(self, process, port):
        super().__init__(process, path_of(port))
        self.port = port

    def settimeout(self, seconds):
        pass

    def getsockname(self):
        return "", self.port


def path_of(port):
    """Return where a process of the same host finds what listens on a port, too."""
    return f"port-{port}"


def listener(host):
    del host
    return Listener(alive(), next(Current.sim.numbers))


def connect_to(place, timeout_s):
    """Connect: by a path for messages and memory, by a port for bytes."""
    if place.path:
        return fabric.connect_to(place, timeout_s)
    return fabric.connect(path_of(place.port), Stream, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))


def Link(sock, peer, kind):
    """The real link over bytes; one that passes messages, with memory, within a host."""
    return (links.Link if isinstance(sock, Stream) else fabric.Link)(sock, peer, kind)
