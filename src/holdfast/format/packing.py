"""Values to JSON and msgpack, and structs back, what goes wrong being an error of ours. Torch-free, no I/O."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from holdfast.errors import CheckpointCorrupt, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_T = TypeVar("_T")


def metric_value(name: str, value: float) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is {value!r}, which isn't a number", field="metrics") from error
    return number if math.isfinite(number) else str(number)


def json_text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{value!r:.200} can't go into a manifest, which is JSON: {error}", field="extra") from error


def json_lines(structs: Iterable[msgspec.Struct]) -> str:
    encoder = msgspec.json.Encoder()
    lines = [
        line.decode() if (line := encoder.encode(struct)).isascii() else json.dumps(msgspec.structs.asdict(struct))
        for struct in structs
    ]
    return "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")


def pack(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's index can't be written: {error}") from error


def unpack(data: bytes | memoryview, kind: type[_T], what: str, path: str) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path}: its {what} can't be read: {error}", path=path) from error
