"""Look whether a save can be what training is at: stale weights, replicas that differ, numbers that are none.

    training thread   `StateWatch.note_step`: which groups of optimizers step, with a learning rate
                      `StateWatch.look`: copies a small sample of what other ranks hold, too -> `Look`
    finalizer thread  `Look.scan`: a part of the image for NaN and Inf; `Look.told`: what this rank tells rank 0
    rank 0            `suspicions`: compares what all ranks have told, before it publishes

Stale: since the save before, the state of an optimizer has changed, and it stepped with a learning rate above 0, but no
parameter that it belongs to has a changed byte, by the checksums that the engine computes anyway. An optimizer without
state is judged by its steps alone, if none of its parameters is one of the state's. Whole modules are
judged, never single tensors: what is frozen, gets no gradient or is too coarse for a small step doesn't change.
Replicas: every holder hashes the same pieces of the same tensors, others at each step. Numbers: a window of the image
moves on with each save.

Guarantees: bounded: `SAMPLES` pieces of `PIECE_BYTES` a save are copied on the training thread; `SCAN_SHARE` of the
bytes of a save, or `SCAN_BYTES_MIN`, in at most `SCAN_PIECES_MAX` pieces, and the `SMALLEST` smallest tensors are read
on another. Never raises, and reads nothing that a save doesn't read.
Does not: prove that a checkpoint is right.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import operator
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.format.decoding import prepare_decoding
from holdfast.format.structure import PER_RANK, SOURCE_MARK, MeshLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.commit.messages import RankNote
    from holdfast.format.structure import Structure, TensorSpec
    from holdfast.plan.write import PlacedTensor, RankPlan
    from holdfast.saver.snapshot import Snapshot

_log = logging.getLogger("holdfast")
SAMPLES: Final = 2
CANDIDATES: Final = 256
PIECE_BYTES: Final = 64 << 10
SCAN_SHARE: Final = 1 / 256
SCAN_BYTES_MIN: Final = 4 << 20
SCAN_PIECE_BYTES: Final = 256 << 10
SCAN_PIECES_MAX: Final = 48
"""Each piece takes some microseconds, however small it is."""
SMALLEST: Final = 16
"""How many of the smallest tensors are looked at in each save: where a number goes wrong, norms tell of it first."""
JUDGED_BYTES_MIN: Final = 256
"""Fewer bytes of parameters may stay the same by chance."""
NAMES_MAX: Final = 20
UNLINKED: Final = ""
"""Label of optimizer state that belongs to no parameter of the state by name."""
OUTSIDE: Final = "?"
"""Label of such state that is a copy, so that no optimizer is known to be its own."""
_SCANNED: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_Codes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
What = Literal["stale", "replicas", "nonfinite"]


class Suspicion(msgspec.Struct, frozen=True):
    """One finding about a save: its kind, up to `NAMES_MAX` names of tensors, and a sentence."""

    what: What
    tensors: tuple[str, ...]
    message: str


class Judged(msgspec.Struct, array_like=True):
    """Parameters of one label, and the optimizer state of one label, as one rank has written them."""

    nbytes: int = 0
    changed: int = 0
    states_changed: int = 0
    stepped: bool = False
    names: list[str] = []
    states: int = 0

    def add(self, other: Judged) -> None:
        self.nbytes += other.nbytes
        self.changed += other.changed
        self.states_changed += other.states_changed
        self.states += other.states
        self.stepped = self.stepped or other.stepped
        self.names = [*self.names, *other.names][:NAMES_MAX]


class RankSeen(msgspec.Struct, frozen=True, array_like=True):
    """What one rank tells of one save. compared: False where there is no save before of the same structure."""

    compared: bool
    judged: dict[str, Judged]
    samples: tuple[tuple[str, str, int], ...]
    """(name, which piece of which shard, checksum) of what other ranks may hold, too."""
    nonfinite: tuple[str, ...]


_SEEN: Final = msgspec.msgpack.Decoder(RankSeen)
prepare_decoding(RankSeen, Suspicion)


@dataclass(slots=True)
class Roles:
    """What the tensors of one structure are, by name, and which of them other ranks hold, too."""

    lazy: Mapping[str, torch.Tensor]
    structure: Structure
    label_of: dict[str, str] = field(default_factory=dict)
    """The module's key of each parameter; `OUTSIDE` for what may be a copy."""
    state_of: dict[str, str] = field(default_factory=dict)
    """The keys of the modules that optimizer state may belong to, joined; counters of steps are left out."""
    labels_of_id: dict[int, str] = field(default_factory=dict)
    ring: list[tuple[int, str, str]] = field(default_factory=list)
    """(checksum of its key, name, key) of each tensor with replicas, sorted."""
    codes: _Codes = field(default_factory=lambda: np.empty(0, np.uint64))
    """The checksums in ``ring``."""

    @classmethod
    def of(cls, snapshot: Snapshot, rank: int) -> Roles:
        lazy, structure = snapshot.lazy, snapshot.structure
        roles = cls(lazy, structure)
        states: dict[str, tuple[str, str]] = {}
        for spec in structure.tensors:
            if ".state." in spec.name and not isinstance(lazy.get(spec.name), nn.Parameter):
                owner, _, rest = spec.name.partition(".state.")
                fqn, _, leaf = rest.rpartition(".")
                if fqn and leaf != "step":
                    states[spec.name] = owner, fqn
        owned = {fqn for _, fqn in states.values()}
        held: dict[str, set[str]] = {}
        for spec in structure.tensors:
            if ".state." not in spec.name or isinstance(lazy.get(spec.name), nn.Parameter):
                roles._add_value(spec, owned, held)
        by_owner: dict[str, set[str]] = {}
        for owner, fqn in states.values():
            by_owner.setdefault(owner, set()).add(fqn)
        fits = {owner: _best_fit(fqns, held) for owner, fqns in by_owner.items()}
        for name, (owner, fqn) in states.items():
            keys = fits[owner] or {key for key, fqns in held.items() if fqn in fqns}
            unlinked = UNLINKED if name in lazy else OUTSIDE
            roles.state_of[name] = "|".join(sorted(keys)) if keys and name in lazy else unlinked
        roles.ring = sorted(roles._replicated(rank))
        roles.codes = np.array([code for code, _, _ in roles.ring], np.uint64)
        return roles

    def _add_value(self, spec: TensorSpec, owned: set[str], held: dict[str, set[str]]) -> None:
        """Add a tensor that is no optimizer's: to a module, or to those outside, which may be copies."""
        if "float" not in spec.dtype:
            return
        tensor = self.lazy.get(spec.name)
        if tensor is None:
            self.label_of[spec.name] = OUTSIDE
            return
        key, _, fqn = spec.name.partition(".")
        if spec.name in owned and fqn not in owned:  # a module whose names have no key
            key, fqn = "*", spec.name
        held.setdefault(key, set()).add(fqn)
        self.label_of[spec.name] = self.labels_of_id[id(tensor)] = key

    def _replicated(self, rank: int) -> Iterable[tuple[int, str, str]]:
        for spec in self.structure.tensors:
            if spec.name in self.lazy and PER_RANK not in spec.name and (key := _place_of(spec, self.structure, rank)):
                yield xxhash.xxh3_64_intdigest(key.encode()), spec.name, key


def _best_fit(fqns: set[str], held: Mapping[str, set[str]]) -> set[str]:
    """Return the keys of the modules that an optimizer of ``fqns`` may be of: the smallest that have all of these."""
    sizes = {key: len(names) for key, names in held.items() if fqns <= names}
    return {key for key, size in sizes.items() if size == min(sizes.values())}


def _place_of(spec: TensorSpec, structure: Structure, rank: int) -> str | None:
    """Return a key that is equal for the ranks that hold the same shard of a tensor; None where only one does."""
    if spec.layout is None:
        return spec.name
    layout = structure.layouts[spec.layout]
    if not isinstance(layout, MeshLayout) or rank not in layout.ranks:
        return None
    at, own, shared = layout.ranks.index(rank), [], False
    for size, placement in reversed(list(zip(layout.shape, layout.placements, strict=True))):
        at, coordinate = divmod(at, size)
        shared = shared or (placement.kind == "replicate" and size > 1)
        own.append("-" if placement.kind == "replicate" else str(coordinate))
    return f"{spec.name}@{','.join(reversed(own))}" if shared else None


class StateWatch:
    """Watches the saves of one manager on one rank. world: ranks that save together."""

    def __init__(self, rank: int, world: int, *, forgets: bool) -> None:
        """forgets: NaN that was found is told of again with the next save: that save didn't count."""
        self._rank, self._world, self._forgets = rank, world, forgets
        self._roles: Roles | None = None
        self._stepped: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._labels: dict[tuple[int, int], tuple[Roles, int, frozenset[str]]] = {}
        self._known: set[str] = set()
        """Tensors that had NaN or Inf when they were looked at last."""
        self._seen: set[str] = set()
        self._layout: _Layout | None = None
        self._at = 0
        """Where the window of `scan` begins, of the bytes that are looked at."""
        self._complained = False

    # Training thread. --------------------------------------------------------------------------------------------

    def note_step(self, optimizer: Any) -> None:
        """Note which groups of ``optimizer`` step with a learning rate above 0; called before each step."""
        for number, group in enumerate(optimizer.param_groups):
            rate = group.get("lr", 0.0)
            if isinstance(rate, torch.Tensor):  # reading one from a device would wait for it
                rate = 0.0 if rate.device.type != "cpu" else float(rate)
            if rate > 0.0:
                self._stepped[id(optimizer), number] = weakref.ref(optimizer)

    def look(self, snapshot: Snapshot, step: int | None) -> Look | None:
        """Return what is seen of a capture on the training thread; the state may change once this has returned."""
        try:
            roles = self._roles
            if roles is None or roles.lazy is not snapshot.lazy or roles.structure is not snapshot.structure:
                roles = self._roles = Roles.of(snapshot, self._rank)
            stepped, self._stepped = self._stepped, {}
            labels = frozenset().union(*(self._labels_of(key, at(), roles, snapshot) for key, at in stepped.items()))
            return Look(self, roles, labels, self._samples(roles, step))
        except Exception as error:  # noqa: BLE001 - looking is no reason for a save to fail
            self.complain(error)
            return None

    def _labels_of(self, key: tuple[int, int], optimizer: Any, roles: Roles, snapshot: Snapshot) -> frozenset[str]:
        if optimizer is None or key[1] >= len(optimizer.param_groups):
            return frozenset()
        params = optimizer.param_groups[key[1]]["params"]
        known = self._labels.get(key)
        if known is None or known[0] is not roles or known[1] != len(params):
            ids = {id(param) for param in params}
            found = {roles.labels_of_id[one] for one in ids if one in roles.labels_of_id}
            if not found:
                found = {UNLINKED if ids & snapshot.update_ids else OUTSIDE}
            known = self._labels[key] = roles, len(params), frozenset(found)
        return known[2]

    def _samples(self, roles: Roles, step: int | None) -> list[_Sample]:
        if self._world == 1 or step is None or not roles.ring:
            return []
        seed = xxhash.xxh3_64_intdigest(b"%d" % step)
        chosen = [roles.ring[at] for at in _chosen(roles.codes, seed)]
        return [found for row in chosen if (found := _sample(roles.lazy[row[1]], *row, seed)) is not None]

    # Finalizer thread. -------------------------------------------------------------------------------------------

    def scan(self, roles: Roles, plan: RankPlan, bytes_of: Callable[[PlacedTensor], torch.Tensor]) -> tuple[str, ...]:
        """Return the tensors in which NaN or Inf appeared, of those that are looked at in this save."""
        layout = self._layout_of(roles, plan)
        left = int(min(layout.total, max(SCAN_BYTES_MIN, layout.total * SCAN_SHARE)))
        window = layout.window(self._at, left)
        self._at += sum(end - start for _, start, end in window)
        fresh = []
        for placed, start, end in [*layout.smallest, *window]:
            found = _nonfinite(bytes_of(placed)[start:end].view(_SCANNED[placed.dtype]))
            if found and placed.name not in self._known and (found == "nan" or placed.name in self._seen):
                fresh.append(placed.name)
            if found and not (self._forgets and placed.name in fresh):
                self._known.add(placed.name)
            self._seen.add(placed.name)
        return tuple(dict.fromkeys(fresh))[:NAMES_MAX]

    def _layout_of(self, roles: Roles, plan: RankPlan) -> _Layout:
        if self._layout is None or self._layout.plan is not plan or self._layout.roles is not roles:
            self._layout = _Layout.of(roles, plan)
            self._at = 0
        return self._layout

    def judge(self, roles: Roles, plan: RankPlan, same: bytes, stepped: Iterable[str]) -> dict[str, Judged]:
        """Return what has changed since the save before, by label."""
        found = {label: Judged(stepped=True) for label in stepped}
        for label, places in self._layout_of(roles, plan).labels.items():
            row = found.setdefault(label, Judged())
            row.nbytes, row.names = places.nbytes, places.names
            row.changed = len(places.values) - sum(map(same.__getitem__, places.values))
            row.states = len(places.states)
            row.states_changed = len(places.states) - sum(map(same.__getitem__, places.states))
        return found

    def complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("saves of this state can't be looked at for what is suspicious: %r", error)


def _chosen(codes: _Codes, seed: int) -> list[int]:
    """Return at which of the sorted ``codes`` the tensors are that have their turn: each as often as any other.

    Those with the least scores, of `CANDIDATES` from ``seed`` on; codes alone would leave out what lies close together.
    """
    start = int(np.searchsorted(codes, np.uint64(seed)))
    at = np.arange(start, start + min(CANDIDATES, len(codes))) % len(codes)
    score = codes[at] ^ np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # as splitmix64 ends
        score = (score ^ (score >> np.uint64(shift))) * np.uint64(factor)
    found: list[int] = at[np.argsort(score ^ (score >> np.uint64(31)))[:SAMPLES]].tolist()
    return found


@dataclass(slots=True)
class _Sample:
    name: str
    where: str
    data: torch.Tensor
    event: Any = None

    def checksum(self) -> int:
        if self.event is not None:
            self.event.synchronize()
        return xxhash.xxh3_64_intdigest(compat.host_memory(compat.as_bytes(self.data.cpu())))


def _sample(tensor: torch.Tensor, code: int, name: str, key: str, seed: int) -> _Sample | None:
    """Return a copy of a piece of ``tensor``, the same piece on every rank; None if it isn't plain memory."""
    local = compat.local_tensor(tensor).detach()
    if not local.is_contiguous() or not local.numel() or local.device.type not in ("cpu", "cuda"):
        return None
    count = min(local.numel(), max(1, PIECE_BYTES // local.element_size()))
    start = (code ^ seed) % (local.numel() - count + 1)
    data = local.view(-1)[start : start + count].clone()
    event = None
    if data.is_cuda:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return _Sample(name, f"{key}[{start}:{start + count}]", data, event)


@dataclass(slots=True)
class Look:
    """What was seen of one capture."""

    _watch: StateWatch
    _roles: Roles
    _stepped: frozenset[str]
    _samples: list[_Sample]
    _nonfinite: tuple[str, ...] = ()

    def scan(self, plan: RankPlan, bytes_of: Callable[[PlacedTensor], torch.Tensor]) -> None:
        """Look at a part of the image; while the engine writes it."""
        try:
            self._nonfinite = self._watch.scan(self._roles, plan, bytes_of)
        except Exception as error:  # noqa: BLE001 - looking is no reason for a save to fail
            self._watch.complain(error)

    def told(self, plan: RankPlan, same: bytes) -> bytes:
        """Return the message to rank 0. same: see `Attempt.same`."""
        try:
            judged = self._watch.judge(self._roles, plan, same, self._stepped) if same else {}
            samples = tuple((one.name, one.where, one.checksum()) for one in self._samples)
            return msgspec.msgpack.encode(RankSeen(len(same) == len(plan.tensors), judged, samples, self._nonfinite))
        except Exception as error:  # noqa: BLE001 - looking is no reason for a save to fail
            self._watch.complain(error)
            return b""


@dataclass(slots=True)
class _Places:
    """Where in a plan the tensors of one label are."""

    values: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    nbytes: int = 0
    names: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Layout:
    """What a plan has to look at: found once, used by each save of the plan."""

    roles: Roles
    plan: RankPlan
    labels: dict[str, _Places] = field(default_factory=dict)
    rows: list[PlacedTensor] = field(default_factory=list)
    """What is looked at for numbers, one behind the other; ``ends``: at which byte of all each ends."""
    ends: list[int] = field(default_factory=list)
    smallest: list[tuple[PlacedTensor, int, int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.ends[-1] if self.ends else 0

    @classmethod
    def of(cls, roles: Roles, plan: RankPlan) -> _Layout:
        layout = cls(roles, plan)
        for at, placed in enumerate(plan.tensors):
            name = placed.source.partition(SOURCE_MARK)[0]
            if (label := roles.state_of.get(name)) is not None:
                layout.labels.setdefault(label, _Places()).states.append(at)
            elif (label := roles.label_of.get(name)) is not None:
                places = layout.labels.setdefault(label, _Places())
                places.values.append(at)
                places.nbytes += placed.nbytes
                if len(places.names) < NAMES_MAX:
                    places.names.append(placed.name)
            if placed.dtype in _SCANNED and placed.nbytes and name in roles.lazy:
                layout.rows.append(placed)
        layout.ends = list(itertools.accumulate(placed.nbytes for placed in layout.rows))
        smallest = sorted(layout.rows, key=operator.attrgetter("nbytes"))[:SMALLEST]
        layout.smallest = [(placed, 0, placed.nbytes) for placed in smallest if placed.nbytes <= SCAN_PIECE_BYTES]
        return layout

    def window(self, at: int, left: int) -> list[tuple[PlacedTensor, int, int]]:
        """Return the pieces from byte ``at`` of all on, going round; ``left`` bytes, unless they are many pieces."""
        found: list[tuple[PlacedTensor, int, int]] = []
        at %= max(1, self.total)
        number = bisect.bisect_right(self.ends, at)
        while left > 0 and self.rows and len(found) < SCAN_PIECES_MAX:
            placed = self.rows[number]
            start = at - (self.ends[number] - placed.nbytes)
            end = min(placed.nbytes, start + SCAN_PIECE_BYTES)
            found.append((placed, start, end))
            left -= end - start
            at += end - start
            if end == placed.nbytes:
                number = (number + 1) % len(self.rows)
                at %= self.total
        return found


def _nonfinite(values: torch.Tensor) -> Literal["", "nan", "inf"]:
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if bool(torch.isfinite(total)):
        return ""
    if bool(torch.isnan(values).any()):
        return "nan"
    return "inf" if bool(torch.isinf(values).any()) else ""  # else the sum was too large


# On rank 0. ----------------------------------------------------------------------------------------------------------


def suspicions(notes: Sequence[RankNote]) -> list[Suspicion]:
    """Return what is suspicious about a save, by what its ranks have told; never raises."""
    try:
        told = {note.rank: _SEEN.decode(note.look) for note in notes if note.look}
        return [*_stale(list(told.values())), *_differing(told), *_nonfinite_in(told)]
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        _log.warning("what ranks have seen of a save can't be compared: %r", error)
        return []


def _stale(told: Sequence[RankSeen]) -> list[Suspicion]:
    if not told or not all(one.compared for one in told):
        return []
    labels: dict[str, Judged] = {}
    for label, row in itertools.chain.from_iterable(one.judged.items() for one in told):
        labels.setdefault(label, Judged()).add(row)
    modules = [label for label, row in labels.items() if row.nbytes and label != OUTSIDE]
    found = []
    for label, row in labels.items():
        stateless = label == UNLINKED and not row.states  # as plain SGD of other parameters than those saved
        if not row.states_changed and not stateless:
            continue
        judged = Judged()
        unlinked = label in (UNLINKED, OUTSIDE)
        for key in (modules or [OUTSIDE]) if unlinked else label.split("|"):
            judged.add(labels.get(key, Judged()))
        stepped = row.stepped if unlinked else judged.stepped
        if stepped and not judged.changed and judged.nbytes >= JUDGED_BYTES_MIN:
            where = "" if unlinked else f" of {label}"
            message = (
                f"the optimizer has stepped since the save before, but no byte of the parameters{where} has changed: "
                "the state may hold a copy, or an old object, in place of the module that is trained"
            )
            found.append(Suspicion("stale", tuple(judged.names), message))
    return found


def _differing(told: Mapping[int, RankSeen]) -> list[Suspicion]:
    by_piece: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, one in told.items():
        for name, where, checksum in one.samples:
            by_piece.setdefault((name, where), {}).setdefault(checksum, []).append(rank)
    differing = {piece: found for piece, found in by_piece.items() if len(found) > 1}
    if not differing:
        return []
    (name, where), found = next(iter(differing.items()))
    usual = Counter({checksum: len(ranks) for checksum, ranks in found.items()}).most_common(1)[0][0]
    odd = sorted(rank for checksum, ranks in found.items() if checksum != usual for rank in ranks)
    names = tuple(dict.fromkeys(name for name, _ in differing))[:NAMES_MAX]
    message = (
        f"ranks hold different values of {name} (elements {where.rpartition('[')[2][:-1]} of their shard): "
        f"{_listed(odd)} of {sum(map(len, found.values()))} differ from the others. One rank's is saved; a device may "
        "be faulty, or the ranks have drifted apart"
    )
    return [Suspicion("replicas", names, message)]


def _nonfinite_in(told: Mapping[int, RankSeen]) -> list[Suspicion]:
    names = tuple(dict.fromkeys(name for one in told.values() for name in one.nonfinite))
    if not names:
        return []
    ranks = [rank for rank, one in told.items() if one.nonfinite]
    message = f"NaN or Inf has appeared in {names[0]}, written by rank {ranks[0]}; training from here is likely lost"
    return [Suspicion("nonfinite", names[:NAMES_MAX], message)]


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
