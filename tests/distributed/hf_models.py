"""Tiny models of `transformers`, one of each kind of naming and layout, from their configs alone."""

from __future__ import annotations

from typing import Any

import torch

KINDS = ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt2", "qwen2_5_vl", "llava")
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(kind: str, *, seed: int) -> Any:
    """A model of ``kind`` with weights of ``seed``."""
    torch.manual_seed(seed)
    model = _MAKERS[kind]()
    with torch.no_grad():
        for value in model.state_dict().values():  # norms and biases, too: else they are all ones or zeros
            if value.is_floating_point():
                value.normal_()
    return model


def fused_and_interleaved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A key map for "qwen3": one matrix for query, key and value with pairs for halves, others the other way round."""
    made: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith("q_proj.weight"):
            key, other = (state[name.replace("q_proj", f"{one}_proj")] for one in "kv")
            turned = [part.view(-1, 2, 2, 16).transpose(1, 2).reshape(-1, 16) for part in (value, key)]
            made[name.replace("q_proj", "qkv")] = torch.cat([*turned, other])
        elif "k_proj" in name or "v_proj" in name:
            continue
        elif "mlp" in name or "lm_head" in name:
            made[f"t.{name}"] = value.t()
        else:
            made[name] = value
    return made


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4))


def _qwen3_moe(experts: int = 5) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SIZES, head_dim=4, moe_intermediate_size=6, num_experts=experts, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(config)


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=4, n_positions=24, bos_token_id=1, eos_token_id=2)
    )


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 16}
    text = {**SIZES, "rope_scaling": {"type": "default", "mrope_section": [1, 1, 0]}}
    tokens = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens))


def _llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES)))


_MAKERS = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_even": lambda: _qwen3_moe(experts=4),
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
}
