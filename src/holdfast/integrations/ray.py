"""Save the workers of a Ray Train run straight to its storage, and report each checkpoint when it is published.

    manager = checkpoint_manager(state)          in the training function: a `CheckpointManager` of the run's directory
    step = manager.restore() or 0
    report({"loss": loss}, manager.step(step))   in place of ``ray.train.report``

All workers write their shards to the run's directory, beside training, and Ray is told of the directory: nothing is
written elsewhere, uploaded or copied. ``Result.checkpoint`` and ``ray.train.get_checkpoint()`` are it.

Guarantees: Ray knows of no checkpoint that isn't whole and durable, and reports are in the order of calls. After a
failure (``FailureConfig``) the workers of the next attempt, of whatever number, go on from the newest that is whole;
Ray is then told of what was published and not yet reported. A failed save ends the attempt, as a failed upload does.
Assumes Ray 2.50 or newer (``checkpoint_upload_fn``), and a ``storage_path`` on a file system that all workers see, or
in a bucket, which Holdfast finds by the environment as Ray does.
Does not: keep or delete; ``CheckpointConfig(num_to_keep=...)`` of Ray does. Take fsspec's file systems (`ConfigError`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow.fs
import ray.train
import ray.train.collective
from ray.train import Checkpoint

import holdfast
from holdfast.errors import ConfigError
from holdfast.format.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.manager import CheckpointManager
    from holdfast.saver.handle import SaveHandle

__all__ = ["checkpoint_manager", "report", "run_directory"]

_SCHEMES: Final = {"s3": "s3://", "gcs": "gs://", "abfs": "az://"}
"""Scheme of a URL, by the type of pyarrow's file system."""
NAME_TEMPLATE: Final = "checkpoint_{step}"
TIMEOUT_S: Final = 3600.0
"""How long a report may wait, in the background, for its save; the save's own limits end it sooner."""


def run_directory() -> str:
    """Return the directory, or the URL, of this run in its storage; call it in the training function.

    Raises `ConfigError` outside of one, and if the storage is neither mounted here nor a store that pyarrow knows.
    """
    storage = _storage()
    path, kind = str(storage.experiment_fs_path), storage.storage_filesystem.type_name
    if isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        return path
    if kind not in _SCHEMES:
        raise ConfigError(
            f"the run's storage is a {kind} file system; give RunConfig a storage_path in a directory that all workers "
            "see, or a URL such as s3://bucket/runs, which Holdfast writes to without a copy",
            field="storage_path",
        )
    return f"{_SCHEMES[kind]}{path}"


def _storage() -> Any:
    try:
        return ray.train.get_context().get_storage()
    except (RuntimeError, AttributeError) as error:
        raise ConfigError(
            "there is no Ray Train run here: call this in the function that a TorchTrainer runs on its workers"
        ) from error


def checkpoint_manager(
    state: Mapping[str, Any], *, config: holdfast.CheckpointConfig | None = None, **options: Any
) -> CheckpointManager:
    """Make the `CheckpointManager` of this run: in its directory, named ``checkpoint_<step>``. All workers call it.

    config: by default, every 500 steps. Its ``keep`` has to be the default or None, since Ray keeps and deletes.
    options: as for `CheckpointManager`. Raises as that, and as `run_directory`.
    """
    given, default = config or holdfast.CheckpointConfig(), holdfast.CheckpointConfig()
    if given.keep is not None and given.keep != default.keep:
        raise ConfigError(
            "Ray keeps and deletes the checkpoints of a run: set num_to_keep of ray.train.CheckpointConfig, and leave "
            "keep of Holdfast's alone",
            field="keep",
        )
    own = replace(given, keep=None, name_template=NAME_TEMPLATE)
    manager = holdfast.CheckpointManager(run_directory(), state, config=own, **options)
    try:
        _report_what_ray_missed(manager)
    except BaseException:
        manager.close(failed=True)
        raise
    return manager


def _report_what_ray_missed(manager: CheckpointManager) -> None:
    """Tell Ray what was published when the workers before these died, and not yet reported: it keeps and deletes it."""
    latest, root = ray.train.get_checkpoint(), run_directory()
    at = _storage().experiment_fs_path
    known = os.path.basename(latest.path) if latest is not None and os.path.dirname(latest.path) == at else ""
    found = [(step, NAME_TEMPLATE.format(step=step)) for step in manager.steps()]
    behind = next((step for step, name in found if name == known), -1)
    for step, name in ray.train.collective.broadcast_from_rank_zero(found):  # all workers report alike
        if step > behind:
            metrics = {**holdfast.open(os.path.join(root, name)).metrics, "step": step}
            _report(metrics, name, None)


def report(metrics: Mapping[str, Any], saved: SaveHandle | Sequence[SaveHandle] | None = None) -> None:
    """Report ``metrics`` to Ray, and with them what was ``saved``, once it is published. All workers call it alike.

    saved: what ``manager.step`` or ``manager.save`` returned; nothing, or None, reports metrics alone. Exports are not
    reported. Returns before the save has ended. Ray learns of it in the order of calls; a failed save ends the attempt
    with its error.
    """
    handles: list[Any] = [] if saved is None else list(saved) if isinstance(saved, (list, tuple)) else [saved]
    root = run_directory()
    for handle in handles:
        if os.path.dirname(handle.path) == root:
            _report(metrics, os.path.basename(handle.path), handle)
            return
    _report(metrics, None, None)


def _report(metrics: Mapping[str, Any], name: str | None, handle: SaveHandle | None) -> None:
    checkpoint, storage = None, _storage()
    if name is not None:
        checkpoint = Checkpoint(os.path.join(storage.experiment_fs_path, name), filesystem=storage.storage_filesystem)
    # Also without a checkpoint in this mode: in Ray's own a report waits for those before it.
    ray.train.report(
        dict(metrics),
        checkpoint=checkpoint,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=lambda found, _: _published(found, handle),
    )


def _published(checkpoint: Checkpoint, handle: SaveHandle | None) -> Checkpoint:
    if handle is not None:
        handle.result(TIMEOUT_S)
    found = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{MANIFEST_NAME}")
    if found.type != pyarrow.fs.FileType.File:
        place = checkpoint.path if handle is None else handle.path
        raise ConfigError(
            f"{place} is published, and Ray's storage hasn't got it: Ray and Holdfast take it for two places. Set the "
            "endpoint and credentials by the environment (AWS_ENDPOINT_URL, ...) of all workers, and not in the query "
            "of storage_path or a storage_filesystem",
            field="storage_path",
        )
    return checkpoint
