"""A program: many threads decode each class of Holdfast's at one moment, for the first time in this process."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

import holdfast

THREADS = 8
APART = ("holdfast.integrations", "holdfast.testing", "holdfast.sync.adapters", "holdfast.__main__")


def import_all() -> None:
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.startswith(APART) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def below(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield found
        yield from below(found)


def some_data(kind: Any) -> bytes:
    """Return values of a wrong type for each field, so that the type of each is looked at."""
    names = kind.__struct_encode_fields__
    values: Any = [1] * len(names) if kind.__struct_config__.array_like else dict.fromkeys(names, 1)
    tag = kind.__struct_config__.tag
    if tag is not None:
        values = [tag, *values] if isinstance(values, list) else {kind.__struct_config__.tag_field: tag, **values}
    return msgspec.msgpack.encode(values)


def decode_at_once(kind: Any) -> None:
    data, start = some_data(kind), threading.Barrier(THREADS)

    def decode() -> None:
        start.wait()
        with contextlib.suppress(msgspec.ValidationError, NameError):  # NameError: of a class that isn't for messages
            msgspec.msgpack.decode(data, type=kind)

    threads = [threading.Thread(target=decode) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    import_all()
    sys.setswitchinterval(1e-7)
    kinds = [kind for kind in below(msgspec.Struct) if kind.__module__.startswith("holdfast.")]
    for kind in kinds:
        sys.stdout.write(f"{kind.__module__}.{kind.__qualname__}\n")
        sys.stdout.flush()
        decode_at_once(kind)
    sys.stdout.write(f"all {len(kinds)}\n")
