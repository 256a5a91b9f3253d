"""The Stores of ``scale.py``: one in memory that counts what it is asked, and a real TCPStore that prices it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CountedStore:
    """A Store in memory with a TCPStore's methods. Counts who asks what: requests that wait for an answer or don't."""

    def __init__(self) -> None:
        self._values: dict[str, bytes | bytearray] = {}
        self.answered: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.who = ""

    def _answer(self, value: Any, nbytes: int, requests: int = 1) -> Any:
        self.answered[self.who] += requests
        self.nbytes[self.who] += nbytes
        return value

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None:
        self.unanswered[self.who] += 1
        self.nbytes[self.who] += len(key) + len(value)
        self._values[key] = bytes(value)

    def append(self, key: str, value: bytes) -> None:
        self.unanswered[self.who] += 1
        self.nbytes[self.who] += len(key) + len(value)
        self._values.setdefault(key, bytearray()).extend(value)  # type: ignore[union-attr]

    def check(self, keys: list[str]) -> bool:
        return self._answer(all(key in self._values for key in keys), sum(map(len, keys)))

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return self._answer(total, len(key) + 8)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes) -> bytes:
        found = self._values.get(key)
        if found is None:
            if not expected:
                self._values[key] = found = desired
            else:
                found = expected  # type: ignore[assignment]
        return self._answer(found, len(key) + len(expected) + len(desired) + len(found or b""))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [bytes(self._values[key]) for key in keys]
        return self._answer(found, sum(map(len, keys)) + sum(map(len, found)), requests=2)

    def delete_key(self, key: str) -> bool:
        return self._answer(self._values.pop(key, None) is not None, len(key))

    @contextmanager
    def asked_by(self, who: str) -> Iterator[None]:
        before, self.who = self.who, who
        yield
        self.who = before

    def __len__(self) -> int:
        return len(self._values)


class Inline:
    """What a `StoreBoard` calls its Store through, without a thread: there are as many boards as ranks here."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def call(self, function: Any, *, again: bool = True) -> Any:
        del again  # nothing is ever lost here
        return function(self.store)


SERVER = (
    "import sys, torch.distributed as d; "
    "s = d.TCPStore('127.0.0.1', 0, 1, is_master=True, wait_for_workers=False); "
    "print(s.port, flush=True); sys.stdin.read()"
)


def measure_tcp_store(live: Callable[[Any], dict[str, float]], keys: int = 4096) -> dict[str, Any]:
    """Round trips, the server's CPU for each request, and what ``live`` finds with a client of it."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        stores = [dist.TCPStore("127.0.0.1", port, 1, is_master=False, wait_for_workers=False) for _ in range(4)]
        row = b"x" * 100
        kinds = {
            "look (compare_set)": lambda store, n: store.compare_set(f"k{n}", b"-", b"-"),
            "check": lambda store, n: store.check([f"k{n}"]),
            "get": lambda store, n: store.get(f"k{n}"),
            "add": lambda store, _: store.add("n", 1),
            "delete": lambda store, n: store.delete_key(f"gone{n}"),
            "append": lambda store, _: store.append("log", row),
        }
        for n in range(keys):
            stores[0].set(f"k{n}", row)
        stores[0].check(["k0"])
        found: dict[str, Any] = {"round_trip_us": {}, "server_cpu_us": {}}
        for name, call in kinds.items():
            began = time.perf_counter()
            for n in range(keys):
                call(stores[0], n)
            stores[0].check(["k0"])
            found["round_trip_us"][name] = (time.perf_counter() - began) / keys * 1e6
        for name, call in kinds.items():
            before = cpu_of(server.pid)
            threads = [threading.Thread(target=repeat, args=(call, store, keys)) for store in stores]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            stores[0].check(["k0"])
            found["server_cpu_us"][name] = (cpu_of(server.pid) - before) / (keys * len(stores)) * 1e6
        found["coordinator_s"] = live(stores[1])
    finally:
        server.stdin.close()
        server.wait(10)
        server.stdout.close()
    return found


def repeat(call: Any, store: Any, times: int) -> None:
    for n in range(times):
        call(store, n)


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
