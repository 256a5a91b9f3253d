"""Train with the Trainer of transformers, fail in the middle, resume from what Holdfast saved, and export the model.

python examples/transformers_trainer.py --out out/trainer
torchrun --nproc-per-node 2 examples/transformers_trainer.py --out out/trainer
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.transformers import HoldfastTrainer

STEPS = 12


class FailAt(TrainerCallback):
    """Ends training at ``step``, as a node that is lost would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - its signature
        if state.global_step == self.step:
            raise RuntimeError(f"lost at step {self.step}")


def make_trainer(out: Path, fail_at: int) -> HoldfastTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return HoldfastTrainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(out / "run"),
            max_steps=STEPS,
            save_steps=4,
            save_total_limit=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[FailAt(fail_at)],
        exports=[holdfast.HFExport(out / "hf", every=STEPS)],  # the last save is an export too
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/trainer"))
    out = parser.parse_args().out
    try:
        make_trainer(out, fail_at=10).train()
    except RuntimeError as error:
        print("training failed:", error)
    trainer = make_trainer(out, fail_at=0)
    trainer.train(resume_from_checkpoint=True)
    if trainer.is_world_process_zero():
        print("checkpoints:", *sorted(path.name for path in (out / "run").glob("checkpoint-*")))
        model = LlamaForCausalLM.from_pretrained(out / "hf" / f"hf-{STEPS}")
        print("exported", sum(param.numel() for param in model.parameters()), "parameters")
    trainer.end()


if __name__ == "__main__":
    main()
