"""Threads that decode a class at one moment, the first of this process to do so, don't crash it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("decoding_threads.py")


@pytest.mark.parametrize("time", [0, *(pytest.param(time, marks=pytest.mark.slow) for time in (1, 2))])
def test_threads_that_decode_a_class_for_the_first_time(time: int) -> None:
    assert time >= 0
    done = subprocess.run([sys.executable, "-W", "ignore", str(PROGRAM)], capture_output=True, text=True, timeout=120)
    said = done.stdout.splitlines()
    assert done.returncode == 0, f"died in {said[-1:]}\n{done.stderr[-2000:]}"
    assert said[-1].startswith("all ")
    assert int(said[-1].split()[1]) > 80
