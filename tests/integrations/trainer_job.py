"""Train a tiny Llama with the Trainer, saving by Holdfast or as the Trainer itself does; kill it on request.

trainer_job.py OUT STEPS [--trainer holdfast|stock] [--plan ddp|fsdp2] [--every N] [--kill N] [--resume auto|DIR]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate_job import fsdp2_on_cpu
from jobs import leave, note_loss
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from holdfast.integrations.transformers import HoldfastTrainer


class Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Watch(TrainerCallback, ExportableState):
    """Notes losses, counts steps over all runs, and kills its own."""

    def __init__(self, kill: int | None = None) -> None:
        self.kill, self.seen = kill, 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs and state.is_world_process_zero:
            note_loss(Path(args.output_dir) / "losses.jsonl", state.global_step, logs["loss"])
        if state.global_step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--trainer", default="holdfast")
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--resume")
    args = parser.parse_args()
    options: dict[str, Any] = {}
    if args.plan == "fsdp2":
        fsdp2_on_cpu()
        options = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.2,  # what was drawn before matters
        )
    )
    trainer = (HoldfastTrainer if args.trainer == "holdfast" else Trainer)(
        model,
        TrainingArguments(
            str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_steps=args.every,
            save_total_limit=3,
            seed=7,
            restore_callback_states_from_checkpoint=True,
            use_cpu=True,
            ddp_backend="gloo" if "RANK" in os.environ else None,
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Tokens(),
        callbacks=[Watch(args.kill)],
    )
    trainer.train(resume_from_checkpoint=True if args.resume == "auto" else args.resume)
    trainer.end()
    leave()


if __name__ == "__main__":
    main()
