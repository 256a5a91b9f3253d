"""What changed since a version: extents, their checksums, and when everything is sent after all."""

from __future__ import annotations

import pytest
import torch

from holdfast.boxes import Box, first_defect, is_contiguous_in, whole
from holdfast.errors import ConfigError
from holdfast.sync.weights import delta
from holdfast.sync.weights.buckets import Piece, PieceBox
from holdfast.sync.weights.delta import EXTENT_BYTES, History, extent_sums, extents_of, narrowed
from holdfast.sync.weights.pieces import Local

ROWS = 4096
"""Rows of 1,024 bytes: 4 MiB, four extents."""
TABLE = (
    Piece("w", "float32", (2 * ROWS, 256), (ROWS, 0), (ROWS, 256)),
    Piece("b", "int64", (), (), ()),
    Piece("none", "float32", (0, 2), (0, 0), (0, 2)),
)


def values() -> list[torch.Tensor]:
    return [torch.arange(ROWS * 256).view(ROWS, 256).float(), torch.tensor(3), torch.zeros(0, 2)]


def record(history: History, version: int, tensors: list[torch.Tensor], table: tuple[Piece, ...] = TABLE) -> None:
    held = [Local(piece.box, tensor) for piece, tensor in zip(table, tensors, strict=True)]
    history.record(version, table, extent_sums(history.extents(table), held))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((5, 700, 1000), "bfloat16"), ((3_000_001,), "bool"), ((3, 2, 200_000), "float64"), ((7,), "int8"), ((), "int8")],
)
def test_extents_are_runs_of_at_most_a_mebibyte_that_tile_their_piece(sizes: tuple[int, ...], dtype: str) -> None:
    piece = Piece("w", dtype, tuple(2 * size for size in sizes), sizes, sizes)
    extents = extents_of(piece)
    itemsize = getattr(torch, dtype).itemsize
    assert first_defect(piece.box, extents) is None
    assert all(is_contiguous_in(box, piece.box) and box.volume * itemsize <= EXTENT_BYTES for box in extents)
    assert len(extents) <= 2 * (piece.box.volume * itemsize // EXTENT_BYTES) + 1


def test_a_version_that_is_unknown_or_due_is_sent_whole() -> None:
    history = History(full_every=3)
    tensors = values()
    for version in range(6):
        record(history, version, tensors)
    assert history.changed(1, None) is None
    assert history.changed(1, 77) is None
    assert [history.changed(version, version - 1) is None for version in range(1, 6)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert history.changed(5, 0) == [[], [], []]


def test_what_changed_is_found_and_neighbours_are_one_box() -> None:
    history = History()
    tensors = values()
    record(history, 0, tensors)
    tensors[0][1500, 3] += 1
    tensors[0][2100, 255] = float("nan")
    record(history, 1, tensors)
    tensors[0][4095] *= -1
    tensors[1] += 1
    record(history, 2, tensors)
    assert history.changed(1, 0) == [[Box((ROWS + 1024, 0), (2048, 256))], [], []]
    assert history.changed(2, 1) == [[Box((ROWS + 3072, 0), (1024, 256))], [Box((), ())], []]
    assert history.changed(2, 0) == [[Box((ROWS + 1024, 0), (3072, 256))], [Box((), ())], []]


def test_the_way_back_is_a_delta_as_well() -> None:
    history = History()
    tensors = values()
    record(history, 0, tensors)
    record(history, 1, tensors)
    tensors[1] += 1
    record(history, 2, tensors)
    assert history.changed(1, 2) == [[], [Box((), ())], []]


def test_another_structure_is_sent_whole() -> None:
    history = History()
    record(history, 0, values())
    record(history, 1, [torch.tensor(3)], TABLE[1:2])
    assert history.changed(1, 0) is None
    record(history, 2, values())
    assert history.changed(2, 0) == [[], [], []]


def test_nothing_is_based_on_a_number_that_means_two_things() -> None:
    """A publish that failed may have arrived all the same; under its number others were published then."""
    history, first, other = History(), values(), values()
    first[0][0] = -1.0
    other[0][ROWS - 1] = -1.0
    record(history, 1, first)
    record(history, 1, other)
    record(history, 2, other)
    assert history.changed(2, 1) is None
    record(history, 3, other)
    record(history, 3, other)
    record(history, 4, other)
    assert history.changed(4, 3) == [[], [], []]


def test_only_so_many_versions_are_known() -> None:
    history = History(keep=2)
    for version in range(4):
        record(history, version, values())
    assert history.changed(3, 2) == [[], [], []]
    assert history.changed(3, 1) is None
    history.forget()
    record(history, 4, values())
    assert history.changed(4, 3) is None


@pytest.mark.parametrize("device_kind", ["xxh3", "sums"])
@pytest.mark.parametrize("shape", [(300, 1001), (3, 5, 401, 83), (2_000_003,)])
def test_memory_of_any_strides_and_device_gives_the_same_verdict(
    device_kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "kind_for", lambda _: device_kind)
    for dtype in ("bfloat16", "uint8"):
        piece = Piece("w", dtype, shape, (0,) * len(shape), shape)
        history = History()
        value = torch.randint(0, 99, shape, dtype=torch.uint8).to(getattr(torch, dtype))
        turned = value.mT.contiguous().mT if value.dim() > 1 else torch.stack([value, value], 1)[:, 0]
        assert not turned.is_contiguous()
        record(history, 0, [value], (piece,))
        record(history, 1, [turned], (piece,))
        assert history.changed(1, 0) == [[]]
        place = tuple(size // 2 for size in shape)
        turned[place] += 1
        record(history, 2, [turned], (piece,))
        (boxes,) = history.changed(2, 1) or [[]]
        assert len(boxes) == 1
        assert all(a <= at < b for a, at, b in zip(boxes[0].offsets, place, boxes[0].stops, strict=True))
        assert boxes[0].volume * value.element_size() <= EXTENT_BYTES


def test_a_conjugate_view_is_known_by_what_it_shows() -> None:
    piece = Piece("w", "complex64", (2,), (0,), (2,))
    history = History()
    value = torch.tensor([1 + 2j, 3 - 4j])
    record(history, 0, [value], (piece,))
    record(history, 1, [value.conj()], (piece,))
    record(history, 2, [value.conj().resolve_conj()], (piece,))
    assert history.changed(1, 0) == [[whole((2,))]]
    assert history.changed(2, 1) == [[]]


def test_of_what_is_wanted_the_changed_part_is_sent() -> None:
    parts = [PieceBox(0, (0, 0), (4, 2)), PieceBox(0, (4, 0), (4, 2)), PieceBox(1, (), ()), PieceBox(2, (0, 2), (0, 2))]
    assert narrowed(parts, None) == parts
    assert narrowed(parts, [[], [], []]) == []
    changed = [[Box((1, 1), (2, 3)), Box((3, 0), (9, 9))], [Box((), ())], [Box((0, 0), (0, 2))]]
    assert narrowed(parts, changed) == [
        PieceBox(0, (1, 1), (2, 1)),
        PieceBox(0, (3, 0), (1, 2)),
        PieceBox(0, (4, 0), (4, 2)),
        PieceBox(1, (), ()),
    ]


def test_checksums_of_other_extents_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="other extents"):
        History().record(0, TABLE, ((1,), (2,), (3,)))


@pytest.mark.parametrize("field", ["keep", "full_every"])
def test_limits_that_make_no_sense(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        History(**{field: 0})
