"""Holdfast: capture training state once, deliver it everywhere.

Importing this starts nothing and imports no torch: each name is loaded when it is first used. Where torch has been
imported before, what saves and loads is loaded at once, so that the first save doesn't pay for it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast import dcp as dcp
    from holdfast import export as export
    from holdfast import sync as sync
    from holdfast.api import async_save, delete, load, open, save  # noqa: A004
    from holdfast.catalog.retention import Best, Keep
    from holdfast.config import CheckpointConfig, HFExport
    from holdfast.errors import (
        CallbackFailed,
        CheckpointCorrupt,
        CheckpointExists,
        CheckpointNotFound,
        CheckpointReplaced,
        ConfigError,
        DeadlineExceeded,
        EngineDied,
        FetchCancelled,
        HoldfastError,
        OutcomeUnknown,
        PeerLost,
        RootLocked,
        SaveFailed,
        StateChangedWhileStaging,
        StateMismatch,
        StorageError,
        VersionRevoked,
        WeightsDirty,
    )
    from holdfast.events import add_hook, statistics
    from holdfast.export.one_shot import async_export_hf, export_hf
    from holdfast.loader.checkpoint import Checkpoint, FileInfo, TensorInfo, VerifyReport
    from holdfast.manager import CheckpointManager
    from holdfast.saver.handle import SaveHandle, SaveStats
    from holdfast.saver.process_session import release
    from holdfast.state.entries import PerRank, Replicated, TrainableOnly, Unprefixed
    from holdfast.state.rng import RNG
    from holdfast.state.shards import Shard

_HOME = {
    "holdfast.api": ("async_save", "delete", "load", "open", "save"),
    "holdfast.loader.checkpoint": ("Checkpoint", "FileInfo", "TensorInfo", "VerifyReport"),
    "holdfast.config": ("CheckpointConfig", "HFExport"),
    "holdfast.errors": (
        "CallbackFailed",
        "CheckpointCorrupt",
        "CheckpointExists",
        "CheckpointNotFound",
        "CheckpointReplaced",
        "ConfigError",
        "DeadlineExceeded",
        "EngineDied",
        "FetchCancelled",
        "HoldfastError",
        "OutcomeUnknown",
        "PeerLost",
        "RootLocked",
        "SaveFailed",
        "StateChangedWhileStaging",
        "StateMismatch",
        "StorageError",
        "VersionRevoked",
        "WeightsDirty",
    ),
    "holdfast.events": ("add_hook", "statistics"),
    "holdfast.export.one_shot": ("async_export_hf", "export_hf"),
    "holdfast.saver.handle": ("SaveHandle", "SaveStats"),
    "holdfast.saver.process_session": ("release",),
    "holdfast.manager": ("CheckpointManager",),
    "holdfast.catalog.retention": ("Best", "Keep"),
    "holdfast.state.entries": ("PerRank", "Replicated", "TrainableOnly", "Unprefixed"),
    "holdfast.state.rng": ("RNG",),
    "holdfast.state.shards": ("Shard",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "RNG",
    "Best",
    "CallbackFailed",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointCorrupt",
    "CheckpointExists",
    "CheckpointManager",
    "CheckpointNotFound",
    "CheckpointReplaced",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDied",
    "FetchCancelled",
    "FileInfo",
    "HFExport",
    "HoldfastError",
    "Keep",
    "OutcomeUnknown",
    "PeerLost",
    "PerRank",
    "Replicated",
    "RootLocked",
    "SaveFailed",
    "SaveHandle",
    "SaveStats",
    "Shard",
    "StateChangedWhileStaging",
    "StateMismatch",
    "StorageError",
    "TensorInfo",
    "TrainableOnly",
    "Unprefixed",
    "VerifyReport",
    "VersionRevoked",
    "WeightsDirty",
    "__version__",
    "add_hook",
    "async_export_hf",
    "async_save",
    "dcp",
    "delete",
    "export",
    "export_hf",
    "load",
    "open",
    "release",
    "save",
    "statistics",
    "sync",
]


def __getattr__(name: str) -> Any:
    if name in ("dcp", "export", "sync"):
        return import_module(f"holdfast.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if sys.modules.get("torch") is not None:
    import_module("holdfast.api")
