"""Any chain of supported operations, on real tensors and on stand-ins for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_models import filled, sources_of

from holdfast.boxes import Box
from holdfast.keymap.moves import (
    Move,
    first_defect,
    once_each,
    relocated,
    restrict_source,
    restrict_target,
    reversed_moves,
    uncovered,
)
from holdfast.keymap.tracing import trace

Operation = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def shapes(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    """A factorization of ``numel``."""
    sizes: list[int] = []
    rest = numel
    while rest > 1 and len(sizes) < 4:
        size = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        sizes.append(size)
        rest //= size
    return (*sizes, rest)


def assigned(tensor: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """Each ``step``-th slice of a dimension, written first or last, over a copy of another order."""
    out = torch.empty_like(tensor)
    out.copy_(tensor.flip(dim))
    for start in reversed(range(step)):
        out.movedim(dim, 0)[start::step] = tensor.movedim(dim, 0)[start::step]
    return out


def doubled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.flip(dim)], dim).narrow(dim, tensor.shape[dim] // 2, tensor.shape[dim])


@st.composite
def operations(draw: st.DrawFn, tensor: torch.Tensor) -> Operation:
    kinds = ["reshape", "permute", "clone"]
    if tensor.dim() and tensor.numel():
        kinds += ["slice", "flip", "stack", "split and cat", "index", "roll", "repeat", "assign", "double", "select"]
    kind = draw(st.sampled_from(kinds))
    if kind == "clone":
        return torch.clone
    if kind == "reshape":
        shape = draw(shapes(tensor.numel())) if tensor.numel() else tuple(tensor.shape)
        return lambda t: t.reshape(shape)
    if kind == "permute":
        order = draw(st.permutations(range(tensor.dim())))
        return lambda t: t.permute(order)
    dim = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    if kind == "slice":
        start, stop = draw(st.integers(0, size - 1)), draw(st.integers(1, size))
        step = draw(st.integers(1, 3))
        return lambda t: t.movedim(dim, 0)[start : max(stop, start + 1) : step].movedim(0, dim)
    if kind == "flip":
        return lambda t: t.flip(dim)
    if kind == "stack":
        return lambda t: torch.stack(t.unbind(dim), dim)
    if kind == "split and cat":
        parts = draw(st.permutations(range(len(tensor.split(2, dim)))))
        return lambda t: torch.cat([t.split(2, dim)[number] for number in parts], dim)
    if kind == "index":
        index = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
        return lambda t: t.index_select(dim, torch.tensor(index))
    if kind == "roll":
        shift = draw(st.integers(-5, 5))
        return lambda t: t.roll(shift, dim)
    if kind == "repeat" and tensor.numel() < 60:
        times = [draw(st.integers(1, 2)) if d == dim else 1 for d in range(tensor.dim())]
        return lambda t: t.repeat(times)
    if kind == "assign":
        step = draw(st.integers(1, 3))
        return lambda t: assigned(t, dim, step)
    if kind == "double":
        return lambda t: doubled(t, dim)
    if kind == "select":
        place = draw(st.integers(0, size - 1))
        return lambda t: torch.stack([t.select(dim, place), t.select(dim, 0)])
    return lambda t: t.transpose(0, dim)


@settings(max_examples=250)
@given(st.data())
def test_chains_of_operations(data: st.DataObject) -> None:
    state = {
        "a": torch.arange(48.0).view(data.draw(shapes(48))),
        "b": torch.arange(100.0, 130.0).view(data.draw(shapes(30))),
    }
    real = torch.cat([state["a"].flatten(), state["b"].flatten()]) if data.draw(st.booleans()) else state["a"]
    joined = real is not state["a"]
    chain: list[Operation] = []
    for _ in range(data.draw(st.integers(1, 6))):
        operation = data.draw(operations(real))
        real = operation(real)
        chain.append(operation)

    def run(given_state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensor = given_state["a"]
        if joined:
            tensor = torch.cat([tensor.flatten(), given_state["b"].flatten()])
        for operation in chain:
            tensor = operation(tensor)
        return {"out": tensor}

    (found,) = trace(run, sources_of(state))
    assert found.shape == tuple(real.shape)
    assert first_defect(found.moves, real.numel()) is None
    assert torch.equal(filled(found, state), real)
    check_parts(found.moves, state, real, data)


def check_parts(
    moves: tuple[Move, ...], state: dict[str, torch.Tensor], real: torch.Tensor, data: st.DataObject
) -> None:
    """From shards of the sources, and by blocks of the target, the same comes together."""
    made = torch.full((real.numel(),), -1.0)
    cut = data.draw(st.integers(0, real.numel()))
    for name, source in state.items():
        dim = data.draw(st.integers(0, source.dim() - 1))
        middle = data.draw(st.integers(0, source.shape[dim]))
        for start, stop in ((0, middle), (middle, source.shape[dim])):
            shard = source.narrow(dim, start, stop - start)
            box = Box(tuple(start if d == dim else 0 for d in range(source.dim())), tuple(shard.shape))
            flat = shard.contiguous().view(-1)
            for move in moves:
                if move.source != name:
                    continue
                for part in restrict_source(move, source.shape, box):
                    for block in (*restrict_target(part, 0, cut), *restrict_target(part, cut, real.numel())):
                        local = relocated(block, source.shape, box)
                        put(made, flat, local)
    assert torch.equal(made.view(real.shape), real)


def put(target: torch.Tensor, source: torch.Tensor, move: Move) -> None:
    index = torch.tensor(move.source_offset)
    for count, stride in zip(move.counts, move.source_strides, strict=True):
        index = index.unsqueeze(-1) + stride * torch.arange(count)
    place = target.as_strided(move.counts, move.target_strides, move.target_offset)
    assert bool((place == -1).all())
    place.copy_(source[index.reshape(move.counts)])


@settings(max_examples=60)
@given(st.data())
def test_the_way_back_of_chains(data: st.DataObject) -> None:
    """Each element of the source is filled once, from where the chain put it; what the chain lost is missing."""
    source = torch.arange(48.0).view(data.draw(shapes(48)))
    real = source
    chain: list[Operation] = []
    for _ in range(data.draw(st.integers(1, 5))):
        operation = data.draw(operations(real))
        real = operation(real)
        chain.append(operation)

    def run(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensor = state["a"]
        for operation in chain:
            tensor = operation(tensor)
        return {"out": tensor}

    from holdfast.keymap.moves import KeyMapping, MappedTensor

    (found,) = trace(run, sources_of({"a": source}))
    back = reversed_moves(KeyMapping((MappedTensor(*found),), {}), {"a": source.shape})
    made = torch.full((48,), -1.0)
    for move in back.moves["a"]:
        put(made, real.contiguous().view(-1), move)
    there = set(real.flatten().tolist())
    assert {value for value in made.tolist() if value >= 0} == there
    assert all(value in (-1.0, float(place)) for place, value in enumerate(made.tolist()))
    assert back.missing.get("a", 0) == 48 - len(there)
    assert sum(move.volume for move in uncovered(back.moves["a"], 48)) == 48 - len(there)
    again = torch.full((48,), -1.0)
    for move in once_each(back.moves["a"]):  # perhaps cut in another way: it fills the same from the same
        put(again, real.contiguous().view(-1), move)
    assert torch.equal(again, made)
