"""The protocol of storages: reading, and the steps of an attempt from begin to publish or withdraw. Torch-free.

    directory_of -> begin -> target, write_file -> seal -> publish: published | refused | unknown
                                   └─────────────────┴──> withdraw: certain | uncertain

    Readable         read operations: enough for everything that only reads
    AnswersRequests  optional: what an object store is asked in fewer requests
    Storage          the commit protocol: a `CheckpointManager` takes one in place of a path
    DirectoryTree    single operations on a tree with atomic rename, from which `RenamingStorage` makes a `Storage`

A directory is published by one rename or exchange (`holdfast.storage.local`), an object store's prefix by creating
its manifest, which replaces nothing (`holdfast.storage.object_storage`). No code outside of this package knows which.

Names are relative to the root the storage was opened on, with ``/`` between components; no component may be ``..``
or absolute. Every method raises `StorageError` (path, errno) for an operation that fails, never `FileNotFoundError` or
`FileExistsError`: `exists` tells of absence. Thread-safe.
`holdfast.testing.storage_conformance` checks an implementation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.errors import CheckpointExists, OutcomeUnknown, StorageError
    from holdfast.format.manifest import Manifest
    from holdfast.storage.entries import HiddenEntry
    from holdfast.storage.leases import LeaseState


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """The result of `Storage.publish`.

    published: visible at its name, durably; ``trash`` may be removed. refused: this call has changed nothing visible,
    and never will; ``error`` says why. unknown: it may be visible, or become visible later; ``error`` says why.
    """

    kind: Literal["published", "refused", "unknown"]
    trash: tuple[str, ...] = ()
    error: StorageError | CheckpointExists | OutcomeUnknown | None = None


@dataclass(frozen=True, slots=True)
class WithdrawOutcome:
    """The result of `Storage.withdraw`; ``trash`` may be removed.

    certain: nothing of the attempt is visible, or left where recovery would publish it, and no request in flight can
    change that. Otherwise ``why`` says why that is uncertain.
    """

    certain: bool
    trash: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryTarget:
    """The engine writes files into the directory of descriptor ``fd``. A context manager that closes it."""

    fd: int

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class WriterTarget:
    """The engine imports ``module`` and writes by the `AttemptWriter` that its ``open_writer(*args)`` returns.

    For storages that aren't directories. ``paths`` go onto the engine's ``sys.path`` first.
    """

    module: str
    args: tuple[str, ...]
    paths: tuple[str, ...] = ()


class AttemptWriter(Protocol):
    """What an engine does to the place of one attempt that isn't a directory; thread-safe.

    Every method raises `StorageError`; none retries for longer than its storage's patience without progress.
    """

    @property
    def path(self) -> str:
        """Path or URL of the place, for messages."""
        ...

    def stored_as(self, file: str) -> str:
        """Return the name that ``file`` of the plan has in reports and manifest; see `Storage.stored_as`."""
        ...

    def upload(self, file: str, data: memoryview, *, before_part: Callable[[int], None]) -> None:
        """Store ``data``, straight from its memory, as ``file``; durable on return, and visible whole or not at all.

        before_part: called with the size in bytes before each part is sent, on any thread; it may wait, and what it
        raises ends the upload: nothing is stored then.
        """
        ...

    def read_back(self, file: str, start: int, end: int) -> memoryview | None:
        """Read bytes of a stored ``file``, to compare them with what was sent.

        None where that isn't needed: what is damaged on its way there is known to be refused.
        """
        ...

    def put(self, file: str, data: bytes) -> None:
        """Store a small ``file``, durable on return; replaces an earlier one of the same attempt."""
        ...

    def remove(self, file: str) -> None:
        """Remove ``file`` of the attempt; absent is fine. Certain on return."""
        ...

    def remove_tree(self, name: str) -> None:
        """See `Storage.remove_tree`; for a writer of the root."""
        ...

    def hold_lease(self, name: str, *, rank: int) -> HeldLease:
        """See `Storage.hold_lease`."""
        ...

    def end(self) -> None:
        """Remove what is stored if the attempt was given up meanwhile; nothing more is written."""
        ...


class StorageLock(Protocol):
    """The writer's lock of a root, or of one name; it is released with its process, however that ends."""

    def renew(self) -> None:
        """Lock the root again if it was replaced since it was locked. Raises `RootLocked`, `StorageError`."""
        ...

    def release(self) -> None:
        """Release the lock; idempotent, never raises."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `release`."""
        ...


class HeldLease(Protocol):
    """A lease that this process holds and renews."""

    def stop(self, *, wait_s: float) -> None:
        """Stop renewing the lease and remove it; waits at most ``wait_s``."""
        ...


class Readable(Protocol):
    """Read operations on a storage."""

    @property
    def root(self) -> str:
        """Path or URL of the root, for messages."""
        ...

    def path(self, name: str) -> str:
        """Return the full path or URL of ``name``, for messages and for readers."""
        ...

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        """Read the whole file; `StorageError` (EFBIG) if it is larger than ``max_bytes``."""
        ...

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read ``nbytes`` of a file from ``offset``, fewer only at its end."""
        ...

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        """Yield the whole file in pieces of ``nbytes``, the last one shorter; opened once. Close it if not exhausted.

        Raises `StorageError` during iteration.
        """
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a regular file, None where there is none (links are not followed)."""
        ...

    def exists(self, name: str) -> bool: ...

    def list_dir(self, name: str) -> list[str]:
        """List the entries of a directory, sorted; ``""`` is the root. Empty if absent; a link is not a directory."""
        ...


@runtime_checkable
class AnswersRequests(Protocol):
    """A storage that each question costs a request to; several may be on their way at a time."""

    def read_head(self, name: str, nbytes: int) -> tuple[bytes, int] | None:
        """Read the first ``nbytes`` of a file by one request, and return its size, too; None where there is none."""
        ...


class DirectoryTree(Readable, Protocol):
    """A directory tree with atomic rename, visible to every rank."""

    def make_dir(self, name: str) -> None:
        """Create one directory (its parent must exist, ``name`` must not) and fsync its parent."""
        ...

    def write_file(self, name: str, data: bytes) -> None:
        """Create a file that must not exist, write and fsync it (not its directory)."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename atomically; `StorageError` with the system's ENOENT, EEXIST or ENOTEMPTY. Syncs nothing."""
        ...

    def exchange(self, first: str, second: str) -> bool:
        """Exchange the names of two entries atomically; False where the file system can't. Syncs nothing.

        `StorageError` (ENOENT if either is missing) when nothing has changed, or when that is unknown.
        """
        ...

    def link(self, source: str, target: str) -> None:
        """Create the hard link ``target`` to the file (or symbolic link) ``source``. Syncs nothing.

        `StorageError`, also where the file system has no hard links.
        """
        ...

    def same_file(self, first: str, second: str) -> bool:
        """Return True if both names are hard links of one file, as after `link`; False where either is missing."""
        ...

    def sync_dir(self, name: str) -> None:
        """Make the directory's entries durable; ``""`` is the root."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a file; absent is fine."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove a directory with everything below it, never following links; nothing happens if it is absent."""
        ...


@runtime_checkable
class Storage(Readable, Protocol):
    """A storage of checkpoints that every rank sees."""

    @property
    def takes_pieces(self) -> bool:
        """True where `target` is a directory: engines write files piece by piece. Otherwise they write whole ones."""
        ...

    @property
    def has_locks(self) -> bool:
        """True where `lock` keeps other writers away. Elsewhere a lease tells them that an attempt is alive."""
        ...

    @property
    def lease_quiet_s(self) -> float:
        """How long a lease is unchanged, in seconds, when its holder has ended, where nothing else tells that."""
        ...

    # Files, of attempts and of the root. -------------------------------------------------------------------------

    def make_root(self) -> None:
        """Make the root and its parents, durably; several ranks may call it at once."""
        ...

    def make_dir(self, name: str) -> None:
        """Create one directory (its parent must exist, ``name`` must not), durably; a no-op without directories."""
        ...

    def write_file(self, name: str, data: bytes) -> None:
        """Create a file that must not exist; ``data`` is durable on return (its name: see `sync_dir`)."""
        ...

    def replace_file(self, name: str, data: bytes, *, by: str) -> None:
        """Replace ``name`` by ``data``, whole at every moment and durable on return; ``by``: the temporary name.

        An existing file ``by`` belongs to another process or was left by a crash, and is replaced.
        """
        ...

    def sync_dir(self, name: str) -> None:
        """Make the directory's entries durable; ``""`` is the root. A no-op where acknowledged writes are durable."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a file; absent is fine."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove everything below ``name``, usually trash; nothing happens if it is absent."""
        ...

    # Attempts, called by their coordinator. ----------------------------------------------------------------------

    def directory_of(self, name: str, attempt: str) -> str:
        """Return the directory of ``attempt`` at publishing ``name``, which `begin` makes. No input or output."""
        ...

    def stored_as(self, file: str, attempt: str) -> str:
        """Return the name that ``file`` of ``attempt`` has in its reports and manifest: ``file`` itself in directories.

        Where all attempts at a name share its place, the attempt's id is part of every name. Idempotent.
        """
        ...

    def begin(self, name: str, attempt: str, *, recoverable: bool) -> None:
        """Make the directory of a new attempt, durably; readers never take it for a published checkpoint.

        recoverable: recovery may publish it, if its plan and all reports are there. False: nothing durable allows
        that, and the storage needn't record that it was begun.
        """
        ...

    def target(self, directory: str) -> DirectoryTarget | WriterTarget:
        """Return how the engine writes into ``directory``; the caller closes it. ``""``: the root, to remove trash."""
        ...

    def seal(self, directory: str, manifest: bytes, *, again: bool = False) -> None:
        """Give ``directory`` durably the contents to publish: ``manifest`` and what it names. Not visible yet.

        again: called by a recovery, and the coordinator that died may have sealed it in part.
        """
        ...

    def require_all(self, directory: str, manifest: Manifest, *, alone: bool = False) -> None:
        """Raise `StorageError` unless what ``manifest`` and its reports say was written to ``directory`` is there.

        alone: raise `CheckpointExists` if something that is of no attempt has come to be at the name to publish.
        For storages that others may change meanwhile; does nothing for directories.
        """
        ...

    def publish(self, directory: str, name: str, attempt: str, manifest: bytes, *, overwrite: bool) -> PublishOutcome:
        """Make the sealed ``directory`` visible as ``name``, atomically and durably.

        overwrite: replace what is at ``name``, keeping files of others where possible; otherwise an existing entry
        refuses it. The outcome is read back from the storage, never concluded from a lost response.
        """
        ...

    def withdraw(self, directory: str, name: str, attempt: str) -> WithdrawOutcome:
        """Give up ``attempt``, whose files, if any, are in ``directory``: see `WithdrawOutcome`."""
        ...

    def hide(self, name: str) -> tuple[str, ...] | None:
        """Make the published ``name`` invisible, durably; return it as trash. None while it is being read."""
        ...

    # Attempts that others left, called by recovery. --------------------------------------------------------------

    def unsettled(self) -> list[HiddenEntry]:
        """List the hidden entries that attempts have left, of any kind, trash included."""
        ...

    def take_over(self, entry: HiddenEntry) -> str:
        """Keep the process that began attempt ``entry`` from publishing it; return the directory of its files now."""
        ...

    def clear_replaced(self, entry: HiddenEntry) -> tuple[str, ...] | None:
        """Turn ``entry``, whose replacement is published, into trash. None while it is being read."""
        ...

    def restore(self, entry: HiddenEntry) -> None:
        """Make ``entry`` visible again: it was to be replaced, but nothing was published in its place."""
        ...

    def observe_lease(self, directory: str, name: str) -> LeaseState | None:
        """Observe the lease ``name``, to tell whether its holder lives; None where there is none."""
        ...

    def hold_lease(self, directory: str, name: str, *, rank: int) -> HeldLease:
        """Hold a lease in ``directory`` for ``rank``, until it is stopped or this process ends."""
        ...

    # Readers and writers. ----------------------------------------------------------------------------------------

    def being_read(self, name: str) -> AbstractContextManager[None]:
        """Return a context that keeps `hide` from ``name``. Raises `CheckpointNotFound` if it was just hidden."""
        ...

    def lock(self, *, timeout_s: float = 0.0, made_at: str = "") -> StorageLock:
        """Lock the existing root against other writers; made_at: shown to them. Raises `RootLocked`."""
        ...

    def lock_path(self, name: str, *, timeout_s: float = 0.0) -> StorageLock:
        """Lock ``name`` against other writers; raises `RootLocked`."""
        ...

    def sweep_locks(self) -> None:
        """Remove the lock files of writers that died; never raises."""
        ...
