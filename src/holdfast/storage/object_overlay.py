"""An object store whose changes stay in memory, to show what a recovery would do below a URL. Torch-free.

    ObjectStorage(ObjectOverlay(ObjectStore("s3://bucket/run")))

Guarantees: no request changes the store; reads and listings see the effects of the calls before. An object is copied
without reading it.
Assumes: nobody else changes the store meanwhile. For one thread at a time, except reads.
Does not: ask the store's clock, which takes an object: what is put here has this host's time.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from holdfast.errors import StorageError
from holdfast.storage.object_store import Listed, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.storage.object_client import ObjectClient


class _Changed(NamedTuple):
    """What became of an object: its new bytes, or the object of the store that was copied to it; neither: removed."""

    data: bytes | None = None
    copy_of: str | None = None
    modified_s: float = 0.0


class ObjectOverlay:
    """The objects of ``base``, which is only read."""

    def __init__(self, base: ObjectClient) -> None:
        self._base = base
        self.url, self.options = base.url, base.options
        self.can_replace = base.can_replace
        self._changed: dict[str, _Changed] = {}

    refuses_damage: Final = True

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return self._base.url_of(name)

    # Reading. ----------------------------------------------------------------------------------------------------

    def get(self, name: str, start: int = 0, end: int | None = None, *, ends_s: float) -> tuple[memoryview, int]:
        return self.get_tagged(name, start, end, ends_s=ends_s)[:2]

    def get_tagged(
        self, name: str, start: int = 0, end: int | None = None, *, ends_s: float
    ) -> tuple[memoryview, int, Tag]:
        name, data = self._now(name)
        if data is None:
            return self._base.get_tagged(name, start, end, ends_s=ends_s)
        if start and start >= len(data):
            self._refuse(name, errno.ERANGE)
        return memoryview(data)[start:end], len(data), Tag(f"{hash(data)}", None)

    def modified_s(self, name: str, *, ends_s: float) -> float:
        changed = self._changed.get(name)
        name, data = self._now(name)
        if data is None or changed is None:
            return self._base.modified_s(name, ends_s=ends_s)
        return changed.modified_s

    def size(self, name: str, *, ends_s: float) -> int | None:
        changed = self._changed.get(name, _Changed(copy_of=name))
        if changed.copy_of is not None:
            return self._base.size(changed.copy_of, ends_s=ends_s)
        return None if changed.data is None else len(changed.data)

    def names(self, below: str, *, ends_s: float) -> list[str]:
        if not self._changes_below(below):
            return self._base.names(below, ends_s=ends_s)
        return sorted({row.name.partition("/")[0] for row in self.objects(below, ends_s=ends_s)})

    def any_below(self, below: str, *, ends_s: float) -> bool:
        if not self._changes_below(below):
            return self._base.any_below(below, ends_s=ends_s)
        return bool(self.objects(below, ends_s=ends_s))

    def objects(self, below: str, *, ends_s: float) -> list[Listed]:
        start = f"{below}/" if below else ""
        rows = {f"{start}{row.name}": row for row in self._base.objects(below, ends_s=ends_s)}
        for name in self._changes_below(below):
            rows.pop(name, None)
            nbytes = self.size(name, ends_s=ends_s)
            if nbytes is not None:
                rows[name] = Listed(name.removeprefix(start), nbytes, self._changed[name].modified_s)
        return [rows[name] for name in sorted(rows)]

    def _changes_below(self, below: str) -> list[str]:
        return [name for name in self._changed if not below or name.startswith(f"{below}/")]

    def _now(self, name: str) -> tuple[str, bytes | None]:
        """Return the object of the store that ``name`` stands for, or the bytes that it was given here."""
        changed = self._changed.get(name, _Changed(copy_of=name))
        if changed.copy_of is not None:
            return changed.copy_of, None
        if changed.data is None:
            self._refuse(name, errno.ENOENT)
        return name, changed.data

    # Writing, here only. -----------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        data: memoryview | bytes,
        *,
        ends_s: float,  # noqa: ARG002 - the client's signature
        before_part: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        before_part(len(data))
        self._changed[name] = _Changed(data=bytes(data), modified_s=time.time())

    def create(self, name: str, data: bytes, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        try:
            found, _ = self.get(name, ends_s=ends_s)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            self.put(name, data, ends_s=ends_s)
            return True
        return ours(bytes(found))

    def replace(self, name: str, data: bytes, tag: Tag, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        found, _, now = self.get_tagged(name, ends_s=ends_s)
        if now != tag:
            return ours(bytes(found))
        self.put(name, data, ends_s=ends_s)
        return True

    def copy(self, name: str, to: str, *, ends_s: float) -> None:
        if self.size(name, ends_s=ends_s) is None:
            self._refuse(name, errno.ENOENT)
        of, data = self._now(name)
        self._changed[to] = _Changed(data, of if data is None else None, time.time())

    def delete(self, names: Sequence[str], *, ends_s: float) -> None:  # noqa: ARG002 - the client's signature
        self._changed.update(dict.fromkeys(names, _Changed()))

    def _refuse(self, name: str, code: int) -> NoReturn:
        path = self.url_of(name)
        raise StorageError(f"can't read {path}: {errno.errorcode[code]}", path=path, errno=code)
