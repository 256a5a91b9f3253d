"""One process of a fleet of verl's `mooncake` checkpoint engine, on CPU over TCP; `benchmarks.fleet` starts them.

    PYTHON verl_mooncake.py RANK WORLD BYTES TENSORS

PYTHON has verl, vLLM (for its `StatelessProcessGroup`), ray and mooncake-transfer-engine-non-cuda, and not Holdfast.
The engine runs as it was released, but for the device that verl asks for its count and to synchronize: without an
accelerator verl names CUDA, of which there are none; here it is `torch.cpu`. Rank 0 sends, each other rank copies what
it is given to tensors of its own, as a rollout worker does, and hands buckets on to the next rank. `finalize` isn't
called: it asks for `torch.cpu.empty_cache`, which torch doesn't have. Mooncake takes TCP where there is no RDMA device,
for ranks of one host, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

BUCKET_BYTES = 32 << 20
"""So that buckets go through the chain of ranks at the same time; verl's default is larger than these weights."""


def say(**what: object) -> None:
    os.write(SAID, json.dumps(what).encode() + b"\n")


def main(rank: int, world: int, nbytes: int, tensors: int) -> None:
    import torch
    from verl.checkpoint_engine import mooncake_checkpoint_engine as mooncake

    torch.set_num_threads(1)
    mooncake.get_torch_device = lambda: torch.cpu
    engine = mooncake.MooncakeCheckpointEngine(BUCKET_BYTES, device="cpu")
    say(metadata=engine.prepare())
    engine.init_process_group(rank, world, json.loads(sys.stdin.readline()))
    rows = max(1, nbytes // tensors // 2 // 1024)
    weights = {f"layers.{number}.weight": torch.zeros(rows, 1024, dtype=torch.bfloat16) for number in range(tensors)}

    async def receive() -> None:
        async for name, tensor in engine.receive_weights():
            weights[name].copy_(tensor)

    say(ready=True)
    for line in sys.stdin:
        version = int(line)
        if rank == 0:
            for tensor in weights.values():
                tensor.fill_(version % 128)
        began_s = time.monotonic()
        asyncio.run(engine.send_weights(iter(weights.items())) if rank == 0 else receive())
        committed_s = time.monotonic()
        good = all(bool((tensor == version % 128).all()) for tensor in weights.values())
        say(began_s=began_s, committed_s=committed_s, good=good)


if __name__ == "__main__":
    SAID = os.dup(1)
    os.dup2(2, 1)  # what libraries print stays out of what is said
    os.environ["RANK"] = sys.argv[1]
    main(*map(int, sys.argv[1:]))
