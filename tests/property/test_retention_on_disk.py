"""Whatever happens to a root, what must stay stays: the real retention, on a real directory, against a model of it.

Runs publish, fail, pin, go back, crash and start again with other rules; readers come and go; deletions fail. After
each step: what a run could resume from, what it published last, what is pinned and what is being read is there, whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.catalog.catalog import Catalog, Pins
from holdfast.catalog.retention import Best, Keep
from holdfast.catalog.root import published
from holdfast.errors import CheckpointExists, StorageError
from holdfast.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestReport,
    decode_manifest,
    encode_manifest,
    report_name,
)
from holdfast.storage.entries import attempt_id, hidden_name, parse_hidden
from holdfast.storage.leases import being_read
from holdfast.storage.local import LocalStorage

TEMPLATE = "step-{step}"
REPORT = ManifestReport(0, report_name(0), 100, "0" * 32, 7)
COUNTS = {"sequences": 0, "acts": 0, "publishes": 0, "deletions": 0}

keeps = st.builds(
    Keep,
    last=st.integers(0, 3),
    every=st.none() | st.integers(2, 9),
    minutes=st.none() | st.sampled_from([1.0, 30.0]),
    best=st.none() | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 2)),
)


class Faulty(LocalStorage):
    """Refuses the next rename of a published directory, if it is told to."""

    refuse = False

    def rename(self, source: str, target: str) -> None:
        if self.refuse and not source.startswith("."):
            self.refuse = False
            raise StorageError("refused", path=source, errno=errno.EIO)
        super().rename(source, target)


class Root(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp(prefix="holdfast-root-")
        self.storage = Faulty(self.path)
        self.clock = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.attempts: dict[int, str] = {}
        """Of what is published and may be there."""
        self.at = 0
        self.resume: int | None = None
        """What this run, if it ended now, would be resumed from."""
        self.origin: int | None = None
        """What it has gone back to, until it has published something."""
        self.latest: int | None = None
        """What was published last, since the run went back if it did."""
        self.models: list[int] = []
        """Steps that hold only a model, in the order of their publication."""
        self.pinned: set[int] = set()
        self.readers: dict[int, contextlib.ExitStack] = {}
        COUNTS["sequences"] += 1

    @initialize(keep=keeps)
    def begin(self, keep: Keep) -> None:
        self.keep = keep
        self.keeper = Catalog(self.storage, TEMPLATE, keep)

    def teardown(self) -> None:
        for reader in self.readers.values():
            reader.close()
        shutil.rmtree(self.path)

    # What happens. ---------------------------------------------------------------------------------------------------

    def write(self, step: int, name: str, extra: dict[str, Any], *, resumable: bool, loss: float) -> str:
        """An attempt, all but published; its id."""
        attempt = attempt_id()
        self.clock += timedelta(seconds=20)
        manifest = Manifest(
            format=1, name=name, attempt=attempt, step=step, world=1, created=self.clock.isoformat(),
            metrics={"loss": loss}, resumable=resumable, versions={}, reports=(REPORT,), files=(), extra=extra,
        )  # fmt: skip
        hidden = hidden_name(name, attempt, "incomplete")
        self.storage.make_dir(hidden)
        self.storage.write_file(f"{hidden}/{MANIFEST_NAME}", encode_manifest(manifest))
        self.storage.write_file(f"{hidden}/payload", attempt.encode())
        return attempt

    @rule(saves=st.lists(st.tuples(st.integers(1, 6), st.floats(0, 9), st.integers(0, 3)), min_size=1, max_size=5))
    def train(self, saves: list[tuple[int, float, int]]) -> None:
        for further, loss, kind in saves:
            COUNTS["acts"] += 1
            self.publish(further, loss, resumable=kind > 0)

    def publish(self, further: int, loss: float, *, resumable: bool) -> None:
        step = self.at + further
        name = TEMPLATE.format(step=step)
        try:
            extra, replaces = self.keeper.place(step, name, (), spare_models=resumable)
        except CheckpointExists:
            assert step in self.pinned or (resumable and step in self.models)
            self.at = step
            return
        there = self.storage.exists(name)
        if there and not replaces:
            return  # refused further down: the run has published it before
        if there and step in self.readers:
            return  # replacing by the same number is no deletion; see docs/resuming.md
        attempt = self.write(step, name, extra, resumable=resumable, loss=loss)
        hidden = hidden_name(name, attempt, "incomplete")
        if there:
            os.rename(f"{self.path}/{name}", f"{self.path}/{hidden_name(name, attempt, 'trash')}")
        self.storage.rename(hidden, name)
        COUNTS["publishes"] += 1
        self.at, self.latest, self.attempts[step] = step, step, attempt
        self.models = [model for model in self.models if model != step] + ([] if resumable else [step])
        self.resume = step if resumable else self.resume if self.origin is None else self.origin
        self.origin = None if resumable else self.origin
        assert resumable or self.resume != step, "a model took the place of what the run resumes from"
        self.keeper.note_published(step, name, extra, resumable=resumable)
        self.delete_by_rules(step)

    def delete_by_rules(self, step: int | None) -> None:
        before = {found for found, _ in published(self.storage, TEMPLATE)}
        self.keeper.apply_retention(step, lambda trash: None)
        gone = before - {found for found, _ in published(self.storage, TEMPLATE)}
        COUNTS["deletions"] += len(gone)
        assert not set(self.models[-1:]) & gone, "the newest model is what was shipped"
        self.models = [model for model in self.models if model not in gone]
        for found in gone:
            self.attempts.pop(found, None)

    @rule(further=st.integers(1, 6), how=st.sampled_from(["trash", "left"]))
    def fail(self, further: int, how: str) -> None:
        """A save that ends unpublished; or its process with it."""
        COUNTS["acts"] += 1
        step = self.at + further
        name = TEMPLATE.format(step=step)
        try:
            extra, _ = self.keeper.place(step, name, ())
        except CheckpointExists:
            return
        attempt = self.write(step, name, extra, resumable=True, loss=1.0)
        if how == "trash":
            self.storage.rename(hidden_name(name, attempt, "incomplete"), hidden_name(name, attempt, "trash"))

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.attempts)
    def pin(self, choice: int) -> None:
        COUNTS["acts"] += 1
        step = sorted(self.attempts)[choice % len(self.attempts)]
        self.keeper.set_pin(step, pinned=True)
        self.pinned.add(step)

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.pinned)
    def unpin(self, choice: int) -> None:
        COUNTS["acts"] += 1
        step = sorted(self.pinned)[choice % len(self.pinned)]
        self.keeper.set_pin(step, pinned=False)
        self.pinned.remove(step)

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: set(self.attempts) - set(self.readers))
    def begin_reading(self, choice: int) -> None:
        COUNTS["acts"] += 1
        free = sorted(set(self.attempts) - set(self.readers))
        step = free[choice % len(free)]
        self.readers[step] = contextlib.ExitStack()
        self.readers[step].enter_context(being_read(f"{self.path}/{TEMPLATE.format(step=step)}"))

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.readers)
    def end_reading(self, choice: int) -> None:
        COUNTS["acts"] += 1
        step = sorted(self.readers)[choice % len(self.readers)]
        self.readers.pop(step).close()

    @rule(keep=keeps)
    def restart(self, keep: Keep) -> None:
        """The process ends, however; the next one has other rules and takes what is newest."""
        COUNTS["acts"] += 1
        self.keep = keep
        self.keeper = Catalog(self.storage, TEMPLATE, keep)
        found = self.keeper.candidates(None)
        assert (found[0][0] if found else None) == self.resume
        self.keeper.resumed_from(self.resume)
        self.origin = self.resume
        self.at = self.resume or 0

    @rule(choice=st.integers(0, 99))
    @precondition(lambda self: self.attempts)
    def go_back(self, choice: int) -> None:
        """Or ahead, to what a run had left behind."""
        COUNTS["acts"] += 1
        wholes = [step for step in sorted(self.attempts) if self.keeper.is_resumable(TEMPLATE.format(step=step))]
        if wholes:
            self.at = wholes[choice % len(wholes)]
            self.keeper.resumed_from(self.at)
            self.origin = self.at

    @rule()
    def refuse_the_next_deletion(self) -> None:
        COUNTS["acts"] += 1
        self.storage.refuse = True

    @rule()
    def remove_trash(self) -> None:
        COUNTS["acts"] += 1
        for entry in os.listdir(self.path):
            hidden = parse_hidden(entry)
            if hidden is not None and hidden.kind == "trash":
                shutil.rmtree(os.path.join(self.path, entry))

    # What must hold. -------------------------------------------------------------------------------------------------

    @invariant()
    def what_must_stay_is_there(self) -> None:
        guarded = {self.resume, self.origin, self.latest, *self.readers, *(self.pinned & set(self.attempts))} - {None}
        for step in guarded:
            name = TEMPLATE.format(step=step)
            data = self.storage.read_file(f"{name}/{MANIFEST_NAME}", max_bytes=1 << 20)
            attempt = decode_manifest(data, path=name).attempt
            assert attempt == self.attempts[step]
            assert self.storage.read_file(f"{name}/payload", max_bytes=100) == attempt.encode()

    @invariant()
    def the_newest_is_what_a_start_would_take(self) -> None:
        if not hasattr(self, "keeper"):
            return
        found = Catalog(self.storage, TEMPLATE, None).candidates(None)
        assert (found[0][0] if found else None) == self.resume

    @invariant()
    def pins_are_what_they_were(self) -> None:
        assert set(Pins(self.storage).all()) == self.pinned


EXAMPLES = int(os.environ.get("HOLDFAST_RETENTION", "25"))
TestRoot = pytest.mark.timeout(120 + 6 * EXAMPLES)(Root.TestCase)
TestRoot.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_figures(tried: Counter[str]) -> None:
    """After the machine has run: what it was put through."""
    assert COUNTS["sequences"] == 0 or COUNTS["deletions"] > 0
    for what, count in COUNTS.items():
        tried[f"retention on disk: {what}"] += count
