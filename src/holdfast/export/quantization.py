"""Exports in 8-bit floats: which matrices are quantized, and what ``config.json`` says of them.

What readers (transformers, and inference engines that follow it) take for granted: every linear layer, and every layer
of experts, is quantized, in blocks of one size, unless ``modules_to_not_convert`` names it. So everything that the
export has as a matrix without scales is named there, and tied layers that have no matrix of their own.

Guarantees: what is said is derived from the tensors of the export, whatever rules have made them; names are those in
the files, which transformers translates as it does those of weights.
Does not: quantize (``rules.Fp8``, ``scales``), or say anything where readers would not understand it: blocks of several
sizes, scales by names of one's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from holdfast.export.hf_default import bare
from holdfast.export.rules import Fp8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.export.moves import MappedTensor

_QUANTIZED: Final = (
    r"^(?!.*(embed|lm_head|norm|\.gate\.|router|wte|wpe))"
    r".*(proj|linear|fc\d?|query|key|value|dense|experts\.\d+\.w\d)\.weight$"
)
"""What is quantized where the dtype says so: matrices of linear layers, but for embeddings, heads and routers."""
_SCALE_SUFFIX: Final = "_scale_inv"
_EXPERT: Final = re.compile(r"(.+\.experts)\.\d+\..+", re.DOTALL)


def fp8_rule(fp32_keys: Sequence[str], model: nn.Module | None) -> Fp8:
    """The rule for an export whose dtype is float8: matrices of linear layers by their usual names.

    Left alone is what ``fp32_keys`` match, and the matrices of other layers of ``model`` (GPT-2's are transposed, say):
    readers expect no scales there.
    """
    return Fp8(_QUANTIZED, leave=(*fp32_keys, *(f"^{re.escape(name)}$" for name in _of_other_layers(model))))


def _of_other_layers(model: nn.Module | None) -> list[str]:
    if model is None:
        return []
    return [
        f"{name}.weight" if name else "weight"
        for name, module in bare(model).named_modules()
        if not isinstance(module, nn.Linear) and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]


def fp8_config(tensors: Sequence[MappedTensor], tied: Mapping[str, str]) -> dict[str, Any] | None:
    """``quantization_config`` of an export of ``tensors``; None where nothing is quantized, or not as readers expect.

    tied: names of layers' tensors that the export lacks -> the state's tensor that stands for them.
    """
    scales = {tensor.scale_of: tensor for tensor in tensors if tensor.scale_of is not None}
    blocks = {tensor.block for tensor in scales.values()}
    if len(blocks) != 1 or any(tensor.name != f"{of}{_SCALE_SUFFIX}" for of, tensor in scales.items()):
        return None
    (block,) = blocks
    assert block is not None, "scales have blocks"
    sources = {move.source for tensor in scales.values() for move in tensor.moves}
    names = [tensor.name for tensor in tensors if _may_have_scales(tensor) and tensor.name not in scales]
    names += [name for name, standing in tied.items() if standing not in sources]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": _modules(names, scales),
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def _may_have_scales(tensor: MappedTensor) -> bool:
    return tensor.scale_of is None and len(tensor.shape) >= 2 and tensor.dtype.startswith(("float", "bfloat"))


def _modules(names: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The layers that ``names`` are of, in their order; experts together, unless some of these are quantized."""
    divided = {found[1] for name in quantized if (found := _EXPERT.fullmatch(name))}
    modules: dict[str, None] = {}
    for name in names:
        found = _EXPERT.fullmatch(name)
        module = found[1] if found and found[1] not in divided else name.rpartition(".")[0]
        if module:
            modules.setdefault(module)
    return list(modules)
