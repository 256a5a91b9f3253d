"""Holds every chosen system call of a tree of processes until somebody has said what is to become of it.

A process calls `trap` on itself; it and all that it starts afterwards then stop at each of these calls, which a
supervisor finds with `receive`, before anything has happened: it may let the call happen, answer it with an error, do a
part of it, or kill. This is seccomp's user notification (Linux 5.5): unlike a tracer's counts, which are each thread's
own, one queue orders the calls of all threads and processes, and calls that are not asked for cost nothing.

    fd = trap(numbers)                 in the process, once; ``fd`` goes to the supervisor
    call = receive(fd)                 the next call that stands still, with what it is about to do and to which file
    answer(fd, call)                   let it happen; ``error=`` fails it, ``value=`` says that it has happened so

Calls on the descriptor `CONTROL` go through: by these a program talks with its supervisor.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import struct
import time
from dataclasses import dataclass

CONTROL = 1000
"""The descriptor that programs talk to their supervisor on."""

NUMBERS = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "sched_yield": 24, "mremap": 25,
    "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "getpid": 39, "sendfile": 40, "socket": 41, "connect": 42,
    "accept": 43, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "bind": 49,
    "getsockname": 51, "getpeername": 52, "socketpair": 53, "setsockopt": 54, "getsockopt": 55, "clone": 56, "fork": 57,
    "vfork": 58, "execve": 59, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72, "flock": 73, "fsync": 74,
    "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84,
    "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92,
    "umask": 95, "sysinfo": 99, "getuid": 102, "getppid": 110, "setsid": 112, "sigaltstack": 131, "mknod": 133,
    "statfs": 137, "getpriority": 140, "setpriority": 141, "prctl": 157, "arch_prctl": 158, "gettid": 186, "futex": 202,
    "sched_setaffinity": 203, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218, "fadvise64": 221,
    "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234, "waitid": 247,
    "ioprio_set": 251, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "linkat": 265, "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "sync_file_range": 277, "utimensat": 280, "epoll_pwait": 281, "fallocate": 285,
    "accept4": 288, "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296,
    "recvmmsg": 299, "prlimit64": 302, "syncfs": 306, "sendmmsg": 307, "getcpu": 309, "renameat2": 316, "seccomp": 317,
    "getrandom": 318, "memfd_create": 319, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332,
    "rseq": 334, "io_uring_setup": 425, "io_uring_enter": 426, "pidfd_open": 434, "clone3": 435, "close_range": 436,
    "openat2": 437, "pidfd_getfd": 438, "faccessat2": 439, "futex_waitv": 449,
}  # fmt: skip
ARCHITECTURE, _SECCOMP = 0xC000003E, 317
AVAILABLE = platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
"""The numbers above are those of x86-64."""
NAMES = {number: name for name, number in NUMBERS.items()}

# What can change a file, what makes it durable, and what the protocol is spoken by.
CHANGING = frozenset({
    "write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync", "fdatasync", "sync_file_range", "syncfs",
    "truncate", "ftruncate", "fallocate", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat",
    "unlink", "unlinkat", "rmdir", "symlink", "symlinkat", "creat", "openat", "open", "openat2", "mknod", "chmod",
    "fchmod", "chown", "utimensat", "copy_file_range", "sendfile", "io_uring_setup", "io_uring_enter", "flock",
})  # fmt: skip
TALKING = frozenset(["sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg"])
_OF_A_DESCRIPTOR = frozenset({
    "read", "write", "pwrite64", "pread64", "writev", "readv", "pwritev", "pwritev2", "fsync", "fdatasync",
    "sync_file_range", "syncfs", "ftruncate", "fallocate", "flock", "fcntl", "close", "fstat", "lseek", "fadvise64",
    "fchmod", "sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg", "getdents64", "ioctl",
})  # fmt: skip
# Where a call has its paths: pairs of (argument with the directory's descriptor or None, argument with the path).
_PATHS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "open": ((None, 0),), "creat": ((None, 0),), "openat": ((0, 1),), "openat2": ((0, 1),), "mkdir": ((None, 0),),
    "mkdirat": ((0, 1),), "rename": ((None, 0), (None, 1)), "renameat": ((0, 1), (2, 3)), "renameat2": ((0, 1), (2, 3)),
    "unlink": ((None, 0),), "unlinkat": ((0, 1),), "rmdir": ((None, 0),), "truncate": ((None, 0),),
    "link": ((None, 0), (None, 1)), "linkat": ((0, 1), (2, 3)), "symlink": ((None, 1),), "symlinkat": ((1, 2),),
}  # fmt: skip
_AT_CWD = 0xFFFFFF9C
_ATTEMPT = re.compile(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])")

_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _JUMP_EQUAL, _JUMP_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION_BYTES = 80
_CONTINUE = 1


@dataclass(frozen=True)
class Call:
    """A blocked system call: nothing of it has happened yet."""

    id: int
    tid: int
    name: str
    arguments: tuple[int, ...]

    @property
    def creates(self) -> bool:
        """True for an open that may create a file."""
        at = {"open": 1, "openat": 2}.get(self.name)
        return self.name in ("creat", "openat2") or (at is not None and bool(self.arguments[at] & os.O_CREAT))

    @property
    def changes(self) -> bool:
        return self.name in CHANGING and (self.creates or not self.name.startswith("open"))


def trap(names: frozenset[str] | None, *, opens: bool = False) -> int:
    """Have these calls of this process and all its descendants stop, or all there are; returns the listener.

    Of calls that open a file only those that may make one, without ``opens``: the rest is mostly imports. The calls of
    threads that run already are not trapped. Raises `OSError` where the system can't.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not AVAILABLE or libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS: root needs it no more than others
        raise OSError(ctypes.get_errno(), "this system has no filters of system calls")
    code = _program(names, opens=opens)
    block = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(block)))
    fd = int(libc.syscall(_SECCOMP, 1, 8, program))  # SET_MODE_FILTER, NEW_LISTENER
    if fd < 0:
        raise OSError(ctypes.get_errno(), "can't trap system calls")
    return fd


def _program(names: frozenset[str] | None, *, opens: bool) -> bytes:
    rows = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, ARCHITECTURE), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    chosen = sorted(NUMBERS) if names is None else sorted(names & NUMBERS.keys())
    for name in chosen:
        number = NUMBERS[name]
        if name in _OF_A_DESCRIPTOR:
            rows += [(_JUMP_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16), (_JUMP_EQUAL, 0, 1, CONTROL)]
            rows += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
        elif name == "openat" and names is not None and not opens:
            rows += [(_JUMP_EQUAL, 0, 4, number), (_LOAD, 0, 0, 32), (_JUMP_ANY, 1, 0, os.O_CREAT)]
            rows += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
        else:
            rows += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
    rows.append((_RETURN, 0, 0, _ALLOW if names is not None else _NOTIFY))
    return b"".join(struct.pack("<HBBI", *row) for row in rows)


def listener_of(pid: int, timeout_s: float) -> int:
    """The listener of a process that is about to call `trap`, as a descriptor of our own.

    It can't be sent: a process that has just trapped all its calls may stand still at any of them.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if _read_link(f"/proc/{pid}/fd/{name}") == "anon_inode:seccomp notify":
                return borrow(pid, int(name))
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} traps no system calls")
        time.sleep(0.0005)


def receive(fd: int) -> Call | None:
    """The next call that stands still, waiting for one; None if its process was killed meanwhile."""
    data = bytearray(_NOTIFICATION_BYTES)
    try:
        fcntl.ioctl(fd, _RECEIVE, data)
    except OSError:
        return None
    number, tid, _, code, _, _ = struct.unpack_from("<QIIiIQ", data)
    return Call(number, tid, NAMES.get(code, str(code)), struct.unpack_from("<6Q", data, 32))


def answer(fd: int, call: Call, *, error: int = 0, value: int | None = None) -> None:
    """Let ``call`` happen; or have it return ``value``, or fail with ``error``, without happening."""
    go_on = _CONTINUE if not error and value is None else 0
    try:
        fcntl.ioctl(fd, _SEND, struct.pack("<QqiI", call.id, value or 0, -error, go_on))
    except OSError:
        return  # its process was killed


def write_part(call: Call) -> int:
    """Do the first half of a ``write`` or ``pwrite64`` in its process's place; returns how much that was.

    With O_DIRECT a half is a whole number of blocks, as a file system would cut it. 0: too short for a half.
    """
    target, address, nbytes = call.arguments[:3]
    half = nbytes // 2 if nbytes < 8192 else nbytes // 2 // 4096 * 4096
    if half == 0:
        return 0
    data = _peek(call.tid, address, half)
    if call.name == "write":  # its own open file: the position moves as it would have
        fd = borrow(call.tid, target)
        try:
            return os.write(fd, data)
        finally:
            os.close(fd)
    fd = os.open(f"/proc/{call.tid}/fd/{target}", os.O_WRONLY)  # without O_DIRECT, which wants memory of its own kind
    try:
        return os.pwrite(fd, data, call.arguments[3])
    finally:
        os.close(fd)


def borrow(tid: int, target: int) -> int:
    """Duplicate another process's descriptor into this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(process_of(tid))
    try:
        fd = int(libc.syscall(438, pidfd, target, 0))
    finally:
        os.close(pidfd)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd


def process_of(tid: int) -> int:
    """Return the process of thread ``tid``; ``tid`` itself if it is gone."""
    try:
        with open(f"/proc/{tid}/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Tgid:")), tid)
    except OSError:
        return tid


def target_of(call: Call, root: str) -> str:
    """What ``call`` is about to act on, for people and for finding it again: paths below ``root``, ids left out."""
    if call.name in _PATHS:
        found = [_path(call, *place) for place in _PATHS[call.name]]
    elif call.name in _OF_A_DESCRIPTOR:
        found = [_link(call.tid, call.arguments[0])]
    else:
        return ""
    return " -> ".join(_plain(path, root) for path in found)


def _plain(path: str, root: str) -> str:
    if path.startswith(root):
        path = path.removeprefix(root).lstrip("/") or "."
    elif path.startswith(("socket:", "pipe:", "/memfd:", "anon_inode:")):
        path = path.split(":")[0].lstrip("/")
    return _ATTEMPT.sub("ATTEMPT", path)


def _path(call: Call, directory: int | None, at: int) -> str:
    name = _peek_string(call.tid, call.arguments[at])
    if name.startswith("/"):
        return name
    if directory is None or call.arguments[directory] & 0xFFFFFFFF == _AT_CWD:
        base = _read_link(f"/proc/{call.tid}/cwd")
    else:
        base = _link(call.tid, call.arguments[directory])
    return f"{base}/{name}"


def _link(tid: int, fd: int) -> str:
    return _read_link(f"/proc/{tid}/fd/{fd & 0xFFFFFFFF}")


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "?"


def _peek(tid: int, address: int, nbytes: int) -> bytes:
    fd = os.open(f"/proc/{tid}/mem", os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, address)
    finally:
        os.close(fd)


def _peek_string(tid: int, address: int) -> str:
    data = b""
    try:
        while b"\0" not in data and len(data) < 4096:
            data += _peek(tid, address + len(data), 4096 - (address + len(data)) % 4096)
    except OSError:
        return "?"
    return data.split(b"\0", 1)[0].decode(errors="replace")
