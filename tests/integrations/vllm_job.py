"""Make vLLM's released wheel, which is for CUDA, importable and usable for loading on CPU, then run `vllm_parts`.

    python vllm_job.py DIRECTORY

Its kernels for CPUs are not in that wheel, so models are made and loaded, and nothing is generated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class NoKernels(CpuPlatform):
    """The CPU, without the repacking of weights for kernels that this wheel doesn't have."""

    _enum = PlatformEnum.OOT


if __name__ == "__main__":
    vllm.platforms._current_platform = NoKernels()  # vLLM finds none here
    # torch refuses these without a device; vLLM calls them after loading.
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None

    import vllm_parts  # looks at the platform

    vllm_parts.main(Path(sys.argv[1]))
