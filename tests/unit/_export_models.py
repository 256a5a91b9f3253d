"""Tiny real models of `transformers`, and a reference executor of compiled key maps, for the tests of exports."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.keymap.moves import KeyMapping, MappedTensor

MODELS = ("llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral", "gpt2", "qwen2.5-vl", "llava")


def tiny_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of ``kind`` with two layers and other random weights in each parameter and buffer."""
    import transformers as hf

    text: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    vision = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, tie_word_embeddings=False)),
        "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, tie_word_embeddings=True)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**text, head_dim=8)),
        "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**text, **moe)),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**text, num_local_experts=4)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)),
        "qwen2.5-vl": lambda: hf.Qwen2_5_VLForConditionalGeneration(
            hf.Qwen2_5_VLConfig(
                text_config={**text, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
                vision_config={
                    "depth": 2,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_heads": 4,
                    "out_hidden_size": 32,
                    "fullatt_block_indexes": [1],
                },
                **vision,
            )
        ),
        "llava": lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                vision_config=hf.CLIPVisionConfig(
                    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28
                ),
                text_config=hf.LlamaConfig(**text),
                image_token_index=5,
            )
        ),
    }
    model = makers[kind]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).eval()


def sources_of(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `compile_key_map` is told of a state."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def filled(tensor: MappedTensor, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor that ``tensor`` describes, made from ``state`` one move after another."""
    kind = dtype or getattr(torch, tensor.dtype)
    made = torch.full((tensor_numel(tensor),), 77, dtype=kind)
    for move in tensor.moves:
        source = state[move.source].detach().contiguous().view(-1)
        # A negative stride is no view of torch's: go backwards through indices.
        index = torch.tensor(move.source_offset)
        for count, stride in zip(move.counts, move.source_strides, strict=True):
            index = index.unsqueeze(-1) + stride * torch.arange(count)
        target = made.as_strided(move.counts, move.target_strides, move.target_offset)
        target.copy_(source[index.reshape(move.counts)].to(kind))
    return made.view(tensor.shape)


def tensor_numel(tensor: MappedTensor) -> int:
    return torch.Size(tensor.shape).numel()


def executed(mapping: KeyMapping, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of the export that is no scale and has none."""
    return {tensor.name: filled(tensor, state) for tensor in mapping.tensors if tensor.scale_of is None}


def stages_of(model: Any, cuts: int = 2) -> list[Any]:
    """The model cut into stages: copies without the other stages' layers, which keep their names."""
    layers = list(model.model.layers)
    found = []
    for number in range(cuts):
        stage = copy.copy(model)
        stage._modules = dict(model._modules)
        stage.model = copy.copy(model.model)
        stage.model._modules = dict(model.model._modules)
        mine = range(number * len(layers) // cuts, (number + 1) * len(layers) // cuts)
        stage.model.layers = nn.ModuleDict({str(at): layers[at] for at in mine})
        if number:
            del stage.model.embed_tokens
        if number < cuts - 1:
            del stage.model.norm, stage.lm_head
        found.append(stage)
    return found
