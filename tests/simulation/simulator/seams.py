"""Where the simulated system is put in place of the real one: names of modules that the code looks up when it runs.

Nothing of Holdfast is replaced but for six things, each for what has no place in a simulation: how an engine is
launched and how its socket is read and written (`engine`), its mapping of a memfd, its nice level, how it takes
O_DIRECT off a file, and how a checkpoint just published is opened where it lies in a bucket. Clocks, threads,
queues, `os`, `flock` and random ids are those of the schedule.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from datetime import datetime, timedelta, timezone

from holdfast import agreement, coordination, delivery, keeping, recovery, root, source, starting, store_client, trash
from holdfast.engine import attempt, calls, client, executor, link, removal
from holdfast.engine import process as engine_process
from holdfast.storage import lease, local, lock, plain
from simulator import engine, objects, scheduler
from simulator.scheduler import Current
from simulator.system import FCNTL, OS, SHUTIL


class SimSecrets:
    @staticmethod
    def token_hex(nbytes):
        return f"{Current.sim.rng.getrandbits(8 * nbytes):0{2 * nbytes}x}"


class SimDatetime(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime(2026, 1, 1, tzinfo=tz or timezone.utc) + timedelta(seconds=Current.sim.now)


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
    for module in (coordination, store_client, keeping, client, attempt, executor, engine_process, lease, link):
        yield module, "threading", scheduler.threading
    for module in (coordination, store_client, delivery, client, link, executor, engine_process, lease, lock):
        if hasattr(module, "time"):
            yield module, "time", scheduler.time
    yield recovery, "time", scheduler.time
    yield starting, "time", scheduler.time
    yield removal, "time", scheduler.time
    yield store_client, "queue", scheduler.queue
    for module in (local, lease, lock, calls, removal, delivery, client, engine_process, attempt, executor, starting):
        if hasattr(module, "os"):
            yield module, "os", OS
    for module in (source, plain, trash):
        yield module, "os", OS
    yield source, "read_small", objects.read_small
    yield lease, "fcntl", FCNTL
    yield lock, "fcntl", FCNTL
    yield local, "shutil", SHUTIL
    yield lease, "boot_id", lambda: OS.uname().nodename
    yield calls, "_fallocate", lambda: None
    yield calls.SystemCalls, "make_buffered", lambda _calls, _fd: None
    yield engine_process, "_map_image", engine.map_image
    yield engine_process, "_be_nice", lambda _nice: None
    yield engine_process, "close_fds", engine.close_fds
    yield client, "launch", engine.launch
    yield link, "Inbox", engine.SimInbox
    yield link, "select", engine.SimSelect
    yield link, "send", engine.send
    yield recovery, "ThreadPoolExecutor", InlinePool
    yield root, "secrets", SimSecrets
    yield delivery, "datetime", SimDatetime
    yield delivery, "socket", SimSocket
    yield lock, "datetime", SimDatetime
    # Latencies of the simulated system are some hundred microseconds; looks that are rarer than that cost no virtual
    # time worth the name, and a wait of a second costs less real time.
    yield coordination, "_FIRST_LOOK_S", 0.004
    yield coordination, "_LAST_LOOK_S", 0.1


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
