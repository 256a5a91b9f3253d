"""Make what travels of a trainer's weights: chosen names, another layout, another dtype. One publisher rank's part.

    weights -> key map (the exports' own, traced once) -> include, exclude -> boxes of the new tensors -> dtype
                                                                          \\-> blocks of fp8 (``weights.quantized``)

A key map says for each tensor of the result which elements of which of the trainer's tensors it is made of. A rank
makes what it has the elements of: boxes of the new tensors, each a view of the trainer's own memory. The ranks' boxes
together are the whole tensors, for whatever sharding: nothing is sent between ranks for that.

Guarantees: names, shapes and values are those of an export with the same key map and dtype. Nothing is copied here:
views are converted piece by piece where they are staged or sent (`TensorParts`), except local tensors that aren't
contiguous, which a key map that moves elements copies, and fp8. Views of tensors that are where they were are used
again. What doesn't fit is a `ConfigError` that names it.
Assumes: each rank's names are enough for its key map, as they are with FSDP and tensor parallelism: a map that makes
one tensor of tensors of several pipeline stages is refused as incomplete.
Does not: talk to other ranks, but for the scales of fp8.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, strides, subtract, whole
from holdfast.config import HFExport
from holdfast.errors import ConfigError
from holdfast.export.fp8 import fp8_rule
from holdfast.export.inputs import pieces_of
from holdfast.export.rank_plan import BufferRegion, Holdings, SourceBox, SourceTensor, in_memory
from holdfast.keymap.compile import compile_key_map, steps_of
from holdfast.keymap.hf_default import HFDefault, bare, named_tensors, saved_names, unwrapped
from holdfast.keymap.moves import Move, retargeted
from holdfast.keymap.rules import Fp8
from holdfast.staging.copier import lies_as_it_is
from holdfast.state.entries import WholePlace, dtype_name, known_dtype, local_tensor, torch_dtype
from holdfast.state.modules import changes_state_dict, state_dict_of
from holdfast.state.structure import LayoutTable, part_of
from holdfast.sync.weights.names import NameChoice
from holdfast.sync.weights.pieces import TensorParts, look_of, memory_key
from holdfast.sync.weights.pieces import named_tensors as checked_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.keymap.moves import KeyMapping, MappedTensor
    from holdfast.sync.weights.pieces import Sendable, Weights

_T = TypeVar("_T")
FLOAT8: Final = "float8_e4m3fn"
BOXES_MAX: Final = 4096
"""Of one new tensor on one rank: a map that scatters elements more than that isn't made of boxes."""


class HeldPart(NamedTuple):
    """Where a rank's local tensor holds a box of one of the trainer's tensors: from ``offsets`` of ``local`` on."""

    box: Box
    local: torch.Tensor
    offsets: tuple[int, ...]


class TargetBox(NamedTuple):
    """A box of a new tensor, and its elements: a strided view of ``held.local``, counted in row-major elements."""

    box: Box
    held: HeldPart
    offset: int
    steps: tuple[int, ...]

    @property
    def view(self) -> torch.Tensor:
        """The elements, where ``held.local`` is contiguous."""
        local = self.held.local
        return local.as_strided(self.box.sizes, self.steps, local.storage_offset() + self.offset)


class MadeWeights(NamedTuple):
    """What a rank's weights become by a key map, in the map's order."""

    mapping: KeyMapping
    plain: Mapping[str, Sendable]
    """What isn't quantized."""
    quantized: Mapping[str, Sequence[TargetBox]]
    """What is: the elements of it that this rank has."""
    is_view: bool
    """All of it are views of the weights themselves."""


class WeightTransform:
    """Make what one publisher rank publishes of the weights that it is given."""

    def __init__(
        self,
        *,
        include: Any = None,
        exclude: Any = None,
        key_map: Any = None,
        dtype: Any = None,
        fp32_keys: Any = (),
    ) -> None:
        """Check the arguments, which `Publisher` documents. Raises `ConfigError`, naming one."""
        self._choice = NameChoice(include, exclude)
        try:  # what is valid for an export is valid here
            checked = HFExport(root="unused", dtype=dtype, fp32_keys=fp32_keys)
        except ConfigError as error:
            raise ConfigError(str(error).replace("HFExport.", "Publisher: ", 1), field=error.field) from None
        wanted, self._fp32_keys = checked.dtype, tuple(checked.fp32_keys)
        self._fp8 = wanted == FLOAT8
        self._dtype = None if wanted is None or self._fp8 else torch_dtype(str(wanted))
        self._key_map: Any = [] if key_map is None else key_map
        steps = steps_of(self._key_map)
        self.quantizes = self._fp8 or any(isinstance(step, Fp8) for step in steps)
        """Whether scales are computed, by all ranks together."""
        self._asks_model = any(isinstance(step, HFDefault) for step in steps)
        self._changes = bool(steps) or wanted is not None or bool(self._fp32_keys)
        self._mapping: tuple[Any, KeyMapping] | None = None
        self._made: tuple[Any, MadeWeights] | None = None

    def of(self, weights: Any) -> Weights | MadeWeights:
        """Return what travels of ``weights``: a mapping, an iterable of (name, tensor), or a module.

        `MadeWeights` if some of it has yet to be quantized.
        """
        model = weights if isinstance(weights, nn.Module) else None
        given = checked_tensors(weights if model is None else _tensors_of(model))
        if not given:
            return given
        if not self._changes:
            return self._chosen(given)
        if self._asks_model and model is None:
            raise ConfigError(
                "key_map: HFDefault asks the model what transformers would save: publish the model itself, "
                "publish(model, version), not its state dict",
                field="key_map",
            )
        mapping = self._mapped(given, model)
        now = [(name, memory_key(tensor), look_of(tensor)) for name, tensor in given.items()]
        if self._made is None or self._made[1].mapping is not mapping or self._made[0] != now:
            self._made = now, _Maker(given).make(mapping)
        made = self._made[1]
        if not made.is_view:  # copies are of this moment only
            self._made = None
        return made if self.quantizes else made.plain

    def forget(self) -> None:
        """Drop all references to weights."""
        self._made = None

    def _mapped(self, given: Weights, model: nn.Module | None) -> KeyMapping:
        """Return the compiled key map; compiled anew if names, shapes, dtypes, ties or the model have changed."""
        sources = {name: (_shape_of(tensor), _dtype_of(name, tensor)) for name, tensor in given.items()}
        tied: dict[object, list[str]] = {}
        for name, tensor in given.items():
            tied.setdefault(memory_key(tensor), []).append(name)
        groups = [names for names in tied.values() if len(names) > 1]
        key = (sources, groups, id(model))
        if self._mapping is None or self._mapping[0] != key:
            inner = None if model is None else unwrapped(model)
            key_map: Any = [self._key_map]
            if self._fp8:
                key_map.append(fp8_rule(self._fp32_keys, () if inner is None else (inner,)))
            mapping = compile_key_map(
                key_map, sources, dtype=self._dtype, fp32_keys=self._fp32_keys, tied=groups, model=inner
            )
            if self._fp8 and all(tensor.scale_of is None for tensor in mapping.tensors):
                raise ConfigError(
                    "dtype: float8 applies to matrices of linear layers, and the weights have none to quantize: each "
                    "is excluded by fp32_keys or by the type of its layer",
                    field="dtype",
                )
            values = self._chosen({tensor.name: None for tensor in mapping.tensors if tensor.scale_of is None})
            chosen = tuple(tensor for tensor in mapping.tensors if (tensor.scale_of or tensor.name) in values)
            self._mapping = key, replace(mapping, tensors=chosen)
        return self._mapping[1]

    def _chosen(self, named: Mapping[str, _T]) -> Mapping[str, _T]:
        """Return what is to be published of ``named``, by published name."""
        choice = self._choice
        if choice.takes_all:
            return named
        choice.check(named.keys(), where="that this rank would publish")
        return {name: value for name, value in named.items() if choice.takes(name)}


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint would have of ``model``: parameters, and buffers that are saved, by their own names."""
    inner = unwrapped(model)
    if changes_state_dict(inner):
        return dict(state_dict_of(inner, shown="weights"))
    there = named_tensors(inner)
    return {name: there[name] for name in saved_names(bare(inner))}


def _shape_of(tensor: Sendable) -> tuple[int, ...]:
    if isinstance(tensor, TensorParts):
        first, place = tensor.parts[0]
        return tuple(first.shape) if place is None else place.shape
    return tuple(tensor.shape)


def _dtype_of(name: str, tensor: Sendable) -> str:
    return dtype_name(tensor.dtype, name) if isinstance(tensor, TensorParts) else known_dtype(tensor, name)


class _Maker:
    """Makes new tensors of the weights ``given``."""

    def __init__(self, given: Weights) -> None:
        self._given = given
        self._layouts = LayoutTable()
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._held: dict[tuple[str, bool], list[HeldPart]] = {}
        self._holdings: dict[tuple[str, tuple[Box, ...]], Holdings] = {}
        self._is_view = True

    def make(self, mapping: KeyMapping) -> MadeWeights:
        scaled = {tensor.scale_of for tensor in mapping.tensors if tensor.scale_of is not None}
        plain: dict[str, Sendable] = {}
        quantized: dict[str, Sequence[TargetBox]] = {}
        for target in mapping.tensors:
            if target.scale_of is not None:
                continue
            if target.name in scaled:
                quantized[target.name] = self._boxes(target, in_pieces=True)
                continue
            made = self._plain(target)
            if made is not None:
                plain[target.name] = made
        return MadeWeights(mapping, plain, quantized, self._is_view)

    def _plain(self, target: MappedTensor) -> Sendable | None:
        dtype = torch_dtype(target.dtype)
        same = self._same(target)
        if same is not None:
            if same.dtype == dtype:
                return same
            return TensorParts(same.parts if isinstance(same, TensorParts) else [(same, None)], dtype)
        if not prod(target.shape):
            return torch.empty(target.shape, dtype=dtype)
        boxes = self._boxes(target)
        if not boxes:
            return None  # other ranks have it
        return TensorParts([(one.view, WholePlace(target.shape, one.box)) for one in boxes], dtype)

    def _same(self, target: MappedTensor) -> Sendable | None:
        """Return the tensor that ``target`` is, under whatever name."""
        if len(target.moves) != 1:
            return None
        (move,) = target.moves
        found = self._given[move.source]
        numel = prod(target.shape)
        is_run = (move.target_offset, move.source_offset, move.volume) == (0, 0, numel) and (
            numel == 1 or (move.target_strides == move.source_strides == (1,))
        )
        return found if is_run and _shape_of(found) == target.shape else None

    def _boxes(self, target: MappedTensor, *, in_pieces: bool = False) -> list[TargetBox]:
        """Return the boxes of ``target`` that this rank has the elements of.

        in_pieces: what isn't in host memory is to be brought there piece by piece.
        """
        found: list[TargetBox] = []
        for move in target.moves:
            held = self._parts(move.source, in_pieces=in_pieces)
            if not held:
                continue
            shape = _shape_of(self._given[move.source])
            by_box = {part.box: part for part in held}
            for share in self._holdings_of(move.source, shape, by_box).shares(move):
                part = by_box.get(share.piece.box)
                if part is None:
                    continue
                memory = BufferRegion(move.source, part.box, part.offsets, tuple(part.local.shape))
                for local in in_memory(share.move, shape, memory):
                    found += _target_boxes(local, target, part)
                    if len(found) > BOXES_MAX:
                        raise _scattered(target)
        return found

    def _holdings_of(self, name: str, shape: tuple[int, ...], mine: Mapping[Box, HeldPart]) -> Holdings:
        """Return where the elements of a source are: in this rank's boxes, and in others that tile the rest of it."""
        key = name, tuple(mine)
        known = self._holdings.get(key)
        if known is None:
            rest = [whole(shape)]
            for box in mine:
                rest = [part for old in rest for part in subtract(old, box)]
            pieces = (*(SourceBox(box, (0,)) for box in mine), *(SourceBox(box, (1,)) for box in rest))
            dtype = _dtype_of(name, self._given[name])
            known = self._holdings[key] = Holdings(SourceTensor(name, shape, dtype, pieces))
        return known

    def _parts(self, name: str, *, in_pieces: bool) -> list[HeldPart]:
        known = self._held.get((name, in_pieces))
        if known is not None:
            return known
        given = self._given[name]
        parts = given.parts if isinstance(given, TensorParts) else [(given, None)]
        found: list[HeldPart] = []
        for tensor, place in parts:
            local = local_tensor(tensor)
            if place is None:
                self._layouts.check_local(tensor, name, self._rank)
                rows = self._layouts.boxes_of(tensor, name, self._rank)
            else:
                views = self._layouts.views_of(tensor, name, self._rank, place)
                rows = [(box, (0,) * len(box.sizes)) for box, _ in views]
            for box, offsets in rows:
                if box.volume:
                    found += self._held_parts(box, local, offsets, in_pieces=in_pieces)
        self._held[name, in_pieces] = found
        return found

    def _held_parts(
        self, box: Box, local: torch.Tensor, offsets: tuple[int, ...], *, in_pieces: bool
    ) -> Iterator[HeldPart]:
        if in_pieces and not lies_as_it_is(local):
            for piece in pieces_of(box, local.element_size()):
                at = tuple(a + b - c for a, b, c in zip(offsets, piece.offsets, box.offsets, strict=True))
                yield HeldPart(piece, part_of(local, Box(at, piece.sizes)), (0,) * len(at))
            return
        if not local.is_contiguous() or local.is_conj() or local.is_neg():
            local = compat.clone(local)
            self._is_view = False
        yield HeldPart(box, local, offsets)


def _target_boxes(move: Move, target: MappedTensor, held: HeldPart) -> list[TargetBox]:
    """Cut ``move``, which takes elements of ``held.local``, into boxes of ``target``."""
    shape, steps = target.shape, strides(target.shape)
    if any(step < 0 for step in move.source_strides):
        raise ConfigError(
            f"key_map: it turns the order of elements around for `{target.name}`, which can't be sent from where they "
            "are; publish that tensor as the worker wants it, under its own name",
            field="key_map",
        )
    found: list[TargetBox] = []
    for part in retargeted(move, Move("", shape, 0, steps, 0, steps)):
        starts: list[int] = []
        rest = part.target_offset
        for step in steps:
            starts.append(rest // step)
            rest %= step
        by_dim: list[list[tuple[int, int, int]]] = [[] for _ in shape]
        for count, step, source in part.loops:
            dim = next(n for n, size in enumerate(steps) if step >= size and shape[n] > 1)
            if step % steps[dim]:
                raise _scattered(target)
            by_dim[dim].append((count, step // steps[dim], source))
        inner = [loops[-1] if loops and loops[-1][1] == 1 else (1, 1, 0) for loops in by_dim]
        outer = [loops[:-1] if loops and loops[-1][1] == 1 else loops for loops in by_dim]
        turns = [(dim, *loop) for dim, loops in enumerate(outer) for loop in loops]
        if prod(turn[1] for turn in turns) > BOXES_MAX:
            raise _scattered(target)
        for indices in product(*(range(turn[1]) for turn in turns)):
            offsets, at = list(starts), part.source_offset
            for index, (dim, _, step, source) in zip(indices, turns, strict=True):
                offsets[dim] += index * step
                at += index * source
            sizes = tuple(count for count, _, _ in inner)
            found.append(TargetBox(Box(tuple(offsets), sizes), held, at, tuple(source for _, _, source in inner)))
    return found


def _scattered(target: MappedTensor) -> ConfigError:
    return ConfigError(
        f"key_map: what this rank has of `{target.name}` are more than {BOXES_MAX} boxes of it, since the map "
        "interleaves elements across the trainer's sharding. Publish it under the trainer's own names and rearrange "
        "it in the worker, or shard it along another dimension",
        field="key_map",
    )
