"""Train a byte-level language model with FSDP2; keep its state, and export it for Hugging Face, with Holdfast.

    torchrun --nproc-per-node=2 examples/train_lm.py --out runs/lm      # two ranks, gloo, CPU
    python examples/train_lm.py --out runs/lm                           # or just one process
    python examples/generate.py runs/lm/hf/hf-latest                    # at any time: what it has learned

Run the same command again and it goes on where the newest checkpoint stands. The text it learns is the source code of
the Python standard library of the machine. Dropout, the order of the data, the learning-rate schedule and the clipped
gradients all depend on state, so a resumed run repeats an uninterrupted one bit for bit only if all of it came back:
that is what `demo.py` shows. Rank 0 appends to OUT/log.jsonl: one line a step, and one for each checkpoint and export.
At the end it leaves the model's logits for a prompt in OUT/logits.pt, for others to compare with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import holdfast

SIZES = {"tiny": (2, 64), "small": (4, 256), "base": (8, 512)}  # layers, hidden size
PROMPT = "import os\n\n\ndef "


class StdlibText:
    """Random windows of the standard library's source, different on each rank. It can say and set where it stands."""

    def __init__(self, *, seed: int, rank: int, batch: int, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.batch, self.length = batch, length
        self.generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        self.batches_drawn = 0

    def __next__(self) -> torch.Tensor:
        starts = torch.randint(len(self.text) - self.length, (self.batch,), generator=self.generator)
        self.batches_drawn += 1
        return torch.stack([self.text[start : start + self.length] for start in starts.tolist()]).long()

    def state_dict(self) -> dict[str, Any]:
        return {"batches_drawn": self.batches_drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches_drawn = state["batches_drawn"]
        self.generator.set_state(state["generator"])


class Log:
    """Lines of JSON in a file, from rank 0 only, each on its way before training goes on."""

    def __init__(self, path: Path | None) -> None:
        self.file = path.open("a", encoding="utf-8", buffering=1) if path else None

    def write(self, **fields: Any) -> None:
        if self.file:
            self.file.write(json.dumps(fields) + "\n")

    def step(self, step: int, loss: float, seconds: float, held_s: float) -> None:
        self.write(event="step", step=step, loss=loss.hex(), seconds=seconds, held_s=held_s)
        if self.file:
            print(f"step {step:4d}   loss {loss!r:<20}   {seconds * 1e3:6.0f} ms", flush=True)

    def published(self, handle: holdfast.SaveHandle) -> None:
        stats = handle.stats
        event = "exported" if Path(handle.path).parent.name == "hf" else "saved"
        times = {"stall_s": stats.stall_s, "staging_s": stats.staging_s, "persist_s": stats.persist_s}
        self.write(event=event, step=handle.step, bytes=stats.bytes, commit_s=stats.commit_s, **times)
        if self.file:
            held, persisted = f"{stats.stall_s * 1e3:.1f} ms", f"{stats.persist_s * 1e3:.0f} ms"
            print(
                f"  {event} {handle.step:4d}   {stats.bytes / 1e6:.1f} MB, training held {held}, "
                f"persisted in {persisted}"
            )


def build(size: str, length: int, seed: int, world: int) -> torch.nn.Module:
    """A small Llama with random weights, the same on every rank, sharded if there are several."""
    torch.manual_seed(seed)
    layers, hidden = SIZES[size]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=length,
        attention_dropout=0.1,
        use_cache=False,
        bos_token_id=None,  # every byte may be text
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    if world > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, its value: what whoever loads an export needs to feed it text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte; what doesn't print has one above 255
    unprinted = sorted(set(range(256)) - {ord(letter) for letter in letters})
    vocabulary = {letter: ord(letter) if ord(letter) < 256 else unprinted[ord(letter) - 256] for letter in letters}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def keep_logits(model: torch.nn.Module, step: int, path: Path, rank: int) -> None:
    """What the model that was trained, sharded as it is, makes of a prompt. Every rank calls this."""
    tokens = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits
    if rank == 0:
        torch.save({"step": step, "prompt": PROMPT, "tokens": tokens, "logits": logits}, path)


def mean_over_ranks(value: torch.Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(value)
    return value.item() / world


def train(args: argparse.Namespace, rank: int, world: int) -> None:
    model = build(args.size, args.length, args.seed, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warmup = max(1, args.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * n / args.steps))
    )
    text = StdlibText(seed=args.seed, rank=rank, batch=args.batch, length=args.length)
    progress = {"bytes_seen": 0}
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(args.seed + 1 + rank)  # dropout differs from rank to rank

    # Everything the next step depends on. A dataloader is kept for each rank, and so are the random number generators,
    # which need not be named.
    state = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": schedule,
        "dataloader": text,
        "train": progress,
    }
    limit = args.io_limit_bytes_per_s
    config = holdfast.CheckpointConfig(every=args.every, keep=holdfast.Keep(last=3), io_limit_bytes_per_s=limit)
    # The same steps for `from_pretrained`, made from the copy that the checkpoint is made from.
    export = holdfast.HFExport(
        args.out / "hf",
        every=args.every,
        keep=holdfast.Keep(last=2),
        tokenizer=byte_tokenizer(),
        io_limit_bytes_per_s=limit,
    )
    log = Log(args.out / "log.jsonl" if rank == 0 else None)
    handles: list[holdfast.SaveHandle] = []

    with holdfast.CheckpointManager(args.out / "checkpoints", state, config=config, exports=[export]) as manager:
        first = (manager.restore() or 0) + 1
        log.write(event="start", first=first, world=world)

        for step in range(first, args.steps + 1):
            begin = time.perf_counter()
            tokens = next(text)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # a hook in here waits until the last save has its copy of what this changes
            optimizer.zero_grad()
            schedule.step()
            progress["bytes_seen"] += tokens.numel() * world
            mean = mean_over_ranks(loss.detach(), world)

            before_save = time.perf_counter()
            handles += manager.step(step, metrics={"loss": mean})
            end = time.perf_counter()

            log.step(step, mean, end - begin, end - before_save)
            while handles and handles[0].done():
                log.published(handles.pop(0))

        manager.wait()
        for handle in handles:
            log.published(handle)
        log.write(event="end", captures=holdfast.statistics()["captures"])
    keep_logits(model, args.steps, args.out / "logits.pt", rank)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model, with checkpoints and exports by Holdfast."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the run: checkpoints, exports and log")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    parser.add_argument("--every", type=int, default=20, help="save and export every so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=4, help="windows a rank takes each step")
    parser.add_argument("--length", type=int, default=128, help="bytes in a window")
    parser.add_argument("--io-limit-bytes-per-s", type=int, default=None, help="how much a save may take of the disk")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)  # sums in one order, every time
    if world > 1:
        dist.init_process_group("gloo")
    train(args, rank, world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
