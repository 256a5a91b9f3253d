"""Runs `python -m simulator`, or `weight_sync`, side by side, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"


def command(*args, hash_seed="0", module="simulator"):
    paths = os.pathsep.join([str(HERE), str(SRC)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
    return {"args": [sys.executable, "-m", module, *args], "env": environment}


def in_parts(*args):
    """The arguments of as many runs as there are processors, which share out what ``args`` ask for."""
    parts = os.cpu_count() or 1
    return [[*args, "--part", f"{part}/{parts}"] for part in range(parts)]


def side_by_side(commands, *, timeout_s):
    """What each of ``commands`` ended with: status, output, errors."""
    started = [subprocess.Popen(**each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        ended = [run.communicate(timeout=timeout_s) for run in started]
        return [(run.returncode, *texts) for run, texts in zip(started, ended, strict=True)]
    finally:
        for run in started:
            run.kill()
            run.wait()


def told_by(runs, *, timeout_s, module="simulator"):
    """What the runs, given by their arguments, told; a run that broke off is an error with its last words."""
    told = []
    for status, out, errors in side_by_side([command(*args, module=module) for args in runs], timeout_s=timeout_s):
        assert status in (0, 1) and "Traceback" not in errors, errors[-4000:]
        told += [json.loads(line) for line in out.splitlines()]
    return told
