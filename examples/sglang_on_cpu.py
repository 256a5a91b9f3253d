"""SGLang's own `Engine` methods and weight updaters around a small model on the CPU, where it can't generate.

For trying out, and for tests: the scheduler is called in this process instead of over a socket. On a machine with a GPU
nothing of this is needed: there is ``sglang.Engine(model_path=...)``.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


def without_torchvision() -> None:
    """Put empty modules in its place: its released wheel is for CUDA, and SGLang imports it for images only."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for member in ("transforms", "functional", "InterpolationMode"):
            setattr(module, member, SimpleNamespace(BICUBIC=None, BILINEAR=None))
        sys.modules[name] = module


class Manager:
    """The tokenizer manager: passes requests on to the scheduler's weight updater, in this process."""

    def __init__(self) -> None:
        self.updater: Any = None
        self.calls, self.weight_version = [], "default"
        self.running, self.mode = False, ""

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
        self.mode = request.mode

    async def continue_generation(self, _: Any) -> None:
        self.calls.append("continue")
        self.mode = ""

    def flush_cache(self, **_: Any) -> bool:
        """Refuse as the scheduler does: while requests are in its running batch, where a pause in place leaves them."""
        self.calls.append("flush")
        return not (self.running and self.mode in ("", "in_place"))


def engine_of(model: Any) -> Any:
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
    manager = Manager()
    manager.updater = of_scheduler.SchedulerWeightUpdaterManager(
        tp_worker=tp_worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=manager.flush_cache,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
    )
    engine = object.__new__(engine_module.Engine)
    engine.loop, engine.tokenizer_manager = asyncio.new_event_loop(), manager
    return engine
