"""What this rank holds of a tensor: which elements of the whole, values made from a seed, and fingerprints.

Everything here is a function of an element's place in the *whole* tensor, so results do not depend on how many ranks
there are or how they divide it: a model is initialised in its shards, on any world, to the same values, and states of
different worlds are compared without gathering anything. Works through shards in pieces of about a million elements.

A fingerprint is a sum over elements of their bits times odd numbers drawn from name and place, modulo 2**64: no change
of one element keeps it, and others only by chance. It guards against mistakes, not against an adversary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_ELEMENTS = 1 << 20
LOW_32 = 0xFFFF_FFFF
BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with ``tensor``."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def offsets_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole, as torch's own distributed checkpoints see it."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def pieces_of(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(values, places): rows of this rank's part, and where each element stands in the flattened whole (int64)."""
    local = local_of(tensor)
    if local.numel() == 0:
        return
    if local.ndim == 0:
        yield local, torch.zeros((), dtype=torch.int64, device=local.device)
        return
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)]
    offsets = offsets_of(tensor)
    rows = max(1, PIECE_ELEMENTS // max(1, math.prod(local.shape[1:])))
    for begin in range(0, local.shape[0], rows):
        values = local[begin : begin + rows]
        places = torch.zeros((), dtype=torch.int64, device=local.device)
        for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
            first = offsets[dim] + (begin if dim == 0 else 0)
            along = torch.arange(first, first + size, dtype=torch.int64, device=local.device) * stride
            places = places + along.view(-1, *(1,) * (tensor.ndim - dim - 1))
        yield values, places


def scrambled(places: torch.Tensor, key: int) -> torch.Tensor:
    """Numbers that look random, one for each place; int64 arithmetic wraps around."""
    mixed = (places + key) * 0x1E37_79B9_7F4A_7C15
    mixed = (mixed ^ ((mixed >> 32) & LOW_32)) * 0x3F58_476D_1CE4_E5B9
    return mixed ^ ((mixed >> 29) & LOW_32)


def fill(tensor: torch.Tensor, name: str, seed: int, std: float) -> None:
    """Give this rank's part its values: uniform, mean 0, the given standard deviation."""
    key = crc32(f"{seed}.{name}".encode()) << 20
    with torch.no_grad():
        for values, places in pieces_of(tensor):
            unit = (scrambled(places, key) >> 40 & 0xFF_FFFF).to(torch.float32) / (1 << 23) - 1.0
            values.copy_(unit * (std * math.sqrt(3.0)))


def sum_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's share of the fingerprint, an int64 on the tensor's device."""
    key = crc32(name.encode()) << 20
    total = torch.zeros((), dtype=torch.int64, device=local_of(tensor).device)
    for values, places in pieces_of(tensor):
        bits = values.contiguous().view(BITS_OF[values.element_size()]).to(torch.int64)
        total = total + ((bits + 1) * (scrambled(places, key) | 1)).sum()
    return total


def copy_number(tensor: torch.Tensor) -> int:
    """Which of the copies of its part this rank holds, from 0; a plain tensor is a copy on every rank."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() if dist.is_initialized() else 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    number = 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            number = number * tensor.device_mesh.size(dim) + coordinate[dim]
    return number


def fingerprints(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, str]:
    """Name → fingerprint of the whole tensor with its dtype and shape; the same on every rank, which all call this.

    Raises ValueError if copies of one tensor differ between ranks.
    """
    names = sorted(tensors)
    sums = torch.stack([sum_of(tensors[name], name).to(device) for name in names])
    numbers = torch.tensor([copy_number(tensors[name]) for name in names], dtype=torch.int64, device=device)
    if dist.is_initialized():
        world = dist.get_world_size()
        gathered = [torch.empty_like(sums) for _ in range(world)], [torch.empty_like(numbers) for _ in range(world)]
        dist.all_gather(gathered[0], sums)
        dist.all_gather(gathered[1], numbers)
        all_sums, all_numbers = torch.stack(gathered[0]).cpu(), torch.stack(gathered[1]).cpu()
    else:
        all_sums, all_numbers = sums.cpu()[None], numbers.cpu()[None]
    first = torch.where(all_numbers == 0, all_sums, 0).sum(0)
    for number in range(1, int(all_numbers.max()) + 1):
        held = (all_numbers == number).any(0)
        other = torch.where(all_numbers == number, all_sums, 0).sum(0)
        if bool((held & (other != first)).any()):
            name = names[int((held & (other != first)).nonzero()[0])]
            raise ValueError(f"copy {number} of {name} differs from the first")
    return {
        name: f"{value & 0xFFFF_FFFF_FFFF_FFFF:016x} {_kind(tensors[name])}"
        for name, value in zip(names, first.tolist(), strict=True)
    }


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def tensors_in(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a training state: parameters, buffers that are kept, and the optimizer's, by parameter."""
    kept: dict[str, Any] = dict(model.state_dict())
    found = {f"model.{name}": value for name, value in kept.items()}
    names = {param: name for name, param in model.named_parameters()}
    for param, values in optimizer.state.items() if optimizer is not None else ():
        found |= {f"optimizer.{names[param]}.{key}": value for key, value in values.items()}
    return found
