"""An export by several ranks on threads: the real protocol and executor, without engine processes."""

from __future__ import annotations

import os
import time

import xxhash
from _protocol import QUICK, run_ranks

from holdfast.commit.attempt import Attempt, RankFailure
from holdfast.coordination.board import LocalBoard
from holdfast.engine.executor import WriteOptions, write_files, write_report
from holdfast.format.manifest import (
    EXPORT_FORMAT,
    AttemptPlan,
    Manifest,
    ManifestFile,
    ManifestReport,
    Report,
    parts_digest,
    parts_in,
    report_name,
    report_parts,
)
from holdfast.storage.entries import attempt_id
from holdfast.testing.parts import INDEX

PREWRITTEN = {"config.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ tools }}", "tokenizer.json": b"[]"}


def make_export(parts, prewritten=PREWRITTEN, *, step=7, name=None, attempt=None, overwrite=False):
    """The plan of an attempt at an export of ``parts``, by rank."""
    name, attempt = name or f"hf-{step}", attempt or attempt_id()
    manifest = Manifest(
        format=EXPORT_FORMAT,
        name=name,
        attempt=attempt,
        step=step,
        world=len(parts),
        created=f"2026-01-01T00:00:{step % 60:02d}+00:00",
        metrics={},
        resumable=False,
        versions={},
        reports=(),
        files=tuple(
            ManifestFile(file, len(data), xxhash.xxh3_128_hexdigest(data)) for file, data in prewritten.items()
        ),
        kind="export",
    )
    planned = ((),) * len(parts)
    return AttemptPlan(attempt, name, step, len(parts), planned, manifest, overwrite, tuple(map(tuple, parts)))


def persist_parts(storage, attempt, sample, rank):
    """What an engine does; returns this rank's line of the manifest."""
    fd = storage.open_dir(attempt.directory)
    try:
        written = write_files(fd, sample.views[rank], sample.plan(rank), WriteOptions(writers=1))
        report = Report(attempt.id, attempt.step, rank, len(sample.parts), written.files, b"", INDEX)
        size, digest = write_report(fd, report_name(rank), report_parts(report))
    finally:
        os.close(fd)
    return ManifestReport(rank, report_name(rank), size, digest, written.nbytes, parts_digest(parts_in(written.files)))


def export(storage, board, sample, plan, *, prewritten=PREWRITTEN, fail=None, key="a", settle=True):
    """All that one rank does for an export; returns what `Attempt.settle` did. ``fail`` may raise before it writes."""
    attempt = Attempt.begin(
        storage=storage,
        board=board,
        clock=time.monotonic,
        key=key,
        deadlines=QUICK,
        plan=plan if board.rank == 0 else None,
        prewritten=prewritten if board.rank == 0 else None,
        step=plan.step,
    )
    try:
        if fail is not None:
            fail(board.rank)
        line = persist_parts(storage, attempt, sample, board.rank)
    except Exception as error:
        outcome = attempt.settle(unreported=RankFailure.of(error, rank=board.rank, unreported=True))
    else:
        if not settle:
            return attempt
        attempt.report(line)
        outcome = attempt.settle()
    for entry in attempt.trash:
        storage.remove_tree(entry)
    return outcome


def export_on_ranks(storages, sample, *, plan=None, boards=None, **kwargs):
    """`export` on as many ranks as there are storages; what each returned or raised."""
    boards = boards or LocalBoard.of_world(len(storages))
    plan = plan or make_export(sample.parts)
    return run_ranks(lambda rank: export(storages[rank], boards[rank], sample, plan, **kwargs), len(storages))
