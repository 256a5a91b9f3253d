"""What an attempt's directory holds before any rank writes to it: the plan, and files known beforehand. Torch-free.

Guarantees: all of it is durable when `make_attempt` returns; what can't be an export is refused before that.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.format.manifest import PLAN_NAME, AttemptPlan, encode_attempt_plan, may_hold_data
from holdfast.format.parts import tiling_fault
from holdfast.storage.lease import LEASE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.storage.protocol import Storage


def check_export(plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> None:
    """Raise `ConfigError` unless the files of an export that ``plan`` and ``prewritten`` name can lie in a directory.

    And unless the planned parts of all ranks together are whole files. Pure.
    """
    fault = tiling_fault(itertools.chain.from_iterable(plan.parts))
    listed = {file.name: file.size for file in plan.manifest.files}
    data = {part.name for parts in plan.parts for part in parts}
    directories = {name.partition("/")[0] for name in prewritten if "/" in name}
    if fault is None and listed != {name: len(content) for name, content in prewritten.items()}:
        fault = "its manifest lists other small files than are given"
    for name in (*prewritten, *data):
        if not _may_be_exported(name) or ("/" in name and name in data):
            fault = f"{name!r} can't be the name of a file of it: it is hidden, deep, or means something to Holdfast"
        elif name in directories or (name in data and name in prewritten):
            fault = f"{name!r} is there twice"
    if fault is not None:
        raise ConfigError(f"the export {plan.name} can't be written: {fault}", field="assets")


def _may_be_exported(name: str) -> bool:
    components = name.split("/")
    plain = all(component and not component.startswith(".") and "\0" not in component for component in components)
    return plain and len(components) <= 2 and may_hold_data(name) and not name.startswith(LEASE_PREFIX)


def make_attempt(storage: Storage, directory: str, plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> bytes:
    """Make ``directory`` with the plan and what else is known beforehand in it; durable on return.

    ``prewritten``: content by name, an export's with at most one directory in front. Returns the plan's file. Raises
    what `check_export` does before anything is made, `StorageError`.
    """
    if plan.manifest.kind == "export":
        check_export(plan, prewritten)
    encoded = encode_attempt_plan(plan)
    storage.make_dir(directory)
    storage.write_file(f"{directory}/{PLAN_NAME}", encoded)
    below = sorted({f"{directory}/{name.partition('/')[0]}" for name in prewritten if "/" in name})
    for made in below:
        storage.make_dir(made)
    for name, data in prewritten.items():
        storage.write_file(f"{directory}/{name}", data)
    for made in below:
        storage.sync_dir(made)
    storage.sync_dir(directory)
    return encoded
