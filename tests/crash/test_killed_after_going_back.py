"""A run goes back beside saves in flight, and is killed: what it left behind never comes back as the newest."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from processes import engines_of, is_gone

import holdfast

JOB = textwrap.dedent(
    """
    import os, signal, sys, threading
    import torch, holdfast

    root, kill_after_s, further = sys.argv[1], float(sys.argv[2]), [int(step) for step in sys.argv[3:]]
    weights = torch.zeros(2_000_000)
    config = holdfast.CheckpointConfig(every=None, keep=holdfast.Keep(last=2), in_flight=2)
    manager = holdfast.CheckpointManager(root, {"w": weights}, config=config)

    def save(step):
        manager.before_update()
        weights.fill_(step)
        return manager.save(step)

    save(100).result()
    late = [save(200), save(300)]
    assert manager.restore(100) == 100
    assert weights.unique().tolist() == [100.0]
    print("restored", [handle.done() for handle in late], flush=True)
    if not further:
        os.kill(os.getpid(), signal.SIGKILL)
    save(further[0]).result()
    print("published", flush=True)
    for step in further[1:]:
        last = save(step)
    last.wait_staged()
    threading.Event().wait(kill_after_s)
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


@pytest.mark.parametrize(("further", "kill_after_s"), [([], 0.0), ([120, 130], 0.0), ([120, 130, 140], 0.02)], ids=str)
def test_steps_abandoned_by_a_killed_run_are_never_the_newest(
    further: list[int], kill_after_s: float, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", JOB, str(tmp_path), str(kill_after_s), *map(str, further)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        said, engines = "", []
        assert job.stdout is not None
        for line in job.stdout:
            said += line
            engines = engines or engines_of(job.pid)
        job.wait(60)
    assert "restored [True, True]" in said
    assert ("published" in said) == bool(further)
    deadline = time.monotonic() + 30
    while not all(map(is_gone, engines)) and time.monotonic() < deadline:
        time.sleep(0.05)
    state = {"w": torch.zeros(2_000_000)}
    with holdfast.CheckpointManager(tmp_path, state, config=holdfast.CheckpointConfig(keep=None)) as manager:
        newest = manager.restore()
        # Nothing of the new course was published: what it went back from is the newest, as it was before.
        assert newest in (further or [300])
        assert manager.latest() == newest
        assert state["w"].unique().tolist() == [float(newest)]
    assert holdfast.open(tmp_path).step == newest
