"""What holds for every set of checkpoints and every policy."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.catalog.retention import (
    Best,
    CheckpointEntry,
    Keep,
    Lineage,
    decode_lineage,
    in_order,
    lineage_from,
    select_deletions,
)

_metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2)
_entries = st.lists(
    st.builds(
        CheckpointEntry,
        step=st.integers(0, 60),
        created_s=st.floats(0, 1e5),
        metrics=_metrics,
        resumable=st.booleans(),
        pinned=st.booleans(),
        leased=st.booleans(),
    ),
    max_size=20,
    unique_by=lambda entry: entry.step,
)
_keeps = st.builds(
    Keep,
    last=st.none() | st.integers(0, 5),
    every=st.none() | st.integers(1, 20),
    minutes=st.none() | st.floats(0.5, 600),
    best=st.none()
    | st.builds(Best, st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
)


@given(_entries, _keeps)
def test_what_is_never_deleted(entries, keep):
    deleted = select_deletions(entries, keep)
    assert deleted == sorted(set(deleted))
    assert set(deleted) <= {entry.step for entry in entries}
    guarded = {entry.step for entry in entries if entry.pinned or entry.leased}
    assert not guarded & set(deleted)
    resumable = [entry.step for entry in entries if entry.resumable]
    if resumable:
        assert max(resumable) not in deleted
    if keep.last is None:
        assert deleted == []
    else:
        newest = sorted(entry.step for entry in entries)[len(entries) - min(keep.last, len(entries)) :]
        assert not set(newest) & set(deleted)


@given(_entries, _keeps, st.randoms())
def test_order_does_not_matter(entries, keep, rng: random.Random):
    shuffled = list(entries)
    rng.shuffle(shuffled)
    assert select_deletions(shuffled, keep) == select_deletions(entries, keep)


@given(_entries, _keeps)
def test_deleting_is_idempotent(entries, keep):
    deleted = set(select_deletions(entries, keep))
    assert select_deletions([entry for entry in entries if entry.step not in deleted], keep) == []


@given(_entries, st.integers(0, 5), st.integers(1, 20))
def test_a_further_rule_only_keeps_more(entries, last, every):
    assert set(select_deletions(entries, Keep(last=last, every=every))) <= set(
        select_deletions(entries, Keep(last=last))
    )


# runs that go back --------------------------------------------------------------------------------------------------

_acts = st.lists(
    st.tuples(st.sampled_from(["save", "save", "save", "model", "back", "pin", "restart"]), st.integers(0, 100)),
    max_size=40,
)


@given(_acts, _keeps)
@example([*[("save", 0)] * 6, ("model", 0), ("pin", 6), ("restart", 0)], Keep(last=None))
def test_whatever_a_run_does_it_keeps_what_it_published_last_and_what_it_could_resume_from(acts, keep):
    there: dict[int, CheckpointEntry] = {}
    lineage, at, resumable, own = None, 0, None, None
    for act, number in acts:
        by_age = in_order(there.values(), lambda entry: (entry.step, entry.lineage))
        if act == "pin" and there:
            step = sorted(there)[number % len(there)]
            there[step] = dataclasses.replace(there[step], pinned=True)
        elif act in {"back", "restart"}:
            # A restart takes the newest that is resumable: what this run has published, if it has published anything.
            wholes = [entry.step for entry in by_age if entry.resumable]
            if act == "restart" and own is not None:
                assert wholes[-1] == own
            own = None
            if wholes:
                resumable = at = wholes[-1] if act == "restart" else wholes[number % len(wholes)]
                lineage = None
        else:
            step = at = at + 1 + number % 7
            if lineage is None:
                lineage = lineage_from([(entry.step, entry.lineage) for entry in there.values()], resumable or 0)
                assert decode_lineage(lineage.encode()) == lineage
            there[step] = CheckpointEntry(step, float(step), resumable=act == "save", lineage=lineage)
            resumable, own = (step, step) if act == "save" else (resumable, own)
            doomed = select_deletions(list(there.values()), keep, step)
            assert step not in doomed
            assert resumable is None or resumable not in doomed
            assert in_order(there.values(), lambda entry: (entry.step, entry.lineage))[-1].step == step
            for gone in doomed:
                del there[gone]


@given(_acts, _keeps)
@example([("save", 0), ("save", 0), ("model", 0), ("back", 1), ("save", 3), ("save", 0), ("model", 0)], Keep(last=1))
@example([("save", 0), ("model", 0), ("restart", 0), ("save", 2), ("restart", 0), ("save", 0)], Keep(last=0))
def test_a_model_that_a_run_left_behind_stays_and_so_does_the_newest(acts, keep):
    there: dict[int, CheckpointEntry] = {}
    led_to: dict[int, list[int]] = {}
    """By step: what the run that published it had come by."""
    lineage, path, models = None, [], []
    for act, number in acts:
        if act in {"back", "restart"}:
            by_age = in_order(there.values(), lambda entry: (entry.step, entry.lineage))
            wholes = [entry.step for entry in by_age if entry.resumable]
            if wholes:
                origin = wholes[-1] if act == "restart" else wholes[number % len(wholes)]
                lineage, path = None, [*led_to[origin], origin]
        elif act in {"save", "model"}:
            step = (path[-1] if path else 0) + 1 + number % 7
            if act == "save" and step in there and not there[step].resumable:
                continue  # a run leaves the model of another where it is
            if lineage is None:
                known = [(entry.step, entry.lineage) for entry in there.values()]
                lineage = lineage_from(known, path[-1] if path else step - 1)
            there[step] = CheckpointEntry(step, float(step), resumable=act == "save", lineage=lineage)
            led_to[step], path = path, [*path, step]
            models = [model for model in models if model != step] + ([step] if act == "model" else [])
            doomed = select_deletions(list(there.values()), keep, step)
            own = [model for model in models if model in path]
            assert not set(doomed) & (set(models) - set(own)), "left behind, and nobody has another"
            assert not own or own[-1] not in doomed
            for gone in doomed:
                del there[gone]
            models = [model for model in models if model in there]


def test_what_was_left_behind_is_older_than_all_that_led_here():
    published = [(step, Lineage()) for step in (100, 200, 300, 400)]
    own = lineage_from(published, 200)
    there = [*published, (250, own), (350, own)]
    assert [step for step, _ in in_order(there, lambda row: row)] == [300, 400, 100, 200, 250, 350]
    assert lineage_from(there, 350) == own
    # Going on from what had been left behind makes that the course again.
    back = lineage_from(there, 400)
    assert [step for step, _ in in_order([*there, (500, back)], lambda row: row)] == [250, 350, 100, 200, 300, 400, 500]
    assert lineage_from([], 0) == lineage_from(published, 400) == Lineage()
    assert lineage_from(published, 400, in_flight=[500]).branch == 1
    for extra in ({}, {"lineage": 3}, {"lineage": [[1], 2]}, {"lineage": [["a", 2], 2]}, {"lineage": []}):
        assert decode_lineage(extra) == Lineage()
