"""Case (m): saves to object stores on loopback, and loads from them, beside `obstore` with nothing around it.

Runs in a clone only: `tests/stores` knows how servers are started. What each contender saved is in a bucket of its own,
removed after its turn. Servers run on the same cores as those who save: what a client computes, its server waits for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu import MemoryWatch, tree_cpu_s
from benchmarks.files import remove
from benchmarks.protocol import Broken, WorkerFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench
    from benchmarks.peers import Peer
    from benchmarks.protocol import Worker

ROOT = Path(__file__).parents[2]
SERVERS = {"seaweedfs": ("weed", "version"), "ceph": ("ceph", "--version")}
"""Which, and the command that tells the version of each."""
PROGRAMS = ROOT / ".venvs" / "stores" / "bin"
"""Where `make test-stores` puts SeaweedFS."""
FIRSTS = ("raw-store", "holdfast-store")
"""Whose first calls are measured."""
TENSOR_BYTES = 4 << 20
LOOK_S = 0.05
TIMEOUT_S = 300.0


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: peer.store)
    if not peers:
        return
    with _paths():
        try:
            servers: Any = importlib.import_module("servers")
        except ImportError as error:
            bench.problem("stores", "servers", f"not measured: {error}; it needs a clone, and `make venv`")
            return
        for name, asks_version in SERVERS.items():
            kind = servers.known()[name]
            reason = kind.missing()
            if reason is not None:
                bench.problem(f"stores-{name}", name, f"not measured: {reason}")
                continue
            folder = bench.work / name
            folder.mkdir()
            try:
                with kind(folder) as server, _environment(server.environment()):
                    said = subprocess.run(asks_version, capture_output=True, text=True, timeout=30, check=False).stdout
                    bench.results.meta.setdefault("versions", {})[name] = said.partition("\n")[0]
                    _measure(bench, f"stores-{name}", Turns(bench, server), peers)
            finally:
                remove(folder)


@contextlib.contextmanager
def _paths() -> Iterator[None]:
    """The modules and programs of `tests/stores` are found."""
    with _environment({"PATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", "")])}):
        sys.path.append(str(ROOT / "tests" / "stores"))
        try:
            yield
        finally:
            sys.path.pop()


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Turns:
    """Turns of all contenders on one server."""

    def __init__(self, bench: Bench, server: Any) -> None:
        self.bench, self.server = bench, server

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """A URL in a new bucket, which is removed with all that is in it."""
        name = self.server.bucket()
        try:
            yield f"{self.server.scheme}://{name}/run"
        finally:
            self.server.remove(name)

    def save_and_load(self, worker: Worker, *, check: bool, timeout_s: float = TIMEOUT_S) -> dict[str, float]:
        """One of each; nothing of the save is left to be written when the load begins."""
        with self.bucket() as place:
            figures = self._measured(worker, "save", place=place, timeout_s=timeout_s)
            os.sync()
            return figures | self._measured(worker, "load", place=place, check=check, timeout_s=timeout_s)

    def _measured(self, worker: Worker, doing: str, **args: Any) -> dict[str, float]:
        before = self._cpu_s()
        figures = worker.measure(f"store_{doing}", **args)
        figures[f"{doing}_server_cpu_s"] = self._cpu_s() - before
        return figures

    def _cpu_s(self) -> float:
        return sum(tree_cpu_s(process.pid) for process in self.server.processes)


def _measure(bench: Bench, case: str, turns: Turns, peers: list[Peer]) -> None:
    size = bench.size
    bench.make_room()
    state = bench.state(kind="flat", count=(size.store_mib << 20) // TENSOR_BYTES, each=TENSOR_BYTES)
    seen: dict[str, int] = {}

    def turn(worker: Worker) -> dict[str, Any]:
        number = seen[worker.name] = seen.get(worker.name, -1) + 1
        figures: dict[str, Any] = turns.save_and_load(worker, check=number in (0, size.store_rounds))
        nbytes = bench.results.cases[case]["nbytes"]
        rates = {f"{doing}_bytes_per_s": nbytes / figures[f"{doing}_s"] for doing in ("save", "load")}
        return figures | rates | {"load_average": os.getloadavg()[0]}

    with bench.workers(case, peers, state) as workers:
        before = {worker.name: worker.call("store_memory")[0]["others"] for worker in workers}
        try:
            bench.rounds(case, workers, turn, counted=size.store_rounds, fewer_of_slow=False)
            for worker in workers:
                if worker.alive:
                    _memory(bench, case, turns, worker, state["file"], before[worker.name])
            for number in range(1, size.store_firsts + 1):
                for peer in (peer for peer in peers if peer.name in FIRSTS):
                    _first(bench, case, turns, peer, state, number)
        finally:
            bench.end(workers)


def _memory(bench: Bench, case: str, turns: Turns, worker: Worker, state_file: str, before: int) -> None:
    """Measure the memory of a save and a load, in turns of their own: looking at it takes time.

    before: what the process had beside the state before its first save.
    """
    try:
        with bench.alone(worker), turns.bucket() as place:
            worker.call("store_save", place=place, timeout_s=TIMEOUT_S)
            figures = {}
            for doing, args in (("save", {}), ("load", {"check": False})):
                with turns.bucket() as other, MemoryWatch(worker.pids[0], LOOK_S, state_file) as watch:
                    url = other if doing == "save" else place
                    worker.call(f"store_{doing}", place=url, timeout_s=TIMEOUT_S, **args)
                figures[f"{doing}_peak_bytes"] = watch.most_others - before
                figures[f"{doing}_images"] = watch.most_images
    except (Broken, WorkerFailed) as error:
        bench.problem(case, worker.name, f"memory: {error}")
        return
    bench.record(case, worker.name, 0, figures, counted=True)
    bench.say(f"{case}: memory of {worker.name}")


def _first(bench: Bench, case: str, turns: Turns, peer: Peer, state: dict[str, Any], number: int) -> None:
    """Measure the first save and the first load of a process, in two that have done nothing yet."""
    with turns.bucket() as place:
        for doing, args in (("save", {"prepared": False}), ("load", {"check": True})):
            with bench.fresh_workers(case, [peer]) as fresh:
                for worker in fresh:
                    try:
                        worker.call("adopt", state=state)
                        with bench.alone(worker):
                            figures = worker.measure(f"store_{doing}", place=place, timeout_s=TIMEOUT_S, **args)
                    except (Broken, WorkerFailed) as error:
                        bench.problem(case, peer.name, f"first {doing}: {error}")
                        return
                    bench.record(case, peer.name, number, {f"first_{doing}_s": figures[f"{doing}_s"]}, counted=True)
    bench.say(f"{case}: first calls of {peer.name}, {number}")
