"""Plain values in a snapshot: always the current value, but unchanged ones are pickled only once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.format.objects import load_object, render_object
from holdfast.saver import snapshot
from holdfast.saver.snapshot import Snapshot, SnapshotTaker
from holdfast.state.tree import StateTree


def value_in(taken: Snapshot, name: str) -> Any:
    payload = taken.objects[name]
    return load_object(render_object(payload, 1 << 16), name=name, path="")


VALUES = [
    0.0, -0.0, 0, False, None, "", "0", 1, True, 1.0, (1, True), (True, 1), (1.0, 1), (), ("1", 1), float("nan"),
    float("inf"), 2**70, [1], [1.0], {"a": 1}, {"a": True}, (1, [2]), (1, [2.0]),
]  # fmt: skip


def test_equal_values_of_different_kinds_are_not_confused() -> None:
    state: dict[str, Any] = {"x": None, "w": torch.ones(2)}
    taker, tree = SnapshotTaker(), StateTree(state, rank=0, world=1)
    for before in VALUES:
        for now in VALUES:
            state["x"] = before
            taker.take(tree, None)
            state["x"] = now
            names = [name for name in taker.take(tree, None).objects if name.startswith("x")]
            found = {name: repr(value_in(taker.take(tree, None), name)) for name in names}
            assert found == ({"x": repr(now)} if "x" in found else {"x.a": repr(now["a"])})


def test_a_value_changed_in_place_is_pickled_again() -> None:
    inner = [1]
    state = {"x": (1, inner), "w": torch.ones(2)}
    taker, tree = SnapshotTaker(), StateTree(state, rank=0, world=1)
    assert value_in(taker.take(tree, None), "x") == (1, [1])
    inner.append(2)
    assert value_in(taker.take(tree, None), "x") == (1, [1, 2])


def test_plain_values_are_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dumped: list[str] = []
    dump = snapshot.dump_object

    def noting(value: Any, *, name: str) -> Any:
        dumped.append(name)
        return dump(value, name=name)

    monkeypatch.setattr(snapshot, "dump_object", noting)
    state = {"lr": 0.1, "betas": (0.9, 0.99), "log": [1], "w": torch.ones(2)}
    taker, tree = SnapshotTaker(), StateTree(state, rank=0, world=1)
    taker.take(tree, None)
    assert sorted(dumped) == ["betas", "log", "lr"]
    dumped.clear()
    state["lr"] = 0.05
    taker.take(tree, None)
    assert sorted(dumped) == ["log", "lr"]
