"""transformers: what the Trainer does at a save by itself, and what `HoldfastTrainer` does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.adapters.turns import Turns, Way
from holdfast.integrations.transformers import HoldfastTrainer


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 1024, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Saves(TrainerCallback):
    """Saves by itself, at the end of steps, as `save_strategy` would."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.turns: Turns | None = None

    def _own(self, _: Path) -> None:
        Trainer._save_checkpoint(self.trainer, self.trainer.model, None)

    def _holdfast(self, _: Path) -> None:
        self.trainer._save_checkpoint(self.trainer.model, None)

    def _wait_saved(self) -> None:
        self.trainer._manager.wait()

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        if self.turns is None:
            self.turns = Turns({"own": Way(self._own), "holdfast": Way(self._holdfast, self._wait_saved)})
        control.should_training_stop = self.turns.after_step()


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    saves = Saves()
    options: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    trainer = HoldfastTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes, **heads)),
        TrainingArguments(sys.argv[1], max_steps=10_000, per_device_train_batch_size=2, use_cpu=True, **options),
        train_dataset=Tokens(),
        callbacks=[saves],
    )
    saves.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
