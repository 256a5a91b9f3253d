"""Holdfast: capture training state once, deliver it everywhere.

Importing this starts nothing and imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast import dcp as dcp
    from holdfast import export as export
    from holdfast import sync as sync
    from holdfast.api import async_save, load, open, save  # noqa: A004
    from holdfast.checkpoint import Checkpoint, TensorInfo, VerifyReport
    from holdfast.config import CheckpointConfig
    from holdfast.errors import (
        CallbackFailed,
        CheckpointCorrupt,
        CheckpointExists,
        CheckpointNotFound,
        ConfigError,
        DeadlineExceeded,
        EngineDied,
        HoldfastError,
        OutcomeUnknown,
        PeerLost,
        RootLocked,
        SaveFailed,
        StateChangedWhileStaging,
        StateMismatch,
        StorageError,
        WeightsDirty,
    )
    from holdfast.events import add_hook, statistics
    from holdfast.export.hf_export import HFExport
    from holdfast.export.single import export_hf
    from holdfast.handle import SaveHandle, SaveStats
    from holdfast.manager import CheckpointManager
    from holdfast.retention import Best, Keep
    from holdfast.state.per_rank import PerRank
    from holdfast.state.rng import RNG

_HOME = {
    "holdfast.api": ("async_save", "load", "open", "save"),
    "holdfast.checkpoint": ("Checkpoint", "TensorInfo", "VerifyReport"),
    "holdfast.config": ("CheckpointConfig",),
    "holdfast.errors": (
        "CallbackFailed",
        "CheckpointCorrupt",
        "CheckpointExists",
        "CheckpointNotFound",
        "ConfigError",
        "DeadlineExceeded",
        "EngineDied",
        "HoldfastError",
        "OutcomeUnknown",
        "PeerLost",
        "RootLocked",
        "SaveFailed",
        "StateChangedWhileStaging",
        "StateMismatch",
        "StorageError",
        "WeightsDirty",
    ),
    "holdfast.events": ("add_hook", "statistics"),
    "holdfast.export.hf_export": ("HFExport",),
    "holdfast.export.single": ("export_hf",),
    "holdfast.handle": ("SaveHandle", "SaveStats"),
    "holdfast.manager": ("CheckpointManager",),
    "holdfast.retention": ("Best", "Keep"),
    "holdfast.state.per_rank": ("PerRank",),
    "holdfast.state.rng": ("RNG",),
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
    "ConfigError",
    "DeadlineExceeded",
    "EngineDied",
    "HFExport",
    "HoldfastError",
    "Keep",
    "OutcomeUnknown",
    "PeerLost",
    "PerRank",
    "RootLocked",
    "SaveFailed",
    "SaveHandle",
    "SaveStats",
    "StateChangedWhileStaging",
    "StateMismatch",
    "StorageError",
    "TensorInfo",
    "VerifyReport",
    "WeightsDirty",
    "__version__",
    "add_hook",
    "async_save",
    "dcp",
    "export",
    "export_hf",
    "load",
    "open",
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
