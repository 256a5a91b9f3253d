"""A storage of one's own, which no file of Holdfast knows: it keeps the contract, serves a manager, survives kills.

It publishes by a symbolic link to the attempt's directory: for a file system that can't rename directories into place.
``.NAME.ATTEMPT.data`` is what one has written, ``.taken`` is in the hands of a recovery, ``.dead`` is trash.
"""

from __future__ import annotations

import os
import re

import kill_job
import pytest
import syscalls
from nursery import Nursery
from supervised import Act
from test_kill_points import Family, Job, check_survivors, check_told, choose, run_all

import holdfast
from holdfast.errors import CheckpointExists, OutcomeUnknown, StorageError
from holdfast.storage.entries import HiddenEntry
from holdfast.storage.leases import to_be_deleted
from holdfast.storage.local import LocalStorage
from holdfast.storage.protocol import PublishOutcome, WithdrawOutcome
from holdfast.testing.storage_conformance import STORAGE_CHECKS

HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{12})\.(data|taken|dead)")
KINDS = {"data": "incomplete", "taken": "recovering", "dead": "trash"}


class LinkStorage(LocalStorage):
    def path(self, name):
        first, slash, rest = name.partition("/")
        target = self.target_of(first)
        return super().path(name) if target is None else f"{super().path(target)}{slash}{rest}"

    def target_of(self, name):
        link = os.path.join(self.root, name)
        return os.readlink(link) if name and os.path.islink(link) else None

    def directory_of(self, name, attempt):
        return f".{name}.{attempt}.data"

    def publish(self, directory, name, attempt, manifest, *, overwrite):
        link, old = os.path.join(self.root, name), self.target_of(name)
        if not self.exists(directory):
            return PublishOutcome("refused", error=StorageError("it was given up", path=directory, errno=None))
        if self.exists(name) and not overwrite:
            return PublishOutcome("refused", error=CheckpointExists(f"{link} exists", path=link))
        fresh = os.path.join(self.root, f".{name}.link")
        if os.path.lexists(fresh):
            os.unlink(fresh)
        os.symlink(directory, fresh)
        os.replace(fresh, link)  # the writer's lock is held: nobody else makes one meanwhile
        try:
            self.sync_dir("")
            return PublishOutcome("published", self.bury(old) if old and self.exists(old) else ())
        except StorageError as error:
            return PublishOutcome("unknown", error=OutcomeUnknown(str(error), attempt=attempt))

    def bury(self, directory):
        dead = f"{directory.rpartition('.')[0]}.dead"
        self.rename(directory, dead)  # a link that leads nowhere is nothing
        self.sync_dir("")
        return (dead,)

    def withdraw(self, directory, name, attempt):
        try:
            if self.target_of(name) == directory:
                return WithdrawOutcome(certain=False, why=f"{name} is published")
            return WithdrawOutcome(certain=True, trash=self.bury(directory) if self.exists(directory) else ())
        except StorageError as error:
            return WithdrawOutcome(certain=False, why=str(error))

    def hide(self, name):
        with to_be_deleted(self.path(name)) as free:
            trash = self.bury(self.target_of(name)) if free else None
        if trash is not None:
            os.unlink(os.path.join(self.root, name))
        return trash

    def unsettled(self):
        entries = self.list_dir("")
        published = {self.target_of(entry) for entry in entries}
        found = [match for entry in entries if (match := HIDDEN.fullmatch(entry)) and entry not in published]
        return [HiddenEntry(match[0], match[1], match[2], KINDS[match[3]]) for match in found]

    def take_over(self, entry):
        taken = f".{entry.name}.{entry.attempt}.taken"
        if entry.entry != taken:
            self.rename(entry.entry, taken)
            self.sync_dir("")
        return taken


@pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__)
def test_a_custom_storage_keeps_the_contract(check, tmp_path):
    check(LinkStorage(tmp_path))


def saves(root):
    kill_job.saves(LinkStorage(root))


def steps_in(storage, *to_save):
    """Return the steps, checked to be complete; then resume from the newest, and save ``to_save``."""
    names = [name for name in storage.list_dir("") if storage.target_of(name) and storage.exists(name)]
    seen = {name: holdfast.open(storage.path(name)) for name in names}
    assert all(found.verify().ok and (found.read("model.weight") == found.step).all() for found in seen.values())
    state = kill_job.build()
    with holdfast.CheckpointManager(storage, state, config=kill_job.settings()) as manager:
        resumed = manager.restore() or 0
        assert kill_job.is_of(state, resumed)
        assert resumed >= max((found.step for found in seen.values()), default=0)
        for step in to_save:
            kill_job.fill(state, step)
            manager.save(step).result(30)
    assert storage.unsettled() == []
    return seen


def test_a_manager_saves_keeps_and_resumes(tmp_path):
    assert not steps_in(LinkStorage(tmp_path), 1, 2, 3)
    assert sorted(steps_in(LinkStorage(tmp_path), 4)) == ["step-2", "step-3"]
    assert len(os.listdir(tmp_path)) == 5, "two links, what they lead to, and the lock"


def check(family, act, job):
    outcome = job.finish()
    if outcome.hit:
        check_survivors(family, act, outcome)
    check_told(outcome, steps_in(LinkStorage(job.root), 90), least=2)
    return bool(outcome.hit), 0


@pytest.mark.skipif(not syscalls.AVAILABLE, reason="numbers of system calls are known for x86-64 only")
@pytest.mark.parametrize("kind", ["kill", pytest.param("kill all", marks=pytest.mark.slow)])
def test_a_custom_storage_survives_kills(kind, tmp_path, tried):
    family, template = Family("saves", 1, kind, 6, module="test_own_storage"), tmp_path / "template"
    steps_in(LinkStorage(template), 1, 2)
    with Nursery("test_own_storage") as nursery:
        seen = Job(nursery, family, template, tmp_path / "undisturbed", None).finish().seen["life"]
        points = [point for point in seen if point.call not in syscalls.TALKING and not point.target.startswith("/")]
        chosen = [*choose(points, family.few), *(point for point in points if point.call == "symlink")]
        acts = [Act(point, kind, window="life") for point in chosen]
        reached, _ = run_all(nursery, family, template, acts, tmp_path, check=check)
    tried["kill points (SIGKILL at a system call)"] += sum(reached.values())
    assert reached["trainer-0 symlink"] >= 2
    assert reached["not reached"] <= 1
