"""One replica of a TorchFT run on the CPU: a small model, a real manager; killed on request.

torchft_job.py OUT REPLICA STEPS LIGHTHOUSE [--kill N] [--every N] [--dataloader newest|restored]
               [--transport torchft|holdfast|in_place] [--async-quorum] [--spoil N] [--timeout S]
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import note_loss
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import holdfast
from holdfast.integrations.torchft import CheckpointTransport, ReplicaCheckpoints
from holdfast.sync import handover
from holdfast.sync.weights.copy import BucketCopy


class Loader:
    """Numbered batches, each replica's own."""

    def __init__(self, replica: int) -> None:
        self.replica, self.at = replica, 0

    def next(self) -> torch.Tensor:
        self.at += 1
        generator = torch.Generator().manual_seed(1000 * self.replica + self.at)
        return torch.randn(4, 8, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Spoiling(BucketCopy):
    """Damages each bucket once it is hashed."""

    def give(self, pieces, memory):
        found = super().give(pieces, memory)
        memory[7] ^= 1
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("replica", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("lighthouse")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--dataloader", default="newest")
    parser.add_argument("--transport", default="torchft")
    parser.add_argument("--async-quorum", action="store_true")
    parser.add_argument("--spoil", type=int, help="damage the first bucket that is sent at this step")
    parser.add_argument("--timeout", type=float, default=20.0)
    args = parser.parse_args()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    transport = None
    if args.transport != "torchft":
        own = {"user": {"default": {"model": model.state_dict()}}}
        transport = CheckpointTransport(state_dict=(lambda: own) if args.transport == "in_place" else None)
        recv_checkpoint = transport.recv_checkpoint

        def received(*arguments, **named):
            try:
                found = recv_checkpoint(*arguments, **named)
            except holdfast.HoldfastError as error:
                print("FAILED", type(error).__name__, error, flush=True)
                raise
            first = next(iter(found["user"]["default"]["model"].values()))
            place = "in place" if first.data_ptr() == next(model.parameters()).data_ptr() else "anew"
            print("HEALED", place, "at", found["torchft"]["step"], flush=True)
            return found

        send_checkpoint = transport.send_checkpoint

        def send(dst_ranks, step, state_dict, timeout):
            handover.BucketCopy = Spoiling if step == args.spoil else BucketCopy
            args.spoil = None if step == args.spoil else args.spoil
            send_checkpoint(dst_ranks, step, state_dict, timeout)

        transport.recv_checkpoint, transport.send_checkpoint = received, send
    group = ProcessGroupGloo(timeout=timedelta(seconds=args.timeout))
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=args.async_quorum,
        checkpoint_transport=transport,
        timeout=timedelta(seconds=args.timeout),
        quorum_timeout=timedelta(seconds=40),
        replica_id=f"replica_{args.replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=args.lighthouse,
    )
    verdicts = []
    should_commit = manager.should_commit
    manager.should_commit = lambda *arguments, **named: (
        verdicts.append(should_commit(*arguments, **named)) or verdicts[-1]
    )
    loader, optimizer = Loader(args.replica), OptimizerWrapper(manager, inner)
    checkpoints = ReplicaCheckpoints(
        args.out / "checkpoints",
        manager,
        {"model": model, "optimizer": inner},
        replica_id=args.replica,
        dataloader=loader,
        config=holdfast.CheckpointConfig(every=args.every),
    )
    print("RESTORED", checkpoints.restore(dataloader=args.dataloader), "at", loader.at, flush=True)
    batch, seen = None, manager.current_step()
    while manager.current_step() < args.steps:
        optimizer.zero_grad()
        if batch is None or manager.current_step() != seen:
            batch = loader.next() if batch is None or manager.current_step() == seen + 1 else batch
        seen = manager.current_step()
        loss = model(batch).square().mean()
        loss.backward()
        for param in model.parameters():
            manager.allreduce(param.grad).wait()
        optimizer.step()
        if not verdicts[-1]:
            continue  # the same batch again; a replica that heals while it computes may be at another step by now
        batch = None
        seen = manager.current_step()
        note_loss(args.out / f"losses-{args.replica}.jsonl", seen, loss.item())
        checkpoints.step()
        if args.kill == seen:
            checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.close()
    print("ENDED", manager.current_step(), flush=True)
    manager.shutdown(wait=False)
    os._exit(0)  # threads of torchft's may wait for a peer that has ended


if __name__ == "__main__":
    main()
