"""Ways to damage a checkpoint: one bit, one end, one file at a time, in every region of every file; all can be undone.

A `Damage` says what it does and what must be said of it: the files that are wrong, the byte, the tensor that lies
there, and whether a load has to read it. The regions come from the checkpoint's own reports.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.format.manifest import EXTENT_BYTES, IndexTensor, decode_manifest, decode_report, read_index

MANIFEST = "holdfast.json"


@dataclass(frozen=True, slots=True)
class Damage:
    """``apply`` is called with the directory. ``read``: a load of everything must see it."""

    what: str
    files: tuple[str, ...]
    apply: Callable[[Path], object]
    at: int | None = None
    tensor: str | None = None
    read: bool = True

    def __str__(self) -> str:
        return f"{self.what} of {', '.join(self.files)}"


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a data file; ``owner`` is the tensor or object there, None for what lies between."""

    file: str
    kind: str
    start: int
    end: int
    owner: str | None


@contextlib.contextmanager
def applied(damage: Damage, directory: Path, spare: Path) -> Iterator[None]:
    """The damage is there inside, and undone after."""
    kept = spare / "kept"
    kept.mkdir(exist_ok=True)
    for name in damage.files:
        shutil.copy2(directory / name, kept / name)
    try:
        damage.apply(directory)
        yield
    finally:
        for name in damage.files:
            path = directory / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            shutil.move(kept / name, path)


def regions_of(directory: Path) -> list[Region]:
    """Every byte of every data file belongs to one region."""
    manifest = decode_manifest((directory / MANIFEST).read_bytes(), path=MANIFEST)
    regions: list[Region] = []
    for line in manifest.reports:
        report = decode_report((directory / line.name).read_bytes(), path=line.name)
        index = read_index(report, path=line.name)
        rows: dict[str, list[Region]] = {file.name: [] for file in report.files}
        for tensor in index.tensors:
            rows[report.files[tensor.file].name] += _of_tensor(report.files[tensor.file].name, tensor)
        for kept in index.objects:
            file = report.files[kept.file].name
            rows[file].append(Region(file, "object", kept.offset, kept.offset + kept.capacity, kept.name))
        for file in report.files:
            at = 0
            for region in sorted(rows[file.name], key=lambda region: (region.start, region.end)):
                if region.start > at:
                    regions.append(Region(file.name, "padding", at, region.start, None))
                regions.append(region)
                at = region.end
            if at < file.size:
                regions.append(Region(file.name, "tail", at, file.size, None))
    return [region for region in regions if region.end > region.start]


def _of_tensor(file: str, tensor: IndexTensor) -> list[Region]:
    end = tensor.payload_offset + tensor.nbytes
    return [
        Region(file, "header", tensor.record_offset, tensor.payload_offset, tensor.name),
        Region(file, "payload", tensor.payload_offset, end, tensor.name),
        Region(file, "trailer", end, tensor.record_end, tensor.name),
    ]


def flip(name: str, at: int) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        with open(directory / name, "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))

    return apply


def flips(directory: Path, *, dense: bool) -> list[Damage]:
    """A flipped bit at the ends and in the middle of every region, and on both sides of every extent's edge.

    dense: many more of each.
    """
    found: list[Damage] = []
    read_extents = {
        (region.file, extent)
        for region in regions_of(directory)
        if region.kind in ("payload", "object")
        for extent in range(region.start // EXTENT_BYTES, (region.end - 1) // EXTENT_BYTES + 1)
    }
    for region in regions_of(directory):
        for at in _places(region.start, region.end, 24 if dense else 1):
            found.append(
                Damage(
                    f"a bit at {at} in the {region.kind}",
                    (region.file,),
                    flip(region.file, at),
                    at=at,
                    # A zip archive has no checksum of its own directory: such a byte may be nobody's.
                    tensor=region.owner if region.kind != "object" else None,
                    read=(region.file, at // EXTENT_BYTES) in read_extents,
                )
            )
    for name in small_files(directory):
        size = (directory / name).stat().st_size
        for at in _places(0, size, size if dense and name != MANIFEST else 60 if dense else 10):
            found.append(Damage(f"a bit at {at}", (name,), flip(name, at), at=at))
    return found


def _places(start: int, end: int, inside: int) -> list[int]:
    places = {start, end - 1, *range(start, end, max(1, (end - start) // (inside + 1)))}
    for edge in range((start // EXTENT_BYTES + 1) * EXTENT_BYTES, end, EXTENT_BYTES):
        places |= {edge - 1, edge}
    return sorted(places)


def small_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".distcp")


def whole_file_damage(directory: Path, spare: Path) -> list[Damage]:
    """Truncated, extended, removed, replaced by something else, for every file."""
    found: list[Damage] = []
    for path in sorted(directory.iterdir()):
        name, size = path.name, path.stat().st_size
        for length in sorted({0, 1, size // 2, max(0, size - 4096), size - 1} - {size}):
            found.append(Damage(f"truncation to {length}", (name,), lambda d, n=name, k=length: os.truncate(d / n, k)))
        for extra in (b"\0", b"x", bytes(4096)):
            found.append(Damage(f"extension by {len(extra)}", (name,), lambda d, n=name, k=extra: _append(d / n, k)))
        found.append(Damage("removal", (name,), lambda d, n=name: (d / n).unlink()))
        found.append(Damage("zeros instead", (name,), lambda d, n=name, k=size: (d / n).write_bytes(bytes(k))))
        for kind, put in REPLACEMENTS.items():
            found.append(Damage(f"{kind} instead", (name,), lambda d, n=name, p=put: p(d / n, spare)))
    return found


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def _directory(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, spare: Path) -> None:
    """To an exact copy: what is read through it would be right, and may be anything tomorrow."""
    path.replace(spare / "elsewhere")
    path.symlink_to(spare / "elsewhere")


def _loop(path: Path, _: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _socket(path: Path, _: Path) -> None:
    path.unlink()
    before = os.getcwd()
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a socket's name is short
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


REPLACEMENTS: dict[str, Callable[[Path, Path], None]] = {
    "a directory": _directory,
    "a link": _link,
    "a link to itself": _loop,
    "a named pipe": _pipe,
    "a socket": _socket,
}


def swaps(directory: Path) -> list[Damage]:
    """Two files; two extents of one file; the payloads of two tensors of one size."""
    found: list[Damage] = []
    names = sorted(path.name for path in directory.iterdir())
    for first, second in itertools.pairwise(names):
        found.append(Damage("an exchange", (first, second), lambda d, a=first, b=second: _swap_files(d / a, d / b)))
    data = [name for name in names if name.endswith(".distcp")]
    for name in data:
        whole = (directory / name).stat().st_size // EXTENT_BYTES
        for first in range(whole - 1):
            places = (first * EXTENT_BYTES, (first + 1) * EXTENT_BYTES, EXTENT_BYTES)
            if _differ(directory / name, *places):
                found.append(
                    Damage(
                        f"an exchange of extents {first} and {first + 1}",
                        (name,),
                        lambda d, n=name, p=places: _swap_bytes(d / n, *p),
                        at=first * EXTENT_BYTES,
                    )
                )
    payloads = [region for region in regions_of(directory) if region.kind == "payload"]
    for number, one in enumerate(payloads):
        for other in payloads[number + 1 :]:
            size = one.end - one.start
            places = (one.start, other.start, size)
            alike = one.file == other.file and size == other.end - other.start
            if alike and _differ(directory / one.file, *places):
                what = f"an exchange of {one.owner} and {other.owner}"
                found.append(Damage(what, (one.file,), lambda d, n=one.file, p=places: _swap_bytes(d / n, *p)))
                break
    return found


def _differ(path: Path, first: int, second: int, size: int) -> bool:
    data = path.read_bytes()
    return data[first : first + size] != data[second : second + size]


def _swap_files(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _swap_bytes(path: Path, first: int, second: int, size: int) -> None:
    data = bytearray(path.read_bytes())
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    path.write_bytes(data)
