"""One session's use of an engine process: persist, cancel, remove, and errors for what fails. Torch-free.

The process belongs to its host (``shared``), which starts, watches and replaces it; several sessions may share it.

Guarantees:
- no call waits without a deadline; an engine that dies or hangs is noticed (`EngineDied`), killed and reaped, and the
  next `persist` starts a new one, which gets all images and plans again;
- after `cancel` has returned, no report of that attempt appears;
- one daemon thread and two descriptors per running engine, and one descriptor per image; `close` ends this session's
  work, and the engine with the last session: then nothing is left;
- a forked child (a DataLoader's worker) closes its copy of the socket, so that the engine notices the trainer's death
  while the child lives; interpreter exit tells the engine to leave, and waits only briefly.

All methods are thread-safe. Images remain the caller's; a descriptor passed in is duplicated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from holdfast.cores import usable_cores
from holdfast.engine import messages
from holdfast.engine.at_exit import end_at_exit
from holdfast.engine.shared import SILENCE_S, EngineHost
from holdfast.engine.supervisor import LINGER_S, REAP_S, START_S, EngineConnection
from holdfast.errors import DeadlineExceeded, EngineDied, StorageError
from holdfast.storage.locks import slots_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.cores import Cores
    from holdfast.storage.protocol import WriterTarget


class AttemptProgress:
    """Progress of one attempt, as reported by the engine. Guarded by the host's condition; never waits itself."""

    __slots__ = (
        "cancelled",
        "failure",
        "freed",
        "given_up",
        "link",
        "name",
        "nbytes",
        "persisted",
        "rank",
        "report_left",
        "reported",
        "verified",
        "waiting",
        "written",
    )

    def __init__(self, name: str, nbytes: int, link: EngineConnection, rank: int) -> None:
        self.name, self.nbytes, self.link, self.rank = name, nbytes, link, rank
        self.written = self.freed = 0
        self.waiting = ""
        self.persisted: messages.Persisted | None = None
        self.reported: messages.Reported | None = None
        self.cancelled = self.report_left = self.verified = False
        self.given_up = False
        """The engine did not answer: the attempt may end in any way until its engine is gone."""
        self.failure: StorageError | None = None

    @property
    def error(self) -> EngineDied | StorageError | None:
        """Error that ended it, None if it ended by a report or a cancel."""
        if self.failure is not None or self.reported is not None or self.cancelled:
            return self.failure
        if self.link.death is None and self.given_up:
            message = f"attempt {self.name} on rank {self.rank} was given up: its engine (pid {self.link.pid}) "
            return EngineDied(message + "gave no answer, and is replaced", rank=self.rank)
        return told_to(self.rank, self.link.death)

    @property
    def in_work(self) -> bool:
        return self.error is None and self.reported is None and not self.cancelled

    @property
    def may_leave_report(self) -> bool:
        """True if the report of an ended attempt may exist, or reappear after a power loss."""
        answered = self.failure is not None or self.cancelled
        return self.report_left or self.reported is not None or not answered

    def note(self, message: messages.OfSession) -> None:
        match message:
            case messages.AttemptBeat():
                self.written, self.waiting = message.written, message.waiting
            case messages.SlotFree():
                self.freed = message.pieces
            case messages.Persisted():
                self.persisted = message
                self.written = message.nbytes
            case messages.Reported():
                self.reported = message
            case messages.Cancelled():
                self.cancelled, self.report_left = True, self.report_left or message.report_left
            case messages.AttemptFailed():
                text = f"rank {self.rank}, attempt {self.name}: {message.detail}"
                self.failure = StorageError(text, path=message.path, errno=message.errno)
                self.report_left = message.report_left


def told_to(rank: int, death: EngineDied | None) -> EngineDied | None:
    """Return ``death`` as raised by a session of ``rank``, even if another rank of this process started the engine."""
    if death is None or death.rank == rank:
        return death
    return EngineDied(f"rank {rank}: {death}", rank=rank, exitcode=death.exitcode)


EXIT_S: Final = 1.0
"""How long interpreter exit waits for an engine to leave; a busy engine finishes on its own."""
KEPT_OUTCOMES: Final = 32
"""Number of ended attempts, and of ended removals, whose outcome is kept."""
Outcome = TypeVar("Outcome")
_log = logging.getLogger("holdfast.engine")


class EngineClient:
    """One rank's session on an engine. See the module for its guarantees."""

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
        cores: Cores = "auto",
        orphan_grace_s: float = 60.0,
        direct: bool = True,
        silence_s_max: float = SILENCE_S,
        host: EngineHost | None = None,
    ) -> None:
        """Does not start the engine.

        Raises `StorageError` if ``host_writers`` can't be enforced (``storage.locks``), and `ConfigError` for ``cores``
        that this process may not use.

        Limits are as in ``holdfast.config``, and apply to this session's attempts. An engine that is working on an
        attempt and silent for ``silence_s_max`` seconds is killed; ``orphan_grace_s``: time to finish after the
        trainer's death. host: the engine's owner; by default one for this session alone.
        """
        self.rank = rank
        slots = "" if host_writers is None else slots_directory()
        self._limits = messages.AttemptLimits(
            *(writers, io_limit_bytes_per_s, nice, orphan_grace_s, direct, io_class, io_level, host_writers, slots),
            usable_cores(cores),
        )
        self._host = EngineHost(silence_s_max=silence_s_max) if host is None else host
        self.number = self._host.new_number()
        """Number of this session in its host."""
        self._owner = os.getpid()
        self._changed = self._host.changed
        """Guards all below that link threads change; notified of each change."""
        self._sending = self._host.sending
        self._closed = self._joined = False
        self._images: dict[int, tuple[int, int]] = {}
        self._plans: dict[int, messages.AddPlan] = {}
        self._attempts: dict[str, AttemptProgress] = {}
        self._removals: dict[str, EngineConnection | messages.Removed | EngineDied] = {}
        """Outcomes by name; until there is one, the engine that was asked."""
        self._stay_at_exit = end_at_exit(self, lambda client, _: client.leave())

    # -- lifecycle ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the running engine; None if there is none."""
        return None if self._closed else self._host.pid

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that this session's attempts run on; empty for those that the engine was started with."""
        return self._limits.cores

    @property
    def _link(self) -> EngineConnection | None:
        return self._host.current

    def start(self) -> None:
        """Start the engine unless it runs; doesn't wait until it is ready. Raises `EngineDied`."""
        with self._sending:
            self._join()
            self._host.living_link(self.rank)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until the engine has answered. Raises `EngineDied`, `DeadlineExceeded`."""
        with self._sending:
            self._join()
            link = self._host.living_link(self.rank)
        self._wait(lambda: link.ready, lambda: told_to(self.rank, link.death), "the engine to start", timeout_s)

    def restart(self) -> None:
        """Kill the engine, if one runs, and start a new one that has all images and plans."""
        with self._sending:
            self._join()
            self._host.restart(self.rank)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End this session and release everything; idempotent. Returns True if none of its work goes on.

        The engine finishes what is verified and drops the rest; what has not ended after ``timeout_s`` is given up. The
        last session ends the engine, which is killed after ``timeout_s``. Takes at most ``timeout_s`` and a few seconds
        for reaping. Never raises.
        """
        return self._close(timeout_s, give_up=True)

    def leave(self) -> bool:
        """Like `close`, when this process is about to end: a late engine may finish as if the process had died."""
        return self._close(EXIT_S, give_up=False)

    # -- images and plans ---------------------------------------------------------------------------------------

    def add_image(self, fd: int, nbytes: int) -> int:
        """Send a memfd of ``nbytes`` bytes (a multiple of 4,096) to the engine; return the image's number."""
        with self._sending:
            self._join()
            image = self._host.new_number()
            self._images[image] = (os.dup(fd), nbytes)
            self._host.tell(messages.AddImage(image, nbytes), (self._images[image][0],))
            return image

    def drop_image(self, image: int) -> None:
        """Have the engine release an image; an attempt that reads it still finishes."""
        with self._sending:
            self._join()
            fd, _ = self._images.pop(image)
            os.close(fd)
            self._host.tell_all(messages.DropImage(image))

    def add_plan(
        self, files: Sequence[messages.FileRow], *, tensor_offsets: bytes, tensor_sizes: bytes, index: bytes
    ) -> int:
        """Send a write plan (see `messages.AddPlan`) to the engine; return its number."""
        with self._sending:
            self._join()
            plan = self._host.new_number()
            self._plans[plan] = messages.AddPlan(plan, tuple(files), tensor_offsets, tensor_sizes, index)
            self._host.tell(self._plans[plan])
            return plan

    def drop_plan(self, plan: int) -> None:
        """Have the engine release a plan."""
        with self._sending:
            self._join()
            del self._plans[plan]
            self._host.tell_all(messages.DropPlan(plan))

    # -- one attempt --------------------------------------------------------------------------------------------

    def persist(
        self,
        target: int | WriterTarget,
        *,
        attempt: str,
        plan: int,
        image: int,
        step: int | None,
        world: int,
        report_name: str,
        lease_name: str,
        slot_bytes: int = 0,
    ) -> None:
        """Have the plan's files written from the image to ``target``; all copies must be complete.

        target: the descriptor of a directory, or the writer of a place that isn't one. slot_bytes: if not 0, the image
        is a ring of slots of that size, to be filled with pieces of the files (`slot_filled`); not with a writer.
        Returns once the request is sent; restarts a dead engine first. Raises `EngineDied`.
        """
        fds, writer = _place(target)
        with self._sending:
            self._join()
            nbytes = sum(row.size for row in self._plans[plan].files)
            names = report_name, lease_name
            message = messages.Persist(
                *(attempt, plan, image, step, self.rank, world, *names),
                *(self._limits, self.number, _umask(), slot_bytes, *writer),
            )
            self._begin(message, fds, nbytes)

    def copy(
        self,
        source_fd: int,
        source: messages.CopySource,
        target: WriterTarget,
        *,
        attempt: str,
        nbytes: int,
        step: int | None,
        rank: int,
        world: int,
        report_name: str,
        lease_name: str,
    ) -> None:
        """Have the files of the report ``source`` copied from the directory ``source_fd`` to ``target``.

        The engine checks them by that report and goes on after this process has ended, for as long as it may. The copy
        gets the same report, as one of ``rank`` of ``world``. Returns once the request is sent; raises as `persist`.
        """
        with self._sending:
            self._join()
            message = messages.Persist(
                *(attempt, 0, 0, step, rank, world, report_name, lease_name),
                *(self._limits, self.number, _umask(), 0, target.module, target.args, target.paths, source),
            )
            self._begin(message, (source_fd,), nbytes)
        self.staging_verified(attempt)

    def _begin(self, message: messages.Persist, fds: tuple[int, ...], nbytes: int) -> None:
        """Send ``message`` to a living engine and keep its progress; `_sending` is held."""
        link = self._host.living_link(self.rank)
        link.expect()
        with self._changed:
            self._attempts[message.attempt] = AttemptProgress(message.attempt, nbytes, link, self.rank)
            self._forget_old()
        self._host.send(link, message, fds)

    def slot_filled(self, attempt: str, pieces: int) -> None:
        """Announce that the first ``pieces`` pieces of ``attempt`` are filled. Raises what `wait_reported` would."""
        record = self._attempts[attempt]
        with self._sending:
            self._raise_if_failed(record)
            self._host.send(record.link, messages.SlotFilled(attempt, pieces, self.number))

    def wait_freed(self, attempt: str, pieces: int, timeout_s: float) -> None:
        """Wait until the slots of the first ``pieces`` pieces are free; raises as `wait_persisted` does."""
        if self._attempts[attempt].freed < pieces:
            self._wait_outcome(attempt, "free slots of", lambda record: record.freed >= pieces or None, timeout_s)

    def staging_verified(self, attempt: str) -> None:
        """Allow the report of ``attempt``: the image is verified. Raises what `wait_reported` would."""
        record = self._attempts[attempt]
        with self._sending:
            self._raise_if_failed(record)
            record.verified = True
            self._host.send(record.link, messages.StagingVerified(attempt, self.number))

    def progress(self, attempt: str) -> tuple[int, int]:
        """Return the bytes written so far, and the bytes to write."""
        record = self._attempts[attempt]
        return record.written, record.nbytes

    def waiting_for(self, attempt: str) -> str:
        """Return what writing waits for, other than storage, and who holds it; "" if nothing."""
        return self._attempts[attempt].waiting

    def wait_persisted(self, attempt: str, timeout_s: float) -> messages.Persisted:
        """Wait until all files of ``attempt`` are durable; raises `StorageError`, `EngineDied`, `DeadlineExceeded`."""
        return self._wait_outcome(attempt, "persist", lambda record: record.persisted, timeout_s)

    def wait_reported(self, attempt: str, timeout_s: float) -> messages.Reported:
        """Wait until the report of ``attempt`` is durable; raises as `wait_persisted` does."""
        return self._wait_outcome(attempt, "report", lambda record: record.reported, timeout_s)

    def cancel(self, attempt: str, timeout_s: float = 5.0) -> bool:
        """Stop ``attempt``: after this returns, its report exists already (see `wait_reported`) or never will.

        Returns False if there certainly is no report, even after a power loss. An engine that does not answer in time
        gets no more attempts, and is killed once it has no work of other sessions. Raises `DeadlineExceeded` if that is
        not at once, or had no effect: the attempt may still write its report until the engine is gone.
        """
        record = self._attempts.get(attempt)
        if record is None:
            return False
        with self._sending:
            if record.link.death is None:
                record.link.send(messages.Cancel(attempt, self.number))
        with self._changed:
            answered = self._changed.wait_for(lambda: record.cancelled or record.link.death is not None, timeout_s)
        if not answered and not self._give_up(record, timeout_s):
            message = (
                f"attempt {attempt} on rank {self.rank} may not have stopped: it did not answer a cancel "
                f"within {timeout_s:g} s, and its engine (pid {record.link.pid}) is finishing attempts of others"
            )
            raise DeadlineExceeded(message, waited_for="a hanging attempt to stop", timeout_s=timeout_s)
        if not answered:
            self._host.wait_gone(record.link)
        death = told_to(self.rank, record.link.death)
        if death is not None and death.exitcode is None and not record.cancelled:
            # Killed, but still in a system call, which may be the rename of the report.
            message = f"attempt {attempt} on rank {self.rank} may not have stopped: {death}"
            raise DeadlineExceeded(message, waited_for="a killed engine to end", timeout_s=timeout_s)
        return record.may_leave_report

    def _give_up(self, record: AttemptProgress, unanswered_s: float) -> bool:
        """Stop waiting for ``record``; return True if its engine is being killed."""
        with self._changed:
            record.given_up = True
        reason = f"did not answer a cancel within {unanswered_s:g} s"
        return self._host.give_up_on(record.link, reason, unanswered_s=unanswered_s)

    # -- removals -----------------------------------------------------------------------------------------------

    def remove(self, target: int | WriterTarget, name: str) -> None:
        """Have the entry ``name`` of ``target`` removed with all its contents, in the background.

        target: the descriptor of a directory, or the writer of a root that isn't one. Returns once the request is sent;
        restarts a dead engine first. Failed removals are logged, and reported by `wait_removed`. Raises `EngineDied`.
        """
        fds, writer = _place(target)
        device = os.fstat(fds[0]).st_dev if fds else 0
        with self._sending:
            self._join()
            link = self._host.living_link(self.rank)
            with self._changed:
                ended = [
                    known for known, outcome in self._removals.items() if not isinstance(outcome, EngineConnection)
                ]
                for known in ended[: max(0, len(self._removals) - KEPT_OUTCOMES)]:
                    del self._removals[known]
                self._removals[name] = link
            try:
                self._host.send(link, messages.Remove(name, self.number, device, *writer), fds)
            except EngineDied:
                self._removals.pop(name, None)
                raise

    def wait_removals(self, timeout_s: float) -> None:
        """Wait until every `remove` has ended, successful or not. Raises `DeadlineExceeded`."""
        self._wait(lambda: not self._removing, lambda: None, "the engine to finish its removals", timeout_s)

    def wait_removed(self, name: str, timeout_s: float) -> None:
        """Wait for the end of a `remove`; what could not be removed is left to a later one.

        Raises `StorageError`, `EngineDied`, `DeadlineExceeded`.
        """
        self._wait(
            lambda: not isinstance(self._removals[name], EngineConnection),
            lambda: None,
            f"the engine to remove {name}",
            timeout_s,
        )
        with self._changed:
            outcome = self._removals.pop(name)
        if isinstance(outcome, EngineDied):
            raise outcome
        if isinstance(outcome, messages.Removed) and outcome.errno is not None:
            raise StorageError(
                f"rank {self.rank} can't remove {name}: {os.strerror(outcome.errno)}", path=name, errno=outcome.errno
            )

    @property
    def _removing(self) -> bool:
        return any(isinstance(outcome, EngineConnection) for outcome in self._removals.values())

    # -- called by the host -------------------------------------------------------------------------------------

    def standing(self) -> Iterator[tuple[messages.EngineMessage, tuple[int, ...]]]:
        """Yield the messages, with descriptors, that a new engine needs from this session."""
        if self._limits.cores:
            yield messages.UseCores(self._limits.cores), ()
        for image, (fd, nbytes) in self._images.items():
            yield messages.AddImage(image, nbytes), (fd,)
        for plan in self._plans.values():
            yield plan, ()

    def works_in(self, link: EngineConnection) -> bool:
        """Return True if an attempt of this session that was not given up is in progress on ``link``."""
        return any(record.link is link and record.in_work for record in self._attempts.values())

    def note(self, link: EngineConnection, message: messages.OfSession) -> None:
        """Handle an engine's message for this session."""
        if isinstance(message, messages.Removed):
            if self._removals.get(message.name) is link:
                self._removals[message.name] = message
            if message.errno is not None:
                what = os.strerror(message.errno)
                _log.warning("rank %d could not remove all of %s: %s", self.rank, message.name, what)
            return
        record = self._attempts.get(message.attempt)
        if record is not None and record.link is link:
            record.note(message)

    def lost(self, link: EngineConnection) -> None:
        """Handle the death of an engine."""
        death = told_to(self.rank, link.death)
        assert death is not None
        for name, outcome in self._removals.items():
            if outcome is link:
                self._removals[name] = death

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors."""
        self._let_go_of_images()

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

    def _raise_if_failed(self, record: AttemptProgress) -> None:
        with self._changed:
            if record.error is not None:
                raise record.error

    def _join(self) -> None:
        """Have the host keep the engine for this session; `_sending` is held. Raises `EngineDied` if closed."""
        if self._closed or os.getpid() != self._owner:
            state = "is closed" if self._closed else "belongs to the parent of this forked process"
            raise EngineDied(f"the engine of rank {self.rank} {state}", rank=self.rank)
        self._host.join(self)
        if self._limits.cores and not self._joined:
            self._host.tell(messages.UseCores(self._limits.cores))
        self._joined = True

    def _forget_old(self) -> None:
        ended = [name for name, record in self._attempts.items() if not record.in_work]
        for name in ended[: max(0, len(self._attempts) - KEPT_OUTCOMES)]:
            del self._attempts[name]

    # -- ending -------------------------------------------------------------------------------------------------

    def _close(self, timeout_s: float, *, give_up: bool) -> bool:
        if os.getpid() != self._owner or self._closed:
            return True
        self._closed = True
        deadline = time.monotonic() + timeout_s
        # The deadline of a stuck sender ends it; then the engine also sees the end of the socket.
        locked = self._sending.acquire(timeout=max(0.0, timeout_s))
        try:
            links = self._host.leave(self)
            if locked:
                self._tell_end(links)
        finally:
            if locked:
                self._sending.release()
        if links is None:
            ended = self._end_own(deadline, timeout_s, give_up=give_up)
        else:
            for link in links:
                _end(link, deadline, timeout_s, kill=give_up)
            ended = all(link.death is not None for link in links)
        self._let_go_of_images()
        self._plans.clear()
        self._host.forget(self)
        self._host.end_retired()
        self._stay_at_exit()
        return ended

    def _tell_end(self, links: list[EngineConnection] | None) -> None:
        """Tell the engine to end, or, if other sessions use it, to end this session's work."""
        if links is not None:
            for link in links:
                if link.usable:
                    link.send(messages.Shutdown())
            return
        for record in self._attempts.values():
            if record.in_work and not record.verified:
                record.link.send(messages.Cancel(record.name, self.number))
        for image in self._images:
            self._host.tell_all(messages.DropImage(image))
        for plan in self._plans:
            self._host.tell_all(messages.DropPlan(plan))

    def _end_own(self, deadline: float, timeout_s: float, *, give_up: bool) -> bool:
        """Wait until this session has no work in progress in an engine shared with others."""

        def left() -> list[AttemptProgress]:
            return [record for record in self._attempts.values() if record.in_work]

        with self._changed:
            ended = self._changed.wait_for(lambda: not left() and not self._removing, deadline - time.monotonic())
            late = left()
        if give_up:
            for record in late:
                self._give_up(record, timeout_s)
            with self._changed:
                self._changed.notify_all()
        return ended or give_up

    def _let_go_of_images(self) -> None:
        while self._images:
            _, (fd, _) = self._images.popitem()
            os.close(fd)


def _end(link: EngineConnection, deadline: float, timeout_s: float, *, kill: bool) -> None:
    """Wait for the end of an engine that was told to leave; kill a late one, or leave it to itself."""
    if not link.join(deadline - time.monotonic()):
        if kill:
            link.end(f"did not leave within {timeout_s:g} s")
        else:
            link.leave()
        link.join(LINGER_S + REAP_S)


def _place(target: int | WriterTarget) -> tuple[tuple[int, ...], tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return the descriptors that tell of ``target``, and module, arguments and paths of its writer."""
    if isinstance(target, int):
        return (target,), ("", (), ())
    return (), (target.module, target.args, target.paths)


def _umask() -> int:
    """Return the file mode creation mask of this process, read without changing it if the system allows."""
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
