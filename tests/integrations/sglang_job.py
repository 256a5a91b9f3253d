"""Load versions through SGLang's own `Engine` methods and weight updaters, on CPU, around a small model.

    python sglang_job.py DIRECTORY

The scheduler is called in this process instead of over a socket. Writes DIRECTORY/result.json.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import json
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers.image_utils  # noqa: F401 - before the stand-ins below
from jobs import leave

from holdfast.errors import HoldfastError
from holdfast.sync import DirectoryTransport, Publisher
from holdfast.sync.adapters import sglang as adapter


def without_torchvision() -> None:
    """Put empty modules in its place: its released wheel is for CUDA, and SGLang imports it for images only."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for member in ("transforms", "functional", "InterpolationMode"):
            setattr(module, member, SimpleNamespace(BICUBIC=None, BILINEAR=None))
        sys.modules[name] = module


def weights_at(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {f"layers.{number}.weight": torch.randn(8, 16).bfloat16() for number in range(5)}


class Model(torch.nn.Module):
    """Loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16) for _ in range(5))
        self.fails = False

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            if self.fails and name == "layers.3.weight":
                raise ValueError("the model can't load it")
            mine[name].data.copy_(tensor)

    def holds(self, version: int) -> bool:
        return all(torch.equal(value, weights_at(version)[name]) for name, value in self.named_parameters())


class Manager:
    """The tokenizer manager: passes requests on to the scheduler's weight updater, in this process."""

    def __init__(self, updater: Any) -> None:
        self.updater, self.calls, self.weight_version = updater, [], "default"

    async def _pass_on(self, method: str, request: Any) -> tuple[bool, str]:
        self.calls.append(method)
        try:
            answer = getattr(self.updater, method)(request)
        except ValueError as error:
            return False, str(error)
        return answer.success, answer.message

    async def begin_weight_update(self, request: Any, _: Any) -> tuple[bool, str]:
        return await self._pass_on("begin_weight_update", request)

    async def end_weight_update(self, request: Any, _: Any) -> tuple[bool, str]:
        return await self._pass_on("end_weight_update", request)

    async def update_weights_from_tensor(self, request: Any, _: Any) -> tuple[bool, str]:
        return await self._pass_on("update_weights_from_tensor", request)

    async def update_weight_version(self, request: Any) -> None:
        self.weight_version = request.new_version

    async def pause_generation(self, request: Any) -> None:
        self.calls.append(f"pause {request.mode}")

    async def continue_generation(self, _: Any) -> None:
        self.calls.append("continue")


def engine_of(model: Model) -> Any:
    """Return SGLang's `Engine` with its scheduler's and its model runner's updaters around ``model``."""
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.model_executor.model_runner_components import weight_updater as of_runner

    parallel = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=dist.group.WORLD), tp_rank=0, tp_size=1)
    for module in (engine_module, of_scheduler, of_runner, sys.modules[BaseTpWorker.__module__]):
        module.get_parallel = lambda: parallel
        module.monkey_patch_torch_reductions = lambda: None  # for CUDA tensors, in the scheduler's process
        module.get_model = lambda: SimpleNamespace(weight_cache_mode="off")
    runner = SimpleNamespace(model=model)
    runner.weight_updater = of_runner.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda **_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    tp_worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    tp_worker.deserialize_own_rank = lambda payload: BaseTpWorker.deserialize_own_rank(tp_worker, payload)
    updater = of_scheduler.SchedulerWeightUpdaterManager(
        tp_worker=tp_worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
    )
    engine = object.__new__(engine_module.Engine)
    engine.loop, engine.tokenizer_manager = asyncio.new_event_loop(), Manager(updater)
    return engine


def refused(act: Any) -> str:
    try:
        act()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fetched_ahead(worker: Any, publisher: Publisher, manager: Manager, model: Model, result: dict[str, Any]) -> None:
    """Fetch while the engine generates; versions of another shape don't even pause it."""
    manager.calls.clear()
    publisher.publish(weights_at(3), 3)
    worker.prefetch()
    deadline = time.monotonic() + 30.0
    while worker.fetched != 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    result["ahead"] = [worker.fetched, worker.version, list(manager.calls), model.holds(2)]
    result["then"] = [worker.receive(timeout=30.0), worker.fetched, model.holds(3), manager.weight_version]
    manager.calls.clear()
    publisher.publish({**weights_at(9), "layers.1.weight": torch.zeros(8, 17).bfloat16()}, 5)
    result["shape"] = [refused(lambda: worker.receive(timeout=30.0)), list(manager.calls), worker.dirty, model.holds(3)]
    publisher.publish(weights_at(4), 6)
    worker.prefetch()
    result["next"] = [worker.receive(timeout=30.0), model.holds(4), worker.dirty]
    manager.calls.clear()


def main(directory: Path) -> None:
    without_torchvision()
    import sglang

    dist.init_process_group("gloo", init_method=f"file://{directory / 'group'}", rank=0, world_size=1)
    model = Model()
    engine = engine_of(model)
    manager = engine.tokenizer_manager
    result: dict[str, Any] = {"sglang": sglang.__version__}
    result["without_session"] = engine.update_weights_from_tensor(list(weights_at(1).items()))
    manager.calls.clear()
    adapter.BATCH_BYTES = 600  # two tensors a call
    worker = adapter.SGLangReceiver(engine, DirectoryTransport(directory / "versions"), device="cpu", pause="retract")
    with Publisher(DirectoryTransport(directory / "versions")) as publisher:
        publisher.publish(weights_at(1), 1)
        result["first"] = [worker.receive(timeout=30.0), manager.weight_version, model.holds(1), worker.dirty]
        result["calls"] = list(manager.calls)
        publisher.publish(weights_at(2), 2)
        model.fails = True
        manager.calls.clear()
        try:
            worker.receive(timeout=30.0)
        except HoldfastError as error:
            result["failed"] = str(error)
        result["after_failure"] = [worker.version, worker.dirty, manager.weight_version, manager.calls[-1]]
        model.fails = False
        result["again"] = [worker.receive(timeout=30.0), manager.weight_version, model.holds(2), worker.dirty]
        result["continued"] = manager.calls[-1]
        fetched_ahead(worker, publisher, manager, model, result)
    result["gone"] = [refused(lambda: worker.receive(version=9, timeout=0.5)), *manager.calls]
    result["after_gone"] = [worker.version, worker.dirty, model.holds(4)]
    worker.close()
    (directory / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
