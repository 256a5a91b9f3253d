"""The Hugging Face layout of XTuner's models: names, splits, and the files beside the weights.

An XTuner model says by ``to_hf_key_list(name)`` (with its config's ``hf_key_mapping`` applied: ``load_spec_mapping``)
which tensors of the published model one of its own holds: several are parts of equal size along one dimension. A
composite has such models as children, each for the names below it.

Guarantees: nothing is computed here; the rules are applied by an export, in pieces. Other models (transformers') have
none, and are exported as `save_pretrained` would.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS: Final = ("_checkpoint_wrapped_module.", "_orig_mod.")


def hf_key_map(model: nn.Module) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """Return the function from ``model``'s state dict to the published one; None for a model of another kind."""
    owners = _owners(model)
    return functools.partial(_published, owners) if owners else None


def persistent_options(model: nn.Module) -> dict[str, Any]:
    """Return what ``model`` says of its files and dtypes, as options of an export."""
    config = getattr(model, "config", None)
    found: dict[str, Any] = {}
    assets = getattr(config, "hf_config", None) or getattr(model, "_hf_path", None)
    if assets is not None:
        found["assets"] = assets
    patterns = tuple(getattr(getattr(config, "hf_save_cfg", None), "fp32_keys_pattern", None) or ())
    if owners := _owners(model):  # XTuner leaves buffers in the dtype they have
        patterns += tuple(f"^{re.escape(key)}$" for key in _float32_buffers(model, owners))
    if patterns:
        found["fp32_keys"] = patterns
    return found


def _owners(model: nn.Module) -> dict[str, Any]:
    """Return the models that have names of their own, by the prefix of their tensors."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        if _has_names(module):
            owners[_clean(f"{name}." if name else "")] = module
            if hasattr(module, "_init_load_spec"):
                module._init_load_spec()
    return owners


def _float32_buffers(model: nn.Module, owners: Mapping[str, Any]) -> list[str]:
    stored = {_clean(name) for name in model.state_dict()}
    buffers = {_clean(name): buffer for name, buffer in model.named_buffers() if buffer.dtype == torch.float32}
    return list(_published(owners, {name: buffer for name, buffer in buffers.items() if name in stored}))


def _has_names(module: Any) -> bool:
    if not callable(getattr(module, "to_hf_key_list", None)):
        return False
    try:
        module.to_hf_key_list("")
    except NotImplementedError:
        return False
    except Exception:  # noqa: BLE001, S110 - it has names, and none for this
        pass
    return True


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _published(owners: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix = max((prefix for prefix in owners if name.startswith(prefix)), key=len, default=None)
        if prefix is None:
            found[name] = tensor
            continue
        module, own = owners[prefix], name[len(prefix) :]
        keys, dim = _keys_of(module, own)
        if not keys:
            continue
        size = tensor.shape[dim] // len(keys)
        parts = [tensor] if len(keys) == 1 else torch.split(tensor, size, dim)
        convert = getattr(module, "param_to_safetensor", None)
        for key, part in zip(keys, parts, strict=True):
            if key not in found:  # of tied weights the first
                found[key] = part if convert is None else convert(part, key)
    return found


def _keys_of(module: Any, name: str) -> tuple[list[str], int]:
    """Return the published names that a tensor holds, and the dimension they lie along."""
    spec = getattr(module, "load_spec_mapping", {}).get(name)
    if spec is None:
        return list(module.to_hf_key_list(name)), 0
    return list(spec.global_hf_keys), spec.fused_dim or 0
