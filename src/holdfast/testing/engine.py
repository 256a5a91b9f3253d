"""Sample data for an engine to persist, and a check of the result: for tests and benchmarks. Torch-free; Linux.

`Sample` is a sealed memfd of reproducible bytes with a write plan over it; `Sample.check` compares a directory and a
report with the plan, independently of the engine's code.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.engine.messages import AddPlan, FileRow
from holdfast.format.manifest import EXTENT_BYTES, Report, decode_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.client import EngineClient

REPORT_NAME: Final = "rank-00000.report"
LEASE_NAME: Final = "lease-00000"


class Sample:
    """An image of files of the given sizes (multiples of 4,096), with tensors scattered over it."""

    def __init__(self, file_sizes: Sequence[int], *, tensor_bytes: int = 300_000, seed: int = 0) -> None:
        self.nbytes = sum(file_sizes)
        self.fd = os.memfd_create("holdfast-sample", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self.fd, self.nbytes)
        chance = random.Random(seed)  # noqa: S311 - reproducible bytes, not secrets
        for start in range(0, self.nbytes, 1 << 20):
            self._map[start : start + (1 << 20)] = chance.randbytes(min(1 << 20, self.nbytes - start))
        self.view = memoryview(self._map)
        self.rows: list[FileRow] = []
        self.tensors: list[tuple[int, int]] = []
        start = 0
        for number, size in enumerate(file_sizes):
            self.rows.append(FileRow(f"__0_{number}.distcp", size, start))
            for offset in range(start + 64, start + size - tensor_bytes, tensor_bytes + 64):
                self.tensors.append((offset, tensor_bytes - offset % 7))
            start += size
        self.tensors.append((64, 0))
        chance.shuffle(self.tensors)

    @property
    def tensor_offsets(self) -> bytes:
        return struct.pack(f"<{len(self.tensors)}Q", *(offset for offset, _ in self.tensors))

    @property
    def tensor_sizes(self) -> bytes:
        return struct.pack(f"<{len(self.tensors)}Q", *(size for _, size in self.tensors))

    @property
    def plan(self) -> AddPlan:
        return AddPlan(1, tuple(self.rows), self.tensor_offsets, self.tensor_sizes, b"an index")

    def register(self, client: EngineClient) -> tuple[int, int]:
        """Send image and plan to an engine; return their numbers."""
        image = client.add_image(self.fd, self.nbytes)
        plan = client.add_plan(
            self.rows, tensor_offsets=self.tensor_offsets, tensor_sizes=self.tensor_sizes, index=b"an index"
        )
        return image, plan

    def extent_sums(self, row: FileRow) -> bytes:
        end = row.image_offset + row.size
        starts = range(row.image_offset, end, EXTENT_BYTES)
        return b"".join(_sum(self.view[start : min(start + EXTENT_BYTES, end)]) for start in starts)

    def tensor_sums(self) -> bytes:
        return b"".join(_sum(self.view[offset : offset + size]) for offset, size in self.tensors)

    def check_files(self, directory: str) -> None:
        """Raise `AssertionError` unless every file has its bytes."""
        for row in self.rows:
            with open(os.path.join(directory, row.name), "rb") as file:
                assert file.read() == self.view[row.image_offset : row.image_offset + row.size], row.name

    def check(self, directory: str) -> Report:
        """Raise `AssertionError` unless files and report are right; return the report."""
        self.check_files(directory)
        path = os.path.join(directory, REPORT_NAME)
        with open(path, "rb") as stored:
            report = decode_report(stored.read(), path=path)
        assert [(file.name, file.size) for file in report.files] == [(row.name, row.size) for row in self.rows]
        for file, row in zip(report.files, self.rows, strict=True):
            assert file.extents == self.extent_sums(row), row.name
        assert report.tensor_sums == self.tensor_sums()
        assert report.index == b"an index"
        return report

    def close(self) -> None:
        """Release the image; it is unmapped when its last view is gone."""
        self.view.release()
        del self._map
        os.close(self.fd)


def _sum(data: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def persist(
    client: EngineClient, directory: str | os.PathLike[str], image: int, plan: int, attempt: str = "t1"
) -> None:
    """Start persisting into ``directory``, as one rank of six at step 7; returns once the request is sent."""
    dir_fd = os.open(directory, os.O_RDONLY)
    try:
        client.persist(
            dir_fd,
            attempt=attempt,
            plan=plan,
            image=image,
            step=7,
            world=6,
            report_name=REPORT_NAME,
            lease_name=LEASE_NAME,
        )
    finally:
        os.close(dir_fd)
