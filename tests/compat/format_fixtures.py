"""Write what every version of Holdfast has written, for `test_formats`: ``tests/fixtures/formats/<version>``.

    python tests/compat/format_fixtures.py VERSION ...    each by the code of its commit, in a worktree of its own
    python tests/compat/format_fixtures.py present        by the code of this tree, as the newest version of `MADE_BY`

Each has ``root`` (a manager's, with steps 10 and 20), ``sharded`` (a checkpoint of two ranks), ``export`` and
``versions`` (weight versions of a `DirectoryTransport`, with deltas where there were any), as far as the version could
write them, and ``made.json``, which says by whom. Values come from `values_of`, so that tests know them.

This file runs with the code of any of the commits: it may use only what all of them have, or ask first.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

REPOSITORY: Final = Path(__file__).resolve().parents[2]
FIXTURES: Final = REPOSITORY / "tests" / "fixtures" / "formats"
MADE_BY: Final = {
    "0.1.0.dev1": ("1fac10f", "the first that saves: format 1, with a `.metadata` that the trainer wrote"),
    "0.1.0.dev2": ("e9fcb88", "`.metadata` derived from the reports"),
    "0.1.0.dev3": ("4a25603", "exports, which have format 2, and weight versions"),
    "0.1.0.dev4": ("dd00fd4", "the last before keys that names don't tell"),
    "0.1.0.dev5": ("ede77d1", "the structure of states, files of the user, parents"),
    "0.1.0.dev6": ("84968c8", "weight versions that are deltas, which have format 3"),
    "0.1.0.dev7": ("887fac4", "a journal in the root, what is suspicious in `extra`"),
}
STEPS: Final = (10, 20)
VERSIONS: Final = (1, 2, 3)
DEADLINE_S: Final = 300.0


def values_of(step: int) -> dict[str, Any]:
    """The state that was saved as ``step``: every kind of value that all versions know."""
    return {
        "model": model_of(step),
        "half": torch.arange(6, dtype=torch.float32).add(step).to(torch.bfloat16).reshape(2, 3),
        "scalar": torch.tensor(0.5 * step),
        "none": torch.empty(0, 4),
        "train": {"step": step, "rate": 0.25, "names": ["a", "b"], "pair": (1, 2), "on": True, "nothing": None},
    }


def model_of(step: int) -> torch.nn.Linear:
    """A model of which most elements are the same at each step, as deltas like it."""
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(32).reshape(4, 8) * 0.5)
        model.weight[0, 0] = step
        model.bias.copy_(torch.arange(4) + 0.25)
    return model


def sharded_of(rank: int) -> Any:
    """What the ranks of ``sharded`` hold: 6 rows, of which each has 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    assert rank in (0, 1)
    whole = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def write_root(root: Path) -> None:
    import holdfast

    state = values_of(0)
    config = holdfast.CheckpointConfig(every=10, keep=holdfast.Keep(last=len(STEPS)), mode="sync")
    with holdfast.CheckpointManager(str(root), state, config=config) as manager:
        for step in STEPS:
            now = values_of(step)
            state["model"].load_state_dict(now["model"].state_dict())
            for name, value in now.items():
                if isinstance(value, torch.Tensor):
                    state[name].copy_(value)
            state["train"].update(now["train"])
            seed_all(step)  # managers save the states of generators, too
            manager.step(step, metrics={"loss": 1.0 / step})
        manager.wait()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write_sharded(where: Path) -> None:
    """Save from two processes of this file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(where)],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in (0, 1)
    ]
    try:
        if any(one.wait(DEADLINE_S) for one in ranks):
            raise SystemExit("a rank has failed")
    finally:
        for one in ranks:
            one.kill()


def save_as_rank(where: Path) -> None:
    import holdfast

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    holdfast.save({"w": sharded_of(rank), "each": holdfast.PerRank({"rank": rank})}, str(where), step=7)
    torch.distributed.destroy_process_group()


def write_versions(root: Path) -> None:
    import holdfast

    options: dict[str, Any] = {"keep_versions": len(VERSIONS)}
    if "delta_bytes" in inspect.signature(holdfast.sync.Publisher).parameters:
        options |= {"delta": "sparse", "delta_bytes": 1 << 20}
    with holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(str(root)), **options) as publisher:
        for version in VERSIONS:
            publisher.publish(dict(model_of(version).state_dict()), version)


def write_all(where: Path, *, made_by: dict[str, str]) -> None:
    import holdfast

    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    write_root(where / "root")
    write_sharded(where / "sharded")
    if hasattr(holdfast, "export_hf"):
        holdfast.export_hf({"model": model_of(STEPS[-1])}, where / "export")
    if hasattr(holdfast, "sync"):
        write_versions(where / "versions")
    for lock in [*where.glob("*/.holdfast/*lock*")]:  # of a writer that is no more
        lock.unlink()
    (where / "made.json").write_text(json.dumps({**made_by, "torch": torch.__version__}, indent=2) + "\n")


def write_by_commit(version: str) -> None:
    commit, what = MADE_BY[version]
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], check=True, timeout=DEADLINE_S)
        try:
            subprocess.run(
                [sys.executable, __file__, "here", version, commit, what],
                env=os.environ | {"PYTHONPATH": str(tree / "src")},
                check=True,
                timeout=DEADLINE_S,
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, timeout=DEADLINE_S)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", where]:
            save_as_rank(Path(where))
        case ["here", version, commit, what]:
            write_all(FIXTURES / version, made_by={"commit": commit, "what": what})
        case ["present"]:
            newest = [*MADE_BY][-1]
            write_all(FIXTURES / newest, made_by={"commit": MADE_BY[newest][0], "what": MADE_BY[newest][1]})
        case [*versions]:
            for version in versions:
                write_by_commit(version)
