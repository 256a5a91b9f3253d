"""List what a root holds, for people and scripts: checkpoints, attempts and trash. Torch-free.

    published    a checkpoint; also pinned, latest, or only a model; or an export
    corrupt      can't be resumed from: its manifest is unreadable, missing, or of another step than its name
    newer        a newer Holdfast wrote it, in a format that this one doesn't read; ``error`` names the release
    stock        written by stock DCP: no manifest, no checksums
    in work      an attempt of a running save
    left behind  an attempt of an interrupted save, or a directory that one moved away: recovery settles it
    trash        deleted, its bytes not removed yet

Guarantees: changes nothing, takes no lock; only manifests are read, no data. Entries that vanish meanwhile are skipped.
A link that leads out of the root is what it leads to: a step may lie on another disk. One to an entry of the same root
is listed as a link.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.catalog.catalog import Pins, oldest_first
from holdfast.catalog.root import ask_each, foreign_steps, is_stock, may_be_published, misnamed, step_of
from holdfast.errors import CheckpointCorrupt, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import Manifest
from holdfast.format.sealed import NewerFormat
from holdfast.storage import leases as lease
from holdfast.storage.entries import HiddenEntry, hidden_name, parse_hidden, read_manifest
from holdfast.storage.files import refuse
from holdfast.storage.local import open_storage
from holdfast.storage.locks import path_held_by, root_held_by
from holdfast.storage.object_overlay import ObjectOverlay
from holdfast.storage.object_storage import ObjectStorage
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.format.manifest import Kind
    from holdfast.storage.protocol import Storage

EntryState = Literal["published", "corrupt", "newer", "stock", "in work", "left behind", "trash"]
DEFAULT_TEMPLATE: Final = "step-{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootEntry:
    """One entry of a root. ``created``: from the manifest or else the directory, UTC in ISO 8601."""

    name: str
    path: str
    state: EntryState
    kind: Kind = "checkpoint"
    step: int | None = None
    nbytes: int | None = None
    created: str | None = None
    world: int | None = None
    pinned: bool = False
    resumable: bool = True
    chain: tuple[str, ...] = ()
    """Names of what it is a delta to: an anchor, and other deltas."""
    latest: bool = False
    """A run with the default name template would resume from it; of a root without such names, any run."""
    held_by: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RootListing:
    """A root: its entries (hidden ones first, then checkpoints, oldest first), and its current writer."""

    path: str
    entries: tuple[RootEntry, ...]
    held_by: str | None
    links: dict[str, str]
    """Symbolic links in the root to its entries, such as ``latest``."""
    manifests: Mapping[str, Manifest] = field(default_factory=dict, repr=False)
    """Of the published entries, by name."""


def list_root(path: str) -> RootListing:
    """List Holdfast's entries in a directory or below a URL, and those of stock DCP under the default name template.

    Raises `ConfigError` if ``path`` is no directory, `StorageError` if it can't be read.
    """
    root = existing_directory(path)
    storage = open_storage(root)
    names = storage.list_dir("")
    if isinstance(storage, ObjectStorage):
        rows, manifests = _checkpoints(storage, names)
        return RootListing(root, (*_attempt_rows(storage), *rows), None, {}, manifests)
    held_by = root_held_by(root)
    links = _links(root, names)
    hidden = [found for name in names if (found := parse_hidden(name)) is not None]
    unsettled = [row for found in hidden if (row := _hidden_row(storage, found, held_by)) is not None]
    rows, manifests = _checkpoints(storage, [name for name in names if name not in links])
    return RootListing(
        root,
        (*sorted(unsettled, key=lambda row: (row.step is None, row.step or 0, row.name)), *rows),
        held_by,
        links,
        manifests,
    )


def existing_directory(path: str) -> str:
    """Return ``path`` as an absolute path or URL; raises `ConfigError` unless it is a directory or has objects."""
    if not path:  # such as a variable of a shell that isn't set
        raise ConfigError("the path is empty; give a checkpoint, or a directory that holds some", field="path")
    directory = located(path)
    if is_store(directory):
        if not open_storage(directory).list_dir(""):
            message = f"{directory} holds no objects; give a checkpoint, or a prefix that holds some"
            raise ConfigError(message, field="path")
        return directory
    if not os.path.isdir(directory):
        try:
            os.stat(directory)
        except PermissionError as error:
            refuse(error, "look at", directory)
        except OSError:
            pass  # it isn't there
        what = "doesn't exist"
        if os.path.exists(directory):
            what = "is not a directory"
        elif os.path.islink(directory):
            what = f"is a link to {os.readlink(directory)}, which doesn't exist"
        advice = "give a checkpoint, or a directory that holds some"
        if os.path.isfile(directory):
            advice += "; `holdfast convert` makes one of a file of torch.save, or of *.safetensors"
        raise ConfigError(f"{directory} {what}; {advice}", field="path")
    return directory


def _checkpoints(storage: Storage, names: list[str]) -> tuple[list[RootEntry], dict[str, Manifest]]:
    """Return checkpoints, oldest first, and their manifests; unreadable ones in front, since their place is unknown."""
    pins = _pins(storage)
    names = [name for name in names if may_be_published(name)]
    manifests = _manifests(storage, names)
    stock = _stock(storage, manifests)
    found = oldest_first(storage, [*((None, name) for name in names), *stock], manifests=manifests)
    resumable = [row for row in found if row.error is None and row.resumable]
    usual = [row for row in resumable if step_of(row.name, DEFAULT_TEMPLATE) is not None]
    latest = (usual or resumable)[-1:]
    state: EntryState
    rows: list[RootEntry] = []
    for row in found:
        if row.error is not None:
            rows.append(_unread_row(storage, row.name, row.error))
            continue
        manifest = manifests[row.name]
        if not isinstance(manifest, Manifest):
            manifest, state = None, "stock"
            nbytes, created = _bytes_of(storage, row.name), _changed_of(storage, row.name)
        else:
            state, nbytes, created = "published", committed_bytes(manifest), manifest.created
        rows.append(
            RootEntry(
                name=row.name,
                path=storage.path(row.name),
                state=state,
                step=row.step,
                nbytes=nbytes,
                created=created,
                world=None if manifest is None else manifest.world,
                pinned=row.step in pins,
                resumable=row.resumable,
                chain=() if manifest is None else tuple(member.name for member in manifest.chain),
                latest=row in latest,
            )
        )
    known = {row.name for row in rows}
    rows.extend(_unordered(storage, {name: manifests[name] for name in names if name not in known}))
    readable = {name: manifest for name, manifest in manifests.items() if isinstance(manifest, Manifest)}
    return sorted(rows, key=lambda row: row.error is None), readable


def _manifests(storage: Storage, names: list[str]) -> dict[str, Manifest | HoldfastError | None]:
    """Read the manifests of ``names``, on a store several at a time; an error stands for what can't be resumed from."""

    def read(name: str) -> Manifest | HoldfastError | None:
        path = storage.path(name)
        try:
            manifest = read_manifest(storage, name)
        except HoldfastError as error:
            return error
        return (lost_link(path) if manifest is None else of_another_step(path, manifest)) or manifest

    return dict(zip(names, ask_each(storage, names, read), strict=True))


def of_another_step(path: str, manifest: Manifest) -> CheckpointCorrupt | None:
    """Return the error of a checkpoint that has the default name of another step: a run doesn't resume from it."""
    if manifest.kind != "checkpoint":
        return None
    return misnamed(path, manifest, step_of(os.path.basename(path), DEFAULT_TEMPLATE))


def lost_link(path: str) -> CheckpointCorrupt | None:
    """Return the error of a link that leads nowhere, as to a disk that is not mounted, with a step's default name."""
    if is_store(path) or not os.path.islink(path) or step_of(os.path.basename(path), DEFAULT_TEMPLATE) is None:
        return None
    try:
        os.stat(path)
    except FileNotFoundError:
        return CheckpointCorrupt(
            f"{path} is a link to {os.readlink(path)}, which doesn't exist; bring back what it leads to, or remove it",
            path=path,
        )
    except OSError:
        pass  # reading it tells
    return None


def _stock(storage: Storage, manifests: dict[str, Manifest | HoldfastError | None]) -> list[tuple[int, str]]:
    """Return (step, name) of what stock DCP wrote among ``manifests``."""
    if not isinstance(storage, ObjectStorage):
        return [row for row in foreign_steps(storage, DEFAULT_TEMPLATE) if row[1] in manifests]
    steps = [(step_of(name, DEFAULT_TEMPLATE), name) for name, manifest in manifests.items() if manifest is None]
    return [(step, name) for step, name in steps if step is not None and is_stock(storage, name)]


def _unordered(storage: Storage, manifests: dict[str, Manifest | HoldfastError | None]) -> list[RootEntry]:
    """Return checkpoints saved without a step, then exports: they have no place in the order of the others."""
    rows: list[RootEntry] = []
    for name, manifest in manifests.items():
        if isinstance(manifest, Manifest):
            rows.append(
                RootEntry(
                    name=name,
                    path=storage.path(name),
                    state="published",
                    kind=manifest.kind,
                    step=manifest.step,
                    nbytes=committed_bytes(manifest),
                    created=manifest.created,
                    world=manifest.world,
                    resumable=manifest.resumable,
                    chain=tuple(member.name for member in manifest.chain),
                )
            )
    return sorted(rows, key=lambda row: (row.kind == "export", row.step or 0, row.name))


def stock_entry(path: str) -> RootEntry:
    """Describe the stock DCP checkpoint at ``path``, whatever its name: a root lists only names of steps."""
    storage = open_storage(path)
    nbytes, created = _bytes_of(storage, ""), _changed_of(storage, "")
    return RootEntry(name=os.path.basename(path), path=path, state="stock", nbytes=nbytes, created=created)


def _unread_row(storage: Storage, name: str, error: HoldfastError) -> RootEntry:
    path = storage.path(name)
    return RootEntry(
        name=name,
        path=path,
        state="newer" if isinstance(error, NewerFormat) else "corrupt",
        step=step_of(name, DEFAULT_TEMPLATE),
        nbytes=_bytes_of(storage, name),
        created=_changed_of(storage, name),
        error=str(error),
    )


def size_text(nbytes: int | None) -> str:
    """Return a size for people: ``1.5 GiB``; ``-`` if it is unknown."""
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def committed_bytes(manifest: Manifest) -> int:
    """Return the size of a checkpoint according to its manifest: data, reports and metadata, without the manifest."""
    return sum(line.nbytes + line.size for line in manifest.reports) + sum(file.size for file in manifest.files)


def _hidden_row(storage: Storage, found: HiddenEntry, root_holder: str | None) -> RootEntry | None:
    path = storage.path(found.entry)
    changed = _changed(path)
    if changed is None:
        return None
    holder = None
    state: EntryState = "trash" if found.kind == "trash" else "left behind"
    if found.kind == "incomplete":
        # The root's holder may not have leases for its engines yet, or no longer.
        holder = lease_holder(path) or path_held_by(storage.path(found.name)) or root_holder
        state = "in work" if holder else "left behind"
    step = step_of(found.name, DEFAULT_TEMPLATE)
    nbytes = _bytes_below(path)
    return RootEntry(
        name=found.entry, path=path, state=state, step=step, nbytes=nbytes, created=changed, held_by=holder
    )


def _attempt_rows(storage: ObjectStorage) -> list[RootEntry]:
    """Describe what attempts have left on a store; whether one is in work is judged by this machine's clock."""
    rows: list[RootEntry] = []
    for found in ObjectStorage(ObjectOverlay(storage.store)).unsettled():  # which tidies up on the way
        listed = storage.list_tree(storage.directory_of(found.name, found.attempt))
        state: EntryState = "trash" if found.kind == "trash" else "left behind"
        holder = None
        if found.kind == "incomplete":
            quiet_s = time.time() - storage.lease_quiet_s
            live = [row for row in listed if row.name.startswith(lease.LEASE_PREFIX) and row.modified_s > quiet_s]
            holder = _lease_record(storage, found, live[0].name) if live else None
            state = "in work" if live else state
        rows.append(
            RootEntry(
                name=hidden_name(found.name, found.attempt, found.kind),
                path=storage.path(found.name),
                state=state,
                step=step_of(found.name, DEFAULT_TEMPLATE),
                nbytes=sum(row.size for row in listed),
                created=_time_text(max((row.modified_s for row in listed), default=None)),
                held_by=holder,
            )
        )
    return sorted(rows, key=lambda row: (row.step is None, row.step or 0, row.name))


def _lease_record(storage: ObjectStorage, found: HiddenEntry, name: str) -> str | None:
    try:
        seen = storage.observe_lease(storage.directory_of(found.name, found.attempt), name)
    except StorageError:
        return None
    record = None if seen is None else seen.record
    return None if record is None else f"the engine of rank {record.rank}, process {record.pid} on host {record.host}"


def lease_holder(attempt_path: str) -> str | None:
    """Return the holder of a lease in an attempt's directory, from the kernel; None if there is none or unknown."""
    try:
        names = os.listdir(attempt_path)
    except OSError:
        return None
    for name in sorted(names):
        if name.startswith(lease.LEASE_PREFIX):
            try:
                seen = lease.observe(attempt_path, name)
            except StorageError:
                continue
            if seen is not None and seen.flock_free is False:
                record = seen.record
                return (
                    f"the engine of rank {record.rank}, process {record.pid} on host {record.host}" if record else name
                )
    return None


def _pins(storage: Storage) -> frozenset[int]:
    try:
        return Pins(storage).all()
    except StorageError:
        return frozenset()


def _links(root: str, names: list[str]) -> dict[str, str]:
    """Return links to entries of the same root, directly or in the end, whatever the path they are given by."""
    links: dict[str, str] = {}
    known, real = set(names), os.path.realpath(root)
    for name in names:
        path = os.path.join(root, name)
        try:
            target = os.path.join(root, os.readlink(path))
        except OSError:
            continue
        for found in (target.rstrip("/"), os.path.realpath(path)):
            parent, entry = os.path.split(found)
            if entry in known and os.path.realpath(parent) == real:
                links.setdefault(name, entry)
    return links


def _changed_of(storage: Storage, name: str) -> str | None:
    if not isinstance(storage, ObjectStorage):
        return _changed(storage.path(name))
    return _time_text(max((row.modified_s for row in storage.list_tree(name)), default=None))


def _bytes_of(storage: Storage, name: str) -> int:
    if not isinstance(storage, ObjectStorage):
        return _bytes_below(storage.path(name))
    return sum(row.size for row in storage.list_tree(name))


def _changed(path: str) -> str | None:
    for look in (os.stat, os.lstat):  # the latter for a link that leads nowhere
        with contextlib.suppress(OSError):
            return _time_text(look(path).st_mtime)
    return None


def _time_text(since_epoch_s: float | None) -> str | None:
    if since_epoch_s is None:
        return None
    return datetime.fromtimestamp(since_epoch_s, timezone.utc).isoformat(timespec="seconds")


def suspicious_in(manifest: Manifest | None) -> list[dict[str, Any]]:
    """Return what was suspicious about a save, each with ``what``, ``tensors`` and ``message``."""
    found = None if manifest is None else manifest.extra.get("suspicious")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return [{name: row.get(name) for name in ("what", "tensors", "message")} for row in rows]


def _bytes_below(path: str) -> int:
    """Return the bytes of plain files in a directory and directly below it; skips what can't be read."""
    total = 0
    for directory in (path, *(entry.path for entry in _entries(path) if entry.is_dir(follow_symlinks=False))):
        for entry in _entries(directory):
            try:
                if entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue
    return total


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
