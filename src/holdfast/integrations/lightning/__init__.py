"""Save and resume Lightning trainers by Holdfast; see `holdfast.integrations.lightning.trainer`.

HoldfastStrategyMixin, HoldfastCheckpointIO     how a trainer saves and loads
HoldfastModelCheckpoint, HoldfastRandomState    callbacks
export_ckpt                                     writes the one file that Lightning would have written
"""

from holdfast.integrations.lightning.trainer import (
    HoldfastCheckpointIO,
    HoldfastModelCheckpoint,
    HoldfastRandomState,
    HoldfastStrategyMixin,
    export_ckpt,
)

__all__ = [
    "HoldfastCheckpointIO",
    "HoldfastModelCheckpoint",
    "HoldfastRandomState",
    "HoldfastStrategyMixin",
    "export_ckpt",
]
