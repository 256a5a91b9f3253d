"""Virtual time, and processes whose threads are greenlets: one runs at a time, and the seed says which.

Guarantees: what runs depends on the seed only; a killed process runs no instruction more, not even its ``finally``
blocks' system calls; a wait of one task never holds up another. Threads change only where they wait or make a system
call: data races between two such places are not explored.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from heapq import heappop, heappush

from greenlet import getcurrent, greenlet


class Dead(BaseException):
    """Ends a task whose process is gone."""


class Hang(Exception):
    """The schedule did not come to its end in bounded time."""


class Process:
    """A process: its tasks, and how it may die."""

    def __init__(self, sim, name, host):
        sim.pids += 1
        self.sim, self.name, self.host, self.pid = sim, name, host, sim.pids
        self.tasks = []
        self.dead = False
        self.dying = False  # killed, but in a system call that has to end first
        self.exitcode = None
        self.paused_until = 0.0
        self.calls = 0
        self.kill_at = None  # its how many-th system call it doesn't survive
        self.kill_after = False
        self.fds = set()
        self.on_death = []
        self.hang = None  # at its how many-th system call it stands still, and for how long
        self.cut_until = 0.0  # when its network is back
        self.out_until = 0.0  # when it reaches the object store again

    def spawn(self, function, *args, name=""):
        task = Task(self, function, args, name)
        self.tasks.append(task)
        self.sim.push(self.sim.now, task, True)
        return task


class Task(greenlet):
    """A thread of a process."""

    def __init__(self, process, function, args, name):
        super().__init__(self._main, process.sim.hub)
        self.process, self.function, self.args, self.name = process, function, args, name
        self.token = 0
        self.in_call = False
        self.finished = False
        self.joiners = []

    def _main(self, *_):
        sim = self.process.sim
        try:
            if not self.process.dead:
                self.function(*self.args)
        except Dead:
            pass
        except BaseException as error:
            if not self.process.dead:
                sim.errors.append((self.process.name, self.name, error))
                sim.stop = True  # a defect: nothing that follows says anything
        self.finished = True
        for joiner in self.joiners:
            sim.wake(joiner)
        self.function = self.args = self.joiners = ()


class Sim:
    def __init__(self, seed, *, trace=False):
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        self.heap = []
        self.seq = 0
        self.pids = 100
        self.calls = 0
        self.hub = getcurrent()
        self.processes = []
        self.errors = []
        self.to_reap = []
        self.lines = [] if trace else None
        self.on_call = None
        self.stop = False
        self.limit_s = float("inf")
        self.last = 0  # the event past which `run` gives up

    def log(self, what, detail=""):
        if self.lines is not None:
            task = getcurrent()
            who = f"{task.process.name}/{task.name}" if isinstance(task, Task) else "-"
            self.lines.append(f"{self.now:10.5f} {who:28} {what} {detail}")

    # time --------------------------------------------------------------------------------------------------------

    def push(self, at, task, value):
        self.seq = seq = self.seq + 1
        heappush(self.heap, (at, self.random(), seq, task, task.token, value))

    def later(self, delay, function):
        """Call ``function`` on the hub; it must not wait."""
        self.seq += 1
        heappush(self.heap, (self.now + delay, self.random(), self.seq, None, 0, function))

    def sleep(self, delay):
        task = getcurrent()
        at = self.now + delay
        process = task.process
        if process.dead or (process.dying and not task.in_call):
            raise Dead
        heap = self.heap
        if (not heap or at < heap[0][0]) and process.paused_until <= at <= self.limit_s and not self.to_reap:
            self.now = at  # nobody else has anything to do until then
            return
        self.seq = seq = self.seq + 1
        heappush(heap, (at, self.random(), seq, task, task.token, True))
        self._give_way(task)
        if process.dead or (process.dying and not task.in_call):
            raise Dead

    def park(self, timeout=None):
        """Wait until woken; False if ``timeout`` passes first."""
        task = getcurrent()
        process = task.process
        if process.dead or process.dying:
            raise Dead
        if timeout is not None:
            at = self.now + timeout if timeout > 0.0 else self.now
            self.seq = seq = self.seq + 1
            heappush(self.heap, (at, self.random(), seq, task, task.token, False))
        woken = self._give_way(task)
        if process.dead or (process.dying and not task.in_call):
            raise Dead
        return woken

    def _give_way(self, task):
        """What `run` does next, from within ``task``, which waits: one switch where by the hub there are two.

        Callbacks, reaping and limits are left to the hub.
        """
        heap = self.heap
        while heap and not (self.stop or self.to_reap or self.seq > self.last):
            at, _, _, other, token, value = heap[0]
            if other is None or at > self.limit_s:
                break
            heappop(heap)
            if other.token != token or other.finished:
                continue
            process = other.process
            if process.dead or (process.dying and not other.in_call):
                continue
            other.token = token + 1
            if process.paused_until > at:
                self.push(process.paused_until, other, value)
                continue
            if at > self.now:
                self.now = at
            return value if other is task else other.switch(value)
        return self.hub.switch()

    def wake(self, task):
        if not task.finished:
            self.seq = seq = self.seq + 1
            heappush(self.heap, (self.now, self.random(), seq, task, task.token, True))

    def run(self, *, limit_s, limit_events):
        """Run until `stop` is set or there is nothing to do; `Hang` past the limits."""
        heap = self.heap
        self.last = self.seq + limit_events
        self.limit_s = limit_s
        while heap and not self.stop:
            if self.to_reap:
                self.reap()
            at, _, _, task, token, value = heappop(heap)
            if task is None:
                if at > self.now:
                    self.now = at
                value()
                continue
            if task.token != token or task.finished:
                continue
            process = task.process
            if process.dead or (process.dying and not task.in_call):
                continue
            task.token = token + 1
            if process.paused_until > at:
                self.push(process.paused_until, task, value)
                continue
            if at > self.now:
                self.now = at
                if at > limit_s:
                    raise Hang(f"no end after {self.now:.1f} s of virtual time")
            task.switch(value)
            if self.seq > self.last:
                raise Hang(f"no end after {self.seq} events, {self.now:.1f} s of virtual time")
        if self.to_reap:
            self.reap()

    # processes ---------------------------------------------------------------------------------------------------

    def process(self, name, host):
        process = Process(self, name, host)
        self.processes.append(process)
        return process

    def kill(self, process, *, at_once=True):
        """SIGKILL. Not ``at_once``: a system call under way ends first, as the kernel does it."""
        if process.dead:
            return
        if not at_once and any(task.in_call for task in process.tasks if not task.finished):
            process.dying = True
            return
        self.end(process, -9)

    def end(self, process, exitcode):
        if process.dead:
            return
        self.log("process ends", f"{process.name} {exitcode}")
        process.dead = True
        process.exitcode = exitcode
        self.to_reap.append(process)
        for function in process.on_death:
            function(process)
        process.on_death = []

    def reap(self):
        while self.to_reap:
            process = self.to_reap.pop()
            for task in process.tasks:
                # A task may catch what ends it, and wait again: that raises anew.
                for _ in range(50):
                    if task.dead or task is getcurrent():
                        break
                    with contextlib.suppress(Dead):  # of one that never ran
                        task.throw(Dead)
                task.finished = True
            process.tasks = [task for task in process.tasks if not task.dead]
            if process in self.processes:
                self.processes.remove(process)

    def close(self):
        """Kill what still runs."""
        for process in list(self.processes):
            self.end(process, -9)
        self.reap()
        self.heap.clear()


class Current:
    """The simulation that is running; what stands in for modules of the system looks here."""

    sim = None


def sim():
    return Current.sim


def in_task():
    return type(getcurrent()) is Task


# what stands in for `threading`, `queue` and `time` ------------------------------------------------------------


class Lock:
    def __init__(self):
        self.owner = None
        self.waiters = None

    def acquire(self, blocking=True, timeout=-1):
        if self.owner is None:
            self.owner = True
            return True
        return blocking and self._wait(True, timeout)

    def _wait(self, owner, timeout):
        task = getcurrent()
        assert type(task) is Task, "a lock is held where nobody can wait for it"
        if self.waiters is None:
            self.waiters = deque()
        deadline = None if timeout < 0 else Current.sim.now + timeout
        while self.owner is not None:
            self.waiters.append(task)
            if not Current.sim.park(None if deadline is None else deadline - Current.sim.now):
                if task in self.waiters:
                    self.waiters.remove(task)
                return False
        self.owner = owner
        return True

    def release(self):
        self.owner = None
        while self.waiters:
            task = self.waiters.popleft()
            if not task.finished and not task.process.dead:
                Current.sim.wake(task)
                return

    def locked(self):
        return self.owner is not None

    def __enter__(self):
        if self.owner is None:
            self.owner = True
        else:
            self._wait(True, -1)
        return True

    def __exit__(self, *_):
        self.owner = None
        if self.waiters:
            self.release()


class RLock(Lock):
    def __init__(self):
        super().__init__()
        self.depth = 0

    def acquire(self, blocking=True, timeout=-1):
        me = getcurrent()
        if self.owner is me:
            self.depth += 1
            return True
        if self.owner is None:
            self.owner = me
        elif not (blocking and self._wait(me, timeout)):
            return False
        self.depth = 1
        return True

    def release(self):
        self.depth -= 1
        if self.depth <= 0:
            super().release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class Condition:
    def __init__(self, lock=None):
        self.lock = lock if lock is not None else RLock()
        self.waiting = deque()
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *_):
        self.lock.release()

    def wait(self, timeout=None):
        task = getcurrent()
        self.waiting.append(task)
        lock = self.lock
        depth = getattr(lock, "depth", 1)
        lock.depth = 1
        lock.release()
        woken = Current.sim.park(timeout)
        if not woken and task in self.waiting:
            self.waiting.remove(task)
        lock.acquire()
        lock.depth = depth
        return woken

    def wait_for(self, predicate, timeout=None):
        deadline = None if timeout is None else Current.sim.now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - Current.sim.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return result

    def notify(self, n=1):
        while self.waiting and n:
            Current.sim.wake(self.waiting.popleft())
            n -= 1

    def notify_all(self):
        self.notify(len(self.waiting))


class Event:
    def __init__(self):
        self.flag = False
        self.waiting = []

    def is_set(self):
        return self.flag

    def set(self):
        self.flag = True
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for task in waiting:
                Current.sim.wake(task)

    def clear(self):
        self.flag = False

    def wait(self, timeout=None):
        if self.flag:
            return True
        task = getcurrent()
        self.waiting.append(task)
        if not Current.sim.park(timeout) and task in self.waiting:
            self.waiting.remove(task)
        return self.flag


class SimpleQueue:
    def __init__(self):
        self.items = deque()
        self.waiting = deque()

    def put(self, item):
        self.items.append(item)
        if self.waiting:
            task = self.waiting.popleft()
            task.process.sim.wake(task)

    def get(self, block=True, timeout=None):
        while not self.items:
            self.waiting.append(getcurrent())
            if not Current.sim.park(timeout):
                raise TimeoutError
        return self.items.popleft()


class Thread:
    def __init__(self, group=None, target=None, name="", args=(), kwargs=None, *, daemon=None):
        self.target, self.name, self.args = target, name, args
        self.daemon = daemon
        self.task = None

    def start(self):
        task = getcurrent()
        if task.process.dead:
            raise Dead
        self.task = task.process.spawn(self.target, *self.args, name=self.name)
        self.target = None

    def is_alive(self):
        return self.task is not None and not self.task.finished

    def join(self, timeout=None):
        task = self.task
        if task is None or task.finished:
            return
        me = getcurrent()
        task.joiners.append(me)
        if not Current.sim.park(timeout) and me in task.joiners:
            task.joiners.remove(me)


class threading:  # the name of what it stands in for
    Lock, RLock, Condition, Event, Thread = Lock, RLock, Condition, Event, Thread

    @staticmethod
    def current_thread():
        return getcurrent()


class queue:
    SimpleQueue = SimpleQueue


class time:
    @staticmethod
    def monotonic():
        return Current.sim.now

    perf_counter = monotonic

    @staticmethod
    def time_ns():
        return int(Current.sim.now * 1e9)

    @staticmethod
    def sleep(seconds):
        if in_task():
            Current.sim.sleep(max(0.0, seconds))
        else:
            Current.sim.now += seconds
