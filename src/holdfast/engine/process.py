"""The engine process: a control thread that always answers, beside threads that write. Torch-free.

Started by `EngineClient` with one socket; see `messages` for the protocol.

Guarantees:
- the control thread makes no system call that a file system could block: it polls, reads, answers and sends beats. It
  keeps the priorities that the process was started with;
- attempts of several sessions run side by side; each worker sets its own nice level, I/O class and cores before it
  starts other threads, so that one attempt's limits never apply to another. Threads of no attempt run on the cores that
  a session has named last;
- signals that a launcher or a terminal sends to a whole job (INT, TERM, HUP) are ignored, and the process runs in a
  session of its own: what is staged and verified is finished;
- when the trainer is gone (end of file on the socket, or its process has ended) or sends `Shutdown`, a verified attempt
  may finish within its ``orphan_grace_s``, anything else is dropped, and the process ends. It removes nothing then:
  recovery does that.

The kernel derives its I/O priority from its nice level, unless an I/O class is requested. PR_SET_PDEATHSIG is not used:
it fires when the *thread* that started us ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import operator
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast._version import __version__
from holdfast.cores import bind
from holdfast.engine import messages
from holdfast.engine.checksums import WritePlan, compile_plan
from holdfast.engine.executor import Precedence, WriteOptions
from holdfast.engine.places import opened_writer
from holdfast.engine.removal import remove_tree_at
from holdfast.engine.ring import Ring
from holdfast.engine.syscalls import SYSTEM, where
from holdfast.engine.wire import FrameError, Inbox, Outbox, Received, ToEngine, close_fds
from holdfast.engine.write_job import WriteJob, WriteJobInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from holdfast.storage.locks import HostSlots


# The I/O class of a thread, which decides its share of a disk (Linux). Torch-free.
#
# Guarantees: affects only the calling thread and those it starts later.
# Assumes: an I/O scheduler that honours it (bfq does; mq-deadline orders the classes; none ignores it), and writes with
# `O_DIRECT`: the kernel's own threads do the write-back of the page cache.

CLASSES: Final = {"none": 0, "best_effort": 2, "idle": 3}
LEVEL_USUAL: Final = 4
"""The kernel's default level, halfway between 0 (served first) and 7."""
_CLASS_SHIFT: Final = 13
_WHO_PROCESS: Final = 1
_SET: Final = {"x86_64": 251, "ppc64le": 273, "s390x": 282, "aarch64": 30, "riscv64": 30, "loongarch64": 30}
"""System call numbers: the C library has no wrapper."""


def io_priority(io_class: str, level: int | None) -> int:
    """Return the kernel's encoding; ``level`` applies to ``best_effort`` only."""
    within = (LEVEL_USUAL if level is None else level) if io_class == "best_effort" else 0
    return CLASSES[io_class] << _CLASS_SHIFT | within


def set_io_class(io_class: str, level: int | None) -> str | None:
    """Set the I/O class of the calling thread; return why it failed, or None. ``none`` changes nothing."""
    if io_class == "none":
        return None
    machine = os.uname().machine
    if os.uname().sysname != "Linux" or machine not in _SET:
        return f"I/O classes are not known on {os.uname().sysname} {machine}"
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (_WHO_PROCESS, 0, io_priority(io_class, level))
    if system.syscall(ctypes.c_long(_SET[machine]), *map(ctypes.c_int, arguments)) != 0:
        return f"ioprio_set: {os.strerror(ctypes.get_errno())}"
    return None


REMOVAL_GRACE_S: Final = 60.0
"""How long an ending process continues removals for a trainer that waits for them."""
EXIT_FLUSH_S: Final = 1.0
"""How long to wait until the last answers are sent."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread may hold the GIL: a writer that returns from a system call must continue."""
LOWEST_NICE: Final = 19
_PARENT_CHECK_S: Final = 1.0
_LAST_FILES_S: Final = 2.0
"""How long a cancelled attempt may still be making its last file in what is removed."""


class _Plan:
    """A plan as received, and compiled by whoever needs it first."""

    def __init__(self, message: messages.AddPlan) -> None:
        self.index = message.index
        self._message: messages.AddPlan | None = message
        self._compiled: WritePlan | None = None
        self._lock = threading.Lock()
        self._sums = b""
        """Checksums of the tensors in the attempt before."""

    def compare(self, sums: bytes) -> bytes:
        """Return for each tensor whether its checksum is that of the attempt before; empty if there was none."""
        before, self._sums = self._sums, bytes(sums)
        if len(before) != len(self._sums):
            return b""
        return bytes(map(operator.eq, memoryview(before).cast("Q"), memoryview(self._sums).cast("Q")))

    def compile_ahead(self) -> None:
        """Compile before it is needed; an invalid plan is reported when it is used."""
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
    """An image as received; mapped at once, or when it is needed if memory was short."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Take ownership of ``fd``, and keep it until the image is mapped."""
        self._fds: tuple[int, ...] = (fd,)
        self._nbytes = nbytes
        self._view: memoryview | None = None
        self.mapped()

    def mapped(self) -> memoryview | str:
        """Return the bytes, or why there are none: reported on use, when someone waits for an answer."""
        if self._view is None:
            found = _map_image(self._fds[0], self._nbytes)
            if isinstance(found, str):
                return found
            self._view = found
            self.close()
        return self._view

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last attempt that reads it."""
        fds, self._fds = self._fds, ()
        close_fds(fds)


class Engine:
    """The control loop. All methods except `post` are for its own thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._sock = sock
        self._inbox: Inbox[ToEngine] = Inbox(sock, ToEngine)
        self._outbox = Outbox(sock)
        self._posted: deque[messages.EngineMessage] = deque()
        self._wake_out, self._wake_in = os.pipe()
        for fd in (self._wake_out, self._wake_in):
            os.set_blocking(fd, False)
        self._parent = os.getppid()
        self._parent_fd = _pidfd(self._parent)
        self._images: dict[int, _Image] = {}
        self._plans: dict[int, _Plan] = {}
        self._attempts: dict[tuple[int, str], WriteJob] = {}
        """Attempts in progress, by session and name."""
        self._slots: dict[tuple[str, int], HostSlots] = {}
        self._removers: dict[tuple[int, str], _Remover] = {}
        """One remover per file system."""
        self._precedence = Precedence()
        self._noticed: set[str] = set()
        self._cores_at_start: frozenset[int] | None = None
        """Set once its own threads run elsewhere."""
        self._next_beat = 0.0
        self._leaving_since: float | None = None
        """Set when the process has to end, as soon as nothing worth finishing is left."""
        self._connected = True

    def post(self, message: messages.EngineMessage) -> None:
        """Have the control thread send ``message``. Any thread; never blocks."""
        self._posted.append(message)
        with contextlib.suppress(BlockingIOError):  # already woken
            os.write(self._wake_in, b"\0")

    def run(self) -> None:
        """Run the loop; return when the process may end."""
        self._outbox.put(messages.EngineReady(os.getpid(), __version__))
        self._flush()
        while not self._may_leave():
            self._wait()
            self._beat()
            self._flush()  # may find that the trainer is gone, which no later wait would notice
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
        times = [self._next_beat] if self._attempts else []
        if self._leaving_since is not None:
            times += [end for end in self._grace_ends() if end > now]
        if self._parent_fd < 0:
            times.append(now + _PARENT_CHECK_S)
        return max(0.0, min(times) - now) * 1000 if times else None

    def _grace_ends(self) -> list[float]:
        """Return the times until which the process stays for unfinished work."""
        assert self._leaving_since is not None
        graces = [attempt.orphan_grace_s for attempt in self._attempts.values() if not attempt.ended]
        if any(remover.busy for remover in self._removers.values()):
            graces.append(REMOVAL_GRACE_S)
        return [self._leaving_since + grace_s for grace_s in graces]

    def _drain_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_out, 4096)
        while self._posted:
            message = self._posted.popleft()
            self._attempts = {key: attempt for key, attempt in self._attempts.items() if not attempt.ended}
            self._outbox.put(message)

    def _flush(self) -> None:
        if self._connected:
            try:
                self._outbox.flush()
            except OSError:
                self._read_last()

    def _beat(self) -> None:
        now = time.monotonic()
        if not self._attempts or now < self._next_beat:
            return
        self._next_beat = now + messages.BEAT_S
        if not len(self._outbox):  # don't pile up beats for a stopped trainer
            self._outbox.put(
                messages.EngineBeat(
                    tuple(
                        messages.AttemptBeat(attempt.name, attempt.written, attempt.waiting, attempt.session)
                        for attempt in self._attempts.values()
                    )
                )
            )

    def _read_last(self) -> None:
        """Handle what the trainer sent before it ended."""
        while self._connected and select.select([self._sock], [], [], 0)[0]:
            self._read()
        self._disconnect()

    def _read(self) -> None:
        """Handle incoming messages."""
        try:
            received = self._inbox.receive()
        except FrameError as error:
            sys.stderr.write(f"holdfast engine: {error}\n")  # shown in EngineDied
            received = None
        except OSError:
            received = None
        if received is None:
            self._disconnect()
            return
        for item in received:
            self._handle(item)

    def _disconnect(self) -> None:
        """Handle the end of the trainer."""
        if not self._connected:
            return
        self._connected = False
        self._inbox.close()
        self._leave()

    def _leave(self) -> None:
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()

    def _may_leave(self) -> bool:
        """Return True if no work worth finishing is left: no verified attempt within its grace, and no removal.

        Removals continue while a trainer waits for them; an orphan leaves the rest to the next start.
        """
        if self._leaving_since is None:
            return False
        since_s = time.monotonic() - self._leaving_since
        stays = False
        for attempt in self._attempts.values():
            if attempt.ended:
                continue
            if attempt.verified:
                stays = stays or since_s < attempt.orphan_grace_s
            else:
                attempt.cancel()
        removing = self._connected and any(remover.busy for remover in self._removers.values())
        return not stays and not (removing and since_s < REMOVAL_GRACE_S)

    def _handle(self, item: Received[ToEngine]) -> None:
        message = item.message
        match message:
            case messages.AddImage():
                self._images[message.image] = _Image(item.fds[0], message.nbytes)
            case messages.DropImage():
                if (dropped := self._images.pop(message.image, None)) is not None:
                    dropped.close()
            case messages.AddPlan():
                self._plans[message.plan] = plan = _Plan(message)
                with contextlib.suppress(RuntimeError):  # no thread available: compiled when needed
                    threading.Thread(target=plan.compile_ahead, name="holdfast-compile", daemon=True).start()
            case messages.DropPlan():
                self._plans.pop(message.plan, None)
            case messages.UseCores():
                if self._cores_at_start is None:
                    self._cores_at_start = frozenset(os.sched_getaffinity(0))
                self._bind(message.cores)
            case messages.Persist():
                self._persist(message, item.fds[0] if item.fds else -1)
            case messages.SlotFilled():
                if (attempt := self._attempts.get((message.session, message.attempt))) is not None:
                    attempt.filled(message.pieces)
            case messages.StagingVerified():
                if (attempt := self._attempts.get((message.session, message.attempt))) is not None:
                    attempt.verify()
            case messages.Cancel():
                self._cancel(message)
            case messages.Remove():
                remover = self._removers.setdefault((message.device, message.module), _Remover(self.post))
                if item.fds:
                    remover.add(item.fds[0], message.name, message.session)
                else:
                    remover.add_stored(message)
            case messages.Shutdown():
                self._leave()

    def _persist(self, message: messages.Persist, dir_fd: int) -> None:
        inputs = self._inputs(message, dir_fd)
        in_work = [
            name for (session, name), job in self._attempts.items() if session == message.session and not job.ended
        ]
        if in_work:
            problem = f"attempt {in_work[0]} is still in progress"
        elif isinstance(inputs, str):
            problem = inputs
        else:
            attempt = WriteJob(inputs, self.post)
            self._take_umask(message.umask)
            try:
                attempt.start()
            except RuntimeError as error:
                problem = f"no thread can be started: {error}"
            else:
                self._attempts[message.session, message.attempt] = attempt
                self._next_beat = time.monotonic()
                return
        path = message.module or where(dir_fd)
        self._outbox.put(messages.AttemptFailed(message.attempt, None, path, problem, session=message.session))
        if dir_fd >= 0:
            os.close(dir_fd)

    def _take_umask(self, umask: int) -> None:
        """Use ``umask`` combined with those of attempts in progress: a process has only one, so the strictest wins."""
        for job in self._attempts.values():
            if not job.ended:
                umask |= job.umask
        os.umask(umask)

    def _inputs(self, message: messages.Persist, dir_fd: int) -> WriteJobInputs | str:
        """Return what a job needs, or what is missing."""
        known, plan = self._images.get(message.image), self._plans.get(message.plan)
        image = f"image {message.image} is not known" if known is None else known.mapped()
        if message.source is not None:
            plan, image = _Plan(messages.AddPlan(0, (), b"", b"", b"")), memoryview(b"")
        if plan is None:
            return f"plan {message.plan} is not known"
        if isinstance(image, str):
            return image
        if message.module and message.slot_bytes:
            return f"the writer {message.module} takes whole images only, and this is a ring"
        limits = message.limits
        return WriteJobInputs(
            message,
            dir_fd,
            image,
            plan.compiled,
            plan.index,
            WriteOptions(limits.writers, limits.io_limit_bytes_per_s, limits.direct, nice=limits.nice),
            self._slots_of(limits),
            lambda: self._take_priorities(limits),
            self._precedence,
            self._ring_of(message, image),
            plan.compare,
        )

    def _ring_of(self, message: messages.Persist, image: memoryview) -> Ring | None:
        if not message.slot_bytes:
            return None

        def tell_freed(pieces: int) -> None:
            self.post(messages.SlotFree(message.attempt, pieces, message.session))

        return Ring(image, message.slot_bytes, tell_freed)

    def _slots_of(self, limits: messages.AttemptLimits) -> HostSlots | None:
        if limits.host_writers is None:
            return None
        # Imported only when needed: the engine starts fast and stays small.
        from holdfast.storage.locks import HostSlots

        key = limits.slots, limits.host_writers
        return self._slots.get(key) or self._slots.setdefault(key, HostSlots(*key))

    def _take_priorities(self, limits: messages.AttemptLimits) -> None:
        """Lower the priorities of the calling worker; threads that it starts inherit them."""
        _be_nice(limits.nice)
        failure = set_io_class(limits.io_class, limits.io_level)
        if failure is not None:
            self._notice(f"it writes without io_class={limits.io_class!r}: {failure}")
        self._bind(limits.cores or self._cores_at_start or ())

    def _bind(self, cores: Collection[int]) -> None:
        """Bind the calling thread, if there are any cores."""
        failure = bind(cores) if cores else None
        if failure is not None:
            self._notice(failure)

    def _notice(self, text: str) -> None:
        """Tell the trainer, once."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.post(messages.Notice(text))

    def _cancel(self, message: messages.Cancel) -> None:
        key = message.session, message.attempt
        attempt = self._attempts.get(key)
        if attempt is not None and not attempt.ended and not attempt.cancel():
            return  # its report is being put in place: the worker settles it and answers
        self._attempts.pop(key, None)
        left = attempt is not None and attempt.report_left
        self._outbox.put(messages.Cancelled(message.attempt, left, message.session))


def _remove(dir_fd: int, name: str) -> None:
    """Remove the tree ``name``, again where an attempt that was cancelled made one more file in it meanwhile."""
    until = time.monotonic() + _LAST_FILES_S
    while True:
        try:
            return remove_tree_at(dir_fd, name)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > until:
                raise
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class _TreeRemoval:
    """One tree to remove: by ``run``, or never, by ``drop``."""

    name: str
    session: int
    run: Callable[[], None]
    drop: Callable[[], None]


class _Remover:
    """Removes trees one after the other, on a thread of the lowest priority that lives while there is work."""

    def __init__(self, post: Callable[[messages.EngineMessage], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._queue: deque[_TreeRemoval] = deque()
        self._running = False

    @property
    def busy(self) -> bool:
        return self._running

    def add(self, dir_fd: int, name: str, session: int = 0) -> None:
        """Take ownership of ``dir_fd``, remove its entry ``name``, then post `Removed` for ``session``."""

        def remove() -> None:
            try:
                _remove(dir_fd, name)
                SYSTEM.fsync_dir(dir_fd)
            finally:
                os.close(dir_fd)

        self._add(_TreeRemoval(name, session, remove, lambda: os.close(dir_fd)))

    def add_stored(self, message: messages.Remove) -> None:
        """Remove ``name`` through the writer of its root, then post `Removed`."""

        def remove() -> None:
            opened_writer(message.module, message.args, message.paths).remove_tree(message.name)

        self._add(_TreeRemoval(message.name, message.session, remove, lambda: None))

    def _add(self, removal: _TreeRemoval) -> None:
        with self._lock:
            self._queue.append(removal)
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="holdfast-remove", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._running = False
                left, self._queue = list(self._queue), deque()
            for unremoved in left:
                unremoved.drop()
                self._post(messages.Removed(unremoved.name, errno.EAGAIN, unremoved.session))

    def _run(self) -> None:
        _be_nice(LOWEST_NICE)
        done = False
        while not done:
            with self._lock:
                removal = self._queue.popleft()
            number: int | None = None
            try:
                removal.run()
            except Exception as error:  # noqa: BLE001 - a writer's, too: someone waits for the answer
                number = getattr(error, "errno", None) or errno.EIO
            with self._lock:
                done = not self._queue
                self._running = not done
            # Last: it wakes the control thread, which leaves only if no removal is in progress.
            self._post(messages.Removed(removal.name, number, removal.session))


def main(fd: int) -> NoReturn:
    """Run the engine on socket ``fd`` until no work is left; never returns."""
    status = 70
    try:
        _settle(fd)
        Engine(socket.socket(fileno=fd)).run()
        status = 0
    except BaseException:  # noqa: BLE001 - shown to the trainer in EngineDied
        import traceback

        traceback.print_exc()
    finally:
        # Threads may be in a system call that never returns: don't wait for them.
        sys.stderr.flush()
        os._exit(status)


def _settle(fd: int) -> None:
    """Detach this process from the job that started it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # it leads a session already, or may not: then it shares its trainer's
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
    """Set at least this nice level for the calling thread and threads it starts from now on."""
    with contextlib.suppress(OSError):  # it also works at another level
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def _map_image(fd: int, nbytes: int) -> memoryview | str:
    """Map the image behind ``fd``; return it, or the reason why it failed."""
    try:
        size = os.fstat(fd).st_size
        if size < nbytes:
            return f"the image holds {size} bytes, not {nbytes}"
        return memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        return f"the image of {nbytes} bytes can't be mapped: {error}"


def _pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when ``pid`` has ended; -1 if the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
