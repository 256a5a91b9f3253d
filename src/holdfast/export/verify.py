"""Check that an export is valid for Hugging Face readers: index, headers, and other files. Torch-free.

Checked are every file of weights, by its header: a length that fits, JSON, known element types, and payloads that cover
the rest of the file without gap or overlap; the index against the headers, in both directions: every name in the file
that the index gives, every tensor of these files in the index, and the sum of their bytes; that no file is missing
which the index or Holdfast's manifest names; that JSON files parse.

Guarantees: damage of any kind is a finding, never an exception; a damaged file is reported once, and does not keep
others from being checked. Bytes may be hostile: no size is trusted that the file doesn't have, no link is followed,
nothing outside the directory is opened, opening never waits. Reads headers and small files, but no payloads. Of what
lies on an object store, or was copied from one, the plain-named copies of committed files are compared with those. Does
not: compare other checksums. For Holdfast's own exports, `loader.checkpoint.verify_source` reads every byte.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import CheckpointCorrupt, HoldfastError
from holdfast.export.layout import SUFFIX
from holdfast.export.verify_files import files_at, has_entry
from holdfast.format.manifest import MANIFEST_NAME, decode_manifest
from holdfast.format.safetensors import (
    INDEX_NAME,
    LENGTH_BYTES,
    WEIGHTS_NAME,
    Fault,
    corrupt_header,
    find_length,
    find_tensors,
)
from holdfast.format.sealed import xxh3_128
from holdfast.loader.checkpoint import Problem, problem_of
from holdfast.storage.entries import MAX_MANIFEST_BYTES
from holdfast.storage.object_storage import faces_of
from holdfast.validation import name_fault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.export.verify_files import ExportFiles
    from holdfast.format.manifest import Manifest

INDEX_SUFFIX: Final = ".safetensors.index.json"
JSON_BYTES_MAX: Final = 256 << 20
"""Larger than any tokenizer or index that there is."""
BUILT_BYTES_MAX: Final = 16 << 20
"""Larger JSON files are only scanned: parsed JSON of unknown shape may take fifty times its size in memory."""
TOLD_MAX: Final = 16
"""Maximum number of findings of one kind per file; further ones are counted."""

_NUMBERED: Final = re.compile(r".+-\d{5,}-of-\d{5,}\.safetensors", re.DOTALL)


_Sizes = dict[str, int]
"""The bytes of each tensor in a file of weights."""


class _Totals(msgspec.Struct):
    """Members of an index's metadata that can be checked; writers other than transformers leave them out."""

    total_size: int | float | None = None


class _ExportIndex(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Totals | None = None


_decode_index: Final = msgspec.json.Decoder(_ExportIndex).decode
_decode_any: Final = msgspec.json.Decoder(msgspec.Raw).decode
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, RecursionError)

_WRONG_ABOUT: Final = "{path}: its header is wrong about {name!r:.200}: "
_TOO_MUCH_OR_LITTLE: Final = (
    "{path}: it has {size:,} bytes, and by its header {end:,}: cut short, or something was added"
)
_WORDS: Final[Mapping[str, str]] = {
    "short": "{path}: {size:,} bytes are no safetensors file",
    "length": "{path}: its header would have {length:,} bytes, of a file of {size:,}: "
    "no safetensors file, or cut short",
    "json": "{path}: its header can't be read: {why}",
    "entry": _WRONG_ABOUT + "{why}",
    "dtype": _WRONG_ABOUT + "its element type is {dtype!r:.80}",
    "shape": _WRONG_ABOUT + "its shape is {shape!r:.200}",
    "place": _WRONG_ABOUT + "{start:,} to {end:,} aren't bytes of a file",
    "volume": _WRONG_ABOUT + "{nbytes:,} bytes aren't {shape!r:.200} of {dtype}",
    "overlap": "{path}: {name!r:.200} overlaps the tensor before it",
    "gap": "{path}: {name!r:.200} leaves a gap of {nbytes:,} bytes before it",
    "cut": _TOO_MUCH_OR_LITTLE,
    "more": _TOO_MUCH_OR_LITTLE,
}
"""What a `Fault` of a header is called here, where nobody wanted anything from it."""


@dataclass(slots=True)
class _Findings:
    """Problems found, a bounded number of each kind and file."""

    files: ExportFiles
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, message: str, *, tensor: str | None = None, at: tuple[int, int] | None = None) -> None:
        path = _path(self.files, name)
        self.problems.append(Problem(path, tensor, at, f"{path}: {message}"))

    def add_each(self, name: str, message: str, tensors: list[str]) -> None:
        """One problem for each of the first tensors, and one that counts the others."""
        for tensor in tensors[:TOLD_MAX]:
            self.add(name, message.format(repr(tensor)[:200]), tensor=tensor)
        if len(tensors) > TOLD_MAX:
            self.add(name, message.format(f"{len(tensors) - TOLD_MAX:,} more"))


def is_export(directory: str) -> bool:
    """Return True if ``directory``, a path or URL, has files of weights or an index, as readers look for them."""
    return has_entry(directory, lambda name: name.endswith((SUFFIX, INDEX_SUFFIX)))


def verify_export(directory: str) -> tuple[Problem, ...]:
    """Return the problems of the export in ``directory``; none if a reader gets what its writer meant.

    directory: a path, or a URL as `holdfast.validation.located` returns it.
    """
    files = files_at(directory)
    findings = _Findings(files)
    names, odd, told, refused = files.entries()
    findings.problems += map(problem_of, refused)
    for name, message in told:
        findings.add(name, message)
    weights: dict[str, _Sizes | None] = {name: None for name in odd if name.endswith(SUFFIX)}
    weights |= _sizes_of([name for name in names if name.endswith(SUFFIX) and "/" not in name], findings)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and "/" not in name]
    indexed: set[str] = set()
    for name in indexes:
        indexed |= _check_index(name, weights, findings)
    _check_files_of_weights(weights, indexes, indexed, findings)
    for name in names:
        if name.endswith(".json") and name not in indexes and name != MANIFEST_NAME:
            _check_json(name, findings)
    _check_manifest({*names, *odd}, findings)
    return tuple(findings.problems)


# files ---------------------------------------------------------------------------------------------------------


def _path(files: ExportFiles, name: str) -> str:
    return os.path.join(files.directory, name) if name else files.directory


def _read_whole(files: ExportFiles, name: str, limit: int) -> bytes:
    """A file that is read for what it says. Raises `CheckpointCorrupt` if it is larger than that, `StorageError`."""
    _, size = files.read(name, 0)
    if size > limit:
        path = _path(files, name)
        message = f"{path}: {size:,} bytes are more than anybody reads of such a file ({limit:,})"
        raise CheckpointCorrupt(message, path=path, byte_range=(0, size))
    return files.read(name, limit)[0]


def _check_json(name: str, findings: _Findings) -> None:
    """A file beside the weights: whatever is in it, a reader must be able to parse it."""
    try:
        data = _read_whole(findings.files, name, JSON_BYTES_MAX)
        text = data.decode()
        if len(data) > BUILT_BYTES_MAX:
            _decode_any(text)
            return
        found = json.loads(text)  # which takes infinities and NaN, as what reads these files does
        if name == "config.json" and not isinstance(found, dict):
            findings.add(name, "this is no JSON object")
    except _MALFORMED as error:
        findings.add(name, f"this is no JSON: {_shortly(error)}", at=(0, len(data)))
    except HoldfastError as error:
        findings.problems.append(problem_of(error))


def _check_manifest(names: set[str], findings: _Findings) -> None:
    """Every file that the manifest names is there. Its own digest, and theirs, are for `verify_source` to compare."""
    if MANIFEST_NAME not in names:
        return
    path = _path(findings.files, MANIFEST_NAME)
    try:
        data = _read_whole(findings.files, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        manifest = decode_manifest(data, path=path)
    except HoldfastError as error:
        findings.problems.append(problem_of(error))
        return
    for name in (*(file.name for file in manifest.files), *(line.name for line in manifest.reports)):
        if name not in names:
            findings.add(name, "it is missing; it was committed with the export")
    _check_faces(manifest, names, findings)


def _check_faces(manifest: Manifest, names: set[str], findings: _Findings) -> None:
    """Every file that has the id of its attempt in its name is there under its plain name too, as it was committed."""
    digests = {file.name: file.digest for file in manifest.files}
    for plain, stored in sorted(faces_of(manifest).items()):
        if plain.startswith("."):
            continue
        if plain not in names:
            findings.add(plain, f"it is missing; readers expect a copy of {stored} here, which the next start puts")
            continue
        try:
            same = (
                stored not in digests or xxh3_128(_read_whole(findings.files, plain, JSON_BYTES_MAX)) == digests[stored]
            )
        except HoldfastError as error:
            findings.problems.append(problem_of(error))
            continue
        if not same:
            findings.add(
                plain, f"it is no copy of {stored}, which was committed: it was changed, or is of another export"
            )


# headers -------------------------------------------------------------------------------------------------------


def _sizes_of(names: Sequence[str], findings: _Findings) -> dict[str, _Sizes | None]:
    """The tensors of each file; None, and a finding, where it can't be read as what it is called."""

    def read(name: str) -> _Sizes | HoldfastError:
        try:
            return _header_of(files, name)
        except HoldfastError as error:
            return error

    files = findings.files
    if files.reads_at_a_time > 1:
        with ThreadPoolExecutor(files.reads_at_a_time, thread_name_prefix="holdfast-read") as reading:
            found = list(reading.map(read, names))
    else:
        found = list(map(read, names))
    findings.problems += [problem_of(error) for error in found if isinstance(error, HoldfastError)]
    return {name: None if isinstance(sizes, HoldfastError) else sizes for name, sizes in zip(names, found, strict=True)}


def read_header(directory: str, name: str) -> _Sizes:
    """The bytes of every tensor in the file ``name``, whose header fits together and covers the file.

    Raises `CheckpointCorrupt` saying what doesn't, `StorageError`.
    """
    return _header_of(files_at(directory), name)


def _header_of(files: ExportFiles, name: str) -> _Sizes:
    path = _path(files, name)
    head, size = files.read(name, LENGTH_BYTES)
    length = find_length(head, file_size=size)
    if isinstance(length, Fault):
        raise corrupt_header(length, _WORDS, path=path)
    header = find_tensors(files.read(name, length, LENGTH_BYTES)[0], file_size=size)
    if isinstance(header, Fault):
        # Of a file that ends too early nobody knows which tensors are missing.
        raise corrupt_header(
            header._replace(tensor=None) if header.kind in ("cut", "more") else header, _WORDS, path=path
        )
    return {tensor.name: tensor.end - tensor.start for tensor in header.tensors}


# the index -----------------------------------------------------------------------------------------------------


def _check_index(name: str, weights: Mapping[str, _Sizes | None], findings: _Findings) -> set[str]:
    """Compare an index with the headers; returns the files that it names, damaged and missing ones too."""
    try:
        data = _read_whole(findings.files, name, JSON_BYTES_MAX)
        index = _decode_index(data)
    except _MALFORMED as error:
        findings.add(name, f"this is no index: {_shortly(error)}", at=(0, len(data)))
        return set()
    except HoldfastError as error:
        findings.problems.append(problem_of(error))
        return set()
    mapped = index.weight_map
    files = set(mapped.values())
    for file in sorted(files):
        if file not in weights:
            missing = "is not in the export" if name_fault(file) is None else "is no name of a file in the export"
            findings.add(name, f"it names the file {file!r:.200}, which {missing}")
    known = {file: sizes for file in files if (sizes := weights.get(file)) is not None}
    _check_map(name, mapped, known, findings)
    said = index.metadata.total_size if index.metadata is not None else None
    total = sum(sum(sizes.values()) for sizes in known.values())
    if said is not None and said != total and len(known) == len(files):
        findings.add(name, f"its total_size is {said!r:.80}, and its tensors have {total:,} bytes")
    return files


def _check_map(name: str, mapped: Mapping[str, str], known: Mapping[str, _Sizes], findings: _Findings) -> None:
    absent: dict[str, list[str]] = {}
    for tensor, file in mapped.items():
        if file in known and tensor not in known[file]:
            absent.setdefault(file, []).append(tensor)
    for file, tensors in sorted(absent.items()):
        findings.add_each(name, f"it has {{}} in {_braced(file)}, which doesn't hold it", sorted(tensors))
    for file, sizes in sorted(known.items()):
        unnamed = sorted(tensor for tensor in sizes if tensor not in mapped)
        findings.add_each(name, f"{{}} is in {_braced(file)}, and it doesn't name it", unnamed)
        elsewhere = sorted(tensor for tensor in sizes if mapped.get(tensor, file) != file)
        findings.add_each(name, f"{{}} is in {_braced(file)} too, where it doesn't have it", elsewhere)


def _check_files_of_weights(
    weights: Mapping[str, _Sizes | None], indexes: list[str], indexed: set[str], findings: _Findings
) -> None:
    """Check what a reader would load: one file, or the files of an index."""
    numbered = [name for name in weights if _NUMBERED.fullmatch(name) and name not in indexed]
    if numbered and not indexes:
        findings.add(numbered[0], f"{len(numbered):,} numbered files of weights, and no index that names them")
    elif numbered and indexed:
        for name in numbered[:TOLD_MAX]:
            findings.add(name, "no index names this file of weights")
    if WEIGHTS_NAME in weights and INDEX_NAME in indexes and indexed - {WEIGHTS_NAME}:
        findings.add(WEIGHTS_NAME, "with this file here, readers don't look at the index beside it")


# what they share -----------------------------------------------------------------------------------------------


def _braced(name: str) -> str:
    return repr(name)[:200].replace("{", "{{").replace("}", "}}")


def _shortly(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]
