"""Megatron-core's own sharded state dicts: a tensor-parallel GPT, saved and loaded on other numbers of ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import run_script

if find_spec("megatron") is None:
    pytest.skip("megatron-core isn't installed", allow_module_level=True)

JOB = Path(__file__).with_name("megatron_ranks.py")


def test_a_model_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_script(JOB, f"save:{tmp_path}/two", f"load:{tmp_path}/two", nproc=2)
    run_script(JOB, f"load:{tmp_path}/two", f"save:{tmp_path}/one", f"load:{tmp_path}/one")
    run_script(JOB, f"load:{tmp_path}/one", nproc=2)
