"""`holdfast.sync.adapters.verl` under verl's own `CheckpointEngineManager` and workers, on ray and CPU.

Runs in the environment of `make test-rl`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import run_script
from needed import need
from verl_ranks import RECEIVED, digest, model_at, nearly_at, verl_version

need("ray", "verl")

JOB = Path(__file__).with_name("verl_job.py")


@pytest.mark.timeout(600)
def test_verls_manager_moves_versions_to_replicas_that_come_and_go(tmp_path: Path) -> None:
    place = tmp_path / "meet"
    place.mkdir()
    options = {"transport": "shared_memory", "place": str(place), "timeout_s": 60}
    given = {"options": {**options, "cache": True, "rollout_dtype": "bfloat16"}}
    run_script(JOB, tmp_path, json.dumps(given), timeout_s=400)
    result = json.loads((tmp_path / "result.json").read_text())

    expected = {}
    for step in (1, 2, 3, 4):
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in model_at(step).state_dict().items()}
        expected[step] = {name: digest(tensor) for name, tensor in weights.items()}
        nbytes = sum(tensor.nbytes for tensor in weights.values())
    for seen, steps in zip(result["seen"], RECEIVED, strict=True):
        assert [one["global_steps"] for one in seen] == steps
        assert [one["weights"] for one in seen] == [expected[step] for step in steps]
        assert {one.get("wire_format", "named_tensors") for one in seen} == {"named_tensors"}
    assert result["cached"] == [expected[4]] * 2, "the version that was received last"
    assert result["global_steps"] == [4, 4]
    if result["verl"] < "0.9":
        assert result["returned"] == [None] * 4, "verl 0.8 returns no metrics"
    else:
        for step, receivers, metrics in zip((1, 2, 3, 4), (2, 2, 1, 2), result["returned"], strict=True):
            assert metrics["checkpoint_engine/global_steps"] == step
            assert metrics["checkpoint_engine/receivers"] == receivers
            assert metrics["checkpoint_engine/lost_receivers"] == 0
            assert metrics["checkpoint_engine/payload_mbytes"] * 2**20 == nbytes, "all ranks' bytes, once"
    round_of = ["abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"]
    assert result["calls"] == [round_of * 4, round_of * 3]


@pytest.mark.timeout(600)
@pytest.mark.skipif(verl_version() < "0.9", reason="verl 0.8 takes whole weights only: see test_verl_engine.py")
@pytest.mark.parametrize("backend", [pytest.param("holdfast", marks=pytest.mark.slow), "delta_sharded"])
def test_verls_manager_moves_changes_to_verls_own_loader(tmp_path: Path, backend: str) -> None:
    place = tmp_path / "meet"
    place.mkdir()
    options = {"place": str(place), "timeout_s": 60, "cache": True, "delta": "sparse"}
    module = {"holdfast": "verl_backend", "delta_sharded": "verl_delta_backend"}[backend]
    given = {"options": options, "backend": backend, "module": module}
    run_script(JOB, tmp_path, json.dumps(given), timeout_s=400)
    result = json.loads((tmp_path / "result.json").read_text())

    expected = {
        step: {name: digest(value) for name, value in nearly_at(step).state_dict().items()} for step in range(5)
    }
    for seen, steps in zip(result["seen"], RECEIVED, strict=True):
        assert {one["wire_format"] for one in seen} == {"delta_flush"}
        assert [one["weights"] for one in seen] == [expected[step] for step in steps]
    encodings = [[{encoding for encoding, _ in one["flushes"]} for one in seen] for seen in result["seen"]]
    assert encodings[0] == [{"dense"}, {"indices"}, {"indices"}, {"dense"}], "whole when the other one is back"
    assert encodings[1] == [{"dense"}, {"indices"}, {"dense"}]
    assert all(flushes[-1][1] for seen in result["seen"] for flushes in [one["flushes"] for one in seen])
    assert result["cached"] == [expected[4]] * 2
    metrics = result["returned"]
    assert [one["checkpoint_engine/is_delta"] for one in metrics] == [0, 1, 1, 0]
    sizes = [one["checkpoint_engine/payload_mbytes"] for one in metrics]
    assert max(sizes[1:3]) < 0.6 * sizes[0]
    assert [one["checkpoint_engine/whole_mbytes"] for one in metrics] == [sizes[0]] * 4
