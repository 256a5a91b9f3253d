"""What the entries of a root mean: published checkpoints, attempts in work, trash. Torch-free, reads only.

    step-500                              published: it holds a manifest, or shows that it had one (`lost_manifest`)
    .step-500.0123456789ab.incomplete     an attempt in work, or left by a crash
    .step-500.0123456789ab.recovering     one that a recovery has taken in hand
    .step-500.0123456789ab.replaced       what an overwriting attempt has moved out of the way
    .step-500.0123456789ab.trash          waits for removal; never looked into again

Guarantees: a name is built and taken apart here and nowhere else; nothing here changes anything.
"""

from __future__ import annotations

import errno
import re
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from holdfast.arguments import unfit
from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, StorageError
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    attempt_in,
    decode_manifest,
    report_name,
)

if TYPE_CHECKING:
    from holdfast.storage.protocol import Storage

HiddenKind = Literal["incomplete", "recovering", "replaced", "trash"]
MAX_MANIFEST_BYTES: Final = 256 << 20
"""A line of a manifest is some 100 bytes a rank: enough for millions."""

_SAMPLE_STEPS: Final = (0, 1, 12, 98_765_432_101)
_HIDDEN: Final = re.compile(rf"\.(.+)\.([0-9a-f]{{12}})\.({'|'.join(get_args(HiddenKind))})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HiddenEntry:
    """An entry of a root that no reader looks at."""

    entry: str
    name: str
    attempt: str
    kind: HiddenKind


def attempt_id() -> str:
    """12 random hexadecimal digits: the id of a new attempt, never used again."""
    return secrets.token_hex(6)


def hidden_name(name: str, attempt: str, kind: HiddenKind) -> str:
    """The entry under which ``attempt`` at publishing ``name`` keeps what is of ``kind``."""
    return f".{name}.{attempt}.{kind}"


def parse_hidden(entry: str) -> HiddenEntry | None:
    """What `hidden_name` built ``entry`` from, None if it didn't."""
    match = _HIDDEN.fullmatch(entry)
    if match is None:
        return None
    name, attempt, kind = match.groups()
    return HiddenEntry(entry, name, attempt, next(known for known in get_args(HiddenKind) if known == kind))


def read_manifest(storage: Storage, name: str) -> Manifest | None:
    """The manifest of what is at ``name``, None where there is none.

    Raises `CheckpointCorrupt` if it can't be read as one or was lost, `ConfigError` if it was written by a newer
    version, `StorageError` for what the system refuses.
    """
    path = f"{name}/{MANIFEST_NAME}"
    if storage.size(path) is None:
        if lost_manifest(storage, name):
            raise no_manifest(f"{storage.root}/{path}")
        return None
    data = storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    return decode_manifest(data, path=f"{storage.root}/{path}")


def may_be_published(name: str) -> bool:
    """Whether an entry may be something published, whatever the name template: not what is hidden.

    Nor what lies at the top of a file system and only its administrator may look into.
    """
    return not name.startswith(".") and name != "lost+found"


def lost_manifest(storage: Storage, name: str) -> bool:
    """Whether something is at ``name`` that was a checkpoint, and has no manifest that could be read any more."""
    path = f"{name}/{MANIFEST_NAME}"
    if storage.size(path) is not None:
        return False
    return storage.exists(path) or storage.size(f"{name}/{report_name(0)}") is not None


def is_checkpoint(storage: Storage, name: str) -> bool:
    """Whether Holdfast published what is at ``name``, also where its manifest is damaged or lost. `StorageError`."""
    return storage.size(f"{name}/{MANIFEST_NAME}") is not None or lost_manifest(storage, name)


def no_manifest(path: str) -> CheckpointCorrupt:
    """The error for a manifest that was lost."""
    return CheckpointCorrupt(
        f"{path} is missing or no plain file, but reports of a Holdfast checkpoint are beside it: it was removed or "
        "replaced, and nothing says any more what was committed; load another step",
        path=path,
    )


def published_attempt(storage: Storage, name: str) -> str | None:
    """The attempt that the manifest at ``name`` begins to say it is of, unchecked; None where there is none.

    Costs a short read, where a manifest has a line for each rank. Raises `StorageError`.
    """
    path = f"{name}/{MANIFEST_NAME}"
    if storage.size(path) is None:
        return None
    return attempt_in(storage.read_range(path, 0, MANIFEST_HEAD_BYTES))


def attempt_at(storage: Storage, name: str) -> str | None:
    """The id of the attempt that published what is at ``name``; None where nothing readable is."""
    try:
        manifest = read_manifest(storage, name)
    except (CheckpointCorrupt, ConfigError):
        return None  # foreign, damaged or newer: in any case not what the caller compares with
    return None if manifest is None else manifest.attempt


def is_occupied(storage: Storage, name: str) -> bool:
    """Whether something is at ``name`` that a rename can't take the place of: anything but an empty directory."""
    if not storage.exists(name):
        return False
    try:
        return storage.size(name) is not None or bool(storage.list_dir(name))
    except StorageError as error:
        if error.errno != errno.ENOTDIR:  # a link, or a pipe
            raise
        return True


def refuse_occupied(storage: Storage, name: str, *, step: int | None) -> None:
    """Raise `CheckpointExists` if something is where a save of ``step`` is to be published as ``name``."""
    if is_occupied(storage, name):
        path, at = f"{storage.root}/{name}", "" if step is None else f"step {step}: "
        raise CheckpointExists(
            f"{at}{path} exists already and published checkpoints are never modified; "
            "choose another path, or pass overwrite=True to replace it as a whole",
            path=path,
        )


def published(storage: Storage, name_template: str) -> list[tuple[int, str]]:
    """The (step, name) of everything published under ``name_template``, by step.

    ``name_template`` holds one ``{step}``, with a format or without. A directory counts if it has a manifest, which
    isn't read, or has lost it. Raises `StorageError`.
    """
    found: list[tuple[int, str]] = []
    for entry in storage.list_dir(""):
        step = step_of(entry, name_template)
        if step is not None and is_checkpoint(storage, entry):
            found.append((step, entry))
    return sorted(found)


def foreign_steps(storage: Storage, name_template: str) -> list[tuple[int, str]]:
    """The (step, name) of directories under ``name_template`` that stock DCP finished, and Holdfast didn't write."""
    found: list[tuple[int, str]] = []
    for entry in storage.list_dir(""):
        step = step_of(entry, name_template)
        if step is None or is_checkpoint(storage, entry):
            continue
        if storage.exists(f"{entry}/{METADATA_NAME}"):  # where it is no plain file any more, loading it will tell
            found.append((step, entry))
    return sorted(found)


def step_of(name: str, name_template: str) -> int | None:
    """The step that ``name_template`` makes ``name`` from, None if there is none."""
    prefix, suffix = _split_template(name_template)
    if not name.startswith(prefix) or not name.endswith(suffix) or len(name) <= len(prefix) + len(suffix):
        return None
    middle = name[len(prefix) : len(name) - len(suffix)].strip()
    if not middle.isascii() or not middle.isdecimal():
        return None
    step = int(middle)
    # "step-007" is not what "step-{step}" makes of 7: some other tool's, or a copy somebody made.
    return step if name_template.format(step=step) == name else None


def checked_template(owner: str, template: object, *, example: str) -> None:
    """`ConfigError` unless ``template``, the ``name_template`` of an ``owner``, makes names that are read back."""
    expected = f"a directory name with exactly one field {{step}}, such as {example!r}"
    if not isinstance(template, str):
        raise unfit(owner, "name_template", template, expected)
    try:
        names = [template.format(step=step) for step in _SAMPLE_STEPS]
        # Names are read back to find what is there: a format such as {step:x} could not be. Files hold them in UTF-8.
        found = [step_of(name.encode().decode(), template) for name in names]
    except (ConfigError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise unfit(owner, "name_template", template, expected) from error
    if found != list(_SAMPLE_STEPS) or any({"/", "\0"} & set(name) or name.startswith(".") for name in names):
        raise unfit(owner, "name_template", template, expected)


def _split_template(name_template: str) -> tuple[str, str]:
    try:
        parts = list(string.Formatter().parse(name_template))
    except ValueError as error:
        raise ConfigError(f"name_template {name_template!r} is malformed: {error}", field="name_template") from error
    fields = [index for index, (_, field, _, _) in enumerate(parts) if field is not None]
    if [parts[index][1] for index in fields] != ["step"]:
        raise ConfigError(f"name_template {name_template!r} must hold {{step}} once", field="name_template")
    at = fields[0]
    prefix = "".join(literal for literal, *_ in parts[: at + 1])
    return prefix, "".join(literal for literal, *_ in parts[at + 1 :])
