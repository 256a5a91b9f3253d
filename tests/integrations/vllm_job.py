"""Make vLLM's released wheel, which is for CUDA, importable and usable for loading on CPU, then run `vllm_parts`.

    python vllm_job.py DIRECTORY

Its kernels for CPUs are not in that wheel, so models are made and loaded, and nothing is generated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from vllm_on_cpu import use_cpu

if __name__ == "__main__":
    use_cpu()

    import vllm_parts  # looks at the platform

    vllm_parts.main(Path(sys.argv[1]))
