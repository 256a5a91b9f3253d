"""From a path to a `Source`: who wrote what is there.

Guarantees: opening reads only; a path that can't be a checkpoint is a `ConfigError`, one that isn't is
`CheckpointNotFound`.
"""

from __future__ import annotations

import os

from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.foreign import find_foreign
from holdfast.format.manifest import MANIFEST_NAME, METADATA_NAME
from holdfast.source import Source, open_holdfast, refused


def open_source(path: str) -> Source:
    """The checkpoint at ``path``; where that is a manager's root, its newest step.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, `ConfigError` for a path that can't be one.
    """
    if "://" in path:
        raise ConfigError(f"{path}: object stores are not in this release; give a directory", field="path")
    directory = os.path.abspath(path)
    if os.path.isfile(directory):
        raise ConfigError(f"{directory} is a file; a checkpoint is a directory", field="path")
    if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        return open_holdfast(directory)
    if foreign := find_foreign(directory):
        return foreign
    steps = published_steps(directory)
    if steps:
        return open_holdfast(os.path.join(directory, steps[-1][1]))
    raise CheckpointNotFound(
        f"no checkpoint at {directory}: it has neither {MANIFEST_NAME} nor {METADATA_NAME}, nor published steps below"
        + ("" if os.path.isdir(directory) else " (it doesn't exist)"),
        path=directory,
    )


def published_steps(root: str) -> list[tuple[int, str]]:
    """(step, directory name) of every checkpoint below ``root``, oldest step first, by their manifests."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused(root, error) from error
    found = []
    for name in names:
        if os.path.isfile(os.path.join(root, name, MANIFEST_NAME)):
            step = open_holdfast(os.path.join(root, name)).step
            if step is not None:
                found.append((step, name))
    return sorted(found)
