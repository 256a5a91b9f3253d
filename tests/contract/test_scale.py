"""What a save may cost as the world grows: the simulation of ``benchmarks/scale.py``, at sizes that take no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.saver import agreement as world_plan


@pytest.fixture(scope="module")
def scale():
    directory = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, directory)
    try:
        import scale

        yield scale
    finally:
        sys.path.remove(directory)


@pytest.fixture(scope="module")
def worlds(scale):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world_plan, "METADATA_ROWS_MAX", 0)
        return [scale.measure_world(ranks, tensors) for ranks, tensors in ((16, 40), (256, 40), (16, 400))]


def test_requests_of_a_rank_and_of_the_coordinator_do_not_grow(worlds):
    small, many_ranks, many_tensors = worlds
    for name in ("first", "steady"):
        for kind in ("answered", "unanswered"):
            key = f"{name}_coordinator_{kind}"
            assert many_ranks[key] == small[key] == many_tensors[key]
            key = f"{name}_rank_{kind}"
            # The last rank to leave an attempt clears it away, so the mean is a little above a whole number.
            assert int(many_ranks[key]) == int(small[key]) == int(many_tensors[key])
    assert small["steady_coordinator_answered"] <= 16
    assert small["steady_rank_answered"] < 7


def test_a_save_in_the_steady_state_knows_nothing_of_tensors(worlds):
    small, many_ranks, many_tensors = worlds
    for key in ("steady_coordinator_bytes", "steady_rank_bytes", "manifest_bytes"):
        assert many_tensors[key] == pytest.approx(small[key], rel=0.1)
    assert many_ranks["steady_rank_bytes"] == pytest.approx(small["steady_rank_bytes"], rel=0.1)
    assert many_ranks["manifest_bytes"] < 20 * small["manifest_bytes"]


def test_a_report_of_the_measurements_can_be_made(scale, worlds, tmp_path):
    tcp = scale.measure_tcp_store(lambda store: scale.coordinator_over(store, 32), keys=16)
    assert set(tcp["coordinator_s"]) == {"cast", "judge", "begin", "commit"}
    result = {
        **dict.fromkeys(("command", "machine", "versions"), "x"),
        **dict.fromkeys(("seconds", "peak_rss_mib"), 1.0),
        "by_ranks": worlds[:2],
        "by_tensors": [worlds[0], worlds[2]],
        "laws": scale.laws(worlds[:2], [worlds[0], worlds[2]]),
        "saves": 5,
        "metadata_rows_max": 1,
        "live_ranks": 32,
        "tcp_store": tcp,
    }
    assert "256 ranks x 40 tensors" in scale.render(result)


def test_a_power_law_is_found(scale):
    from scale_report import fit

    rows = [{"ranks": n, "s": 3.0 * n**1.5} for n in (1, 10, 100)]
    assert fit(rows, "ranks", "s") == pytest.approx((3.0, 1.5))
