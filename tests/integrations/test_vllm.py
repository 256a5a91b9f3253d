"""`holdfast.sync.adapters.vllm` through vLLM's own factories, worker and models, on CPU.

Runs in the environment of `make test-rl`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, run_script
from needed import need

need("vllm")

JOB = Path(__file__).with_name("vllm_job.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("vllm")
    run_script(JOB, directory, timeout_s=240)
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_vllms_trainer_and_worker_move_versions(found: dict[str, Any], kind: str) -> None:
    result = found[kind]
    assert isinstance(result, dict), result
    assert result["trainer"] == "HoldfastTrainerWeightTransferEngine"
    assert result["engine"] == "HoldfastWeightTransferEngine"
    assert result["equal"] == [True, True], "as a model that vLLM loads from that checkpoint"
    assert result["in_place"], "vLLM's captured graphs read the same memory"
    assert result["versions"][:2] == [str(result["version"] - 1), str(result["version"])]
    assert result["dirty"] is False


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_a_load_that_fails_is_told_and_can_be_repeated(found: dict[str, Any], kind: str) -> None:
    result = found[kind]
    assert "ZeroDivisionError" in result["failed_load"]
    assert result["after_failure"] == [True, True, False], "the version of before, dirty, and no update under way"
    assert result["after_retry"] == [True, False, True], "the version that failed, clean, and equal"


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_other_shapes_and_draft_models_are_refused_before_anything_changes(found: dict[str, Any], kind: str) -> None:
    result = found[kind]
    assert "StateMismatch" in result["other_shape"]
    assert "(256, 64), was (128, 64)" in result["other_shape"]
    assert result["after_other_shape"] == [False, True]
    assert "does not support draft" in result["draft"]


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_changes_are_fetched_ahead_and_loaded_by_element(found: dict[str, Any], kind: str) -> None:
    result = found[kind]["changes"]
    for step in ("step 1", "step 2"):
        assert result[step] == [True, False, True, False, True], "fetched, not loaded; then loaded, clean and equal"
    assert result["bases"] == [False, True, True], "the first is whole"
    assert result["share"] < 0.2


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_a_delta_that_cant_be_loaded_is_followed_by_the_whole_version(found: dict[str, Any], kind: str) -> None:
    result = found[kind]["changes"]
    assert result["another base"] == [[True, False], False, True]
    assert result["nan"] == [[True, False], False, True, 1]
    assert "ZeroDivisionError" in result["failed"]
    assert result["after failure"] == [True, True]
    assert result["repeated"] == [[False], False, True]


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe"])
def test_other_shapes_and_a_trainer_that_is_gone_change_nothing(found: dict[str, Any], kind: str) -> None:
    refusal, dirty, is_equal = found[kind]["changes"]["shape"]
    assert "StateMismatch" in refusal
    assert (dirty, is_equal) == (False, False), "what it had, which is not the new one"
    assert "DeadlineExceeded" in found[kind]["changes"]["closed"]
    assert found[kind]["changes"]["after close"] == [False, False]


def test_a_worker_that_refuses_or_fails_holds_up_none_of_the_others(found: dict[str, Any]) -> None:
    result = found["two_workers"]
    assert isinstance(result, dict), result
    same = [[True, False, True]] * 2
    assert result["delta"] == ["", same], "the whole version for both, also for the one that had loaded the delta"
    assert "ZeroDivisionError" in result["failed"]
    assert result["after"] == [True, False, False], "one is dirty; no update is under way in either"
    assert result["again"] == ["", same]
    assert result["versions"] == [True, True]


@pytest.mark.timeout(300)
def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "vllm_sync.py", tmp_path, timeout_s=240).stdout
    assert output.count("equal: True") == 3
