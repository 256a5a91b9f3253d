"""Runs `python -m simulator` side by side, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"


def command(*args, hash_seed="0"):
    paths = os.pathsep.join([str(HERE), str(SRC)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
    return {"args": [sys.executable, "-m", "simulator", *args], "env": environment}


def told_by(runs, *, timeout_s):
    """What the runs, given by their arguments, told; a run that broke off is an error with its last words."""
    started = [
        subprocess.Popen(**command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for args in runs
    ]
    told = []
    try:
        for run in started:
            out, errors = run.communicate(timeout=timeout_s)
            assert run.returncode in (0, 1) and "Traceback" not in errors, errors[-4000:]
            told += [json.loads(line) for line in out.splitlines()]
    finally:
        for run in started:
            run.kill()
            run.wait()
    return told
