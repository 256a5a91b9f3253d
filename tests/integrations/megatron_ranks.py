"""Save and load a small GPT of Megatron-core by its sharded state dict, tensor parallel over all ranks.

megatron_ranks.py save:CHECKPOINT|load:CHECKPOINT...
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import leave
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import holdfast


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8
    )


def tensors_of(model: Any) -> list[ShardedTensor]:
    found: list[Any] = []
    for value in model.sharded_state_dict().values():
        built = value.build() if isinstance(value, ShardedTensorFactory) else value
        found += built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]
    return [value for value in found if isinstance(value, ShardedTensor)]


def compare(model: Any, path: str) -> None:
    """Each part with what stock DCP reads of the whole, at the place that Megatron says."""
    tensors = tensors_of(model)
    whole = {value.key: torch.zeros(value.global_shape) for value in tensors}
    dcp.load({"model": whole}, checkpoint_id=path)
    for value in tensors:
        assert torch.equal(whole[value.key][value.global_slice()], value.data), value.key
    assert len({value.key for value in tensors}) < len(tensors)  # layers share tensors


def save(path: str) -> None:
    model = make_model(1)
    checkpoint = holdfast.save({"model": model.sharded_state_dict(), "iteration": 7}, path)
    assert list(checkpoint.tensors["model.decoder.layers.mlp.linear_fc2.weight"].shape) == [2, 16, 64]
    compare(model, path)


def load(path: str) -> None:
    model = make_model(2)
    state = {"model": model.sharded_state_dict(), "iteration": 0}
    holdfast.load(state, path)
    assert state["iteration"] == 7
    compare(model, path)


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    for job in sys.argv[1:]:
        name, path = job.split(":")
        globals()[name](path)
    dist.destroy_process_group()
    leave()
