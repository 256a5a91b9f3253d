"""From a path to a `Source`: who wrote what is there.

`PublishedExport` is one that was just published, and is opened only if somebody wants to know more of it than where.

Guarantees: opening reads only; a path that can't be a checkpoint is a `ConfigError`, one that isn't is
`CheckpointNotFound`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError
from holdfast.format.manifest import MANIFEST_NAME, METADATA_NAME
from holdfast.format.safetensors_header import INDEX_NAME, WEIGHTS_NAME
from holdfast.hf_source import has_hf_model, open_hf
from holdfast.keeping import Found, oldest_first
from holdfast.root import foreign_steps, lost_manifest, may_be_published, no_manifest
from holdfast.source import Source, open_holdfast
from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")

DEFAULT_TEMPLATE: Final = "step-{step}"

_PICKLED_MODELS: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")

STOCK_PLACES: Final = ("", "model", "weights")
"""Where below its directory a stock checkpoint has its metadata, in one of the layouts that ``foreign`` knows."""


@dataclass(frozen=True, slots=True)
class PublishedExport:
    """What ``attempt`` has just published in ``directory``: nothing of it has been read."""

    directory: str
    attempt: str
    step: int | None

    def open(self) -> Source:
        """Its model; of what has none that Holdfast could load, such as an adapter, its files and checksums.

        Raises as `open_source`, and `CheckpointNotFound` if something else is there by now.
        """
        return self._opened(exports=not has_hf_model(self.directory))

    def fresh(self) -> Source:
        """Its files and checksums, to be verified; raises as `open`."""
        return self._opened(exports=True)

    @property
    def checksummed(self) -> bool:
        """As of any `Source` that Holdfast published."""
        return True

    def _opened(self, *, exports: bool) -> Source:
        source = open_source(self.directory, exports=exports)
        if source.manifest is None or source.manifest.attempt != self.attempt:
            raise CheckpointNotFound(
                f"{self.directory} is not what attempt {self.attempt} published any more: open it anew",
                path=self.directory,
                step=self.step,
            )
        return source


def open_source(path: str, *, exports: bool = False) -> Source:
    """The checkpoint at ``path``, or the model of a Hugging Face directory; of a manager's root, its newest step.

    exports: open an export as what its reports say of it: files and checksums, and no tensors. Raises
    `CheckpointNotFound`, `CheckpointCorrupt`, `ConfigError` for a path that can't be one.
    """
    if "://" in path:
        raise ConfigError(f"{path}: object stores are not in this release; give a directory", field="path")
    directory = os.path.abspath(path)
    if os.path.isfile(directory):
        raise ConfigError(f"{directory} is a file; a checkpoint is a directory", field="path")
    if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        source = open_holdfast(directory)
        if source.manifest.kind == "checkpoint" or exports:
            return source
        if has_hf_model(directory):
            return open_hf(directory)
        raise ConfigError(
            f"{directory} is an export without a model that could be loaded, such as an adapter: load it with what it "
            f"was made for, or give the checkpoint of step {source.step}",
            field="path",
        )
    if lost_manifest(LocalStorage(os.path.dirname(directory)), os.path.basename(directory) or "."):
        raise no_manifest(os.path.join(directory, MANIFEST_NAME))
    if any(os.path.isfile(os.path.join(directory, below, METADATA_NAME)) for below in STOCK_PLACES):
        # Here, since it brings in much of torch.distributed: half the time that importing Holdfast would take.
        from holdfast.foreign import find_foreign

        if foreign := find_foreign(directory):
            return foreign
    if has_hf_model(directory):
        return open_hf(directory)
    for retry in (True, False):
        found = newest_step(directory)
        if found is None:
            break
        try:
            return open_source(os.path.join(directory, found.name))
        except CheckpointNotFound:
            if not retry:  # a writer's retention has taken it away since: its successor is there
                raise
    metadata = os.path.join(directory, METADATA_NAME)
    if os.path.lexists(metadata):
        message = f"{metadata} is no plain file: what stock DCP wrote here was replaced; load another step"
        raise CheckpointCorrupt(message, path=metadata)
    raise CheckpointNotFound(
        f"no checkpoint at {directory}: it has neither {MANIFEST_NAME} nor {METADATA_NAME}, nor published steps below, "
        f"nor is it a Hugging Face model's ({WEIGHTS_NAME} or {INDEX_NAME}){_seen_instead(directory)}",
        path=directory,
    )


def _seen_instead(directory: str) -> str:
    if not os.path.isdir(directory):
        return " (it doesn't exist)"
    if any(os.path.lexists(os.path.join(directory, name)) for name in _PICKLED_MODELS):
        return "; it has a pickled one: convert that, by save_pretrained of a present transformers"
    return ""


def newest_step(root: str) -> Found | None:
    """The newest checkpoint below ``root``: Holdfast's under any name, stock DCP's under the default name template.

    One that can't be read is passed over, and said so in the log.
    """
    storage = LocalStorage(root)
    ours = [(None, name) for name in storage.list_dir("") if may_be_published(name)]
    readable: list[Found] = []
    for row in oldest_first(storage, [*ours, *foreign_steps(storage, DEFAULT_TEMPLATE)]):
        if row.error is None:
            readable.append(row)
        else:
            _log.warning("%s is passed over: %s", storage.path(row.name), row.error)
    return readable[-1] if readable else None
