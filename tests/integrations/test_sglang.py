"""`SGLangReceiver` with SGLang's own `Engine` methods and weight updaters, on CPU.

Runs in the environment of `make test-rl`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import ROOT, run_script
from needed import need

need("sglang")

JOB = Path(__file__).with_name("sglang_job.py")


@pytest.mark.timeout(300)
def test_sglang_loads_a_version_in_one_session_and_knows_its_name(tmp_path: Path) -> None:
    run_script(JOB, tmp_path, timeout_s=240)
    result = json.loads((tmp_path / "result.json").read_text())
    success, message = result["without_session"]
    assert not success
    assert "begin_weight_update" in message
    assert result["first"] == [1, "1", True, False], "version, the engine's weight_version, equal, dirty"
    session = ["begin_weight_update", *["update_weights_from_tensor"] * 3, "flush", "end_weight_update"]
    assert result["calls"] == ["pause retract", *session, "continue"]
    assert "version 2: the engine refused" in result["failed"]
    assert result["after_failure"] == [1, True, "1", "end_weight_update"], "dirty, paused, and no session left open"
    assert result["again"] == [2, "2", True, False], "the version that failed, without naming it"
    assert result["continued"] == "continue"
    assert result["ahead"] == [3, 2, [], True], "fetched, and the engine knows nothing of it"
    assert result["then"] == [3, None, True, "3"]
    refusal, calls, dirty, holds = result["shape"]
    assert "StateMismatch" in refusal
    assert "layers.1.weight is (8, 17), was (8, 16)" in refusal
    assert (calls, dirty, holds) == ([], False, True), "not even paused"
    assert result["next"] == [6, True, False]
    assert result["gone"][0].startswith("DeadlineExceeded")
    assert result["gone"][1:] == []
    assert result["after_gone"] == [6, False, True]
    assert result["running"]["abort"] == result["running"]["retract"] == ["", False, True, 1, "continue"]
    assert result["running"]["in_place"] == ["", False, True, 0, "continue"], "requests go on with their own cache"


@pytest.mark.timeout(300)
def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "sglang_sync.py", tmp_path, timeout_s=240).stdout
    assert output.count("equal: True") == 3
