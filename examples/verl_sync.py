"""Use Holdfast as verl's checkpoint engine: what changed travels, verl's own loader puts it into the rollout's model.

    python examples/verl_sync.py DIRECTORY

verl's engines are called here as its ``CheckpointEngineManager`` calls them in a job, one trainer and one rollout
worker in one process, without ray. In a job the configuration is all there is to do:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: delta_sharded
      custom_backend_module: holdfast.sync.adapters.verl_delta_backend
      engine_kwargs: {delta_sharded: {place: /dev/shm/run-7, cache: true, delta: sparse}}
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import torch


class Served(torch.nn.Sequential):
    """The rollout's model; loads as those of SGLang do."""

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


def make_model() -> Served:
    return Served(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)).bfloat16()


def main(directory: Path) -> int:
    if importlib.util.find_spec("verl") is None:
        print("this needs verl 0.9: pip install verl; without a GPU see `make test-rl`")
        return 2

    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    import holdfast.sync.adapters.verl_delta_backend  # noqa: F401 - registers it, as custom_backend_module does

    directory.mkdir(parents=True, exist_ok=True)
    options = {"place": str(directory), "cache": True, "delta": "sparse", "timeout_s": 60.0}
    engines = CheckpointEngineRegistry.get("delta_sharded")
    trainer = engines(bucket_size=1 << 20, is_master=True, **options)
    worker = engines(bucket_size=1 << 20, **options)
    trained, served = make_model(), make_model()
    for step in (1, 2, 3):
        with torch.no_grad():
            for weight in trained.parameters():
                weight.add_(torch.randn_like(weight) * (torch.rand_like(weight) < 0.02))
        trainers, rollouts = engines.build_topology(1, 1, [trainer.prepare(), worker.prepare()])
        for engine, told in ((trainer, trainers), (worker, rollouts)):
            engine.init_process_group(**{name: values[0] for name, values in told.items()})
        metrics: dict[str, float] = {}
        weights = [(name, weight.detach()) for name, weight in trained.named_parameters()]
        sending = threading.Thread(
            target=lambda weights=weights, step=step, metrics=metrics: metrics.update(  # type: ignore[misc]
                asyncio.run(trainer.send_weights(weights, global_steps=step))
            )
        )
        sending.start()
        for named, _ in worker.receive_weights(global_steps=step):
            apply_delta(served, named)
        sending.join()
        equal = all(torch.equal(*pair) for pair in zip(trained.parameters(), served.parameters(), strict=True))
        sent, whole = (metrics[f"checkpoint_engine/{name}_mbytes"] * 1024 for name in ("payload", "whole"))
        print(f"step {step}: sent {sent:.1f} KiB of {whole:.1f}, equal: {equal}")
        if not equal:
            return 1
    trainer.close()
    worker.close()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
