"""The engine process: a control thread that always answers, beside threads that write. Torch-free.

Started by `EngineClient` with one socket; see `messages` for what is said on it.

Guarantees:
- the control thread makes no system call that a file system could hold up: it polls, reads, answers and beats;
- signals that a launcher or a terminal sends to a whole job (INT, TERM, HUP) are ignored, and it runs in its own
  session: what is staged and verified is finished;
- when the trainer is gone (end of file on the socket, or its process has ended) or says `Shutdown`, a verified attempt
  is finished within ``orphan_grace_s``, anything else is dropped, and the process is gone. Nothing is removed then:
  recovery does that.

Its I/O priority follows from its nice level, the kernel derives one from the other, unless an I/O class is asked for.
PR_SET_PDEATHSIG is not used: it fires when the *thread* that started us ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast._version import __version__
from holdfast.engine import messages
from holdfast.engine.attempt import Attempt, Job
from holdfast.engine.calls import SYSTEM, where
from holdfast.engine.checksums import WritePlan, compile_plan
from holdfast.engine.executor import WriteOptions
from holdfast.engine.removal import remove_tree_at
from holdfast.engine.wire import FrameError, Inbox, Outbox, Received, ToEngine, close_fds

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.slots import HostSlots

EXIT_FLUSH_S: Final = 1.0
"""How long last answers may take to leave."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread that computes keeps another waiting: a writer that comes back from a system call must go on."""
LOWEST_NICE: Final = 19
_PARENT_CHECK_S: Final = 1.0


class _Plan:
    """A plan as it came, and compiled, by whoever is first."""

    def __init__(self, message: messages.AddPlan) -> None:
        self.index = message.index
        self._message: messages.AddPlan | None = message
        self._compiled: WritePlan | None = None
        self._lock = threading.Lock()

    def compile_ahead(self) -> None:
        """Be done before it is needed; what is wrong with it is told then."""
        with contextlib.suppress(ValueError):
            self.compiled()

    def compiled(self) -> WritePlan:
        with self._lock:
            if self._compiled is None:
                assert self._message is not None
                self._compiled = compile_plan(self._message)
                self._message = None
            return self._compiled


class _Image:
    """An image as it came, mapped at once, or else when it is needed: there may be memory again by then."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes ``fd`` over; holds it for as long as the image isn't mapped."""
        self._fds: tuple[int, ...] = (fd,)
        self._nbytes = nbytes
        self._view: memoryview | None = None
        self.mapped()

    def mapped(self) -> memoryview | str:
        """The bytes, or why they can't be had: told when they are used, where someone waits for an answer."""
        if self._view is None:
            found = _map_image(self._fds[0], self._nbytes)
            if isinstance(found, str):
                return found
            self._view = found
            self.close()
        return self._view

    def close(self) -> None:
        """Give up the descriptor; the memory goes with the last attempt that reads it."""
        fds, self._fds = self._fds, ()
        close_fds(fds)


class Engine:
    """The control loop. Everything but `post` is for its own thread."""

    _slots: HostSlots | None = None

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._inbox: Inbox[ToEngine] = Inbox(sock, ToEngine)
        self._outbox = Outbox(sock)
        self._posted: deque[messages.Message] = deque()
        self._wake_out, self._wake_in = os.pipe()
        for fd in (self._wake_out, self._wake_in):
            os.set_blocking(fd, False)
        self._parent = os.getppid()
        self._parent_fd = _pidfd(self._parent)
        self._config = messages.Configure(
            writers=2, io_limit_bytes_per_s=None, nice=0, orphan_grace_s=60.0, direct=True
        )
        self._images: dict[int, _Image] = {}
        self._plans: dict[int, _Plan] = {}
        self._attempt: Attempt | None = None
        self._next_beat = 0.0
        self._leave_at: float | None = None
        """Set when the process is to end: when what is worth finishing is finished, and by this time at most."""
        self._connected = True
        self._remover = _Remover(self.post)

    def post(self, message: messages.Message) -> None:
        """Have the control thread send ``message``. From any thread; never blocks."""
        self._posted.append(message)
        with contextlib.suppress(BlockingIOError):  # it has been woken and has not looked yet
            os.write(self._wake_in, b"\0")

    def run(self) -> None:
        """Returns when the process may end."""
        self._outbox.put(messages.Ready(os.getpid(), __version__))
        self._flush()
        while not self._may_leave():
            self._wait()
            self._beat()
            self._flush()  # may find the trainer gone, of which no later wait would hear
        deadline = time.monotonic() + EXIT_FLUSH_S
        while self._connected and len(self._outbox) and (left := deadline - time.monotonic()) > 0:
            select.select([], [self._sock], [], left)
            self._flush()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        if self._connected:
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if len(self._outbox) else 0))
            if self._parent_fd >= 0:
                poll.register(self._parent_fd, select.POLLIN)
        for fd, events in poll.poll(self._wait_ms()):
            if fd == self._wake_out:
                self._drain_posted()
            elif fd == self._parent_fd:
                self._read_last()
            elif events & ~select.POLLOUT:
                self._read()
        if self._connected and self._parent_fd < 0 and os.getppid() != self._parent:
            self._read_last()

    def _wait_ms(self) -> float | None:
        now = time.monotonic()
        times = [self._next_beat] if self._attempt is not None else []
        if self._leave_at is not None:
            times.append(self._leave_at)
        if self._parent_fd < 0:
            times.append(now + _PARENT_CHECK_S)
        return max(0.0, min(times) - now) * 1000 if times else None

    def _drain_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        while self._posted:
            message = self._posted.popleft()
            if self._attempt is not None and self._attempt.ended:
                self._attempt = None
            self._outbox.put(message)

    def _flush(self) -> None:
        if self._connected:
            try:
                self._outbox.flush()
            except OSError:
                self._read_last()

    def _beat(self) -> None:
        now = time.monotonic()
        if self._attempt is None or now < self._next_beat:
            return
        self._next_beat = now + messages.BEAT_S
        if not len(self._outbox):  # a trainer that stands still shall not find a pile of them
            self._outbox.put(messages.Beat(self._attempt.name, self._attempt.written, self._attempt.waiting))

    def _read_last(self) -> None:
        """The trainer has ended; what it said before still counts."""
        while self._connected and select.select([self._sock], [], [], 0)[0]:
            self._read()
        self._disconnect()

    def _read(self) -> None:
        """Take in what has come."""
        try:
            received = self._inbox.receive()
        except FrameError as error:
            sys.stderr.write(f"holdfast engine: {error}\n")  # ends up in EngineDied
            received = None
        except OSError:
            received = None
        if received is None:
            self._disconnect()
            return
        for item in received:
            self._handle(item)

    def _disconnect(self) -> None:
        """The trainer is gone."""
        if not self._connected:
            return
        self._connected = False
        self._inbox.close()
        self._leave()

    def _leave(self) -> None:
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self._config.orphan_grace_s

    def _may_leave(self) -> bool:
        if self._leave_at is None:
            return False
        if time.monotonic() >= self._leave_at:
            return True
        attempt = self._attempt
        if attempt is not None and not attempt.ended:
            if attempt.verified:
                return False
            attempt.cancel()
        # Removing goes on to the end for a trainer that waits for it; an orphan leaves the rest to the next start.
        return not (self._connected and self._remover.busy)

    def _handle(self, item: Received[ToEngine]) -> None:
        message = item.message
        match message:
            case messages.Configure():
                self._configure(message)
            case messages.AddImage():
                self._images[message.image] = _Image(item.fds[0], message.nbytes)
            case messages.DropImage():
                if (dropped := self._images.pop(message.image, None)) is not None:
                    dropped.close()
            case messages.AddPlan():
                self._plans[message.plan] = plan = _Plan(message)
                with contextlib.suppress(RuntimeError):  # no thread to be had: then whoever needs it compiles it
                    threading.Thread(target=plan.compile_ahead, name="holdfast-compile", daemon=True).start()
            case messages.DropPlan():
                self._plans.pop(message.plan, None)
            case messages.Persist():
                self._persist(message, item.fds[0])
            case messages.StagingVerified():
                if self._attempt is not None and self._attempt.name == message.attempt:
                    self._attempt.verify()
            case messages.Cancel():
                self._cancel(message)
            case messages.Remove():
                self._remover.add(item.fds[0], message.name)
            case messages.Shutdown():
                self._leave()

    def _configure(self, message: messages.Configure) -> None:
        self._config = message
        _be_nice(message.nice)
        # What few ask for is imported where it is asked for: an engine starts fast, and is small.
        if message.io_class != "none":
            from holdfast.engine.io_priority import set_io_class

            failure = set_io_class(message.io_class, message.io_level)
            if failure is not None:
                self._outbox.put(messages.Notice(f"it writes without io_class={message.io_class!r}: {failure}"))
        if message.host_writers is not None:
            from holdfast.storage.slots import HostSlots

            self._slots = HostSlots(message.slots, message.host_writers)

    def _persist(self, message: messages.Persist, dir_fd: int) -> None:
        known, plan = self._images.get(message.image), self._plans.get(message.plan)
        image = f"image {message.image} is not known" if known is None else known.mapped()
        if self._attempt is not None and not self._attempt.ended:
            problem = f"attempt {self._attempt.name} is still in work"
        elif plan is None:
            problem = f"plan {message.plan} is not known"
        elif isinstance(image, str):
            problem = image
        else:
            job = Job(message, dir_fd, image, plan.compiled, plan.index, self._options(), self._slots)
            attempt = Attempt(job, self.post)
            try:
                attempt.start()
            except RuntimeError as error:
                problem = f"no thread can be started: {error}"
            else:
                self._attempt = attempt
                self._next_beat = time.monotonic()
                return
        self._outbox.put(messages.Failed(message.attempt, None, where(dir_fd), problem))
        os.close(dir_fd)

    def _cancel(self, message: messages.Cancel) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.name == message.attempt and not attempt.ended:
            if not attempt.cancel():
                return  # its report is being put in place: the worker settles it and answers
            self._attempt = None
        left = attempt is not None and attempt.name == message.attempt and attempt.report_left
        self._outbox.put(messages.Cancelled(message.attempt, left))

    def _options(self) -> WriteOptions:
        config = self._config
        return WriteOptions(config.writers, config.io_limit_bytes_per_s, config.direct)


class _Remover:
    """Removes trees one after the other, on one thread of the lowest priority that lives while there is work."""

    def __init__(self, post: Callable[[messages.Message], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, str]] = deque()
        self._running = False

    @property
    def busy(self) -> bool:
        return self._running

    def add(self, dir_fd: int, name: str) -> None:
        """Take over ``dir_fd``, remove its entry ``name``, then post `Removed`."""
        with self._lock:
            self._queue.append((dir_fd, name))
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="holdfast-remove", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._running = False
                left, self._queue = list(self._queue), deque()
            for fd, unremoved in left:
                os.close(fd)
                self._post(messages.Removed(unremoved, errno.EAGAIN))

    def _run(self) -> None:
        _be_nice(LOWEST_NICE)
        done = False
        while not done:
            with self._lock:
                dir_fd, name = self._queue.popleft()
            number: int | None = None
            try:
                remove_tree_at(dir_fd, name)
                SYSTEM.fsync_dir(dir_fd)
            except OSError as error:
                number = error.errno or errno.EIO
            finally:
                os.close(dir_fd)
            with self._lock:
                done = not self._queue
                self._running = not done
            # Last: it wakes the control thread, which leaves only if nothing is being removed any more.
            self._post(messages.Removed(name, number))


def main(fd: int) -> NoReturn:
    """Be the engine on socket ``fd`` until there is nothing left to do; never returns."""
    status = 70
    try:
        _settle(fd)
        Engine(socket.socket(fileno=fd)).run()
        status = 0
    except BaseException:  # noqa: BLE001 - the trainer reads this in EngineDied
        import traceback

        traceback.print_exc()
    finally:
        # Threads may be in a system call that never returns: no clean-up may wait for them.
        sys.stderr.flush()
        os._exit(status)


def _settle(fd: int) -> None:
    """Cut what ties this process to the job it came from."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    os.chdir("/")
    try:
        inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        inherited = list(range(3, 1024))
    close_fds([other for other in inherited if other > 2 and other != fd])
    os.set_inheritable(fd, False)  # noqa: FBT003 - takes no keyword
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _be_nice(nice: int) -> None:
    """Give the calling thread, and threads it starts from now on, at least this nice level."""
    with contextlib.suppress(OSError):  # it works as well at another level
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def _map_image(fd: int, nbytes: int) -> memoryview | str:
    """The image behind ``fd``, or why it can't be had."""
    try:
        size = os.fstat(fd).st_size
        if size < nbytes:
            return f"the image holds {size} bytes, not {nbytes}"
        return memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        return f"the image of {nbytes} bytes can't be mapped: {error}"


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when ``pid`` has ended; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
