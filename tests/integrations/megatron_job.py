"""Train with Megatron-LM's sharded state dicts, saved by Holdfast in NVRx's place and loaded by Megatron-LM's own code.

megatron_job.py OUT STEPS [--kill N] [--resume] [--own N]     --own: at step N, also have Megatron-LM write one itself

The strategy is the one that Megatron-LM has for NVRx (its ``async_strategy="nvrx"``), with Holdfast's names.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import leave, note_loss
from megatron.core.dist_checkpointing import ShardedTensor, load, save
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as megatron
from torch import nn
from torch.distributed import checkpoint as dcp

from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    get_write_results_queue,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


class Strategy(megatron.TorchDistSaveShardedStrategy):
    """Saves by NVRx's names."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.cache = CheckpointMetadataCache()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> AsyncRequest:
        state, _, _ = megatron._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        writer = FileSystemWriterAsync(
            checkpoint_dir, separation_hint=None, thread_count=2, use_msc=False, use_cached_data_structure=True
        )
        planner = megatron.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned = save_state_dict_async_plan(
            megatron.mcore_to_pyt_state_dict(state, False),
            writer,
            None,
            0,
            planner=planner,
            enable_cache=True,
            metadata_cache=self.cache,
        )
        save_fn, preload_fn, save_args = writer.get_save_function_and_args()
        finalize = [lambda: save_state_dict_async_finalize(*planned)]
        return AsyncRequest(save_fn, save_args, finalize, async_fn_kwargs={}, preload_fn=preload_fn)


class Model:
    """A linear layer whose rows are split over the ranks, and a bias that all have."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        generator = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(4, 16, generator=generator))
        self.bias = nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD([self.weight, self.bias], lr=0.05, momentum=0.9)
        (self.weight.sum() * 0 + self.bias.sum() * 0).backward()
        self.optimizer.step()  # it has momentum from now on

    def sharded(self, step: int) -> dict[str, Any]:
        rows = (0, self.rank, self.world)
        momentum = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in (self.weight, self.bias)]
        state: dict[str, Any] = {
            "weight": ShardedTensor.from_rank_offsets("weight", self.weight.data, rows, replica_id=0),
            "bias": ShardedTensor.from_rank_offsets("bias", self.bias.data, replica_id=self.rank),
            "momentum": {
                "weight": ShardedTensor.from_rank_offsets("momentum.weight", momentum[0], rows, replica_id=0),
                "bias": ShardedTensor.from_rank_offsets("momentum.bias", momentum[1], replica_id=self.rank),
            },
            # An object of each rank, whose pickle grows.
            "rng": ShardedObject("rng", [torch.get_rng_state(), step**5], (self.world,), (self.rank,), replica_id=0),
        }
        if step > 6:  # noticed in spite of the cache
            state["later"] = ShardedTensor.from_rank_offsets("later", torch.full((2,), step), rows, replica_id=0)
        return {**state, "step": step}

    def restore(self, path: Path, step: int) -> None:
        found = load({key: value for key, value in self.sharded(step).items() if key != "step"}, path)
        with torch.no_grad():
            self.weight.copy_(found["weight"])
            self.bias.copy_(found["bias"])
            for name, parameter in (("weight", self.weight), ("bias", self.bias)):
                self.optimizer.state[parameter]["momentum_buffer"].copy_(found["momentum"][name])
        torch.set_rng_state(found["rng"][0])
        assert (found["step"], found["rng"][1]) == (step, step**5)
        assert step <= 6 or bool((found["later"] == step).all())

    def train(self, step: int) -> float:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        noise = torch.rand(8, 4)
        loss = ((inputs @ self.weight.t() + self.bias - noise) ** 2).mean()
        loss.backward()
        dist.all_reduce(self.bias.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)


def note_latest(out: Path, name: str) -> None:
    if dist.get_rank() == 0:
        (out / "latest.txt").write_text(name)


def save_as_megatron(state: dict[str, Any], path: Path) -> None:
    torch.cuda.synchronize = lambda *_: None  # its own writer wants a GPU
    torch.cuda.current_device = lambda: "cpu"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    save(state, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--own", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, strategy, queue = Model(rank, dist.get_world_size()), Strategy(), AsyncCallsQueue(timeout=60)
    assert get_write_results_queue(mp_mode="fork") is None
    torch.manual_seed(10 + rank)
    step = 0
    if args.resume:
        path = args.out / (args.out / "latest.txt").read_text()
        step = int(path.name.removeprefix("iter_"))
        metadata = CachedMetadataFileSystemReader(path, cache_metadata=True).read_metadata()
        stock = dcp.FileSystemReader(path).read_metadata()
        assert metadata.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
        CachedMetadataFileSystemReader.clear_metadata_cache()
        model.restore(path, step)
    while step < args.steps:
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        step += 1
        loss = model.train(step)
        if rank == 0:
            note_loss(args.out / "losses.jsonl", step, loss)
        if step % 3:
            continue
        path = args.out / f"iter_{step:07d}"
        if rank == 0:
            path.mkdir(exist_ok=True)
        dist.barrier()
        if step == args.kill:
            queue.maybe_finalize_async_calls(blocking=True)  # the saves before are published, however slow this is
        request = save(model.sharded(step), path, strategy, async_sharded_save=True)
        request.add_finalize_fn(lambda name=path.name: note_latest(args.out, name))
        queue.schedule_async_request(request)
        if step == args.kill:
            time.sleep(0.05 * rank)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == args.own:
            save_as_megatron(model.sharded(step), args.out / "own" / path.name)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    assert args.resume or strategy.cache.get_metadata_caching_status()[0]
    queue.close()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
