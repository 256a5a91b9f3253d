"""Which tensors of a Hugging Face directory are which of a state.

The files name tensors as the model does, without the key that the model is under in the state; some are stored in
another shape than they have in memory (a key map says how), tied ones once, some that are computed not at all. `fit`
gives the same source under the state's own names, so that a load sees a checkpoint of just this state.

    one module in the state           the directory is its model's: names are the module's own
    several modules                   what begins with a module's key and a dot is that module's (a composite model);
                                      of a key that nothing begins with, the module has the names as they are
    no module, but tensors in a dict  the same, with the dict in the module's place
    a key map                         is the one that the directory was exported by, and is read backwards; what it
                                      left out on purpose keeps its value
    none                              names as they are; where these are not enough, what the model's own
                                      ``save_pretrained`` would have made of it
    what nobody takes                 is unexpected, but for what the model itself says to ignore

Guarantees: reads no tensor and changes nothing; a tensor is filled by exactly the elements that the export of it would
have had, or it is missing.
Does not: guess. A model that was saved with or without its head, or as a part of another, is a mismatch, which is
explained.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.keymap.hf_default import load_rules
from holdfast.keymap.moves import MovedTensor, rebuilt
from holdfast.plan.read import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from holdfast.keymap.moves import Move
    from holdfast.loader.sources.huggingface import HFSource
    from holdfast.state.load_plan import TensorHolder

_EXAMPLES = 3


def fit(source: HFSource, holders: Sequence[TensorHolder], *, key_map: Any) -> HFSource:
    """``source`` with its tensors under the names of the state's ``holders``.

    key_map: in any form that an export takes, for each holder; None for the model's own way. Raises `ConfigError` for
    one that can't be used with the state.
    """
    modules = [holder for holder in holders if holder.modules]
    chosen = modules or list(holders)
    fitting = _Fitting(source, alone=len(chosen) == 1)
    for holder in chosen:
        fitting.add(holder, key_map)
    return fitting.result(chosen[0].key if chosen else "")


@dataclass(frozen=True, slots=True)
class _WayBack:
    """A key map, read backwards."""

    moves: Mapping[str, tuple[Move, ...]] = field(default_factory=dict)
    """By name in the state: from tensors of the export. Empty for what the export leaves out."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the tensors of the export."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, int] = field(default_factory=dict)
    """How many elements of what is in the state the export leaves out."""
    own_names: bool = True
    """Whether a tensor may also be stored under its own name, as it is."""
    trouble: str = ""


_BY_NAME = _WayBack()


class _Fitting:
    def __init__(self, source: HFSource, *, alone: bool) -> None:
        self._source = source
        self._stored = source.tensors
        self._alone = alone
        self._tensors: dict[str, StoredTensor] = {}
        self._moved: dict[str, MovedTensor] = {}
        self._optional: set[str] = set()
        self._taken: set[str] = set()
        self._absent: dict[str, str] = {}
        """By name in the state, of what isn't stored: its name in the directory."""
        self._lacking: dict[str, list[str]] = {}
        """Of what a key map makes of other tensors: those that are not stored, or not in the right shape."""
        self._hints: list[str] = []
        self._fitted = False

    def add(self, holder: TensorHolder, key_map: Any) -> None:
        """Find the tensors of ``holder``."""
        self._fitted = True
        way = _BY_NAME
        if key_map is not None:
            way = _way_back(holder, key_map)
        elif holder.modules and not self._is_enough(holder):
            way = _own_way_back(holder)
        self._add(holder, way)

    def _is_enough(self, holder: TensorHolder) -> bool:
        """Return True if everything in ``holder`` is stored under its own name."""
        prefix = self._prefix(holder, _BY_NAME)
        names = [(prefix + name, tensor, required) for name, tensor, required in holder.tensors]
        there = {
            id(tensor)
            for name, tensor, _ in names
            if name in self._stored and self._stored[name].shape == tuple(tensor.shape)
        }
        return all(id(tensor) in there or not required for _, tensor, required in names)

    def _prefix(self, holder: TensorHolder, way: _WayBack) -> str:
        """Return the prefix of the names of ``holder`` in the directory."""
        above = f"{holder.key}." if holder.key else ""
        names = (*way.shapes, *(name for name, _, _ in holder.tensors))
        return above if not self._alone and any(above + name in self._stored for name in names) else ""

    def _add(self, holder: TensorHolder, way: _WayBack) -> None:
        above = f"{holder.key}." if holder.key else ""
        prefix = self._prefix(holder, way)
        rules = [rule for module in holder.modules for rule in load_rules(module)]
        filled: set[int] = set()
        for name, tensor, required in holder.tensors:
            if id(tensor) in filled:  # tied: what is stored a second time is to be the same
                moves = way.moves.get(name, ())
                self._taken.update({prefix + move.source for move in moves} & self._stored.keys())
                if prefix + name in self._stored and way.own_names and above + name not in self._tensors:
                    self._taken.add(prefix + name)
                    self._tensors[above + name] = dataclasses.replace(self._stored[prefix + name], name=above + name)
            elif self._find(above + name, prefix, name, tuple(tensor.shape), way):
                filled.add(id(tensor))
            elif not required or any(rule.may_lack(name) for rule in rules):
                self._optional.add(above + name)
        tied = {one: other for rule in rules for one, other in rule.tied.items()} | dict(way.aliases)
        filled |= self._tie(holder, above, tied)
        self._optional.update(above + name for name in holder.extra_states)
        for name, tensor, _ in holder.tensors:
            if id(tensor) not in filled and above + name not in self._optional:
                self._absent[above + name] = prefix + name
        # What the export has a second time; not what lies idle because the rest of its tensor isn't there.
        idle = {
            move.source for name, _, _ in holder.tensors if above + name in self._lacking for move in way.moves[name]
        }
        self._taken.update(prefix + name for name, shape in way.shapes.items() if name not in idle)
        for name in self._stored:
            if name.startswith(prefix) and any(rule.may_have(name[len(prefix) :]) for rule in rules):
                self._taken.add(name)
        if way.trouble:
            self._hints.append(way.trouble)

    def _find(self, state_name: str, prefix: str, name: str, shape: tuple[int, ...], way: _WayBack) -> bool:
        """Find one tensor of the state among the stored ones: as the key map made it, else under its own name."""
        moves = [dataclasses.replace(move, source=prefix + move.source) for move in way.moves.get(name, ())]
        needed = dict.fromkeys(move.source for move in moves)
        own = self._stored.get(prefix + name)
        lacking = [one for one in needed if not self._has(one, way.shapes[one[len(prefix) :]])]
        if needed and not lacking:
            self._taken.update(needed)
            made = rebuilt(state_name, shape, moves, self._stored)
            if isinstance(made, MovedTensor):
                self._moved[state_name] = made
                made = StoredTensor(state_name, self._stored[moves[0].source].dtype, shape, ())
            self._tensors[state_name] = made
        elif own is not None and way.own_names:
            self._taken.add(own.name)
            self._tensors[state_name] = StoredTensor(state_name, own.dtype, own.shape, own.shards)
        elif name in way.lacks and not needed:
            self._optional.add(state_name)  # it was left out on purpose
        else:
            if lacking:
                self._lacking[state_name] = lacking
            return False
        return state_name in self._tensors

    def _has(self, stored: str, shape: tuple[int, ...]) -> bool:
        tensor = self._stored.get(stored)
        return tensor is not None and tensor.shape == shape

    def _tie(self, holder: TensorHolder, above: str, partners: Mapping[str, str]) -> set[int]:
        """Fill what is tied in the model from its partner, where it is a tensor of its own here (it was sharded since).

        Returns the tensors that are filled by now, by ``id``.
        """
        groups: dict[str, list[str]] = {}
        for one, other in partners.items():
            groups.setdefault(other, [other]).append(one)
        group_of = {name: group for group in groups.values() for name in group}
        filled = {id(tensor) for name, tensor, _ in holder.tensors if above + name in self._tensors}
        for name, tensor, _ in holder.tensors:
            if id(tensor) in filled:
                continue
            stored = next((above + one for one in group_of.get(name, ()) if above + one in self._tensors), None)
            if stored is None:
                continue
            partner = self._tensors[stored]
            self._tensors[above + name] = StoredTensor(above + name, partner.dtype, partner.shape, partner.shards)
            if stored in self._moved:
                self._moved[above + name] = dataclasses.replace(self._moved[stored], name=above + name)
            self._lacking.pop(above + name, None)
            self._optional.discard(above + name)
            filled.add(id(tensor))
        return filled

    def result(self, key: str) -> HFSource:
        """The source as far as it is known now; what nobody has taken stands below ``key``, whose model it would be."""
        unexpected = [name for name in self._stored if name not in self._taken] if self._fitted else []
        for name in unexpected:
            shown = f"{key}.{name}" if key else name
            while shown in self._tensors or shown in self._absent:  # else it would be taken for what has that name
                shown += " (in the files)"
            tensor = self._stored[name]
            self._tensors[shown] = StoredTensor(shown, tensor.dtype, tensor.shape, tensor.shards)
        short = [name for name, tensor in self._tensors.items() if tensor.itemsize == 1]
        method = self._source.quantization() if short or unexpected or self._absent else None
        return dataclasses.replace(
            self._source,
            tensors=self._tensors,
            moved=self._moved,
            optional=frozenset(self._optional),
            quantized={} if method is None else dict.fromkeys(short, f"by {method}, as config.json says"),
            hint=self._hint(unexpected, method),
        )

    def _hint(self, unexpected: Sequence[str], method: str | None) -> str:
        """Suggest a reason why names don't match."""
        hints = list(self._hints)
        if method is not None:
            hints.append(f"Its config.json says that it is quantized ({method}): dequantize it, or load it as it is.")
        for name, lacking in list(self._lacking.items())[:1]:
            wrong = next((one for one in lacking if one in self._stored), None)
            found = (
                f"{wrong} is {list(self._stored[wrong].shape)} there"
                if wrong is not None
                else f"it has no {', '.join(lacking[:_EXAMPLES])}"
            )
            hints.append(f"By the key map {name} is made of other tensors in the directory, but {found}.")
        if (prefix := _prefix_on_one_side(list(self._absent.values()), unexpected)) is not None:
            side, other = ("directory", "state") if prefix[1] else ("state", "directory")
            hints.append(
                f"Names in the {side} begin with {prefix[0]!r}, which those in the {other} don't: a model with and one "
                "without its head don't fit; load into the module that was saved, or give a key_map."
            )
        return " ".join(hints)


def _prefix_on_one_side(absent: Sequence[str], unexpected: Sequence[str]) -> tuple[str, bool] | None:
    """Return a prefix that names have on one side only; True if that side is the files."""
    for longer, shorter, of_files in ((absent, set(unexpected), False), (unexpected, set(absent), True)):
        for name in longer if shorter else ():
            at = name.find(".") + 1
            while at:
                if name[at:] in shorter:
                    return name[:at], of_files
                at = name.find(".", at) + 1
    return None


# key maps ------------------------------------------------------------------------------------------------------


def _own_way_back(holder: TensorHolder) -> _WayBack:
    """Return the inverse of the model's ``save_pretrained``; names unchanged if it is unknown."""
    try:
        way = _way_back(holder, None)
    except ConfigError as error:
        return dataclasses.replace(_BY_NAME, trouble=f"Only tensors' own names were looked for: {error}.")
    return dataclasses.replace(way, own_names=True)


def _way_back(holder: TensorHolder, key_map: Any) -> _WayBack:
    from holdfast.keymap.compile import compile_key_map
    from holdfast.keymap.moves import reversed_moves, scales_of

    sources = {name: (tuple(tensor.shape), compat.dtype_name(tensor.dtype)) for name, tensor, _ in holder.tensors}
    model = holder.modules[0] if len(holder.modules) == 1 else holder.modules
    mapping = compile_key_map(key_map, sources, tied=_tied(holder.tensors), model=model)
    if scales := scales_of(mapping):
        raise ConfigError(
            f"key_map: {next(iter(scales))} is quantized with a scale per block, which can't be "
            "loaded into a state; load an export in bfloat16",
            field="key_map",
        )
    back = reversed_moves(mapping, {name: shape for name, (shape, _) in sources.items()})
    lacks = {name: prod(shape) for name, (shape, _) in sources.items() if not back.moves[name]} | back.missing
    shapes = {tensor.name: tensor.shape for tensor in mapping.tensors}
    return _WayBack(back.moves, shapes, mapping.aliases, lacks, own_names=False)


def _tied(tensors: Sequence[tuple[str, torch.Tensor, bool]]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor, _ in tensors:
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
