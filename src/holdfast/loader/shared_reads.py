"""Carry out this rank's part of a sharing plan: read what it owns for all, receive the rest, read what it alone wants.

`SharedReads` stands in the place of a `FileSet`: it gathers what a load reads, says which extents that is, and then
does it. Its units go by in the order of the plan, on a few threads each for those it owns and those it receives, and
for what it alone wants:

    own       read the unit, send it to all who want it, verify it, take what this rank wants of it
    receive   receive the unit, verify it, take what this rank wants of it

A unit that one destination wants whole is read or received straight into it; any other passes through a buffer.

Guarantees: what arrives is verified by the rank that takes it, as if it had read it. If a peer is silent for
``stall_s``, or has ended, or a unit can't be read, the links are ended, and this rank reads all that it lacks itself:
so do the others, since theirs end too. A unit that is corrupt is sent as it is: all who want it see that. Buffers take
`MEMORY_BYTES_MAX` or less. When `read_all` returns or raises, nothing is written into destinations any more.
Assumes: all ranks carry out the same plan, with links of their own.
Does not: decide what is shared (``loader.read_once``).
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.coordination.links import LinkLost, PeerLate
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, HoldfastError, StorageError
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.plan.sharing import UNIT_EXTENTS_MAX, merged_runs
from holdfast.storage.ranged_reads import RangedRead, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.coordination.links import Links, TransferHandle
    from holdfast.loader.read import BufferedJob
    from holdfast.plan.sharing import ExtentRun
    from holdfast.storage.files import StoredFile
    from holdfast.storage.ranged_reads import FileSet

UNIT_BYTES_MAX: Final = UNIT_EXTENTS_MAX * EXTENT_BYTES
OWN_AT_A_TIME_MAX: Final = 8
RECEIVES_AT_A_TIME: Final = 6
WINDOW_BYTES: Final = 64 << 20
"""How far units that jobs wait for may be ahead of the first that has not come: those between are kept."""
KEPT_BYTES_MAX: Final = 80 << 20
"""Limit of the units that are kept because a job that needs them needs others too, which have yet to come.

Jobs whose bytes lie next to each other never reach it.
"""
MEMORY_BYTES_MAX: Final = 256 << 20
"""Limit of all buffers: of kept units, of units to receive, and of those that are sent."""


@dataclass(frozen=True, slots=True)
class RankUnit:
    """A unit of the plan that this rank reads or receives; ``peers``: who it is sent to, none where it is received."""

    number: int
    run: ExtentRun
    owner: int
    peers: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Job:
    """A job that reads by way of a buffer, and the tasks whose bytes it needs."""

    run: BufferedJob
    file: str = ""
    start: int = 0
    """Where in the file it begins to read, if it reads one file in its order."""
    tasks: list[_Task] = field(default_factory=list)
    lacking: int = 0
    """Tasks that have yet to come."""
    is_over: bool = False
    is_left: bool = False
    """It is done last, by itself, for there was no room to keep what it needs."""


@dataclass(slots=True, eq=False)
class _Task:
    """Bytes ``start`` to ``end`` of a file on their way to what wants them on this rank.

    ``owner``: None for what is neither sent nor received.
    """

    name: str
    start: int
    end: int
    number: int = 0
    owner: int | None = None
    peers: tuple[int, ...] = ()
    pieces: list[RangedRead] = field(default_factory=list)
    jobs: list[_Job] = field(default_factory=list)
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    is_done: bool = False
    """Its pieces are filled."""
    at: int = 0
    """Bytes of this rank's units before it."""
    is_past: bool = False
    """Its thread is done with it, well or not."""
    users: int = 1
    """Jobs that have yet to read it, and the thread that is at it."""
    buffer: torch.Tensor | None = None
    is_kept: bool = False


class SharedReads:
    """Gathers reads of ``files`` until `read_all` does them; ``known``: all files there are, the same on every rank."""

    def __init__(self, files: FileSet, known: Mapping[str, StoredFile]) -> None:
        self._files = files
        self._names = sorted(known)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self.sizes = [max(0, known[name].size) for name in self._names]
        self._pieces: dict[str, list[RangedRead]] = {}
        self._jobs: list[_Job] = []
        self._held = threading.local()
        self.bytes_received = 0

    # as a `FileSet` ----------------------------------------------------------------------------------------------

    @property
    def gap_bytes_max(self) -> int:
        return self._files.gap_bytes_max

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read from storage."""
        return self._files.bytes_read

    @property
    def names(self) -> Sequence[str]:
        """Names of the known files, by number."""
        return self._names

    def is_hashed(self, name: str) -> bool:
        return self._files.is_hashed(name)

    def jobs_for(
        self, name: str, pieces: Sequence[RangedRead], others: Sequence[tuple[int, Any]] = ()
    ) -> list[Callable[[], None]]:
        """Keep ``pieces`` for `read_all`, and ``others``, each a `BufferedJob`; as `FileSet.jobs_for`."""
        assert name not in self._pieces, "the pieces of a file come together"
        self._pieces[name] = [piece for piece in pieces if piece.memory]
        self._jobs.extend(_Job(job, name, start) for start, job in others)
        return []

    def read(self, work: Iterable[Any]) -> None:
        """Keep ``work``, each a `BufferedJob`, for `read_all`."""
        self._jobs.extend(_Job(job) for job in work)

    def read_span(self, name: str, start: int, end: int) -> memoryview:
        return self._taken(name, ((start, end),)) or self._files.read_span(name, start, end)

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview:
        return self._taken(name, runs) or self._files.read_runs(name, runs)

    def _taken(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview | None:
        """Return bytes of the units that the present job needs; None where it has been given none."""
        tasks: list[_Task] = getattr(self._held, "tasks", [])
        if not tasks:
            return None
        if len(runs) == 1 and len(tasks) == 1 and tasks[0].name == name:
            task, (start, end) = tasks[0], runs[0]
            return task.memory[start - task.start : end - task.start]
        starts = [(task.name, task.start) for task in tasks]
        taken = memoryview(bytearray(sum(end - start for start, end in runs)))
        to = 0
        for start, end in runs:
            at = start
            while at < end:
                task = tasks[bisect_right(starts, (name, at)) - 1]
                some = min(end, task.end) - at
                taken[to : to + some] = task.memory[at - task.start : at - task.start + some]
                at, to = at + some, to + some
        return taken

    # what is wanted, and how it comes ----------------------------------------------------------------------------

    def wanted(self) -> tuple[ExtentRun, ...]:
        """Return the extents of which anything is wanted; what lies outside of a file is left to whoever reads it."""
        return merged_runs(self._spans())

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        for name, pieces in self._pieces.items():
            if (number := self._numbers.get(name)) is not None:
                size = self.sizes[number]
                for piece in pieces:
                    if piece.end <= size:
                        yield number, piece.start, piece.end
        for job in self._jobs:
            yield from self._needs(job.run)

    def _needs(self, job: BufferedJob) -> Iterator[tuple[int, int, int]]:
        for name, start, end in job.needs():
            number = self._numbers.get(name)
            if number is not None and end <= self.sizes[number]:
                yield number, start, end

    def read_all(self, units: Sequence[RankUnit], links: Links | None, rank: int, *, stall_s: float) -> str:
        """Read, send and receive everything; returns why this rank has read for itself what others should have sent.

        units: this rank's part of the plan, in order. Raises `CheckpointCorrupt`, `StorageError`.
        """
        if links is None:
            units = ()
        tasks = self._tasks_of(units)
        jobs, loose = self._attached(tasks)
        rest = self._cut_pieces(tasks)
        in_order = sorted((task for of_file in tasks.values() for task in of_file), key=self._place_of)
        work = _Exchange(self._files, self._held, links, stall_s, in_order)
        alone = self._jobs_of(rest, loose)
        own = [task for task in in_order if task.owner in (rank, None)]
        others = [task for task in in_order if task.owner not in (rank, None)]
        try:
            with work.going_on(own, others, min(self._files.threads, OWN_AT_A_TIME_MAX)):
                try:
                    self._files.read(alone)
                except (CheckpointCorrupt, StorageError) as error:
                    work.note(error)  # the other ranks still need our units
        finally:
            self.bytes_received += work.bytes_received
        self._read_left(in_order, jobs, work)
        return work.broken

    def _read_left(self, tasks: Sequence[_Task], jobs: Sequence[_Job], work: _Exchange) -> None:
        """Read what units should have brought; raises the first error instead, if there was one."""
        if work.error is not None:
            raise work.error
        left: dict[str, list[RangedRead]] = {}
        for task in tasks:
            if not task.is_done and task.pieces:
                left.setdefault(task.name, []).extend(task.pieces)
        again = self._jobs_of(left, [job for job in jobs if not job.is_over])
        if again:
            self._files.read(again)

    def _jobs_of(self, pieces: Mapping[str, Sequence[RangedRead]], jobs: Sequence[_Job]) -> list[Callable[[], None]]:
        """Return the jobs that this rank does by itself, each file in its order."""
        others: dict[str, list[tuple[int, Callable[[], None]]]] = {name: [] for name in pieces}
        for job in jobs:
            others.setdefault(job.file, []).append((job.start, job.run))
        anywhere = [run for _, run in others.pop("", [])]
        of_files = [self._files.jobs_for(name, pieces.get(name, ()), others[name]) for name in others]
        return [*(job for of_file in of_files for job in of_file), *anywhere]

    def _place_of(self, task: _Task) -> tuple[int, int]:
        return self._numbers[task.name], task.start

    def _tasks_of(self, units: Sequence[RankUnit]) -> dict[str, list[_Task]]:
        """Return the tasks of each file, sorted by start."""
        tasks: dict[str, list[_Task]] = {}
        for unit in units:
            file, first, stop = unit.run
            name, end = self._names[file], min(stop * EXTENT_BYTES, self.sizes[file])
            task = _Task(name, first * EXTENT_BYTES, end, unit.number, unit.owner, unit.peers)
            tasks.setdefault(name, []).append(task)
        return tasks

    def _attached(self, tasks: dict[str, list[_Task]]) -> tuple[list[_Job], list[_Job]]:
        """Give the jobs that need shared units to these, with tasks for what else they need; returns them, and others.

        Where nothing is shared, no job is given away: a job reads for itself as well as we could.
        """
        shared = {name: ([task.start for task in of_file], of_file) for name, of_file in tasks.items()}
        attached: list[_Job] = []
        loose: list[_Job] = []
        apart: list[tuple[int, int, int]] = []
        for job in self._jobs:
            needs = list(job.run.needs()) if tasks else []
            known = list(self._needs(job.run)) if tasks else []
            meets = (True for name, start, end in needs for _ in _meeting(shared.get(name), start, end))
            if len(known) == len(needs) and any(meets):
                attached.append(job)
                apart.extend(known)
            else:
                loose.append(job)
        for file, first, stop in merged_runs(apart):
            name, size = self._names[file], self.sizes[file]
            for start, end in _outside(shared.get(name), first * EXTENT_BYTES, min(stop * EXTENT_BYTES, size)):
                tasks.setdefault(name, []).append(_Task(name, start, end))
        for of_file in tasks.values():
            of_file.sort(key=lambda task: task.start)
        shared = {name: ([task.start for task in of_file], of_file) for name, of_file in tasks.items()}
        for job in attached:
            met = {
                id(task): task
                for name, start, end in job.run.needs()
                for task in _meeting(shared.get(name), start, end)
            }
            job.tasks = sorted(met.values(), key=lambda task: (task.name, task.start))
            job.lacking = len(job.tasks)
            for task in job.tasks:
                task.jobs.append(job)
                task.users += 1
        return attached, loose

    def _cut_pieces(self, tasks: Mapping[str, list[_Task]]) -> dict[str, list[RangedRead]]:
        """Give each task the pieces, or the parts of them, that it has the bytes of; returns the rest by file."""
        rest: dict[str, list[RangedRead]] = {}
        for name, pieces in self._pieces.items():
            of_file = tasks.get(name)
            if of_file is None:
                rest[name] = pieces
                continue
            at = 0
            kept = rest[name] = []
            for piece in pieces:
                start = piece.start
                while start < piece.end:
                    while at < len(of_file) and of_file[at].end <= start:
                        at += 1
                    task = of_file[at] if at < len(of_file) else None
                    is_in = task is not None and task.start <= start
                    stop = piece.end if task is None else min(piece.end, task.end if is_in else task.start)
                    part = RangedRead(start, piece.memory[start - piece.start : stop - piece.start])
                    (task.pieces if task is not None and is_in else kept).append(part)
                    start = stop
        return rest


_Index = tuple[list[int], list[_Task]]
"""Starts of tasks, and the tasks, of one file."""


def _meeting(index: _Index | None, start: int, end: int) -> Iterator[_Task]:
    """Yield the tasks that have any of the bytes ``start`` to ``end``."""
    if index is None:
        return
    starts, tasks = index
    for task in tasks[max(0, bisect_right(starts, start) - 1) :]:
        if task.start >= end:
            return
        if task.end > start:
            yield task


def _outside(index: _Index | None, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield what no task has of the bytes ``start`` to ``end``, at most `UNIT_BYTES_MAX` at a time."""
    gaps = []
    for task in _meeting(index, start, end):
        if task.start > start:
            gaps.append((start, task.start))
        start = max(start, task.end)
    for gap, stop in (*gaps, (start, end)):
        for at in range(gap, stop, UNIT_BYTES_MAX):
            yield at, min(stop, at + UNIT_BYTES_MAX)


_AT_ONCE_S: Final = 0.001
_LOOK_S: Final = 1.0


class _Broken(Exception):
    """The exchange has ended before it was done."""


class _Exchange:
    """The threads of one `read_all`, and what they share."""

    def __init__(
        self,
        files: FileSet,
        held: threading.local,
        links: Links | None,
        stall_s: float,
        in_order: Sequence[_Task],
    ) -> None:
        self._files = files
        self._held = held
        self._links = links
        self._stall_s = stall_s
        self._unit_bytes = max((task.end - task.start for task in in_order), default=0)
        self._lock = threading.Condition(threading.Lock())
        """Told of when a task is past, or the exchange is broken."""
        self._in_order = in_order
        self._first = 0
        """The first task that is not past."""
        at = 0
        for task in in_order:
            task.at, at = at, at + task.end - task.start
        self._large = threading.Lock()
        """Held by jobs that put bytes of several units together: one copy at a time."""
        self._free: list[torch.Tensor] = []
        self._kept_bytes = 0
        self.bytes_received = 0
        self.error: BaseException | None = None
        """The first error of reading or verifying."""
        self.broken = ""
        """Why the exchange has ended early."""

    @contextlib.contextmanager
    def going_on(self, own: Sequence[_Task], others: Sequence[_Task], threads: int) -> Iterator[None]:
        """Do the tasks on other threads; leaving it waits for them, and raises nothing of theirs."""
        groups = ((own, self._read, threads), (others, self._receive, RECEIVES_AT_A_TIME))
        ended: list[threading.Event] = []
        try:
            for tasks, act, count in groups:
                if tasks:
                    ended.append(self._begin(tasks, act, count))
            yield
        except BaseException as error:
            # Without what this rank owns the others can't go on: they are told, and needn't wait.
            self._break(f"it failed with {type(error).__name__}")
            raise
        finally:
            for end in ended:
                end.wait()
            self._free.clear()

    def _begin(self, tasks: Sequence[_Task], act: Callable[[_Task], None], count: int) -> threading.Event:
        end = threading.Event()

        def step(task: _Task) -> Callable[[], None]:
            return lambda: self._do(task, act)

        def work() -> None:
            try:
                take_turns(map(step, tasks), count)
            except _Broken:
                pass
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                self.note(error)
                self._break(f"it failed with {type(error).__name__}")
            finally:
                end.set()

        thread = threading.Thread(target=work, name="holdfast-share", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            end.set()
            self._break(f"no thread could be started: {error}")
        return end

    def _do(self, task: _Task, act: Callable[[_Task], None]) -> None:
        if self.broken:
            raise _Broken
        try:
            with torch.no_grad():
                act(task)
        except (LinkLost, PeerLate) as error:
            self._break(str(error) if task.owner is None else f"rank {task.owner}: {error}")
            raise _Broken from error

    def _break(self, why: str) -> None:
        with self._lock:
            if self.broken or self._links is None:
                return
            self.broken = why
            self._lock.notify_all()
        self._links.abort()

    def note(self, error: BaseException) -> None:
        """Keep the first error."""
        with self._lock:
            self.error = self.error or error

    # one task ----------------------------------------------------------------------------------------------------

    def _read(self, task: _Task) -> None:
        memory = self._memory_for(task)
        try:
            self._files.read_unverified(task.name, task.start, task.memory)
            self._send(task, memory)
        except (CheckpointCorrupt, StorageError) as error:
            self.note(error)
            if task.peers:  # they wait for what will not come, and find out for themselves
                self._break(f"a unit could not be read: {error}")
                raise _Broken from error
        finally:
            self._pass(task)
            self._wait_near(task)
            self._release(task)

    def _send(self, task: _Task, memory: torch.Tensor) -> None:
        sends: list[TransferHandle] = []
        lost: HoldfastError | None = None
        try:
            for peer in task.peers:
                assert self._links is not None
                sends.append(self._links.send(peer, memory, task.number))
        except LinkLost as error:
            lost = error
        self._take(task)
        self._pass(task)
        for send in sends:  # also of those that are lost: what is being sent must stay as it is until then
            try:
                send.wait(self._stall_s if lost is None else _AT_ONCE_S)
            except (LinkLost, PeerLate) as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _receive(self, task: _Task) -> None:
        assert self._links is not None
        assert task.owner is not None
        self._wait_near(task)
        memory = self._memory_for(task)
        try:
            self._links.receive(task.owner, memory, task.number).wait(self._stall_s)
            with self._lock:
                self.bytes_received += len(task.memory)
            self._take(task)
        finally:
            self._pass(task)
            self._release(task)

    def _pass(self, task: _Task) -> None:
        with self._lock:
            task.is_past = True
            while self._first < len(self._in_order) and self._in_order[self._first].is_past:
                self._first += 1
            self._lock.notify_all()

    def _wait_near(self, task: _Task) -> None:
        """Wait until a task that jobs wait for is in the window: what it brings has to be kept for them.

        No rank waits here for the first unit that not all have done: it is in the window of all who want it.
        """
        if not task.jobs:
            return
        with self._lock:
            while not self.broken and self._first < len(self._in_order):
                if task.at - self._in_order[self._first].at <= WINDOW_BYTES:
                    return
                self._lock.wait(_LOOK_S)

    def _take(self, task: _Task) -> None:
        """Verify what has come, and give this rank's destinations their parts of it."""
        try:
            self._files.check(task.name, task.start, task.memory)
            if task.buffer is not None:
                for start, memory in task.pieces:
                    copy_bytes(memory, task.memory[start - task.start : start - task.start + len(memory)])
            task.is_done = True
            for job in self._ready(task):
                self._run(job)
        except Exception as error:  # noqa: BLE001 - raised by `read_all`; the other ranks still need our units
            self.note(error)

    def _ready(self, task: _Task) -> list[_Job]:
        """Return the jobs that lacked nothing but this task."""
        ready = []
        with self._lock:
            for job in task.jobs:
                job.lacking -= 1
                if not job.lacking and not job.is_left:
                    ready.append(job)
        return ready

    def _run(self, job: _Job) -> None:
        with self._large if len(job.tasks) > 1 else contextlib.nullcontext():
            self._held.tasks = job.tasks
            try:
                job.run()
            finally:
                self._held.tasks = []
        job.is_over = True
        with self._lock:
            for task in job.tasks:
                self._end_use(task)

    # buffers -----------------------------------------------------------------------------------------------------

    def _memory_for(self, task: _Task) -> torch.Tensor:
        """Give a task its memory: that of the only destination, or a buffer."""
        nbytes = task.end - task.start
        if len(task.pieces) == 1 and len(task.pieces[0].memory) == nbytes and not task.jobs:
            task.memory = task.pieces[0].memory
            return torch.frombuffer(task.memory, dtype=torch.uint8)
        with self._lock:
            buffer = self._free.pop() if self._free else None
        task.buffer = torch.empty(self._unit_bytes, dtype=torch.uint8) if buffer is None else buffer
        task.memory = compat.host_memory(task.buffer)[:nbytes]
        return task.buffer[:nbytes]

    def _release(self, task: _Task) -> None:
        """End the thread's use of a task; what jobs still wait for is kept, or they are left for later."""
        with self._lock:
            if task.users > 1 and self._kept_bytes + self._unit_bytes > KEPT_BYTES_MAX:
                for job in task.jobs:
                    if job.lacking and not job.is_left:
                        job.is_left = True
                        for needed in job.tasks:
                            self._end_use(needed)
            if task.users > 1:
                task.is_kept = True
                self._kept_bytes += self._unit_bytes
            self._end_use(task)

    def _end_use(self, task: _Task) -> None:
        """Take the buffer back after the last use. With the lock."""
        task.users -= 1
        if task.users or task.buffer is None:
            return
        if task.is_kept:
            task.is_kept = False
            self._kept_bytes -= self._unit_bytes
        self._free.append(task.buffer)
        task.buffer, task.memory = None, memoryview(b"")
