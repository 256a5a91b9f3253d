"""Where the simulated system is put in place of the real one: names of modules that the code looks up when it runs.

Nothing of Holdfast is replaced but for five things, each for what has no place in a simulation: how an engine is
launched and how its socket is read and written (`engine`), its mapping of a memfd, its nice level, and how it takes
O_DIRECT off a file. Clocks, threads, queues, `os`, `flock`, random ids and the requests of `obstore` are those of the
schedule.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from datetime import datetime, timedelta, timezone

import obstore
import obstore.store
from greenlet import getcurrent

from holdfast import cores
from holdfast.catalog import catalog as keeping
from holdfast.commit import recovery
from holdfast.coordination import board as coordination
from holdfast.coordination import store as store_client
from holdfast.engine import client, executor, places, removal, shared
from holdfast.engine import process as engine_process
from holdfast.engine import supervisor as link
from holdfast.engine import syscalls as calls
from holdfast.engine import write_job as attempt
from holdfast.loader.sources import holdfast as source
from holdfast.loader.sources import object_store as object_source
from holdfast.loader.sources import places as read_places
from holdfast.saver import agreement, delivery
from holdfast.saver import startup as starting
from holdfast.storage import (
    entries,
    files,
    local,
    object_leases,
    object_storage,
    object_store,
    object_writer,
    protocol,
)
from holdfast.storage import leases as lease
from holdfast.storage import locks as lock
from simulator import bucket_view, engine, objects, scheduler
from simulator.scheduler import Current
from simulator.system import FCNTL, OS, SHUTIL


class SimSecrets:
    @staticmethod
    def token_hex(nbytes):
        return f"{Current.sim.rng.getrandbits(8 * nbytes):0{2 * nbytes}x}"


class SimDatetime(datetime):
    @classmethod
    def now(cls, tz=None):
        ahead_s = getattr(getattr(getcurrent(), "process", None), "clock_ahead_s", 0.0)
        return datetime(2026, 1, 1, tzinfo=tz or timezone.utc) + timedelta(seconds=Current.sim.now + ahead_s)


class SimRandom:
    @staticmethod
    def uniform(low, high):
        return low + (high - low) * Current.sim.random()


class InlinePool:
    """A `ThreadPoolExecutor` for a thread that may do the work itself."""

    def __init__(self, *_args, **_kwargs):
        pass

    def map(self, function, items):
        return map(function, items)

    def shutdown(self, **_kwargs):
        pass


class SimSocket:
    @staticmethod
    def gethostname():
        return OS.uname().nodename


def _seams():
    for module in (coordination, store_client, keeping, shared, attempt, executor, engine_process, lease, link):
        yield module, "threading", scheduler.threading
    for module in (coordination, store_client, delivery, client, link, executor, places, engine_process, lease, lock):
        if hasattr(module, "time"):
            yield module, "time", scheduler.time
    yield recovery, "time", scheduler.time
    yield starting, "time", scheduler.time
    yield removal, "time", scheduler.time
    yield store_client, "queue", scheduler.queue
    for module in (
        local,
        lease,
        lock,
        calls,
        removal,
        delivery,
        client,
        shared,
        engine_process,
        attempt,
        executor,
        places,
        starting,
    ):
        if hasattr(module, "os"):
            yield module, "os", OS
    for module in (source, read_places, files, protocol):
        yield module, "os", OS
    yield lease, "fcntl", FCNTL
    yield lock, "fcntl", FCNTL
    yield local, "shutil", SHUTIL
    yield local, "_renameat2", lambda: OS.exchange
    yield lease, "boot_id", lambda: OS.uname().nodename
    yield calls, "_fallocate", lambda: None
    yield calls.SystemCalls, "make_buffered", lambda _calls, _fd: None
    yield engine_process, "_map_image", engine.map_image
    yield engine_process, "_be_nice", lambda _nice: None
    yield engine_process, "close_fds", engine.close_fds
    yield shared, "launch", engine.launch
    yield link, "Inbox", engine.SimInbox
    yield link, "select", engine.SimSelect
    yield link, "send", engine.send
    yield recovery, "ThreadPoolExecutor", InlinePool
    yield entries, "secrets", SimSecrets
    yield delivery, "datetime", SimDatetime
    yield delivery, "socket", SimSocket
    yield lock, "datetime", SimDatetime
    yield from _object_seams()
    # Latencies of the simulated system are some hundred microseconds; looks that are rarer than that cost no virtual
    # time worth the name, and a wait of a second costs less real time.
    yield coordination, "_FIRST_LOOK_S", 0.004
    yield coordination, "_LAST_LOOK_S", 0.1


def _object_seams():
    for module in (object_store, object_leases, object_writer, object_source):
        yield module, "time", scheduler.time
        yield module, "threading", scheduler.threading
    yield cores, "threading", scheduler.threading
    for name in ("put", "get", "head", "copy", "delete", "list_with_delimiter"):
        yield obstore, name, getattr(objects, name)
    yield obstore, "list", objects.list_all
    yield obstore.store, "from_url", objects.from_url
    yield object_store, "random", SimRandom
    yield object_storage, "secrets", SimSecrets
    yield object_storage, "ThreadPoolExecutor", objects.RacingPool
    yield object_leases, "os", objects.ProcFiles
    yield object_leases, "_pids_here", lambda: OS.uname().nodename
    # Files have two or three pages: two or three parts each. Virtual minutes say no more than seconds do.
    yield object_store, "PART_BYTES", 4096
    yield object_store, "PATIENCE_S", 8.0
    yield object_leases, "PATIENCE_S", 8.0
    yield object_leases, "RENEWAL_S", 1.0
    yield object_storage, "REPLACED_FOR_S", bucket_view.REPLACED_FOR_S
    yield object_storage.ObjectStorage, "lease_quiet_s", 3.0


@contextlib.contextmanager
def simulated_system():
    """Inside, Holdfast runs on what the current simulation gives it. For one thread; not to be nested."""
    _ = agreement
    before = [(module, name, getattr(module, name)) for module, name, _ in _seams()]
    collects = gc.isenabled()
    logging.disable(logging.CRITICAL)
    try:
        for module, name, value in _seams():
            setattr(module, name, value)
        gc.disable()  # finalizers run when the last reference goes, and at no other moment
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        logging.disable(logging.NOTSET)
        if collects:
            gc.enable()
