"""Train two replicas with TorchFT on the CPU, kill one in the middle, and let it come back.

    python examples/torchft_replicas.py --out out/torchft

Each replica keeps the position of its data at every step; the first one saves the whole state. The replica that comes
back goes on with its own data, and gets the weights from its peer, in buckets with checksums.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def replica(out: Path, number: int, lighthouse: str, dies_at: int, steps: int = 12) -> None:
    import torch
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    import holdfast
    from holdfast.integrations.torchft import CheckpointTransport, ReplicaCheckpoints

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = {"batch": 0}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        checkpoint_transport=CheckpointTransport(),
    )
    optimizer = OptimizerWrapper(manager, inner)
    state = {"model": model, "optimizer": inner}
    config = holdfast.CheckpointConfig(every=5)
    checkpoints = ReplicaCheckpoints(out, manager, state, replica_id=number, dataloader=data, config=config)
    restored = checkpoints.restore()
    print(f"replica {number} begins at batch {data['batch']}, with the state of step {restored}", flush=True)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * number + data["batch"]))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for param in model.parameters():
            manager.allreduce(param.grad).wait()
        optimizer.step()
        if manager.current_step() > step:  # else a replica was missing: the same batch again
            data["batch"] += 1
            checkpoints.step({"loss": loss.item()})
        if manager.current_step() == dies_at:
            os.kill(os.getpid(), 9)
    checkpoints.close()
    print(f"replica {number} ends at step {manager.current_step()}, loss {loss.item():.6f}", flush=True)
    os._exit(0)  # a thread of TorchFT's may wait for a peer that has ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/torchft"))
    parser.add_argument("--replica", type=int)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--dies-at", type=int, default=-1)
    args = parser.parse_args()
    if args.replica is not None:
        replica(args.out, args.replica, args.lighthouse, args.dies_at)
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=1500)
    base = [sys.executable, __file__, "--out", str(args.out), "--lighthouse", server.address(), "--replica"]
    first, second = subprocess.Popen([*base, "0"]), subprocess.Popen([*base, "1", "--dies-at", "7"])
    second.wait(120)
    again = subprocess.Popen([*base, "1"])
    ended = [first.wait(120), again.wait(120)]
    server.shutdown()
    sys.exit(max(ended))


if __name__ == "__main__":
    main()
