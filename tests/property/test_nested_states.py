"""What `Checkpoint.state` gives back is the nested dict that was saved, whatever its keys are."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import holdfast
from holdfast.errors import ConfigError
from holdfast.state.tree import StateTree

texts = st.text(st.characters(codec="utf-8"), max_size=4).filter(lambda key: key != "rank-*")
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    texts,
    st.floats(allow_nan=False),
    st.binary(max_size=3),
)
keys = st.one_of(scalars, st.tuples(scalars), st.tuples(scalars, st.tuples(scalars)))
tensors = st.integers(0, 3).map(lambda size: torch.arange(float(size)))
leaves = st.one_of(scalars, tensors, st.tuples(scalars, st.dictionaries(keys, scalars, max_size=2)))


def unambiguous(made: dict[Any, Any]) -> bool:
    return len({str(key) for key in made}) == len(made)


def dicts_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(keys, inner, max_size=4).filter(unambiguous)


values = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), dicts_of(inner)), max_leaves=12)


def same(found: Any, given: Any) -> bool:
    """Equal in types, too, but for subclasses of dict."""
    if isinstance(given, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == given.dtype and torch.equal(found, given)
    if isinstance(given, dict):
        by_key = {(type(key), key): value for key, value in found.items()}
        return len(found) == len(given) and all(
            (type(key), key) in by_key and same(by_key[type(key), key], value) for key, value in given.items()
        )
    if isinstance(given, (list, tuple)):
        return type(found) is type(given) and len(found) == len(given) and all(map(same, found, given))
    return type(found) is type(given) and bool(found == given)


def names_of(state: dict[str, Any]) -> list[str]:
    collected = StateTree(state, rank=0, world=1).collect()
    return sorted(entry.name for entry in (*collected.tensors, *collected.objects))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(texts.filter(bool), values, min_size=1, max_size=3))
@example({"x": {0: torch.ones(2), 1: {"a": {True: 1, None: 2, 2.5: 3, (1, "a"): 4, b"q": 5}}, 10**30: 6}})
@example({"x": {"__keys__": [1, 2], "a": {}}, "y": [{}, {7: {}}], "z": {3: {"__keys__": torch.ones(1)}}})
@example({"x": [{0: 1}, [{-1: torch.ones(1)}], {}]})
def test_state_is_what_was_saved(state: dict[str, Any]) -> None:
    try:
        names = names_of(state)
    except ConfigError as error:
        # Keys with dots may give two values one name: refused, and so does stock DCP.
        assert "are both named" in str(error)  # noqa: PT017
        with pytest.raises(ValueError, match="duplicated"):
            flatten_state_dict(state)
        return
    assert names == sorted(flatten_state_dict(state)[0])
    with tempfile.TemporaryDirectory() as root:
        found = holdfast.save(state, Path(root) / "a").state()
    assert same(found, state), found


@pytest.mark.parametrize("same_name", [(1, "1"), (True, "True"), (None, "None"), ((1,), "(1,)"), (2.5, "2.5")])
def test_keys_of_one_name_are_refused_and_never_merged(tmp_path: Path, same_name: tuple[Any, str]) -> None:
    both: dict[Any, Any] = {same_name[0]: {"a": torch.ones(1)}, same_name[1]: {"b": torch.ones(1)}}
    for state in ({"x": both}, {"x": [{"y": both}]}, {"x": holdfast.PerRank(both)}, {"x": Kept(both)}):
        with pytest.raises(ConfigError, match=r"x.*would both be named") as caught:
            holdfast.save(state, tmp_path / "a")
        assert repr(same_name[0]) in str(caught.value)
        assert list(tmp_path.iterdir()) == []


class Kept:
    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_nan_and_infinities_are_keys(tmp_path: Path) -> None:
    found = holdfast.save({"x": {math.inf: 1, -math.inf: 2, math.nan: 3}}, tmp_path / "a").state()["x"]
    assert (found[math.inf], found[-math.inf]) == (1, 2)
    assert [found[key] for key in found if key != key] == [3]


def test_names_and_other_files_say_nothing_of_keys(tmp_path: Path) -> None:
    """The same state with text for keys gives the same bytes, but for the index, where they are noted."""
    holdfast.save({"x": {0: {"a": torch.ones(3)}, 7: "seven", True: [{2.5: 1}]}}, tmp_path / "a")
    holdfast.save({"x": {"0": {"a": torch.ones(3)}, "7": "seven", "True": [{"2.5": 1}]}}, tmp_path / "b")
    for name in ("__0_0.distcp", "__0_1.distcp", ".metadata"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_load_into_an_empty_dict_gives_it_the_keys_that_were_saved(tmp_path: Path) -> None:
    given: dict[str, Any] = {"x": {0: {"a": torch.ones(3), 7: {}}, (1, 2): "t"}, "list": [{3: 4}, torch.ones(1)]}
    holdfast.save({**given, "own": holdfast.PerRank({5: 6})}, tmp_path / "a")
    into: dict[str, Any] = {"x": {}, "list": [{}, torch.zeros(1)], "own": holdfast.PerRank({})}
    holdfast.load(into, tmp_path / "a")
    assert same({"x": into["x"], "list": into["list"]}, given)
    assert into["own"].value == {5: 6}


def test_a_change_of_keys_between_saves_is_seen(tmp_path: Path) -> None:
    """Names stay the same; what is kept of the plan must not."""
    state: dict[str, Any] = {"x": {1: torch.ones(2)}, "y": {}}
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        for step, x, y in ((1, {1: 1.0}, {}), (2, {"1": 1.0}, {}), (3, {"1": 1.0}, {0: {}}), (4, {1: 1.0}, {})):
            state["x"], state["y"] = {key: torch.ones(2) for key in x}, y
            manager.save(step)
        manager.wait()
        for step, kinds, y in ((2, [str], {}), (3, [str], {0: {}}), (4, [int], {})):
            found = holdfast.open(tmp_path / f"step-{step}").state()
            assert list(map(type, found["x"])) == kinds
            assert found["y"] == y
