"""vLLM's released wheel, which is for CUDA, on the CPU: its models and its worker's methods, without generating.

For trying out, and for tests. On a machine with a GPU nothing of this is needed: there is ``vllm.LLM(...)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def use_cpu() -> None:
    """Put what this wheel lacks in place; call before anything else of vLLM is imported."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import PlatformEnum

    class NoKernels(CpuPlatform):
        """The CPU, without the repacking of weights for kernels that this wheel doesn't have."""

        _enum = PlatformEnum.OOT

    vllm.platforms._current_platform = NoKernels()  # vLLM finds none here
    # torch refuses these without a device; vLLM calls them after loading.
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None


def one_process(store: Path) -> None:
    """Make the groups of a worker that is alone."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        initialize_model_parallel(1, 1)


def served(directory: Path) -> tuple[Any, torch.nn.Module]:
    """Load a checkpoint by vLLM, as a worker does."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64
        ),
        device_config=DeviceConfig(device="cpu"),
        weight_transfer_config=WeightTransferConfig(backend="holdfast"),
    )
    with set_current_vllm_config(config):
        return config, get_model(vllm_config=config)


def worker_of(config: Any, model: torch.nn.Module) -> Any:
    """Return vLLM's worker with this model and no device: its methods for weight transfer are what matters."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    worker = object.__new__(Worker)
    worker.vllm_config, worker.model_config, worker.speculative_config = config, config.model_config, None
    worker.rank, worker._weight_update_active, worker._weight_update_is_draft = 0, False, False
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None, get_model=lambda: model)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, torch.device("cpu"), model
    )
    return worker


class Client:
    """The trainer's connection to a worker in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.versions = worker, []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.worker.init_weight_transfer_engine(json.loads(json.dumps(init_info)))

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.worker.update_weights(json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.versions.append(weight_version)
