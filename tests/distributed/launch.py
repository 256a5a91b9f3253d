"""Runs functions of test modules on several ranks: real processes, started by ``torch.distributed.run`` as users do.

    run_job(check_something, nproc=2, args=[tmp_path])

Starting a rank and importing torch costs more than most checks, so four ranks are started once and then do one job
after the other, each as a world of its own: a gloo group of its ``nproc`` ranks, the others standing by. A job may in
turn be several worlds (`in_world`). If any rank fails or the deadline passes, everything is killed, the test fails with
each rank's stderr (a rank that hangs shows where), and the next job gets new processes. Arguments travel as strings.
Jobs of more than four ranks are for slow tests: they have processes of their own, which live as long.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
RANKS = 4
RANKS_MAX = 8
TAIL_CHARS = 6000
LOOK_S = 0.02
TRACE_S = 1.0
"""How long ranks that hang get to say where."""
COLLECTIVE_TIMEOUT_S = 45.0
WORLD_TIMEOUT_S = 150.0
HASTE = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The host of a Store looks up the name of who connects. Where no name server answers that would take 5 s."""


def run_job(
    function: Callable[..., None], *, nproc: int, args: Sequence[object] = (), timeout_s: float = 110.0
) -> None:
    """Call ``function(*args)`` on ``nproc`` ranks (at most 8); returns when all have ended well."""
    assert nproc <= RANKS_MAX
    ranks = RANKS if nproc <= RANKS else RANKS_MAX
    if ranks not in _launched:
        _launched[ranks] = _Launched(ranks)
    launched = _launched[ranks]
    try:
        problem = launched.wait_done(function, nproc, [str(arg) for arg in args], timeout_s)
    except BaseException:
        problem = "interrupted"
        raise
    finally:
        if problem is not None:
            report = launched.end()
            del _launched[ranks]
    if problem is not None:
        pytest.fail(f"{function.__name__} {problem}\n{report}", pytrace=False)


class _Launched:
    """A running torchrun whose ranks look for jobs in a directory. Nothing of it outlives this process."""

    def __init__(self, ranks: int) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="holdfast-ranks-"))
        self._jobs = itertools.count()
        inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        with (self._place / "launcher.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
                    *("--log-dir", str(self._place / "logs"), "--redirects", "3"),
                    *(__file__, str(self._place), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, **HASTE, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        atexit.register(self.end)

    def wait_done(self, function: Callable[..., None], nproc: int, args: list[str], timeout_s: float) -> str | None:
        """Hand out a job; returns what went wrong with it, None if nothing did."""
        number = next(self._jobs)
        job = {"home": function.__code__.co_filename, "name": function.__name__, "nproc": nproc, "args": args}
        job["standby_s"] = max(WORLD_TIMEOUT_S, timeout_s + 40.0)
        (self._place / "next").write_text(json.dumps(job))
        (self._place / "next").rename(self._place / f"job-{number}")
        deadline = time.monotonic() + timeout_s
        while not (self._place / f"done-{number}").exists():
            if self._process.poll() is not None:
                return f"ended with status {self._process.returncode}"
            if time.monotonic() > deadline:
                self._signal_ranks(signal.SIGUSR1)
                time.sleep(TRACE_S)
                return f"had not ended after {timeout_s:g} s"
            time.sleep(LOOK_S)
        return None

    def _signal_ranks(self, number: signal.Signals) -> None:
        for path in self._place.glob("rank-*"):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                if str(self._place) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)

    def end(self) -> str:
        """Kill everything; returns what the ranks, or else the launcher, have said."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        # Ranks lead sessions of their own, and outlive a launcher that is killed.
        self._signal_ranks(signal.SIGKILL)
        said = [
            f"--- rank {path.parent.name}, stderr\n{path.read_text(errors='replace')[-TAIL_CHARS:]}"
            for path in sorted(self._place.glob("logs/**/stderr.log"), key=lambda path: path.parent.name)
        ] or [f"--- launcher\n{(self._place / 'launcher.log').read_text(errors='replace')[-TAIL_CHARS:]}"]
        shutil.rmtree(self._place, ignore_errors=True)
        return "\n".join(said)


_launched: dict[int, _Launched] = {}


# on the ranks ----------------------------------------------------------------------------------------------------

at_world_end: list[Callable[[], None]] = []
"""Called when a world is over: what was made of its groups is of no use any more."""
_world_numbers = [0, 0]
"""Of the job, and of the world in it: ranks that stand by see only the first."""
_standby_s = [WORLD_TIMEOUT_S]
"""How long the present job may keep a rank that stands by."""


def in_world(size: int, function: Callable[..., None], *args: object) -> None:
    """Call ``function(*args)`` on the first ``size`` ranks as a world of their own; returns when all of them have.

    One rank has no process group at all. Every rank of the present world calls this alike; its group is gone then.
    """
    rank = int(os.environ["RANK"])
    _leave_world()
    store = dist.PrefixStore("world/{}/{}".format(*_world_numbers), _launcher_store())
    _world_numbers[1] += 1
    if rank < size:
        if size > 1:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            )
            # torch has each group add a hook that writes the rank before every line: a hundred groups hide the error.
            sys.excepthook = sys.__excepthook__
        function(*args)
        _leave_world()
        if store.add("left", 1) == size:
            store.set("over", "")
    store.wait(["over"], timedelta(seconds=_standby_s[0]))


def _leave_world() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    for forget in at_world_end:
        forget()


@cache
def _launcher_store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _work(place: Path, parent: int) -> None:
    """One rank: job after job, until the process that hands them out is gone."""
    (place / f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    for number in itertools.count():
        path = place / f"job-{number}"
        while not path.exists():
            if not Path(f"/proc/{parent}").exists():
                return
            time.sleep(LOOK_S)
        job = json.loads(path.read_text())
        _world_numbers[:] = number, 0
        _standby_s[0] = job["standby_s"]
        in_world(job["nproc"], getattr(_module(Path(job["home"])), job["name"]), *job["args"])
        if os.environ["RANK"] == "0":
            (place / f"done-{number}").touch()


@cache
def _module(home: Path) -> Any:
    sys.path[:] = dict.fromkeys([str(home.parent), *sys.path])
    spec = importlib.util.spec_from_file_location(home.stem, home)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    # Test modules import this one by its own name: there must not be two of it.
    sys.modules["launch"] = sys.modules["__main__"]
    _work(Path(sys.argv[1]), int(sys.argv[2]))
