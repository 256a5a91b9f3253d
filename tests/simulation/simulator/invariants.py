"""What must always hold (design.md §8), looked at whenever the root changes, whenever a rank is told, and at the end.

Every breach is an `InvariantBroken` with the name of the invariant:

    whole            what is visible is whole: every byte that was staged for it, and no byte of another save
    durable          what a rank is told is published would survive any power cut at that moment
    kept             what was told published is there later, unless retention took it or an overwrite replaced it
    failed           an attempt that any rank was told had failed never becomes visible
    agreement        no rank is told of success and another of failure
    cause            where nothing but the failure itself is wrong, all ranks are told the same cause
    newest           nothing is taken away that isn't followed by a newer durable one (resumable, if it was)
    retention        nothing is taken away that the policy keeps
    foreign          what a user has put beside a checkpoint, durably, outlives every overwrite
    attempt id       an attempt's id is used once
    bounded          every save ends, within its deadlines
    leftovers        after a restart nothing hidden is left, but for lock files, which mean nothing unlocked
    goes on          after a restart that nothing disturbs a save is published, and a restart resumes from the newest
    needless         nothing fails or is left unknown for a lost answer, or for a start beside it that saves nothing
    diverged         nothing is published of which the ranks don't agree what it is
    no defect        nothing of Holdfast raises what it doesn't mean to
"""

from __future__ import annotations

import re
from functools import lru_cache

import xxhash
from greenlet import getcurrent

from holdfast.errors import HoldfastError
from holdfast.format.manifest import MANIFEST_NAME, decode_manifest, decode_report, report_name, void_in
from holdfast.storage.entries import attempt_of
from holdfast.storage.object_storage import without_attempt
from simulator.bucket_view import REPLACED_FOR_S, STRAY, is_manifest, is_scaffolding, marker_of
from simulator.exports import SHARED, contents_of, is_export, shared_file
from simulator.filesystem import Dir, File, durable_tree
from simulator.job import FOREIGN, METADATA, ROOT, SAVE_LIMIT_S, file_name, payload

HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{12})\.(incomplete|recovering|replaced|trash)")


class InvariantBroken(AssertionError):
    def __init__(self, invariant, message):
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class Attempt:
    """What the checker knows of one attempt; in the order in which they were begun."""

    def __init__(self, attempt, number, save, name, step, resumable, world):
        self.id, self.number, self.save, self.name, self.step = attempt, number, save, name, step
        self.resumable, self.world = resumable, world
        self.told = {}
        self.was_visible = False
        self.removed = False
        self.replaced_by = None
        self.left_behind = False
        self.is_export = is_export(save)

    @property
    def age(self):
        """What a run left behind when it went back counts as older than its own."""
        return not self.left_behind, self.number


class Checker:
    def __init__(self, sim, files, faults):
        self.sim, self.files, self.faults = sim, files, faults
        self.attempts = {}
        self.saves = {}
        self.told_by_save = {}
        self.breach = None
        self.root = None
        self.published_in_last = 0
        self.took_s = 0.0
        self.rolled_forward = 0
        self.foreign = set()
        self.left_to_later = []
        self.harmless = faults.harmless
        self.recovered_at = 0.0
        self.settled_at = {}  # by attempt in a bucket: when it was made void, deleted or replaced
        files.watch = self.changed

    def put(self, key, before, now):
        """An object of a bucket was put, or deleted (``now`` is None)."""
        name, _, file = key.partition("/")
        marker = marker_of(key)
        if marker is not None:
            if now is not None and marker.kind == "incomplete" and marker.attempt not in self.attempts:
                self._begun(marker.name, marker.attempt)
        elif is_manifest(key):
            self.root = self.files.find(ROOT)
            if now is not None:
                self._appeared(name)
                if before is not None:
                    if self.files.marker(name, _attempt_of(before), "replaced") is None:
                        self.broken(
                            "kept", f"attempt {_attempt_of(before)} at {name} was replaced, and who did it knew of none"
                        )
                    self.settled_at.setdefault(_attempt_of(before), self.sim.now)
            else:
                self._removed(name, self.attempts[_attempt_of(before)])
                self.settled_at.setdefault(_attempt_of(before), self.sim.now)
        elif now is not None and void_in(now) is not None:
            self.settled_at.setdefault(attempt_of(file), self.sim.now)
        elif now is None and not name.startswith("."):
            attempt = attempt_of(file)
            lost = attempt is not None and not is_scaffolding(without_attempt(file, attempt))
            if lost and self.files.published_at(name) == attempt:
                self.broken("whole", f"{key} was removed, and {name} is visible")

    def broken(self, invariant, message):
        if self.breach is None:
            self.breach = InvariantBroken(invariant, message)
            self.sim.stop = True
            self.sim.log("BROKEN", str(self.breach))

    # what the job tells ------------------------------------------------------------------------------------------

    def saving(self, save, step, name, resumable, world):
        self.saves.setdefault(save, (step, name, resumable, world))

    def told(self, save, rank, what, attempt, message, world):
        said = self.told_by_save.setdefault(save, {})
        said[rank] = (what, message)
        if {"published", "failed"} <= {kind for kind, _ in said.values()}:
            self.broken("agreement", f"save {save}: {said}")
        if what != "published" and self.harmless and not self.faults.struck:
            self.broken("needless", f"save {save}, rank {rank}, is told {what}: {message}")
        if what == "published" and save in self.faults.diverged and world > 1:
            self.broken("diverged", f"save {save} is told published, and its last rank is a step ahead")
        known = self.attempts.get(attempt)
        if known is None:
            known = next((found for found in self.attempts.values() if found.save == save), None)
        if what == "failed":
            messages = {text for kind, text in said.values() if kind == "failed"}
            if len(messages) > 1 and not self.faults.disturbed:
                self.broken("cause", f"save {save}: {messages}")
            if known is not None:
                known.told[rank] = what
                if self._at(known) or self._at(known, durable=True):
                    self.broken("failed", f"{known.name} of save {save} is visible, rank {rank} is told it failed")
                self._check_given_up(attempt, known)
        elif what == "published":
            if known is None:
                self.broken("whole", f"save {save} is told published, but was never begun")
                return
            known.told[rank] = what
            if known.save != save:
                self.broken("agreement", f"rank {rank} is told of save {known.save} as the end of save {save}")
            if save[0] == len(self.faults.worlds) and not known.is_export:
                self.published_in_last += 1
            if not known.removed and known.replaced_by is None:
                tree = self._durable_root().get(known.name)
                fault = self._fault(known.name, tree)
                if fault:
                    self.broken("durable", f"rank {rank} is told that {known.name} is published: durably {fault}")

    def _check_given_up(self, number, known):
        """Nothing durable may be left that a start would roll forward."""
        root = self._durable_root()
        for kind in ("incomplete", "recovering"):
            tree = root.get(f".{known.name}.{known.id}.{kind}")
            if (
                isinstance(tree, dict)
                and all(tree.get(report_name(rank)) for rank in range(known.world))
                and all(tree.get(name) == data for name, data in _data_of(known).items())
            ):
                self.broken("failed", f"{number} is told failed, and durably could still be rolled forward")

    def took(self, save, rank, seconds):
        if seconds > SAVE_LIMIT_S:
            self.broken("bounded", f"save {save} took rank {rank} {seconds:.0f} s")

    def put_beside(self, name):
        """A user's file is in ``name``, durably."""
        if self._visible() and any(attempt.name == name for attempt in self._visible()):
            self.foreign.add(name)

    def recovered(self, began_at):
        """A start has settled what it found from ``began_at`` on."""
        self.recovered_at = began_at

    def resumed(self, steps):
        """What a start takes for its candidates, best first."""
        newest = self._newest_visible(resumable=True)
        if newest is not None and (not steps or steps[0] != newest.step) and not self._two_runs():
            self.broken("goes on", f"the newest to resume from is {newest.name}, a start finds {steps}")
        for other in self._visible():
            other.left_behind = other.left_behind or (newest is not None and other.age > newest.age)
        # A start on a store may have to leave an attempt to a later one, which publishes it: it came before this run's.
        others = self.attempts.values() if self.sim.bucket is not None and newest is not None else ()
        self.left_to_later = [other for other in others if other.age > newest.age and not self._at(other)]

    def _two_runs(self):
        """Whether two runs share a bucket, which knows no locks: each goes by its own history."""
        return self.sim.bucket is not None and bool(self.faults.overlaps)

    # what the file system tells ----------------------------------------------------------------------------------

    def changed(self, parent, act, old, new):
        if self.root is None or parent is not self.root:
            found = self.files.find(ROOT)
            if parent is not found or found is None:
                return
            self.root = found
        if act == "mkdir":
            hidden = HIDDEN.fullmatch(new)
            if hidden is not None:
                self._begun(hidden[1], hidden[2])
        elif act == "exchange":
            self._appeared(new)
        elif act == "rename":
            if not new.startswith("."):
                self._appeared(new)
            elif not old.startswith("."):
                self._went(old, new)

    def _begun(self, name, attempt):
        if attempt in self.attempts:
            self.broken("attempt id", f"{attempt} of {name} was used before")
            return
        for other in self.left_to_later:
            other.left_behind = True
        self.left_to_later = []
        bucket = self.sim.bucket
        by = getcurrent().process if bucket is None or bucket.late_of is None else bucket.late_of
        save = by.save
        step, _, resumable, world = self.saves.get(save, (None, name, True, 1))
        self.attempts[attempt] = Attempt(attempt, len(self.attempts), save, name, step, resumable, world)

    def _appeared(self, name):
        tree = _tree(self.root.entries[name])
        fault = self._fault(name, tree)
        if fault:
            self.broken("whole", f"{name} became visible: {fault}")
            return
        attempt = self.attempts[self._attempt_in(name, tree)]
        attempt.was_visible = True
        attempt.replaced_by = None
        for other in self.attempts.values():
            if other is not attempt and other.name == name and other.was_visible and not other.removed:
                other.replaced_by = other.replaced_by or self._attempt_in(name, tree)
        if "failed" in attempt.told.values():
            self.broken("failed", f"{name} became visible, save {attempt.save} was told failed: {attempt.told}")

    def _went(self, name, target):
        hidden = HIDDEN.fullmatch(target)
        attempt = self.attempts.get(self._attempt_in(name, _tree(self.root.entries[target])) or "")
        if hidden is None or attempt is None:
            self.broken("kept", f"{name} was moved to {target}")
            return
        if hidden[3] == "replaced":
            attempt.replaced_by = hidden[2]
        else:
            self._removed(name, attempt)

    def _removed(self, name, attempt):
        attempt.removed = True
        self.foreign.discard(name)
        durable = self.root.durable
        newer = [other for other in self._visible() if other.age > attempt.age and other.name in durable]
        newer = [other for other in newer if other.is_export == attempt.is_export]
        if self._two_runs():
            return
        if not newer or (attempt.resumable and not any(other.resumable for other in newer)):
            self.broken("newest", f"{name} was removed, newer and durable are {[other.name for other in newer]}")
        elif len(newer) < self.faults.keep_last:
            kept = self.faults.keep_last
            self.broken("retention", f"{name} was removed with {len(newer)} newer ones, {kept} are to be kept")

    # the end -----------------------------------------------------------------------------------------------------

    def finish(self):
        """After the last restart: everything is settled."""
        self.root = self.files.find(ROOT)
        entries = {} if self.root is None else self.root.entries
        left = [name for name in entries if name.startswith(".") and name != ".holdfast" and not name.endswith(".lock")]
        left = [name for name in left if not self._is_excused(name)]
        if left:
            self.broken("leftovers", f"{sorted(left)}")
        for name, node in sorted(entries.items()):
            if not name.startswith("."):
                fault = self._fault(name, _tree(node))
                if fault:
                    self.broken("whole", f"at the end {name}: {fault}")
        for name in sorted(self.foreign):
            if FOREIGN not in getattr(entries.get(name), "entries", ()):
                self.broken("foreign", f"{name} has lost its {FOREIGN}")
        for number, attempt in self.attempts.items():
            told = set(attempt.told.values())
            if "failed" in told and self._at(attempt):
                self.broken("failed", f"{attempt.name} is visible, save {attempt.save} was told failed")
            if "published" in told and not self._is_kept(attempt):
                self.broken("kept", f"{attempt.name} of attempt {number} was told published and is gone")
        if not self.published_in_last:
            self.broken("goes on", "nothing disturbs the last run, and its save was not published")
        self.look_for_defects()

    def look_for_defects(self):
        """What a thread raised that nobody expects: it has ended, and others may wait for it without end."""
        for process, task, error in self.sim.errors:
            self.broken("no defect", f"{process}/{task}: {type(error).__name__}: {error}")

    def _is_excused(self, entry):
        """Whether the last start could not settle a leftover of a bucket.

        It came later than that; or was put by an engine after its attempt was over, and nobody knows of it; or is what
        was replaced or is being deleted, which has to be left to its readers for some time.
        """
        if self.sim.bucket is None:
            return False
        put_at, attempt = self.files.put_at(entry) + 1.0, attempt_of(entry)
        left_s = REPLACED_FOR_S if entry.endswith((".replaced", ".trash")) else 0.0
        is_stray = entry.startswith(STRAY)
        return put_at + left_s > self.recovered_at or (is_stray and put_at > self.settled_at.get(attempt, 1e9))

    def _is_kept(self, attempt):
        while attempt is not None:
            if attempt.removed or self._at(attempt):
                return True
            attempt = self.attempts.get(attempt.replaced_by)
        return False

    # looking -----------------------------------------------------------------------------------------------------

    def _visible(self):
        return [attempt for attempt in self.attempts.values() if self._at(attempt)]

    def _newest_visible(self, *, resumable):
        found = [attempt for attempt in self._visible() if attempt.resumable or not resumable]
        return max(found, key=lambda attempt: attempt.age, default=None)

    def _at(self, attempt, *, durable=False):
        """Whether it is at its final name."""
        root = self.files.find(ROOT)
        if root is None:
            return False
        node = (root.durable if durable else root.entries).get(attempt.name)
        if type(node) is not Dir:
            return False
        file = node.entries.get(MANIFEST_NAME)
        return type(file) is File and self.attempts.get(_attempt_of(bytes(file.data))) is attempt

    def _durable_root(self):
        node = self.files.root
        for part in ROOT.strip("/").split("/"):
            node = node.durable.get(part)
            if node is None:
                return {}
        return _Lazily(node)

    def _attempt_in(self, name, tree):
        return _attempt_of(tree.get(MANIFEST_NAME, b"")) if isinstance(tree, dict) else None

    def _fault(self, name, tree):
        """What is wrong with a checkpoint, in words; None if it is whole."""
        if not isinstance(tree, dict):
            return "it isn't there"
        try:
            manifest = _manifest_in(tree.get(MANIFEST_NAME, b""), name)
            attempt = self.attempts.get(manifest.attempt)
            if attempt is None or attempt.name != name or manifest.name != name:
                return f"it is of attempt {manifest.attempt} at {manifest.name}"
            reports = [report_name(rank) for rank in range(attempt.world)]
            for rank in range(attempt.world):
                data = tree.get(report_name(rank), b"")
                report = _report_in(data, report_name(rank))
                line = manifest.reports[rank]
                if (report.attempt, report.rank, report.world) != (manifest.attempt, rank, attempt.world):
                    return f"report {rank} is of another attempt, rank or world"
                if (line.size, line.digest) != (len(data), xxhash.xxh3_128_hexdigest(data)):
                    return f"report {rank} is not what the manifest lists"
        except (HoldfastError, IndexError) as error:
            return str(error)
        if len(manifest.reports) != attempt.world:
            return f"{len(manifest.reports)} reports of {attempt.world} ranks"
        held = {name: data for name, data in tree.items() if name not in {MANIFEST_NAME, FOREIGN, *reports}}
        wanted = _contents_of(attempt)
        wrong = [name for name in sorted({*held, *wanted}) if held.get(name) != wanted.get(name)]
        return f"{wrong} are not what was staged and written beforehand" if wrong else None


# The same bytes are looked at again and again: when they appear, for every rank that is told, and at the end.


@lru_cache(maxsize=64)
def _manifest_in(data, name):
    return decode_manifest(data, path=name)


@lru_cache(maxsize=64)
def _report_in(data, name):
    return decode_report(data, path=name)


def _data_of(attempt):
    """What the ranks write, by file."""
    if attempt.is_export:
        return {SHARED: shared_file(attempt.save, attempt.world)}
    return {file_name(rank): payload(attempt.save, rank) for rank in range(attempt.world)}


def _contents_of(attempt):
    """All that is to be there, but for manifest and reports."""
    if attempt.is_export:
        return contents_of(attempt.save, attempt.world)
    return {**_data_of(attempt), ".metadata": METADATA}


def _tree(node):
    if type(node) is File:
        return bytes(node.data)
    return {name: _tree(child) for name, child in node.entries.items()}


class _Lazily:
    """The durable entries of a directory, each looked at when asked for."""

    def __init__(self, node):
        self._node = node

    def get(self, name):
        node = self._node.durable.get(name) if type(self._node) is Dir else None
        return None if node is None else durable_tree(node)


_ATTEMPT = re.compile(rb'"attempt":\s*"([0-9a-f]{12})"')


def _attempt_of(data):
    found = _ATTEMPT.search(data[:4096])
    return found[1].decode() if found else None
