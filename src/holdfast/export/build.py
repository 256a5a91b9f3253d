"""Plan the content of an export: files, the owner of each byte, and assets, from the modules of a state.

    builder = ExportBuilder(export, models, rank=0)    on the training thread: names, ties, configuration of the modules
    built = builder.plan(inventory)                    off it, once per plan: files, key maps, blocks, assets

Guarantees: anything that doesn't fit together is a `ConfigError` that names it, raised before a byte is written; all
ranks that plan from the same inventory agree.
Does not: touch tensors' data, or wait for other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.export.assets import CONFIG_NAME, AssetSet, collect_assets
from holdfast.export.fp8 import fp8_config, fp8_rule
from holdfast.export.layout import HFLayout, SubModel, TargetTensor, adapter_layout, layout_parts, target_of
from holdfast.export.plan import ExportPlan, plan_export
from holdfast.keymap.compile import compile_key_map
from holdfast.keymap.hf_default import (
    is_peft_model,
    is_pretrained,
    named_tensors,
    saves_adapter_only,
    tied_among,
    unwrapped,
)
from holdfast.keymap.moves import KeyMapping, MappedTensor
from holdfast.state.modules import as_modules, changes_state_dict, state_dict_of
from holdfast.state.subclasses import unfolds
from holdfast.storage.local import open_storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from holdfast.config import HFExport
    from holdfast.export.inputs import Inventory
    from holdfast.export.rank_plan import SourceTensor

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the state, as it is when the session begins; or what is known of it."""

    key: str
    modules: tuple[nn.Module, ...]
    """The module that it is, or those of its stages that this rank has; none where the architecture isn't known."""
    order: tuple[str, ...]
    """Names in the order of its state dict, which is that of the files."""
    tied: tuple[tuple[str, ...], ...]
    parameters: int

    @property
    def main(self) -> nn.Module | None:
        """The module that says what the model is: of several stages, the first that `transformers` knows."""
        if len(self.modules) == 1:
            return self.modules[0]
        return next((module for module in self.modules if is_pretrained(module)), None)

    def of_stages(self, sources: Mapping[str, SourceTensor]) -> Model:
        """The model whose other stages are on other ranks: nothing is said of it that these wouldn't say, too."""
        return replace(self, order=(), tied=(), parameters=sum(prod(source.shape) for source in sources.values()))


@dataclass(frozen=True, slots=True)
class BuiltExport:
    """The plan of an export, for as long as the structure of the state stands. Refers to no tensor or module."""

    sources: Mapping[str, SourceTensor]
    is_alike: bool
    """All ranks have tensors of the same names."""
    mappings: Sequence[KeyMapping]
    """Of each model."""
    layout: HFLayout
    plan: ExportPlan
    quantization: Mapping[str, Any] | None
    prewritten: Mapping[str, bytes] = field(default_factory=dict)
    """Rank 0's: all files but those of weights. Made at each call, as assets may change."""


class ExportBuilder:
    """Plan ``export`` of ``models`` on one rank."""

    def __init__(self, export: HFExport, models: Sequence[Model], *, rank: int) -> None:
        """Raises `ConfigError` for what can't be exported; rank 0 collects assets: `StorageError` too."""
        self._export = export
        self._whole_files = not open_storage(export.root).takes_pieces
        self._rank = rank
        self._models = list(models)
        self.keys = frozenset(model.key for model in self._models)
        self._assets = self._collect() if rank == 0 else AssetSet()

    def wants(self, name: str) -> bool:
        """Return True if the state's tensor ``name`` is, or may be, exported."""
        return name.partition(".")[0] in self.keys

    def signature(self) -> bytes:
        """Return what a plan depends on beside the `Inventory` and what others have a part in: see `plan`."""
        export = self._export
        models = [
            (model.key, model.order, model.tied, model.parameters, _is_adapter(model), len(model.modules))
            for model in self._models
        ]
        asks = self._asks_others
        files = (export.max_shard_bytes, self._whole_files)
        return msgspec.msgpack.encode((export.dtype, export.fp32_keys, files, models, asks))

    def plan(self, stock: Inventory, known: BuiltExport | None = None) -> BuiltExport:
        """The plan for a state that the ranks hold as ``stock`` says.

        known: what was planned under this `signature` for a stock of the same one: it is taken again. Where code of
        others has a part in the key map, that is compiled anew, and must give what it gave then.
        """
        if known is None or self._asks_others:
            sources = stock.sources(self.wants) if known is None else known.sources
            alike = stock.is_alike(self.wants) if known is None else known.is_alike
            models = self._whole_models(sources, alike=alike)
            mappings = [self._mapping(model, below, all_here=alike) for model, below in models]
            if known is None or mappings != known.mappings:
                known = self._planned(stock.world, sources, mappings, alike=alike)
        return replace(known, prewritten=self._prewritten(known.layout, known.quantization) if self._rank == 0 else {})

    def _planned(
        self, world: int, sources: Mapping[str, SourceTensor], mappings: list[KeyMapping], *, alike: bool
    ) -> BuiltExport:
        layout = self._layout([model for model, _ in self._whole_models(sources, alike=alike)], mappings)
        aliases = {name: standing for mapping in mappings for name, standing in mapping.aliases.items()}
        whole = KeyMapping(tuple(tensor for mapping in mappings for tensor in mapping.tensors), aliases)
        used = {move.source for tensor in whole.tensors for move in tensor.moves}
        plan = plan_export(
            layout.files,
            whole,
            {name: source for name, source in sources.items() if name in used},
            world=world,
            whole_files=self._whole_files,
        )
        quantization = fp8_config(whole.tensors, whole.aliases)
        if quantization is None and self._is_fp8:
            raise ConfigError(
                "HFExport.dtype: float8 applies to matrices of linear layers, and the export has none "
                "to quantize: each is excluded by `fp32_keys` or by the type of its layer",
                field="dtype",
            )
        return BuiltExport(sources, alike, mappings, layout, plan, quantization)

    def _whole_models(
        self, sources: Mapping[str, SourceTensor], *, alike: bool
    ) -> list[tuple[Model, Mapping[str, SourceTensor]]]:
        """Each model, with its tensors by their names in it."""
        models = [(model, _below(model, sources)) for model in self._models]
        return [(model if alike else model.of_stages(below), below) for model, below in models]

    @cached_property
    def _asks_others(self) -> bool:
        """Whether code that isn't ours has a part in the key map: the user's, or that of `transformers` or `peft`."""
        modules = [module for model in self._models for module in model.modules]
        return (
            self._export.key_map is not None
            or self._is_fp8
            or any(map(changes_state_dict, modules))
            or any(is_pretrained(part) or is_peft_model(part) for module in modules for part in module.modules())
        )

    # Inside. -----------------------------------------------------------------------------------------------------

    def _collect(self) -> AssetSet:
        export = self._export
        main = self._models[0].main if len(self._models) == 1 else None
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

    def _mapping(self, model: Model, there: Mapping[str, SourceTensor], *, all_here: bool) -> KeyMapping:
        """Compile the key map for the tensors ``there``, given by their names in ``model``.

        all_here: this rank has all of them, and so has every other.
        """
        prefix = f"{model.key}."
        order = [name for name in model.order if name in there]
        known = frozenset(order)
        order += [name for name in there if name not in known]
        key_map, dtype = self._export.key_map, self._export.dtype
        if self._is_fp8:
            key_map = [key_map, fp8_rule(self._export.fp32_keys, model.modules, all_here=all_here)]
            dtype = None
        mapping = compile_key_map(
            key_map,
            {name: (there[name].shape, there[name].dtype) for name in order},
            dtype=None if dtype is None else getattr(torch, str(dtype)),
            fp32_keys=tuple(self._export.fp32_keys),
            tied=[list(group) for group in model.tied],
            model=model.main if all_here and len(model.modules) < 2 else model.modules,
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

    def _layout(self, models: Sequence[Model], mappings: Sequence[KeyMapping]) -> HFLayout:
        if len(mappings) == 1 and _is_adapter(models[0]):
            return adapter_layout([_target(tensor) for tensor in mappings[0].tensors])
        several = len(mappings) > 1
        parts = [
            SubModel(
                tuple(_target(tensor) for tensor in mapping.tensors),
                weights_name=f"{model.key}.safetensors" if several else "model.safetensors",
            )
            for model, mapping in zip(models, mappings, strict=True)
        ]
        return layout_parts(
            parts,
            max_shard_bytes=self._export.max_shard_bytes,
            total_parameters=sum(model.parameters for model in models),
            indexed=self._whole_files,
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
    """Top-level modules of the state, or lists of them, that are to be exported, in its order."""
    there = {str(key): modules for key, value in state.items() if (modules := as_modules(value)) is not None}
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
            "the state has no module at its top level, nor a list of modules: there is nothing to export; pass the "
            "model, or its stages, as state['model']",
            field="exports",
        )
    return [model_of(name, modules) for name, modules in there.items()]


def model_of(key: str, modules: Sequence[nn.Module]) -> Model:
    """The model that ``modules`` are, one or the stages of it."""
    inner = tuple(map(unwrapped, modules))
    if any(compat.is_fsdp1_module(one) for module in inner for one in module.modules()):
        raise ConfigError(
            f"{key}: a module of FSDP1 (FullyShardedDataParallel) can't be exported: save a checkpoint, and export the "
            "model that was not wrapped when it has loaded that, or use fully_shard",
            field=key,
        )
    order: dict[str, None] = {}
    tensors: dict[str, Any] = {}
    for module in inner:
        if changes_state_dict(module):
            state = state_dict_of(module, shown=key)
            tensors |= state
        else:
            state = module.state_dict(keep_vars=True)
            tensors |= named_tensors(module)
        order |= dict.fromkeys(state)
    for name, tensor in tensors.items():
        if unfolds(tensor):
            raise quantized(f"{key}.{name}", type(tensor).__qualname__)
    return Model(key, inner, tuple(order), tuple(map(tuple, tied_among(tensors))), sum(map(_parameters_of, inner)))


def quantized(name: str, kind: str) -> ConfigError:
    """Return the error for a tensor that checkpoints store as its inner tensors: published layouts have no such."""
    return ConfigError(
        f"{name}: a {kind} is made of inner tensors, and can't be exported; export the model before it is quantized, "
        "or dequantize it",
        field=name,
    )


def _parameters_of(module: nn.Module) -> int:
    count = getattr(module, "num_parameters", None)
    return int(count() if callable(count) else sum(parameter.numel() for parameter in module.parameters()))


def _below(model: Model, sources: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    prefix = f"{model.key}."
    return {name.removeprefix(prefix): source for name, source in sources.items() if name.startswith(prefix)}


def _is_adapter(model: Model) -> bool:
    return model.main is not None and saves_adapter_only(model.main)


def _target(tensor: MappedTensor) -> TargetTensor:
    return target_of(tensor.name, tensor.dtype, tensor.shape, storage=tensor.storage)
