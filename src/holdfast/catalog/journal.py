"""The journal of a root: what its runs did, one JSON object a line, written as it happens. Torch-free.

    ROOT/.holdfast/journal.jsonl           appended to by rank 0 of the manager that holds the root's lock
    ROOT/.holdfast/journal.old.jsonl       what it was before it was over 8 MiB
    ROOT/.holdfast/journal/{run}.jsonl     on an object store: one object a run, put whole

    manager -> `Journal.note`, hooks -> `Journal.hear` -> queue -> a thread, while it is needed -> one `write` a line
    readers -> `read_journal`; those that follow -> `JournalTail`

Guarantees: `note`, `hear` and `step` append to a queue, and never raise or wait: no save fails, or is late, because of
the journal. What can't be written, or comes faster than it is, is dropped and counted (``journal_dropped`` of
`holdfast.statistics`). Bounded in memory and in the storage. A line that is torn, or isn't JSON, is no obstacle to
readers, and none to the next writer.
Assumes: one writer a root, which holds its lock; and, now and then, one that has verified something.
Does not: sync. What was written survives the death of the process, not a power cut. A store has what happened up to
30 seconds ago.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import queue
import secrets
import socket
import stat
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast import events
from holdfast._version import __version__
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.locks import DIRECTORY
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.protocol import AnswersRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.catalog.retention import Keep
    from holdfast.events import Event
    from holdfast.storage.protocol import Readable, Storage

_log = logging.getLogger("holdfast")

VERSION: Final = 1
FILE: Final = f"{DIRECTORY}/journal.jsonl"
OLD_FILE: Final = f"{DIRECTORY}/journal.old.jsonl"
RUNS: Final = f"{DIRECTORY}/journal"
FILE_BYTES_MAX: Final = 8 << 20
OBJECT_BYTES_MAX: Final = 1 << 20
OBJECTS_MAX: Final = 64
"""How many runs are kept on an object store; a run of more than `PUT_EVERY_S` removes the others."""
LINE_BYTES_MAX: Final = 64 << 10
QUEUED_MAX: Final = 4096
PUT_EVERY_S: Final = 30.0
STEP_EVERY_S: Final = 30.0
CLOSE_S: Final = 2.0
"""How long `Journal.close` waits for what is queued."""
RECEIVERS_AFTER_S: Final = 1.0
RECEIVERS_EVERY_S: Final = 30.0
RECEIVER_S: Final = 0.25
"""For how long a receiver's version is the last that is written: very many must not use up the journal."""
RECEIVER_CHARS_MAX: Final = 64
RANKS_MAX: Final = 512
MESSAGE_CHARS_MAX: Final = 1000
NAMES_MAX: Final = 20
CUT: Final = "journal.cut"
"""Kind of the line that stands for those that were dropped, with the time of the newest of them."""
VERIFIED: Final = "verify"
NO_RUN: Final = ""
"""The run of lines that no manager wrote, which say nothing of a run."""
_CUT_BYTES_MAX: Final = 200
_TAIL_BYTES_MAX: Final = FILE_BYTES_MAX + (1 << 20)
"""More of a file isn't read."""
_HEAD_BYTES: Final = 256
"""Enough of a file's first line to tell it from any other: its time and run."""
_BEGINNINGS: Final = frozenset(("run.resumed", "step"))
_TIME_END: Final = 1e11
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FIGURES: Final = ("nbytes", "stall_s", "staging_s", "persist_s", "commit_s")
_STALL_AT: Final = 2
"""Where in a row of ``ranks`` its seconds begin."""


class RunConfig(Protocol):
    """The part of a manager's configuration that the journal tells."""

    @property
    def every(self) -> int | None: ...

    @property
    def mode(self) -> str: ...

    @property
    def staging(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def keep(self) -> Keep | None: ...


class Sink(Protocol):
    """Where lines go. Methods are called on the journal's thread, and raise `OSError` or `HoldfastError`."""

    def add(self, line: bytes) -> None: ...

    def flush(self, *, last: bool) -> float | None:
        """Write what is due; return the seconds until more is, None if nothing is left."""
        ...


class Journal:
    """The journal of one manager's life. `note`, `hear`, `step` and `close` may be called from any thread."""

    def __init__(self, storage: Storage, config: RunConfig, *, world: int) -> None:
        """config: some of it is told. world: number of ranks."""
        self.run = f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"
        """Hexadecimal; later runs sort behind earlier ones."""
        self._root = storage.root
        self.exports: tuple[str, ...] = ()
        """Roots whose exports are of this run, too."""
        self._sink = _sink_of(storage, self.run)
        self._owner = os.getpid()
        self._queue: queue.SimpleQueue[tuple[float, str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._is_started = False
        self._works = threading.Lock()
        """Held while there is a thread: it ends when nothing is left to write. Never waited for."""
        self._ended = threading.Event()
        self._next_step_at = -math.inf
        self._last_step: int | None = None
        self._receivers: deque[tuple[str, int | None, float | None]] = deque(maxlen=QUEUED_MAX)
        """What receivers have told since this was written last."""
        self._receivers_at = -math.inf
        """When it is to be written again."""
        self._closed = self._complained = False
        self.how = "closed"
        """How the run ended, for `close`."""
        self._stop_hearing: Callable[[], None] = lambda: None
        if self._sink is not None:
            self.note("run.started", **_start(config, world))
            self._stop_hearing = events.add_hook(self.hear)

    def start(self) -> None:
        """Write what was noted so far, and what follows, until `close`."""
        self._is_started = True
        self._wake()

    def _wake(self) -> None:
        """See to it that a thread writes what is queued."""
        if self._sink is None or not self._is_started or not self._works.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._work, name="holdfast-journal", daemon=True).start()
        except RuntimeError as error:
            _log.warning("no thread can be started for the journal of %s: %s", self._root, error)
            self._stop_hearing()
            self._sink = None

    def note(self, kind: str, **fields: Any) -> None:
        """Append a line of ``kind``; fields: of JSON's types. Costs an append to a queue, and the start of a thread."""
        if self._sink is None or self._closed:
            return
        if self._queue.qsize() >= QUEUED_MAX:
            events.count("journal_dropped")
            return
        self._queue.put((time.time(), kind, fields))
        self._wake()

    def step(self, step: int) -> None:
        """Note that training is at ``step``; written at most every 30 seconds, and at the end."""
        self._last_step = step
        now = time.monotonic()
        if now >= self._next_step_at:
            self._next_step_at = now + STEP_EVERY_S
            self.note("step", step=step)

    def hear(self, event: Event) -> None:
        """Note ``event``, if it is of this root: a hook of `holdfast.events`."""
        if os.getpid() != self._owner:
            return
        if event.kind in ("version.received", "receiver.left"):
            self._hear_receiver(event)
            return
        told = _TOLD.get(event.kind)
        if told is None or event.rank not in (0, None) or not self._is_of_root(event):
            return
        kind, fields = told(event)
        self.note(kind, **fields)

    def _hear_receiver(self, event: Event) -> None:
        """Remember which version a receiver has, None once it has left; written with others, a second later."""
        receiver = str(event.fields.get("receiver"))[:RECEIVER_CHARS_MAX]
        if not self._receivers:
            self._receivers_at = max(self._receivers_at, time.monotonic() + RECEIVERS_AFTER_S)
        self._receivers.append((receiver, event.step, event.fields.get("seconds")))
        self._wake()

    def _note_receivers(self) -> None:
        """Note the last that was heard of each receiver."""
        rows = {}
        with contextlib.suppress(IndexError):  # `close` and the thread may both be at it
            while True:
                row = self._receivers.popleft()
                rows[row[0]] = row
        told = list(rows.values())
        self._receivers_at = time.monotonic() + max(RECEIVERS_EVERY_S, len(told) * RECEIVER_S)
        for at in range(0, len(told), RANKS_MAX):
            self.note("version.received", receivers=told[at : at + RANKS_MAX])

    def close(self) -> None:
        """Note `how` the run ended, and write what is queued, for at most `CLOSE_S`; idempotent."""
        if self._closed or os.getpid() != self._owner:
            return
        self._stop_hearing()
        self._note_receivers()
        if self._last_step is not None:
            self.note("step", step=self._last_step)
        self.note("run.ended", how=self.how)
        self._closed = True
        self._queue.put(None)
        self._wake()
        if self._sink is not None and self._is_started and not self._ended.wait(CLOSE_S):
            _log.warning("the journal of %s is not written to its end: the storage hangs, or is slow", self._root)

    def _is_of_root(self, event: Event) -> bool:
        if event.path is None or event.kind.startswith("version."):
            return True
        roots = self.exports if event.kind.startswith("export.") else (self._root,)
        return any(event.path == root or event.path.startswith(f"{root}/") for root in roots)

    # Its thread. -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            last = self._write_all()
            self._works.release()
            if last:
                self._ended.set()
            if last or not (self._queue.qsize() or self._receivers) or not self._works.acquire(blocking=False):
                return

    def _write_all(self) -> bool:
        """Write what is queued, and what is due later; return True at the end of the run."""
        sink, last = self._sink, False
        assert sink is not None
        wait_s: float | None = 0.0
        while wait_s is not None and not last:
            with contextlib.suppress(queue.Empty):
                entry = self._queue.get(timeout=wait_s)
                last = entry is None
                if entry is not None:
                    self._add(sink, *entry)
                    if not self._queue.empty():
                        continue
            try:
                wait_s = sink.flush(last=last)
            except (OSError, HoldfastError) as error:
                wait_s = PUT_EVERY_S
                self._complain(error)
            if self._receivers and not last:
                due_s = self._receivers_at - time.monotonic()
                if due_s <= 0:
                    self._note_receivers()
                wait_s = max(0.0, due_s if wait_s is None else min(wait_s, due_s))
        return last

    def _add(self, sink: Sink, t: float, kind: str, fields: Mapping[str, Any]) -> None:
        try:
            sink.add(render({"v": VERSION, "t": round(t, 6), "run": self.run, "kind": kind, **fields}))
        except (OSError, HoldfastError, ValueError, TypeError) as error:
            events.count("journal_dropped")
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("the journal of %s misses lines: %s; saves are not affected", self._root, error)


def _start(config: RunConfig, world: int) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "world": world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "holdfast": __version__,
        "torch": None if torch is None else str(torch.__version__),
        "resumed_from": None,
        "steps_lost": None,
        "config": {
            **{name: getattr(config, name) for name in ("every", "mode", "staging", "in_flight")},
            "keep": None if config.keep is None else asdict(config.keep),
        },
    }


def _sink_of(storage: Storage, run: str) -> Sink | None:
    """Return where the journal of ``storage`` goes; None for a storage that is no directory and answers no requests."""
    if isinstance(storage, AnswersRequests):
        return ObjectSink(storage, run)
    return FileSink(storage.root) if os.path.isabs(storage.root) else None


class FileSink:
    """`Sink` in the directory ``.holdfast`` of a root, which the lock has made; opened for each batch of lines."""

    def __init__(self, root: str) -> None:
        self._path, self._old = os.path.join(root, FILE), os.path.join(root, OLD_FILE)
        self._fd = -1

    def add(self, line: bytes) -> None:
        if self._fd < 0:
            self._fd = self._opened()
        written = os.write(self._fd, line)
        if written < len(line):
            self.flush(last=False)  # the next line begins with a newline
            raise OSError(errno.ENOSPC, "only a part of a line could be written", self._path)

    def flush(self, *, last: bool) -> float | None:
        del last
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return None

    def _opened(self) -> int:
        fd = os.open(self._path, _FLAGS, 0o666)
        try:
            size = _size_of_plain(fd, self._path)
            if size and os.pread(fd, 1, size - 1) != b"\n":
                os.write(fd, b"\n")
            if size <= FILE_BYTES_MAX:
                return fd
            os.rename(self._path, self._old)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return os.open(self._path, _FLAGS | os.O_EXCL, 0o666)


def _size_of_plain(fd: int, path: str) -> int:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return found.st_size


class ObjectSink:
    """`Sink` on an object store: one object a run, put again as a whole, at most every `PUT_EVERY_S` and at the end.

    What becomes too much loses its ranks first, then its oldest lines, but for those that say how the run began.
    """

    def __init__(self, storage: Storage, run: str) -> None:
        self._storage = storage
        self._name = f"{RUNS}/{run}.jsonl"
        self._run = run
        self._head: list[bytes] = []
        """Never dropped: which run this is, what it resumed from, and its first step."""
        self._older, self._newer = _Lines(), _Lines()
        """Lines without ranks, and those after them, as they came."""
        self._dropped, self._dropped_t = 0, 0.0
        self._put_at = time.monotonic()
        self._is_new, self._dirty = True, False

    def add(self, line: bytes) -> None:
        self._dirty = True
        if not self._head:
            self._head.append(line)
            return
        self._newer.append(line)
        room = OBJECT_BYTES_MAX - sum(map(len, self._head)) - _CUT_BYTES_MAX
        while self._older.nbytes + self._newer.nbytes > room:
            if self._newer.nbytes > room // 2:
                self._older.append(_without_ranks(self._newer.popleft()))
            else:
                self._drop(self._older.popleft())

    def _drop(self, line: bytes) -> None:
        row = json.loads(line)
        kept = {json.loads(one)["kind"] for one in self._head} if row["kind"] in _BEGINNINGS else {"step"}
        if row["kind"] not in kept and "step" not in kept:
            self._head.append(line)
        else:
            self._dropped += 1
            self._dropped_t = row["t"]

    def _data(self) -> bytes:
        head = list(self._head)
        if self._dropped:
            head.append(
                render({"v": VERSION, "t": self._dropped_t, "run": self._run, "kind": CUT, "lines": self._dropped})
            )
        return b"".join((*head, *self._older.lines, *self._newer.lines))

    def flush(self, *, last: bool) -> float | None:
        left_s = self._put_at + PUT_EVERY_S - time.monotonic()
        if not self._dirty:
            return None
        if left_s > 0 and not last:
            return left_s
        self._put_at = time.monotonic()
        self._storage.replace_file(self._name, self._data(), by=f"{self._name}.part")
        self._dirty = False
        if self._is_new and not last:  # a short run leaves that to a longer one: an end is no time for requests
            self._is_new = False
            for name in sorted(self._storage.list_dir(RUNS))[:-OBJECTS_MAX]:
                self._storage.unlink(f"{RUNS}/{name}")
        return None


class _Lines:
    """Lines and how many bytes they have."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.nbytes = 0

    def append(self, line: bytes) -> None:
        self.lines.append(line)
        self.nbytes += len(line)

    def popleft(self) -> bytes:
        line = self.lines.popleft()
        self.nbytes -= len(line)
        return line


def _without_ranks(line: bytes) -> bytes:
    return render({**json.loads(line), "ranks": None}) if b'"ranks":[' in line else line


def render(line: Mapping[str, Any]) -> bytes:
    """Return ``line`` as JSON with its newline; without its ranks, metrics and tensors if it would be too long.

    Numbers that JSON doesn't know are null. Raises `ValueError` for a line that is too long all the same.
    """
    shorter = line
    for without in ((), ("ranks",), ("ranks", "metrics", "tensors")):
        shorter = {key: None if key in without else value for key, value in line.items()}
        data = json.dumps(_finite(shorter), separators=(",", ":"), default=str).encode() + b"\n"
        if len(data) <= LINE_BYTES_MAX:
            return data
    raise ValueError(f"a line of kind {line.get('kind')!r:.100} has more than {LINE_BYTES_MAX} bytes")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# What is told of each event. -----------------------------------------------------------------------------------------


def _of_save(event: Event) -> dict[str, Any]:
    return {"step": event.step, "attempt": event.attempt, "name": _name(event)}


def _name(event: Event) -> str | None:
    return None if event.path is None else event.path.rpartition("/")[2]


def _figures(event: Event) -> dict[str, Any]:
    fields = event.fields
    rows = fields.get("ranks")
    return {"began": fields.get("began_s"), "ranks": None if rows is None else slowest(rows)}


def slowest(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the ``rows`` of ranks, in order; of more than `RANKS_MAX` those of the slowest."""
    found = [list(row) for row in rows]
    if len(found) > RANKS_MAX:
        found.sort(key=lambda row: -sum(value or 0.0 for value in row[_STALL_AT : _STALL_AT + 3]))
        found = sorted(found[:RANKS_MAX])
    return found


def _published(event: Event) -> tuple[str, dict[str, Any]]:
    fields, kind_of = event.fields, "export" if event.kind.startswith("export.") else "checkpoint"
    figures = {name: fields.get(name) for name in _FIGURES}
    if rows := fields.get("ranks"):
        figures["nbytes"] = sum(row[-1] or 0 for row in rows)
    metrics = dict(fields.get("metrics") or {})
    return "save.published", {**_of_save(event), "kind_of": kind_of, **figures, "metrics": metrics, **_figures(event)}


def _failed(event: Event) -> tuple[str, dict[str, Any]]:
    fields, kind_of = event.fields, "export" if event.kind.startswith("export.") else "checkpoint"
    text = str(fields.get("error", ""))
    error = fields.get("error_class") or text.partition("(")[0]
    told = {"error": error, "message": str(fields.get("message") or text)[:MESSAGE_CHARS_MAX]}
    rank = fields.get("failed_rank")
    return "save.failed", {**_of_save(event), "kind_of": kind_of, **told, "rank": rank, **_figures(event)}


def _loaded(event: Event) -> tuple[str, dict[str, Any]]:
    fields = event.fields
    figures = {"seconds": fields.get("load_s"), "nbytes": fields.get("bytes_read")}
    return "load.finished", {"step": event.step, "name": _name(event), **figures}


def _recovered(event: Event) -> tuple[str, dict[str, Any]]:
    return "recovery", {"name": _name(event), "what": event.kind.partition(".")[2]}


_TOLD: Final[dict[str, Callable[[Event], tuple[str, dict[str, Any]]]]] = {
    "save.started": lambda event: ("save.started", _of_save(event)),
    "save.published": _published,
    "save.failed": _failed,
    "save.suspicious": lambda event: (
        "warning",
        {
            "what": event.fields.get("what"),
            "step": event.step,
            "tensors": list(event.fields.get("tensors", ()))[:NAMES_MAX],
            "message": str(event.fields.get("message"))[:MESSAGE_CHARS_MAX],
        },
    ),
    "save.skipped": lambda event: ("save.missed", {"step": event.step, "reason": "when_busy='skip'"}),
    "export.published": _published,
    "export.failed": _failed,
    "checkpoint.deleted": lambda event: (
        "checkpoint.deleted",
        {"step": event.step, "name": _name(event), "reason": "retention"},
    ),
    "load.finished": _loaded,
    "load.fallback": lambda event: (
        "load.fallback",
        {"step": event.step, "name": _name(event), "error": event.fields.get("error")},
    ),
    "recovery.rolled_forward": _recovered,
    "recovery.removed": _recovered,
    "recovery.restored": _recovered,
    "signal.received": lambda event: ("signal", {"signal": event.fields.get("signal")}),
    "version.published": lambda event: (
        "version.published",
        {"version": event.step, "step": event.fields.get("train_step"), "seconds": event.fields.get("seconds")},
    ),
}


# Who else writes. ----------------------------------------------------------------------------------------------------


def note_verified(path: str, step: int | None, problems: int) -> bool:
    """Append that the entry ``path`` of a root was verified, and how many problems were found; return whether it was.

    A line of no run, in one `write`, beside those of a manager. Only where a root in a directory has a journal,
    which may be written to; never raises for what the storage refuses.
    """
    root, _, name = path.rpartition("/")
    if not os.path.isfile(os.path.join(root, FILE)):
        return False
    line = {"v": VERSION, "t": round(time.time(), 6), "run": NO_RUN, "kind": VERIFIED}
    sink = FileSink(root)
    try:
        sink.add(render({**line, "name": name, "step": step, "problems": problems}))
    except (OSError, ValueError):
        return False
    finally:
        sink.flush(last=True)
    return True


# Readers. ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JournalLines:
    """What was read of a journal. skipped: how many lines are none; errors: of files that can't be read."""

    lines: list[dict[str, Any]]
    """In the order they were written, whatever the clock did."""
    skipped: int = 0
    errors: tuple[StorageError, ...] = ()


def read_journal(storage: Readable) -> list[dict[str, Any]]:
    """Return the lines of the journal of ``storage``, in the order they were written; empty if there is none.

    Lines that are torn, aren't JSON, or are of no kind are left out. Raises `StorageError`.
    """
    found = scan_journal(storage)
    if found.errors:
        raise found.errors[0]
    return found.lines


def scan_journal(storage: Readable) -> JournalLines:
    """Return what can be read of the journal of ``storage``, and what can't; never raises for what files hold or lack.

    In a directory, runs that were copied from an object store are read, too.
    """
    lines: list[dict[str, Any]] = []
    errors: list[StorageError] = []
    skipped = 0
    names = [] if isinstance(storage, AnswersRequests) else [OLD_FILE, FILE]
    try:
        names += [f"{RUNS}/{name}" for name in sorted(storage.list_dir(RUNS)) if name.endswith(".jsonl")]
    except StorageError as error:
        errors.append(error)
    for name in names:
        try:
            found, others = parse_lines(_tail(storage, name))
        except StorageError as error:
            errors.append(error)
            continue
        lines += found
        skipped += others
    return JournalLines(lines, skipped, tuple(errors))


def parse_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return those lines of ``data`` that are lines of a journal, and how many others there are."""
    found, others = [], 0
    for line in data.splitlines():
        row = _parsed(line)
        if row is not None:
            found.append(row)
        elif line.strip():
            others += 1
    return found, others


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{") or len(line) > LINE_BYTES_MAX:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(row.get("kind"), str) and isinstance(row.get("run"), str) and is_time(row.get("t"))
    return row if is_line else None


def is_time(value: object) -> bool:
    """Return True for seconds since the epoch that a calendar knows."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _TIME_END


def _tail(storage: Readable, name: str) -> bytes:
    """Return the end of a file, of as much as a journal may have: more is not one that was written here."""
    size = storage.size(name)
    if not size:
        return b""
    return storage.read_range(name, max(0, size - _TAIL_BYTES_MAX), min(size, _TAIL_BYTES_MAX))


class JournalTail:
    """Reads what is added to the journal of a storage, each line once, whatever the clocks do. For one thread.

    In a directory it goes on where it was; once that file is `OLD_FILE`, its rest comes first. Run by run it reads
    objects that have changed, of which `CUT` counts what was dropped. It misses lines that are dropped, or put aside
    twice, between two looks.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._begun = False
        self._head, self._at = b"", 0
        """How the file begins that is written to, and where the last line ends that was read of it."""
        self._runs: dict[str, tuple[object, int]] = {}
        """What changes with the object of each run, and how many lines it has had."""

    def added(self) -> list[dict[str, Any]]:
        """Return the lines added since the call before, none at first. Raises `StorageError`; the next has them."""
        head, at = b"", 0
        rows: list[dict[str, Any]] = []
        if not isinstance(self._storage, ObjectStorage):
            head = self._head_of(FILE)
            if self._begun:
                at, rows = self._added_to_file(head)
            else:
                at = self._last_line_of_file()
        runs, of_runs = self._added_to_runs()
        rows = [*rows, *of_runs] if self._begun else []
        self._head, self._at, self._runs, self._begun = head, at, runs, True
        return rows

    def _head_of(self, name: str) -> bytes:
        return self._read(name, 0, _HEAD_BYTES)

    def _read(self, name: str, start: int, nbytes: int) -> bytes:
        """Return what a file has there, nothing where there is none."""
        size = self._storage.size(name) or 0
        return self._storage.read_range(name, start, min(nbytes, size - start)) if size > start else b""

    def _last_line_of_file(self) -> int:
        """Return where the last whole line ends."""
        start = max(0, (self._storage.size(FILE) or 0) - LINE_BYTES_MAX)
        return start + self._read(FILE, start, _TAIL_BYTES_MAX).rfind(b"\n") + 1

    def _added_to_file(self, head: bytes) -> tuple[int, list[dict[str, Any]]]:
        """Return how far the file that begins with ``head`` is read now, and its new lines, after the older one's."""
        at = self._at
        rows: list[dict[str, Any]] = []
        if not head.startswith(self._head):
            if self._head_of(OLD_FILE).startswith(self._head):
                rows = parse_lines(self._read(OLD_FILE, at, _TAIL_BYTES_MAX))[0]
            at = 0
        data = self._read(FILE, at, _TAIL_BYTES_MAX)
        whole = data.rfind(b"\n") + 1
        return at + whole, rows + parse_lines(data[:whole])[0]

    def _added_to_runs(self) -> tuple[dict[str, tuple[object, int]], list[dict[str, Any]]]:
        """Return the new state of `_runs`, and the new lines."""
        runs: dict[str, tuple[object, int]] = {}
        rows: list[dict[str, Any]] = []
        for name, now in self._objects():
            before, known = runs[name] = self._runs.get(name, (None, 0))
            if before == now:
                continue
            try:
                found = parse_lines(self._read(name, 0, _TAIL_BYTES_MAX))[0]
            except StorageError:
                if not self._begun:
                    raise
                continue  # it has gone, or the next look reads it
            lines = [row for row in found if row["kind"] != CUT]
            count = len(lines) + sum(_dropped(row) for row in found if row["kind"] == CUT)
            rows += lines[max(0, len(lines) - max(0, count - known)) :]
            runs[name] = now, count
        return runs, rows

    def _objects(self) -> Iterator[tuple[str, object]]:
        """Yield the name of each run's object, oldest first, and what changes with it."""
        listed: dict[str, object]
        if isinstance(self._storage, ObjectStorage):
            listed = {row.name: row[1:] for row in self._storage.list_tree(RUNS)}
        else:
            listed = {name: self._storage.size(f"{RUNS}/{name}") for name in self._storage.list_dir(RUNS)}
        for name in sorted(listed):
            if name.endswith(".jsonl"):
                yield f"{RUNS}/{name}", listed[name]


def _dropped(row: dict[str, Any]) -> int:
    return row["lines"] if isinstance(row.get("lines"), int) else 0
