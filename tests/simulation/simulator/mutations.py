"""The protocol broken on purpose, one promise at a time: what the simulator is worth is what of this it finds.

A mutation names what it replaces, the invariants that may find it, and the faults under which to look (`bias`), under
which the protocol as it is must pass the same seeds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import msgspec

from holdfast.catalog import catalog as keeping
from holdfast.catalog.retention import CheckpointEntry
from holdfast.commit import attempt as commit
from holdfast.commit import messages as news
from holdfast.commit import publish, recovery
from holdfast.coordination.failure import AttemptAborted, AttemptPublished, RankFailure
from holdfast.engine import write_job as engine_attempt
from holdfast.engine.syscalls import SystemCalls
from holdfast.errors import DeadlineExceeded, OutcomeUnknown, StorageError
from holdfast.format.manifest import MANIFEST_NAME, encode_manifest
from holdfast.saver import agreement, checkpointer, delivery
from holdfast.storage import local
from holdfast.storage.entries import HiddenEntry, hidden_name, parse_hidden
from holdfast.storage.local import LocalStorage
from holdfast.storage.locks import RootLock
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.protocol import WithdrawOutcome
from simulator import job, objects
from simulator.faults import Faults
from simulator.schedule import run_many

SEEDS_MOST = 300
"""How many schedules a mutation may go unfound; those it is found in are a good deal fewer."""


@dataclass(frozen=True)
class Mutation:
    name: str
    finds: frozenset[str]
    patches: tuple[tuple[object, str, object], ...]
    bias: object = None

    @contextlib.contextmanager
    def applied(self):
        before = [(target, name, target.__dict__[name]) for target, name, _ in self.patches]
        try:
            for target, name, value in self.patches:
                setattr(target, name, value)
            yield
        finally:
            for target, name, value in before:
                setattr(target, name, value)

    def faults(self, rng):
        """The schedule's faults, as far as this mutation shows under them."""
        drawn = Faults.draw(rng)
        if self.bias is not None:
            self.bias(drawn, rng)
        return drawn


MUTATIONS: list[Mutation] = []


def mutation(name, finds, *patches, bias=None):
    MUTATIONS.append(Mutation(name, frozenset(finds.split(", ")), patches, bias))


# bias ----------------------------------------------------------------------------------------------------------


def some_ranks(faults, rng):
    faults.worlds = [max(2, world) for world in faults.worlds]


def coordinator_dies(faults, rng):
    """While it settles a save, mostly."""
    faults.worlds[0] = max(2, faults.worlds[0])
    faults.trainer_kills[0, 0] = (rng.randrange(15, 90), rng.random() < 0.5)
    faults.launcher_waits_s = 60.0


def refused_and_dies(faults, rng):
    """The coordinator can't write the manifest when all reports are there, and a crash follows."""
    coordinator_dies(faults, rng)
    faults.refuse_manifest = True
    faults.final_cut = True


def staging_fails_and_dies(faults, rng):
    coordinator_dies(faults, rng)
    faults.staging = {(0, save, faults.worlds[0] - 1) for save in range(faults.saves[0])}


def staging_fails_and_job_dies(faults, rng):
    """The engines go on by themselves."""
    faults.pace = 0.0001
    faults.worlds, faults.saves = [rng.choice((1, 2, 3))], [1]
    faults.objects = False
    faults.staging = {(0, 0, 0)}
    faults.job_kills = {0: 0.003 + rng.random() * 0.02}


def overwrites_and_dies(faults, rng):
    faults.overwrites, faults.model_only = 1.0, 0.0
    faults.objects = False
    faults.saves[0] = 3
    faults.worlds[0] = 1
    faults.trainer_kills[0, 0] = (rng.randrange(100, 170), rng.random() < 0.5)


def silence(faults, rng):
    some_ranks(faults, rng)
    faults.cuts.append((0, 1, rng.random() * 0.05, 1e9))
    faults.pauses.append((0, 0, False, rng.random() * 0.1, 7.0))


def restarts(faults, rng):
    faults.worlds = [2, 2, 2]
    faults.saves = [2, 2, 2]
    faults.job_kills = {0: rng.random() * 0.15, 1: rng.random() * 0.15}


def orphans_fail(faults, rng):
    """Engines outlive their trainers, on storage that is slow and refuses much."""
    faults.worlds, faults.saves = [1, 1], [1, 1]
    faults.objects = False
    faults.pace = 0.0001
    faults.job_kills = {0: 0.005 + rng.random() * 0.03}
    faults.engine_fsync = 0.5


def slow_ranks(faults, rng):
    some_ranks(faults, rng)
    faults.slow = 0.2


def two_managers(faults, rng):
    faults.worlds, faults.saves = [2, 2], [3, 2]
    faults.overlaps = {0: rng.random() * 0.05}


def on_a_store(faults, rng, *, worlds=(1, 1), saves=(3, 3)):
    """Nothing goes wrong there yet."""
    calm = Faults(rng)
    vars(faults).update(vars(calm))
    faults.objects, faults.extended_store = True, True
    faults.worlds, faults.saves = list(worlds), list(saves)
    faults.pace = 0.0001


# what is not made durable --------------------------------------------------------------------------------------


def nothing(*_args, **_kwargs):
    return None


def write_unsynced(self, name, data):
    from simulator.system import OS

    fd = OS.open(self.path(name), OS.O_WRONLY | OS.O_CREAT | OS.O_EXCL)
    OS.pwrite(fd, data, 0)
    OS.close(fd)


def publish_unsynced(storage, directory, name, attempt, *, overwrite):
    if overwrite:
        return REAL_PUBLISH(storage, directory, name, attempt, overwrite=overwrite)
    local._rename_in(storage, directory, name, attempt)
    return ()


REAL_PUBLISH = local.publish_by_rename

mutation("no directory is fsynced", "durable, kept", (LocalStorage, "sync_dir", nothing))
mutation("the engine fsyncs no file", "durable, kept, whole", (SystemCalls, "fsync", nothing))
mutation("the manifest is not fsynced", "durable, kept, whole", (LocalStorage, "write_file", write_unsynced))
mutation("the final rename is not fsynced", "durable, kept", (local, "publish_by_rename", publish_unsynced))


def extend_anew(self, fd, nbytes):
    """What others have written of the file goes with it."""
    from simulator.system import OS

    OS.ftruncate(fd, 0)
    OS.ftruncate(fd, nbytes)


def some_export(faults, rng):
    some_ranks(faults, rng)
    faults.objects, faults.exports = False, 1.0
    faults.worlds = [min(3, world) for world in faults.worlds]


mutation(
    "who opens a file that others write begins it anew", "whole", (SystemCalls, "extend", extend_anew), bias=some_export
)

# who says yes --------------------------------------------------------------------------------------------------


def wait_one_report(self, timeout_s, count):
    found = self._board.wait_entries(self._reports, 1, timeout_s=timeout_s, waiting_for="a report")
    return news.reports_in(found)


def wait_reports_in_time(self):
    try:
        return self._news.wait_reports(max(0.0, self.persist_by - self._clock()), self._plan.world)
    except DeadlineExceeded:
        found = self._news._board.try_entries(self._news._reports)
        return news.reports_in(found)


REAL_ENGINE_RUN = engine_attempt.WriteJob._run


def run_unverified(self):
    self._verified.set()
    REAL_ENGINE_RUN(self)


def cancel_in_words(self):
    """Says that it has stopped, and goes on."""
    self._verified.set()
    return True


def publish_without_manifest(self, _reports):
    pass


def publish_manifest_last(self):
    reason = REAL_COMMIT_PUBLISH(self)
    if reason is None:
        found = self._news._board.try_entries(self._news._reports)
        lines = news.reports_in(found)
        manifest = encode_manifest(publish.finish_manifest(self._plan, lines))
        self._storage.write_file(f"{self.name}/{MANIFEST_NAME}", manifest)
        local.clear_scaffolding(self._storage, self.name)
    return reason


REAL_COMMIT_PUBLISH = commit.Attempt._publish

mutation(
    "published when one report is in",
    "whole, agreement, durable",
    (news.AttemptChannel, "wait_reports", wait_one_report),
    (commit, "find_gap", nothing),
)
mutation(
    "a missing rank's report is ignored",
    "whole, agreement, durable",
    (commit.Attempt, "_wait_reports", wait_reports_in_time),
    (commit, "find_gap", nothing),
    bias=silence,
)
mutation(
    "the engine reports before staging is verified",
    "whole, failed",
    (engine_attempt.WriteJob, "_run", run_unverified),
    bias=staging_fails_and_job_dies,
)
mutation(
    "the trainer says verified without looking",
    "whole",
    (checkpointer, "verify_staging", nothing),
    bias=staging_fails_and_dies,
)
mutation(
    "the engine confirms a cancel and reports all the same",
    "failed, whole",
    (engine_attempt.WriteJob, "cancel", cancel_in_words),
    bias=staging_fails_and_dies,
)
mutation(
    "the manifest is written after the final rename",
    "whole",
    (commit.Attempt, "_prepare", publish_without_manifest),
    (commit.Attempt, "_publish", publish_manifest_last),
)

# what is told, and when ----------------------------------------------------------------------------------------


def announce_then_publish(self):
    self._announce(AttemptPublished(self.name, self.id))
    return REAL_COMMIT_PUBLISH(self)


REAL_TRY_REMOVE = commit.Attempt._try_remove
REAL_ANNOUNCE = commit.Attempt._announce


def remove_later(self):
    return True


def announce_then_remove(self, note):
    REAL_ANNOUNCE(self, note)
    if isinstance(note, AttemptAborted):
        REAL_TRY_REMOVE(self)


def withdraw_unsynced(storage, directory, name, attempt):
    target = hidden_name(name, attempt, "trash")
    if storage.exists(directory):
        storage.rename(directory, target)
    return WithdrawOutcome(certain=True, trash=(target,))


def doubt_is_failure(self, silence, failure):
    return self._learn(AttemptAborted(failure or RankFailure.of(silence, rank=self._news.rank)))


mutation(
    "success is told at the vote",
    "durable, agreement",
    (commit.Attempt, "_publish", announce_then_publish),
    bias=slow_ranks,
)
mutation(
    "failure is told before the attempt is in the trash",
    "failed, agreement",
    (commit.Attempt, "_try_remove", remove_later),
    (commit.Attempt, "_announce", announce_then_remove),
    bias=refused_and_dies,
)
mutation(
    "failure is told before the abort is durable",
    "failed",
    (local, "withdraw_by_rename", withdraw_unsynced),
    bias=refused_and_dies,
)
mutation(
    "silence is taken for failure",
    "agreement, failed",
    (commit.Attempt, "_resolve_doubt", doubt_is_failure),
    bias=silence,
)


def unknown_is_refused(self, *, overwrite):
    try:
        return REAL_PUBLICATION_PUBLISH(self, overwrite=overwrite)
    except OutcomeUnknown as unknown:
        self.may_be_published = False
        return StorageError(str(unknown), path=self.directory, errno=None)


REAL_PUBLICATION_PUBLISH = publish.Publication.publish


def puts_are_delayed(faults, rng):
    on_a_store(faults, rng)
    faults.delayed_puts, faults.outages = 0.3, 1.0


mutation(
    "a publish of which nobody can tell is taken for failure",
    "failed, agreement, whole",
    (publish.Publication, "publish", unknown_is_refused),
    bias=puts_are_delayed,
)

# names, sessions, leases and locks -----------------------------------------------------------------------------


def same_id():
    return "0123456789ab"


def same_store(self):
    self.servers = self.servers or [REAL_NEW_SERVER(self)]
    return self.servers[0]


REAL_NEW_SERVER = job.Job.new_server


class NoLock:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def release(self):
        pass


mutation("attempt ids are used again", "attempt id", (delivery, "attempt_id", same_id))
mutation(
    "what a former session told is believed",
    "agreement, whole, durable, failed, kept, goes on, bounded, no defect",
    (job.Job, "new_server", same_store),
    bias=restarts,
)
mutation(
    "recovery looks at no lease",
    "whole, leftovers, kept, failed",
    (recovery._Recovery, "_wait_quiet", lambda self, attempts, *_: list(attempts)),
    bias=orphans_fail,
)
mutation(
    "nobody asks for the lock",
    "agreement, kept, failed, whole, durable, newest, leftovers, goes on",
    (RootLock, "acquire", classmethod(lambda cls, root, **_: NoLock())),
    (RootLock, "acquire_beside", classmethod(lambda cls, path, **_: NoLock())),
    bias=two_managers,
)

# recovery ------------------------------------------------------------------------------------------------------


def believe_reports(self, directory, manifest, plan):
    lines = []
    for rank in range(manifest.world):
        name = recovery.report_name(rank)
        if self.storage.size(f"{directory}/{name}") is not None:
            data = self.storage.read_file(f"{directory}/{name}", max_bytes=1 << 20)
            lines.append(recovery.ManifestReport(rank, name, len(data), "0" * 32, 4096))
    return lines


mutation(
    "recovery publishes without looking at reports",
    "whole",
    (recovery._Recovery, "_check_reports", believe_reports),
    (recovery, "find_gap", nothing),
    bias=coordinator_dies,
)
mutation(
    "recovery gives up what was overwritten",
    "leftovers, kept",
    (recovery._Recovery, "_settle_replaced", nothing),
    bias=overwrites_and_dies,
)

# what goes -----------------------------------------------------------------------------------------------------


def publish_over(storage, directory, name, attempt, *, overwrite):
    if overwrite:
        storage.remove_tree(name)
    return REAL_PUBLISH(storage, directory, name, attempt, overwrite=False)


def exchange_unsynced(storage, directory, name, attempt):
    """And what was there is removed all the same."""
    if not storage.exchange(directory, name):
        return False
    storage.remove_tree(directory)
    return True


def exchange_by_answer(storage, directory, name, _attempt):
    return storage.exchange(directory, name)


def withdraw_blindly(storage, directory, name, attempt):
    target = hidden_name(name, attempt, "trash")
    if storage.exists(directory):
        storage.rename(directory, target)
    storage.sync_dir("")
    return WithdrawOutcome(certain=True, trash=(target,))


def exchanges_and_dies(faults, rng):
    overwrites_and_dies(faults, rng)
    faults.exchanges = faults.foreign = True
    faults.trainer_kills[0, 0] = (rng.randrange(125, 155), rng.random() < 0.5)  # about when it exchanges
    faults.final_cut = True


def answers_are_lost(faults, rng):
    exchanges_and_dies(faults, rng)
    faults.trainer_kills = {}
    faults.repeated = 0.5


REAL_SELECT = keeping.select_deletions
REAL_DELIVER = checkpointer.Checkpointer.deliver


def select_as_if_published(entries, keep, published=None):
    entries = list(entries)
    if all(entry.step != published for entry in entries):
        entries.append(
            CheckpointEntry(
                step=published,
                created_s=0.0,
                lineage=max(
                    (entry.lineage for entry in entries),
                    key=lambda line: line.branch,
                    default=CheckpointEntry(0, 0.0).lineage,
                ),
            )
        )
    return REAL_SELECT(entries, keep, published)


def retention_then_deliver(self, job):
    if job.keeper is not None:
        job.keeper.apply_retention(job.request.step, self.remove)
    return REAL_DELIVER(self, job)


mutation(
    "a published step is removed, then replaced",
    "whole, kept, newest",
    (local, "publish_by_rename", publish_over),
    bias=overwrites_and_dies,
)
mutation(
    "what was exchanged is removed before that is durable",
    "whole, kept, durable, foreign",
    (local, "_exchange", exchange_unsynced),
    bias=exchanges_and_dies,
)
mutation(
    "what the answer says of an exchange is believed",
    "failed, whole, kept, durable, goes on, leftovers, agreement",
    (local, "_exchange", exchange_by_answer),
    (local, "withdraw_by_rename", withdraw_blindly),
    bias=answers_are_lost,
)
mutation(
    "what others put there goes with what is overwritten",
    "foreign",
    (local, "link_foreign", nothing),
    (local, "carry_foreign", nothing),
    bias=exchanges_and_dies,
)
mutation(
    "retention comes before publication",
    "newest, retention",
    (keeping, "select_deletions", select_as_if_published),
    (checkpointer.Checkpointer, "deliver", retention_then_deliver),
)


# on an object store --------------------------------------------------------------------------------------------


def two_runs_on_a_store(faults, rng):
    """Both save the same steps."""
    on_a_store(faults, rng)
    faults.overlaps = {0: rng.random() * 0.02}


def two_runs_replace(faults, rng):
    two_runs_on_a_store(faults, rng)
    faults.overwrites = 1.0


def taken_for_dead(faults, rng):
    """By a start beside it, which waits for nobody, while its own requests come late."""
    on_a_store(faults, rng, worlds=(2, 1), saves=(3, 0))
    faults.overlaps = {0: rng.random() * 0.05}
    faults.clocks_ahead_s = {1: 90_000.0}
    faults.hasty_starts = {1}
    faults.delayed_puts = 0.2


def answers_of_a_store_are_lost(faults, rng):
    on_a_store(faults, rng)
    faults.repeated = 0.2


def start_beside(faults, rng):
    """One that saves nothing."""
    on_a_store(faults, rng, saves=(3, 0))
    faults.overlaps = {0: rng.random() * 0.02}


def steps_diverge(faults, rng):
    on_a_store(faults, rng, worlds=(2, 2))
    faults.diverged = {(0, 1)}


def killed_in_retention(faults, rng):
    on_a_store(faults, rng)
    faults.keep_last = 1
    faults.trainer_kills[0, 0] = (rng.randrange(60, 200), True)


REAL_JUDGE = agreement.judge
REAL_WITHDRAW = ObjectStorage.withdraw
REAL_UNSETTLED = ObjectStorage.unsettled


def judge_by_the_first(proposals, agreed, *, what="save"):
    first = proposals[0]
    same = [msgspec.structs.replace(each, step=first.step, target=first.target) for each in proposals]
    return REAL_JUDGE(same, agreed, what=what)


def remove_then_void(self, directory, name, attempt):
    self.remove_tree(directory)
    return REAL_WITHDRAW(self, directory, name, attempt)


def remove_without_void(self, directory, name, attempt):
    """The seal, if there is one, is somebody's of whom this one knows that he is dead."""
    self._mark(name, attempt, "incomplete")
    return WithdrawOutcome(certain=True, trash=(directory,))


def deny_all(self, name, data, *, ours, ends_s):
    return self._put_if("create", name, data, "create", None, ours=lambda _: False, ends_s=ends_s)


def replace_blindly(self, name, data, tag, *, ours, ends_s):
    self.put(name, data, ends_s=ends_s)
    return True


def all_trash(self):
    """Whether it is visible or not."""
    found = [parse_hidden(row.name) for row in self.store.objects(".holdfast/attempts", ends_s=self.ends_s)]
    trash = [
        HiddenEntry(self.directory_of(entry.name, entry.attempt), entry.name, entry.attempt, "trash")
        for entry in found
        if entry is not None and entry.kind == "trash"
    ]
    return trash + [entry for entry in REAL_UNSETTLED(self) if entry.kind != "trash"]


mutation(
    "the store ignores conditions, and nobody has it prove them",
    "whole, agreement, kept, failed",
    (objects, "HONOURS_CONDITIONS", False),
    (ObjectStorage, "make_root", nothing),
    bias=two_runs_on_a_store,
)
mutation(
    "objects are removed before their attempt is void",
    "whole",
    (ObjectStorage, "withdraw", remove_then_void),
    bias=taken_for_dead,
)
mutation(
    "an attempt is removed without a void",
    "whole, failed, agreement",
    (ObjectStorage, "withdraw", remove_without_void),
    bias=taken_for_dead,
)
mutation(
    "nobody looks whether all objects are there before the vote, and voids are deleted",
    "whole, failed, agreement",
    (ObjectStorage, "require_all", nothing),
    (ObjectStorage, "_void_at", nothing),
    bias=taken_for_dead,
)
mutation(
    "a create that meets an object has failed, whoever put it",
    "needless",
    (ObjectStore, "create", deny_all),
    bias=answers_of_a_store_are_lost,
)
mutation(
    "a published manifest is replaced whatever it is by now",
    "kept",
    (ObjectStore, "replace", replace_blindly),
    bias=two_runs_replace,
)
mutation(
    "a coordinator holds no lease",
    "needless",
    (ObjectStorage, "has_locks", True),
    bias=start_beside,
)
mutation(
    "ranks need not agree on the step",
    "diverged, agreement, whole",
    (agreement, "judge", judge_by_the_first),
    bias=steps_diverge,
)
mutation(
    "what is marked as trash goes, visible or not",
    "whole",
    (ObjectStorage, "unsettled", all_trash),
    bias=killed_in_retention,
)


def hunt(mutation):
    """The first schedule of ``SEEDS_MOST`` that finds ``mutation``, and one of those that fails without it, or None."""
    found = None
    with mutation.applied():
        for result in run_many(range(SEEDS_MOST), faults=mutation.faults):
            if result.breach is not None and result.breach.invariant in mutation.finds:
                found = result
                break
    last = SEEDS_MOST - 1 if found is None else found.seed
    for result in run_many(range(last + 1), faults=mutation.faults):
        if result.breach is not None:
            return found, result
    return found, None
