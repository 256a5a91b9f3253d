"""Whether an export is what a Hugging Face reader takes it for: index, headers, and the files beside them. Torch-free.

What is looked at: every file of weights, by its header: a length that fits, JSON, known element types, and payloads
that cover the rest of the file from its first byte to its last, without gap or overlap. The index against the headers,
both ways: every name in the file that it is said to be in, every tensor of these files named, and the sum of their
bytes. That no file is missing which the index or Holdfast's manifest names. That JSON files parse.

Guarantees: damage of any kind is an answer, never an exception; one damaged file is told once, and keeps no other from
being looked at. Bytes may be hostile: no size is trusted that the file doesn't bear out, no link is followed, nothing
outside the directory is opened, opening never waits. Reads headers and small files; payloads not at all.
Does not: compare checksums. Of what Holdfast published, ``verifying`` reads every byte.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import CheckpointCorrupt, HoldfastError
from holdfast.export.hf_layout import SUFFIX
from holdfast.format.manifest import MANIFEST_NAME, decode_manifest
from holdfast.format.safetensors_header import (
    INDEX_NAME,
    LENGTH_BYTES,
    WEIGHTS_NAME,
    Fault,
    corrupt_header,
    find_length,
    find_tensors,
)
from holdfast.root import MAX_MANIFEST_BYTES
from holdfast.storage.descriptors import refused
from holdfast.storage.plain import open_plain, read_at
from holdfast.verifying import Problem, problem_of

if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX_SUFFIX: Final = ".safetensors.index.json"
JSON_BYTES_MAX: Final = 256 << 20
"""Larger than any tokenizer or index that there is."""
BUILT_BYTES_MAX: Final = 16 << 20
"""JSON that nobody knows the shape of takes fifty times its size in memory; what is larger is only gone through."""
ENTRIES_MAX: Final = 65_536
DEPTH_MAX: Final = 8
TOLD_MAX: Final = 16
"""Findings of one kind about one file; what comes behind is counted."""

_NUMBERED: Final = re.compile(r".+-\d{5,}-of-\d{5,}\.safetensors", re.DOTALL)


_Sizes = dict[str, int]
"""The bytes of each tensor in a file of weights."""


class _Totals(msgspec.Struct):
    """Of an index's metadata what can be checked; other writers than transformers leave it out."""

    total_size: int | float | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Totals | None = None


_decode_index: Final = msgspec.json.Decoder(_Index).decode
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
    """What was found wrong, of each kind and file a bounded number."""

    directory: str
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str, message: str, *, tensor: str | None = None, at: tuple[int, int] | None = None) -> None:
        path = os.path.join(self.directory, name) if name else self.directory
        self.problems.append(Problem(path, tensor, at, f"{path}: {message}"))

    def add_each(self, name: str, message: str, tensors: list[str]) -> None:
        """One problem for each of the first tensors, and one that counts the others."""
        for tensor in tensors[:TOLD_MAX]:
            self.add(name, message.format(repr(tensor)[:200]), tensor=tensor)
        if len(tensors) > TOLD_MAX:
            self.add(name, message.format(f"{len(tensors) - TOLD_MAX:,} more"))


def is_export(directory: str) -> bool:
    """Whether ``directory`` holds files of weights, or an index of some, as Hugging Face readers look for them."""
    try:
        with os.scandir(directory) as entries:
            return any(entry.name.endswith((SUFFIX, INDEX_SUFFIX)) for entry in islice(entries, ENTRIES_MAX))
    except OSError:
        return False


def verify_export(directory: str) -> tuple[Problem, ...]:
    """What is wrong with the export in ``directory``; nothing, if a reader gets what its writer meant."""
    findings = _Findings(directory)
    names, odd = _names(directory, findings)
    weights: dict[str, _Sizes | None] = {name: None for name in odd if name.endswith(SUFFIX)}
    for name in names:
        if name.endswith(SUFFIX) and "/" not in name:
            weights[name] = _sizes_in(name, findings)
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


def _names(directory: str, findings: _Findings) -> tuple[list[str], list[str]]:
    """Every plain file below the directory, with slashes, sorted; and what no export holds, which is told.

    What is hidden no reader looks at, and neither do we.
    """
    names: list[str] = []
    odd: list[str] = []
    seen = 0
    below = [""]
    while below:
        place = below.pop()
        path = os.path.join(directory, place) if place else directory
        try:
            with os.scandir(path) as entries:
                here = list(islice(entries, ENTRIES_MAX + 1 - seen))
        except OSError as error:
            findings.problems.append(problem_of(refused(path, error)))
            continue
        seen += len(here)
        if seen > ENTRIES_MAX:
            findings.add(place, f"more than {ENTRIES_MAX:,} entries: this is no export; not all were looked at")
            break
        for entry in here:
            name = f"{place}/{entry.name}" if place else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if name.count("/") + 1 < DEPTH_MAX:
                    below.append(name)
                else:
                    findings.add(name, f"directories in directories, {DEPTH_MAX} deep: not looked into")
            elif entry.is_file(follow_symlinks=False):
                names.append(name)
            else:
                what = "a link" if entry.is_symlink() else "no plain file"
                findings.add(name, f"this is {what}; an export holds plain files")
                odd.append(name)
    return sorted(names), odd


def _read_whole(directory: str, name: str, limit: int) -> bytes:
    """A file that is read for what it says. Raises `CheckpointCorrupt` if it is larger than that, `StorageError`."""
    _, size = _read(directory, name, 0)
    if size > limit:
        path = os.path.join(directory, name)
        raise _corrupt(path, f"{size:,} bytes are more than anybody reads of such a file ({limit:,})", 0, size)
    return _read(directory, name, limit)[0]


def _read(directory: str, name: str, nbytes: int, start: int = 0) -> tuple[bytes, int]:
    """Up to ``nbytes`` of a file, and its size. Raises `CheckpointCorrupt`, `StorageError`."""
    path = os.path.join(directory, name)
    try:
        fd = open_plain(directory, name)
        try:
            size = os.fstat(fd).st_size
            return read_at(fd, start, min(nbytes, size - start)), size
        finally:
            os.close(fd)
    except OSError as error:
        raise refused(path, error) from error


def _check_json(name: str, findings: _Findings) -> None:
    """A file beside the weights: whatever is in it, a reader must be able to parse it."""
    try:
        data = _read_whole(findings.directory, name, JSON_BYTES_MAX)
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
    """Every file that the manifest names is there. Its own digest, and theirs, are for ``verifying`` to compare."""
    if MANIFEST_NAME not in names:
        return
    path = os.path.join(findings.directory, MANIFEST_NAME)
    try:
        data = _read_whole(findings.directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        manifest = decode_manifest(data, path=path)
    except HoldfastError as error:
        findings.problems.append(problem_of(error))
        return
    for name in (*(file.name for file in manifest.files), *(line.name for line in manifest.reports)):
        if name not in names:
            findings.add(name, "it is missing; it was committed with the export")


# headers -------------------------------------------------------------------------------------------------------


def _sizes_in(name: str, findings: _Findings) -> _Sizes | None:
    """The tensors of a file; None, and a finding, where it can't be read as what it is called."""
    try:
        return read_header(findings.directory, name)
    except HoldfastError as error:
        findings.problems.append(problem_of(error))
        return None


def read_header(directory: str, name: str) -> _Sizes:
    """The bytes of every tensor in the file ``name``, whose header fits together and covers the file.

    Raises `CheckpointCorrupt` saying what doesn't, `StorageError`.
    """
    path = os.path.join(directory, name)
    head, size = _read(directory, name, LENGTH_BYTES)
    length = find_length(head, file_size=size)
    if isinstance(length, Fault):
        raise corrupt_header(length, _WORDS, path=path)
    header = find_tensors(_read(directory, name, length, LENGTH_BYTES)[0], file_size=size)
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
        data = _read_whole(findings.directory, name, JSON_BYTES_MAX)
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
            missing = "is not in the export" if _is_plain(file) else "is no name of a file in the export"
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
    """What a reader would load: one file, or those of an index."""
    numbered = [name for name in weights if _NUMBERED.fullmatch(name) and name not in indexed]
    if numbered and not indexes:
        findings.add(numbered[0], f"{len(numbered):,} numbered files of weights, and no index that names them")
    elif numbered and indexed:
        for name in numbered[:TOLD_MAX]:
            findings.add(name, "no index names this file of weights")
    if WEIGHTS_NAME in weights and INDEX_NAME in indexes and indexed - {WEIGHTS_NAME}:
        findings.add(WEIGHTS_NAME, "with this file here, readers don't look at the index beside it")


# what they share -----------------------------------------------------------------------------------------------


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _braced(name: str) -> str:
    return repr(name)[:200].replace("{", "{{").replace("}", "}}")


def _shortly(error: BaseException) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]


def _corrupt(path: str, message: str, start: int, stop: int, tensor: str | None = None) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path}: {message}", path=path, tensor=tensor, byte_range=(start, stop))
