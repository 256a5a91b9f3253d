"""What both `verl_job.py` and `test_verl.py` know: the weights of each step, and who receives them."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

import torch

TRAINERS = 2
RECEIVED = ([1, 2, 3, 4], [1, 2, 4])
"""The steps whose weights each rollout worker receives: the second is not there for one of them."""


def verl_version() -> str:
    """Return verl's version, without importing it."""
    return version("verl")


def model_at(step: int) -> torch.nn.Module:
    """Return the model after ``step``, the same everywhere."""
    torch.manual_seed(step)
    return torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 33), torch.nn.Linear(33, 16, bias=False))


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and a hash of the bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"


def nearly_at(step: int) -> torch.nn.Module:
    """Return the model after ``step`` steps that each change a few of its elements, in bfloat16."""
    model = model_at(0).to(torch.bfloat16)
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(step):
            for value in model.parameters():
                where = torch.rand(value.shape, generator=made) < 0.02
                value.copy_(torch.where(where, torch.randn(value.shape, generator=made).bfloat16(), value))
    return model
