"""Cut the matrices that a publisher rank sends into tiles of some columns: who takes columns takes these tiles alone.

    pieces of a table -> tiles, each a piece of its own -> all first tiles, then all second ones, …

A piece lies row by row, so a slice of columns has some bytes of each row: whoever reads whole extents of memory reads
all columns. A tile lies row by row by itself. Tiles of one number lie together, as one receiver takes them together.
*Columns* are the last dimension: for stacks of experts, too. A slice along any other dimension that doesn't lie apart,
such as the rows of a matrix in tiles, has a run of bytes in each tile.

Guarantees: tiles have the elements of their piece, each once. They are cut where ``torch.chunk`` cuts the whole tensor
in so many parts, whichever part of it the rank has. Tied names are cut alike. Names keep their order. Not cut: vectors,
tensors of less than `TENSOR_BYTES_MIN`, and those of which tiles would have rows of less than `ROW_BYTES_MIN`.
Assumes: `part_of` of a piece's memory is a view.
Does not: copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

from holdfast.boxes import Box
from holdfast.errors import ConfigError
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.state.structure import part_of
from holdfast.sync.weights.buckets import Piece, itemsize_of
from holdfast.sync.weights.names import NameWords
from holdfast.sync.weights.pieces import Local

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from holdfast.sync.weights.agreed import CutWeights

ROW_BYTES_MIN: Final = 256
"""Shorter rows are copied a good deal slower."""
TENSOR_BYTES_MIN: Final = EXTENT_BYTES
"""Of what is smaller, one extent has all columns anyway."""
_FIELD: Final = "column_tiles"


def checked_tiles(given: Any) -> dict[str, int]:
    """Return into how many tiles to cut what a word matches; empty for none. Raises `ConfigError`."""
    words = given if isinstance(given, Mapping) else {"*": given}
    for word, count in words.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{_FIELD}: {word!r} has {count!r}; expected an integer >= 1, or a mapping of names to such",
                field=_FIELD,
            )
        NameWords(word, field=_FIELD)
    return {} if set(words.values()) <= {1} else dict(words)


class ColumnTiles:
    """Cuts what one publisher rank sends."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        """counts: from `checked_tiles`; the first word that matches a name counts."""
        self._counts = [(NameWords(word, field=_FIELD), count) for word, count in counts.items()]
        self._made: tuple[str, list[tuple[int, Piece]]] | None = None

    def cut(self, weights: CutWeights, names: Callable[[], Collection[str]]) -> CutWeights:
        """Return the same elements in tiles. names: all that the ranks publish together; called for a new table.

        Raises `ConfigError` for a word that matches none of them.
        """
        if not self._counts:
            return weights
        if self._made is None or self._made[0] != weights.digest:
            published = names()
            for words, _ in self._counts:
                words.check(published, where="that is published")
            self._made = weights.digest, self._tiles(weights.table)
        rows = self._made[1]
        pieces = []
        for number, tile in rows:
            local = weights.pieces[number]
            if tile is not weights.table[number]:
                view = part_of(local.source, tile.box, local.box)
                local = Local(tile.box, view, local.dtype, columns_of=local)
            pieces.append(local)
        lying = frozenset(at for at, (number, _) in enumerate(rows) if number in weights.lying)
        return weights._replace(table=tuple(tile for _, tile in rows), pieces=pieces, lying=lying)

    def _tiles(self, table: tuple[Piece, ...]) -> list[tuple[int, Piece]]:
        """Return the tiles in the order in which they lie, each with the number of its piece."""
        cut = [
            (order, number, tile) for number, piece in enumerate(table) for order, tile in enumerate(self._cut(piece))
        ]
        cut.sort(key=lambda row: row[:2])
        return [(number, tile) for _, number, tile in cut]

    def _cut(self, piece: Piece) -> Iterator[Piece]:
        name, itemsize = piece.same_as or piece.name, itemsize_of(piece)
        count = next((count for words, count in self._counts if words.match(name)), 1)
        width = -(-piece.shape[-1] // count) if len(piece.shape) > 1 else 0
        is_large = prod(piece.shape) * itemsize >= TENSOR_BYTES_MIN and width * itemsize >= ROW_BYTES_MIN
        if count == 1 or not is_large or not piece.box.volume:
            yield piece
            return
        start, end = piece.offsets[-1], piece.offsets[-1] + piece.sizes[-1]
        for column in range(start // width * width, end, width):
            first, last = max(start, column), min(end, column + width)
            if (first, last) == (start, end):
                yield piece
                return
            box = Box((*piece.offsets[:-1], first), (*piece.sizes[:-1], last - first))
            yield Piece(piece.name, piece.dtype, piece.shape, box.offsets, box.sizes, piece.same_as)
