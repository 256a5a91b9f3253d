"""Leases of attempts as objects, renewed by a thread of their own. Torch-free.

Guarantees: the object is there when the lease is made, and is put again every `RENEWAL_S` until the lease is stopped,
which removes it. A lease that can't be renewed is logged and tried again.
Does not: tell that a holder lives; recovery watches whether the object changes. That a process of this host has ended
is known at once (`has_ended`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import StorageError
from holdfast.storage.leases import boot_id, encode_record, new_record
from holdfast.storage.object_store import PATIENCE_S

if TYPE_CHECKING:
    from holdfast.storage.leases import LeaseRecord
    from holdfast.storage.object_client import ObjectClient

RENEWAL_S: Final = 10.0
"""Seconds from the end of one renewal of a lease to the next: requests cost money, and recovery waits longer anyway."""
_log = logging.getLogger("holdfast.storage")


def record_of_process(rank: int) -> LeaseRecord:
    """A record for this process, which only those who see its pid will look for."""
    return msgspec.structs.replace(new_record(rank), boot_id=_pids_here())


def has_ended(record: LeaseRecord) -> bool:
    """Return True if the process of ``record`` would be seen here, and isn't; False where that can't be told."""
    here = _pids_here()
    return bool(here) and record.boot_id == here and not os.path.exists(f"/proc/{record.pid}")


def _pids_here() -> str:
    """Name the boot and the pid namespace: containers of a host have the first in common, and not the second."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class ObjectLease:
    """A lease as an object, renewed by a thread of its own. Raises `StorageError` where it can't be put at first."""

    def __init__(self, store: ObjectClient, key: str, record: LeaseRecord, *, renewal_s: float = RENEWAL_S) -> None:
        self._store, self._key, self._record, self._renewal_s = store, key, record, renewal_s
        self._put(time.monotonic() + PATIENCE_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-lease", daemon=True)
        self._thread.start()

    def stop(self, *, wait_s: float) -> None:
        """Remove the lease; waits at most ``wait_s`` for it."""
        self._stop.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stop.wait(self._renewal_s):
            self._record = msgspec.structs.replace(self._record, counter=self._record.counter + 1)
            try:
                # Not for longer than until the next is due: a late renewal must not outlive the lease by much.
                self._put(time.monotonic() + self._renewal_s)
            except StorageError as error:
                _log.warning("a lease is not renewed now: %s", error)
        try:
            self._store.delete([self._key], ends_s=time.monotonic() + PATIENCE_S)
        except StorageError as error:
            _log.warning("a lease that is over remains, and will be seen to be: %s", error)

    def _put(self, ends_s: float) -> None:
        self._store.put(self._key, encode_record(self._record), ends_s=ends_s)
