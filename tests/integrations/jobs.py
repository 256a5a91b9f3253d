"""Run training scripts of frameworks as users do: alone, or on several ranks under torchrun; some get killed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
HASTE = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The host of a Store looks up the name of who connects. Where no name server answers that would take 5 s."""
QUIET = {"PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What is aborted as it hangs tells where."""
_TAIL_CHARS = 6000


def run_script(
    script: Path, *args: object, nproc: int = 1, timeout_s: float = 240.0, killed: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``nproc`` ranks; fails with its output unless it ends well, or with ``killed`` by SIGKILL."""
    command: list[str] = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(script.parent), os.environ.get("PYTHONPATH", "")]))
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.Popen(
        [*command, str(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**inherited, **HASTE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **QUIET},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        for pid in [process.pid, *_children(process.pid)]:  # torchrun's ranks are in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        output, _ = process.communicate(timeout=20)
        raise AssertionError(f"{script.name} had not ended after {timeout_s:g} s\n{output[-_TAIL_CHARS:]}") from None
    ended = "SIGKILL" in output or process.returncode == -signal.SIGKILL if killed else process.returncode == 0
    first = max(0, output.find("Traceback") - 1000)
    assert ended, f"{script.name} {args} ended with {process.returncode}\n{output[first : first + _TAIL_CHARS]}"
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def _children(pid: int) -> list[int]:
    """Return the processes below ``pid``."""
    below = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    return [*below, *(deeper for child in below for deeper in _children(child))]


def leave() -> NoReturn:
    """End this process well: all that the interpreter does at its end, but for taking itself apart.

    Threads of gloo that ask for the interpreter's lock in that moment abort the process ("terminate called without an
    active exception"), also in jobs in which nothing of Holdfast runs. What Holdfast does at the end runs here too.

    Call it last in the function that has the model: a DDP model that outlives its destroyed group takes the group apart
    while it holds the interpreter's lock, and waits forever for a thread of gloo that wants it (torch 2.13).
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def note_loss(path: str | os.PathLike[str], step: int, loss: float) -> None:
    """Append one line; what was noted before a kill stays."""
    with open(path, "a") as file:
        file.write(json.dumps([step, loss.hex()]) + "\n")


def losses(paths: Sequence[Path]) -> dict[int, str]:
    """Return the last noted loss of each step, as exact text, over several runs."""
    found: dict[int, str] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            step, loss = json.loads(line)
            found[step] = loss
    return found
