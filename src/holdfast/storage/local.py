"""Storage of the commit protocol in a directory, and publishing by rename for any storage that is a tree. Torch-free.

    class MyStorage(RenamingStorage):    implements the operations of `DirectoryTree`, and its leases and locks
    LocalStorage                         does so for a directory of a local or shared file system

Guarantees of publishing: at every moment, and with any un-fsynced rename lost, either the old or the new checkpoint is
at the final name; where the file system can't exchange two directories, both may lie complete under hidden names that a
recovery finds. A refused publish has changed nothing visible; one whose result can't be seen is unknown.
A foreign entry (one that neither Holdfast nor DCP wrote) is in the old directory, the new one or both at every moment,
and finally durable in the new one; it is never moved into a directory that may still be given up. A foreign file that
could be linked is never missing at the path; a subdirectory is missing between the exchange and its move.
Guarantees of `LocalStorage`: every method either did what it says or raised `StorageError` with path, errno and what to
do; a file is created, never replaced, and is whole and fsynced when `write_file` returns; links are never followed
below the root. Stateless except for the root's path, and thread-safe.

Assumes: the caller holds the root's lock, and COMMIT was decided. POSIX rename and fsync; NFS may report an error for a
rename that was carried out, which `publish_by_rename` tells by the attempt's id.
Does not: retry, wait, decide, verify, or remove anything but the plan and stale leases. Nor keep foreign entries that
the new contents have under the same name (a ``config.json`` that an export brings along), or the numbered weight files
of a model that the new one replaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import shutil
import stat
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, OutcomeUnknown, StorageError
from holdfast.format.manifest import MANIFEST_NAME, PLAN_NAME, decode_report
from holdfast.storage import leases, locks
from holdfast.storage.entries import (
    MAX_REPORT_BYTES,
    attempt_at,
    attempt_id,
    hidden_name,
    is_occupied,
    parse_hidden,
    published_attempt,
    read_manifest,
    refuse_no_directory,
)
from holdfast.storage.files import (
    DIR_FLAGS,
    PLAIN_FLAGS,
    create_root,
    make_dir_at,
    open_dir_at,
    read_at,
    refuse,
    sync_path,
)
from holdfast.storage.object_client import open_client
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.protocol import DirectoryTarget, DirectoryTree, PublishOutcome, Storage, WithdrawOutcome
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AbstractContextManager

    from holdfast.format.manifest import Manifest
    from holdfast.storage.entries import HiddenEntry
    from holdfast.storage.leases import LeaseState


_log = logging.getLogger("holdfast.commit")
_FRESH_MANIFEST: Final = f".{MANIFEST_NAME}.new"
_NO_EXCHANGE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})
"""Errnos where file system, kernel or sandbox lacks `RENAME_EXCHANGE`: NFS, many FUSE file systems."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class _NamingTree(DirectoryTree, Protocol):
    """A tree that also names the directory of an attempt."""

    def directory_of(self, name: str, attempt: str) -> str: ...


class RenamingStorage:
    """The part of `holdfast.storage.protocol.Storage` that the operations of a `DirectoryTree` can implement.

    A subclass adds those operations, and `Storage.make_root`, `target`, `lock`, `lock_path` and `sweep_locks`.
    """

    takes_pieces: Final[bool] = True
    has_locks: Final[bool] = True
    lease_quiet_s: Final[float] = 2.0

    def replace_file(self: DirectoryTree, name: str, data: bytes, *, by: str) -> None:
        replace_by_rename(self, name, data, by=by)

    def directory_of(self, name: str, attempt: str) -> str:
        return hidden_name(name, attempt, "incomplete")

    def stored_as(self, file: str, attempt: str) -> str:
        del attempt  # every attempt has a directory
        return file

    def begin(self: _NamingTree, name: str, attempt: str, *, recoverable: bool) -> None:
        del recoverable  # recovery finds every hidden directory, and what it lacks to be published
        self.make_dir(self.directory_of(name, attempt))

    def seal(self: DirectoryTree, directory: str, manifest: bytes, *, again: bool = False) -> None:
        path = f"{directory}/{MANIFEST_NAME}"
        if again:  # even if one exists: its bytes may never have reached the disk
            replace_by_rename(self, path, manifest, by=f"{directory}/{_FRESH_MANIFEST}")
        else:
            self.write_file(path, manifest)
        clear_scaffolding(self, directory)

    def require_all(self, directory: str, manifest: Manifest, *, alone: bool = False) -> None:
        """Do nothing: only a start that holds the lock removes anything."""

    def publish(
        self: DirectoryTree, directory: str, name: str, attempt: str, manifest: bytes, *, overwrite: bool
    ) -> PublishOutcome:
        del manifest  # it is in the directory
        try:
            return PublishOutcome("published", publish_by_rename(self, directory, name, attempt, overwrite=overwrite))
        except OutcomeUnknown as error:
            return PublishOutcome("unknown", error=error)
        except (StorageError, CheckpointExists) as error:
            return PublishOutcome("refused", error=error)

    def withdraw(self: DirectoryTree, directory: str, name: str, attempt: str) -> WithdrawOutcome:
        return withdraw_by_rename(self, directory, name, attempt)

    def hide(self: DirectoryTree, name: str) -> tuple[str, ...] | None:
        trash = hidden_name(name, attempt_id(), "trash")
        with leases.to_be_deleted(f"{self.root}/{name}") as free:
            if not free:
                return None
            self.rename(name, trash)
        self.sync_dir("")
        return (trash,)

    def unsettled(self: DirectoryTree) -> list[HiddenEntry]:
        return [found for entry in self.list_dir("") if (found := parse_hidden(entry)) is not None]

    def take_over(self: DirectoryTree, entry: HiddenEntry) -> str:
        directory = hidden_name(entry.name, entry.attempt, "recovering")
        if entry.kind == "incomplete":
            rename_once(self, entry.entry, directory)
            self.sync_dir("")
        return directory

    def clear_replaced(self: DirectoryTree, entry: HiddenEntry) -> tuple[str, ...] | None:
        trash = clear_away(self, entry.entry, entry.name, entry.attempt)
        self.sync_dir("")
        return trash or None

    def restore(self: DirectoryTree, entry: HiddenEntry) -> None:
        rename_once(self, entry.entry, entry.name)
        self.sync_dir("")

    def observe_lease(self: DirectoryTree, directory: str, name: str) -> LeaseState | None:
        return leases.observe(f"{self.root}/{directory}", name)

    def being_read(self: DirectoryTree, name: str) -> AbstractContextManager[None]:
        return leases.being_read(f"{self.root}/{name}")


# Foreign entries survive an overwrite: before ``new`` replaces ``old``, `link_foreign` links files into it; afterwards
# `carry_foreign` moves what could not be linked, such as subdirectories.

_WRITTEN: Final = re.compile(
    r"__\d+_\d+\.distcp"
    r"|(__\d+(_\d+)?)?\.metadata(\.tmp|\.[0-9a-f]{12})?"
    r"|holdfast\.json|\.holdfast\.json\.new|\.plan"
    r"|\.?rank-\d{5,}(\.[0-9a-f]{12})?\.report(\.new)?"
    r"|\.?lease-(\d{5,}|coordinator)(\.new)?"
)
"""Names of files that Holdfast and stock DCP write, whatever the manifest or ``.metadata`` says: a checkpoint of more
ranks may have been written here before."""
_WEIGHTS: Final = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def foreign_entries(storage: DirectoryTree, directory: str) -> list[str]:
    """List entries of ``directory`` that neither Holdfast nor DCP wrote; ``sub/name`` in a subdirectory of an export.

    Where the manifest or a report can't be read, files that only they name count as foreign. Raises `StorageError`.
    """
    found = [entry for entry in storage.list_dir(directory) if not _WRITTEN.fullmatch(entry)]
    if not found:
        return []
    named = _named_files(storage, directory, found)
    below = {name.partition("/")[0] for name in named if "/" in name}
    for entry in sorted(below.intersection(found)):
        if _is_dir(storage, f"{directory}/{entry}"):
            found.remove(entry)
            found += [f"{entry}/{name}" for name in storage.list_dir(f"{directory}/{entry}")]
    return sorted(entry for entry in found if entry not in named)


def link_foreign(storage: DirectoryTree, old: str, new: str) -> None:
    """Hard-link the foreign files of ``old`` into ``new``, which is not visible yet; durable on return.

    `carry_foreign` moves those that can't be linked. Raises `StorageError`.
    """
    kept, own = _kept(storage, old, new)
    for entry in kept:
        source, target = f"{old}/{entry}", f"{new}/{entry}"
        if _is_dir(storage, source):
            continue
        try:
            if storage.exists(target) and entry not in own:
                storage.unlink(target)  # linked by an earlier try: the file may have been replaced since
            _make_parent(storage, new, entry)
            storage.link(source, target)
        except StorageError as error:
            _log.debug("%s/%s will be moved: %s", old, entry, error)
    for below in {entry.rpartition("/")[0] for entry in kept}:
        if storage.exists(f"{new}/{below}".rstrip("/")):
            storage.sync_dir(f"{new}/{below}".rstrip("/"))


def carry_foreign(storage: DirectoryTree, old: str, new: str, attempt: str) -> None:
    """Move foreign entries that are in ``old`` only to ``new``, with which ``attempt`` replaced it; durable.

    An entry that was created again in ``new`` meanwhile stays; the old one becomes ``NAME.ATTEMPT``. May be called
    again after a crash. Raises `StorageError`.
    """
    changed = set()
    kept, _ = _kept(storage, old, new)
    for entry in kept:
        source, target = f"{old}/{entry}", f"{new}/{entry}"
        if storage.exists(target):
            if storage.same_file(source, target):
                continue
            target = f"{target}.{attempt}"
            _log.warning("%s/%s was created again; the earlier one is kept as %s", new, entry, target)
        _make_parent(storage, new, entry)
        storage.rename(source, target)
        changed.add(entry.rpartition("/")[0])
    for below in changed:
        for directory in (new, old):  # the new name first, so that the entry always has a durable one
            storage.sync_dir(f"{directory}/{below}".rstrip("/"))


def _kept(storage: DirectoryTree, old: str, new: str) -> tuple[list[str], set[str]]:
    """Return the foreign entries of ``old`` that ``new`` doesn't replace, and the entries written in ``new``."""
    foreign = foreign_entries(storage, old)
    if not foreign:
        return [], set()
    strange = set(foreign_entries(storage, new))
    own = {entry for entry in _walk(storage, new) if entry not in strange}
    weights = {match[1] for entry in own if (match := _WEIGHTS.fullmatch(entry))}
    kept = []
    while foreign:
        entry = foreign.pop()
        if entry in own and "/" not in entry and all(_is_dir(storage, f"{place}/{entry}") for place in (old, new)):
            foreign += [f"{entry}/{name}" for name in storage.list_dir(f"{old}/{entry}")]
        elif entry in own:  # replaced by name, unless only one of the two is a directory
            if _is_dir(storage, f"{old}/{entry}") or _is_dir(storage, f"{new}/{entry}"):
                kept.append(entry)
        elif not ((match := _WEIGHTS.fullmatch(entry)) and match[1] in weights):
            kept.append(entry)
    return sorted(kept), own


def _walk(storage: DirectoryTree, directory: str) -> Iterable[str]:
    for entry in storage.list_dir(directory):
        yield entry
        if not _WRITTEN.fullmatch(entry) and _is_dir(storage, f"{directory}/{entry}"):
            yield from (f"{entry}/{name}" for name in storage.list_dir(f"{directory}/{entry}"))


def _is_dir(storage: DirectoryTree, name: str) -> bool:
    if storage.size(name) is not None or not storage.exists(name):
        return False
    try:
        storage.list_dir(name)
    except StorageError as error:
        if error.errno != errno.ENOTDIR:  # a link, or a pipe
            raise
        return False
    return True


def _make_parent(storage: DirectoryTree, directory: str, entry: str) -> None:
    parent = entry.rpartition("/")[0]
    if parent and not storage.exists(f"{directory}/{parent}"):
        storage.make_dir(f"{directory}/{parent}")


def _named_files(storage: DirectoryTree, directory: str, candidates: list[str]) -> set[str]:
    """Return the files named by the manifest in ``directory`` and, if needed, by its reports."""
    try:
        manifest = read_manifest(storage, directory)
    except (CheckpointCorrupt, ConfigError):
        manifest = None
    if manifest is None:
        return set()
    named = {file.name for file in manifest.files}
    for line in manifest.reports:
        if named.issuperset(candidates):
            break
        path = f"{directory}/{line.name}"
        try:
            report = decode_report(storage.read_file(path, max_bytes=MAX_REPORT_BYTES), path=f"{storage.root}/{path}")
        except (CheckpointCorrupt, ConfigError, StorageError) as error:
            _log.warning("files named only by %s are treated as foreign: %s", path, error)
            continue
        named.update(file.name for file in report.files)
    return named


def replace_by_rename(storage: DirectoryTree, name: str, data: bytes, *, by: str) -> None:
    """See `Storage.replace_file`."""
    storage.unlink(by)
    try:
        storage.write_file(by, data)
        storage.rename(by, name)
    except StorageError:
        with contextlib.suppress(StorageError):
            storage.unlink(by)
        raise
    storage.sync_dir(name.rpartition("/")[0])


def clear_scaffolding(storage: DirectoryTree, directory: str) -> None:
    """Remove files not needed once published (the plan, stale leases); durable on return."""
    for entry in storage.list_dir(directory):
        if entry == PLAN_NAME or entry.removeprefix(".").startswith(leases.LEASE_PREFIX):
            storage.unlink(f"{directory}/{entry}")
    storage.sync_dir(directory)


def rename_once(storage: DirectoryTree, source: str, target: str) -> None:
    """Rename; ignore an error for a rename that was carried out (NFS retries a request whose response was lost)."""
    try:
        storage.rename(source, target)
    except StorageError as error:
        if error.errno != errno.ENOENT or storage.exists(source) or not storage.exists(target):
            raise


def publish_by_rename(
    storage: DirectoryTree, directory: str, name: str, attempt: str, *, overwrite: bool
) -> tuple[str, ...]:
    """Give the complete ``directory`` of ``attempt`` its final ``name``; durable on return.

    An overwritten directory is exchanged with it, so that ``name`` is never missing; where the file system can't
    exchange (NFS, many FUSE ones) it is renamed aside first. Foreign entries are kept. Returns the entries of the root
    that may now be removed. Raises `CheckpointExists` or `StorageError` when nothing visible has changed,
    `OutcomeUnknown` when that is uncertain.
    """
    replaced: str | None = None
    if overwrite and is_occupied(storage, name):
        refuse_no_directory(storage, name)
        link_foreign(storage, name, directory)
        if _exchange(storage, directory, name, attempt):
            replaced = directory
        else:
            replaced = _rename_aside(storage, directory, name, attempt)
    else:
        _rename_in(storage, directory, name, attempt)
    try:
        storage.sync_dir("")
    except StorageError as error:
        message = f"{storage.root}/{name} has its final name, but that could not be made durable: {error}"
        raise OutcomeUnknown(message, attempt=attempt) from error
    if replaced is None:
        return ()
    try:
        return clear_away(storage, replaced, name, attempt)
    except StorageError as error:
        _log.warning("the old contents of %s/%s stay until the next start: %s", storage.root, name, error)
        return ()


def clear_away(storage: DirectoryTree, replaced: str, name: str, attempt: str) -> tuple[str, ...]:
    """Move ``replaced`` to the trash, since ``attempt`` is durably at ``name``; return what may be removed.

    Foreign entries are carried over first. While it is being read it stays hidden and nothing is returned; a later
    recovery removes it. On `StorageError` every entry is either hidden or carried over.
    """
    carry_foreign(storage, replaced, name, attempt)
    with leases.to_be_deleted(f"{storage.root}/{replaced}", opened=True) as free:
        target = hidden_name(name, attempt, "trash" if free else "replaced")
        if target != replaced:
            rename_once(storage, replaced, target)
    if free:
        return (target,)
    _log.info("%s/%s was replaced and stays for now: it is being read", storage.root, target)
    return ()


def withdraw_by_rename(storage: DirectoryTree, directory: str, name: str, attempt: str) -> WithdrawOutcome:
    """Rename ``directory`` of ``attempt`` to the trash; durable on return if the outcome is certain."""
    target = hidden_name(name, attempt, "trash")
    try:
        if attempt_at(storage, name) == attempt:
            # ``directory``, if it exists, is the one it was exchanged with.
            return WithdrawOutcome(certain=False, why=f"{storage.root}/{name} was published by this attempt")
        if storage.exists(directory):
            rename_once(storage, directory, target)
        storage.sync_dir("")
        in_trash = storage.exists(target)
    except StorageError as error:
        return WithdrawOutcome(certain=False, why=str(error))
    if not in_trash:  # a recovery may have taken over one that is missing
        return WithdrawOutcome(certain=False, why=f"{storage.root}/{directory} is gone")
    return WithdrawOutcome(certain=True, trash=(target,))


def _exchange(storage: DirectoryTree, directory: str, name: str, attempt: str) -> bool:
    """Exchange ``directory`` and ``name``; False if that isn't possible and nothing has changed."""
    refusal: StorageError | None = None
    try:
        if not storage.exchange(directory, name):
            return False
    except StorageError as error:
        refusal = error
    # A response may be lost, and a repeated request undoes the exchange: read back which attempt is there now.
    try:
        done = published_attempt(storage, name) == attempt
    except StorageError as error:
        message = f"can't read whether attempt {attempt} has replaced {storage.root}/{name}: {error}"
        raise OutcomeUnknown(message, attempt=attempt) from error
    if refusal is not None and not done:
        raise refusal
    return done


def _rename_aside(storage: DirectoryTree, directory: str, name: str, attempt: str) -> str:
    """Publish by two renames instead of an exchange; return the entry of the old one. Raises as `publish_by_rename`."""
    replaced = hidden_name(name, attempt, "replaced")
    try:
        rename_once(storage, name, replaced)
        storage.sync_dir("")
        _rename_in(storage, directory, name, attempt)
    except (StorageError, CheckpointExists) as error:
        if not _put_back(storage, replaced, name):
            message = (
                f"attempt {attempt} could not be given the name {storage.root}/{name}, and what was there could not be "
                f"put back ({error}): both are whole, under hidden names"
            )
            raise OutcomeUnknown(message, attempt=attempt) from error
        raise
    return replaced


def _rename_in(storage: DirectoryTree, directory: str, name: str, attempt: str) -> None:
    try:
        storage.rename(directory, name)
    except StorageError as error:
        if attempt_at(storage, name) == attempt:
            return  # it was carried out: NFS repeated the request
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            path = f"{storage.root}/{name}"
            message = f"{path} came to exist while it was being saved; published data is never replaced like this"
            raise CheckpointExists(message, path=path) from error
        raise


def _put_back(storage: DirectoryTree, replaced: str, name: str) -> bool:
    """Return True if the old entry is at ``name`` again, or still."""
    try:
        if storage.exists(replaced):
            if storage.exists(name):
                _log.error("%s could not be put back: something else is at %s by now", replaced, name)
                return False
            rename_once(storage, replaced, name)
    except StorageError as error:
        _log.error("%s could not be put back as %s; the next start settles it: %s", replaced, name, error)
        return False
    try:
        storage.sync_dir("")
    except StorageError as error:
        # A power cut may undo it; a recovery then restores the name again.
        _log.warning("%s is at its name again, but that may not be durable: %s", name, error)
    return True


def open_storage(place: str | os.PathLike[str] | Storage) -> Storage:
    """Return the storage at ``place``: a directory for a path, objects for a URL of a store, else ``place`` itself.

    Makes no system call and sends no request. Raises `ConfigError` for a URL or an environment that can't be used.
    """
    if isinstance(place, Storage):
        return place
    there = os.fspath(place)
    if "://" in there:
        there = located(there)
    return ObjectStorage(open_client(there)) if is_store(there) else LocalStorage(there)


class LocalStorage(RenamingStorage):
    """`holdfast.storage.protocol.Storage` below ``root``, which must exist when a method is called."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))

    @property
    def root(self) -> str:
        return self._root

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    def path(self, name: str) -> str:
        """Return the absolute path of ``name``."""
        if not name:
            return self._root
        parts = name.split("/")
        assert all(part not in {"", ".", ".."} for part in parts), f"not a name below the root: {name!r}"
        return os.path.join(self._root, *parts)

    def make_dir(self, name: str) -> None:
        make_dir_at(self.path(name))

    def write_file(self, name: str, data: bytes) -> None:
        path = self.path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o666)
        except OSError as error:
            refuse(error, "create", path)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
        except OSError as error:
            os.close(fd)
            refuse(error, "write", path)
        try:
            os.fsync(fd)
        except OSError as error:
            refuse(error, "fsync", path)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Generator[int, None, None]:
        path = self.path(name)
        try:
            fd = os.open(path, PLAIN_FLAGS)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            refuse(error, "read", path)

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        with self._reading(name) as fd:
            size = os.fstat(fd).st_size
            if size <= max_bytes:
                return read_at(fd, 0, size)
        path = self.path(name)
        message = f"can't read {path}: it has {size} bytes, expected at most {max_bytes}; this is not a file of ours"
        raise StorageError(message, path=path, errno=errno.EFBIG)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        with self._reading(name) as fd:
            return read_at(fd, offset, nbytes)

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        with self._reading(name) as fd:
            offset = 0
            while piece := read_at(fd, offset, nbytes):
                yield piece
                offset += len(piece)

    def size(self, name: str) -> int | None:
        found = self._lstat(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def exists(self, name: str) -> bool:
        return self._lstat(name) is not None

    def _lstat(self, name: str) -> os.stat_result | None:
        path = self.path(name)
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link in a component is treated as a dangling one
                return None
            refuse(error, "look at", path)

    def list_dir(self, name: str) -> list[str]:
        path = self.path(name)
        try:
            fd = os.open(path, DIR_FLAGS | (os.O_NOFOLLOW if name else 0))
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)
        except FileNotFoundError:
            return []
        except OSError as error:
            refuse(error, "list", path)

    def rename(self, source: str, target: str) -> None:
        path = self.path(source)
        try:
            os.rename(path, self.path(target))
        except OSError as error:
            refuse(error, f"rename to {target}", path)

    def exchange(self, first: str, second: str) -> bool:
        path = self.path(first)
        call = _renameat2()
        if call is None:
            return False
        code = call(path, self.path(second))
        if not code:
            return True
        if code in _NO_EXCHANGE:
            return False
        return refuse(OSError(code, os.strerror(code)), f"exchange with {second}", path)

    def link(self, source: str, target: str) -> None:
        path = self.path(source)
        try:
            os.link(path, self.path(target), follow_symlinks=False)
        except OSError as error:
            refuse(error, f"link to {target}", path)

    def same_file(self, first: str, second: str) -> bool:
        one, other = self._lstat(first), self._lstat(second)
        return one is not None and other is not None and os.path.samestat(one, other)

    def sync_dir(self, name: str) -> None:
        sync_path(self.path(name))

    def unlink(self, name: str) -> None:
        path = self.path(name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            refuse(error, "remove", path)

    def remove_tree(self, name: str) -> None:
        path = self.path(name)
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            # Another process removes the same tree. The next start finds what is left.
            return
        except OSError as error:
            refuse(error, "remove", path)

    def open_dir(self, name: str) -> int:
        """Open the directory ``name``, close-on-exec; the caller closes it. The root may be a link."""
        return open_dir_at(self.path(name), links=not name)

    def make_root(self) -> None:
        create_root(self._root)

    def target(self, directory: str) -> DirectoryTarget:
        return DirectoryTarget(self.open_dir(directory))

    def hold_lease(self, directory: str, name: str, *, rank: int) -> leases.Heartbeat:
        with self.target(directory) as target:
            return leases.Heartbeat(leases.hold(target.fd, name, leases.new_record(rank)))

    def lock(self, *, timeout_s: float = 0.0, made_at: str = "") -> locks.RootLock:
        return locks.RootLock.acquire(self._root, timeout_s=timeout_s, made_at=made_at)

    def lock_path(self, name: str, *, timeout_s: float = 0.0) -> locks.RootLock:
        return locks.RootLock.acquire_beside(os.path.join(self._root, name), timeout_s=timeout_s)

    def sweep_locks(self) -> None:
        locks.sweep_left(self._root)


@functools.lru_cache(maxsize=1)
def _renameat2() -> Callable[[str, str], int] | None:
    """Return a function that exchanges two paths and returns an errno or 0; None without C library support."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is None:
        return None

    def exchange(first: str, second: str) -> int:
        ctypes.set_errno(0)
        failed = found(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
        return (ctypes.get_errno() or errno.EIO) if failed else 0

    return exchange
