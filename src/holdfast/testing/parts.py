"""Sample files that engines of several ranks write together, and a check of the result: for tests. Torch-free; Linux.

Each block of 1 MiB has one owner, drawn at random; consecutive blocks of a rank are one part, or several. An image
holds a rank's parts in any order with garbage between them, none of which may get into a file.
"""

from __future__ import annotations

import mmap
import os
import random
from typing import TYPE_CHECKING, Final

from holdfast.engine.checksums import compile_plan
from holdfast.engine.messages import AddPlan, FileRow
from holdfast.format.manifest import BLOCK_BYTES, PAGE_BYTES, FilePart, RankIndex, encode_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.engine.checksums import WritePlan
    from holdfast.engine.client import EngineClient

INDEX: Final = encode_index(RankIndex((), ()))


def random_parts(sizes: Mapping[str, int], world: int, *, seed: int = 0) -> list[list[FilePart]]:
    """Return files of ``sizes`` bytes by name, cut into parts, by rank; each rank's in random order."""
    chance = random.Random(seed)  # noqa: S311 - reproducible cuts, not secrets
    parts: list[list[FilePart]] = [[] for _ in range(world)]
    for name, total in sizes.items():
        owner = -1
        for offset in range(0, total, BLOCK_BYTES):
            size = min(BLOCK_BYTES, total - offset)
            before, owner = owner, owner if owner >= 0 and chance.random() < 0.3 else chance.randrange(world)
            own = parts[owner]
            if owner == before and chance.random() < 0.7:
                last = own.pop()
                own.append(FilePart(name, last.offset, last.size + size, total))
            else:
                own.append(FilePart(name, offset, size, total))
    for own in parts:
        chance.shuffle(own)
    return parts


class SharedSample:
    """Reproducible files, and for each rank a sealed image and the rows that write its parts from there.

    Attributes:
        contents: contents of each file, by name.
        parts: which parts each rank writes, by rank.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        world: int,
        *,
        seed: int = 0,
        parts: Sequence[Sequence[FilePart]] | None = None,
    ) -> None:
        chance = random.Random(seed)  # noqa: S311 - reproducible bytes, not secrets
        self.contents = {name: chance.randbytes(size) for name, size in sizes.items()}
        self.parts = [list(own) for own in (random_parts(sizes, world, seed=seed) if parts is None else parts)]
        self.rows: list[list[FileRow]] = []
        self.views: list[memoryview] = []
        self.fds: list[int] = []
        for own in self.parts:
            self._add_image(own)

    def _add_image(self, own: Sequence[FilePart]) -> None:
        rows, at = [], PAGE_BYTES
        for part in own:
            rows.append(FileRow(part.name, part.size, at, part.offset, part.total))
            at += -(-part.size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        fd = os.memfd_create("holdfast-parts", os.MFD_CLOEXEC)
        os.ftruncate(fd, at)
        view = memoryview(mmap.mmap(fd, at))
        view[:] = b"\xa5" * at
        for row in rows:
            data = self.contents[row.name][row.offset : row.offset + row.size]
            view[row.image_offset : row.image_offset + row.size] = data
        self.rows.append(rows)
        self.views.append(view)
        self.fds.append(fd)

    def plan(self, rank: int) -> WritePlan:
        """Return the write plan of ``rank``'s rows."""
        return compile_plan(AddPlan(1, tuple(self.rows[rank]), b"", b"", INDEX))

    def register(self, rank: int, client: EngineClient) -> tuple[int, int]:
        """Send image and plan to the engine of ``rank``; return their numbers."""
        image = client.add_image(self.fds[rank], len(self.views[rank]))
        return image, client.add_plan(self.rows[rank], tensor_offsets=b"", tensor_sizes=b"", index=INDEX)

    def check_files(self, directory: str | os.PathLike[str]) -> None:
        """Raise `AssertionError` unless every file has its bytes, and no more."""
        for name, content in self.contents.items():
            with open(os.path.join(directory, name), "rb") as file:
                found = file.read()
            assert len(found) == len(content), f"{name} has {len(found)} bytes, expected {len(content)}"
            assert found == content, name

    def close(self) -> None:
        """Release the images."""
        for fd, view in zip(self.fds, self.views, strict=True):
            view.release()
            os.close(fd)
