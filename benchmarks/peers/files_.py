"""`torch.save` and `safetensors`: one file a rank, fsynced within its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.contender import Contender, Pending
from benchmarks.files import sync_below

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import BenchState


class TorchSave(Contender):
    def save(self, path: Path) -> Pending:
        path.mkdir(exist_ok=True)
        torch.save(self.held_state.local, path / f"{self.rank}.pt")
        sync_below(path)
        return Pending()

    def load(self, state: BenchState, path: Path) -> None:
        for name, tensor in torch.load(path / f"{self.rank}.pt", weights_only=True, mmap=True).items():
            state.local[name].copy_(tensor)


class SafeTensors(Contender):
    def save(self, path: Path) -> Pending:
        path.mkdir(exist_ok=True)
        save_file(self.held_state.local, path / f"{self.rank}.safetensors")
        sync_below(path)
        return Pending()

    def load(self, state: BenchState, path: Path) -> None:
        with safe_open(path / f"{self.rank}.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                state.local[name].copy_(file.get_tensor(name))

    def read_part(self, name: str, rows: tuple[int, int], path: Path) -> Any:
        with safe_open(path / f"{self.rank}.safetensors", framework="pt") as file:
            return file.get_slice(name)[rows[0] : rows[0] + rows[1]]
