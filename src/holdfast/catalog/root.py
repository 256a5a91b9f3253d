"""Tell which names a root may publish, and which of its entries are checkpoints. Torch-free, reads only.

Guarantees: a name that was accepted can be read back, has room for the id of an attempt, and is none of Holdfast's own;
nothing here changes anything.
Does not: build or parse hidden names (``storage.entries`` does).
"""

from __future__ import annotations

import errno
import os
import re
import string
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, get_args

from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, StorageError
from holdfast.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    PLAN_NAME,
)
from holdfast.storage.entries import HiddenKind, below, is_occupied, lost_manifest, parse_hidden
from holdfast.storage.locks import DIRECTORY
from holdfast.storage.protocol import AnswersRequests
from holdfast.validation import NAME_BYTES_MAX, checked_path, is_store, name_fault, unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.format.manifest import Manifest
    from holdfast.storage.protocol import Readable

_Row = TypeVar("_Row")
_Answer = TypeVar("_Answer")
AT_A_TIME: Final = 16
"""How many requests are on their way at a time to a storage that answers requests."""
_SAMPLE_STEPS: Final = (0, 1, 12, 98_765_432_101)
_OWN_NAMES: Final = frozenset((MANIFEST_NAME, METADATA_NAME, PLAN_NAME, DIRECTORY))
_OWN_NAME: Final = re.compile(r"rank-\d+\.report|\..+\.lock", re.DOTALL)
_HIDDEN_BYTES: Final = len(".") + len(".0123456789ab") + max(len(f".{kind}") for kind in get_args(HiddenKind))
SPLIT_KEYS: Final = ("model", "optimizer")
MERGED_DIRECTORY: Final = "weights"
_STOCK_LAYOUTS: Final = (("",), (MERGED_DIRECTORY,), SPLIT_KEYS)
STOCK_PLACES: Final = ("", "model", "weights")
"""Where below its directory a stock checkpoint may have its metadata, in the layouts that ``stock_dcp`` knows."""


def target_fault(name: str) -> str | None:
    """Return why nothing can be published as ``name``; None if it can.

    Readers may refuse the name (`name_fault`) or not take it for a checkpoint; or an attempt's name would be too long.
    """
    fault = name_fault(name)
    if fault is not None:
        return fault
    if parse_hidden(name) is not None:
        return "it is the name of an attempt or of trash, which the next start would remove"
    if name in _OWN_NAMES or _OWN_NAME.fullmatch(name):
        return "it is the name of something of Holdfast's own"
    try:
        nbytes, most = len(name.encode()), NAME_BYTES_MAX - _HIDDEN_BYTES
    except UnicodeEncodeError:
        return "it is not UTF-8, and a checkpoint names itself in files that are"
    return None if nbytes <= most else f"it has {nbytes} bytes, and leaves room for the id of an attempt up to {most}"


def checked_target(path: object, *, field: str) -> str:
    """Return `checked_path` of a checkpoint or export to be written; `ConfigError` if its name can't be read back.

    The directories above it may have any names.
    """
    target = checked_path(path, field=field)
    name = os.path.basename(target)
    if not name or (is_store(target) and target.count("/") < 3):
        raise ConfigError(f"{field}: {target} can't be a checkpoint; name a directory below it", field=field)
    fault = target_fault(name)
    if fault is not None:
        raise ConfigError(f"{field}: {name!r:.300} can't be the name of a checkpoint: {fault}; rename it", field=field)
    return target


def may_be_published(name: str) -> bool:
    """Return True if an entry may be something published, whatever the name template.

    Excluded are hidden entries, and directories such as ``lost+found`` that only the administrator may read.
    """
    return not name.startswith(".") and name != "lost+found"


def is_checkpoint(storage: Readable, name: str) -> bool:
    """Return True if Holdfast published ``name``, even if its manifest is damaged or lost. Raises `StorageError`."""
    return storage.size(below(name, MANIFEST_NAME)) is not None or lost_manifest(storage, name)


def misnamed(path: str, manifest: Manifest, step: int | None) -> CheckpointCorrupt | None:
    """Return the error for a directory at ``path`` whose name says ``step``, and its manifest another; None if it fits.

    A name without a step fits, as does step 0, where a run begins with any model.
    """
    if not step or manifest.step in (None, step):
        return None
    path = f"{path}/{MANIFEST_NAME}"
    return CheckpointCorrupt(
        f"{path} holds step {manifest.step}, expected step {step}: the directory was renamed, "
        "copied or exchanged with another; rename it to its own step, or load it by its path",
        path=path,
    )


def is_stock(storage: Readable, name: str) -> bool:
    """Return True if ``name`` is a complete stock DCP checkpoint, in any known layout. Raises `StorageError`.

    If its ``.metadata`` is not a plain file, the load reports that.
    """

    def has_metadata(place: str) -> bool:
        path = below(name, place, METADATA_NAME)
        return storage.size(path) is not None if isinstance(storage, AnswersRequests) else storage.exists(path)

    return any(all(map(has_metadata, places)) for places in _STOCK_LAYOUTS)


def refuse_occupied(
    storage: Readable,
    name: str,
    *,
    step: int | None,
    advice: str = "choose another path, or pass overwrite=True to replace it as a whole",
) -> None:
    """Raise `CheckpointExists` with ``advice`` if something is where ``step`` would be published as ``name``."""
    if is_occupied(storage, name):
        path, at = f"{storage.root}/{name}", "" if step is None else f"step {step}: "
        raise CheckpointExists(
            f"{at}{path} exists already and published checkpoints are never modified; {advice}", path=path
        )


def published(storage: Readable, name_template: str) -> list[tuple[int, str]]:
    """Return (step, name) of everything published under ``name_template``, by step.

    ``name_template`` contains one ``{step}``, with or without a format. A directory counts if it has a manifest, which
    isn't read, or has lost it. Raises `StorageError`.
    """
    return _steps(storage, name_template, lambda name: is_checkpoint(storage, name))


def foreign_steps(storage: Readable, name_template: str) -> list[tuple[int, str]]:
    """Return (step, name) of directories under ``name_template`` that stock DCP completed, without Holdfast's.

    Left out is one that this user may not look into: who reads its manifest is told so.
    """

    def is_foreign(name: str) -> bool:
        try:
            return not is_checkpoint(storage, name) and is_stock(storage, name)
        except StorageError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            return False

    return _steps(storage, name_template, is_foreign)


def named_steps(storage: Readable, name_template: str) -> list[tuple[int, str]]:
    """Return (step, name) of every entry of the root that ``name_template`` gives a step, by step; one list."""
    rows = [(step_of(entry, name_template), entry) for entry in storage.list_dir("")]
    return sorted((step, entry) for step, entry in rows if step is not None)


def _steps(storage: Readable, name_template: str, counts: Callable[[str], bool]) -> list[tuple[int, str]]:
    steps = named_steps(storage, name_template)
    there = ask_each(storage, [entry for _, entry in steps], counts)
    return [row for row, is_there in zip(steps, there, strict=True) if is_there]


def ask_each(storage: Readable, rows: Sequence[_Row], ask: Callable[[_Row], _Answer]) -> list[_Answer]:
    """Return the answer for each of ``rows``, in their order. Raises the first error.

    Where an answer costs a request, up to `AT_A_TIME` are asked for at once, on as many threads.
    """
    found: dict[int, _Answer] = {}

    def one(at: int) -> None:
        found[at] = ask(rows[at])

    threads = AT_A_TIME if isinstance(storage, AnswersRequests) else 1
    take_turns([partial(one, at) for at in range(len(rows))], threads)
    return [found[at] for at in range(len(rows))]


def step_of(name: str, name_template: str) -> int | None:
    """Return the step for which ``name_template`` gives ``name``, None if there is none."""
    prefix, suffix = _split_template(name_template)
    if not name.startswith(prefix) or not name.endswith(suffix) or len(name) <= len(prefix) + len(suffix):
        return None
    middle = name[len(prefix) : len(name) - len(suffix)].strip()
    if not middle.isascii() or not middle.isdecimal():
        return None
    step = int(middle)
    # "step-007" is not "step-{step}" of 7: it is another tool's, or someone's copy.
    return step if name_template.format(step=step) == name else None


def checked_template(owner: str, template: object, *, example: str) -> None:
    """Raise `ConfigError` unless ``template``, the ``name_template`` of ``owner``, makes names that can be parsed."""
    expected = f"a directory name with exactly one field {{step}}, such as {example!r}"
    if not isinstance(template, str):
        raise unfit(owner, "name_template", template, expected)
    try:
        names = [template.format(step=step) for step in _SAMPLE_STEPS]
        # Names are parsed to find what is there: a format such as {step:x} could not be. Files hold them in UTF-8.
        found = [step_of(name.encode().decode(), template) for name in names]
    except (ConfigError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise unfit(owner, "name_template", template, expected) from error
    if found != list(_SAMPLE_STEPS) or any(name.startswith(".") for name in names):
        raise unfit(owner, "name_template", template, expected)
    for name in names:
        fault = target_fault(name)
        if fault is not None:
            raise unfit(owner, "name_template", template, f"{expected} (of {name!r:.100}: {fault})")


def _split_template(name_template: str) -> tuple[str, str]:
    try:
        parts = list(string.Formatter().parse(name_template))
    except ValueError as error:
        raise ConfigError(f"name_template {name_template!r} is malformed: {error}", field="name_template") from error
    fields = [index for index, (_, field, _, _) in enumerate(parts) if field is not None]
    if [parts[index][1] for index in fields] != ["step"]:
        raise ConfigError(f"name_template {name_template!r} must contain {{step}} exactly once", field="name_template")
    at = fields[0]
    prefix = "".join(literal for literal, *_ in parts[: at + 1])
    return prefix, "".join(literal for literal, *_ in parts[at + 1 :])
