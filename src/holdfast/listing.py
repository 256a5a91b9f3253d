"""What a root holds, for people and scripts: checkpoints, and what is not one yet or any more. Torch-free.

    published    a checkpoint; also pinned, latest, or only a model; or an export
    corrupt      its manifest can't be read, or is gone: nobody loads it
    stock        written by stock DCP: no manifest, no checksums
    in work      an attempt that a live save works on
    left behind  an attempt, or what one has moved away, of a save that is no more: recovery settles it
    trash        deleted, its bytes not removed yet

Guarantees: changes nothing, takes no lock; only manifests are read, no data. What vanishes meanwhile is left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import ConfigError, HoldfastError, StorageError
from holdfast.keeping import oldest_first
from holdfast.pins import Pins
from holdfast.root import HiddenEntry, foreign_steps, may_be_published, parse_hidden, read_manifest, step_of
from holdfast.storage import lease
from holdfast.storage.local import LocalStorage
from holdfast.storage.lock import path_held_by, root_held_by

if TYPE_CHECKING:
    from holdfast.format.manifest import Kind, Manifest

EntryState = Literal["published", "corrupt", "stock", "in work", "left behind", "trash"]
DEFAULT_TEMPLATE: Final = "step-{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootEntry:
    """One entry of a root. ``created``: UTC, ISO 8601, of the manifest or, without one, of the directory."""

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
    latest: bool = False
    held_by: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RootListing:
    """A root: its entries (what is hidden first, then checkpoints, oldest first), and who writes to it now."""

    path: str
    entries: tuple[RootEntry, ...]
    held_by: str | None
    links: dict[str, str]
    """Symbolic links of the root to entries of it, such as ``latest``."""


def list_root(path: str) -> RootListing:
    """Everything of Holdfast's in the directory ``path``, and of stock DCP's under the default name template.

    Raises `ConfigError` if ``path`` is no directory, `StorageError` if it can't be read.
    """
    root = existing_directory(path)
    storage = LocalStorage(root)
    held_by = root_held_by(root)
    names = storage.list_dir("")
    hidden = [found for name in names if (found := parse_hidden(name)) is not None]
    rows = [row for found in hidden if (row := _hidden_row(storage, found, held_by)) is not None]
    return RootListing(
        root,
        (*sorted(rows, key=lambda row: (row.step is None, row.step or 0, row.name)), *_checkpoints(storage, names)),
        held_by,
        _links(root, names),
    )


def existing_directory(path: str) -> str:
    """``path``, absolute, if it is a directory; `ConfigError` otherwise."""
    if "://" in path:
        raise ConfigError(f"{path}: object stores are not in this release; give a directory", field="path")
    directory = os.path.abspath(path)
    if not os.path.isdir(directory):
        what = "is not a directory" if os.path.lexists(directory) else "doesn't exist"
        raise ConfigError(f"{directory} {what}; give a checkpoint, or a directory that holds some", field="path")
    return directory


def _checkpoints(storage: LocalStorage, names: list[str]) -> list[RootEntry]:
    """Oldest first; what can't be read in front, since its place among the others isn't known."""
    pins = _pins(storage)
    stock = foreign_steps(storage, DEFAULT_TEMPLATE)
    ours = [(None, name) for name in names if may_be_published(name) and not os.path.islink(storage.path(name))]
    found = oldest_first(storage, [*ours, *stock])
    best = next((row for row in reversed(found) if row.error is None), None)
    rows: list[RootEntry] = []
    for row in found:
        if row.error is not None:
            rows.append(_corrupt_row(storage, row.name, row.error))
            continue
        manifest = _manifest(storage, row.name)
        if manifest is None:
            state: EntryState = "stock"
            nbytes, created = _bytes_below(storage.path(row.name)), _changed(storage.path(row.name))
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
                latest=row is best,
            )
        )
    known = {row.name for row in rows}
    rows.extend(_unordered(storage, [name for _, name in ours if name not in known]))
    return sorted(rows, key=lambda row: row.state != "corrupt")


def _unordered(storage: LocalStorage, names: list[str]) -> list[RootEntry]:
    """Checkpoints that were saved without a step, then exports: they have no place in the order of the others."""
    rows: list[RootEntry] = []
    for name in names:
        manifest = _manifest(storage, name)
        if manifest is not None:
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
                )
            )
    return sorted(rows, key=lambda row: (row.kind == "export", row.step or 0, row.name))


def stock_entry(path: str) -> RootEntry:
    """What stock DCP wrote to ``path``, whatever that is called: a root lists only what has a step's name."""
    return RootEntry(
        name=os.path.basename(path), path=path, state="stock", nbytes=_bytes_below(path), created=_changed(path)
    )


def _corrupt_row(storage: LocalStorage, name: str, error: HoldfastError) -> RootEntry:
    path = storage.path(name)
    return RootEntry(
        name=name,
        path=path,
        state="corrupt",
        step=step_of(name, DEFAULT_TEMPLATE),
        nbytes=_bytes_below(path),
        created=_changed(path),
        error=str(error),
    )


def committed_bytes(manifest: Manifest) -> int:
    """The size of a checkpoint by its manifest: data, reports and metadata, without the manifest itself."""
    return sum(line.nbytes + line.size for line in manifest.reports) + sum(file.size for file in manifest.files)


def _hidden_row(storage: LocalStorage, found: HiddenEntry, root_holder: str | None) -> RootEntry | None:
    path = storage.path(found.entry)
    changed = _changed(path)
    if changed is None:
        return None
    holder = None
    state: EntryState = "trash" if found.kind == "trash" else "left behind"
    if found.kind == "incomplete":
        # Whoever holds the root may be before its engines have their leases, or behind.
        holder = lease_holder(path) or path_held_by(storage.path(found.name)) or root_holder
        state = "in work" if holder else "left behind"
    step = step_of(found.name, DEFAULT_TEMPLATE)
    nbytes = _bytes_below(path)
    return RootEntry(
        name=found.entry, path=path, state=state, step=step, nbytes=nbytes, created=changed, held_by=holder
    )


def lease_holder(attempt_path: str) -> str | None:
    """Who holds a lease in an attempt's directory, as its kernel says; None where nobody does or it can't be told."""
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


def _manifest(storage: LocalStorage, name: str) -> Manifest | None:
    try:
        return read_manifest(storage, name)
    except HoldfastError:  # it has vanished, or gone bad, since it was looked at
        return None


def _pins(storage: LocalStorage) -> frozenset[int]:
    try:
        return Pins(storage).all()
    except StorageError:
        return frozenset()


def _links(root: str, names: list[str]) -> dict[str, str]:
    links = {}
    for name in names:
        try:
            target = os.readlink(os.path.join(root, name))
        except OSError:
            continue
        below = os.path.relpath(os.path.join(root, target), root)
        if below in names:
            links[name] = below
    return links


def _changed(path: str) -> str | None:
    try:
        mtime_s = os.lstat(path).st_mtime
    except OSError:
        return None
    return datetime.fromtimestamp(mtime_s, timezone.utc).isoformat(timespec="seconds")


def _bytes_below(path: str) -> int:
    """Bytes of the plain files in a directory and those directly below it; what can't be read counts nothing."""
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
