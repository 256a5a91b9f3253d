"""What is in a bucket, as the checker looks at a root: directories of plain-named files, all of it durable.

step-1                          published: the manifest, and the objects of its attempt by their plain names
.step-1.{attempt}.incomplete    begun and not void: what a start may still publish
.stray {key}                    an object that no start will ever look for: neither published, nor of an attempt that
                                is marked as begun; voids apart, which stay
"""

from __future__ import annotations

from holdfast.format.manifest import MANIFEST_NAME, attempt_in, void_in
from holdfast.storage.entries import attempt_of, hidden_name, parse_hidden
from holdfast.storage.leases import COORDINATOR_LEASE
from holdfast.storage.object_storage import faces_of, with_attempt, without_attempt
from simulator.filesystem import Dir, File
from simulator.objects import EPOCH_S

STRAY = ".stray "
MARKERS = ".holdfast/attempts/"
REPLACED_FOR_S = 2.0
"""How long in a schedule what was replaced stays for its readers."""


def marker_of(key):
    """The hidden entry that a key marks, or None."""
    return parse_hidden(key[len(MARKERS) :]) if key.startswith(MARKERS) else None


def is_manifest(key):
    return key.endswith(f"/{MANIFEST_NAME}") and key.count("/") == 1


def is_scaffolding(file):
    """Whether an attempt needs ``file``, a plain name, only until it is published."""
    return file in (".plan", MANIFEST_NAME) or file.startswith("lease-")


class View:
    """The tree, made anew when something has changed."""

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

    def _data(self, key):
        there = self.bucket.objects.get(key)
        return None if there is None else there.data

    def published_at(self, name):
        """The attempt that is published at ``name``, or None."""
        data = self._data(f"{name}/{MANIFEST_NAME}")
        return None if data is None else attempt_in(data[:4096])

    def is_void(self, name, attempt):
        sealed = self._data(f"{name}/{with_attempt(MANIFEST_NAME, attempt)}")
        return sealed is not None and void_in(sealed) is not None

    def _look(self):
        objects, root = self.bucket.objects, Dir(0)
        of_attempts, plain = {}, []
        for key in objects:
            name, slash, file = key.partition("/")
            if slash and not key.startswith("."):
                attempt = attempt_of(file)
                if attempt is None:
                    plain.append((name, file, key))
                else:
                    of_attempts.setdefault((name, attempt), {})[without_attempt(file, attempt)] = key
        looked_for = {(marker.name, marker.attempt): marker for marker in map(marker_of, objects) if marker}
        for (name, attempt), marker in looked_for.items():
            if self.published_at(name) != attempt and (marker.kind != "incomplete" or not self.is_void(name, attempt)):
                self._add(root, marker.entry, of_attempts.get((name, attempt), {}))
        for (name, attempt), files in of_attempts.items():
            if self.published_at(name) == attempt or (name, attempt) in looked_for:
                continue
            for file, key in files.items():
                is_void = file == MANIFEST_NAME and void_in(objects[key].data) is not None
                if not is_void and file != COORDINATOR_LEASE:
                    root.entries[f"{STRAY}{key}"] = Dir(0)
        for name, file, key in plain:
            if file == MANIFEST_NAME:
                self._add(root, name, of_attempts.get((name, self.published_at(name)), {}), key)
            elif self.published_at(name) is None and not any(marked == name for marked, _ in looked_for):
                root.entries[f"{STRAY}{key}"] = Dir(0)
        root.durable = root.entries
        return root

    def _add(self, root, entry, files, manifest=None):
        node = Dir(0)
        found = {file: self._data(key) for file, key in files.items() if not is_scaffolding(file)}
        if manifest is not None:
            found[MANIFEST_NAME] = self._data(manifest)
        for file, data in found.items():
            node.entries[file] = File(0)
            node.entries[file].data, node.entries[file].durable = data, data
        node.durable = node.entries
        root.entries[entry] = node

    def marker(self, name, attempt, kind):
        return self._data(f"{MARKERS}{hidden_name(name, attempt, kind)}")

    def put_at(self, entry):
        """When a hidden entry was marked, or a stray object was put, by the time of the schedule; to the second."""
        key = entry[len(STRAY) :] if entry.startswith(STRAY) else f"{MARKERS}{entry}"
        return self.bucket.objects[key].modified_s - EPOCH_S - self.bucket.clock_ahead_s

    def missing_faces(self, name, manifest):
        """The plain-named copies that ``manifest`` should have at ``name``, and hasn't."""
        faces = faces_of(manifest)
        return [
            plain for plain, stored in faces.items() if self._data(f"{name}/{plain}") != self._data(f"{name}/{stored}")
        ]
