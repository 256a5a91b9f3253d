"""How an engine writes one attempt to an object store: `holdfast.storage.protocol.AttemptWriter`. Torch-free.

Imported by the engine, on a `WriterTarget` whose args are those of `open_writer`. An attempt's objects lie side by side
with those of others at the same name, and have the attempt's id in their names (`with_attempt`):

    step-100/__0_0.0123456789ab.distcp    data, uploaded from the image's memory
    step-100/rank-00000.0123456789ab.report
    step-100/lease-00000.0123456789ab     a `LeaseRecord`, put again every `RENEWAL_S` while the engine lives

Guarantees: an object is there whole or not at all, and durable once its call has returned. A lease that can't be
renewed is logged and tried again: the uploads report a store that fails.
Assumes: nobody else writes objects of this attempt and rank. All attempts of an engine share the `CLIENT_THREADS` of
its HTTP client, which keep the nice level, I/O class and cores of the attempt that was first to use them.
Does not: publish, list, or remove what it has written unless it is told to.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from holdfast.storage.object_client import open_client
from holdfast.storage.object_leases import ObjectLease, record_of_process
from holdfast.storage.object_storage import ACCESS_VARIABLES, ObjectStorage, with_attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.object_client import ObjectClient

REMOVAL_S: Final = 600.0
"""How long the removal of one tree may take."""
READ_S: Final = 120.0
"""How long it may take to read one range back."""
CLIENT_THREADS: Final = 4
"""Threads of the HTTP client of an engine, instead of one for each core of the host: they hash, encrypt and send."""


_environment = threading.Lock()


def open_writer(
    url: str, directory: str, attempt: str, options_json: str = "{}", access_json: str = ""
) -> ObjectWriter:
    """Return the writer of ``attempt`` in ``directory`` below ``url``; sends no request.

    directory: the name that is being published, or what `ObjectStorage.directory_of` made of it; empty: the root, from
    which trash is removed. options_json: the options of the client, as a JSON object. access_json: the
    trainer's environment variables that begin with `ACCESS_VARIABLES`, which replace those of this process; empty to
    leave them. Raises `ConfigError`.
    """
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(CLIENT_THREADS))
    with _environment:
        if access_json:
            access = json.loads(access_json)
            for name in [name for name in os.environ if name.startswith(ACCESS_VARIABLES) and name not in access]:
                del os.environ[name]
            os.environ.update(access)
        store = open_client(url, json.loads(options_json))
    return ObjectWriter(store, directory.partition("//")[0], attempt)


class ObjectWriter:
    """Writes the objects of ``attempt`` at ``name`` of ``store``; see `AttemptWriter`. Thread-safe."""

    def __init__(self, store: ObjectClient, name: str, attempt: str) -> None:
        self._store, self._name, self._attempt = store, name, attempt

    @property
    def path(self) -> str:
        return self._store.url_of(self._name)

    def stored_as(self, file: str) -> str:
        return with_attempt(file, self._attempt)

    def upload(self, file: str, data: memoryview, *, before_part: Callable[[int], None]) -> None:
        self._store.put(self._key(file), data, ends_s=math.inf, before_part=before_part)

    def read_back(self, file: str, start: int, end: int) -> memoryview | None:
        if self._store.refuses_damage:
            return None
        return self._store.get(self._key(file), start, end, ends_s=time.monotonic() + READ_S)[0]

    def put(self, file: str, data: bytes) -> None:
        self._store.put(self._key(file), data, ends_s=math.inf)

    def remove(self, file: str) -> None:
        self._store.delete([self._key(file)], ends_s=math.inf)

    def remove_tree(self, name: str) -> None:
        storage = ObjectStorage(self._store)
        storage.until(time.monotonic() + REMOVAL_S)
        storage.remove_tree(f"{self._name}/{name}" if self._name else name)

    def hold_lease(self, name: str, *, rank: int) -> ObjectLease:
        return ObjectLease(self._store, self._key(name), record_of_process(rank))

    def end(self) -> None:
        storage = ObjectStorage(self._store)
        storage.until(time.monotonic() + REMOVAL_S)
        storage.remove_if_void(self._name, self._attempt)

    def _key(self, file: str) -> str:
        return f"{self._name}/{self.stored_as(file)}"
