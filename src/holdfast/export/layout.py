"""Compute the position of every byte of a Hugging Face export: file names, headers, ranges and the index.

    layout(targets)                one model: ``model.safetensors``, or numbered files and their index
    layout_parts([Part, Part])     several models, each with its own prefix and files, and one index over all of them
    adapter_layout(targets)        an adapter, as PEFT names it: one file, however large

Guarantees: what the files and the index are made of is, byte for byte, what transformers' ``save_pretrained`` writes
for a state dict of these tensors in this order: which tensor goes to which file, the names of the files, the order of
tensors inside them (by element type, then by name), headers and padding as the safetensors library renders them (0.8),
the JSON of the index. Pure and torch-free. Everything that can't be written, or would not be read again, is a
`ConfigError` that names the tensor.

Assumes: the caller has dropped tied duplicates, and says which tensors lie in one storage (`TargetTensor.storage`).
Does not: hold or move any data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError
from holdfast.format.safetensors import (
    CODE_BITS,
    HEADER_BYTES_MAX,
    INDEX_NAME,
    RESERVED_NAME,
    TORCH_CODES,
    WEIGHTS_NAME,
    is_file_beside,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
SUFFIX: Final = ".safetensors"
HEADER_ALIGN_BYTES: Final = 8

_RANK: Final = {code: rank for rank, code in enumerate(CODE_BITS)}
_ZERO_SIZE: Final = ("zero-size",)
_encode: Final[Callable[[str], str]] = json.JSONEncoder(ensure_ascii=False).encode
_FILE_NAME: Final = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor to export. ``shape`` is what the header says: of F4, twice as many elements as torch's pairs."""

    name: str
    code: str
    shape: tuple[int, ...]
    storage: str | None = None
    """Tensors of one storage go to one file, that of the first of them, and count together there.

    ``save_pretrained`` looks at storages: experts that were split off a stacked parameter by views are such a case, and
    a plan that took them for separate tensors would put them into other files.
    """


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in its file: its payload is bytes ``start`` to ``stop`` of the file, row-major, without gaps."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HFFile:
    """One file of weights: ``header`` is its first bytes, ``tensors`` what follows, in this order, up to ``size``."""

    name: str
    header: bytes
    tensors: tuple[FileTensor, ...]
    size: int


@dataclass(frozen=True, slots=True)
class HFLayout:
    """The files of an export in the order of their numbers, and the index over them; None where one file needs none."""

    files: tuple[HFFile, ...]
    index: bytes | None
    index_name: str
    total_size: int
    """Bytes of all tensors, without headers."""


@dataclass(frozen=True, slots=True)
class SubModel:
    """One of several models of an export: ``prefix`` goes before the names of its tensors, as it is (with its dot).

    ``weights_name`` names its files: ``vision.safetensors``, or ``vision-00001-of-00002.safetensors`` and so on.
    """

    targets: tuple[TargetTensor, ...]
    prefix: str = ""
    weights_name: str = WEIGHTS_NAME


def target_of(name: str, dtype: str, shape: Sequence[int], *, storage: str | None = None) -> TargetTensor:
    """The target for a tensor of torch's type ``dtype`` (its name without ``torch.``) and shape. `ConfigError`."""
    code = TORCH_CODES.get(dtype)
    if code is None:
        raise ConfigError(
            f"{name!r:.200} is of type {dtype!r:.80}, which safetensors files can't hold; choose "
            f"another dtype by the key map or `dtype` (supported: {', '.join(TORCH_CODES)})",
            field="dtype",
        )
    stored = tuple(shape)
    if code == "F4" and stored:
        stored = (*stored[:-1], 2 * stored[-1])
    return TargetTensor(name, code, stored, storage)


def layout(
    targets: Iterable[TargetTensor],
    *,
    max_shard_bytes: int,
    total_parameters: int,
    prefix: str = "",
    weights_name: str = WEIGHTS_NAME,
    index_name: str = INDEX_NAME,
    metadata: Mapping[str, str] | None = None,
) -> HFLayout:
    """The files of one model, whose ``targets`` come in the order of its state dict.

    max_shard_bytes: payload of one file, at least 1; a tensor larger than that has a file of its own.
    total_parameters: what the index says of it: ``model.num_parameters()``.
    prefix: goes before the name of each tensor, as it is.
    weights_name: ends in ``.safetensors``; several files are numbered before that ending.
    metadata: what each header says beside its tensors; None is ``{"format": "pt"}``, which transformers asks for. Of
        several entries, safetensors itself leaves the order to chance; here they are sorted.

    Raises `ConfigError` for what can't be written: names that come twice or are reserved, unknown element types, no
    tensors at all, a header longer than readers take.
    """
    return layout_parts(
        [SubModel(tuple(targets), prefix, weights_name)],
        max_shard_bytes=max_shard_bytes,
        total_parameters=total_parameters,
        index_name=index_name,
        metadata=metadata,
    )


def adapter_layout(targets: Iterable[TargetTensor]) -> HFLayout:
    """The one file of an adapter, under PEFT's name. What loads adapters knows neither numbered files nor an index."""
    part = SubModel(tuple(targets), weights_name=ADAPTER_WEIGHTS_NAME)
    whole = max(1, sum(map(target_nbytes, part.targets)))
    return layout_parts([part], max_shard_bytes=whole, total_parameters=0)


def layout_parts(
    parts: Sequence[SubModel],
    *,
    max_shard_bytes: int,
    total_parameters: int,
    index_name: str = INDEX_NAME,
    metadata: Mapping[str, str] | None = None,
    indexed: bool = False,
) -> HFLayout:
    """The files of several models that one index describes; see `layout`, ``total_parameters`` being that of all.

    indexed: there is an index also over a single file, which may be stored under another name than its own.

    Of several parts each has its own files: none shares one with another. A reader that finds ``model.safetensors``
    looks for no index, so where there is one, a part's only file of that name is numbered as well.
    """
    _require_count("max_shard_bytes", max_shard_bytes, 1)
    _require_count("total_parameters", total_parameters, 0)
    _require_file_name("index_name", index_name, ".json")
    rendered = _metadata_json(metadata)
    split: list[tuple[SubModel, list[list[TargetTensor]]]] = []
    for part in parts:
        _require_file_name("weights_name", part.weights_name, SUFFIX)
        targets = _checked(part)
        split.append((part, _split(targets, max_shard_bytes)))
    if not split:
        raise ConfigError("no model was given to export", field="parts")
    _require_unique([target.name for _, shards in split for shard in shards for target in shard], "tensor")
    single = len(split) == 1 and len(split[0][1]) == 1
    files = tuple(
        _place(name, shard, rendered)
        for part, shards in split
        for name, shard in zip(_file_names(part.weights_name, len(shards), single=single), shards, strict=True)
    )
    alone = single and not indexed
    _require_unique([file.name for file in files] + ([] if alone else [index_name]), "file")
    total_size = sum(tensor.stop - tensor.start for file in files for tensor in file.tensors)
    index = None if alone else _index(files, total_parameters, total_size)
    return HFLayout(files, index, index_name, total_size)


def target_nbytes(target: TargetTensor) -> int:
    """Bytes of a target's payload. Raises `ConfigError` for what no file can hold."""
    bits = CODE_BITS.get(target.code)
    if bits is None:
        raise ConfigError(
            f"{target.name!r:.200} has the element type {target.code!r:.80}, which safetensors "
            f"doesn't support; supported are {', '.join(CODE_BITS)}",
            field="dtype",
        )
    count = 1
    for length in target.shape:
        if type(length) is not int or length < 0:
            raise ConfigError(f"{target.name!r:.200} can't have the shape {target.shape!r:.200}", field="shape")
        count *= length
    if count * bits >> 66:
        raise ConfigError(f"{target.name!r:.200} is too large for a file: {target.shape!r:.200}", field="shape")
    if count * bits % 8:
        raise ConfigError(
            f"{target.name!r:.200}: {count} elements of {bits} bits are not a whole number of bytes ({target.code})",
            field="shape",
        )
    return count * bits // 8


# what may be written -------------------------------------------------------------------------------------------


def _checked(part: SubModel) -> list[TargetTensor]:
    """The targets under their final names, each of which a header can hold."""
    if not part.targets:
        raise ConfigError(f"there is no tensor to write to {part.weights_name}", field="targets")
    targets = []
    for target in part.targets:
        if type(target.name) is not str:
            raise ConfigError(f"{target.name!r:.200} can't be the name of a tensor: names are strings", field="targets")
        name = part.prefix + target.name
        if name == RESERVED_NAME:
            raise ConfigError(
                f"{name!r} can't be the name of a tensor: safetensors keeps its metadata under it; rename it by the "
                "key map",
                field="targets",
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name!r:.200} can't be the name of a tensor: it is not valid Unicode text", field="targets"
            ) from error
        targets.append(replace(target, name=name) if part.prefix else target)
    return targets


def _require_count(field: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{field} is {value!r:.80}, expected a whole number of at least {least}", field=field)


def _require_file_name(field: str, name: str, ending: str) -> None:
    plain = type(name) is str and _FILE_NAME.fullmatch(name) is not None and is_file_beside(name)
    if not plain or not name.endswith(ending) or len(name) == len(ending) or not _encodable(name, 200):
        raise ConfigError(f"{name!r:.200} is not a plain file name that ends in {ending!r}", field=field)


def _encodable(name: str, nbytes: int) -> bool:
    try:
        return len(name.encode()) <= nbytes
    except UnicodeEncodeError:
        return False


def _require_unique(names: list[str], what: str) -> None:
    if len(set(names)) == len(names):
        return
    twice = [name for name, count in Counter(names).items() if count > 1]
    shown = ", ".join(repr(name)[:200] for name in twice[:8])
    raise ConfigError(
        f"{len(twice)} {what} names come more than once: {shown}{' ...' if len(twice) > 8 else ''}; "
        f"give each {what} a unique name, by the key map or by another prefix",
        field="targets" if what == "tensor" else "weights_name",
    )


# which tensor goes to which file -------------------------------------------------------------------------------


def _split(targets: Sequence[TargetTensor], max_shard_bytes: int) -> list[list[TargetTensor]]:
    """One list a file. First come, first served: a file is closed when the next tensor would make it too large.

    Tensors of one storage are placed when the first of them comes, all of them, with the size of the storage: what they
    take together. Zero-size tensors have no memory, which makes them one storage as well.
    """
    sizes = [target_nbytes(target) for target in targets]
    together: Counter[str] = Counter()
    for target, size in zip(targets, sizes, strict=True):
        if target.storage is not None:
            together[target.storage] += size
    members: dict[object, list[TargetTensor]] = {}
    held: Counter[object] = Counter()
    for number, (target, size) in enumerate(zip(targets, sizes, strict=True)):
        shared = target.storage is not None and together[target.storage] > 0
        storage: object = target.storage if shared else number if size else _ZERO_SIZE
        members.setdefault(storage, []).append(target)
        held[storage] += size
    files: list[list[TargetTensor]] = []
    filling: list[TargetTensor] = []
    filled = 0
    for storage, tensors in members.items():
        size = held[storage]
        if size > max_shard_bytes:
            files.append(tensors)
            continue
        if filled + size > max_shard_bytes:
            files.append(filling)
            filling, filled = [], 0
        filling.extend(tensors)
        filled += size
    return [*files, filling] if filling else files


def _file_names(weights_name: str, count: int, *, single: bool) -> list[str]:
    if single or (count == 1 and weights_name != WEIGHTS_NAME):
        return [weights_name]
    stem = weights_name.removesuffix(SUFFIX)
    return [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


# the bytes -----------------------------------------------------------------------------------------------------


def _metadata_json(metadata: Mapping[str, str] | None) -> str:
    entries = {"format": "pt"} if metadata is None else dict(metadata)
    for key, value in entries.items():
        if not (type(key) is str and type(value) is str and _encodable(key, 1 << 24) and _encodable(value, 1 << 24)):
            raise ConfigError(
                f"the metadata {key!r:.80}: {value!r:.80} can't be stored in a header: both must be strings",
                field="metadata",
            )
    return "{" + ",".join(f"{_encode(key)}:{_encode(entries[key])}" for key in sorted(entries)) + "}"


def _place(name: str, targets: Sequence[TargetTensor], metadata: str) -> HFFile:
    """Render the header, and with its length known give every tensor its place in the file."""
    ordered = sorted(targets, key=lambda target: (_RANK[target.code], target.name))
    members = [f'"{RESERVED_NAME}":{metadata}']
    ends = []
    end = 0
    for target in ordered:
        start, end = end, end + target_nbytes(target)
        shape = ",".join(map(str, target.shape))
        members.append(
            f'{_encode(target.name)}:{{"dtype":"{target.code}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
        )
        ends.append(end)
    text = ("{" + ",".join(members) + "}").encode()
    text += b" " * (-len(text) % HEADER_ALIGN_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(
            f"{name} would have a header of {len(text):,} bytes for its {len(ordered):,} tensors, and readers take "
            f"{HEADER_BYTES_MAX:,}; lower max_shard_bytes, so that there are more files",
            field="max_shard_bytes",
        )
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    placed = tuple(
        FileTensor(target.name, target.code, target.shape, base + start, base + stop)
        for target, start, stop in zip(ordered, [0, *ends[:-1]], ends, strict=True)
    )
    return HFFile(name, header, placed, base + end)


def _index(files: Sequence[HFFile], total_parameters: int, total_size: int) -> bytes:
    document = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
