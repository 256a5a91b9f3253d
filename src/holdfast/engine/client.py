"""The trainer's side of its engine: starts it, feeds it, watches it, and turns its end into errors. Torch-free.

Guarantees:
- no call waits without a deadline; an engine that dies or falls silent is noticed (`EngineDied`), killed and reaped,
  and the next `persist` starts a new one, which is told all images and plans again;
- after `cancel` has returned, no report of that attempt appears;
- one daemon thread and two descriptors a running engine, and one descriptor an image; nothing is left after `close`;
- a forked child (a DataLoader's worker) gives up its copy of the socket, so that the engine notices the trainer's death
  while the child lives; at interpreter exit the engine is told to leave, and not waited for for long.

All methods may be called from any thread. Images stay the caller's; a descriptor handed in is duplicated.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.engine import messages
from holdfast.engine.launch import REAP_S, launch
from holdfast.engine.link import LINGER_S, START_S, Link
from holdfast.engine.progress import AttemptProgress
from holdfast.errors import DeadlineExceeded, EngineDied, StorageError
from holdfast.storage.slots import slots_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.engine.wire import ToTrainer

EXIT_S: Final = 1.0
"""How long interpreter exit waits for an engine to leave; one that finishes something is left to it."""
KEPT_OUTCOMES: Final = 32
"""Ended attempts, and ended removals, whose outcome can still be asked for."""
Outcome = TypeVar("Outcome")
_log = logging.getLogger("holdfast.engine")


class EngineClient:
    """One rank's engine. See the module for what it guarantees."""

    def __init__(
        self,
        rank: int,
        *,
        writers: int = 2,
        io_limit_bytes_per_s: int | None = None,
        nice: int = 10,
        io_class: str = "none",
        io_level: int | None = None,
        host_writers: int | None = None,
        orphan_grace_s: float = 60.0,
        direct: bool = True,
        silence_s_max: float = 10.0,
    ) -> None:
        """Starts nothing yet. Raises `StorageError` where ``host_writers`` can't be kept (``storage.slots``).

        Limits are as in ``holdfast.limits``; an engine with an attempt in work that says nothing for
        ``silence_s_max`` seconds is killed; ``orphan_grace_s`` is for finishing after the trainer's death.
        """
        self.rank = rank
        slots = "" if host_writers is None else slots_directory()
        self._config = messages.Configure(
            writers, io_limit_bytes_per_s, nice, orphan_grace_s, direct, io_class, io_level, host_writers, slots
        )
        self._silence_s_max = silence_s_max
        self._owner = os.getpid()
        self._changed = threading.Condition()
        """Guards everything below that `_link`'s thread changes, and is notified of each change."""
        self._sending = threading.RLock()
        """Held while a message goes out and while an engine is started: messages keep their order."""
        self._link: Link | None = None
        self._closed = False
        self._images: dict[int, tuple[int, int]] = {}
        self._plans: dict[int, messages.AddPlan] = {}
        self._attempts: dict[str, AttemptProgress] = {}
        self._removals: dict[str, messages.Removed | EngineDied | None] = {}
        self._next_id = 0
        _clients.add(self)

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Of the running engine; None when there is none."""
        link = self._link
        return link.pid if link is not None and link.death is None else None

    def start(self) -> None:
        """Start the engine unless it runs. Returns at once: it gets ready meanwhile. Raises `EngineDied`."""
        self._check_usable()
        with self._sending:
            self._living_link()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the engine has answered. Raises `EngineDied`, `DeadlineExceeded`."""
        self.start()
        link = self._link
        assert link is not None
        self._wait(lambda: link.ready, lambda: link.death, "the engine to start", timeout_s)

    def restart(self) -> None:
        """Kill the engine, if one runs, and start a new one that knows all images and plans."""
        self._check_usable()
        with self._sending:
            if self._link is not None and self._link.death is None:
                self._link.end("was restarted")
                self._wait_gone(self._link)
            self._living_link()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engine and let go of everything; idempotent.

        The engine drops what is not verified and finishes what is; after ``timeout_s`` it is killed. Returns when it is
        gone, after ``timeout_s`` and the few seconds of reaping at most. Never raises.
        """
        self._close(timeout_s, kill=True)

    # -- what it works with -------------------------------------------------------------------------------------

    def add_image(self, fd: int, nbytes: int) -> int:
        """Hand over a memfd of ``nbytes`` bytes (a multiple of 4,096); returns the image's number."""
        self._check_usable()
        with self._sending:
            image = self._new_id()
            self._images[image] = (os.dup(fd), nbytes)
            self._tell(messages.AddImage(image, nbytes), (self._images[image][0],))
            return image

    def drop_image(self, image: int) -> None:
        """Have the engine forget an image; an attempt that reads it still finishes."""
        self._check_usable()
        with self._sending:
            fd, _ = self._images.pop(image)
            os.close(fd)
            self._tell(messages.DropImage(image))

    def add_plan(
        self, files: Sequence[messages.FileRow], *, tensor_offsets: bytes, tensor_sizes: bytes, index: bytes
    ) -> int:
        """Hand over a write plan (see `messages.AddPlan`); returns its number."""
        self._check_usable()
        with self._sending:
            plan = self._new_id()
            self._plans[plan] = messages.AddPlan(plan, tuple(files), tensor_offsets, tensor_sizes, index)
            self._tell(self._plans[plan])
            return plan

    def drop_plan(self, plan: int) -> None:
        """Have the engine forget a plan."""
        self._check_usable()
        with self._sending:
            del self._plans[plan]
            self._tell(messages.DropPlan(plan))

    # -- one attempt --------------------------------------------------------------------------------------------

    def persist(
        self,
        dir_fd: int,
        *,
        attempt: str,
        plan: int,
        image: int,
        step: int | None,
        world: int,
        report_name: str,
        lease_name: str,
    ) -> None:
        """Have the plan's files written from the image into the directory ``dir_fd``, all copies being complete.

        Returns when the engine has been told; a dead one is started again first. Raises `EngineDied`.
        """
        self._check_usable()
        nbytes = sum(row.size for row in self._plans[plan].files)
        message = messages.Persist(attempt, plan, image, step, self.rank, world, report_name, lease_name)
        with self._sending:
            link = self._living_link()
            link.expect()
            with self._changed:
                self._attempts[attempt] = AttemptProgress(attempt, nbytes, link)
                self._forget_old()
            self._send(link, message, (dir_fd,))

    def staging_verified(self, attempt: str) -> None:
        """Allow the report of ``attempt``: the image held still and is right. Raises what `wait_reported` would."""
        record = self._attempts[attempt]
        with self._sending:
            self._raise_if_failed(record)
            self._send(record.link, messages.StagingVerified(attempt))

    def progress(self, attempt: str) -> tuple[int, int]:
        """Bytes written so far, and bytes to write."""
        record = self._attempts[attempt]
        return record.written, record.nbytes

    def waiting_for(self, attempt: str) -> str:
        """What writing waits for, other than the storage, and who has it; "" where it is nothing."""
        return self._attempts[attempt].waiting

    def wait_persisted(self, attempt: str, timeout_s: float) -> messages.Persisted:
        """Wait until all files of ``attempt`` are durable; raises `StorageError`, `EngineDied`, `DeadlineExceeded`."""
        return self._wait_outcome(attempt, "persist", lambda record: record.persisted, timeout_s)

    def wait_reported(self, attempt: str, timeout_s: float) -> messages.Reported:
        """Wait until the report of ``attempt`` is durable; raises as `wait_persisted` does."""
        return self._wait_outcome(attempt, "report", lambda record: record.reported, timeout_s)

    def cancel(self, attempt: str, timeout_s: float = 5.0) -> bool:
        """Stop ``attempt``: when this returns, a report of it is there already (see `wait_reported`) or never will be.

        False: it is certain that there is none, even after a power loss. An engine that does not answer in time is
        killed. Raises `DeadlineExceeded` only if even that had no effect.
        """
        record = self._attempts.get(attempt)
        if record is None:
            return False
        with self._sending:
            if record.link.death is None:
                record.link.send(messages.Cancel(attempt))
        with self._changed:
            answered = self._changed.wait_for(lambda: record.cancelled or record.link.death is not None, timeout_s)
        if not answered:
            record.link.end(f"did not answer a cancel within {timeout_s:g} s")
            self._wait_gone(record.link)
        death = record.link.death
        if death is not None and death.exitcode is None and not record.cancelled:
            # Killed, but still in a system call, which may be the rename of the report.
            message = f"attempt {attempt} on rank {self.rank} can't be said to have stopped: {death}"
            raise DeadlineExceeded(message, waited_for="an engine that was killed to be gone", timeout_s=timeout_s)
        return record.may_leave_report

    # -- trash --------------------------------------------------------------------------------------------------

    def remove(self, dir_fd: int, name: str) -> None:
        """Have the entry ``name`` of the directory ``dir_fd`` removed with everything in it, in the background.

        Returns when the engine has been told; a dead one is started again first. What can't be removed is logged, and
        told by `wait_removed`. Raises `EngineDied`.
        """
        self._check_usable()
        with self._sending:
            link = self._living_link()
            with self._changed:
                ended = [known for known, outcome in self._removals.items() if outcome is not None]
                for known in ended[: max(0, len(self._removals) - KEPT_OUTCOMES)]:
                    del self._removals[known]
                self._removals[name] = None
            try:
                self._send(link, messages.Remove(name), (dir_fd,))
            except EngineDied:
                self._removals.pop(name, None)
                raise

    def wait_removals(self, timeout_s: float) -> None:
        """Wait until every `remove` has ended, well or not. Raises `DeadlineExceeded`."""
        self._wait(
            lambda: None not in self._removals.values(), lambda: None, "the engine to finish its removals", timeout_s
        )

    def wait_removed(self, name: str, timeout_s: float) -> None:
        """Wait for the end of a `remove`; what could not be removed stays for a later one.

        Raises `StorageError`, `EngineDied`, `DeadlineExceeded`.
        """
        self._wait(lambda: self._removals[name] is not None, lambda: None, f"the engine to remove {name}", timeout_s)
        with self._changed:
            outcome = self._removals.pop(name)
        if isinstance(outcome, EngineDied):
            raise outcome
        if outcome is not None and outcome.errno is not None:
            raise StorageError(
                f"rank {self.rank} can't remove {name}: {os.strerror(outcome.errno)}", path=name, errno=outcome.errno
            )

    # -- sending ------------------------------------------------------------------------------------------------

    def _living_link(self) -> Link:
        """The engine, started if there is none. `_sending` is held."""
        link = self._link
        if link is not None and link.usable:
            return link
        if link is not None:
            self._wait_gone(link)
        link = Link(launch(self.rank), self, silence_s_max=self._silence_s_max)
        self._link = link
        try:
            link.listen()
        except RuntimeError as error:
            self._link = None
            raise EngineDied(f"rank {self.rank} can't start its engine: {error}", rank=self.rank) from error
        self._send(link, self._config)
        for image, (fd, nbytes) in self._images.items():
            self._send(link, messages.AddImage(image, nbytes), (fd,))
        for plan in self._plans.values():
            self._send(link, plan)
        return link

    def _tell(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send to an engine that runs; one that doesn't is told when it starts."""
        if self._link is not None and self._link.death is None:
            self._link.send(message, fds)

    def _send(self, link: Link, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send, or raise why the engine has ended."""
        if not link.send(message, fds):
            self._wait_gone(link)
            assert link.death is not None
            raise link.death

    # -- what the link tells ------------------------------------------------------------------------------------

    def heard(self, link: Link, message: ToTrainer) -> None:
        with self._changed:
            if isinstance(message, messages.Removed):
                if message.name in self._removals:
                    self._removals[message.name] = message
                if message.errno is not None:
                    what = os.strerror(message.errno)
                    _log.warning("rank %d could not remove all of %s: %s", self.rank, message.name, what)
            elif isinstance(message, messages.Notice):
                _log.warning("the engine of rank %d: %s", self.rank, message.text)
            elif not isinstance(message, messages.Ready):
                record = self._attempts.get(message.attempt)
                if record is not None and record.link is link:
                    record.note(self.rank, message)
            self._changed.notify_all()

    def expects_beats(self, link: Link) -> bool:
        with self._changed:
            return any(record.link is link and record.in_work for record in self._attempts.values())

    def died(self, error: EngineDied) -> None:
        with self._changed:
            for name, outcome in self._removals.items():
                if outcome is None:
                    self._removals[name] = error
            self._changed.notify_all()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait(
        self,
        done: Callable[[], bool],
        failure: Callable[[], EngineDied | StorageError | None],
        waiting_for: str,
        timeout_s: float,
        record: AttemptProgress | None = None,
    ) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: done() or failure() is not None, timeout_s):
                state = f" ({record.written} of {record.nbytes} bytes written)" if record is not None else ""
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {timeout_s:g} s for {waiting_for}{state}",
                    waited_for=waiting_for,
                    timeout_s=timeout_s,
                )
            if not done() and (error := failure()) is not None:
                raise error

    def _wait_outcome(
        self, attempt: str, doing: str, outcome: Callable[[AttemptProgress], Outcome | None], timeout_s: float
    ) -> Outcome:
        record = self._attempts[attempt]
        self._wait(
            lambda: record.cancelled or outcome(record) is not None,
            lambda: record.error,
            f"the engine to {doing} attempt {attempt}",
            timeout_s,
            record,
        )
        found = outcome(record)
        if found is None:
            raise EngineDied(f"attempt {attempt} was cancelled on rank {self.rank}", rank=self.rank)
        return found

    def _wait_gone(self, link: Link) -> None:
        """Wait until a link that is being ended has ended. Raises `DeadlineExceeded`."""
        ended = "an engine that was killed to be gone"
        self._wait(lambda: link.death is not None, lambda: None, ended, LINGER_S + REAP_S + 1.0)

    def _raise_if_failed(self, record: AttemptProgress) -> None:
        with self._changed:
            if record.error is not None:
                raise record.error

    def _check_usable(self) -> None:
        if self._closed or os.getpid() != self._owner:
            state = "is closed" if self._closed else "belongs to the process that this one was forked from"
            raise EngineDied(f"the engine of rank {self.rank} {state}", rank=self.rank)

    def _forget_old(self) -> None:
        ended = [name for name, record in self._attempts.items() if not record.in_work]
        for name in ended[: max(0, len(self._attempts) - KEPT_OUTCOMES)]:
            del self._attempts[name]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # -- ending -------------------------------------------------------------------------------------------------

    def _close(self, timeout_s: float, *, kill: bool) -> None:
        if os.getpid() != self._owner or self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        link = self._link
        if link is not None:
            # A sender that is stuck is ended by its own deadline; then the engine sees the end of the socket as well.
            if link.usable and self._sending.acquire(timeout=max(0.0, timeout_s)):
                try:
                    link.send(messages.Shutdown())
                finally:
                    self._sending.release()
            if not link.join(deadline - time.monotonic()) and kill:
                link.end(f"did not leave within {timeout_s:g} s")
                link.join(LINGER_S + REAP_S)
        for fd, _ in self._images.values():
            os.close(fd)
        self._images.clear()
        self._plans.clear()
        _clients.discard(self)

    def _after_fork(self) -> None:
        """In a forked child: give up the socket. No lock is taken: its holder may not exist here."""
        if self._link is not None:
            self._link.abandon()


_clients: weakref.WeakSet[EngineClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork()  # noqa: SLF001 - of this module


def _at_exit() -> None:
    for client in list(_clients):
        client._close(EXIT_S, kill=False)  # noqa: SLF001


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
