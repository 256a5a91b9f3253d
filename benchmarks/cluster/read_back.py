"""Read the reference run's weights into an unsharded model in one process, save it for ``transformers``, load it again.

    python -m benchmarks.cluster.read_back --recipe llama-8b --out /shared/run

Needs host memory for the weights once, and disk for them. Weights are read one after the other, and every byte of the
checkpoint is verified first. What `from_pretrained` gives must have the bits that training had, and the logits of the
model that was read. The loss of the probe is compared with training's own, which sums in another order.
"""

from __future__ import annotations

import gc
import shutil
import time
from typing import Any

import torch
from benchmarks.cluster.job import Job, options, start
from benchmarks.cluster.parallel import allocate
from benchmarks.cluster.shards import fingerprints, tensors_in
from torch import nn
from transformers import AutoModelForCausalLM

import holdfast


def read_model(job: Job, checkpoint: holdfast.Checkpoint) -> nn.Module:
    """The whole model, one weight after the other."""
    model = job.recipe.empty_model(job.parameters)
    allocate(model, job.device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(checkpoint.read(f"model.{name}"))
    return model.eval()


def looked_at(job: Job, model: nn.Module) -> dict[str, Any]:
    """What can be compared once the model is gone."""
    with torch.no_grad():
        out = model(input_ids=job.probe(), labels=job.probe(), use_cache=False)
    found = fingerprints({**tensors_in(model), "logits": out.logits}, job.device)
    return {"logits": found.pop("logits"), "tensors": found, "probe_loss": float(out.loss)}


def read_back(job: Job, *, keep: bool) -> None:
    begin = time.perf_counter()
    checkpoint = holdfast.open(job.out / "reference" / "checkpoints")
    verified = checkpoint.verify()
    verify_s = time.perf_counter() - begin
    begin = time.perf_counter()
    model: Any = read_model(job, checkpoint)
    read_s = time.perf_counter() - begin
    read = looked_at(job, model)
    place = job.out / "from-pretrained"
    shutil.rmtree(place, ignore_errors=True)
    model.save_pretrained(place)
    del model
    gc.collect()
    model = AutoModelForCausalLM.from_pretrained(place, dtype=job.parameters, attn_implementation="sdpa")
    loaded = looked_at(job, model.eval())
    times = {"verify_s": verify_s, "verify_bytes": verified.nbytes, "read_s": read_s}
    problems = [f"{problem.path}: {problem.message}" for problem in verified.problems]
    told = {"step": checkpoint.step, "verified": verified.ok, "problems": problems}
    job.write_part("read-back", **told, read=read, loaded=loaded, memory=job.memory(), **times)
    if not keep:
        shutil.rmtree(place)


def main() -> None:
    parser = options("Read the weights into an unsharded model, and give it to from_pretrained.")
    parser.add_argument("--keep", action="store_true", help="leave OUT/from-pretrained where it is")
    args = parser.parse_args()
    read_back(start(args, distributed=False), keep=args.keep)


if __name__ == "__main__":
    main()
