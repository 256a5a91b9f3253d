"""Which checkpoints come from which, by what their manifests say."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.catalog.course import STRETCHES_MAX, Course, course_from, decode_course, has_diverged, has_left
from holdfast.catalog.retention import CheckpointEntry


def saved(step: int, course: Course) -> CheckpointEntry:
    return CheckpointEntry(step, 0.0, origin=f"{course.own}{step}", course=course)


FIRST = Course("a", told=True)


def test_what_was_gone_on_from_is_no_stranger_and_nothing_is_left() -> None:
    rows = [saved(100, FIRST), saved(200, FIRST)]
    course = course_from("b", rows[1], 200, rows, [])
    assert course.encode() == {"course": [["a", 200, 200], "b"]}
    assert decode_course(course.encode(), "x") == course
    assert not any(has_diverged(saved(300, course), row) or has_left(saved(300, course), row) for row in rows)


def test_only_what_was_seen_is_left_behind() -> None:
    rows = [saved(step, FIRST) for step in (100, 200, 300)]
    after = saved(250, course_from("b", rows[1], 200, rows, []))
    assert has_left(after, rows[2])
    assert not has_diverged(after, rows[2])
    later = saved(400, FIRST)
    assert not has_left(after, later)
    assert has_diverged(after, later), "somebody else went on with that stretch"


def test_a_stretch_given_up_altogether_is_left_behind() -> None:
    """Back to before a stretch began: from 500, saved after a restart at 400, to 200."""
    rows = [saved(step, FIRST) for step in (200, 400)]
    rows.append(saved(500, course_from("b", rows[1], 400, rows, [])))
    after = saved(300, course_from("c", rows[0], 200, rows, []))
    assert has_left(after, rows[1])
    assert has_left(after, rows[2])


def test_what_another_run_has_elsewhere_is_not_left_behind() -> None:
    start = saved(200, FIRST)
    mine = saved(300, course_from("b", start, 200, [start], []))
    theirs = saved(300, course_from("c", start, 200, [start], []))
    back = saved(250, course_from("d", start, 200, [start, mine], [start, theirs]))
    assert has_left(back, mine)
    assert not has_left(back, theirs)
    assert has_diverged(back, theirs)


def test_the_oldest_stretches_are_forgotten() -> None:
    row = saved(0, FIRST)
    for number in range(1, STRETCHES_MAX + 10):
        row = saved(number, course_from(f"s{number}", row, number - 1, [row], []))
    assert len(row.course.before) == STRETCHES_MAX
    assert row.course.before[-1].id == f"s{STRETCHES_MAX + 8}"


@pytest.mark.parametrize("told", [None, [], "a", [["a", 1]], [["a", "1", 2], "b"], [1], [["a", 1, 2], ""]])
def test_what_is_no_course_makes_a_stretch_of_its_own(told: Any) -> None:
    assert decode_course({"course": told}, "0123456789ab") == Course("0123456789ab")
