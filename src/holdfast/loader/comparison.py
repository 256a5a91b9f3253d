"""Compare two checkpoints: which tensors and objects one has that the other lacks, and how far the others moved.

    names -> same checksums of the same boxes? -> equal, nothing is read
                                        else   -> read both by parts -> bits differ? -> by how much

Guarantees: never writes. Tensors are compared bit by bit, so that -0 differs from 0, and a NaN equals itself. What is
read is verified. Memory: two parts of at most `PART_BYTES`, and what their statistics need, for any tensor.
Without ``values`` no tensor is read, torch is not imported, and a tensor whose checksums can't be compared (another
sharding, stock DCP) counts as unknown.
Does not: decide which of the differences matter (`resume_findings` says which keep a run from going on alike).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.boxes import row_blocks, whole
from holdfast.cores import take_turns
from holdfast.errors import ConfigError
from holdfast.format.manifest import METADATA_NAME
from holdfast.loader.outline import outline_of
from holdfast.loader.sources.holdfast import telling_apart
from holdfast.storage.object_storage import without_attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from holdfast.boxes import Box
    from holdfast.format.manifest import Manifest
    from holdfast.loader.outline import Outline
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.loader.values import Values
    from holdfast.plan.read import StoredTensor

PART_BYTES: Final = 8 << 20
_BATCH: Final = 64
"""So many small tensors are read at once: each read opens files."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What a tensor is, whatever its values."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class TensorChange:
    """A tensor that both have, with other bits.

    Attributes:
        elements, changed: how many it has, and how many of them have other bits.
        max_abs: the largest absolute difference of elements that are finite on both sides.
        relative: the length (2-norm) of the difference against that of the first; infinite if that is 0.
        cosine: of the angle between both; None if one of them is 0.
        non_finite: how many elements are NaN or infinite, in the first and in the second.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int = 0
    max_abs: float = 0.0
    relative: float = 0.0
    cosine: float | None = None
    non_finite: tuple[int, int] = (0, 0)

    @property
    def share(self) -> float:
        """Share of its elements that changed, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(slots=True)
class Comparison:
    """What two checkpoints differ in, by name. ``unknown``: tensors that were not read, and have no checksums alike."""

    added: dict[str, TensorKind] = field(default_factory=dict)
    removed: dict[str, TensorKind] = field(default_factory=dict)
    reshaped: dict[str, tuple[TensorKind, TensorKind]] = field(default_factory=dict)
    changed: list[TensorChange] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    """Tensors with other checksums, of which the values were not asked for."""
    unknown: list[str] = field(default_factory=list)
    equal: int = 0
    objects_added: list[str] = field(default_factory=list)
    objects_removed: list[str] = field(default_factory=list)
    objects_changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Texts of both values, short ones; empty texts if values were not asked for."""
    objects_unknown: list[str] = field(default_factory=list)
    objects_equal: int = 0
    files: list[str] = field(default_factory=list)
    """Extra files that only one has, or with another content."""

    @property
    def is_same(self) -> bool:
        """Return True if no difference was found; see `unknown` for what was not looked at."""
        found = (self.added, self.removed, self.reshaped, self.changed, self.moved, self.files)
        return not any((*found, self.objects_added, self.objects_removed, self.objects_changed))


def compare(
    first: CheckpointSource,
    second: CheckpointSource,
    *,
    takes: Callable[[str], bool] | None = None,
    values: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Return what ``second`` differs in from ``first``.

    takes: chooses names of tensors and objects; None for all, and extra files. values: read tensors and objects whose
    checksums differ. progress: called with (bytes done, bytes in all). Raises `CheckpointCorrupt`, `StorageError`,
    `CheckpointReplaced`.
    """
    found, everything = Comparison(), takes is None
    takes = takes or (lambda _: True)
    with telling_apart(first), telling_apart(second):
        one = outline_of(first)
        other = outline_of(second, like=one)
        moved, unknown = _sorted_out(found, one, other, takes)
        if values:
            _compare_values(found, first, second, sorted([*moved, *unknown]), progress)
        else:
            found.moved, found.unknown = moved, unknown
        _compare_objects(found, (first, one), (second, other), takes, values=values)
    found.files = _other_files(first.manifest, second.manifest) if everything else []
    return found


def _sorted_out(
    found: Comparison, first: Outline, second: Outline, takes: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Note what only one has, and what is equal by its checksums; return the names of the rest, as `Outline.unlike`."""
    ones, others = first.kinds, second.kinds
    moved, unknown = (sorted(filter(takes, names)) for names in first.unlike(second))
    for name, kind in ones.items() if ones != others else ():
        other = others.get(name)
        if other == kind or not takes(name):
            continue
        if other is None:
            found.removed[name] = TensorKind(*kind)
        else:
            found.reshaped[name] = TensorKind(*kind), TensorKind(*other)
    found.added = {name: TensorKind(*others[name]) for name in sorted(others.keys() - ones.keys()) if takes(name)}
    found.removed, found.reshaped = dict(sorted(found.removed.items())), dict(sorted(found.reshaped.items()))
    both = sum(map(takes, ones)) - len(found.removed)
    found.equal = both - len(found.reshaped) - len(moved) - len(unknown)
    return moved, unknown


# Values -----------------------------------------------------------------------------------------------------------


def _compare_values(
    found: Comparison,
    first: CheckpointSource,
    second: CheckpointSource,
    names: Sequence[str],
    progress: Callable[[int, int], object] | None,
) -> None:
    total = 2 * sum(_nbytes(first.tensors[name]) for name in names)
    done = 0
    for batch in _batches(first, names):
        changes = _changes(first, second, batch)
        found.changed += [change for change in changes if change.changed]
        found.equal += sum(not change.changed for change in changes)
        done += 2 * sum(_nbytes(first.tensors[name]) for name in batch)
        if progress is not None:
            progress(done, total)


def _nbytes(tensor: StoredTensor) -> int:
    return whole(tensor.shape).volume * tensor.itemsize


def _batches(source: CheckpointSource, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield names of tensors that are small together, or of one that is large."""
    batch: list[str] = []
    nbytes = 0
    for name in names:
        size = _nbytes(source.tensors[name])
        if batch and (nbytes + size > PART_BYTES or len(batch) == _BATCH):
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += size
    if batch:
        yield batch


def _changes(first: CheckpointSource, second: CheckpointSource, names: Sequence[str]) -> list[TensorChange]:
    """Compare tensors, which together, or one of them in parts, need little memory."""
    from holdfast.loader.read import read_boxes  # imports torch

    found: list[TensorChange] = []
    parts = [(name, box) for name in names for box in _parts_of(first.tensors[name])]
    sums = {name: DifferenceSums() for name in names}
    step = len(parts) if len(names) > 1 else 1
    for at in range(0, len(parts), step):
        some = parts[at : at + step]
        ones, others = read_boxes(first, some), read_boxes(second, some)
        take_turns(
            [partial(sums[name].add, one, other) for (name, _), one, other in zip(some, ones, others, strict=True)],
            1 if step == 1 else 2,
        )
    for name in names:
        tensor = first.tensors[name]
        found.append(sums[name].change(name, tensor.dtype, tensor.shape))
    return found


def _parts_of(tensor: StoredTensor) -> Iterator[Box]:
    return row_blocks(whole(tensor.shape), max(1, PART_BYTES // tensor.itemsize))


class DifferenceSums:
    """Sums over parts of a tensor and of its other version: elements with other bits, and by how much they differ.

    Of two dtypes, bits are those of the numbers in float64, where a NaN is a NaN.
    """

    __slots__ = ("changed", "dot", "elements", "max_abs", "non_finite", "squares")

    def __init__(self) -> None:
        self.elements = self.changed = 0
        self.max_abs = 0.0
        self.squares = [Decimal(0)] * 3
        """Of the first, of the second, and of their difference."""
        self.dot = Decimal(0)
        self.non_finite = [0, 0]

    def add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Take in a part. Raises `ConfigError` for dtypes that can't be compared."""
        import numpy as np
        import torch

        from holdfast._torch_compat import as_bytes
        from holdfast.loader.values import sum_of_products

        if one.dtype != other.dtype:
            one, other = (torch.where(each.isnan(), math.nan, each) for each in map(_numbers, (one, other)))
            if one.shape != other.shape:
                raise ConfigError("these dtypes can't be compared by their numbers")
        mine, theirs = (as_bytes(each.contiguous()).reshape(-1, one.element_size()) for each in (one, other))
        changed = (mine != theirs).any(dim=1)
        self.elements += one.numel()
        self.changed += int(changed.sum())
        a = _numbers(one).reshape(-1)
        b = _numbers(other).reshape(-1) if changed.any() else a
        sides = torch.isfinite(a), torch.isfinite(b)
        for side in (0, 1):
            self.non_finite[side] += int((~sides[side]).sum())
        both = sides[0] & sides[1]
        if not both.all():  # else no copies
            a, b = (a[both], b[both]) if b is not a else (a[both],) * 2
        first, second = a.numpy(), b.numpy()
        square = sum_of_products(first, first)
        self.squares[0] += square
        self.squares[1] += square if b is a else sum_of_products(second, second)
        self.dot += square if b is a else sum_of_products(first, second)
        if b is a:
            return
        with np.errstate(over="ignore"):
            difference = _apart(one, other) if one.dtype in (torch.int64, torch.uint64) else second - first
        most, times = float(np.abs(difference).max(initial=0.0)), 1
        if math.isinf(most):
            difference, times = second / 2 - first / 2, 4
        self.max_abs = max(self.max_abs, most)
        self.squares[2] += times * sum_of_products(difference, difference)

    @property
    def relative(self) -> float:
        """Return the length of the difference against that of the first; infinite if that is 0."""
        first, _, difference = self.squares
        return float((difference / first).sqrt()) if first else (math.inf if difference else 0.0)

    @property
    def cosine(self) -> float | None:
        """Return that of the angle between both; None if one of them is 0."""
        first, second, _ = self.squares
        return max(-1.0, min(1.0, float(self.dot / (first * second).sqrt()))) if first and second else None

    def change(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorChange:
        """Return what became of the tensor."""
        made = TensorChange(name, dtype, shape, self.elements, self.changed, self.max_abs, self.relative, self.cosine)
        made.non_finite = (self.non_finite[0], self.non_finite[1])
        return made


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as numbers that can be subtracted: complex ones as pairs, packed ones as bytes."""
    import torch

    from holdfast._torch_compat import as_bytes

    flat = tensor.reshape(-1)
    if tensor.is_complex():
        return torch.view_as_real(flat.to(torch.complex128))
    try:
        return flat.to(torch.float64)
    except (RuntimeError, NotImplementedError):  # packed fp4, and what else torch can't convert
        return as_bytes(flat.contiguous()).to(torch.float64)


def _apart(one: torch.Tensor, other: torch.Tensor) -> Values:
    """Return how far 64-bit whole numbers are apart: subtracted as such, of which float64 has only 53 bits."""
    import numpy as np

    a, b = (tensor.reshape(-1).numpy() for tensor in (one, other))
    # Modulo 2**64, so that the widest distance of signed ones has room too.
    apart: np.ndarray[Any, Any] = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return apart.astype(np.float64)


# Objects and files ------------------------------------------------------------------------------------------------

_TEXT_MAX: Final = 120


def _compare_objects(
    found: Comparison,
    first: tuple[CheckpointSource, Outline],
    second: tuple[CheckpointSource, Outline],
    takes: Callable[[str], bool],
    *,
    values: bool,
) -> None:
    ones, others = ({name for name in outline.objects if takes(name)} for _, outline in (first, second))
    found.objects_added, found.objects_removed = sorted(others - ones), sorted(ones - others)
    both = sorted(ones & others)
    if not values:
        found.objects_unknown = both
        return
    from holdfast.loader.checkpoint import read_objects
    from holdfast.loader.object_digest import are_equal  # imports torch

    mine, theirs = read_objects(first[0], both), read_objects(second[0], both)
    for name in both:
        if are_equal(mine[name], theirs[name]):
            found.objects_equal += 1
        else:
            found.objects_changed[name] = _text(mine[name]), _text(theirs[name])


def _text(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply; a whole number of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"


def _other_files(first: Manifest | None, second: Manifest | None) -> list[str]:
    if first is None or second is None:
        return []
    ones, others = (
        {without_attempt(file.name, manifest.attempt): file.digest for file in manifest.files}
        for manifest in (first, second)
    )
    names = {*ones, *others} - {METADATA_NAME}
    return sorted(name for name in names if ones.get(name) != others.get(name))


# What it means for a run ------------------------------------------------------------------------------------------


def resume_findings(first: CheckpointSource, second: CheckpointSource, found: Comparison) -> list[str]:
    """Return why two runs that resume from these would not go on alike, a sentence each; empty if they would.

    Both have to have been compared whole, with values. Stock DCP tells neither step nor number of ranks: its runs keep
    them in their objects.
    """
    said: list[str] = []
    for which, source in (("first", first), ("second", second)):
        manifest = source.manifest
        if manifest is not None and not manifest.resumable:
            said.append(f"the {which} holds a model only: no run can resume from it")
    if first.manifest is not None and second.manifest is not None and first.manifest.step != second.manifest.step:
        one, other = ("none" if step is None else step for step in (first.manifest.step, second.manifest.step))
        said.append(f"the step is {one} in the first, {other} in the second: a run goes on from it")
    if None not in (first.world, second.world) and first.world != second.world:
        said.append(
            f"they were saved by {first.world} and {second.world} ranks: values of each rank, such as random states, "
            "are derived anew on another number of ranks"
        )
    lacking = {"the first lacks": (found.added, found.objects_added)}
    lacking["the second lacks"] = (found.removed, found.objects_removed)
    for what, (tensors, objects) in lacking.items():
        said += [f"{what} {_counted(names, key)}" for key, names in _by_key([*tensors, *objects]).items()]
    said += [f"{_counted(names, key)} with another shape or dtype" for key, names in _by_key(found.reshaped).items()]
    moved = [change.name for change in found.changed]
    said += [f"{_counted(names, key)} with other values" for key, names in _by_key(moved).items()]
    for name, (one, other) in found.objects_changed.items():
        said.append(f"{name} is {one} in the first, {other} in the second")
    if found.files:
        said.append(f"extra files differ: {', '.join(found.files[:8])}")
    return said


def _by_key(names: Sequence[str] | Mapping[str, object]) -> dict[str, list[str]]:
    """Return names by their top-level key."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".", 1)[0], []).append(name)
    return found


def _counted(names: Sequence[str], key: str) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} values of {key} ({names[0]}, …)"
