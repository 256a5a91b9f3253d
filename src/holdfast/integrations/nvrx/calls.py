"""Requests and their queue: functions that run beside training, and what is called once they have ended on all ranks.

`TorchAsyncCheckpoint` is ``torch.save`` by way of such a queue.

Guarantees of `AsyncCallsQueue`:
- a request's tensors and objects are copied when it is scheduled: what changes later doesn't reach its function;
- finalize functions run on the thread that calls, in the order of requests, in the same call on all ranks, and only if
  the function has ended well on all of them. Otherwise the same error, which names the rank, is raised on all;
- a worker that died, and a function that raised or hangs, are errors within ``timeout``; a rank that is silent, dead or
  not, is one on the others within ``patience``;
- what was aborted is forgotten: no later request is taken for it. A worker ends with its trainer.

Does not: bound finalize functions, or undo what functions have done.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import secrets
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist

from holdfast.coordination.group import ranks_of
from holdfast.cores import usable_cores
from holdfast.engine.at_exit import close_later
from holdfast.errors import ConfigError
from holdfast.integrations.nvrx.appointment import Appointments, late
from holdfast.integrations.nvrx.frozen_call import Blocks
from holdfast.integrations.nvrx.worker import NothingToRun, Worker
from holdfast.storage.files import sync_path
from holdfast.validation import checked_seconds, is_store, located

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordination.failure import RankFailure
    from holdfast.cores import Cores
    from holdfast.integrations.nvrx.worker import Running

_log = logging.getLogger("holdfast.nvrx")
_SUFFIX: Final = ".incomplete"
STARTS_ITSELF: Final = "starts_itself"
"""Name of the method by which a function begins its work in this process; returns a `Running`."""

shares: Final = Blocks()
"""Memory of what `FileSystemWriterAsync` saves, for its next save; freed when a queue is closed."""


class AsyncRequest(NamedTuple):
    """A function to run beside training, and what to call once it has ended on all ranks.

    async_fn: called with ``async_fn_args`` and ``async_fn_kwargs`` in the worker process, to which all of them are
    pickled; None for nothing. finalize_fns: called without arguments, in order, on the training thread of every rank.
    preload_fn: called first, in the worker; its result replaces the second argument. is_frozen: `add_finalize_fn` is
    over. call_idx: the number that the queue gave it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Have ``fn`` called after the functions that are there. Raises `RuntimeError` once the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it here and now: preload, the function, a barrier of all ranks, finalize functions."""
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*arguments, **(self.async_fn_kwargs or {}))
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def freeze(self) -> AsyncRequest:
        """Return it with `add_finalize_fn` forbidden."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:  # noqa: FBT001, FBT002 - NVRx's
        """Call the finalize functions and return ``call_idx``.

        validate_matching_call_idx: compare it on all ranks, which is a collective; raises `RuntimeError`.
        """
        for finalize in self.finalize_fns:
            finalize()
        if validate_matching_call_idx and dist.is_available() and dist.is_initialized():
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            highest = torch.tensor([self.call_idx], dtype=torch.int, device=device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            if int(highest.item()) != self.call_idx:
                raise RuntimeError("Unmatched async calls: not all ranks take part in finalizing this request")
        return self.call_idx


class _Active(NamedTuple):
    """A request that is scheduled. deadline: when its function must have ended."""

    request: AsyncRequest
    running: Running
    deadline: float


_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()


class AsyncCallsQueue:
    """A queue of requests, whose functions run in one worker process of this rank, one after the other.

    persistent: the worker stays for later requests; otherwise it ends with each (functions must be picklable either
    way). is_daemon: its functions can't start processes. cpu_priority, io_priority: its nice level (0-19) and I/O class
    (2 best effort, 3 idle). sigterm_timeout: seconds that an aborted function gets to end. cpu_shm_mode: no effect:
    tensors always travel in shared host memory. timeout: seconds that a function may take. patience: seconds
    that ranks wait for one that doesn't call, or whose process is gone. cores: that the worker runs
    on, with memory near them: numbers, ``"auto"`` (near the CUDA device) or ``"any"``, as in `CheckpointConfig`.

    Raises `ConfigError` for cores that this process may not use.
    """

    _warm: ClassVar[Worker | None] = None

    def __init__(
        self,
        persistent: bool = True,  # noqa: FBT001, FBT002 - NVRx's
        is_daemon: bool = True,  # noqa: FBT001, FBT002 - NVRx's
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,  # noqa: FBT001, FBT002 - NVRx's
        *,
        timeout: float = 3600.0,
        patience: float = 600.0,
        cores: Cores = "auto",
    ) -> None:
        usable_cores(cores)
        self.cores = cores
        self.persistent = persistent
        self.is_daemon = is_daemon
        self.cpu_priority = cpu_priority
        self.io_priority = io_priority
        self.sigterm_timeout = sigterm_timeout
        self.cpu_shm_mode = cpu_shm_mode
        self.call_idx = -1
        self.async_calls: deque[_Active] = deque()
        self._timeout_s = checked_seconds("timeout", timeout)
        self._patience_s = checked_seconds("patience", patience)
        self._worker: Worker | None = None
        self._forget_worker: weakref.finalize[..., AsyncCallsQueue] | None = None
        self._appointments: Appointments | None = None
        self._forget_appointments: weakref.finalize[..., AsyncCallsQueue] | None = None
        _queues.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,  # noqa: FBT001, FBT002 - NVRx's
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,  # noqa: ARG003, FBT001, FBT002 - NVRx's
        *,
        cores: Cores = "auto",
    ) -> None:
        """Start a worker for the next queue that needs one; doesn't wait for it."""
        if cls._warm is None:
            cls._warm = Worker(
                rank,
                is_daemon=is_daemon,
                cpu_priority=cpu_priority,
                io_priority=io_priority,
                sigterm_timeout=sigterm_timeout,
                cores=cores,
            )

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request; returns its number when everything that its function needs is copied. All ranks call it.

        Waits if two earlier functions have not ended. Raises `ConfigError` if the request can't be pickled, and
        `DeadlineExceeded`.
        """
        if len(async_request._fields) != len(AsyncRequest._fields):
            async_request = AsyncRequest(**async_request._asdict())
        request = async_request.freeze()._replace(call_idx=self.call_idx + 1)
        running = self._start(request)
        self.call_idx += 1
        # What the function needs was copied: the state isn't kept alive until the request is finalized.
        request = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs=None, preload_fn=None)
        self.async_calls.append(_Active(request, running, time.monotonic() + self._timeout_s))
        return self.call_idx

    def maybe_finalize_async_calls(
        self,
        blocking: bool = False,  # noqa: FBT001, FBT002 - NVRx's
        no_dist: bool = False,  # noqa: FBT001, FBT002 - NVRx's
    ) -> list[int]:
        """Finalize the requests whose functions have ended, on all ranks; return their numbers. All ranks call it.

        blocking: wait for all requests. no_dist: don't ask other ranks, but finalize what has ended here. Costs a look
        at an integer where nothing is due. The first call with a request pending waits for the other ranks.

        Raises a rank's failure on all ranks, `SaveFailed` or `DeadlineExceeded`: the request is over, its finalize
        functions are not called, later ones stay. Also what a finalize function raises.
        """
        finalized: list[int] = []
        while self.async_calls:
            active = self.async_calls[0]
            try:
                is_due, failure = self._look(active, blocking=blocking, no_dist=no_dist)
            except BaseException:
                self._leave("waiting for the other ranks ended in an error")
                raise
            if not is_due:
                break
            self.async_calls.popleft()
            if not active.running.has_ended:
                self._end_worker(abort=True)  # its function is late, and would hold up all others
            elif not self.persistent and not self.async_calls:
                self._end_worker(abort=False)
            if failure is not None:
                active.running.cancel()
                raise failure.cause()
            finalized.append(active.request.execute_finalize_fns(validate_matching_call_idx=False))
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests are not finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - NVRx's
        """Finalize all requests, then end the worker; the queue can be used again.

        abort: don't wait, but forget all requests and end the worker at once, on this rank; the others learn of it. All
        ranks call it, unless nothing is pending. Raises as `maybe_finalize_async_calls`; then too, all is closed.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            while self.async_calls:
                self.async_calls.popleft().running.cancel()
            self._leave("its queue was aborted" if abort else "its queue was closed")
            self._end_worker(abort=abort)
            warm, AsyncCallsQueue._warm = AsyncCallsQueue._warm, None
            if warm is not None:
                _end(warm, abort=abort)
            shares.clear()
            self.call_idx = -1

    def _get_async_caller(self) -> Worker | None:
        return self._worker

    def _start(self, request: AsyncRequest) -> Running:
        if request.async_fn is None:
            return NothingToRun()
        start = getattr(request.async_fn, STARTS_ITSELF, None)
        if start is not None:
            running: Running = start()
            return running
        if self._worker is not None and not self._worker.is_alive:
            self._end_worker(abort=True)
        if self._worker is None:
            self._worker = self._new_worker()
            self._forget_worker = weakref.finalize(self, close_later, "an AsyncCallsQueue", self._worker.release)
            self._forget_worker.atexit = False
        call = (request.async_fn, request.async_fn_args, request.async_fn_kwargs, request.preload_fn)
        return self._worker.submit(call, timeout_s=self._timeout_s)

    def _new_worker(self) -> Worker:
        warm, AsyncCallsQueue._warm = AsyncCallsQueue._warm, None
        if warm is not None and warm.is_alive:
            return warm
        return Worker(
            _rank(),
            is_daemon=self.is_daemon,
            cpu_priority=self.cpu_priority,
            io_priority=self.io_priority,
            sigterm_timeout=self.sigterm_timeout,
            cores=self.cores,
        )

    def _look(self, active: _Active, *, blocking: bool, no_dist: bool) -> tuple[bool, RankFailure | None]:
        """Return whether a request is due, and its failure."""
        running, number = active.running, active.request.call_idx
        if no_dist or len(ranks_of(None)) == 1:
            left_s = active.deadline - time.monotonic()
            if blocking:
                running.wait(max(0.0, left_s))
            if running.has_ended:
                return True, running.failure
            is_late = active.deadline <= time.monotonic()
            return is_late, late(_rank(), number, self._timeout_s) if is_late else None
        if self._appointments is None:
            self._appointments = Appointments(None, timeout_s=self._timeout_s, patience_s=self._patience_s)
            self._forget_appointments = weakref.finalize(
                self, close_later, "an AsyncCallsQueue", lambda kept=self._appointments: kept.close("it was forgotten")
            )
            self._forget_appointments.atexit = False
        is_due, failure = self._appointments.meet(number, running, blocking=blocking)
        if self._appointments.is_over:
            self._leave("a rank has failed")
        return is_due, failure

    def _leave(self, why: str) -> None:
        appointments, self._appointments = self._appointments, None
        if appointments is not None:
            assert self._forget_appointments is not None
            self._forget_appointments.detach()
            appointments.close(why)

    def _end_worker(self, *, abort: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            assert self._forget_worker is not None
            self._forget_worker.detach()
            _end(worker, abort=abort)


def abort_nvrx_checkpoint() -> None:
    """Abort every queue of this process: its requests are forgotten, its worker is ended. For a restart in-process."""
    for found in list(_queues):
        found.close(abort=True)


# `torch.save` beside training. ------------------------------------------------------------------------------------


def save_atomically(state_dict: Any, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
    """``torch.save(state_dict, path, ...)`` by way of a hidden file beside it; returns when it is durable."""
    directory, name = os.path.split(os.path.abspath(os.fspath(path)))
    prefix = os.path.join(directory, f".{name}.")
    _remove_left_over(prefix)
    hidden = f"{prefix}{secrets.token_hex(4)}{_SUFFIX}"
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: what is left over stays
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        torch.save(state_dict, hidden, *args, **kwargs)
        os.fsync(fd)
        os.replace(hidden, os.path.join(directory, name))
        sync_path(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        raise
    finally:
        os.close(fd)


def _remove_left_over(prefix: str) -> None:
    """Remove hidden files whose writers have died: nobody holds their lock."""
    for found in glob.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(found, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(found)
            finally:
                os.close(fd)


class TorchAsyncCheckpoint:
    """Asynchronous ``torch.save``, of each rank by itself.

    The file holds what the state was when `async_save` was called, on the CPU. It is at its name when it is whole and
    durable, and not before: a file that was there stays until then. What a killed save has left beside it is removed by
    the next save to that name.

    persistent_queue, timeout, cores: as for `AsyncCallsQueue`. ``save`` is ``torch.save``.
    """

    async_fn: ClassVar[Any] = staticmethod(save_atomically)

    def __init__(
        self,
        persistent_queue: bool = True,  # noqa: FBT001, FBT002 - NVRx's
        *,
        timeout: float = 3600.0,
        cores: Cores = "auto",
    ) -> None:
        self.save = torch.save
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue, timeout=timeout, cores=cores)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Save ``state_dict`` to the file ``args[0]``, or ``f=``; the rest is for ``torch.save``.

        Returns when everything is copied; `finalize_async_save` tells how it ended. Raises `ConfigError`.
        """
        target = args[0] if args else kwargs.get("f")
        if not isinstance(target, (str, os.PathLike)):
            raise ConfigError(f"async_save writes to a path, not to {target!r}", field="f")
        if is_store(located(os.fspath(target), field="f")):
            message = f"{target}: async_save writes to files on a disk; use holdfast.async_save for an object store"
            raise ConfigError(message, field="f")
        rest = {("path" if key == "f" else key): value for key, value in kwargs.items()}
        self._async_calls_queue.schedule_async_request(AsyncRequest(save_atomically, (state_dict, *args), [], rest))

    def finalize_async_save(
        self,
        blocking: bool = False,  # noqa: FBT001, FBT002 - NVRx's
        no_dist: bool = True,  # noqa: FBT001, FBT002 - NVRx's
        terminate: bool = False,  # noqa: FBT001, FBT002 - NVRx's
    ) -> None:
        """Learn how saves have ended; raises as `AsyncCallsQueue.maybe_finalize_async_calls`.

        blocking: wait for all of them. no_dist: this rank's only. terminate: then end the worker.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:  # noqa: FBT001, FBT002 - NVRx's
        """Wait for this rank's saves, then end the worker. abort: don't wait; what isn't whole is dropped."""
        try:
            if not abort:
                self._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        finally:
            self._async_calls_queue.close(abort=abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        return self._async_calls_queue


def _end(worker: Worker, *, abort: bool) -> None:
    if abort:
        worker.abort()
    else:
        worker.finish(worker.patience_s)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
