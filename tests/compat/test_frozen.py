"""Hold public names, signatures, events and files on disk where the last release left them.

``tests/compat/frozen/public.json`` has every public name with its parameters, ``frozen/written`` what that version
wrote. Additions are allowed: names, parameters with a default at the end, events, fields of an event. To freeze a new
release: ``python tests/compat/test_frozen.py --write`` and look at the difference.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

HERE = Path(__file__).resolve().parent / "frozen"
SOURCES = Path(holdfast.__file__).parent
PUBLIC = (
    "holdfast",
    "holdfast.dcp",
    "holdfast.errors",
    "holdfast.export",
    "holdfast.sync",
    "holdfast.sync.adapters.sglang",
    "holdfast.sync.adapters.verl",
    "holdfast.sync.adapters.vllm",
    "holdfast.testing.engine",
    "holdfast.testing.memory_storage",
    "holdfast.testing.parts",
    "holdfast.testing.staging",
    "holdfast.testing.storage_conformance",
)


def parameters(function: Any) -> list[list[str]] | None:
    """Name, kind and default of each parameter; None where Python can't tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        [one.name, one.kind.name, "" if one.default is one.empty else re.sub(r" at 0x[0-9a-f]+", "", repr(one.default))]
        for one in found
    ]


def shape_of(value: object) -> dict[str, Any]:
    """What callers rely on of a public value."""
    if inspect.isclass(value):
        members = {
            name: parameters(member) if callable(member) else type(member).__name__
            for name in dir(value)
            if not name.startswith("_")
            and not isinstance(member := inspect.getattr_static(value, name), (staticmethod, classmethod))
        }
        return {"kind": "class", "parameters": parameters(value), "members": members}
    if callable(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": type(value).__name__}


def public_names() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "").startswith("holdfast")
        ]
        for name in sorted(names):
            found[f"{module_name}.{name}"] = shape_of(getattr(module, name))
    return found


def event_fields() -> dict[str, list[str]]:
    """Fields of every event that the sources emit, by its name."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("emit") and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.setdefault(name.value, set()).update(word.arg for word in node.keywords if word.arg)
    return {name: sorted(fields) for name, fields in sorted(found.items())}


def frozen() -> dict[str, Any]:
    return dict(json.loads((HERE / "public.json").read_text()))


def breaks(before: list[list[str]], now: list[list[str]] | None) -> str:
    """What a caller written for ``before`` would trip over; empty if nothing."""
    if now is None:
        return "it has no signature any more"
    present = {name: (kind, default) for name, kind, default in now}
    for name, kind, default in before:
        now_kind, now_default = present.get(name, (None, None))
        if now_kind != kind or default not in (now_default, ""):  # what was required may be left out now
            return f"{name}: was {kind} = {default or 'required'}, is {present.get(name)}"
    by_place = [name for name, kind, _ in before if kind.startswith("POSITIONAL")]
    places = [name for name, kind, _ in now if kind.startswith("POSITIONAL")]
    if places[: len(by_place)] != by_place:
        return f"positional parameters were {by_place}, are {places}"
    known = {name for name, _, _ in before}
    required = [name for name, kind, default in now if name not in known and not default and "VAR" not in kind]
    return f"new parameters without a default: {required}" if required else ""


@pytest.mark.parametrize("name", frozen()["names"] if HERE.exists() else [])
def test_public_name_and_signature_stay(name: str) -> None:
    before, now = frozen()["names"][name], public_names().get(name)
    assert now is not None, f"{name} is gone"
    assert now["kind"] == before["kind"]
    if before.get("parameters") is not None:
        assert not breaks(before["parameters"], now["parameters"])
    for member, was in before.get("members", {}).items():
        assert member in now["members"], f"{name}.{member} is gone"
        if isinstance(was, list):
            assert not breaks(was, now["members"][member])


def test_events_and_their_fields_stay() -> None:
    now = event_fields()
    for name, fields in frozen()["events"].items():
        assert name in now, f"the event {name} is gone"
        assert set(fields) <= set(now[name])


def a_state() -> dict[str, Any]:
    """The state that was written: every kind of value, from fixed numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    with torch.no_grad():
        for at, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) * 0.5 + at)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "train": {"epoch": 3, "names": ["a", "b"], "rate": 0.25, "pair": (1, 2)},
        "half": torch.arange(600_000, dtype=torch.float32).to(torch.bfloat16),
        "none": torch.empty(0, 4),
    }


def write_all(where: Path) -> None:
    state = a_state()
    holdfast.save(state, where / "checkpoint", step=12, metrics={"loss": 0.5})
    holdfast.export_hf({"model": state["model"]}, where / "export")
    with holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(str(where / "versions"))) as publisher:
        publisher.publish(dict(state["model"].state_dict()), 5)


def same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], tensor), name
    for before, now in zip(expected["optimizer"].state.values(), state["optimizer"].state.values(), strict=True):
        assert all(torch.equal(before[key], now[key]) for key in before)
    assert state["train"] == expected["train"]
    assert torch.equal(state["half"], expected["half"])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy of what the last release wrote: reading it may leave lock files."""
    return Path(shutil.copytree(HERE / "written", tmp_path / "written", symlinks=True))


def test_what_the_last_release_saved_loads(written: Path) -> None:
    state = a_state()
    with torch.no_grad():
        for tensor in state["model"].state_dict().values():
            tensor.zero_()
    state["train"] = {}
    state["half"] = torch.zeros_like(state["half"])
    checkpoint = holdfast.load(state, written / "checkpoint")
    assert (checkpoint.step, dict(checkpoint.metrics)) == (12, {"loss": 0.5})
    assert checkpoint.verify().ok
    same_state(state, a_state())


def test_what_the_last_release_exported_and_published_loads(written: Path) -> None:
    expected = a_state()["model"]
    for read in ("export", "versions"):
        model = a_state()["model"]
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        if read == "export":
            holdfast.load({"model": model}, written / "export")
        else:
            with holdfast.sync.Receiver(holdfast.sync.DirectoryTransport(str(written / "versions"))) as receiver:
                assert receiver.receive(model, timeout=30.0) == 5
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (read, name)


def data_files(directory: Path) -> dict[str, bytes]:
    """Files whose bytes depend on the state alone: not manifests and reports, which have times."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix in (".distcp", ".safetensors", ".json") and path.name != "holdfast.json"
    }


def test_payload_files_are_written_byte_for_byte_as_before(tmp_path: Path) -> None:
    write_all(tmp_path)
    before, now = data_files(HERE / "written"), data_files(tmp_path)
    assert sorted(before) == sorted(now)
    assert {name for name in before if before[name] != now[name]} == set()


def json_keys(value: object, at: str = "") -> set[str]:
    """Paths of all keys of a nested JSON value."""
    if isinstance(value, dict):
        return {f"{at}/{key}" for key in value} | {
            deep for key, item in value.items() for deep in json_keys(item, f"{at}/{key}")
        }
    return set().union(*(json_keys(item, f"{at}[]") for item in value)) if isinstance(value, list) else set()


def test_manifest_has_the_same_fields(tmp_path: Path) -> None:
    holdfast.save(a_state(), tmp_path / "checkpoint", step=12, metrics={"loss": 0.5})
    before = json.loads((HERE / "written" / "checkpoint" / "holdfast.json").read_bytes().split(b"\n\n")[0])
    now = json.loads((tmp_path / "checkpoint" / "holdfast.json").read_bytes().split(b"\n\n")[0])
    assert json_keys(before) <= json_keys(now)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "written").mkdir(parents=True)
    (HERE / "public.json").write_text(
        json.dumps({"names": public_names(), "events": event_fields()}, indent=1, sort_keys=True) + "\n"
    )
    write_all(HERE / "written")
    shutil.rmtree(HERE / "written" / "versions" / ".holdfast")  # locks of a writer that is no more
