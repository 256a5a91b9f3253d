"""Publish versions from a trainer, and load them into an SGLang engine that fetches them while it generates.

    python examples/sglang_sync.py DIRECTORY

Without a GPU SGLang's engine is one around a small model that generates nothing: see ``sglang_on_cpu``. With one, use
``engine = sglang.Engine(model_path=...)``; the rest stays.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.sync.adapters.sglang import SGLangReceiver


class Model(torch.nn.Module):
    """Loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(4))

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


def main(directory: Path) -> int:
    if importlib.util.find_spec("sglang") is None:
        print("this needs SGLang: pip install sglang; without a GPU see `make test-rl`")
        return 2

    import torch.distributed as dist
    import transformers.image_utils  # noqa: F401 - before the stand-ins

    from sglang_on_cpu import engine_of, without_torchvision

    without_torchvision()
    directory.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'group'}", rank=0, world_size=1)
    trained, served = Model(), Model()
    engine = engine_of(served)
    publisher = holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport(directory), bypass_cpu=False)
    worker = SGLangReceiver(engine, holdfast.sync.SharedMemoryTransport(directory), pause="retract")
    for step in (1, 2, 3):
        with torch.no_grad():
            for weight in trained.parameters():
                weight.add_(torch.randn_like(weight))
        publisher.publish(trained.state_dict(), step, meta={"step": step})
        worker.prefetch()  # on a thread: the engine goes on generating
        while worker.fetched != step:
            time.sleep(0.001)
        began = time.monotonic()
        version = worker.receive(timeout=30.0)  # pauses the engine, loads what was fetched, goes on
        took_ms = (time.monotonic() - began) * 1e3
        equal = all(torch.equal(*pair) for pair in zip(trained.parameters(), served.parameters(), strict=True))
        print(f"version {version}: loaded in {took_ms:.1f} ms, equal: {equal}, engine: {engine_version(engine)}")
        if not equal:
            return 1
    worker.close()
    publisher.close()
    dist.destroy_process_group()
    return 0


def engine_version(engine: Any) -> str:
    return str(engine.tokenizer_manager.weight_version)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
