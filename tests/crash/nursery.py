"""Starts Python programs in a tenth of a second: forked from a process that has imported torch already.

    with Nursery("saving_job") as nursery:
        child = nursery.start("saving_job", "main", {"root": "/tmp/x"}, log=tmp_path / "rank-0", env={"RANK": "0"})
        assert child.wait(30) == 0

A child is a session of its own and ends as a script does: the interpreter runs its exit handlers, an exception becomes
status 1, a signal kills it. What differs from a fresh process is only that modules were imported before it began. The
process it is forked from has one thread and has never used torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
START_S = 60.0
STACKS = signal.SIGRTMAX
"""Makes a program write the stacks of its threads to its standard error."""


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a test job: few threads, our source, and no launcher variables."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(SOURCE), str(HERE), os.environ.get("PYTHONPATH", "")]))
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": path}
    return {**kept, **quiet, **extra}


class Child:
    """One program. ``out`` and ``err`` are the files it writes to."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")

    @property
    def returncode(self) -> int | None:
        """As in `subprocess`: negative for a signal, None while it runs."""
        self._nursery.read(0)
        return self._nursery.ended.get(self.pid)

    def wait(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while self.pid not in self._nursery.ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.signal(STACKS)
                time.sleep(0.5)
            assert left_s > 0, f"process {self.pid} has not ended after {timeout_s:g} s:\n{self.stderr()}"
            self._nursery.read(left_s)
        return self._nursery.ended[self.pid]

    def signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    def stderr(self) -> str:
        return self.err.read_text(errors="replace")


class Nursery:
    """Forks children that have ``modules`` imported; a context manager, which kills those left."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            bufsize=0,
        )
        self._unread = b""
        self._started: list[int] = []
        self.ended: dict[int, int] = {}
        """Status by pid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.read(0)
        for pid in self._started:
            if pid not in self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def start(
        self,
        module: str,
        function: str,
        arguments: Mapping[str, Any],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Run ``module.function(**arguments)`` as a program of its own; returns when it has been forked."""
        assert self._process.stdin is not None
        log.parent.mkdir(parents=True, exist_ok=True)
        request = {"run": [module, function], "arguments": dict(arguments), "log": str(log), "env": dict(env or {})}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        count, deadline = len(self._started), time.monotonic() + START_S
        while len(self._started) == count:
            assert time.monotonic() < deadline, "no child was started"
            assert self._process.poll() is None, "the nursery has ended"
            self.read(1.0)
        return Child(self, self._started[-1], log)

    def read(self, timeout_s: float) -> None:
        """Read events of children; wait at most ``timeout_s`` for the next one."""
        out = self._process.stdout
        assert out is not None
        while not out.closed and select.select([out], [], [], timeout_s)[0]:
            piece = os.read(out.fileno(), 65536)
            if not piece:
                return
            *lines, self._unread = (self._unread + piece).split(b"\n")
            for line in lines:
                kind, pid, status = json.loads(line)
                if kind == "started":
                    self.ended.pop(pid, None)  # of an earlier process that had this number
                    self._started.append(pid)
                else:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
            timeout_s = 0


# in the nursery's process ----------------------------------------------------------------------------------------


def _tell(kind: str, pid: int, status: int) -> None:
    os.write(1, json.dumps([kind, pid, status]).encode() + b"\n")


def _become(request: dict[str, Any], inherited: list[int]) -> Callable[[], Any]:
    """In a child: detach it from the nursery; return the program."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd in inherited:
        os.close(fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for fd, path, mode in ((0, os.devnull, os.O_RDONLY), (1, ".out", flags), (2, ".err", flags)):
        opened = os.open(path if fd == 0 else request["log"] + path, mode, 0o666)
        os.dup2(opened, fd)
        os.close(opened)
    faulthandler.register(STACKS)
    os.environ.update(request["env"])
    module, function = request["run"]
    program = getattr(importlib.import_module(module), function)
    return lambda: program(**request["arguments"])


def _serve(modules: list[str]) -> Callable[[], Any] | None:
    """Fork on request until there are no more; the program to run in each child, None in the nursery itself."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # or every child would take a second to look at all of torch when it ends
    wake_out, wake_in = os.pipe()
    for fd in (wake_out, wake_in):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_in)
    unread, running = b"", True
    while running:
        ready = select.select([0, wake_out], [], [])[0]
        if wake_out in ready:
            os.read(wake_out, 4096)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    _tell("ended", *found)
        if 0 in ready:
            piece = os.read(0, 65536)
            running = bool(piece)
            *lines, unread = (unread + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return _become(json.loads(line), [wake_out, wake_in])
                _tell("started", pid, 0)
    return None


if __name__ == "__main__":
    run = _serve(sys.argv[1:])
    if run is not None:
        run()
