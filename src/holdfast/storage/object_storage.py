"""Object stores as a storage of the commit protocol. Torch-free.

    ROOT/step-100/__0_0.0123456789ab.distcp             every object of attempt 0123456789ab has its id in its name
    ROOT/step-100/holdfast.0123456789ab.json            sealed: the attempt may be published; or a void: it never will
    ROOT/step-100/holdfast.json                         published: the manifest, created once
    ROOT/step-100/.metadata, config.json, …             faces: plain-named copies of small files, for other readers
    ROOT/.holdfast/attempts/.step-100.0123456789ab.incomplete     begun, and not settled yet

The place of an attempt is the virtual directory ``step-100//0123456789ab``: its files are the objects above.

Guarantees: what `holdfast.storage.protocol.Storage` says of each method. An attempt is sealed or made void by creating
one object, which replaces nothing: nothing of an attempt is removed unless it can't be published any more, by whoever
began it, wherever it hangs. A reader sees a checkpoint, or none. Ages are told by the store's clock alone.
Assumes: the store is consistent, and refuses to create an object that exists (`ObjectStorage.make_root` proves it).
Does not: lock anything: of two writers of one name one is refused, and writers of two names don't disturb each other.
Know its readers: what is replaced stays for `REPLACED_FOR_S`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, OutcomeUnknown, StorageError
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    attempt_in,
    decode_manifest,
    encode_void,
    void_in,
)
from holdfast.storage.entries import HiddenEntry, HiddenKind, attempt_id, attempt_of, hidden_name, parse_hidden
from holdfast.storage.faces import data_faces, last_what_makes_it_visible, outdated_weights
from holdfast.storage.leases import LeaseState, decode_record
from holdfast.storage.locks import DIRECTORY
from holdfast.storage.object_leases import ObjectLease, has_ended, record_of_process
from holdfast.storage.object_store import PutInDoubt
from holdfast.storage.protocol import PublishOutcome, WithdrawOutcome, WriterTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.storage.object_client import ObjectClient
    from holdfast.storage.object_store import Listed, Tag
    from holdfast.storage.protocol import HeldLease, Storage

_log = logging.getLogger("holdfast.storage")


DELETED_AT_A_TIME: Final = 1000
COPIES_AT_A_TIME: Final = 8
REPLACED_FOR_S: Final = 900.0
"""How long the objects of a replaced checkpoint stay for those who read it, in seconds."""
RACERS: Final = 8
"""How many requests try to create one object at a time to prove that only one succeeds."""
_PROVEN: Final[set[tuple[str, str]]] = set()
"""Buckets of which that is known."""
_ATTEMPTS: Final = f"{DIRECTORY}/attempts"
ACCESS_VARIABLES: Final = (
    "AWS_",
    "AZURE_",
    "AZURITE_",
    "FSSPEC_",
    "GOOGLE_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "MSC_",
    "NO_PROXY",
    "SSL_CERT_",
)
"""How names of environment variables begin by which stores are reached."""
_WRITER: Final = "holdfast.storage.object_writer"


def with_attempt(file: str, attempt: str) -> str:
    """Return the name of ``file`` of ``attempt``: ``__0_0.0123456789ab.distcp``; unchanged if it has the id already.

    Readers take every ``*.jinja`` of a directory: there the id comes last.
    """
    below, slash, last = file.rpartition("/")
    if attempt in last.split("."):
        return file
    stem, dot, suffix = last.rpartition(".")
    if suffix == "jinja":
        return f"{file}.{attempt}"
    return f"{below}{slash}" + (f"{stem}.{attempt}{dot}{suffix}" if stem else f"{last}.{attempt}")


def without_attempt(file: str, attempt: str) -> str:
    """Return the plain name of which ``file`` is that of ``attempt``: the inverse of `with_attempt`."""
    below, slash, last = file.rpartition("/")
    return f"{below}{slash}{last.replace(f'.{attempt}', '', 1)}"


class NoLock:
    """Stands for a lock where none is needed."""

    def renew(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class ObjectStorage:
    """`holdfast.storage.protocol.Storage` below the URL of ``store``; every call ends by the deadline of `until`."""

    takes_pieces: Final[bool] = False
    has_locks: Final[bool] = False
    lease_quiet_s: Final[float] = 25.0

    def __init__(self, store: ObjectClient) -> None:
        self.store = store
        self.ends_s = math.inf
        self._scaffolding: dict[str, list[str]] = {}
        """By attempt, what is to be removed once it is published, as far as it was listed."""
        self.may_delete = True
        """False where `make_root` was not allowed to delete its probe."""

    @property
    def root(self) -> str:
        return self.store.url

    def __repr__(self) -> str:
        return f"ObjectStorage({self.root!r})"

    def until(self, ends_s: float) -> None:
        """Set the deadline of all calls from now on to ``ends_s`` of the monotonic clock; by default there is none."""
        self.ends_s = ends_s

    def path(self, name: str) -> str:
        """Return the URL of ``name``."""
        return self.store.url_of(self._key(name))

    def _key(self, name: str) -> str:
        """Return the key of ``name``, below the root: files of a virtual directory have their attempt in theirs."""
        place, virtual, rest = name.partition("//")
        attempt, _, file = rest.partition("/")
        if not virtual:
            return name
        return f"{place}/{with_attempt(file, attempt)}" if file else place

    # Reading. ----------------------------------------------------------------------------------------------------

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        return self._read(name, max_bytes)[0]

    def _read(self, name: str, max_bytes: int) -> tuple[bytes, Tag]:
        data, size, tag = self.store.get_tagged(self._key(name), 0, max_bytes + 1, ends_s=self.ends_s)
        if size > max_bytes:
            path = self.path(name)
            raise StorageError(
                f"can't read {path}: it has {size} bytes, expected at most {max_bytes}; Holdfast did "
                "not write this object",
                path=path,
                errno=errno.EFBIG,
            )
        return bytes(data), tag

    def read_head(self, name: str, nbytes: int) -> tuple[bytes, int] | None:
        """Read the first ``nbytes`` of an object, and return its size, too; None where there is none."""
        try:
            data, size = self.store.get(self._key(name), 0, nbytes, ends_s=self.ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return bytes(data), size

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        if not nbytes:
            return b""
        try:
            return bytes(self.store.get(self._key(name), offset, offset + nbytes, ends_s=self.ends_s)[0])
        except StorageError as error:
            if error.errno == errno.ERANGE:
                return b""
            raise

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        offset = 0
        while piece := self.read_range(name, offset, nbytes):
            yield piece
            offset += len(piece)

    def size(self, name: str) -> int | None:
        return self.store.size(self._key(name), ends_s=self.ends_s)

    def exists(self, name: str) -> bool:
        """Return True if the object, or any below ``name``, exists; a place exists also while its attempt is marked."""
        if self._is_place(name):
            return bool(self.list_dir(name) or self._markers(self._key(name), name.partition("//")[2]))
        return self.size(name) is not None or self.store.any_below(self._key(name), ends_s=self.ends_s)

    def list_dir(self, name: str) -> list[str]:
        found = self.store.names(self._key(name), ends_s=self.ends_s)
        if not self._is_place(name):
            return found
        attempt = name.partition("//")[2]
        return [entry for entry in found if attempt in entry.split(".")]

    def list_tree(self, name: str) -> list[Listed]:
        """List all objects below ``name``; a listing may lag behind."""
        found = self.store.objects(self._key(name), ends_s=self.ends_s)
        if not self._is_place(name):
            return found
        attempt = name.partition("//")[2]
        return [row for row in found if attempt in row.name.rpartition("/")[2].split(".")]

    def _is_place(self, name: str) -> bool:
        return "//" in name and "/" not in name.partition("//")[2]

    # Files. ------------------------------------------------------------------------------------------------------

    def make_root(self) -> None:
        """Prove, once a process and bucket, that this store may be written to and refuses to replace what it must not.

        Raises `ConfigError` where objects that exist are replaced by a create: of two writers both would win there.
        """
        bucket = "/".join(self.root.split("/")[:3]), json.dumps(self.store.options, sort_keys=True)
        if bucket in _PROVEN:
            return
        probe = f"{DIRECTORY}/probe.{secrets.token_hex(6)}"

        def create(number: int) -> bool:
            data = f"{number}\n".encode()
            return self.store.create(probe, data, ours=data.__eq__, ends_s=self.ends_s)

        with ThreadPoolExecutor(RACERS, thread_name_prefix="holdfast-probe") as racing:
            won = sum(racing.map(create, range(RACERS)))
        late = create(RACERS)
        try:
            self.unlink(probe)
        except StorageError as error:
            if error.errno != errno.EACCES:
                raise
            self.may_delete = False
            _log.warning("%s stays, for nothing may be deleted there: %s", self.path(probe), error)
        if won != 1 or late:
            raise ConfigError(
                f"{self.root}: of {RACERS} concurrent requests to create one object {won} succeeded"
                f"{', and a later one too' if late else ''}; expected one. This store ignores the condition "
                "If-None-Match, so that two writers could destroy each other's checkpoints: use one that keeps it "
                "(S3, Google Cloud Storage, Azure, SeaweedFS, Ceph, current MinIO), or a gateway that passes it on",
                field="root",
            )
        if self.may_delete:
            _PROVEN.add(bucket)

    def make_dir(self, name: str) -> None:
        """Do nothing: there are no directories."""

    def sync_dir(self, name: str) -> None:
        """Do nothing: an acknowledged object is durable."""

    def write_file(self, name: str, data: bytes) -> None:
        if not self.store.create(self._key(name), data, ours=data.__eq__, ends_s=self.ends_s):
            path = self.path(name)
            raise StorageError(f"can't create {path}: it exists", path=path, errno=errno.EEXIST)

    def replace_file(self, name: str, data: bytes, *, by: str) -> None:
        del by
        self.store.put(self._key(name), data, ends_s=self.ends_s)

    def unlink(self, name: str) -> None:
        self.store.delete([self._key(name)], ends_s=self.ends_s)

    def remove_tree(self, name: str) -> None:
        place = self._key(name)
        names = [row.name for row in self.list_tree(name)]
        if not self._is_place(name):
            self.remove(place, names)
            return
        # A void stays: whoever began the attempt may still be about to seal it.
        sealed = with_attempt(MANIFEST_NAME, name.partition("//")[2])
        self.remove(place, [found for found in names if found != sealed or self._void_at(f"{place}/{found}") is None])
        markers = self._markers(place, name.partition("//")[2])
        if any(marker.kind == "trash" for marker in markers) and self.size(f"{place}/{MANIFEST_NAME}") is None:
            self.remove(place, [row.name for row in self.list_tree(place) if attempt_of(row.name) is None])
        self.store.delete([f"{_ATTEMPTS}/{marker.entry}" for marker in markers], ends_s=self.ends_s)

    def remove(self, below: str, names: Iterable[str]) -> None:
        """Remove objects below ``below``; absent ones are fine."""
        left = [f"{below}/{name}" if below else name for name in names]
        for start in range(0, len(left), DELETED_AT_A_TIME):
            self.store.delete(left[start : start + DELETED_AT_A_TIME], ends_s=self.ends_s)

    # Attempts: sealed or void by one create, published by another. ------------------------------------------------

    def directory_of(self, name: str, attempt: str) -> str:
        return f"{name}//{attempt}"

    def stored_as(self, file: str, attempt: str) -> str:
        return with_attempt(file, attempt)

    def begin(self, name: str, attempt: str, *, recoverable: bool) -> None:
        if recoverable:
            self._mark(name, attempt, "incomplete")

    def target(self, directory: str) -> WriterTarget:
        name, _, attempt = directory.partition("//")
        # An engine has the environment of its start: credentials may have come, or been renewed, since.
        access = json.dumps({key: value for key, value in os.environ.items() if key.startswith(ACCESS_VARIABLES)})
        return WriterTarget(_WRITER, (self.store.url, name, attempt, json.dumps(self.store.options), access))

    def seal(self, directory: str, manifest: bytes, *, again: bool = False) -> None:
        path = f"{directory}/{MANIFEST_NAME}"
        if self.store.create(self._key(path), manifest, ours=manifest.__eq__, ends_s=self.ends_s):
            return
        found, _ = self._read(path, max(MANIFEST_HEAD_BYTES, len(manifest)) << 4)
        if void_in(found) is None and again:
            return  # sealed by the coordinator that died
        where = self.path(path)
        raise StorageError(
            f"{where} was put there by a start that took this attempt for dead: another process has recovered "
            f"{self.root} meanwhile; save again",
            path=where,
            errno=errno.EEXIST,
        )

    def require_all(self, directory: str, manifest: Manifest, *, alone: bool = False) -> None:
        name, attempt = manifest.name, manifest.attempt
        rows = self.store.objects(name, ends_s=self.ends_s)
        others = [row.name for row in rows if attempt_of(row.name) is None]
        if alone and others and self._published_attempt(name) != attempt:
            path = self.path(name)
            message = f"{path} came to exist while it was being saved ({others[0]}), and is not replaced"
            raise CheckpointExists(message, path=path)
        there = {row.name: row.size for row in rows if attempt in row.name.rpartition("/")[2].split(".")}
        self._scaffolding[attempt] = [file for file in there if _is_scaffolding(without_attempt(file, attempt))]
        small = {line.name: line.size for line in manifest.reports} | {file.name: file.size for file in manifest.files}
        missing = [file for file, size in small.items() if there.get(file) != size]
        known = {*small, *self._scaffolding[attempt]}
        data = sum(size for file, size in there.items() if file not in known)
        expected = sum(line.nbytes for line in manifest.reports)
        if (missing or data != expected) and self._published_attempt(name) is None:  # else it is refused
            path = self.path(f"{directory}/{missing[0]}" if missing else directory)
            what = "is missing, or has another size" if missing else f"has {data} bytes of data, expected {expected}"
            raise StorageError(
                f"{path} {what}: it was put by this attempt and is not there any more; somebody removes objects below "
                f"{self.root} (a second job, a lifecycle rule): end that, and save again",
                path=path,
                errno=errno.ENOENT,
            )

    def publish(self, directory: str, name: str, attempt: str, manifest: bytes, *, overwrite: bool) -> PublishOutcome:
        """Create the manifest at its final name, or replace just the one that is there; then put the faces."""
        del directory  # it is sealed
        path = self.path(name)
        try:
            won = self._create_manifest(name, attempt, manifest) or (
                overwrite and self._replace_manifest(name, attempt, manifest)
            )
        except PutInDoubt as doubt:
            message = f"{path} may have been published as attempt {attempt}, or may be published later: {doubt}"
            return PublishOutcome("unknown", error=OutcomeUnknown(message, attempt=attempt))
        except StorageError as error:
            return PublishOutcome("refused", error=error)
        if won:
            self._finish(name, attempt, manifest)
            return PublishOutcome("published")
        message = f"{path} came to exist while it was being published; published data is never replaced"
        return PublishOutcome("refused", error=CheckpointExists(message, path=path))

    def _create_manifest(self, name: str, attempt: str, manifest: bytes) -> bool:
        return self.store.create(f"{name}/{MANIFEST_NAME}", manifest, ours=_is_of(attempt), ends_s=self.ends_s)

    def _replace_manifest(self, name: str, attempt: str, manifest: bytes) -> bool:
        """Replace the manifest at ``name``, if it is still the one just read; again where it isn't."""
        key = f"{name}/{MANIFEST_NAME}"
        refuse_replacing(self, name)
        while True:
            try:
                found, tag = self._read(key, 1 << 30)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                if self._create_manifest(name, attempt, manifest):  # it was deleted meanwhile
                    return True
                continue
            before = attempt_in(found)
            if before == attempt:
                return True
            if before is not None:
                self._mark(name, before, "replaced")
            if self.store.replace(key, manifest, tag, ours=_is_of(attempt), ends_s=self.ends_s):
                self._clear_faces(name, found, manifest)
                return True

    def _finish(self, name: str, attempt: str, manifest: bytes) -> None:
        """Put the faces of what is published and remove what it took to publish it; the next start does what fails."""
        try:
            self._put_faces(name, attempt, manifest)
            needless = self._scaffolding.pop(attempt, None)
            if needless is None:  # of an attempt that others began
                there = self.list_dir(self.directory_of(name, attempt))
                needless = [entry for entry in there if _is_scaffolding(without_attempt(entry, attempt))]
            marker = f"{_ATTEMPTS}/{hidden_name(name, attempt, 'incomplete')}"
            self.remove("", [*(f"{name}/{entry}" for entry in needless), marker])  # the marker last
        except (StorageError, CheckpointCorrupt, ConfigError) as error:
            _log.warning("%s is published; what stock readers need beside it comes later: %s", self.path(name), error)

    def _put_faces(self, name: str, attempt: str, manifest: bytes) -> None:
        """Put the faces of ``attempt``; again those of another that replaced it meanwhile, whose own may be older."""
        key = f"{name}/{MANIFEST_NAME}"
        while True:
            faces = faces_of(decode_manifest(manifest, path=self.path(key)))
            if any(plain.endswith(".safetensors.index.json") for plain in faces):
                self.remove(name, outdated_weights(self.list_dir(name), faces))
            rows = sorted(faces.items(), key=last_what_makes_it_visible)
            for _, together in groupby(rows, key=lambda face: last_what_makes_it_visible(face)[0]):
                copies = [(f"{name}/{stored}", f"{name}/{plain}") for plain, stored in together]
                copy = partial(self.store.copy, ends_s=self.ends_s)
                take_turns([partial(copy, *row) for row in copies], COPIES_AT_A_TIME)
            now = self._published_attempt(name)
            if now is None or now == attempt:
                return
            attempt, manifest = now, self.read_file(key, max_bytes=1 << 30)

    def _clear_faces(self, name: str, replaced: bytes, manifest: bytes) -> None:
        """Remove the faces of a replaced manifest that the new one doesn't have."""
        with contextlib.suppress(CheckpointCorrupt, ConfigError, StorageError):
            old, new = (decode_manifest(data, path=self.path(name)) for data in (replaced, manifest))
            self.remove(name, sorted(set(faces_of(old)) - set(faces_of(new))))

    def withdraw(self, directory: str, name: str, attempt: str) -> WithdrawOutcome:
        """Make ``attempt`` void; its objects are trash then."""
        self._scaffolding.pop(attempt, None)
        key = self._key(f"{directory}/{MANIFEST_NAME}")
        void = encode_void(name, attempt, why="it was given up before it was published")
        published = WithdrawOutcome(certain=False, why=f"{self.path(name)} was published by this attempt")
        try:
            made = self.store.create(key, void, ours=lambda found: void_in(found) == attempt, ends_s=self.ends_s)
            # It may have been published meanwhile, or sealed and not published yet by whoever gives it up here.
            if self._published_attempt(name) == attempt:
                if made:
                    self.store.delete([key], ends_s=self.ends_s)
                return published
            if not made:
                self.store.put(key, void, ends_s=self.ends_s)
                if self._published_attempt(name) == attempt:
                    return published
            self._mark(name, attempt, "incomplete")  # until its objects are gone
        except StorageError as error:
            return WithdrawOutcome(certain=False, why=str(error))
        return WithdrawOutcome(certain=True, trash=(directory,))

    def remove_if_void(self, name: str, attempt: str) -> None:
        """Remove the objects of ``attempt`` if it is void: what was put after the void, who made it hasn't seen."""
        place = self.directory_of(name, attempt)
        if self._void_at(self._key(f"{place}/{MANIFEST_NAME}")) is not None:
            self.remove_tree(place)

    def hide(self, name: str) -> tuple[str, ...] | None:
        """Delete the manifest, then the faces; the rest is trash."""
        key, attempt, faces = f"{name}/{MANIFEST_NAME}", attempt_id(), {METADATA_NAME}
        try:
            found = self.read_file(key, max_bytes=1 << 30)
            attempt = attempt_in(found) or attempt
            manifest = decode_manifest(found, path=key)
            faces |= {without_attempt(file.name, attempt) for file in manifest.files} | set(faces_of(manifest))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        except (CheckpointCorrupt, ConfigError) as error:
            _log.warning("deleting %s, whose manifest can't be read: %s", self.path(name), error)
        self._mark(name, attempt, "trash")
        self.unlink(key)
        self.remove(name, sorted(faces))
        return (self.directory_of(name, attempt),)

    def _published_attempt(self, name: str) -> str | None:
        head = self.read_head(f"{name}/{MANIFEST_NAME}", MANIFEST_HEAD_BYTES)
        return None if head is None else attempt_in(head[0])

    def _void_at(self, key: str) -> str | None:
        head = self.read_head(key, MANIFEST_HEAD_BYTES)
        return None if head is None else void_in(head[0])

    # Attempts that others left. ----------------------------------------------------------------------------------

    def _mark(self, name: str, attempt: str, kind: HiddenKind) -> None:
        self.store.put(f"{_ATTEMPTS}/{hidden_name(name, attempt, kind)}", b"{}\n", ends_s=self.ends_s)

    def _unmark(self, name: str, attempt: str, kind: HiddenKind) -> None:
        self.store.delete([f"{_ATTEMPTS}/{hidden_name(name, attempt, kind)}"], ends_s=self.ends_s)

    def _markers(self, name: str, attempt: str) -> list[HiddenEntry]:
        found = map(parse_hidden, self.store.names(_ATTEMPTS, ends_s=self.ends_s))
        return [entry for entry in found if entry is not None and (entry.name, entry.attempt) == (name, attempt)]

    def unsettled(self) -> list[HiddenEntry]:
        rows = self.store.objects(_ATTEMPTS, ends_s=self.ends_s)
        found: list[HiddenEntry] = []
        now_s: float | None = None
        for row in rows:
            entry = parse_hidden(row.name)
            if entry is None:
                continue
            place, kind = self.directory_of(entry.name, entry.attempt), entry.kind
            if kind in ("replaced", "trash"):
                visible = self._published_attempt(entry.name) == entry.attempt  # it was to go, and hasn't gone
                if kind == "replaced" or visible:
                    now_s = self.now_s() if now_s is None else now_s
                    if row.modified_s + REPLACED_FOR_S > now_s:
                        continue  # those who opened it may still read; or it is just being deleted
                if visible:
                    self._unmark(entry.name, entry.attempt, kind)
                    continue
                kind = "trash"
            found.append(HiddenEntry(place, entry.name, entry.attempt, kind))
        return found

    def now_s(self) -> float:
        """Return the store's own time, seconds since the epoch."""
        probe = f"{DIRECTORY}/probe.{secrets.token_hex(6)}"
        self.store.put(probe, b"", ends_s=self.ends_s)
        try:
            return self.store.modified_s(probe, ends_s=self.ends_s)
        finally:
            self.store.delete([probe], ends_s=self.ends_s)

    def take_over(self, entry: HiddenEntry) -> str:
        """Return its directory: what it lacks to be published is found there, and `withdraw` makes it void."""
        return self.directory_of(entry.name, entry.attempt)

    def clear_replaced(self, entry: HiddenEntry) -> tuple[str, ...] | None:
        """Finish the published attempt ``entry``: its faces may be missing."""
        key = f"{entry.name}/{MANIFEST_NAME}"
        self._finish(entry.name, entry.attempt, self.read_file(key, max_bytes=1 << 30))
        return ()

    def restore(self, entry: HiddenEntry) -> None:
        """Do nothing: what is to be replaced stays visible until it is."""

    def observe_lease(self, directory: str, name: str) -> LeaseState | None:
        try:
            key = self._key(f"{directory}/{name}")
            data, _ = self.store.get(key, ends_s=self.ends_s)
            modified_s = self.store.modified_s(key, ends_s=self.ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        record = decode_record(bytes(data))
        dead = record is not None and has_ended(record)
        return LeaseState(record, int(modified_s * 1e9), True if dead else None)

    def hold_lease(self, directory: str, name: str, *, rank: int) -> HeldLease:
        return ObjectLease(self.store, self._key(f"{directory}/{name}"), record_of_process(rank))

    # Readers and writers. ----------------------------------------------------------------------------------------

    def being_read(self, name: str) -> AbstractContextManager[None]:
        """Do nothing: an object store has no leases of readers."""
        del name
        return contextlib.nullcontext()

    def lock(self, *, timeout_s: float = 0.0, made_at: str = "") -> NoLock:
        """Lock nothing."""
        del timeout_s, made_at
        return NoLock()

    def lock_path(self, name: str, *, timeout_s: float = 0.0) -> NoLock:
        """Lock nothing."""
        del name, timeout_s
        return NoLock()

    def sweep_locks(self) -> None:
        """Do nothing: there are no locks."""


def refuse_replacing(storage: Storage, name: str) -> None:
    """Raise `StorageError` if there is a checkpoint ``name`` and the client of its store can't replace it safely."""
    if not isinstance(storage, ObjectStorage) or storage.store.can_replace:
        return
    if storage.size(f"{name}/{MANIFEST_NAME}") is not None:
        path = storage.path(name)
        raise StorageError(
            f"{path} exists, and to overwrite it takes a client that replaces it on the condition that nobody else has "
            "(If-Match), which fsspec doesn't offer: choose another path, delete it first, or use s3://, gs:// or az://",
            path=path,
            errno=errno.EOPNOTSUPP,
        )


def _is_of(attempt: str) -> Callable[[bytes], bool]:
    return lambda found: attempt_in(found) == attempt


def _is_scaffolding(file: str) -> bool:
    """Return True for what an attempt needs until it is published: its plan, its seal, its leases."""
    return file in (".plan", MANIFEST_NAME) or file.startswith("lease-")


def faces_of(manifest: Manifest) -> dict[str, str]:
    """Return the faces of what ``manifest`` commits: of each plain name the name of its object."""
    names = [*data_faces(manifest), *(file.name for file in manifest.files)]
    found = {without_attempt(name, manifest.attempt): with_attempt(name, manifest.attempt) for name in names}
    plain = {file.name for file in manifest.files if without_attempt(file.name, manifest.attempt) == file.name}
    return {name: stored for name, stored in found.items() if name not in plain}
