"""A job of several ranks on threads, whose storage can stop it at any operation."""

from __future__ import annotations

import threading
import time

import xxhash

from holdfast.commit.attempt import Attempt, AttemptAborted, Deadlines, RankFailure
from holdfast.commit.recovery import recover
from holdfast.coordination.board import LocalBoard
from holdfast.format.manifest import (
    EXTENT_BYTES,
    FORMAT,
    AttemptPlan,
    Manifest,
    ManifestFile,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    encode_index,
    encode_report,
    report_name,
)
from holdfast.format.structure import rank_label
from holdfast.storage.entries import attempt_id
from holdfast.storage.local import RenamingStorage

METADATA = b"stock metadata"
# No test waits for these: a rank that runs beside the whole suite may take seconds.
QUICK = Deadlines(begin_s=30.0, persist_s=30.0, commit_s=30.0)
BRIEF = Deadlines(begin_s=0.15, persist_s=0.15, commit_s=0.05)
_CHANGES = {"make_dir", "write_file", "rename", "sync_dir", "unlink", "remove_tree"}


class Killed(BaseException):
    """The process is gone; nothing that catches errors may catch this."""


class Stoppable(RenamingStorage):
    """A storage for one process that counts its operations and, at number ``stop_at``, kills it.

    Reads count too. ``after`` kills once the operation is done instead of before. ``refuse`` may raise in its place.
    """

    def __init__(self, inner, stop_at=None, *, after=False, refuse=None):
        self.inner = inner
        self.stop_at = stop_at
        self.after = after
        self.refuse = refuse
        self.done = 0
        self.dead = False
        self._lock = threading.Lock()

    @property
    def root(self):
        return self.inner.root

    def __getattr__(self, name):
        act = getattr(self.inner, name)

        def call(*args, **kwargs):
            with self._lock:
                if self.dead:
                    raise Killed
                self.done += 1
                fatal = self.done == self.stop_at
                if fatal and not self.after:
                    self.dead = True
                    raise Killed
                if self.refuse is not None:
                    self.refuse(name, *args)
                result = act(*args, **kwargs)
                if fatal:
                    self.dead = True
                    raise Killed
                return result

        return call


def payload(step, rank):
    """What a rank saves: over an extent, and different for every step and rank."""
    return bytes([step % 251, rank]) * (EXTENT_BYTES // 2 + 1000) if rank == 0 else bytes([step % 251, rank]) * 700


def file_name(rank):
    return f"{rank_label(rank)}.distcp"


def make_plan(step, world, *, overwrite=False, name=None, attempt=None):
    name, attempt = name or f"step-{step}", attempt or attempt_id()
    manifest = Manifest(
        format=FORMAT,
        name=name,
        attempt=attempt,
        step=step,
        world=world,
        created=f"2026-01-01T00:00:{step % 60:02d}+00:00",
        metrics={},
        resumable=True,
        versions={},
        reports=(),
        files=(ManifestFile(".metadata", len(METADATA), xxhash.xxh3_128_hexdigest(METADATA)),),
    )
    planned = tuple(((file_name(rank), len(payload(step, rank))),) for rank in range(world))
    return AttemptPlan(attempt, name, step, world, planned, manifest, overwrite)


def sums(data):
    extents = range(0, len(data), EXTENT_BYTES)
    return b"".join(xxhash.xxh3_64_intdigest(data[at : at + EXTENT_BYTES]).to_bytes(8, "little") for at in extents)


def persist(storage, directory, attempt, step, rank, world):
    """What an engine does; returns this rank's line of the manifest."""
    data = payload(step, rank)
    storage.write_file(f"{directory}/{file_name(rank)}", data)
    files = (ReportFile(file_name(rank), len(data), sums(data)),)
    report = encode_report(Report(attempt, step, rank, world, files, b"", encode_index(RankIndex((), ()))))
    storage.write_file(f"{directory}/{report_name(rank)}", report)
    storage.sync_dir(directory)
    return ManifestReport(rank, report_name(rank), len(report), xxhash.xxh3_128_hexdigest(report), len(data))


def save(storage, board, step, *, deadlines=QUICK, plan=None, key="a", fail=None, before_publish=None, clean=True):
    """One rank's save, all of it; returns what `Attempt.settle` did. ``fail`` may raise in place of the engine."""
    attempt = Attempt.begin(
        storage=storage,
        board=board,
        clock=time.monotonic,
        key=key,
        deadlines=deadlines,
        plan=plan if board.rank == 0 else None,
        prewritten={".metadata": METADATA} if board.rank == 0 else None,
        step=step,
        host=f"host{board.rank}",
    )
    try:
        if fail is not None:
            fail()
        report = persist(storage, attempt.directory, attempt.id, step, board.rank, board.world)
    except Exception as error:
        # What failed in place of the engine has written nothing, and an engine says so.
        failed = RankFailure.of(error, rank=board.rank, unreported=True)
        outcome = attempt.settle(unreported=failed, may_be_left=fail is None)
    else:
        attempt.report(report)
        outcome = attempt.settle(before_publish=before_publish if board.rank == 0 else None)
    if clean:
        for entry in attempt.trash:
            storage.remove_tree(entry)
    return outcome


def run_ranks(function, world):
    """Call ``function(rank)`` on a thread a rank; what each returned or raised, in rank order."""
    results = [None] * world

    def run(rank):
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def save_on_ranks(storages, step, *, boards=None, plan=None, **kwargs):
    """`save` on as many ranks as there are storages."""
    world = len(storages)
    boards = boards or LocalBoard.of_world(world)
    plan = plan or make_plan(step, world)
    return run_ranks(lambda rank: save(storages[rank], boards[rank], step, plan=plan, **kwargs), world)


def error_of(result, step):
    """What a rank's save raised, or would have: a rank may learn of a failure while it begins or when it settles."""
    return result.reason.error(step=step) if isinstance(result, AttemptAborted) else result


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += max(seconds, 1e-6)


def start(storage, **kwargs):
    """What a manager does when it starts."""
    time = Time()
    kwargs.setdefault("look", lambda _directory, _name: None)
    return recover(storage, clock=time.clock, sleep=time.sleep, **kwargs)
