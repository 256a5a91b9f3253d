"""The worker process that runs the functions of requests, and the trainer's end of it.

    Worker     trainer   start it, submit calls, learn how they ended, end it
    serve      worker    receive calls, run them one after the other, tell how each ended

Started afresh (spawned), never forked: it may import torch, and has none of the trainer's threads and no device.

Guarantees: a function that raises, or a worker that ends, ends the call with its reason; a call's tensors have the
contents they had when it was submitted (``frozen_call``). The worker ends with its trainer, however that ends: a
function at work gets ``SystemExit`` and two seconds. Interrupts and the launcher's SIGTERM don't reach the functions.
Assumes: at most `IN_FLIGHT` calls are wanted at a time; `Worker.submit` waits for one of them to end otherwise.
Does not: know of ranks' agreement, or what functions do. A function that hangs is noticed by whoever waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import mmap
import multiprocessing
import multiprocessing.util  # registers an exit handler, that ours must come after
import os
import pickle
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from holdfast.coordination.failure import RankFailure
from holdfast.cores import from_cores, usable_cores
from holdfast.engine.at_exit import EXIT_GRACE_S
from holdfast.engine.process import set_io_class
from holdfast.errors import DeadlineExceeded, SaveFailed
from holdfast.integrations.nvrx.frozen_call import Blocks, freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cores import Cores
    from holdfast.staging.image import Image

_log = logging.getLogger("holdfast.nvrx")
IN_FLIGHT: Final = 2
"""Calls of one worker that have not ended: each holds a copy of its tensors."""
_IO_CLASSES: Final = {0: "none", 2: "best_effort", 3: "idle"}
_LOOK_S: Final = 0.5
_ORPHAN_S: Final = 2.0
_TRACE_CHARS: Final = 3000
_HEADER: Final = struct.Struct("<Q")


class Running(Protocol):
    """A function at work: in a worker, or nowhere."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def failure(self) -> RankFailure | None:
        """Why it failed; None if it has not ended, or well."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return False if it has not ended by then."""
        ...

    def cancel(self) -> None:
        """Give up what it made: it will not be finalized."""
        ...


class NothingToRun:
    """A request without a function."""

    has_ended = True
    failure: RankFailure | None = None

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - see `Running`
        return True

    def cancel(self) -> None:
        pass


class Call:
    """One call of a worker."""

    def __init__(self, name: str, block: Image | None) -> None:
        self.name = name
        self.block = block
        self.failure: RankFailure | None = None
        self._end = threading.Event()

    @property
    def has_ended(self) -> bool:
        return self._end.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._end.wait(timeout_s)

    def cancel(self) -> None:
        pass

    def end(self, failure: RankFailure | None) -> None:
        if not self._end.is_set():
            self.failure = failure
            self._end.set()


def function_name(function: Any) -> str:
    """Return a function's name for messages."""
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__qualname__", function))


class Worker:
    """One worker process; all methods are for the thread that owns it. Starts it; doesn't wait until it is ready.

    is_daemon: if True, its functions can't start processes of their own. cpu_priority: its nice level, 0 to 19.
    io_priority: 2 best effort, 3 idle; 0 or None: unchanged. sigterm_timeout: seconds that `abort` allows it to end.
    cores: those that it runs on, with all of its threads, and that its memory is near.
    """

    def __init__(
        self,
        rank: int,
        *,
        is_daemon: bool,
        cpu_priority: int | None,
        io_priority: int | None,
        sigterm_timeout: float,
        cores: Cores = "auto",
    ) -> None:
        self._rank = rank
        self._owner = os.getpid()
        self.patience_s = sigterm_timeout
        self._blocks = Blocks(cores)
        self._calls: dict[int, Call] = {}
        self._changed = threading.Condition()
        self._numbers = iter(range(1 << 62))
        self._known: dict[int, int] = {}
        """Numbers of the blocks that the worker has mapped, by the id of their descriptors."""
        self._death: RankFailure | None = None
        self._is_ready = False
        self._ending = ""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._sending = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=serve,
            args=(theirs, os.getpid(), rank, cpu_priority, io_priority),
            name=f"holdfast-nvrx-{rank}",
            daemon=is_daemon,
        )
        try:
            with from_cores(usable_cores(cores)):
                self.process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._listener = threading.Thread(target=self._listen, name="holdfast-nvrx", daemon=True)
        self._listener.start()
        _workers.append(self)

    @property
    def is_alive(self) -> bool:
        """False once it has ended, or was told to."""
        return self._death is None and not self._ending

    def submit(self, call: tuple[Any, ...], *, timeout_s: float) -> Call:
        """Have ``call`` (function, arguments, keywords, preload function) run after those before it.

        Returns when everything is copied: tensors and objects may change then. Raises `ConfigError` if it can't be
        pickled, `DeadlineExceeded` if two earlier calls have not ended after ``timeout_s``.
        """
        what = f"{function_name(call[0])!r}"
        self._wait_for_place(what, timeout_s)
        frozen = freeze(call, self._blocks, what)
        number, known = next(self._numbers), None
        running = Call(what, frozen.block)
        with self._changed:
            death = self._death
            if death is None:
                self._calls[number] = running
        if death is not None:
            running.end(self._lost(what))
            return running
        if frozen.block is not None:
            known = self._known.get(frozen.block.fd)
            if known is None:
                known = self._known[frozen.block.fd] = number
                self._send(("block", known, frozen.block.nbytes), frozen.block.fd)
        self._send(("call", number, frozen.data, frozen.layout, known))
        return running

    def finish(self, timeout_s: float) -> None:
        """Let the submitted calls end, for at most ``timeout_s``, then end the process; idempotent."""
        if os.getpid() != self._owner or self._ending:
            return
        self._ending = "it was told to end"
        self._send(("end",))
        self.process.join(max(0.0, timeout_s))
        self._reap(0.0)

    def abort(self) -> None:
        """End the process: a function at work gets ``SystemExit``, and after ``sigterm_timeout`` SIGKILL."""
        if os.getpid() != self._owner:
            return
        self._ending = self._ending or "it was aborted"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reap(self.patience_s)

    def release(self) -> None:
        """Finish without waiting: the process ends after the calls that it has; for an owner that forgot it."""
        if os.getpid() == self._owner and self.is_alive:
            self._send(("end",))

    def _reap(self, timeout_s: float) -> None:
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._listener.join(_LOOK_S * 4)
        self._blocks.clear()
        self._socket.close()

    def _wait_for_place(self, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._calls) >= IN_FLIGHT and self._death is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{IN_FLIGHT} earlier calls have not ended within {timeout_s:g} s, and {what} waits for one of "
                        "them: look at what they wait for, or allow more by AsyncCallsQueue(timeout=)",
                        waited_for="an earlier call of the worker process",
                        timeout_s=timeout_s,
                    )
                self._changed.wait(left_s)

    def _send(self, message: tuple[Any, ...], fd: int | None = None) -> None:
        """Send a message; a worker that is gone is noticed by the listener."""
        data = pickle.dumps(message, protocol=5)
        with self._sending, contextlib.suppress(OSError):
            if fd is None:
                self._socket.sendall(_HEADER.pack(len(data)))
            else:
                socket.send_fds(self._socket, [_HEADER.pack(len(data))], [fd])
            self._socket.sendall(data)

    def _listen(self) -> None:
        while True:
            if _is_readable(self._socket):
                try:
                    message, _ = _receive(self._socket)
                except (OSError, EOFError, pickle.UnpicklingError):
                    break
                self._note(message)
            elif not self.process.is_alive():
                break  # a child of its own may have kept the socket
        self.process.join(_LOOK_S * 4)
        with self._changed:
            self._death = self._lost("")
            calls, self._calls = list(self._calls.values()), {}
            for call in calls:
                call.end(self._lost(call.name))
            self._changed.notify_all()
        with contextlib.suppress(ValueError):
            _workers.remove(self)

    def _note(self, message: tuple[Any, ...]) -> None:
        self._is_ready = True
        if message[0] != "ended":
            return
        _, number, is_free, failure = message
        call = self._calls[number]
        if call.block is not None:
            # What tensors in the worker still refer to stays theirs.
            dropped = self._blocks.give_back(call.block) if is_free else [call.block]
            for block in dropped:
                self._send(("drop", self._known.pop(block.fd)))
                block.close()
            call.block = None
        with self._changed:
            del self._calls[number]
            self._changed.notify_all()
        call.end(failure)

    def _lost(self, what: str) -> RankFailure:
        code = self.process.exitcode
        how = self._ending or ("it has not ended yet" if code is None else f"it ended with exit code {code}")
        when = (
            ""
            if self._is_ready
            else (
                " before it was ready; what it printed says why (a script that starts processes needs "
                "`if __name__ == '__main__':`)"
            )
        )
        message = f"rank {self._rank}: the worker process (pid {self.process.pid}) is gone{when}: {how}"
        if what:
            message += f"; {what} did not end. The next request starts a new one"
        return RankFailure.of(SaveFailed(message, step=None, rank=self._rank), rank=self._rank)


_workers: list[Worker] = []
"""All that have a process."""


def _finish_all() -> None:
    """Let all functions end that are at work when the interpreter exits, for at most `EXIT_GRACE_S` altogether.

    Runs before multiprocessing's own handler, which would end the processes in the middle of a function.
    """
    deadline = time.monotonic() + EXIT_GRACE_S
    for worker in _workers:
        worker.finish(max(0.0, deadline - time.monotonic()))


atexit.register(_finish_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)


# In the worker process. -------------------------------------------------------------------------------------------


class _Shutdown:
    """Ends this process when the trainer says so, or is gone."""

    def __init__(self, trainer: int) -> None:
        self._trainer = trainer
        self._main = threading.get_ident()
        self._is_due = False
        # A terminal's and a launcher's signals are for the trainer: it may save at last.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self._is_due:
            raise SystemExit(128 + number)

    @property
    def is_orphan(self) -> bool:
        return os.getppid() != self._trainer

    def begin(self) -> None:
        """End the function at work; doesn't return."""
        self._is_due = True
        signal.pthread_kill(self._main, signal.SIGTERM)
        orphaned_at = None
        while True:
            time.sleep(0.1)
            if self.is_orphan:
                orphaned_at = orphaned_at or time.monotonic()
                if time.monotonic() - orphaned_at > _ORPHAN_S:
                    os._exit(1)


class _Mappings:
    """The trainer's blocks, as this process has them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, mmap.mmap] = {}

    def add(self, number: int, nbytes: int, fd: int) -> None:
        with self._lock:
            self._mapped[number] = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)

    def drop(self, number: int) -> None:
        with self._lock:
            self._mapped.pop(number).close()

    def lend(self, number: int) -> int:
        """Return the address of a block, which is in use from now on."""
        with self._lock:
            return int(np.frombuffer(self._mapped[number], dtype=np.uint8).ctypes.data)

    def keep_for_good(self, number: int) -> None:
        """Never unmap a block: tensors over it are alive, and may be for as long as this process."""
        with self._lock:
            _kept_for_good.append(self._mapped[number])
            self._mapped[number] = mmap.mmap(-1, mmap.PAGESIZE)


_kept_for_good: list[mmap.mmap] = []


def serve(sock: socket.socket, trainer: int, rank: int, cpu_priority: int | None, io_priority: int | None) -> None:
    """Run the calls that come over ``sock`` until told to end; the main function of the process."""
    shutdown = _Shutdown(trainer)
    _yield_to_training(cpu_priority, io_priority)
    calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    mappings = _Mappings()
    threading.Thread(target=_hear, args=(sock, calls, mappings, shutdown), daemon=True).start()
    _say(sock, ("ready",))
    while (message := calls.get()) is not None:
        _, number, data, layout, block = message
        failure, is_alive = _run(data, layout, 0 if block is None else mappings.lend(block), rank)
        if is_alive():
            gc.collect()
        if is_alive() and block is not None:
            mappings.keep_for_good(block)
        _say(sock, ("ended", number, not is_alive(), failure))
        del message, data


def _run(
    data: bytes, layout: tuple[tuple[int, int], ...], address: int, rank: int
) -> tuple[RankFailure | None, Callable[[], bool]]:
    is_alive: Callable[[], bool] = lambda: False  # noqa: E731 - replaced below
    name = "the request"
    try:
        (function, args, kwargs, preload), is_alive = thaw(data, layout, address)
        name = function_name(function)
        arguments = list(args)
        if preload is not None:
            arguments[1] = preload()
        function(*arguments, **(kwargs or {}))
    except Exception as error:  # noqa: BLE001 - raised in the trainer
        trace = traceback.format_exc()[-_TRACE_CHARS:]
        traceback.clear_frames(error.__traceback__)
        message = f"rank {rank}: {name} raised {type(error).__name__}: {error}\nin the worker process:\n{trace}"
        return RankFailure.of(SaveFailed(message, step=None, rank=rank), rank=rank), is_alive
    return None, is_alive


def _hear(
    sock: socket.socket, calls: queue.SimpleQueue[tuple[Any, ...] | None], mappings: _Mappings, shutdown: _Shutdown
) -> None:
    try:
        while True:
            is_readable = _is_readable(sock)
            if not is_readable and not shutdown.is_orphan:
                continue
            try:
                message, fds = _receive(sock) if is_readable else (None, [])
            except (OSError, EOFError):
                message, fds = None, []
            match message:
                case None:
                    shutdown.begin()
                case ("block", number, nbytes):
                    mappings.add(number, nbytes, fds[0])
                case ("drop", number):
                    mappings.drop(number)
                case ("end",):
                    calls.put(None)
                case _:
                    calls.put(message)
    except BaseException:  # noqa: BLE001 - nobody would hear of it: the trainer notices the end of the process
        traceback.print_exc(file=sys.stderr)
        os._exit(1)


def _is_readable(sock: socket.socket) -> bool:
    """Wait a moment for something to read, or the other's end."""
    poll = select.poll()  # `select` can't take descriptors from 1,024 on
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(_LOOK_S * 1000))


def _yield_to_training(cpu_priority: int | None, io_priority: int | None) -> None:
    with contextlib.suppress(OSError):
        os.nice(max(0, (cpu_priority or 0) - os.nice(0)))
    if io_priority:
        why = set_io_class(_IO_CLASSES.get(io_priority, "none"), None)
        if why is not None:
            _log.warning("the I/O priority of the worker process is as it was: %s", why)


def _say(sock: socket.socket, message: tuple[Any, ...]) -> None:
    data = pickle.dumps(message, protocol=5)
    with contextlib.suppress(OSError):  # the trainer is gone: `_hear` notices
        sock.sendall(_HEADER.pack(len(data)) + data)


def _receive(sock: socket.socket) -> tuple[tuple[Any, ...], list[int]]:
    """Return the next message, with the descriptors that came with it. Raises `EOFError`, `OSError`."""
    header, fds, _, _ = socket.recv_fds(sock, _HEADER.size, 1)
    header += _exactly(sock, _HEADER.size - len(header))
    return pickle.loads(_exactly(sock, _HEADER.unpack(header)[0])), list(fds)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = memoryview(data)
    at = 0
    while at < nbytes:
        count = sock.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count
    return bytes(data)
