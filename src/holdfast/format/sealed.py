"""Bytes that show by themselves whether they are whole: a digest over everything at the end. Torch-free, no I/O.

    binary    magic (7 bytes), version (1 byte), content, xxh3_128 of all before (16 bytes, big-endian)
    JSON      an object whose last member is ``"digest"``: xxh3_128, hexadecimal, of every byte before its first digit

Guarantees: any flipped bit and any missing or added byte is detected; bytes of another kind, and of a later version of
the same kind, are told apart from damage in the message.
Assumes: accidents. xxh3 is no defence against somebody who can also write the digest: what is decoded from sealed bytes
is still checked for sense by the caller.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import xxhash

from holdfast._version import __version__
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.validation import name_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGEST_BYTES = 16
_MEMBER = b'\n  "digest": "'
_DIGEST = re.compile("[0-9a-f]{32}")
_CLOSE = b'"\n}\n'
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+){0,4}([abc.]?[a-z]*[0-9]+)?")


def xxh3_128(data: bytes | bytearray | memoryview) -> str:
    """The digest that manifests hold of files: 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(magic: bytes, version: int, content: bytes) -> bytes:
    """``content`` between magic and digest."""
    head = seal_head(magic, version)
    return b"".join((head, content, seal_tail(head, content)))


def seal_head(magic: bytes, version: int) -> bytes:
    """Return the bytes of a seal that precede the content."""
    assert len(magic) == 7
    return magic + bytes((version,))


def seal_tail(*before: bytes) -> bytes:
    """Return the bytes of a seal that follow ``before``, which is everything from the head on, in parts."""
    digest = xxhash.xxh3_128()
    for part in before:
        digest.update(part)
    return digest.digest()


def unseal(
    magic: bytes, versions: tuple[int, ...], data: bytes | memoryview, *, what: str, path: str
) -> tuple[int, memoryview]:
    """Version and content of what `seal` made; ``what`` and ``path`` are for messages.

    Raises:
        CheckpointCorrupt: not a ``what``, or damaged.
        ConfigError: whole, but of another version than those this Holdfast reads.
    """
    view = memoryview(data)
    if bytes(view[: len(magic)]) != magic or len(view) < len(magic) + 1 + DIGEST_BYTES:
        raise CheckpointCorrupt(
            f"{path} isn't a {what} of Holdfast: it was written by another program, truncated or damaged", path=path
        )
    body = view[:-DIGEST_BYTES]
    if xxhash.xxh3_128_digest(body) != bytes(view[-DIGEST_BYTES:]):
        raise CheckpointCorrupt(
            f"{path} is damaged: the {what}'s bytes don't match its digest ({len(view):,} bytes)", path=path
        )
    version = body[len(magic)]
    require_version(version, versions, what=what, path=path)
    return version, body[len(magic) + 1 :]


def seal_json(members: list[tuple[str, str]]) -> bytes:
    """A JSON object of (name, rendered value) members, one a line, closed by its digest."""
    lines = ",\n".join(f'  "{name}": {value}' for name, value in members)
    body = b"{\n" + lines.encode("ascii") + b"," + _MEMBER
    return body + xxh3_128(body).encode("ascii") + _CLOSE


def check_json_seal(data: bytes, *, what: str, path: str) -> None:
    """Return if ``data`` is what `seal_json` made.

    Raises:
        CheckpointCorrupt: it isn't a ``what``, or it is damaged.
    """
    end = len(data) - len(_CLOSE) - 2 * DIGEST_BYTES
    body = data[: max(end, 0)]
    if not (data.startswith(b"{\n") and body.endswith(_MEMBER) and data.endswith(_CLOSE)):
        raise CheckpointCorrupt(
            f"{path} isn't a {what} of Holdfast: it has no digest at its end ({len(data):,} "
            "bytes); it was written by another program, truncated or edited",
            path=path,
        )
    expected, found = data[end : -len(_CLOSE)].decode("ascii", "replace"), xxh3_128(body)
    if expected != found:
        raise CheckpointCorrupt(
            f"{path} is damaged or was edited: expected digest {expected}, found {found}", path=path
        )


class NewerFormat(ConfigError):
    """A newer Holdfast wrote this; nothing is wrong with it."""


def require_version(found: object, known: tuple[int, ...], *, what: str, path: str, writer: object = None) -> None:
    """Raise `ConfigError` unless ``found`` is a version of ``what`` that this Holdfast reads.

    writer: the release of Holdfast that wrote it, as far as it is told.
    """
    if found in known and type(found) is int:
        return
    *others, last = map(str, known)
    formats = f"formats {', '.join(others)} and {last}" if others else f"format {last}"
    if type(found) is int and found > max(known):
        told = isinstance(writer, str) and _RELEASE.fullmatch(writer) is not None and writer != __version__
        wrote = f"it was written by Holdfast {writer}" if told else "it was written by a newer Holdfast"
        install = f"pip install 'holdfast>={writer}'" if told else "pip install --upgrade holdfast"
        raise NewerFormat(
            f"{path}: this {what} has format {found}, and Holdfast {__version__} reads {formats}; {wrote}, "
            f"and nothing is wrong with it: read it with that version or a later one ({install})",
            field="path",
        )
    raise ConfigError(
        f"{path}: this {what} has format {found!r:.80}, and Holdfast {__version__} reads {formats}; no release of "
        "Holdfast writes that format: load another checkpoint",
        field="path",
    )


class Check:
    """Checks of decoded contents; each raises `CheckpointCorrupt` that names the file."""

    __slots__ = ("path", "what")

    def __init__(self, what: str, path: str) -> None:
        self.what = what
        self.path = path

    def that(self, condition: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
        if not condition:
            raise CheckpointCorrupt(f"{self.path}: the {self.what} is inconsistent: {otherwise}", path=self.path)

    def equal(self, what: str, found: object, expected: object) -> None:
        self.that(found == expected, f"{what} is {found!r}, not {expected!r}")

    def plain_name(self, name: str) -> None:
        """A name that can't lead out of its directory, nor be anything but one entry of it."""
        fault = name_fault(name)
        self.that(fault is None, f"{name!r:.300} isn't a plain file name: {fault}")

    def plain_path(self, name: str) -> None:
        """A plain name, or one with a plain directory in front of it, hidden neither of them."""
        components = name.split("/")
        self.that(len(components) <= 2, f"{name!r:.300} lies below more than one directory")
        for component in components:
            self.plain_name(component)
            self.that(not component.startswith("."), f"{name!r:.300} is hidden")

    def digest(self, digest: str) -> None:
        self.that(_DIGEST.fullmatch(digest) is not None, f"{digest!r:.80} isn't a digest")

    def unique(self, names: Iterable[str]) -> None:
        seen: set[str] = set()
        for name in names:
            self.that(name not in seen, f"{name!r} is there twice")
            seen.add(name)
