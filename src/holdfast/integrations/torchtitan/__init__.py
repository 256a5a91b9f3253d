"""Checkpoint torchtitan's trainer with Holdfast.

    CheckpointManager            in place of `torchtitan.components.checkpointer.CheckpointManager` (0.3 and newer):
                                 ``config.checkpoint = CheckpointManager.Config(enable=True, ...)``
    LegacyCheckpointManager      the same for trainers built on the surface that torchtitan had before; imports nothing
                                 of torchtitan

Both leave what they save under torchtitan's own names, in directories that torchtitan resumes from, and resume from
what torchtitan wrote; see `TitanCheckpoints`, which does the work. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.integrations.torchtitan.legacy import LegacyCheckpointManager
    from holdfast.integrations.torchtitan.manager import CheckpointManager

_HOME = {"CheckpointManager": "manager", "LegacyCheckpointManager": "legacy"}
__all__ = ["CheckpointManager", "LegacyCheckpointManager"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
