"""Create transports by name, for frameworks that are configured by strings and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.sync.protocol import Transport

KINDS = ("shared_memory", "process_group", "nixl", "directory")


def transport_of(kind: str, place: str | None, options: dict[str, Any] | None = None) -> Transport:
    """Return the transport ``kind`` of `KINDS` at ``place``: a rendezvous, or the directory of versions.

    options: further arguments of that transport, by name. Raises `ConfigError` naming the argument.
    """
    if not isinstance(place, str) or not place:
        raise ConfigError(
            f"place must be the path of a directory that both sides share, or 'tcp://host:port', not {place!r}",
            field="place",
        )
    from holdfast import sync

    made = {
        "shared_memory": sync.SharedMemoryTransport,
        "process_group": sync.ProcessGroupTransport,
        "nixl": sync.NixlTransport,
        "directory": sync.DirectoryTransport,
    }
    if kind not in made:
        raise ConfigError(f"transport must be one of {', '.join(KINDS)}, not {kind!r}", field="transport")
    try:
        transport: Transport = made[kind](place, **(options or {}))
    except TypeError as error:
        raise ConfigError(f"options of the transport {kind!r}: {error}", field="options") from error
    return transport


def require(module: str, framework: str, *, why: str) -> Any:
    """Import ``module``; raise `ConfigError` that ``framework`` is needed if it isn't installed."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{why} needs {framework}, but {module} can't be imported here ({error}): install {framework}, or use "
            "holdfast.sync.Publisher and Receiver by themselves",
            field=framework,
        ) from error
