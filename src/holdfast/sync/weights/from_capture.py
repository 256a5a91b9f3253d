"""Take a publisher rank's weights from a checkpoint's capture of the same moment, in host memory.

    SharedCapture (of the last save) -> `captured_of`: names -> (all ranks agree) -> `Shared`: table and memory

A name is taken from the capture if its memory is what was captured, as the same tensor; never a buffer, which a save
copies at once because it may change, nor what is published as another dtype or in parts. Such a name is cut as in the
checkpoint, so that each rank has what it sends.

Guarantees: ranks that agree on the names ``apart`` have tables that together tile every tensor.
Assumes: the ranks that save are those that publish, in the same order; the training thread, with no update since.
Does not: keep the capture (`SharedCapture.keep`), or copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.format.structure import is_per_rank
from holdfast.state.entries import local_tensor
from holdfast.sync.weights.buckets import Piece
from holdfast.sync.weights.pieces import Local, TensorParts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from holdfast.format.structure import Structure, TensorSpec
    from holdfast.plan.write import PlacedTensor
    from holdfast.saver.capture import Capture, DeliveryPlan, KeepingLease, SharedCapture
    from holdfast.sync.weights.pieces import Outgoing, Weights, WeightsSpec


class Captured(NamedTuple):
    """A capture, and the weights in it; ``names``: their names in the capture, by their own names."""

    held: SharedCapture
    capture: Capture
    plan: DeliveryPlan
    names: Mapping[str, str]

    @property
    def number(self) -> int:
        """Number of the save, the same on every rank."""
        assert self.capture.number is not None
        return self.capture.number

    def keep(self) -> KeepingLease:
        """Call `SharedCapture.keep`."""
        return self.held.keep()


def captured_of(held: SharedCapture, look: WeightsSpec, weights: Weights, *, timeout_s: float) -> Captured | None:
    """Return the ``weights`` that are in the capture; None without one, or if they have changed. Waits for it."""
    capture = held.wait_unchanged(timeout_s)
    if capture is None or capture.plan is None:
        return None
    plan = capture.plan
    known = plan.structures[plan.digest]
    theirs = {spec.name: _kind(spec, known) for spec in known.tensors if not is_per_rank(spec.path)}
    mine = {spec.name: _kind(spec, look.structure) for spec in look.structure.tensors}
    by_memory: dict[Any, list[str]] = {}
    for name, staged in capture.snapshot.lazy.items():
        by_memory.setdefault(_memory(staged), []).append(name)
    by_memory.pop(None, None)
    names: dict[str, str] = {}
    for name, tensor in weights.items():
        if isinstance(tensor, TensorParts):
            continue
        found = [other for other in by_memory.get(_memory(tensor), ()) if theirs.get(other) == mine[name]]
        if found:  # the same on all ranks, even if tied parameters have several names
            names[name] = min(found, key=lambda other: (not f".{other}".endswith(f".{name}"), other))
    return Captured(held, capture, plan, names)


class Shared:
    """The pieces that this rank sends if all names except ``apart`` are as in a capture. Made once per structure.

    apart: names missing in the capture on any rank; on this one all that ``captured`` lacks.
    """

    def __init__(self, captured: Captured, outgoing: Outgoing, look: WeightsSpec, apart: frozenset[str]) -> None:
        self._made_for = captured.plan, captured.names, outgoing, apart
        names_of: dict[str, list[str]] = {}
        for name, source in captured.names.items():
            if name not in apart:
                names_of.setdefault(source, []).append(name)
        rows: list[tuple[Piece, int | PlacedTensor]] = [
            (piece, number) for number, piece in enumerate(outgoing.table) if piece.name in apart
        ]
        for placed in captured.plan.rank_plan.tensors:
            rows += [
                (
                    Piece(name, placed.dtype, placed.shape, placed.offsets, placed.sizes, look.ties.get(name, "")),
                    placed,
                )
                for name in names_of.get(placed.source, ())
            ]
        rows.sort(key=lambda row: (look.place_of(row[0].name), row[0].offsets))
        table = tuple(piece for piece, _ in rows)
        self.table = outgoing.table if table == outgoing.table else table
        self._at = [at for _, at in rows]
        self.lying = frozenset(number for number, at in enumerate(self._at) if not isinstance(at, int))
        """Numbers of the pieces whose memory is in the capture."""

    def is_for(self, captured: Captured, outgoing: Outgoing, apart: frozenset[str]) -> bool:
        """Return True if a new one would be equal."""
        plan, names, known, others = self._made_for
        return plan is captured.plan and known is outgoing and (names, others) == (captured.names, apart)

    def locals(self, captured: Captured, live: Sequence[Local]) -> list[Local]:
        """Return the memory of each piece; ``live``: the memory of each piece of the plain table."""
        buffer = captured.capture.buffer
        assert buffer is not None
        return [
            live[at] if isinstance(at, int) else Local(piece.box, buffer.view_of(at))
            for piece, at in zip(self.table, self._at, strict=True)
        ]


def _kind(spec: TensorSpec, structure: Structure) -> tuple[Any, ...]:
    return spec.shape, spec.dtype, None if spec.layout is None else structure.layouts[spec.layout]


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the memory of this rank's part as a tensor; None if it has no elements."""
    local = local_tensor(tensor)
    if not local.numel():
        return None
    views = local.is_conj(), local.is_neg()
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), views
