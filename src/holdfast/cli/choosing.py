"""Which checkpoints a path on the command line means. Torch-free, but where stock DCP wrote them."""

from __future__ import annotations

import os

from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.format.manifest import METADATA_NAME
from holdfast.listing import RootEntry, existing_directory, list_root
from holdfast.opening import STOCK_PLACES
from holdfast.root import is_checkpoint
from holdfast.storage.local import LocalStorage


def is_one_checkpoint(directory: str) -> bool:
    """Whether ``directory`` is a checkpoint itself, whole or damaged, and not a directory of them."""
    storage = LocalStorage(os.path.dirname(directory))
    name = os.path.basename(directory)
    return (bool(name) and is_checkpoint(storage, name)) or any(
        os.path.isfile(os.path.join(directory, below, METADATA_NAME)) for below in STOCK_PLACES
    )


def entries_of(path: str) -> tuple[str, list[RootEntry]]:
    """The directory that ``path`` is, and the checkpoints in it, oldest first: published, stock and corrupt ones."""
    root = existing_directory(path)
    known = ("published", "stock", "corrupt")
    return root, [row for row in list_root(root).entries if row.state in known]


def chosen_path(path: str, step: int | None) -> str:
    """The checkpoint that ``path`` is, or of the root that it is: that of ``step``, or the newest.

    Raises `ConfigError` for a path that is no directory, or a step of what is one checkpoint; `CheckpointNotFound`.
    """
    directory = existing_directory(path)
    if is_one_checkpoint(directory):
        if step is not None:
            raise ConfigError(f"{directory} is one checkpoint; give its root with --step", field="step")
        return directory
    _, rows = entries_of(directory)
    if step is not None:
        return of_step(directory, rows, step).path
    newest = [row for row in rows if row.latest] or [row for row in rows if row.state != "stock"][-1:]
    if not newest:
        raise CheckpointNotFound(f"{directory} holds no checkpoints", path=directory)
    return newest[0].path


def of_step(root: str, rows: list[RootEntry], step: int) -> RootEntry:
    """The checkpoint of ``step``. Raises `CheckpointNotFound` naming the steps there are."""
    for row in rows:
        if row.step == step:
            return row
    have = ", ".join(str(row.step) for row in rows if row.step is not None) or "none"
    raise CheckpointNotFound(f"step {step} is not under {root}; steps: {have}", path=root, step=step)
