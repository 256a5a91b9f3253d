"""Send a trainer's weights to vLLM: whole at first, then what changed, fetched while vLLM generates.

    python examples/vllm_sync.py DIRECTORY

Without a GPU vLLM generates nothing here: see ``vllm_on_cpu``. With one, vLLM's workers and its client for them, over
HTTP or ray, take the place of ``worker`` and ``client``; the trainer's side stays.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


def main(directory: Path) -> int:
    if importlib.util.find_spec("vllm") is None:
        print("this needs vLLM 0.33: pip install vllm; without a GPU see `make test-rl`")
        return 2

    from vllm_on_cpu import Client, one_process, served, use_cpu, worker_of

    use_cpu()

    import transformers
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    from holdfast.sync.adapters import vllm

    class Source(WeightSource):
        """The trainer's model; names and shapes are those of its checkpoint."""

        @cached_property
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.iter_full()]

        def iter_full(self) -> Any:
            return iter((name, weight.detach()) for name, weight in trained.named_parameters())

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    trained.save_pretrained(directory / "model")
    vllm.register()  # in vLLM's processes: by a general plugin
    one_process(directory / "store")
    worker = worker_of(*served(directory / "model"))
    engine, place = worker.weight_transfer_engine, str(directory)
    trainer = vllm.trainer_init(Client(worker), Source(), rank=0, place=place, delta="sparse", prefetch=True)
    for step in (1, 2, 3):
        with torch.no_grad():
            for weight in trained.parameters():
                weight.add_(torch.randn_like(weight) * (torch.rand_like(weight) < 0.02))
        version = trainer.publish()  # vLLM's worker fetches it while it generates
        while engine.fetched != version:
            time.sleep(0.001)
        began = time.monotonic()
        trainer.send_weights()  # at a pause: start, update, finish
        took_ms = (time.monotonic() - began) * 1e3
        weight = trained.model.layers[0].self_attn.o_proj.weight
        equal = torch.equal(weight, engine.model.model.layers[0].self_attn.o_proj.weight)
        print(f"step {step}: loaded in {took_ms:.1f} ms, equal: {equal}, version known: {engine.version == version}")
        if not equal:
            return 1
    trainer.shutdown()
    worker.shutdown_weight_transfer_engine()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve()))
