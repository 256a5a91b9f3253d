"""The models of the recipes by name: real classes of ``transformers``, built from a configuration, with no storage yet.

The two large ones have the shapes of Llama 3 8B and Qwen3-30B-A3B; the tiny ones take every path that they take, in
seconds, on a CPU. Nothing is downloaded. Does not shard, place or initialise: see ``parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, and what each rank feeds it every step unless told otherwise."""

    name: str
    config: Callable[[], PretrainedConfig]
    batch: int
    length: int

    def empty_model(self, dtype: torch.dtype) -> nn.Module:
        """The model on the meta device: shapes only."""
        config = self.config()
        config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.train()


def llama_8b() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
    )


def qwen3_moe_30b_a3b() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
    )


def tiny_dense() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=509,  # a prime: rows never divide evenly among ranks
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


def tiny_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=509,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("llama-8b", llama_8b, batch=1, length=4096),
        Recipe("qwen3-moe-30b-a3b", qwen3_moe_30b_a3b, batch=1, length=4096),
        Recipe("tiny-dense", tiny_dense, batch=2, length=32),
        Recipe("tiny-moe", tiny_moe, batch=2, length=32),
    )
}
