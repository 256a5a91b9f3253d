"""A real training loop: a small transformer, forward, backward and AdamW on all cores, with saves every few steps.

A block is some iterations with or without saves; its time ends when the last save is durable, so that nobody is better
off for leaving work behind. Saves come early enough for the last one to have iterations to hide behind.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.busy import make_busy
from benchmarks.files import remove
from benchmarks.measure import Watch

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.contender import Contender

VOCAB = 1024
HEAD_SIZE = 64
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20  # the most that glibc takes for the second


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD_SIZE)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


class TrainingState:
    """What `BenchState` is for a fixed state: the two forms in which contenders take what is trained."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.objects = {"model": model, "optimizer": optimizer}
        self.flat: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            self.flat[f"model.{name}"] = parameter.detach()
            for part, tensor in optimizer.state[parameter].items():
                self.flat[f"optimizer.state.{name}.{part}"] = tensor
        self.local = self.flat


def keep_freed_memory() -> None:
    """Let the C library's allocator keep what is freed: an iteration's page faults would otherwise depend on the sizes
    that a process happens to have freed before, and double its time in some.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


class Trainer:
    """One model in training. Steps are real: what is saved changes with each."""

    def __init__(self, layers: int, hidden: int, batch: int, length: int) -> None:
        keep_freed_memory()
        torch.manual_seed(0)
        self.model = Model(layers, hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._shape = (batch, length)
        self._saves = 0
        for _ in range(2):
            self.iterate(None)
        self.state = TrainingState(self.model, self.optimizer)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.state_nbytes = sum(tensor.nbytes for tensor in self.state.flat.values())

    def iterate(self, contender: Contender | None) -> float:
        """One step; returns how long the update had to wait."""
        tokens = torch.randint(VOCAB, self._shape)
        logits = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        began = time.perf_counter()
        if contender is not None:
            contender.before_update()
        waited_s = time.perf_counter() - began
        self.optimizer.step()
        self.optimizer.zero_grad()
        return waited_s

    def block(self, contender: Contender | None, iterations: int, every: int, path: Path) -> dict[str, Any]:
        """Some iterations, a save after the first and every ``every``; returns seconds of the block and its parts."""
        held_s, durations, pending = 0.0, [], []  # type: float, list[float], list[tuple[Watch, Path]]
        idle = make_busy("idle")
        began = time.perf_counter()
        for number in range(iterations):
            start = time.perf_counter()
            held_s += self.iterate(contender)
            if contender is not None and number % every == 0:
                held_s += self._save(contender, path, pending)
            else:
                held_s += self._collect(pending)
            durations.append(time.perf_counter() - start)
        drain = time.perf_counter()
        if contender is not None:
            contender.before_update()
        for saving, _ in pending:
            saving.wait(idle, time.perf_counter() + 120.0)
        ended = time.perf_counter()
        for saving, target in pending:
            assert contender is not None, "only contenders save"
            contender.hand_over(saving.pending, target)
            remove(target)
        saves = len(range(0, iterations, every)) if every else 0
        return {
            "block_s": ended - began,
            "drain_s": ended - drain,
            "held_s": held_s / saves if saves else 0.0,
            "iterations_s": durations,
            "saves": saves,
        }

    def _save(self, contender: Contender, path: Path, pending: list[tuple[Watch, Path]]) -> float:
        """Start a save; like any user, wait for the one before first."""
        began = time.perf_counter()
        idle = make_busy("idle")
        for saving, _ in pending:
            saving.wait(idle, time.perf_counter() + 120.0)
        self._saves += 1
        target = path.with_name(f"{path.name}-{self._saves}")
        pending.append((Watch(contender.save(target)), target))
        return time.perf_counter() - began

    @staticmethod
    def _collect(pending: list[tuple[Watch, Path]]) -> float:
        began = time.perf_counter()
        if pending:
            pending[-1][0].ask()
        return time.perf_counter() - began


def contender_for(kind: type[Contender], trainer: Trainer, folder: Path) -> Contender:
    state: Any = trainer.state
    contender = kind(state, folder, rank=0, world=1)
    contender.start()
    return contender
