"""A Store of torch's kind: one server, and connections that are slow, drop an answer, or end.

As a TCPStore does: `set` and `append` are not answered, so a connection that is gone swallows them without a word; the
other calls are, and raise `RuntimeError` where the connection has ended, whether or not the server has done what it was
asked. A `compare_set` of an absent key answers what was expected.
"""

from __future__ import annotations

from datetime import timedelta

from greenlet import getcurrent

from simulator.scheduler import Current


class Server:
    def __init__(self, faults, *, extended):
        self.values = {}
        self.faults, self.extended = faults, extended
        self.gone_at = None  # when its host vanishes
        self.vanishes = False  # without a word: calls don't come back

    def connect(self):
        return Connection(self)

    def is_gone(self):
        return self.gone_at is not None and Current.sim.now >= self.gone_at


class Connection:
    """What a rank holds; not for two tasks at a time, as torch's own."""

    def __init__(self, server):
        self.server = server
        self.broken = False
        self.timeout = timedelta(seconds=300)

    def set_timeout(self, timeout):
        self.timeout = timeout

    def has_extended_api(self):
        return self.server.extended

    def clone(self):
        sim, server = Current.sim, self.server
        sim.sleep(server.faults.travel())
        if server.is_gone() or server.faults.is_cut_off(getcurrent().process):
            if server.vanishes:
                sim.sleep(300.0)
            raise RuntimeError("the connection was refused")
        return Connection(server)

    def _ask(self, what, key, act, *, answered=True):
        sim, server = Current.sim, self.server
        faults = server.faults
        sim.sleep(faults.travel())
        process = getcurrent().process
        if (server.gone_at is not None and server.is_gone()) or (process.cut_until and faults.is_cut_off(process)):
            if server.vanishes and answered:
                sim.log("store: no answer", what)
                sim.sleep(300.0)
            self.broken = True
        lost = faults.drops(process) if faults.drop else None
        if lost == "before":
            self.broken = True
        if self.broken:
            if answered:
                raise RuntimeError("the connection has ended")
            return None
        result = act(server.values)
        if sim.lines is not None:
            sim.log(f"store: {what}", f"{key} {len(server.values)}")
        if lost == "after":
            self.broken = True
            if answered:
                raise RuntimeError("the connection ended before the answer")
        if answered and sim.random() < 0.25:  # what others do meanwhile comes before the answer
            sim.sleep(faults.travel())
        return result

    def set(self, key, value):
        self._ask("set", key, lambda values: values.__setitem__(key, bytes(value)), answered=False)

    def append(self, key, value):
        def act(values):
            values[key] = values.get(key, b"") + bytes(value)

        self._ask("append", key, act, answered=False)

    def get(self, key):
        def act(values):
            if key not in values:
                raise RuntimeError(f"wait timeout for {key}")
            return values[key]

        return self._ask("get", key, act)

    def multi_get(self, keys):
        return self._ask("multi_get", len(keys), lambda values: [values[key] for key in keys])

    def check(self, keys):
        return self._ask("check", keys[0], lambda values: all(key in values for key in keys))

    def compare_set(self, key, expected, desired):
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)

        def act(values):
            current = values.get(key)
            if current is None:
                if wanted:
                    return wanted
                values[key] = bytes(desired)
                return values[key]
            if current == wanted:
                values[key] = bytes(desired)
            return values[key]

        return self._ask("compare_set", key, act)

    def add(self, key, amount):
        def act(values):
            total = int(values.get(key, b"0")) + amount
            values[key] = b"%d" % total
            return total

        return self._ask("add", key, act)

    def delete_key(self, key):
        return self._ask("delete", key, lambda values: values.pop(key, None) is not None)
