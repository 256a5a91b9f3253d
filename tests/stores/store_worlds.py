"""Worlds of ranks that save to a store and load from it what others have saved; `launch.run_job` runs them."""

from __future__ import annotations

import json
import os

from launch import in_world
from worlds import assert_same, fsdp, fsdp_tp, hsdp, inside, make_state, scribble, single, tensor_parallel

import holdfast

TIMEOUT_S = 60.0
KINDS = {"fsdp": fsdp, "tp": tensor_parallel, "hsdp": hsdp, "fsdp-tp": fsdp_tp, "single": single}


def all_worlds(root: str, environment: str) -> None:
    """Each world reads what those before it have written. The ranks outlive a server: its variables come along."""
    for name, value in json.loads(environment).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    holdfast.release()
    in_world(2, write, root, "2-fsdp", "2-tp")
    in_world(4, read, root, "2-fsdp:hsdp", "2-tp:fsdp-tp")
    in_world(4, write, root, "4-hsdp", "4-fsdp-tp", "4-fsdp")
    in_world(1, read, root, "2-fsdp:single", "4-fsdp-tp:single", "4-hsdp:single")
    in_world(1, write, root, "1-single")
    in_world(1, read, root, "1-single:single")
    in_world(2, read, root, "1-single:fsdp", "4-hsdp:tp", "4-fsdp:fsdp", "4-fsdp-tp:fsdp")
    holdfast.release()


def write(root: str, *names: str) -> None:
    for name in names:
        how = KINDS[name.partition("-")[2]]
        holdfast.save({**make_state(how, "saved"), "rng": holdfast.RNG()}, f"{root}/{name}", step=3, timeout=TIMEOUT_S)


def read(root: str, *pairs: str) -> None:
    for pair in pairs:
        name, _, kind = pair.partition(":")
        state = make_state(KINDS[kind], "other")
        scribble(state)
        holdfast.load({**state, "rng": holdfast.RNG()}, f"{root}/{name}", timeout=TIMEOUT_S)
        assert_same(inside(state), inside(make_state(KINDS[kind], "saved")), f"{name} as {kind}")
