"""Transfer weights as verl's trainer does: its `CheckpointEngineManager` on ray, its workers, FSDP2 on CPU.

    python verl_job.py DIRECTORY CONFIG_JSON

Writes DIRECTORY/result.json: what the manager returned for each step, and each rollout worker's weights as digests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout
from verl_ranks import TRAINERS, digest, model_at, nearly_at


class Engine:
    """A training engine with verl's `get_per_tensor_param`: FSDP2 shards, gathered one by one on all ranks."""

    def __init__(self, model_of: Any) -> None:
        self.steps, self.model_of = 0, model_of

    def get_per_tensor_param(self, **_: Any) -> tuple[Any, None]:
        self.steps += 1
        model = self.model_of(self.steps)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (TRAINERS,)))
        return ((name, value.full_tensor()) for name, value in model.state_dict().items()), None


class Trainer(Worker):
    """Trainer rank: verl's own `update_weights` and `execute_checkpoint_engine`, and the engine made as verl does."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        delta = config.engine_kwargs[config.backend].get("delta")
        self.actor = SimpleNamespace(engine=Engine(nearly_at if delta else model_at))
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=config))
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )


class Rollout(BaseRollout):
    """An inference engine that notes what it is given."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **options: Any) -> None:
        got: dict[str, str] = {}
        if options.get("wire_format") == "delta_flush":
            self.model = getattr(self, "model", None) or Served()
            flushes = [(load_flush(self.model, named), is_last) for named, is_last in weights]
            got = {name: digest(value) for name, value in self.model.state_dict().items()}
            self.seen.append({"weights": got, "flushes": flushes, **options})
            return
        try:
            async for name, tensor in weights:
                got[name] = digest(tensor)
        finally:
            self.seen.append({"weights": got, **options})


class Served(torch.nn.Module):
    """An inference engine's model, which verl's own loader for SGLang changes in place."""

    def __init__(self) -> None:
        super().__init__()
        for name, module in nearly_at(0).named_children():
            self.add_module(name, module)

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


def load_flush(model: torch.nn.Module, named: list[tuple[str, torch.Tensor]]) -> str:
    """Load one flush as verl does in SGLang; return its encoding."""
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    apply_delta(model, named)
    return json.loads(bytes(dict(named)["__delta_spec__"].numpy().tobytes()))["encoding"]


class RolloutWorker(CheckpointEngineWorker):
    """verl's rollout worker, which can be asked what it has seen."""

    def seen(self) -> list[dict[str, Any]]:
        return self.server_adapter.seen

    def global_steps(self) -> int | None:
        return self.checkpoint_engine.global_steps

    async def from_cache(self) -> dict[str, str]:
        return {name: digest(tensor) async for name, tensor in self.checkpoint_engine.get_weights()}


class Replica:
    """A rollout replica of one worker; notes the order in which the manager uses it."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers, self.calls = workers, []

    def __getattr__(self, name: str) -> Any:
        async def called(**_: Any) -> None:
            self.calls.append(name)

        return called


def group(cls: Any, size: int, *args: Any) -> RayWorkerGroup:
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(ray.remote(cls), *args), device_name="cpu"
    )


def main(directory: Path, given: dict[str, Any]) -> None:
    ray.init(num_cpus=8, include_dashboard=False, configure_logging=False, _temp_dir=given.get("temp"))
    backend = given.get("backend", "holdfast")
    config = CheckpointEngineConfig(
        backend=backend,
        update_weights_bucket_megabytes=1,
        engine_kwargs={backend: given["options"]},
        custom_backend_module=f"holdfast.sync.adapters.{given.get('module', 'verl_backend')}",
    )
    trainers = group(Trainer, TRAINERS, config)
    rollout_config = RolloutConfig(name="sglang" if "delta" in given["options"] else "vllm", checkpoint_engine=config)
    groups = [group(RolloutWorker, 1, rollout_config, None, Rollout()) for _ in range(2)]
    replicas = [Replica(made.workers) for made in groups]
    manager = CheckpointEngineManager(config, trainers, replicas)
    returned = [manager.update_weights(global_steps=step) for step in (1, 2)]
    manager.remove_replicas(replicas[1:])
    returned.append(manager.update_weights(global_steps=3))
    manager.add_replicas(replicas[1:])
    returned.append(manager.update_weights(global_steps=4))
    workers = [worker for replica in replicas for worker in replica.workers]
    result = {
        "verl": verl.__version__,
        "returned": returned,
        "seen": ray.get([worker.seen.remote() for worker in workers]),
        "cached": ray.get([worker.from_cache.remote() for worker in workers]),
        "global_steps": ray.get([worker.global_steps.remote() for worker in workers]),
        "calls": [replica.calls for replica in replicas],
    }
    (directory / "result.json").write_text(json.dumps(result))
    ray.shutdown()


if __name__ == "__main__":
    import verl_job  # workers import its classes by name

    verl_job.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
