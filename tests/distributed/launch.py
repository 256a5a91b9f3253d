"""Runs a function of a test module on several ranks, under ``torch.distributed.run`` as users do.

    run_job(check_something, nproc=2, args=[tmp_path], timeout_s=60)

Every rank is a process of its own with a gloo group. If any rank fails or the deadline passes, everything the job
started is killed and the test fails with each rank's stderr; a rank that hangs shows where. Arguments travel as
strings.

Importing torch costs more than most checks, so a job may be several worlds, one after the other: `in_world`.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TAIL_CHARS = 6000
COLLECTIVE_TIMEOUT_S = 45.0
WORLD_TIMEOUT_S = 60.0


def run_job(function: Callable[..., None], *, nproc: int, args: Sequence[object] = (), timeout_s: float = 90.0) -> str:
    """Call ``function(*args)`` on ``nproc`` ranks; returns their stdout when all have ended well."""
    logs = Path(tempfile.mkdtemp(prefix="holdfast-job-"))
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"),
        *("--log-dir", str(logs), "--redirects", "3"),
    ]
    try:
        return _run([*torchrun, *_entry(function, timeout_s, args)], function.__name__, logs, timeout_s)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def _entry(function: Callable[..., None], timeout_s: float, args: Sequence[object]) -> list[str]:
    home = function.__code__.co_filename
    return [__file__, home, function.__name__, str(timeout_s * 0.85), *map(str, args)]


def _run(command: list[str], name: str, logs: Path, timeout_s: float) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        _fail(f"{name} had not ended after {timeout_s:g} s", out, err, logs)
    if job.returncode != 0:
        _fail(f"{name} ended with status {job.returncode}", out, err, logs)
    return out + "".join(path.read_text(errors="replace") for path in _streams(logs, "stdout.log"))


def _streams(logs: Path, name: str) -> list[Path]:
    return sorted(logs.glob(f"**/{name}"), key=lambda path: int(path.parent.name))


def _fail(what: str, out: str, err: str, logs: Path) -> NoReturn:
    parts = [what]
    for path in _streams(logs, "stderr.log"):
        parts.append(f"--- rank {path.parent.name}, stderr\n{path.read_text(errors='replace')[-TAIL_CHARS:]}")
    if len(parts) == 1:
        parts.append(f"--- launcher\n{out[-TAIL_CHARS:]}{err[-TAIL_CHARS:]}")
    pytest.fail("\n".join(parts), pytrace=False)


# on the ranks ----------------------------------------------------------------------------------------------------

_worlds = itertools.count()


def in_world(size: int, function: Callable[..., None], *args: object) -> None:
    """Call ``function(*args)`` on the first ``size`` ranks as a world of their own; returns when all of them have.

    One rank has no process group at all. Every rank of the job calls this alike; its default group is gone afterwards.
    """
    rank, number = int(os.environ["RANK"]), next(_worlds)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    store = dist.PrefixStore(f"world/{number}", _launcher_store())
    if rank < size:
        if size > 1:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
            )
        function(*args)
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
        if store.add("left", 1) == size:
            store.set("over", "")
    store.wait(["over"], timedelta(seconds=WORLD_TIMEOUT_S))


@cache
def _launcher_store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def _main(home: str, name: str, patience_s: str, *args: str) -> None:
    """One rank."""
    faulthandler.dump_traceback_later(float(patience_s), exit=False)
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(home).parent))
    spec = importlib.util.spec_from_file_location(Path(home).stem, home)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    getattr(module, name)(*args)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    # Test modules import this one by its own name: there must not be two of it.
    sys.modules["launch"] = sys.modules["__main__"]
    _main(*sys.argv[1:])
