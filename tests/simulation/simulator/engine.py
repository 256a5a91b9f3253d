"""An engine process: the real engine's control loop and attempts; what lies between it and its trainer is simulated.

Messages arrive in order, some time after they were sent; a descriptor travels with its message; either end sees the
other's death as an end of file.
"""

from __future__ import annotations

from collections import deque

from greenlet import getcurrent

from holdfast.engine import process as engine_process
from holdfast.engine.wire import Received
from holdfast.errors import EngineDied
from simulator.scheduler import Current, Dead
from simulator.system import Image, Open


class Socket:
    """One end of the socket between a trainer and its engine."""

    def __init__(self, sim):
        self.sim = sim
        self.items = deque()
        self.closed = False  # the other end
        self.waiting = None
        self.last_at = 0.0

    def deliver(self, message, fds, to):
        sim = self.sim
        self.last_at = max(self.last_at + 1e-6, sim.now + sim.faults.travel())
        sim.later(self.last_at - sim.now, lambda: self._arrive(message, fds, to))

    def _arrive(self, message, fds, to):
        if to.dead:
            for fd in fds:
                sim_close(fd)
            return
        self.items.append(Received(message, fds))
        self._wake()

    def hang_up(self):
        # What was sent before still arrives before the end of file.
        self.last_at = max(self.last_at + 1e-6, self.sim.now)
        self.sim.later(self.last_at - self.sim.now, self._hung_up)

    def _hung_up(self):
        self.closed = True
        self._wake()

    def _wake(self):
        if self.waiting is not None:
            task, self.waiting = self.waiting, None
            self.sim.wake(task)

    def ready(self):
        return bool(self.items) or self.closed

    def wait(self, timeout):
        if not self.ready():
            self.waiting = getcurrent()
            self.sim.park(timeout)
            self.waiting = None
        return self.ready()

    def fileno(self):
        return -1

    def close(self):
        self.closed = True


def sim_close(fd):
    Current.sim.system.drop_fd(fd)


class SimEngine(engine_process.Engine):
    """The real control loop but for its descriptors."""

    def __init__(self, process, inbound, outbound, trainer):
        self._process, self._in, self._out, self._trainer = process, inbound, outbound, trainer
        self._posted = deque()
        self._wake_out = -1
        self._parent_fd = 0
        self._images, self._plans = {}, {}
        self._attempts, self._slots, self._removers, self._noticed = {}, {}, {}, set()
        self._precedence = engine_process.Precedence()
        self._cores_at_start = None
        self._next_beat = 0.0
        self._leaving_since = None
        self._connected = True
        self._outbox = self

    # What the real one has an `Outbox` for.

    def put(self, message):
        if not self._trainer.dead and not self._process.dead:
            self._out.deliver(message, (), self._trainer)

    def __len__(self):
        return 0

    def post(self, message):
        self._posted.append(message)
        self._in._wake()

    def _flush(self):
        pass

    def _wait(self):
        left_ms = self._wait_ms()
        if not self._posted and not (self._connected and self._in.ready()):
            self._in.waiting = getcurrent()
            Current.sim.park(None if left_ms is None else left_ms / 1000 + 1e-6)
            self._in.waiting = None
        self._drain_posted()
        if self._connected and self._in.ready():
            self._read_all()

    def _read_all(self):
        while self._in.items:
            self._handle(self._in.items.popleft())
        if self._in.closed:
            self._connected = False
            self._leave()

    def main(self):
        self.put(engine_process.messages.EngineReady(self._process.pid, engine_process.__version__))
        while not self._may_leave():
            self._wait()
            self._beat()
        self._process.sim.end(self._process, 0)
        raise Dead


class SimInbox:
    """The trainer's reading end, where the real link has an `Inbox`."""

    def __init__(self, sock, _kind):
        self._sock = sock

    def receive(self):
        if self._sock.items:
            items = list(self._sock.items)
            self._sock.items.clear()
            return items
        return None


class SimSelect:
    """`select` as the real link uses it: one socket, one wait."""

    POLLIN = 1

    class poll:  # the name of what it stands in for
        def register(self, sock, _events):
            self._sock = sock

        def poll(self, timeout_ms):
            return [(0, 1)] if self._sock.wait(timeout_ms / 1000) else []


class SimProcess:
    """The trainer's handle on an engine, as `launch.Process`."""

    def __init__(self, rank, process, inbound, outbound):
        self._rank, self.process, self.pid = rank, process, process.pid
        self.sock = inbound
        self._to_engine = outbound
        inbound.handle = self

    def tell(self, message, fds):
        if getcurrent().process.dead:
            raise Dead
        if self.process.dead:
            raise OSError("the engine is gone")
        system = Current.sim.system
        handed = tuple(system.new_fd(system.opened(fd), self.process) for fd in fds)
        self._to_engine.deliver(message, handed, self.process)

    def running(self):
        return not self.process.dead

    def kill(self):
        Current.sim.kill(self.process, at_once=False)

    def abandon(self):
        raise AssertionError("nobody forks here")

    def reap(self, reason, *, linger_s):
        sim = Current.sim
        deadline = sim.now + linger_s
        while self.running() and sim.now < deadline:
            sim.sleep(0.02)
        if self.running():
            self.kill()
            deadline = sim.now + 1.0
            while self.running() and sim.now < deadline:
                sim.sleep(0.1)
        status = self.process.exitcode
        return EngineDied(f"the engine of rank {self._rank} {reason()}", rank=self._rank, exitcode=status)


def launch(rank):
    """Start an engine beside the trainer that calls this."""
    sim = Current.sim
    trainer = getcurrent().process
    number = len(sim.engines)
    process = sim.process(f"engine{rank}.{number}", trainer.host)
    to_engine, to_trainer = Socket(sim), Socket(sim)
    engine = SimEngine(process, to_engine, to_trainer, trainer)
    process.on_death += [lambda _: to_trainer.hang_up(), sim.system.drop_process]
    trainer.on_death.append(lambda _: to_engine.hang_up())
    process.spawn(engine.main, name="control")
    sim.engines.append(process)
    process.trainer_key = getattr(trainer, "key", None)
    sim.faults.doom_engine(process)
    return SimProcess(rank, process, to_trainer, to_engine)


def send(sock, message, fds, *, timeout_s):
    """What the real link sends by; ``sock`` is the trainer's end, whose process it knows."""
    sock.handle.tell(message, fds)


def map_image(fd, nbytes):
    node = Current.sim.system.opened(fd).node
    assert type(node) is Image
    assert len(node.data) >= nbytes
    return memoryview(node.data)


def new_image(data):
    return Current.sim.system.new_fd(Open(Image(data), 0))


def close_fds(fds):
    for fd in fds:
        sim_close(fd)
