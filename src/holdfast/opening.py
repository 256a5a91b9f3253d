"""From a path to a `Source`: who wrote what is there.

Guarantees: opening reads only; a path that can't be a checkpoint is a `ConfigError`, one that isn't is
`CheckpointNotFound`.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.format.manifest import MANIFEST_NAME, METADATA_NAME
from holdfast.keeping import Found, oldest_first
from holdfast.root import foreign_steps, lost_manifest, no_manifest
from holdfast.source import Source, open_holdfast
from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")

DEFAULT_TEMPLATE: Final = "step-{step}"

STOCK_PLACES: Final = ("", "model", "weights")
"""Where below its directory a stock checkpoint has its metadata, in one of the layouts that ``foreign`` knows."""


def open_source(path: str, *, exports: bool = False) -> Source:
    """The checkpoint at ``path``; where that is a manager's root, its newest step.

    exports: open an export as well, which has files and checksums, and no tensors that its reports know of. Raises
    `CheckpointNotFound`, `CheckpointCorrupt`, `ConfigError` for a path that can't be one.
    """
    if "://" in path:
        raise ConfigError(f"{path}: object stores are not in this release; give a directory", field="path")
    directory = os.path.abspath(path)
    if os.path.isfile(directory):
        raise ConfigError(f"{directory} is a file; a checkpoint is a directory", field="path")
    if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        source = open_holdfast(directory)
        if source.manifest.kind == "export" and not exports:
            raise ConfigError(
                f"{directory} is an export, not a checkpoint: load it with from_pretrained, or give the checkpoint of "
                f"step {source.step}",
                field="path",
            )
        return source
    if lost_manifest(LocalStorage(os.path.dirname(directory)), os.path.basename(directory) or "."):
        raise no_manifest(os.path.join(directory, MANIFEST_NAME))
    if any(os.path.isfile(os.path.join(directory, below, METADATA_NAME)) for below in STOCK_PLACES):
        # Here, since it brings in much of torch.distributed: half the time that importing Holdfast would take.
        from holdfast.foreign import find_foreign

        if foreign := find_foreign(directory):
            return foreign
    for retry in (True, False):
        found = newest_step(directory)
        if found is None:
            break
        try:
            return open_source(os.path.join(directory, found.name))
        except CheckpointNotFound:
            if not retry:  # a writer's retention has taken it away since: its successor is there
                raise
    raise CheckpointNotFound(
        f"no checkpoint at {directory}: it has neither {MANIFEST_NAME} nor {METADATA_NAME}, nor published steps below"
        + ("" if os.path.isdir(directory) else " (it doesn't exist)"),
        path=directory,
    )


def newest_step(root: str) -> Found | None:
    """The newest checkpoint below ``root``: Holdfast's under any name, stock DCP's under the default name template.

    One that can't be read is passed over, and said so in the log.
    """
    storage = LocalStorage(root)
    ours = [(None, name) for name in storage.list_dir("") if not name.startswith(".")]
    readable: list[Found] = []
    for row in oldest_first(storage, [*ours, *foreign_steps(storage, DEFAULT_TEMPLATE)]):
        if row.error is None:
            readable.append(row)
        else:
            _log.warning("%s is passed over: %s", storage.path(row.name), row.error)
    return readable[-1] if readable else None
