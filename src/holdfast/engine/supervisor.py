"""One engine process, and the thread that listens to it. Torch-free; runs in the trainer.

    launched -> ready -> dead          a dead link stays dead; the client makes a new one

Guarantees: the thread ends with the process, after it has reaped it and closed its descriptors; `death` is set once,
after that, so then the process does nothing any more, unless its ``exitcode`` is None: killed, but in a system call
that doesn't end. An engine that is silent for too long, sends garbage, or has another version is killed. Messages are
passed on in order: `Owner.heard` returns before the next.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from holdfast._version import __version__
from holdfast.engine import messages
from holdfast.engine.wire import FrameError, Inbox, ToTrainer, send
from holdfast.errors import EngineDied

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# Starts an engine process and learns how it ended. Torch-free; runs in the trainer.
#
# The process is started isolated (``-I -S``) with exactly the paths it needs: a ``socket.py`` in the working directory,
# a ``.pth`` file or a broken ``PYTHON*`` variable has no effect, and start-up stays short.
#
# Guarantees: the engine inherits no descriptor of the trainer except the socket and the standard streams; its standard
# error is kept (in memory) for `EngineDied`; a reaped `Process` holds no resources.

_log = logging.getLogger("holdfast.engine")
_NO_SESSION: Final = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
STDERR_TAIL_BYTES: Final = 4096
REAP_S: Final = 5.0
"""How long a killed process may take to end: longer only inside an uninterruptible system call."""
_BOOT: Final = (
    "import signal\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "import sys\n"
    "sys.path += sys.argv[2:]\n"
    "from holdfast.engine.process import main\n"
    "main(int(sys.argv[1]))\n"
)


class Process:
    """One engine process with the trainer's end of its socket (non-blocking)."""

    def __init__(self, rank: int, child: subprocess.Popen[bytes], sock: socket.socket, stderr_fd: int) -> None:
        self._rank = rank
        self._child = child
        self._stderr_fd = stderr_fd
        self.sock = sock
        self.pid = child.pid

    def running(self) -> bool:
        return self._child.poll() is None

    def kill(self) -> None:
        """Send SIGKILL; doesn't wait."""
        with contextlib.suppress(OSError):
            self._child.kill()

    def abandon(self) -> None:
        """In a forked child: close this process's copies of the descriptors, and do nothing else."""
        fd = self.sock.detach()
        if fd >= 0:  # otherwise reaped; its socket is closed before the other descriptor
            os.close(fd)
            os.close(self._stderr_fd)

    def reap(self, reason: Callable[[], str], *, linger_s: float) -> EngineDied:
        """Wait for the end, killing the process after ``linger_s``, and release everything; return the error to report.

        ``reason`` is called at the end. Takes at most ``linger_s + REAP_S``. Call it once, from one thread.
        """
        deadline = time.monotonic() + linger_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.running():
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(REAP_S)
        status = self._child.poll()
        tail = self._stderr_tail()
        self.sock.close()
        os.close(self._stderr_fd)
        message = f"the engine of rank {self._rank} (pid {self.pid}) {reason()}: {_describe(status)}"
        if tail:
            message += f"; its last words: {tail}"
        return EngineDied(message + "; the next save starts a new one", rank=self._rank, exitcode=status)

    def _stderr_tail(self) -> str:
        try:
            size = os.fstat(self._stderr_fd).st_size
            tail = os.pread(self._stderr_fd, STDERR_TAIL_BYTES, max(0, size - STDERR_TAIL_BYTES))
        except OSError:
            return ""
        return tail.decode("utf-8", "replace").strip()


def launch(rank: int) -> Process:
    """Start an engine process; doesn't wait until it is ready. Raises `EngineDied` if it can't be started."""
    if not sys.executable:
        raise EngineDied(f"rank {rank} can't start its engine: sys.executable is not set", rank=rank)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        message = f"rank {rank} can't start its engine: socketpair was refused ({error})"
        raise EngineDied(message + "; allow it in the sandbox, or raise `ulimit -n`", rank=rank) from error
    stderr_fd = -1
    try:
        ours.settimeout(0)
        stderr_fd = _scratch_fd()
        child = _started(
            [sys.executable, *_flags(), "-c", _BOOT, str(theirs.fileno()), *_paths()], theirs.fileno(), stderr_fd
        )
    except (OSError, subprocess.SubprocessError) as error:
        ours.close()
        if stderr_fd >= 0:
            os.close(stderr_fd)
        raise EngineDied(f"rank {rank} can't start its engine ({sys.executable}): {error}", rank=rank) from error
    finally:
        theirs.close()
    return Process(rank, child, ours, stderr_fd)


def _started(command: list[str], sock_fd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
    def start(*, in_own_session: bool) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr_fd,
            pass_fds=(sock_fd,),
            start_new_session=in_own_session,
        )

    try:
        return start(in_own_session=True)
    except OSError as error:
        if error.errno not in _NO_SESSION:
            raise
        child = start(in_own_session=False)  # raises if another cause refused it
        _log.warning(
            "setsid was refused (%s): the engine shares its trainer's session, and signals to that end both",
            error.strerror,
        )
        return child


def _flags() -> list[str]:
    return ["-I", "-S", "-X", "faulthandler", *(["-B"] if sys.dont_write_bytecode else [])]


def _paths() -> list[str]:
    """Return the import paths of the three packages that the engine needs, as found by this process."""
    import msgspec
    import xxhash

    import holdfast

    parents = [
        os.path.dirname(os.path.dirname(os.path.abspath(module.__file__ or "")))
        for module in (holdfast, msgspec, xxhash)
    ]
    return list(dict.fromkeys(parents))


def _scratch_fd() -> int:
    """Return an unnamed file for the engine's standard error: unlike a pipe it needs no reader and is never full."""
    with contextlib.suppress(AttributeError, OSError):  # missing, or refused by a sandbox
        return os.memfd_create("holdfast-engine-stderr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _describe(status: int | None) -> str:
    if status is None:
        return "killed, but still stuck in a system call"
    if status >= 0:
        return f"exit status {status}"
    import signal

    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


START_S: Final = 30.0
"""How long an engine may take to start, on a node that is busy importing."""
LINGER_S: Final = 2.0
"""How long a process may take to end by itself once its socket is closed."""
_POLL_S: Final = 0.5


class Owner(Protocol):
    """Gets what a link receives; called on the link's thread."""

    def heard(self, link: EngineConnection, message: ToTrainer) -> None: ...

    def expects_beats(self, link: EngineConnection) -> bool:
        """Return True if an attempt is in progress on ``link``: only then silence is an error."""
        ...

    def died(self, link: EngineConnection) -> None:
        """Handle the end of ``link``, whose `death` is set."""
        ...


class EngineConnection:
    """See the module. Made with a process that was just launched; `listen` starts its thread."""

    def __init__(self, process: Process, owner: Owner, *, silence_s_max: float) -> None:
        self._process = process
        self._owner = owner
        self._silence_s_max = silence_s_max
        self._last_heard = time.monotonic()
        self._ending: str | None = None
        self._left = False
        self._lives = threading.Lock()
        """Taken by who is to reap the process, for good."""
        self._thread = threading.Thread(target=self._live, name=f"holdfast-engine-{process.pid}", daemon=True)
        self.pid = process.pid
        self.ready = False
        self.death: EngineDied | None = None

    @property
    def usable(self) -> bool:
        """True if neither dead nor being ended."""
        return self.death is None and self._ending is None

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the process."""
        return time.monotonic() - self._last_heard

    def listen(self) -> None:
        """Start the thread. Raises `RuntimeError` if no thread can be started; the process is then gone.

        So it is after a `KeyboardInterrupt`, unless the thread has begun, which then ends with the process as ever.
        """
        try:
            self._thread.start()
        except BaseException:
            if self._lives.acquire(blocking=False):  # a thread that begins later finds that it is not to
                self.death = self._process.reap(lambda: "could not be listened to", linger_s=0)
            raise

    def expect(self) -> None:
        """Count silence from now on: an attempt was sent."""
        self._last_heard = time.monotonic()

    def send(self, message: messages.EngineMessage, fds: Sequence[int] = ()) -> bool:
        """Send a message; if that fails, end the process and return False. One sender at a time.

        Takes at most the time that an engine may be silent. Raises `FrameError` for a message that is too large.
        """
        try:
            send(self._process.sock, message, fds, timeout_s=self._silence_s_max if self.ready else START_S)
        except FrameError:
            raise
        except TimeoutError:
            self.end("stopped reading")
            return False
        except (OSError, ValueError):  # ValueError: the thread has closed the socket meanwhile
            self.end("closed its socket")
            return False
        return True

    def end(self, reason: str) -> None:
        """Kill the process, without waiting: its thread reaps it and gives everyone ``reason``."""
        self._ending = self._ending or reason
        self._process.kill()

    def leave(self) -> None:
        """Stop listening, without waiting: the process finishes what it can, as if this one had died."""
        self._left = True
        with contextlib.suppress(OSError, ValueError):  # the thread has closed the socket meanwhile
            self._process.sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return True if it has ended."""
        with contextlib.suppress(RuntimeError):  # it was never started
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """In a forked child: give up the socket without locking (the lock's holder may not exist here)."""
        self._process.abandon()

    def _live(self) -> None:
        if not self._lives.acquire(blocking=False):
            return
        try:
            reason = self._listen_until_end()
        except Exception as error:  # noqa: BLE001 - a bug here must not leave waiters hanging
            reason = f"sent what can't be handled ({type(error).__name__}: {error})"
            self._process.kill()
        if self._left:
            return
        self.death = self._process.reap(lambda: self._ending or reason, linger_s=LINGER_S)
        self._owner.died(self)

    def _listen_until_end(self) -> str:
        inbox: Inbox[ToTrainer] = Inbox(self._process.sock, ToTrainer)
        poll = select.poll()
        poll.register(self._process.sock, select.POLLIN)
        while True:
            if not poll.poll(_POLL_S * 1000):
                # Check only when nothing is left to read: after a pause of the trainer itself, there are beats to read.
                reason = None if self._process.running() else "ended"
                reason = reason or self._too_silent()
                if reason is not None:
                    self._process.kill()
                    return reason
                continue
            try:
                received = inbox.receive()
            except FrameError as error:
                if not self._left:  # otherwise we cut it off
                    self._process.kill()
                return f"sent a bad frame ({error})"
            except OSError:
                return "ended"
            if received is None:
                return "ended"
            self._last_heard = time.monotonic()
            for item in received:
                if isinstance(item.message, messages.EngineReady):
                    if item.message.version != __version__:
                        self._process.kill()
                        return (
                            f"is version {item.message.version}, not {__version__}: the package was changed meanwhile"
                        )
                    self.ready = True
                self._owner.heard(self, item.message)

    def _too_silent(self) -> str | None:
        silence_s = self.silent_s
        if not self.ready:
            return f"did not start within {START_S:g} s" if silence_s > START_S else None
        if silence_s > self._silence_s_max and self._owner.expects_beats(self):
            return f"stopped answering for {silence_s:.1f} s with an attempt in progress"
        return None
