"""A job of one or more ranks whose system calls are watched, failed or made its last; runs in the nursery.

`launch` forks the ranks, each a program that tells its `Reins` what it would log, and serves their trapped calls until
the last of their processes, engines included, is gone. Calls are told apart by what they are, not by when they
come: role, name, file, and a number among the equal ones since the window was opened. So a point that was seen in one
run is found again in another, in whatever order threads take turns.

What happens at a point is an `Act`. What was seen is left in a file, for the test: see `Outcome`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import syscalls
from syscalls import CHANGING, CONTROL, TALKING, Call

_STEP = re.compile(r"(step|hf)-\d+")
SETTLE_S = 20.0
"""How long engines may outlive the last of their trainers here."""


@dataclass(frozen=True)
class Point:
    """One system call of a job. ``role``: ``trainer-0``, ``engine-0`` ...; ``number``: of the equal ones, from 1."""

    role: str
    call: str
    target: str
    number: int

    def __str__(self) -> str:
        return f"{self.role} {self.call}({self.target})#{self.number}"


@dataclass(frozen=True)
class Act:
    """What becomes of the call at ``point``.

    kind: ``kill`` the process that makes it, ``kill all`` processes of the job; ``error``: it fails with ``errno``;
    ``errors``: it does, and every later one in the window that changes a file below the root; ``short``: half of it is
    done. In the window of that name.
    """

    point: Point
    kind: str
    errno: int = 0
    window: str = ""


@dataclass
class Outcome:
    """What came of a job. ``events``: what its ranks told, in order; ``seen``: the points of each window, in order."""

    events: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, list[Point]] = field(default_factory=dict)
    hit: list[str] = field(default_factory=list)
    """Windows whose act took place."""
    status: list[int] = field(default_factory=list)
    """Of the ranks, negative for a signal."""
    orphaned_s: float = 0.0
    """How long engines were there after the last of their trainers."""

    @classmethod
    def read(cls, path: str) -> Outcome:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        raw["seen"] = {name: [Point(**point) for point in points] for name, points in raw["seen"].items()}
        return cls(**raw)

    def told(self, *kinds: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds and rank in (None, event["rank"])]


class Reins:
    """A program's connection to its supervisor. Every call returns when the supervisor has handled it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()

    def note(self, event: str, **fields: Any) -> None:
        """Tell what happened: it counts even if the next call is this program's last."""
        line = json.dumps({"event": event, "rank": self._rank, "at_s": time.monotonic(), **fields}).encode() + b"\n"
        with self._lock:
            os.write(CONTROL, line)
            answered = os.read(CONTROL, 1)
            assert answered == b".", "the supervisor is gone"

    @contextlib.contextmanager
    def window(self, name: str) -> Any:
        """Count calls within the block."""
        self.note("open", window=name)
        try:
            yield
        finally:
            self.note("shut", window=name)


class _Supervisor:
    def __init__(self, root: str, acts: list[Act], counted: frozenset[str] | None, *, alike: bool) -> None:
        self.root, self.counted, self.alike = root, counted, alike
        self.acts = {act.window: act for act in acts}
        self.outcome = Outcome()
        self.pids: list[int] = []
        self.listeners: dict[int, int] = {}
        self.controls: dict[int, tuple[int, bytes]] = {}
        self.engines: dict[int, int] = {}
        self.starting: set[int] = set()
        """Processes that were forked to become engines."""
        self.ended: dict[int, int] = {}
        self.window = ""
        self.opened: set[int] = set()
        self.numbers: Counter[tuple[str, str, str]] = Counter()
        self.failing = 0
        self.last_trainer_s = 0.0

    # the job -----------------------------------------------------------------------------------------------------

    def add(self, rank: int, pid: int, control: socket.socket) -> None:
        self.pids.append(pid)
        fd = control.detach()
        self.controls[fd] = (rank, b"")
        assert os.read(fd, 1) == b"!", f"rank {rank} has not begun"
        self.listeners[syscalls.listener_of(pid, 10.0)] = rank
        os.write(fd, b".")

    def serve(self) -> None:
        """Serve calls until every process is gone."""
        deadline = None
        while self.listeners or self.controls:
            poll = select.poll()
            for fd in (*self.listeners, *self.controls):
                poll.register(fd, select.POLLIN)
            for fd, events in poll.poll(50):
                if fd in self.controls:
                    self._hear(fd)
                elif events & select.POLLIN:
                    self._stopped(fd)
                elif events & select.POLLHUP:  # the last process under this filter has ended
                    self.listeners.pop(fd)
                    os.close(fd)
            self._reap()
            if len(self.ended) == len(self.pids):
                self.last_trainer_s = self.last_trainer_s or time.monotonic()
                deadline = deadline or time.monotonic() + SETTLE_S
                self.outcome.orphaned_s = time.monotonic() - self.last_trainer_s
                if time.monotonic() > deadline:
                    self.kill_all()
                    break
        while len(self.ended) < len(self.pids):
            self._reap()
            time.sleep(0.001)
        self.outcome.status = [self.ended[pid] for pid in self.pids]

    def _reap(self) -> None:
        for pid in self.pids:
            if pid not in self.ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)

    def _hear(self, fd: int) -> None:
        rank, unread = self.controls[fd]
        piece = b""
        with contextlib.suppress(ConnectionResetError):
            piece = os.read(fd, 65536)
        if not piece:
            del self.controls[fd]
            os.close(fd)
            return
        *lines, unread = (unread + piece).split(b"\n")
        self.controls[fd] = (rank, unread)
        for line in lines:
            event = json.loads(line)
            if event["event"] == "open":
                self._open(event["window"], rank)
            elif event["event"] == "shut":
                self._shut(rank)
            else:
                self.outcome.events.append(event)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                os.write(fd, b".")

    def _open(self, name: str, rank: int) -> None:
        """A window is open from the first rank that says so to the last that says it is shut."""
        if self.window != name:
            self.window, self.failing = name, 0
            self.opened.clear()
            self.numbers.clear()
            self.outcome.seen[name] = []
        self.opened.add(rank)

    def _shut(self, rank: int) -> None:
        self.opened.discard(rank)
        if not self.opened:
            self.window, self.failing = "", 0

    def kill_all(self) -> None:
        for pid in [*self.pids, *self.engines, *self.starting]:
            if pid not in self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # a call ------------------------------------------------------------------------------------------------------

    def _stopped(self, listener: int) -> None:
        call = syscalls.receive(listener)
        if call is None:
            return
        point = self._point(call, listener) if self.window else None
        if point is None:
            syscalls.answer(listener, call)
            return
        self.outcome.seen[self.window].append(point)
        act = self.acts.get(self.window)
        if self.failing and call.changes and self._below_root(call):
            syscalls.answer(listener, call, error=self.failing)
        elif act is not None and act.point == point:
            self.outcome.hit.append(self.window)
            self._act(listener, call, act)
        else:
            syscalls.answer(listener, call)

    def _point(self, call: Call, listener: int) -> Point | None:
        if self.counted is None:
            target = ""
        elif call.name not in self.counted:
            return None
        else:
            target = syscalls.target_of(call, self.root)
            if call.name == "openat" and target.startswith("/"):
                return None  # an import
            if self.alike:
                target = _STEP.sub(r"\1-N", target)
        role = self._role(call.tid, self.listeners[listener])
        self.numbers[role, call.name, target] += 1
        return Point(role, call.name, target, self.numbers[role, call.name, target])

    def _role(self, tid: int, rank: int) -> str:
        pid = syscalls.process_of(tid)
        if pid in self.pids:
            return f"trainer-{rank}"
        if pid not in self.engines:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"holdfast.engine" not in file.read():
                    self.starting.add(pid)  # forked, and not an engine yet
                    return f"starting-{rank}"
            self.engines[pid] = rank
        return f"engine-{rank}"

    def _below_root(self, call: Call) -> bool:
        target = syscalls.target_of(call, "\0")
        return self.root in target

    def _act(self, listener: int, call: Call, act: Act) -> None:
        if act.kind == "kill all":
            self.kill_all()
        elif act.kind == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(syscalls.process_of(call.tid), signal.SIGKILL)
        elif act.kind == "short":
            syscalls.answer(listener, call, value=syscalls.write_part(call) or None)
        else:
            if act.kind == "errors":
                self.failing = act.errno
            syscalls.answer(listener, call, error=act.errno)


def launch(
    program: list[str],
    arguments: dict[str, Any],
    outcome: str,
    root: str,
    acts: list[dict[str, Any]],
    world: int = 1,
    everything: bool = False,
    only: str | None = None,
    opens: bool = False,
    alike: bool = False,
) -> None:
    """Run ``program`` (module, function) as ``world`` ranks and see to ``acts``; leaves an `Outcome` in ``outcome``.

    Points are the calls that change files and those that talk; with ``opens``, also those that open a file below the
    root; with ``only``, those of that name; with ``everything``, all there are, without what they act on. ``alike``: a
    point of one save is that of any other, whatever its step.
    """
    names = None if everything else frozenset([only]) if only else CHANGING | TALKING
    supervisor = _Supervisor(
        root,
        [Act(**{**act, "point": Point(**act["point"])}) for act in acts],
        None if everything or only else names,
        alike=alike,
    )
    for rank in range(world):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for fd in supervisor.controls:
                os.close(fd)
            for fd in supervisor.listeners:
                os.close(fd)
            os.dup2(theirs.fileno(), CONTROL, inheritable=False)
            theirs.close()
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            os.write(CONTROL, b"!")
            listener = syscalls.trap(names, opens=opens or only is not None)
            os.read(CONTROL, 1)  # the supervisor has its own
            os.close(listener)
            getattr(importlib.import_module(program[0]), program[1])(**arguments)
            return
        theirs.close()
        supervisor.add(rank, pid, ours)
    supervisor.serve()
    with open(outcome, "w", encoding="utf-8") as file:
        json.dump(asdict(supervisor.outcome), file)
    os._exit(0)
