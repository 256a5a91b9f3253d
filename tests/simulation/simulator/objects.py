"""An object store, and the commit core's storage over it: whole objects, conditional puts, no rename.

    {name}/holdfast.json            the manifest: its put, If-None-Match, is what publishes
    {name}/{attempt}/{file}         what an attempt has written
    .{name}.{attempt}               the marker of an attempt: what kind of hidden entry it is; put If-Match

Every put is whole and durable when it is answered, and listed at once. An answer may be lost: then what is there is
read back and classified, ours or not ours. A put whose answer was lost has happened or has not: one that arrives late,
after it was given up, is not simulated.

Holdfast has no backend for object stores yet. This storage is the simulator's own, as design.md §4 words the protocol;
what is under test is the commit core and its recovery above it, unchanged. To replace a published step is not part of
it: that needs an If-Match put, and the core asks for two renames.
"""

from __future__ import annotations

import contextlib
import errno
import os

import msgspec
import xxhash
from greenlet import getcurrent

from holdfast import source
from holdfast.engine.messages import Reported
from holdfast.errors import CheckpointNotFound, DeadlineExceeded, EngineDied, StorageError
from holdfast.format.manifest import (
    MANIFEST_NAME,
    RankIndex,
    Report,
    ReportFile,
    attempt_in,
    encode_index,
    encode_report,
)
from holdfast.root import hidden_name, parse_hidden
from holdfast.storage.lease import LeaseRecord, LeaseState
from simulator import scheduler
from simulator.filesystem import Dir, File
from simulator.scheduler import Current
from simulator.system import Open

ATTEMPTS = 3
"""How often the adapter tries to learn what became of a request whose answer was lost."""


class AnswerLost(Exception):
    pass


class Bucket:
    """The objects; every request takes its time, may be refused, and may lose its answer."""

    def __init__(self, sim):
        self.sim = sim
        self.objects = {}
        self.changes = 0
        self.watch = None

    def _request(self, name, key, act, *, changes):
        system = self.sim.system
        try:
            system.enter(name, key, changes=changes)
        except OSError as error:
            raise StorageError(f"{name} {key}: {os.strerror(error.errno)}", path=key, errno=error.errno) from error
        try:
            result = act()
        finally:
            system.leave(name, key)
        if changes and self.sim.faults.repeated_answer(None):
            self.sim.log("answer lost", f"{name} {key}")
            raise AnswerLost
        return result

    def put(self, key, data, *, expected):
        """Put if the object is ``expected`` (None: absent, "any": whatever it is); whether it was put."""

        def act():
            there = self.objects.get(key)
            if expected != "any" and there != expected:
                return False
            self.objects[key] = bytes(data)
            self.changes += 1
            if self.watch is not None:
                self.watch(key, there, self.objects[key])
            return True

        return self._request("create", key, act, changes=True)

    def delete(self, key):
        def act():
            there = self.objects.pop(key, None)
            self.changes += 1
            if there is not None and self.watch is not None:
                self.watch(key, there, None)

        return self._request("unlink", key, act, changes=True)

    def get(self, key):
        return self._request("get", key, lambda: self.objects.get(key), changes=False)

    def list(self, prefix):
        return self._request(
            "list", prefix, lambda: sorted(key for key in self.objects if key.startswith(prefix)), changes=False
        )


class ObjectStorage:
    """`holdfast.storage.protocol.Storage` over a bucket."""

    root = "/bucket"

    def __init__(self, bucket):
        self._bucket = bucket

    def path(self, name):
        return f"{self.root}/{name}"

    def open_dir(self, name):
        return Current.sim.system.new_fd(Open(name, 0))

    # requests whose answer may be lost ---------------------------------------------------------------------------

    def _put(self, key, data, *, expected):
        """True if ``data`` is there by this put; False if something else was. Raises `StorageError` in doubt."""
        lost = False
        for _ in range(ATTEMPTS):
            try:
                if self._bucket.put(key, data, expected=expected):
                    return True
                return lost and self._bucket.get(key) == bytes(data)  # ours, put by the request that had no answer
            except AnswerLost:
                lost = True
        self._refuse(key, errno.ETIMEDOUT)
        return False

    def _delete(self, key):
        for _ in range(ATTEMPTS):
            try:
                self._bucket.delete(key)
            except AnswerLost:
                continue
            return
        self._refuse(key, errno.ETIMEDOUT)

    # names -------------------------------------------------------------------------------------------------------

    def _published(self, name):
        """(attempt, manifest) of what is at ``name``, or (None, None)."""
        data = self._bucket.get(f"{name}/{MANIFEST_NAME}")
        return (None, None) if data is None else (_attempt_of(data), data)

    def _marker(self, hidden):
        """The marker of a hidden entry if it is of that kind, else None."""
        data = self._bucket.get(f".{hidden.name}.{hidden.attempt}")
        if data is None or data.split()[0].decode() != hidden.kind:
            return None
        if hidden.kind in {"incomplete", "recovering"} and self._published(hidden.name)[0] == hidden.attempt:
            return None  # the manifest is the commit, whatever the marker still says
        return data

    def _prefix(self, directory):
        """Where the files of a directory are, or None if there is no such directory."""
        hidden = parse_hidden(directory)
        if hidden is None:
            attempt, _ = self._published(directory)
            return None if attempt is None else f"{directory}/{attempt}/"
        marker = self._marker(hidden)
        if marker is None:
            return None
        return f"{hidden.name}/{(marker.split()[1:] or [hidden.attempt.encode()])[0].decode()}/"

    def _key(self, name):
        directory, _, file = name.partition("/")
        if file == MANIFEST_NAME and parse_hidden(directory) is None:
            return f"{directory}/{file}"
        prefix = self._prefix(directory)
        return None if prefix is None else prefix + file

    def _data(self, name):
        key = self._key(name)
        return None if key is None else self._bucket.get(key)

    # the protocol ------------------------------------------------------------------------------------------------

    def make_dir(self, name):
        hidden = parse_hidden(name)
        if not self._put(f".{hidden.name}.{hidden.attempt}", hidden.kind.encode(), expected=None):
            self._refuse(name, errno.EEXIST)

    def write_file(self, name, data):
        key = self._key(name)
        if key is None:
            self._refuse(name, errno.ENOENT)
        if not self._put(key, data, expected=None):
            self._refuse(name, errno.EEXIST)

    def read_file(self, name, *, max_bytes):
        data = self._data(name)
        if data is None:
            self._refuse(name, errno.ENOENT)
        if len(data) > max_bytes:
            self._refuse(name, errno.EFBIG)
        return data

    def read_range(self, name, offset, nbytes):
        return self.read_file(name, max_bytes=1 << 40)[offset : offset + nbytes]

    def read_pieces(self, name, nbytes):
        data = self.read_file(name, max_bytes=1 << 40)
        for start in range(0, len(data), nbytes):
            yield data[start : start + nbytes]

    def size(self, name):
        data = self._data(name) if "/" in name else None
        return None if data is None else len(data)

    def exists(self, name):
        return self._data(name) is not None if "/" in name else self._prefix(name) is not None

    def list_dir(self, name):
        if name:
            prefix = self._prefix(name)
            found = [] if prefix is None else [key[len(prefix) :] for key in self._bucket.list(prefix)]
            if prefix is not None and parse_hidden(name) is None:
                found = sorted({*found, MANIFEST_NAME})
            return found
        entries = []
        for key in self._bucket.list(""):
            if key.startswith("."):
                kind = (self._bucket.get(key) or b"gone").split()[0].decode()
                hidden = parse_hidden(f"{key}.{kind}")
                if hidden is not None and self._marker(hidden) is not None:
                    entries.append(hidden.entry)
            elif key.endswith(f"/{MANIFEST_NAME}") and key.count("/") == 1:
                entries.append(key.partition("/")[0])
        return sorted(entries)

    def rename(self, source, target):
        if "/" in source:
            self._move_file(source, target)
            return
        old, new = parse_hidden(source), parse_hidden(target)
        if old is not None and new is not None:
            marker = self._marker(old)
            if marker is None:
                self._refuse(source, errno.ENOENT)
            if not self._put(f".{old.name}.{old.attempt}", new.kind.encode(), expected=marker):
                self._refuse(source, errno.ENOENT)
        elif old is not None:
            self._publish(old, source, target)
        else:
            self._hide(source, new)

    def _publish(self, old, source, target):
        staged = f"{old.name}/{old.attempt}/{MANIFEST_NAME}"
        manifest = self._bucket.get(staged) if self._marker(old) is not None else None
        if manifest is None:
            self._refuse(source, errno.ENOENT)
        if not self._put(f"{target}/{MANIFEST_NAME}", manifest, expected=None):
            self._refuse(target, errno.EEXIST)
        # What is left of the attempt says nothing any more; a recovery finds and removes it.
        self._delete_quietly(f".{old.name}.{old.attempt}", staged)

    def _hide(self, source, new):
        """Take a published step away: say so, then delete the manifest, which is what makes it invisible."""
        attempt, manifest = self._published(source)
        if manifest is None:
            self._refuse(source, errno.ENOENT)
        if not self._put(f".{new.name}.{new.attempt}", b"trash " + attempt.encode(), expected=None):
            self._refuse(source, errno.EEXIST)
        self._delete(f"{source}/{MANIFEST_NAME}")

    def _move_file(self, source, target):
        data, key = self._data(source), self._key(target)
        if data is None or key is None:
            self._refuse(source, errno.ENOENT)
        self._put(key, data, expected="any")
        self._delete(self._key(source))

    def sync_dir(self, name):
        """Nothing to do: what was answered is durable."""

    def unlink(self, name):
        key = self._key(name)
        if key is not None:
            self._delete(key)

    def remove_tree(self, name):
        hidden = parse_hidden(name)
        if hidden is None:
            return
        marker = self._marker(hidden)
        if marker is None:
            return
        attempt, published = hidden.attempt, self._published(hidden.name)[0]
        if len(marker.split()) == 2:
            attempt = marker.split()[1].decode()
            if published == attempt:
                self._delete(f"{hidden.name}/{MANIFEST_NAME}")  # a deletion that was interrupted
        elif published == attempt:
            return
        for key in self._bucket.list(f"{hidden.name}/{attempt}/"):
            self._delete(key)
        self._delete(f".{hidden.name}.{hidden.attempt}")

    def sweep(self):
        """At a start: remove markers of attempts that are published, and what engines put after they were given up."""
        keys = self._bucket.list("")
        for key in keys:
            name, attempt, *file = key.split("/")[:3] if key.count("/") == 2 else ("", "")
            if file and f".{name}.{attempt}" not in keys and self._published(name)[0] != attempt:
                trashed = any(
                    self._bucket.get(marker) == b"trash " + attempt.encode() for marker in keys if marker[0] == "."
                )
                if not trashed:
                    self._delete_quietly(key)
        for key in self._bucket.list("."):
            hidden = parse_hidden(f"{key}.incomplete")
            if hidden is not None and self._published(hidden.name)[0] == hidden.attempt:
                self._delete_quietly(key, f"{hidden.name}/{hidden.attempt}/{MANIFEST_NAME}")

    def _delete_quietly(self, *keys):
        for key in keys:
            try:
                self._delete(key)
            except StorageError:
                return

    def look(self, directory, name):
        """A lease as another host sees it: whether it moves."""
        data = self._data(f"{directory}/{name}")
        if data is None:
            return None
        return LeaseState(LeaseRecord(0, "", "", 0, int(data)), 0, None)

    def _refuse(self, name, code):
        raise StorageError(f"{self.root}/{name}: {os.strerror(code)}", path=f"{self.root}/{name}", errno=code)


def _attempt_of(manifest):
    return attempt_in(manifest[:4096])


REAL_READ_SMALL = source.read_small


def read_small(directory, name, *, limit, committed=False):
    """How a published checkpoint is opened: from the bucket, where the job saves to one."""
    bucket = Current.sim.bucket
    if bucket is None:
        return REAL_READ_SMALL(directory, name, limit=limit, committed=committed)
    path = f"{directory}/{name}"
    data = bucket.get(path.removeprefix(f"{ObjectStorage.root}/"))
    if data is None:
        raise CheckpointNotFound(f"{path} doesn't exist: there is no checkpoint here", path=path)
    return data[: limit + 1]


class View:
    """What is in a bucket, for the checker to look at as at a root of the file system; all of it is durable."""

    def __init__(self, bucket, path):
        self.bucket, self.path = bucket, path
        self.watch = None
        self._seen, self._seen_at = None, -1

    @property
    def root(self):
        """The directory above all, with what is on the way to the root of the job."""
        node = self.find(self.path)
        for part in reversed(self.path.strip("/").split("/")):
            above = Dir(0)
            above.entries[part] = above.durable[part] = node
            node = above
        return node

    def find(self, path):
        assert path == self.path
        if self._seen_at != self.bucket.changes:
            self._seen_at, self._seen = self.bucket.changes, self._look()
        return self._seen

    def _look(self):
        objects, root, known = self.bucket.objects, Dir(0), set()
        below = {}
        for key in objects:
            first, _, rest = key.partition("/")
            second, slash, file = rest.partition("/")
            if slash:
                below.setdefault(f"{first}/{second}/", []).append((key, file))
        for key, data in objects.items():
            if key.startswith("."):
                known.add(key)
                name, _, attempt = key[1:].rpartition(".")
                words = data.decode().split()
                hidden = hidden_name(name, attempt, words[0])
                attempt = words[1] if len(words) == 2 else attempt
                there = objects.get(f"{name}/{MANIFEST_NAME}")
                files = below.get(f"{name}/{attempt}/", [])
                known.update(key for key, _ in files)
                if there is None or _attempt_of(there) != attempt:
                    self._add(root, hidden, files)
            elif key.endswith(f"/{MANIFEST_NAME}") and key.count("/") == 1:
                name = key.partition("/")[0]
                files = below.get(f"{name}/{_attempt_of(data)}/", [])
                known.add(key)
                known.update(key for key, _ in files)
                self._add(root, name, files, data)
        for key in objects.keys() - known:
            root.entries[f".stray {key}"] = Dir(0)
        root.durable = root.entries
        return root

    def _add(self, root, name, files, manifest=None):
        node = Dir(0)
        found = {file: self.bucket.objects[key] for key, file in files}
        if manifest is not None:
            found[MANIFEST_NAME] = manifest
        for file, data in found.items():
            node.entries[file] = File(0)
            node.entries[file].data, node.entries[file].durable = data, data
        node.durable = node.entries
        root.entries[name] = node


class ObjectEngine:
    """What an `EngineClient` is to a delivery: a process of its own that puts a rank's file, and then its report.

    As the real one: no report before the trainer's word, none after a cancel was answered; what is verified is finished
    when the trainer has died, anything else dropped; a lease beats meanwhile.
    """

    def __init__(self, rank, storage):
        self.rank, self._storage = rank, storage
        self.process = None
        self._images, self._plans, self._work = {}, {}, {}
        self._numbers = 0
        self._removing = {}

    def start(self):
        sim, trainer = Current.sim, getcurrent().process
        self.process = sim.process(f"engine{self.rank}.{len(sim.engines)}", trainer.host)
        self.process.trainer_key = trainer.key
        self.process.on_death.append(sim.system.drop_process)
        sim.engines.append(self.process)
        sim.faults.doom_engine(self.process)
        process = self.process
        trainer.on_death.append(lambda _: self._orphaned(process))

    def _orphaned(self, process):
        if not any(work.verified.is_set() and not work.ended for work in self._work.values()):
            process.sim.end(process, 0)
        else:
            process.sim.later(6.0, lambda: process.sim.end(process, 0))

    def _alive(self):
        if self.process is None or self.process.dead:
            self.start()
        return self.process

    def add_image(self, fd, nbytes):
        self._numbers += 1
        self._images[self._numbers] = Current.sim.system.opened(fd).node.data
        return self._numbers

    def add_plan(self, files, **_):
        self._numbers += 1
        self._plans[self._numbers] = files
        return self._numbers

    def drop_plan(self, number):
        del self._plans[number]

    def persist(self, dir_fd, *, attempt, plan, image, step, world, report_name, lease_name):
        process = self._alive()
        work = Work(process)
        self._work[attempt] = work
        directory = Current.sim.system.opened(dir_fd).node
        report = Report(attempt, step, self.rank, world, (), b"", encode_index(RankIndex((), ())))
        work.task = process.spawn(
            self._run, work, directory, self._plans[plan], self._images[image], report, report_name, name="attempt"
        )
        process.spawn(self._beat, work, f"{directory}/{lease_name}", name="lease")

    def _beat(self, work, name):
        key = self._storage._key(name)
        beats = 0
        while not work.ended and key is not None:
            beats += 1
            with contextlib.suppress(StorageError):
                self._storage._put(key, b"%d" % beats, expected="any")
            work.over.wait(0.25)
        with contextlib.suppress(StorageError):
            if key is not None:
                self._storage._delete(key)
        work.lease_gone.set()

    def _run(self, work, directory, files, image, report, report_name):
        try:
            rows = []
            for row in files:
                data = bytes(image[row.image_offset : row.image_offset + row.size])
                self._storage.write_file(f"{directory}/{row.name}", data)
                rows.append(ReportFile(row.name, row.size, xxhash.xxh3_64_digest(data)[::-1]))
            work.verified.wait()
            if work.cancelled:
                return
            encoded = encode_report(msgspec.structs.replace(report, files=tuple(rows)))
            work.reporting = True
            self._storage.write_file(f"{directory}/{report_name}", encoded)
            work.end()
            work.lease_gone.wait()
            digest = xxhash.xxh3_128_hexdigest(encoded)
            work.reported = Reported(report.attempt, len(encoded), digest, sum(row.size for row in rows))
        except StorageError as error:
            work.error = error
        finally:
            if not work.process.dead:
                work.end()
                work.answered.set()

    def staging_verified(self, attempt):
        work = self._work[attempt]
        self._raise_if_over(work)
        work.verified.set()

    def wait_reported(self, attempt, timeout_s):
        work = self._work[attempt]
        deadline = Current.sim.now + timeout_s
        while not work.answered.wait(min(0.2, max(0.0, deadline - Current.sim.now))):
            self._raise_if_over(work)
            if Current.sim.now >= deadline:
                raise DeadlineExceeded("no report yet", waited_for="the engine's report", timeout_s=timeout_s)
        self._raise_if_over(work)
        return work.reported

    def _raise_if_over(self, work):
        if work.error is not None:
            raise work.error
        if work.reported is None and work.process.dead:
            raise EngineDied(f"the engine of rank {self.rank} died", rank=self.rank)

    def cancel(self, attempt, timeout_s):
        work = self._work.get(attempt)
        if work is None:
            return False
        if work.process.dead:
            return True
        work.cancelled = True
        work.verified.set()
        if not work.answered.wait(timeout_s):
            # As with the real one: killed, and if it hangs in a request it may still be served.
            Current.sim.kill(work.process, at_once=False)
            if not work.process.dead:
                raise DeadlineExceeded("it hangs", waited_for="an engine that was killed", timeout_s=timeout_s)
        return True

    def remove(self, dir_fd, name):
        process = self._alive()
        self._removing[name] = process
        process.spawn(self._remove, name, name="remove")

    def _remove(self, name):
        with contextlib.suppress(StorageError):
            self._storage.remove_tree(name)
        self._removing[name] = None

    def wait_removed(self, name, timeout_s):
        if timeout_s > 0:
            raise AssertionError("nobody waits for one removal")
        process = self._removing[name]
        if process is None:
            del self._removing[name]
        elif process.dead:
            raise EngineDied(f"the engine of rank {self.rank} died", rank=self.rank)
        else:
            raise DeadlineExceeded("it removes", waited_for=f"the engine to remove {name}", timeout_s=timeout_s)

    def wait_removals(self, timeout_s):
        deadline = Current.sim.now + timeout_s
        while any(process and not process.dead for process in self._removing.values()) and Current.sim.now < deadline:
            Current.sim.sleep(0.02)

    def close(self, timeout_s):
        if self.process is not None:
            Current.sim.end(self.process, 0)


class Work:
    """One attempt in an `ObjectEngine`."""

    def __init__(self, process):
        self.process = process
        self.verified, self.over = scheduler.Event(), scheduler.Event()
        self.lease_gone, self.answered = scheduler.Event(), scheduler.Event()
        self.cancelled = self.reporting = self.ended = False
        self.reported = self.error = self.task = None

    def end(self):
        self.ended = True
        self.over.set()
