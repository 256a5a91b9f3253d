"""What holds for every set of checkpoints and every policy."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.retention import Best, Entry, Keep, select_deletions

_metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2)
_entries = st.lists(
    st.builds(
        Entry,
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
