"""The interface of a client of an object store, and which client is made for a URL. Torch-free.

    s3://, gs://, az://          `holdfast.storage.object_store.ObjectStore`, over obstore
    fsspec+PROTOCOL://, msc://   `holdfast.storage.fsspec_store.CallStore`, over fsspec or NVIDIA's Multi-Storage Client

Clients guarantee that an object is there whole or not at all, that an acknowledged one is durable, and that `create`
replaces nothing where the store keeps its condition (`ObjectStorage.make_root` proves that it does). They raise
`StorageError` with the errnos of `holdfast.storage.object_store`, and are thread-safe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from holdfast.storage.object_store import ObjectStore
from holdfast.validation import is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.storage.object_store import Listed, Tag


class ObjectClient(Protocol):
    """The objects below ``url``. ``ends_s``: the deadline of a call, on the monotonic clock."""

    url: str
    options: dict[str, Any]
    """What it was made with besides; an engine makes another client of the same."""

    @property
    def can_replace(self) -> bool:
        """True if `replace` can succeed: the store replaces an object only if it is still the one that was read."""
        ...

    @property
    def refuses_damage(self) -> bool:
        """True where each upload has a checksum, to a service that is known to refuse data that differs from it."""
        ...

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        ...

    def get(self, name: str, start: int = 0, end: int | None = None, *, ends_s: float) -> tuple[memoryview, int]:
        """Read bytes ``start`` to ``end`` (None: all), fewer where the object is shorter; also return its size."""
        ...

    def get_tagged(
        self, name: str, start: int = 0, end: int | None = None, *, ends_s: float
    ) -> tuple[memoryview, int, Tag]:
        """Read as `get`, and return what `replace` takes."""
        ...

    def modified_s(self, name: str, *, ends_s: float) -> float:
        """Return when the object was put, in seconds since the epoch by the store's clock."""
        ...

    def size(self, name: str, *, ends_s: float) -> int | None:
        """Return the size of an object in bytes; None where there is none."""
        ...

    def names(self, below: str, *, ends_s: float) -> list[str]:
        """List the objects and prefixes one level below, sorted."""
        ...

    def any_below(self, below: str, *, ends_s: float) -> bool:
        """Return True if there is an object below, at any depth."""
        ...

    def objects(self, below: str, *, ends_s: float) -> list[Listed]:
        """List all objects below."""
        ...

    def put(
        self, name: str, data: memoryview | bytes, *, ends_s: float, before_part: Callable[[int], None] = ...
    ) -> None:
        """Store ``data``, replacing any object there; before_part: called before each part is sent, may raise."""
        ...

    def create(self, name: str, data: bytes, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` unless an object of that name exists; return True if the object there now is ours."""
        ...

    def replace(self, name: str, data: bytes, tag: Tag, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` if the object there is still that of ``tag``; return and raise as `create`."""
        ...

    def copy(self, name: str, to: str, *, ends_s: float) -> None:
        """Store the object ``name`` as ``to`` too, replacing any object there."""
        ...

    def delete(self, names: Sequence[str], *, ends_s: float) -> None:
        """Remove objects; absent ones are fine."""
        ...


def open_client(url: str, options: Mapping[str, Any] | None = None) -> ObjectClient:
    """Return the client for ``url``; sends no request. Raises `ConfigError`, also where a package is missing."""
    if is_foreign(url):
        from holdfast.storage.fsspec_store import CallStore

        return CallStore(url, options)
    return ObjectStore(url, options)
