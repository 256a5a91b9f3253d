"""TorchFT: a replica's dataloader at every save, by `dcp.async_save` as torchtitan does it, and by Holdfast."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper

from benchmarks.adapters.turns import WIDTH, Turns, Way, a_model
from holdfast import CheckpointConfig
from holdfast.integrations.torchft import ReplicaCheckpoints


class Loader:
    """As much state as a shuffle buffer."""

    def __init__(self) -> None:
        self.at, self.buffer = 0, torch.zeros(1 << 20)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = a_model()
    inner = torch.optim.AdamW(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda _: None,
        state_dict=model.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=60),
        replica_id="only",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
    )
    loader, optimizer = Loader(), OptimizerWrapper(manager, inner)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    waiting: list[Any] = []
    checkpoints = ReplicaCheckpoints(
        Path(sys.argv[1]) / ".torchft",
        manager,
        {"model": model},
        replica_id=0,
        dataloader=loader,
        config=CheckpointConfig(every=1 << 40),
    )

    def own(path: Path) -> None:
        waiting.append(dcp.async_save({"dataloader": loader.state_dict()}, checkpoint_id=path))

    def ours(_: Path) -> None:
        checkpoints.step()

    turns = Turns({"own": Way(own, lambda: waiting.pop().result()), "holdfast": Way(ours, checkpoints.wait)})
    while not turns.after_step():
        loader.at += 1
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    checkpoints.close()
    manager.shutdown(wait=False)
    lighthouse.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
