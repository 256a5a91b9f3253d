"""What writing may take from a node, as checkpoints and exports say it alike: threads, pace, priorities, turns.

Guarantees: a value out of its range is a `ConfigError` that names the field.
Does not: enforce any of it (``engine`` does).
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypedDict, get_args

from holdfast.arguments import checked_int, unfit

IOClass = Literal["none", "best_effort", "idle"]
IO_LIMIT_LEAST: Final = 1 << 20
HOST_WRITERS_MOST: Final = 64


class Limits(TypedDict):
    """By the names that users and the engine's client have for them."""

    writers: int
    io_limit_bytes_per_s: int | None
    nice: int
    io_class: IOClass
    io_level: int | None
    host_writers: int | None


def check_limits(owner: str, config: Any) -> None:
    """Raise `ConfigError` unless ``config``, an ``owner``, has good values for all."""
    checked_int(owner, "writers", config.writers, low=1, high=16)
    checked_int(owner, "nice", config.nice, low=0, high=19)
    checked_int(owner, "io_limit_bytes_per_s", config.io_limit_bytes_per_s, low=IO_LIMIT_LEAST, optional=True)
    checked_int(owner, "io_level", config.io_level, low=0, high=7, optional=True)
    checked_int(owner, "host_writers", config.host_writers, low=1, high=HOST_WRITERS_MOST, optional=True)
    io_class, level = config.io_class, config.io_level
    if io_class not in get_args(IOClass):
        raise unfit(owner, "io_class", io_class, "one of " + ", ".join(map(repr, get_args(IOClass))))
    if level is not None and io_class != "best_effort":
        raise unfit(owner, "io_level", level, f"None with io_class={io_class!r}: it is of 'best_effort' alone")


def limits_of(config: Any) -> Limits:
    """Those of a configuration, as its engine takes them."""
    return Limits(
        writers=config.writers,
        io_limit_bytes_per_s=config.io_limit_bytes_per_s,
        nice=config.nice,
        io_class=config.io_class,
        io_level=config.io_level,
        host_writers=config.host_writers,
    )
