"""A bucket copied and hashed in one walk: the same bytes and the same sum as by copying, then hashing."""

from __future__ import annotations

import torch

from holdfast.boxes import Box
from holdfast.sync.weights import copy as moving
from holdfast.sync.weights.buckets import Piece, PieceBox, plan_buckets
from holdfast.sync.weights.checksums import checksum
from holdfast.sync.weights.copy import STEP_BYTES, BucketCopy
from holdfast.sync.weights.pieces import Local, pack


def test_a_walk_gives_and_takes_what_one_copy_would() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "small": torch.randn(5, 3, generator=generator),
        "large": torch.randn(7, 3, 90_001, generator=generator),
        "row": torch.randint(0, 255, (3 * STEP_BYTES + 17,), generator=generator, dtype=torch.uint8),
        "turned": torch.randn(900, 1000, generator=generator).t(),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(7.0, dtype=torch.bfloat16),
    }
    table = [
        Piece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), (0,) * t.dim(), tuple(t.shape))
        for name, t in tensors.items()
    ]
    pieces = [Local(piece.box, tensors[piece.name]) for piece in table]
    (plan,) = plan_buckets(table, [[PieceBox(n, p.offsets, p.sizes) for n, p in enumerate(table)]], 64 << 20)
    expected, found = torch.zeros(plan.nbytes, dtype=torch.uint8), torch.zeros(plan.nbytes, dtype=torch.uint8)
    pack(plan, pieces, expected)
    walk = BucketCopy(plan)
    assert walk.give(pieces, found) == ("xxh3", checksum(expected, "xxh3"))
    assert torch.equal(found, expected)
    assert len(moving._steps(plan)) > 8
    into = [[Local(piece.box, torch.zeros_like(tensors[piece.name]))] for piece in table]
    assert walk.take(found, into, "xxh3") == checksum(expected, "xxh3")
    assert all(torch.equal(of[0].tensor, tensors[piece.name]) for of, piece in zip(into, table, strict=True))
    again = [[Local(piece.box, torch.zeros_like(tensors[piece.name]))] for piece in table]
    assert walk.take(found, again, "sums") == checksum(expected, "sums")
    assert all(torch.equal(of[0].tensor, tensors[piece.name]) for of, piece in zip(again, table, strict=True))
    for at in (0, 100, plan.nbytes - 1):
        found[at] ^= 1
        assert walk.take(found, into, "xxh3") != checksum(expected, "xxh3")
        found[at] ^= 1


def test_what_is_moved_shows_in_version_counters() -> None:
    tensor = torch.arange(300_000, dtype=torch.float32).view(300, 1000)
    piece = Piece("weight", "float32", (300, 1000), (0, 0), (300, 1000))
    (plan,) = plan_buckets([piece], [[PieceBox(0, piece.offsets, piece.sizes)]], 64 << 20)
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    kind, expected = BucketCopy(plan).give([Local(piece.box, tensor)], memory)
    live = torch.nn.Parameter(torch.zeros(300, 1000))
    whole, frozen = live.detach(), torch.zeros(300, 1000)
    before = live._version
    assert BucketCopy(plan).take(memory, [[Local(piece.box, whole)]], kind) == expected
    assert live._version > before
    with torch.inference_mode():
        unversioned = torch.zeros(300, 1000)
    upper, lower = Box((0, 0), (100, 1000)), Box((100, 0), (200, 1000))
    halves = [Local(upper, frozen[:100]), Local(lower, frozen[100:])]
    assert BucketCopy(plan).take(memory, [[*halves, Local(piece.box, unversioned)]], kind) == expected
    assert BucketCopy(plan).take(memory, [[Local(piece.box, unversioned)]], kind) == expected
    assert all(torch.equal(found, tensor) for found in (live, frozen, unversioned))
