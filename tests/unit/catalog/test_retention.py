"""What retention keeps, rule by rule, and what it refuses to be told."""

from __future__ import annotations

import math

import pytest

from holdfast.catalog.retention import (
    Best,
    CheckpointEntry,
    Keep,
    Lineage,
    decode_lineage,
    reasons_to_keep,
    select_deletions,
)
from holdfast.errors import ConfigError


def entries(*steps, **fields):
    return [CheckpointEntry(step=step, created_s=60.0 * step, **fields) for step in steps]


def test_last_keeps_the_newest():
    assert select_deletions(entries(5, 1, 4, 2, 3), Keep(last=2)) == [1, 2, 3]


def test_last_none_keeps_all():
    assert select_deletions(entries(1, 2, 3), Keep(last=None)) == []


def test_last_zero_keeps_what_other_rules_keep_and_the_newest_resumable():
    assert select_deletions(entries(1, 2, 3, 4), Keep(last=0, every=2)) == [1, 3]
    assert select_deletions(entries(1, 2, 3), Keep(last=0)) == [1, 2]


def test_every_keeps_multiples():
    assert select_deletions(entries(5, 10, 15, 20, 25), Keep(last=1, every=10)) == [5, 15]


@pytest.mark.parametrize("minutes", [5e-324, 1e-300, 1e-9])
def test_stretches_shorter_than_the_clock_tells_keep_all(minutes):
    assert select_deletions(entries(1, 4, 5), Keep(last=1, minutes=minutes)) == []


def test_minutes_keep_the_first_of_each_stretch():
    assert select_deletions(entries(1, 4, 5, 9, 10, 14, 16), Keep(last=1, minutes=5)) == [4, 9, 14]


def test_best_keeps_the_best_and_never_nan():
    losses = {1: 0.5, 2: math.nan, 3: 0.1, 4: 0.3, 5: 0.9, 6: -math.inf}
    made = [CheckpointEntry(step, 0.0, {"loss": loss}) for step, loss in losses.items()] + [CheckpointEntry(7, 0.0)]
    assert select_deletions(made, Keep(last=1, best=Best("loss", n=2))) == [1, 2, 4, 5]
    assert select_deletions(made, Keep(last=1, best=Best("loss", mode="max"))) == [1, 2, 3, 4, 6]


def test_of_equally_good_the_newer_stays():
    made = [CheckpointEntry(step, 0.0, {"loss": 1.0}) for step in (1, 2, 3)]
    assert select_deletions([*made, CheckpointEntry(4, 0.0)], Keep(last=1, best=Best("loss"))) == [1, 2]


def test_pinned_and_leased_stay():
    made = [
        CheckpointEntry(1, 0.0, pinned=True),
        CheckpointEntry(2, 0.0, leased=True),
        CheckpointEntry(3, 0.0),
        CheckpointEntry(4, 0.0),
    ]
    assert select_deletions(made, Keep(last=1)) == [3]


def test_a_model_only_save_does_not_take_the_place_of_a_resumable_one():
    made = [CheckpointEntry(1, 0.0), CheckpointEntry(2, 0.0), CheckpointEntry(3, 0.0, resumable=False)]
    assert select_deletions(made, Keep(last=1)) == [1]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Keep(last=-1), "last"),
        (lambda: Keep(last=True), "last"),
        (lambda: Keep(last=1.5), "last"),
        (lambda: Keep(every=0), "every"),
        (lambda: Keep(every="10"), "every"),
        (lambda: Keep(minutes=0), "minutes"),
        (lambda: Keep(minutes=math.nan), "minutes"),
        (lambda: Keep(minutes=math.inf), "minutes"),
        (lambda: Keep(minutes=10**400), "minutes"),
        (lambda: Keep(best="loss"), "best"),
        (lambda: Best(""), "metric"),
        (lambda: Best(3), "metric"),
        (lambda: Best("loss", mode="least"), "mode"),
        (lambda: Best("loss", n=0), "n"),
    ],
)
def test_a_bad_field_is_named(make, field):
    with pytest.raises(ConfigError, match=field) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    "noted",
    [
        [10**30],
        [1 << 62],
        [-1],
        [True],
        [[1, 10**30], 2],
        [[10**30, 1], 2],
        [[1], 2],
        [[1, 2, 3], 2],
        [[1, True], 2],
        "2",
        [],
        {},
    ],
    ids=repr,
)
def test_a_lineage_that_no_run_has_is_none(noted):
    """A manifest of anybody's is not to keep a run from saving: what ranks tell each other has 64 bits for a number."""
    assert decode_lineage({"lineage": noted}) == Lineage()


@pytest.mark.parametrize(
    "lineage", [Lineage(), Lineage(1, ((0, -1),)), Lineage(2, ((0, 300), (1, (1 << 63) - 1)))], ids=repr
)
def test_a_lineage_is_read_as_it_was_noted(lineage):
    assert decode_lineage(lineage.encode()) == lineage


def test_each_rule_says_what_it_keeps():
    made = [
        *(CheckpointEntry(step, 60.0 * step, {"loss": 1 / step}) for step in (1, 2, 3, 4)),
        CheckpointEntry(5, 300.0, {"loss": 0.1}, pinned=True, leased=True),
        CheckpointEntry(6, 360.0, resumable=False),
    ]
    keep = Keep(last=2, every=4, minutes=5, best=Best("loss"))
    assert reasons_to_keep(made, keep, published=6) == {
        1: ("first of 5 minutes",),
        2: (),
        3: (),
        4: ("every 4",),
        5: ("pinned", "being loaded", "the newest to resume from", "last 2", "first of 5 minutes", "best loss"),
        6: ("just published", "the newest", "the newest model", "last 2"),
    }


def test_without_rules_of_the_run_only_what_always_holds_is_told():
    left = [CheckpointEntry(4, 0.0, resumable=False), CheckpointEntry(5, 0.0)]
    run = [CheckpointEntry(step, 0.0, lineage=Lineage(1, ((0, 2),))) for step in (3, 6)]
    found = reasons_to_keep([*left, *run], Keep(last=0))
    assert found[3] == found[5] == ()
    assert found[6] == ("the newest", "the newest to resume from")
    assert "the newest model" in found[4]


def test_an_anchor_is_kept_for_its_deltas():
    made = [CheckpointEntry(1, 0.0, origin="a"), CheckpointEntry(2, 0.0, origin="b", needs=("a",))]
    assert reasons_to_keep(made, Keep(last=1))[1] == ("a delta needs it",)
