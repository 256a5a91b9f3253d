"""An object store, below the real client: what stands in for `obstore` is one bucket of the schedule.

The client (`ObjectStore`), the storage (`ObjectStorage`), its leases, its writer and the engine above are the real
ones: here are only the requests. Each takes its time, and is a point at which its process may be killed, before it is
sent or when it has taken effect. Besides, as the schedule's faults say, a request

    is refused      503, which is asked again, or 403, which isn't
    loses its answer, which the client is told as an error of the connection; or it is carried out twice, the way a
                    client repeats a request without a word: then the answer is that to the second
    comes late      given up by the client, and carried out when it, or its process, may be long gone
    meets an outage the network of its process is gone for some time

The store is consistent, lists at once, refuses what its conditions forbid (`HONOURS_CONDITIONS`), and has a clock of
its own. Multipart uploads are visible when they are complete, and not otherwise. Nothing is ever lost: a power cut
ends processes only.

One thing is left out: a request to create a manifest takes no effect any more when the checkpoint of that name, which
somebody else has published or finished meanwhile, was deleted since. It would take who hangs in that request, or the
request itself, longer than others take to save as often as retention asks for (docs/adr/0029-fences-not-locks.md).
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from typing import NamedTuple

from greenlet import getcurrent
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError

from holdfast.format.manifest import attempt_in
from simulator import scheduler
from simulator.scheduler import Current

URL = "s3://jobs/root"
EPOCH_S = 1_767_225_600
HONOURS_CONDITIONS = True


class Stored(NamedTuple):
    """One object; ``modified_s``: by the store's clock, in whole seconds."""

    data: bytes
    tag: str
    modified_s: int


class Bucket:
    """The objects, by their names below `URL`; watch: called with a name that changes, and the bytes before and now."""

    def __init__(self, sim):
        self.sim = sim
        self.clock_ahead_s = sim.faults.store_ahead_s
        self.objects = {}
        self.changes = 0
        self.watch = None
        self.deleted = {}
        """By name, and by name and attempt: the number of the change that deleted it last."""
        self.late_of = None
        """The process of the late request that is being carried out, if one is."""

    def put(self, name, data, mode):
        """Carry out a put; raises what the client makes of a refusal."""
        there = self.objects.get(name)
        if HONOURS_CONDITIONS:
            if mode == "create" and (there is not None or (name, attempt_in(data[:4096])) in self.deleted):
                raise AlreadyExistsError(f"{name} exists")
            if isinstance(mode, dict) and (there is None or there.tag != mode["e_tag"]):
                raise PreconditionError(f"{name} has another tag")
        self.changes += 1
        now_s = int(EPOCH_S + self.clock_ahead_s + self.sim.now)
        self.objects[name] = Stored(bytes(data), f'"{self.changes}"', now_s)
        if self.watch is not None:
            self.watch(name, None if there is None else there.data, bytes(data))

    def delete(self, name):
        there = self.objects.pop(name, None)
        if there is not None:
            self.changes += 1
            self.deleted[name] = self.deleted[name, attempt_in(there.data[:4096])] = self.changes
            if self.watch is not None:
                self.watch(name, there.data, None)

    def find(self, name):
        there = self.objects.get(name)
        if there is None:
            raise FileNotFoundError(f"{name} not found")
        return there

    def below(self, prefix):
        start = f"{prefix}/" if prefix else ""
        return sorted(name for name in self.objects if name.startswith(start))


class Client:
    """What `obstore.store.from_url` returns: requests that take longer than ``limit_s`` have no answer."""

    def __init__(self, url, limit_s):
        assert url == URL, url
        self.limit_s = limit_s


def from_url(url, *, client_options, **_):
    return Client(url, client_options["timeout"].total_seconds())


# Requests. -----------------------------------------------------------------------------------------------------------


def _request(client, what, name, act, *, changes=False):
    """Send a request: ``act`` is what it does at the store, at one moment."""
    sim = Current.sim
    sim.system.enter(what, name, changes=False)
    try:
        process = getcurrent().process
        faults = sim.faults
        if faults.is_out(process):
            sim.sleep(0.05)
            raise GenericError(f"{what} {name}: error sending request: connection refused")
        fate = faults.request_fate(process, what, name) if changes else None
        if fate is not None:
            sim.log(f"  {fate}", f"{what} {name}")
        if fate == "denied":
            raise PermissionDeniedError(f"{what} {name}: 403 Forbidden")
        if fate == "busy":
            raise GenericError(f"{what} {name}: server returned status: 503 SlowDown")
        if fate == "late":
            sent = sim.bucket.changes
            sim.later(faults.put_delay(), lambda: _late(process, sent, act, what, name))
            sim.sleep(min(client.limit_s, faults.travel()))
            raise GenericError(f"{what} {name}: operation timed out")
        result = act()
        if fate == "answer lost":
            raise GenericError(f"{what} {name}: connection closed before message completed")
        if fate == "twice":
            sim.sleep(faults.travel())
            result = act()
        elif sim.random() < 0.25:  # what others do meanwhile comes before the answer
            sim.sleep(faults.travel())
    finally:
        sim.system.leave(what, name)
    return result


def _late(process, sent, act, what, name):
    """Carry out a request for which nobody waits any more."""
    bucket = Current.sim.bucket
    if bucket.deleted.get(name, -1) >= sent:
        return
    Current.sim.log("comes late", f"{what} {name}")
    bucket.late_of = process
    with contextlib.suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
        act()
    bucket.late_of = None


def put(client, name, data, *, mode="overwrite", use_multipart=False, **_):
    bucket = Current.sim.bucket
    if use_multipart:
        parts = []
        for part in data:
            parts.append(bytes(part))
            _request(client, "part", name, lambda: None)
        data = b"".join(parts)
    whole = bytes(data)
    _request(client, "put", name, lambda: bucket.put(name, whole, mode), changes=True)


def copy(client, name, to, *, overwrite):
    assert overwrite
    bucket = Current.sim.bucket
    _request(client, "copy", to, lambda: bucket.put(to, bucket.find(name).data, "overwrite"), changes=True)


def delete(client, names):
    """Delete each: a store that is asked for many may stop after some."""
    bucket = Current.sim.bucket
    for name in [names] if isinstance(names, str) else names:
        _request(client, "delete", name, lambda name=name: bucket.delete(name), changes=True)


def _meta(name, there):
    modified = datetime.fromtimestamp(there.modified_s, tz=timezone.utc)
    return {"path": name, "size": len(there.data), "last_modified": modified, "e_tag": there.tag, "version": None}


class Got:
    """What `obstore.get` returns."""

    def __init__(self, name, there, start, end):
        self.meta = _meta(name, there)
        self._data = there.data[start:end]

    def bytes(self):
        return self._data


def get(client, name, *, options=None):
    wanted = (options or {}).get("range", {"offset": 0})
    start, end = (wanted["offset"], None) if isinstance(wanted, dict) else wanted
    there = _request(client, "get", name, lambda: Current.sim.bucket.find(name))
    if options and start >= len(there.data):
        raise GenericError(f"Wanted range starting at {start}, but object was only {len(there.data)} bytes long")
    return Got(name, there, start, end)


def head(client, name):
    return _meta(name, _request(client, "head", name, lambda: Current.sim.bucket.find(name)))


def _listed(client, prefix):
    bucket = Current.sim.bucket

    def look():
        return [_meta(name, bucket.objects[name]) for name in bucket.below(prefix)]

    return _request(client, "list", prefix or "", look)


def list_all(client, prefix=None, *, chunk_size):
    """Stand in for `obstore.list`."""
    rows = _listed(client, prefix)
    return iter([rows[start : start + chunk_size] for start in range(0, len(rows), chunk_size)])


def list_with_delimiter(client, prefix=None):
    start = len(prefix) + 1 if prefix else 0
    rows = _listed(client, prefix)
    below = {row["path"][: row["path"].index("/", start)] for row in rows if "/" in row["path"][start:]}
    return {"common_prefixes": sorted(below), "objects": [row for row in rows if "/" not in row["path"][start:]]}


# What else the storage and its leases ask of a system. ---------------------------------------------------------------


class RacingPool:
    """A `ThreadPoolExecutor` whose tasks are threads of the schedule."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, function, items):
        results = {}

        def run(index, item):
            try:
                results[index] = function(item), None
            except Exception as error:
                results[index] = None, error

        threads = [scheduler.Thread(target=run, args=each, name="racer") for each in enumerate(items)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(len(threads)):
            result, error = results[index]
            if error is not None:
                raise error
            yield result


class ProcFiles:
    """`os` as leases use it: which processes there are."""

    class path:  # the name of what it stands in for
        @staticmethod
        def exists(path):
            return any(f"/proc/{process.pid}" == path and not process.dead for process in Current.sim.processes)
