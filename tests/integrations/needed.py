"""Skip the tests of frameworks that aren't installed; fail where they have to be.

``HOLDFAST_REQUIRE`` has names with versions, ``verl==0.9.1 vllm==0.33.0``: `make test-rl` sets it, so that nothing
passes because it wasn't there, or was another version.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

import pytest


def need(*modules: str) -> None:
    """Go on with a module of tests if ``modules`` are installed, at the versions that are required."""
    required = dict(word.split("==") for word in os.environ.get("HOLDFAST_REQUIRE", "").split())
    for module in modules:
        found = version(module) if importlib.util.find_spec(module) is not None else None
        if module in required and found != required[module]:
            there = "is not installed" if found is None else f"is {found}"
            pytest.fail(f"{module} {there}, {required[module]} is required: nothing here ran", pytrace=False)
        if found is None:
            pytest.skip(f"{module} is not installed: `make test-rl` brings it", allow_module_level=True)
