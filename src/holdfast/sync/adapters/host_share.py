"""A trainer rank's share of the weights in host memory, for frameworks that give every rank all tensors.

Guarantees: each tensor is in exactly one rank's share, and shares are about equal in bytes. Memory is reused from
version to version.
Assumes: every rank passes the same tensors in the same order.
Does not: gather anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


class HostShare:
    """This trainer rank's share of the weights in host memory, which one version after the other is copied into.

    dtype: floating point weights are cast to it; None: to nothing.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: dict[str, torch.Tensor] = {}

    def copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], int]:
        """Copy the share: each tensor is in one rank's. Returns it, valid until the next call, and all ranks' bytes."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        nbytes = [0] * world
        held, self._held = self._held, {}
        for name, tensor in weights:
            if compat.is_dtensor(tensor):
                raise ConfigError(f"{name} is a DTensor, but verl passes whole tensors; gather it first", field=name)
            if name in self._held:
                raise ConfigError(f"{name} was passed twice in one version", field=name)
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            owner = nbytes.index(min(nbytes))
            nbytes[owner] += max(1, tensor.numel() * dtype.itemsize)
            if owner != rank:
                continue
            memory = held.pop(name, None)
            if memory is None or memory.shape != tensor.shape or memory.dtype != dtype:
                memory = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._held[name] = memory.copy_(tensor.detach())
        return dict(self._held), sum(nbytes)


def share_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy this trainer rank's share of ``weights`` to new host memory: each tensor is in one rank's share."""
    return HostShare().copy(weights)[0]
