"""What an export is made of: from the modules of a state and who holds what to files, their bytes' owners, and assets.

    recipe = Recipe(export, models, rank=0)    on the training thread: names, ties, configuration of the modules
    made = recipe.plan(stock)                  off it, once a plan: files, key maps, blocks, what lies beside weights

Guarantees: whatever doesn't fit together is a `ConfigError` that names it, before a byte is written; all ranks that
plan from the same stock agree.
Does not: touch tensors' data, or wait for anyone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.export.assets import CONFIG_NAME, AssetSet, collect_assets
from holdfast.export.hf_default import saves_adapter_only, tied_names, unwrapped
from holdfast.export.hf_layout import (
    HFLayout,
    Part,
    TargetTensor,
    adapter_layout,
    layout_parts,
    target_of,
)
from holdfast.export.key_map import compile_key_map
from holdfast.export.moves import KeyMapping, MappedTensor
from holdfast.export.plan import ExportPlan, plan_export
from holdfast.export.quantization import fp8_config, fp8_rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.export.hf_export import HFExport
    from holdfast.export.material import Stock
    from holdfast.export.sources import Source

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Model:
    """One module of the state, as it is when the session begins; or what is known of it."""

    key: str
    module: nn.Module | None
    order: tuple[str, ...]
    """Names in the order of its state dict, which is that of the files."""
    tied: tuple[tuple[str, ...], ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class Made:
    """The plan of an export, for as long as the structure of the state stands."""

    plan: ExportPlan
    layout: HFLayout
    prewritten: Mapping[str, bytes]
    """Rank 0's: all files but those of weights."""


class Recipe:
    """What ``export`` asks of ``models``, on one rank."""

    def __init__(self, export: HFExport, models: Sequence[Model], *, rank: int) -> None:
        """Raises `ConfigError` for what can't be exported; rank 0 collects assets: `StorageError` too."""
        self._export = export
        self._rank = rank
        self._models = list(models)
        self.keys = frozenset(model.key for model in self._models)
        self._assets = self._collect() if rank == 0 else AssetSet()

    def wants(self, name: str) -> bool:
        """Whether the tensor called ``name`` in the state is exported, or may be."""
        return name.partition(".")[0] in self.keys

    def plan(self, stock: Stock) -> Made:
        """The plan for a state that the ranks hold as ``stock`` says."""
        sources = stock.sources(self.wants)
        mappings = [self._mapping(model, sources) for model in self._models]
        layout = self._layout(mappings)
        aliases = {name: standing for mapping in mappings for name, standing in mapping.aliases.items()}
        whole = KeyMapping(tuple(tensor for mapping in mappings for tensor in mapping.tensors), aliases)
        used = {move.source for tensor in whole.tensors for move in tensor.moves}
        plan = plan_export(
            layout.files,
            whole,
            {name: source for name, source in sources.items() if name in used},
            world=stock.world,
        )
        quantization = fp8_config(whole.tensors, whole.aliases)
        if quantization is None and self._is_fp8:
            raise ConfigError(
                "HFExport.dtype: float8 is for matrices of linear layers, and the export has none to quantize: "
                "`fp32_keys` or the kind of its layers keeps each as it is",
                field="dtype",
            )
        return Made(plan, layout, self._prewritten(layout, quantization) if self._rank == 0 else {})

    # Inside. -----------------------------------------------------------------------------------------------------

    def _collect(self) -> AssetSet:
        export = self._export
        main = self._models[0].module if len(self._models) == 1 else None
        adapter = main is not None and saves_adapter_only(main)
        return collect_assets(
            export.assets,
            export.tokenizer,
            main,
            dtype=None if self._is_fp8 else export.dtype,
            adapter=adapter,
        )

    @property
    def _is_fp8(self) -> bool:
        return self._export.dtype == FLOAT8

    def _mapping(self, model: Model, sources: Mapping[str, Source]) -> KeyMapping:
        prefix = f"{model.key}."
        there = {name.removeprefix(prefix): source for name, source in sources.items() if name.startswith(prefix)}
        order = [name for name in model.order if name in there]
        known = frozenset(order)
        order += [name for name in there if name not in known]
        key_map, dtype = self._export.key_map, self._export.dtype
        if self._is_fp8:
            key_map = [key_map, fp8_rule(self._export.fp32_keys, model.module)]
            dtype = None
        mapping = compile_key_map(
            key_map,
            {name: (there[name].shape, there[name].dtype) for name in order},
            dtype=None if dtype is None else getattr(torch, str(dtype)),
            fp32_keys=tuple(self._export.fp32_keys),
            tied=[list(group) for group in model.tied],
            model=model.module,
        )
        own = prefix if len(self._models) > 1 else ""  # of several models each has its names to itself
        renamed = [
            replace(
                tensor,
                name=own + tensor.name,
                scale_of=None if tensor.scale_of is None else own + tensor.scale_of,
                storage=None if tensor.storage is None else own + tensor.storage,
                moves=tuple(replace(move, source=prefix + move.source) for move in tensor.moves),
            )
            for tensor in mapping.tensors
        ]
        aliases = {own + name: prefix + standing for name, standing in mapping.aliases.items()}
        return KeyMapping(tuple(renamed), aliases)

    def _layout(self, mappings: Sequence[KeyMapping]) -> HFLayout:
        if len(mappings) == 1 and _is_adapter(self._models[0]):
            return adapter_layout([_target(tensor) for tensor in mappings[0].tensors])
        several = len(mappings) > 1
        parts = [
            Part(
                tuple(_target(tensor) for tensor in mapping.tensors),
                weights_name=f"{model.key}.safetensors" if several else "model.safetensors",
            )
            for model, mapping in zip(self._models, mappings, strict=True)
        ]
        return layout_parts(
            parts,
            max_shard_bytes=self._export.max_shard_bytes,
            total_parameters=sum(model.parameters for model in self._models),
        )

    def _prewritten(self, layout: HFLayout, quantization: Mapping[str, Any] | None) -> dict[str, bytes]:
        names = [file.name for file in layout.files]
        if layout.index is not None:
            names.append(layout.index_name)
        assets = self._assets
        assets.require_apart_from(names)
        if quantization is not None and CONFIG_NAME in assets.paths:
            assets = assets.with_config({"quantization_config": quantization})
        files = assets.contents()
        if layout.index is not None:
            files[layout.index_name] = layout.index
        return files


def models_of(export: HFExport, state: Mapping[str, Any]) -> list[Model]:
    """Top-level modules of the state that are to be exported, in its order."""
    there = {str(key): value for key, value in state.items() if isinstance(value, nn.Module)}
    if export.modules is not None:
        missing = [name for name in export.modules if name not in there]
        if missing:
            raise ConfigError(
                f"HFExport.modules: the state has no module {', '.join(map(repr, missing))}; "
                f"there are {', '.join(map(repr, there)) or 'none'}",
                field="modules",
            )
        return [model_of(name, there[name]) for name in export.modules]
    if not there:
        raise ConfigError(
            "the state has no module at its top level: there is nothing to export; pass the model as state['model']",
            field="exports",
        )
    return [model_of(name, module) for name, module in there.items()]


def model_of(key: str, module: nn.Module) -> Model:
    inner = unwrapped(module)
    order = tuple(inner.state_dict(keep_vars=True))
    count = getattr(inner, "num_parameters", None)
    parameters = count() if callable(count) else sum(parameter.numel() for parameter in inner.parameters())
    return Model(key, inner, order, tuple(map(tuple, tied_names(inner))), int(parameters))


def _is_adapter(model: Model) -> bool:
    return model.module is not None and saves_adapter_only(model.module)


def _target(tensor: MappedTensor) -> TargetTensor:
    return target_of(tensor.name, tensor.dtype, tensor.shape, storage=tensor.storage)
