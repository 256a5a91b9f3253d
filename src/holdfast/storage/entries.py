"""Names of the entries of a root, and the attempt that published each. Torch-free, reads only.

    step-500                              published: it holds a manifest, or shows that it had one (`lost_manifest`)
    .step-500.0123456789ab.incomplete     an attempt in work, or left by a crash; or, once that attempt is at the final
                                          name, what it was exchanged with
    .step-500.0123456789ab.recovering     the same, taken over by a recovery
    .step-500.0123456789ab.replaced       what an overwriting attempt has moved out of the way
    .step-500.0123456789ab.trash          to be removed; never read again

Guarantees: hidden names are built and parsed only here; nothing here changes the storage.
"""

from __future__ import annotations

import errno
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, StorageError
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    MANIFEST_NAME,
    Manifest,
    attempt_in,
    decode_manifest,
    report_name,
    void_in,
)
from holdfast.storage.protocol import AnswersRequests

if TYPE_CHECKING:
    from holdfast.storage.protocol import Readable

HiddenKind = Literal["incomplete", "recovering", "replaced", "trash"]
MAX_MANIFEST_BYTES: Final = 256 << 20
"""A manifest has some 100 bytes per rank: enough for millions of ranks."""
MAX_REPORT_BYTES: Final = 1 << 30
_HIDDEN: Final = re.compile(rf"\.(.+)\.([0-9a-f]{{12}})\.({'|'.join(get_args(HiddenKind))})", re.DOTALL)

_OF_ATTEMPT: Final = re.compile(r".*\.([0-9a-f]{12})(\..*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HiddenEntry:
    """A hidden entry of a root, which readers ignore."""

    entry: str
    name: str
    attempt: str
    kind: HiddenKind


def attempt_id() -> str:
    """Return a new attempt id: 12 random hexadecimal digits, never used again."""
    return secrets.token_hex(6)


def attempt_of(name: str) -> str | None:
    """Return the attempt that a file of this name belongs to, where attempts share a place; None for a plain name."""
    found = _OF_ATTEMPT.fullmatch(name.rpartition("/")[2])
    return None if found is None else found[1]


def hidden_name(name: str, attempt: str, kind: HiddenKind) -> str:
    """Return the hidden entry of ``kind`` that ``attempt`` at publishing ``name`` uses."""
    return f".{name}.{attempt}.{kind}"


def parse_hidden(entry: str) -> HiddenEntry | None:
    """Parse ``entry`` as built by `hidden_name`; None if it is not a hidden name."""
    match = _HIDDEN.fullmatch(entry)
    if match is None:
        return None
    name, attempt, kind = match.groups()
    return HiddenEntry(entry, name, attempt, next(known for known in get_args(HiddenKind) if known == kind))


def read_manifest(storage: Readable, name: str) -> Manifest | None:
    """Read the manifest at ``name``; None where there is none.

    Raises `CheckpointCorrupt` if it can't be read as one or was lost, `ConfigError` if it was written by a newer
    version, `StorageError` for what the system refuses.
    """
    path = below(name, MANIFEST_NAME)
    data = _manifest_at(storage, path)
    if data is None:
        if _is_lost(storage, name):
            raise no_manifest(f"{storage.root}/{path}")
        return None
    return None if void_in(data) else decode_manifest(data, path=f"{storage.root}/{path}")


def _manifest_at(storage: Readable, path: str) -> bytes | None:
    if isinstance(storage, AnswersRequests):
        head = storage.read_head(path, MAX_MANIFEST_BYTES)
        if head is None or head[1] <= MAX_MANIFEST_BYTES:
            return None if head is None else head[0]
    elif storage.size(path) is None:
        return None
    return storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES)


def lost_manifest(storage: Readable, name: str) -> bool:
    """Return True if a checkpoint is at ``name`` whose manifest was lost or replaced."""
    return storage.size(below(name, MANIFEST_NAME)) is None and _is_lost(storage, name)


def _is_lost(storage: Readable, name: str) -> bool:
    """Return True if what is at ``name``, where there was no manifest a moment ago, shows that it had one."""
    path = below(name, MANIFEST_NAME)
    is_replaced = not isinstance(storage, AnswersRequests) and storage.exists(path)  # by something that is no file
    if not is_replaced and storage.size(below(name, report_name(0))) is None:
        return False
    return storage.size(path) is None  # else it was published between these looks


def no_manifest(path: str) -> CheckpointCorrupt:
    """Return the error for a lost manifest."""
    return CheckpointCorrupt(
        f"{path} is missing or not a plain file, but reports of a Holdfast checkpoint are beside it: it was removed or "
        "replaced, and nothing says any more what was committed; load another step",
        path=path,
    )


def published_attempt(storage: Readable, name: str) -> str | None:
    """Read the attempt id from the start of the manifest at ``name``, unchecked; None where there is none.

    Costs one short read, however many ranks the manifest lists. Raises `StorageError`.
    """
    head = read_start(storage, f"{name}/{MANIFEST_NAME}", MANIFEST_HEAD_BYTES)
    return None if head is None else attempt_in(head)


def read_start(storage: Readable, path: str, nbytes: int) -> bytes | None:
    """Read the first ``nbytes`` of a file, in one request where that counts; None where there is none."""
    if isinstance(storage, AnswersRequests):
        head = storage.read_head(path, nbytes)
        return None if head is None else head[0]
    return None if storage.size(path) is None else storage.read_range(path, 0, nbytes)


def attempt_at(storage: Readable, name: str) -> str | None:
    """Return the id of the attempt that published ``name``; None without a readable manifest."""
    try:
        manifest = read_manifest(storage, name)
    except (CheckpointCorrupt, ConfigError):
        return None  # foreign, damaged or newer: not the attempt that the caller compares with
    return None if manifest is None else manifest.attempt


def is_occupied(storage: Readable, name: str) -> bool:
    """Return True if ``name`` exists and is not an empty directory, so that a rename can't replace it.

    Objects that belong to attempts which were never published don't count.
    """
    try:
        return _holds_others(storage, name) or storage.size(name) is not None
    except StorageError as error:
        if error.errno != errno.ENOTDIR:  # a link, or a pipe
            raise
        return True


def _holds_others(storage: Readable, name: str) -> bool:
    """Return True if anything in a directory or below is no object of an attempt."""
    for entry in storage.list_dir(name):
        path = below(name, entry)
        if attempt_of(entry) is not None or not storage.exists(path):  # some stores list prefixes of removed objects
            continue
        if storage.size(path) is not None or not storage.list_dir(path) or _holds_others(storage, path):
            return True
    return False


def refuse_no_directory(storage: Readable, name: str) -> None:
    """Raise `CheckpointExists` if ``name``, which is to be overwritten, is a file or a link, not a checkpoint."""
    is_file = storage.size(name) is not None
    try:
        if not is_file and not isinstance(storage, AnswersRequests):  # where a prefix is nothing by itself
            storage.list_dir(name)
    except StorageError as error:
        if error.errno != errno.ENOTDIR:  # a link, or a pipe
            raise
        is_file = True
    if is_file:
        path = f"{storage.root}/{name}"
        message = f"{path} is no directory but a file or a link: overwrite replaces checkpoints only; move it away"
        raise CheckpointExists(message, path=path)


def below(name: str, *below: str) -> str:
    """Join ``name`` and the components ``below`` it; an empty ``name`` stands for the root."""
    return "/".join(filter(None, (name, *below)))
