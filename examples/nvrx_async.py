"""Train with the asynchronous checkpoints of NVIDIA Resiliency Extension, by Holdfast: run it, kill it, run it again.

python examples/nvrx_async.py OUT [STEPS]             or on several ranks by torchrun, with gloo
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40


def schedule(queue: AsyncCallsQueue, state: dict[str, object], step: int) -> None:
    """Copy the state now, write it beside training, publish it in a later step."""
    writer = FileSystemWriterAsync(out / f"iter_{step:07d}")
    planned = save_state_dict_async_plan(state, writer)
    save_fn, preload_fn, save_args = writer.get_save_function_and_args()

    def finalize() -> None:
        save_state_dict_async_finalize(*planned)
        if dist.get_rank() == 0:
            (out / "latest.txt").write_text(f"iter_{step:07d}")

    queue.schedule_async_request(AsyncRequest(save_fn, save_args, [finalize], preload_fn=preload_fn))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step = 0
    if (out / "latest.txt").exists():
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=out / (out / "latest.txt").read_text())  # stock PyTorch reads it
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    queue = AsyncCallsQueue()
    while step < steps:
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            schedule(queue, state_of(model, optimizer, step), step)
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    queue.close()


def main() -> None:
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    del model  # first: a DDP model that outlives its group may wait for gloo forever (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
