"""Links, a rendezvous and a board, in virtual time; and the points where another process may take its turn.

Guarantees: messages of a link arrive in order, late if the schedule says so, and none after its end. A process that is
dead sends and changes nothing. Who is stopped hears nothing, and what it is sent waits.
"""

from __future__ import annotations

import errno
from collections import deque
from socket import AF_UNIX

from greenlet import getcurrent
from simulator import scheduler
from simulator.scheduler import Current, Dead, Task

from holdfast.coordination.board import LocalBoard, _Memory
from holdfast.coordination.store import BoardLost
from holdfast.errors import StorageError
from holdfast.sync.session.links import Ended
from holdfast.sync.session.rendezvous import PLACES

TURN_S = 0.0004
"""Longest virtual time between two turns of a process that waits for nothing."""
UNREAD_MAX = 6
"""Messages that fit into a link; a stopped process reads none."""


def step():
    """Let others take their turn; the process may be killed or stopped here."""
    task = getcurrent()
    if type(task) is not Task:
        return
    sim, process = Current.sim, task.process
    process.calls += 1
    happens = process.turns.pop(process.calls, None)
    if happens is not None:
        happens(process)
    sim.checker.look(process)
    sim.sleep(sim.random() * TURN_S)


def alive():
    """Return the process that runs; a dead one gets no further."""
    process = getcurrent().process
    if process.dead:
        raise Dead
    return process


# links -----------------------------------------------------------------------------------------------------------


class Endpoint:
    """One end of a connection within a host, in place of a socket."""

    family = AF_UNIX

    def __init__(self, process):
        self.process = process
        self.peer = None
        self.loop = None
        self.unread = deque()
        self.closed = False
        self.arrives = 0.0
        self.on_the_way = 0
        process.ends.append(self)

    def post(self, item):
        """Send to the peer, which gets it in order."""
        sim, peer = Current.sim, self.peer
        peer.arrives = max(peer.arrives + 1e-9, sim.now + sim.faults.travel())
        peer.on_the_way += 1
        sim.later(peer.arrives - sim.now, lambda: peer.arrive(item))

    def arrive(self, item):
        self.on_the_way -= 1
        if not self.closed:
            self.unread.append(item)
            if self.loop is not None:
                self.loop.ring()

    def close(self):
        if not self.closed:
            self.closed = True
            if not self.peer.closed:
                self.post((Ended("its connection ended"), None))

    def cut(self):
        """Break the connection: each side hears what is on its way, and its end."""
        for one in (self, self.peer):
            one.closed = False
            one.post((Ended("its connection ended"), None))


class Listener:
    """In place of a socket that listens."""

    def __init__(self, process, path):
        self.process, self.path = process, path
        self.backlog = deque()
        self.loop = None
        Current.sim.listeners[path] = self

    def close(self):
        Current.sim.listeners.pop(self.path, None)


class socket:
    """In place of the module, as far as it is asked for classes and names."""

    socket = Endpoint
    AF_UNIX = AF_UNIX

    @staticmethod
    def gethostname():
        return getcurrent().process.name


def listen_at(path):
    return Listener(alive(), path)


def connect_to(place, timeout_s):
    del timeout_s
    return connect(place.path, Endpoint, FileNotFoundError(errno.ENOENT, "No such file or directory"))


def connect(path, kind, absent):
    """Return one end of a new connection. absent: raised if nobody has ever listened there."""
    sim, process = Current.sim, alive()
    step()
    found = sim.listeners.get(path)
    if found is None:
        raise absent
    if found.process.dead:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    mine, other = kind(process), kind(found.process)
    mine.peer, other.peer = other, mine
    sim.links.append(mine)
    found.backlog.append(other)
    if found.loop is not None:
        found.loop.ring()
    return mine


class Link:
    """In place of `links.Link`."""

    def __init__(self, sock, peer, kind):
        del kind
        self.sock, self.peer = sock, peer
        self.ended = None
        self.descriptors = deque()

    @property
    def has_more(self):
        peer = self.sock.peer
        return len(peer.unread) + peer.on_the_way > UNREAD_MAX and not self.sock.closed

    def send(self, message):
        alive()
        if self.ended is None and not self.sock.closed:
            Current.sim.log("send", f"{self.peer}: {message}")
            self.sock.post((message, None))

    def pass_on(self, message, fd):
        alive()
        if self.ended is None and not self.sock.closed:
            if self.has_more:
                self.sock.cut()
            else:
                self.sock.post((message, fd))

    def flush(self):
        """Send what waits: nothing does here, but in the link itself."""

    def receive(self):
        """Return what has come."""
        found = []
        while self.sock.unread and self.ended is None:
            message, fd = self.sock.unread.popleft()
            if fd is not None:
                self.descriptors.append(fd)
            if isinstance(message, Ended):
                self.ended = message.why
            found.append(message)
        return found

    def close(self):
        self.ended = self.ended or "it was closed here"
        self.sock.close()


class EventLoop:
    """In place of `links.EventLoop`."""

    def __init__(self):
        self._links = {}
        self._listeners = []
        self._rung = False
        self._waits = None

    def add(self, link):
        self._links[link] = True
        link.sock.loop = self

    def drop(self, link):
        self._links.pop(link, None)
        link.close()

    def hand_over(self, link):
        self._links.pop(link, None)
        link.sock.loop = None
        return link.sock

    def listen(self, listener):
        self._listeners.append(listener)
        listener.loop = self

    def ring(self):
        self._rung = True
        if self._waits is not None:
            Current.sim.wake(self._waits)

    wake = ring

    def hear(self, timeout_s):
        step()
        if not self._rung:
            self._waits = getcurrent()
            try:
                Current.sim.park(max(0.0, timeout_s))
            finally:
                self._waits = None
        self._rung = False
        for link in list(self._links):
            if link in self._links:
                if link.has_more:
                    link.flush()
                for said in link.receive():
                    yield link, said
                if link.sock.unread and link.ended is None and link.sock.loop is self:
                    self._rung = True  # not all of it was read
        for listener in self._listeners:
            while listener.backlog:
                yield listener.backlog.popleft()

    def close(self):
        for link in list(self._links):
            self.drop(link)


class Thread(scheduler.Thread):
    @property
    def ident(self):
        return self.task


class threading(scheduler.threading):
    Thread = Thread

    @staticmethod
    def get_ident():
        return getcurrent()


class Lock(scheduler.Lock):
    """A lock that others may get first."""

    def __enter__(self):
        step()
        return super().__enter__()


# the rendezvous and the board ----------------------------------------------------------------------------------------


class Rendezvous:
    """In place of a directory or a Store; ``Current.sim.values`` is what it holds. An answer may be lost, or late."""

    shown = "the rendezvous"

    def put(self, key, value):
        lost = self._ask(key)
        if lost == "late":
            sim = Current.sim
            sim.later(sim.random() * 3.0, lambda: sim.values.__setitem__(key, value))
        else:
            Current.sim.values[key] = value
        self._answer(lost)

    def get(self, key):
        lost = self._ask(key)
        found = Current.sim.values.get(key)
        self._answer(lost)
        return found

    def delete(self, key):
        lost = self._ask(key)
        Current.sim.values.pop(key, None)
        self._answer(lost)

    def close(self):
        pass

    def _ask(self, key):
        sim = Current.sim
        step()
        sim.sleep(sim.faults.travel_of(alive()))
        lost = sim.faults.rendezvous_fails(alive())
        if lost == "before":
            raise StorageError("the rendezvous can't be used: it was refused", path="rendezvous", errno=errno.EIO)
        return "after" if lost == "late" and key == PLACES else lost

    def _answer(self, lost):
        step()
        if lost:
            raise StorageError("the rendezvous can't be used: no answer", path="rendezvous", errno=errno.EIO)


def open_rendezvous(where, *, hosting):
    del where, hosting
    return Rendezvous()


class Board(LocalBoard):
    """The ranks' board: calls take time, and with some luck are answered."""

    def _check(self):
        super()._check()
        if getcurrent().process.dead:
            raise Dead

    def _call(self, name, *args, **kwargs):
        sim = Current.sim
        step()
        sim.sleep(sim.faults.travel_of(alive()))
        lost = sim.faults.board_fails(alive())
        if lost == "before":
            raise BoardLost("the store can't be reached")
        found = getattr(LocalBoard, name)(self, *args, **kwargs)
        step()
        if lost:
            raise BoardLost("the store didn't answer")
        return found

    @classmethod
    def shared(cls):
        return _Memory(changed=scheduler.Condition())


def _through(name):
    def call(self, *args, **kwargs):
        return self._call(name, *args, **kwargs)

    return call


for _name in ("set", "gather", "try_get", "compare_set", "append", "wait_entries", "try_entries", "delete_list"):
    setattr(Board, _name, _through(_name))
