"""Load a checkpoint of the reference run on another number of ranks, and note what came back, bit for bit.

    torchrun --nproc-per-node=4 -m benchmarks.cluster.reload --recipe llama-8b --out /shared/run

The model is initialised from another seed before, so nothing can be right by chance. Compared by the report.
"""

from __future__ import annotations

import time

from benchmarks.cluster.job import Job, options, start
from benchmarks.cluster.parallel import Layout
from benchmarks.cluster.shards import fingerprints, tensors_in

import holdfast


def reload(job: Job, layout: Layout) -> None:
    state = job.training_state(layout, seed=job.seed + 1, lr=0.0)
    job.clock_stops()
    begin = time.perf_counter()
    checkpoint = holdfast.load(state, job.out / "reference" / "checkpoints", timeout=1800.0)
    job.clock_stops()
    load_s = time.perf_counter() - begin
    found = fingerprints(tensors_in(state["model"], state["optimizer"]), job.device)
    objects = {"train": state["train"], "lr_scheduler": state["lr_scheduler"].state_dict()}
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    laid_out = {"replicas": layout.replicas, "shards": layout.shards, "experts": layout.experts}
    told = {"step": checkpoint.step, "tensors": found, "objects": objects, "load_s": load_s, "bytes": nbytes}
    memory = job.from_all(job.memory())
    peak = {key: max(row[key] for row in memory) for key in memory[0]}
    job.write_part("reloaded", layout=laid_out, memory=peak, **told)


def main() -> None:
    args = options("Load a checkpoint of the reference run on another number of ranks.").parse_args()
    job = start(args)
    reload(job, Layout(job.world, args.replicas, args.experts))
    job.end()


if __name__ == "__main__":
    main()
