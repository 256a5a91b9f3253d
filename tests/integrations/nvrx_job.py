"""Train a small sharded model, saving as NVRx's users do, by Holdfast's names; kill it in a save on request.

nvrx_job.py OUT STEPS [--every N] [--kill N] [--resume]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import leave, note_loss
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    FileSystemWriterAsync,
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rng = {f"rank_{dist.get_rank()}": torch.get_rng_state()}
    return {"model": model_state, "optimizer": optimizer_state, "rng": rng, "step": step}


def save(out: Path, queue: AsyncCallsQueue, state: dict[str, object], step: int) -> None:
    target = out / f"iter_{step:07d}"
    writer = FileSystemWriterAsync(target, thread_count=2)
    planned = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True)
    save_fn, preload_fn, save_args = writer.get_save_function_and_args()

    def finalize() -> None:
        save_state_dict_async_finalize(*planned)
        dist.barrier()

    def track() -> None:
        assert (target / ".metadata").exists()
        if dist.get_rank() == 0:
            (out / "latest.txt").write_text(target.name)

    request = AsyncRequest(save_fn, save_args, [finalize], async_fn_kwargs={}, preload_fn=preload_fn)
    request.add_finalize_fn(track)
    queue.schedule_async_request(request)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    init_checkpoint_metadata_cache()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    step = 0
    if args.resume:
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=args.out / (args.out / "latest.txt").read_text())  # stock's
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state["rng"][f"rank_{rank}"])
        step = state["step"]
    queue = AsyncCallsQueue(timeout=60)
    while step < args.steps:
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 16, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            note_loss(args.out / "losses.jsonl", step, mean.item())
        if step % args.every == 0:
            if step == args.kill:
                queue.maybe_finalize_async_calls(blocking=True)  # the saves before are published, however slow this is
            save(args.out, queue, state_of(model, optimizer, step), step)
            if args.kill is not None and step >= args.kill:
                assert list(args.out.glob(".*.incomplete"))
                time.sleep(0.05 * rank)
                os.kill(os.getpid(), signal.SIGKILL)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    queue.close()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
