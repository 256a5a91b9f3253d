"""Let torchtitan train its debug model where there is no accelerator, on text that is made up here.

For trying out, and for tests: torchtitan itself needs one. On a machine that has one nothing of this is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils


def use_cpu() -> None:
    """Put what the CPU lacks in place; call before anything of torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    if importlib.util.find_spec("triton") is None:
        # Kernels for experts, which are imported whatever the model.
        kernels = ModuleType("torchtitan.distributed.minimal_async_ep")
        names = ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata")
        vars(kernels).update({name: type(name, (), {}) for name in names})
        kernels.maybe_update_minimal_async_ep_config = lambda *_: None
        sys.modules[kernels.__name__] = sys.modules[f"{kernels.__name__}.api"] = kernels
    for name, value in (
        ("get_device_name", "CPU"),
        ("get_device_properties", SimpleNamespace(name="CPU", total_memory=1 << 33)),
        ("memory_stats", {}),
        ("reset_peak_memory_stats", None),
        ("empty_cache", None),
    ):
        setattr(torch.cpu, name, lambda *_, value=value: value)
    from torchtitan.tools import utils

    utils.get_local_device = lambda: torch.device("cpu")
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common import attention

    dist_utils.set_pg_timeouts = lambda **_: None  # gloo's barrier takes no devices
    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sum(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies first
        divide(module, factor)

    FSDPModule.set_gradient_divide_factor = divide_by_sum
    attention._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention.compiled_flex_attn = staticmethod(_attention)


def _attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, Any]:
    """Attend with the mask as one tensor: FlexAttention has no backward on the CPU."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, _, _ = block_mask.shape
    mask = create_mask(block_mask.mask_mod, batch, heads, q.shape[-2], k.shape[-2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


def debug_config(folder: Path) -> Any:
    """Return torchtitan's configuration of its debug model, made small; tokenizer and outputs are below ``folder``."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    assets = folder / "tokenizer"
    assets.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(sorted(_alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(assets / "tokenizer.json"))
    texts = [{"text": " ".join(str(number * at) for number in range(60))} for at in range(1, 200)]
    text_datasets.DATASETS["numbers"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_list(texts), sample_processor=lambda sample: sample["text"]
    )
    config.hf_assets_path, config.dump_folder = str(assets), str(folder)
    config.dataloader.dataset = "numbers"
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.debug.seed, config.debug.enable_structured_logging = 7, False
    config.comm.trace_buf_size = 0
    return config


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()
