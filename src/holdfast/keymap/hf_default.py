"""The default key map: what ``save_pretrained`` of the model would write, asked of `transformers` and not rewritten.

Names that are left out (``_keys_to_ignore_on_save``), which of several tied names stays, and the layout on disk where
that in memory is another (experts fused in memory and one by one on disk, renamed parts of vision-language models) are
what the installed `transformers` says: its own functions run on stand-ins. An adapter of `peft` is its adapter only, in
PEFT's layout. A module that is neither is exported under its own names.

Guarantees: changes nothing in the model and reads no weight. What `transformers` would refuse to save is a
`ConfigError`.
Assumes: names are those of the model's ``state_dict``.
Does not: import `transformers` or `peft` unless the program has; write config files.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, listed
from holdfast.keymap.rules import Named, Notes, note_tied
from holdfast.keymap.tracing import run_on_stand_ins
from holdfast.state.entries import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    StateDict = dict[str, torch.Tensor]

# Attributes that `save_pretrained` itself goes by. They are private by name; a version without one says "no".
_IGNORED: Final = "_keys_to_ignore_on_save"
_HAS_ADAPTER: Final = "_hf_peft_config_loaded"


@dataclass(frozen=True, slots=True)
class HFDefault:
    """Apply what ``save_pretrained`` does to the state of a `transformers` model; the default key map.

    If such models are parts of a module, each part's tensors are treated so, under the part's prefix. Stages of a model
    that have its class are represented by the first one. As the first of several rules it converts the state to the
    layout on disk, which the others then change.
    """

    def applied_to(self, state: StateDict, notes: Notes) -> StateDict:
        staged = isinstance(notes.model, tuple)
        models = [unwrapped(model) for model in (notes.model if staged else (notes.model,))]
        if any(map(saves_adapter_only, models)) and staged:
            raise ConfigError(
                "key_map: an adapter of a model that is split into stages can't be exported. Pass a "
                "key map that maps each tensor",
                field="key_map",
            )
        if is_peft_model(models[0] if models else None):
            return _adapter_only(state, notes, lambda given: _peft_state(models[0], given))
        made = Named(self)
        parts: dict[str, Any] = {}
        for model in models:
            if isinstance(model, nn.Module):
                parts = dict(_pretrained_parts(bare(model))) | parts
        left = dict(parts)
        for name, tensor in state.items():
            prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
            if prefix is None:
                made.add(name, tensor, name)
            elif prefix in left:
                inner = {key.removeprefix(prefix): one for key, one in state.items() if key.startswith(prefix)}
                for key, one in _as_saved(left.pop(prefix), inner, notes, prefix, staged=staged).items():
                    made.add(prefix + key, one, name)
        return made.state


def _pretrained_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The prefix of names of each model of `transformers` that is in no other one, and the model."""
    if is_pretrained(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _pretrained_parts(child, f"{prefix}{name}.")


def _as_saved(model: Any, state: StateDict, notes: Notes, prefix: str, *, staged: bool) -> StateDict:
    """Return the state that ``model.save_pretrained`` would write; ``prefix`` precedes its names in the whole state.

    staged: the model is one stage of a pipeline; other stages hold the rest of the state.
    """
    tied = [[name.removeprefix(prefix) for name in group if name.startswith(prefix)] for group in notes.tied]
    if not staged:
        state = _in_models_order(model, state, tied)
    if getattr(model, _HAS_ADAPTER, False):
        return _adapter_only(state, notes, lambda given: _adapter_state(model, given))
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"key_map: {type(model).__name__} is quantized, and transformers stores its tensors in "
            "the quantizer's own format. Pass a key map that maps each tensor",
            field="key_map",
        )
    kept = _without_ignored(model, state, notes)
    kept = _without_tied(model, kept, notes, tied)
    return run_on_stand_ins(lambda given: _on_disk(model, given), kept, shown="transformers' conversion table")


def unwrapped(model: Any) -> Any:
    """The module inside ``torch.compile``, data-parallel and activation-checkpoint wrappers."""
    while isinstance(model, nn.Module):
        if compat.is_compiled_module(model):
            model = getattr(model, compat.COMPILED_MODULE)
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif compat.CHECKPOINT_WRAPPED in compat.children_of(model):
            model = getattr(model, compat.CHECKPOINT_WRAPPED)
        else:
            break
    return model


def bare(model: nn.Module) -> nn.Module:
    """``model`` as it was made: a tree of twins without wrappers, of the classes from before ``fully_shard``.

    `transformers` looks conversions up by class and where that is defined, and names scopes by modules.
    """
    twins: dict[int, nn.Module] = {}

    def twin_of(module: nn.Module) -> nn.Module:
        module = unwrapped(module)
        kind = compat.class_without_fsdp2(module)
        if kind.__new__ is not object.__new__:  # graphs and scripts, which are made in ways of their own
            return module
        if id(module) not in twins:
            children = {
                name: None if child is None else twin_of(child) for name, child in compat.children_of(module).items()
            }
            twins[id(module)] = compat.twin(module, kind, children)
        return twins[id(module)]

    return twin_of(model)


def is_pretrained(model: object) -> bool:
    """Return True for a model of `transformers`, without importing the library."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def is_peft_model(model: object) -> bool:
    """Return True for a model that `peft` has wrapped."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)


def saves_adapter_only(model: object) -> bool:
    """Return True if ``save_pretrained`` of ``model`` writes adapter weights only (``adapter_model.safetensors``)."""
    model = unwrapped(model)
    return is_peft_model(model) or (is_pretrained(model) and bool(getattr(model, _HAS_ADAPTER, False)))


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, of ``model`` without its wrappers; a tied one under each of its names."""
    model = bare(model)
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def tied_among(state: Mapping[str, Any]) -> list[list[str]]:
    """Groups of names of tensors that are one tensor in memory, in the order of ``state``."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            groups[memory_of(tensor)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _in_models_order(model: Any, state: StateDict, tied: Sequence[Sequence[str]]) -> StateDict:
    """``state`` as ``model.state_dict()`` has it: in its order, and with all names where some are tied."""
    if any(map(compat.changes_saving, model.modules())):
        return state  # which has the names that hooks give: nobody else knows them
    expected = list(saved_names(model))
    known = frozenset(expected)
    standing = {name: other for group in tied for name in group for other in group if other in state}
    unknown = [name for name in state if name not in known]
    missing = [name for name in expected if name not in state and name not in standing]
    if unknown or missing:
        what = [f"it has no {listed(unknown)}"] if unknown else []
        what += [f"the state lacks its {listed(missing)}"] if missing else []
        raise ConfigError(
            f"key_map: the names of the state are not those of {type(model).__name__}: {'; '.join(what)}. "
            "Pass a key map that maps each tensor",
            field="key_map",
        )
    return {name: state[name] if name in state else state[standing[name]] for name in expected}


def saved_names(model: nn.Module) -> Iterator[str]:
    """The names of ``model.state_dict()``, without calling it: it runs hooks of the user's and of FSDP's."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = compat.transient_buffers_of(module)
        for table in (compat.parameters_of(module), compat.buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None and name not in transient:
                    yield f"{prefix}.{name}" if prefix else name


def _without_ignored(model: Any, state: StateDict, notes: Notes) -> StateDict:
    ignored = set(getattr(model, _IGNORED, None) or ())
    for name in ignored & state.keys():
        notes.drop(state[name])
    return {name: tensor for name, tensor in state.items() if name not in ignored}


def _without_tied(model: Any, state: StateDict, notes: Notes, tied: Sequence[Sequence[str]]) -> StateDict:
    """Drop the tied names that `transformers` leaves out: its own function decides on tensors tied the same way."""
    groups = [[name for name in group if name in state] for group in tied]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return state
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    small: StateDict = {name: torch.zeros(1) for name in state}
    for group in groups:
        small.update(dict.fromkeys(group, small[group[0]]))
    try:
        kept = set(remove_tied_weights_from_state_dict(small, model))
    except RuntimeError as error:
        shown = type(model).__name__
        raise ConfigError(f"key_map: transformers can't save {shown}: {error}", field="key_map") from error
    for group in groups:
        stays = next(name for name in group if name in kept)
        for name in group:
            if name not in kept:
                note_tied(notes, state[name], state[stays])
    return {name: tensor for name, tensor in state.items() if name in kept}


def _on_disk(model: Any, state: StateDict) -> Any:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, names and layout are the same in memory and on disk
        return state
    return revert_weight_conversion(model, state)


# adapters ------------------------------------------------------------------------------------------------------


def _adapter_only(state: StateDict, notes: Notes, select: Callable[[StateDict], Any]) -> StateDict:
    kept = run_on_stand_ins(select, state, shown="peft's selection of adapter weights")
    chosen = {id(tensor) for tensor in kept.values()}
    for tensor in state.values():
        if id(tensor) not in chosen:
            notes.drop(tensor)
    if not kept:
        raise ConfigError("key_map: the model's adapter has no weights of its own to export", field="key_map")
    return kept


def _peft_state(model: Any, state: StateDict) -> Any:
    """Select the tensors that ``PeftModel.save_pretrained`` saves."""
    active = getattr(model, "active_adapters", None)
    return _selected(model, _one_adapter([model.active_adapter] if active is None else active), state)


def _adapter_state(model: Any, state: StateDict) -> Any:
    """Select the adapter's tensors as ``PreTrainedModel.save_pretrained`` does, under PEFT's prefix."""
    selected = _selected(model, _one_adapter(model.active_adapters()), state)
    return {f"base_model.model.{name}": tensor for name, tensor in selected.items()}


def _selected(model: Any, adapter: str, state: StateDict) -> Any:
    """PEFT's own choice, except that it is kept from asking the Hub for the base model's vocabulary size."""
    embeddings = import_module("peft.utils.other").EMBEDDING_LAYER_NAMES
    config = model.peft_config[adapter]
    targets, base = getattr(config, "target_modules", None), getattr(config, "base_model_name_or_path", None)
    decides_here = not base or os.path.isdir(base) or any(name in (targets or ()) for name in embeddings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it saves embeddings which are targets: as it should
        return import_module("peft").get_peft_model_state_dict(
            model,
            state_dict=state,
            adapter_name=adapter,
            save_embedding_layers="auto" if decides_here else False,
        )


def _one_adapter(active: Sequence[str]) -> str:
    names = list(active)
    if len(names) != 1:
        raise ConfigError(
            f"key_map: {len(names)} adapters are active ({listed(names)}); only one can be "
            "exported: call `set_adapter`",
            field="key_map",
        )
    return names[0]


# Rules of `transformers` models for their own files: names that may be absent or unexpected, and tied names. Models are
# recognized by their attributes, without importing `transformers`.

_COMPUTED = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that older versions stored, and that present ones compute."""


class LoadRules(NamedTuple):
    """Rules of one model, which may be a part of a module."""

    prefix: str
    """Of the part's names."""
    tied: Mapping[str, str]
    """Name of a parameter -> name of the one it is tied to, by the model's configuration; both with the prefix."""
    lack: tuple[re.Pattern[str], ...]
    have: tuple[re.Pattern[str], ...]

    def may_lack(self, name: str) -> bool:
        """Return True if ``name`` need not be stored."""
        return self._matches(self.lack, name)

    def may_have(self, name: str) -> bool:
        """Return True if ``name`` may be stored although the model has nothing of that name."""
        return self._matches(self.have, name)

    def _matches(self, patterns: tuple[re.Pattern[str], ...], name: str) -> bool:
        below = name[len(self.prefix) :]
        return name.startswith(self.prefix) and any(pattern.search(below) for pattern in patterns)


def load_rules(module: nn.Module) -> list[LoadRules]:
    """The rules of ``module``, or of what in it are models with rules; wrappers and ``fully_shard`` don't matter."""
    return [_rules_of(prefix, model) for prefix, model in _models_in(bare(module), "")]


def _models_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if any(hasattr(module, name) for name in (compat.HF_TIED, compat.HF_MAY_LACK, compat.HF_MAY_HAVE)):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _models_in(child, f"{prefix}{name}.")


def _rules_of(prefix: str, model: nn.Module) -> LoadRules:
    tied: Any = getattr(model, compat.HF_TIED, None)
    lack, have = (_patterns(getattr(model, name, None)) for name in (compat.HF_MAY_LACK, compat.HF_MAY_HAVE))
    buffers = [name for name, _ in model.named_buffers()]
    computed = (end for end in _COMPUTED if any(name.endswith(end) for name in buffers))
    have += tuple(re.compile(rf"(^|\.){re.escape(end)}$") for end in computed)
    names = tied.items() if isinstance(tied, Mapping) else ()
    return LoadRules(prefix, {prefix + one: prefix + other for one, other in names}, lack, have)


def _patterns(given: object) -> tuple[re.Pattern[str], ...]:
    if not isinstance(given, Collection) or isinstance(given, str):
        return ()
    return tuple(re.compile(pattern) for pattern in given if isinstance(pattern, str))
