"""Nested values and their leaves: what stock forgets comes back from the present value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.state.flatten import flatten, flatten_exactly, holds_nothing, rebuild


def leaves(value: Any, how: Any = flatten) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    how((), value, found.__setitem__)
    return found


EMPTIES = [
    {"factors": [{}], "last": 3},
    {"factors": [{}, None, {"a": 1}], "last": 3},
    {"factors": [None, {}, {}], "last": 3},
    {"factors": [[{}], {"a": {}}], "last": 3},
    {"none": {}, "list": [], "tuple": ({},)},
]


@pytest.mark.parametrize("value", EMPTIES)
def test_containers_without_leaves_stay_as_they_are(value: dict[str, Any]) -> None:
    """``LambdaLR.state_dict()["lr_lambdas"]`` is ``[{}]`` for a partial: stock keeps nothing of it."""
    assert rebuild(value, leaves(value)) == value


@pytest.mark.parametrize("value", [*EMPTIES, {"a": {1: "x"}}, {}, [{}]])
def test_exact_leaves_need_no_present_value(value: Any) -> None:
    assert rebuild({} if isinstance(value, dict) else [], leaves(value, flatten_exactly)) == value


HOLDING_NOTHING = [{}, {"a": {}}, [{}], [[{}], {}]]
HOLDING_SOMETHING = [[], {"a": []}, ({},), [{}, None], None, torch.ones(1)]


@pytest.mark.parametrize("value", [*HOLDING_NOTHING, *HOLDING_SOMETHING])
def test_what_holds_nothing(value: Any) -> None:
    nothing = any(value is known for known in HOLDING_NOTHING)
    assert holds_nothing(value) is nothing
    assert (len(leaves(value)) == 0) is nothing
