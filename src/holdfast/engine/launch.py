"""Starts an engine process and learns how it ended. Torch-free; runs in the trainer.

The process is started isolated (``-I -S``) with exactly the paths it needs: a ``socket.py`` in the working directory, a
``.pth`` file or a broken ``PYTHON*`` variable can't get into it, and start-up stays short.

Guarantees: no descriptor of the trainer but the socket and the standard streams reaches the engine; what it writes to
standard error is kept (in memory) for `EngineDied`; a `Process` that was reaped holds nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Final

from holdfast.errors import EngineDied

if TYPE_CHECKING:
    from collections.abc import Callable

STDERR_TAIL_BYTES: Final = 4096
REAP_S: Final = 5.0
"""How long a killed process may take to be gone: longer only inside an uninterruptible system call."""
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
        """SIGKILL, without waiting."""
        with contextlib.suppress(OSError):
            self._child.kill()

    def abandon(self) -> None:
        """In a forked child: close this process's copy of the socket, and nothing else."""
        fd = self.sock.detach()
        if fd >= 0:
            os.close(fd)

    def reap(self, reason: Callable[[], str], *, linger_s: float) -> EngineDied:
        """Wait for the end, killing it after ``linger_s``, and let go of everything; returns what to tell waiters.

        ``reason`` is asked at the end. Takes at most ``linger_s + REAP_S``. Once, by one thread.
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
    """Start an engine; returns when it is started, not when it is ready. Raises `EngineDied` where it can't be."""
    if not sys.executable:
        raise EngineDied(f"rank {rank} can't start its engine: sys.executable is not known", rank=rank)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stderr_fd = -1
    try:
        ours.settimeout(0)
        stderr_fd = _scratch_fd()
        child = subprocess.Popen(
            [sys.executable, *_flags(), "-c", _BOOT, str(theirs.fileno()), *_paths()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr_fd,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        ours.close()
        if stderr_fd >= 0:
            os.close(stderr_fd)
        raise EngineDied(f"rank {rank} can't start its engine ({sys.executable}): {error}", rank=rank) from error
    finally:
        theirs.close()
    return Process(rank, child, ours, stderr_fd)


def _flags() -> list[str]:
    return ["-I", "-S", "-X", "faulthandler", *(["-B"] if sys.dont_write_bytecode else [])]


def _paths() -> list[str]:
    """Where the engine finds the three packages it needs: where this process has found them."""
    import msgspec
    import xxhash

    import holdfast

    parents = [
        os.path.dirname(os.path.dirname(os.path.abspath(module.__file__ or "")))
        for module in (holdfast, msgspec, xxhash)
    ]
    return list(dict.fromkeys(parents))


def _scratch_fd() -> int:
    """An unnamed file for the engine's standard error: unlike a pipe it needs no reader and is never full."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("holdfast-engine-stderr", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _describe(status: int | None) -> str:
    if status is None:
        return "killed, but stuck in the system and still there"
    if status >= 0:
        return f"exit status {status}"
    import signal

    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
