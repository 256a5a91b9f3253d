"""What every version of Holdfast has written opens, verifies, loads, lists and prunes today; what a later one writes is
refused by an error that names it. The promise is docs/compatibility.md; `format_fixtures` makes what is read here.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from format_fixtures import FIXTURES, MADE_BY, STEPS, VERSIONS, model_of, values_of, write_all
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli.app import app
from holdfast.errors import ConfigError
from holdfast.format.manifest import decode_attempt_plan, decode_manifest, decode_report
from holdfast.format.sealed import check_json_seal, seal, unseal, xxh3_128

NEWEST = [*MADE_BY][-1]
WITH_EXPORTS = [name for name in MADE_BY if (FIXTURES / name / "export").exists()]
WITH_DELTAS = ["0.1.0.dev6", "0.1.0.dev7"]
LATER = "9.9.0"


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what the version has written: reading may leave locks, and pruning deletes."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / "written"))


def each(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("written", names, indirect=True)


def holdfast_cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def emptied() -> dict[str, Any]:
    state = values_of(0)
    for parameter in state["model"].parameters():
        torch.nn.init.zeros_(parameter)
    return state | {"train": {}}


def assert_is(state: dict[str, Any], step: int) -> None:
    for name, value in values_of(step).items():
        if isinstance(value, torch.nn.Module):
            assert all(torch.equal(state[name].state_dict()[key], one) for key, one in value.state_dict().items())
        elif isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value


def test_every_version_has_its_fixture() -> None:
    assert {path.name for path in FIXTURES.iterdir()} == set(MADE_BY)
    for version in MADE_BY:
        made = json.loads((FIXTURES / version / "made.json").read_bytes())
        assert made["commit"] == MADE_BY[version][0]
        size = sum(path.stat().st_size for path in (FIXTURES / version).rglob("*") if path.is_file())
        assert size < 1 << 18
    formats = {json.loads(path.read_bytes().decode())["format"] for path in FIXTURES.rglob("holdfast.json")}
    assert formats == {1, 2, 3}, "each format that any version has written"
    assert len(WITH_EXPORTS) == len(MADE_BY) - 2


@each([*MADE_BY])
def test_a_root_of_each_version_is_resumed_from(written: Path) -> None:
    state = emptied()
    with holdfast.CheckpointManager(str(written / "root"), state) as manager:
        assert manager.steps() == [*STEPS]
        assert manager.restore() == STEPS[-1]
        assert_is(state, STEPS[-1])
        state["train"]["step"] += 1
        manager.save(STEPS[-1] + 1).result(60.0)
        assert manager.steps() == [*STEPS, STEPS[-1] + 1]


@each([*MADE_BY])
def test_checkpoints_of_each_version_open_verify_and_load(written: Path) -> None:
    for step in STEPS:
        where = written / "root" / f"step-{step}"
        checkpoint = holdfast.open(where)
        assert (checkpoint.step, checkpoint.metrics["loss"]) == (step, 1.0 / step)
        assert checkpoint.verify().ok
        state = emptied()
        holdfast.load(state, where)
        assert_is(state, step)
    sharded = holdfast.open(written / "sharded")
    assert sharded.verify().ok
    assert torch.equal(sharded.read("w"), torch.arange(24, dtype=torch.float32).reshape(6, 4))
    assert torch.equal(sharded.read("w", (slice(2, 4),)), torch.arange(8, 16, dtype=torch.float32).reshape(2, 4))
    assert sharded.manifest is not None
    assert sharded.manifest.world == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@each([*MADE_BY])
def test_stock_torch_loads_checkpoints_of_each_version(written: Path) -> None:
    for where, name, expected in [
        (written / "root" / "step-20", "half", values_of(20)["half"]),
        (written / "root" / "step-20", "model.weight", values_of(20)["model"].weight),
        (written / "sharded", "w", torch.arange(24, dtype=torch.float32).reshape(6, 4)),
    ]:
        into = {name: torch.zeros_like(expected)}
        dcp.load(into, checkpoint_id=str(where))
        assert torch.equal(into[name], expected)


@each(WITH_EXPORTS)
def test_exports_of_each_version_load_here_and_by_safetensors(written: Path) -> None:
    expected, model = model_of(STEPS[-1]), torch.nn.Linear(8, 4)
    holdfast.load({"model": model}, written / "export")
    stock = load_file(written / "export" / "model.safetensors")
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(stock[name], value)
    assert holdfast_cli("verify", written / "export").exit_code == 0


@each(WITH_EXPORTS)
def test_weight_versions_of_each_version_are_received(written: Path) -> None:
    with holdfast.sync.Receiver(holdfast.sync.DirectoryTransport(str(written / "versions"))) as receiver:
        for version in (VERSIONS[-1], VERSIONS[0]):
            model = torch.nn.Linear(8, 4)
            assert receiver.receive(model, version, timeout=30.0) == version
            for name, value in model_of(version).state_dict().items():
                assert torch.equal(model.state_dict()[name], value), (version, name)


@each(WITH_DELTAS)
def test_delta_versions_are_checkpoints_that_open_and_verify(written: Path) -> None:
    for version in VERSIONS:
        checkpoint = holdfast.open(written / "versions" / f"version-{version}")
        assert checkpoint.manifest is not None
        assert checkpoint.manifest.format == (1 if version == VERSIONS[0] else 3)
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint.read("weight"), model_of(version).weight)
    converted = holdfast_cli("convert", written / "versions" / "version-3", written / "whole", "--to", "torch")
    assert converted.exit_code == 0, converted.output
    assert torch.equal(torch.load(written / "whole", weights_only=True)["weight"], model_of(3).weight)


@each([*MADE_BY])
def test_the_command_line_lists_verifies_shows_and_prunes_each_version(written: Path) -> None:
    listed = json.loads(holdfast_cli("ls", written / "root", "--json").output)
    assert [(row["step"], row["state"]) for row in listed["entries"]] == [(step, "published") for step in STEPS]
    for what in ("root", "sharded"):
        assert holdfast_cli("verify", written / what).exit_code == 0
        assert holdfast_cli("show", written / what).exit_code == 0
    pruned = holdfast_cli("prune", written / "root", "--last", 1, "--json")
    assert pruned.exit_code == 0, pruned.output
    assert [(row["step"], row["outcome"]) for row in json.loads(pruned.output)["steps"]] == [(10, "gone"), (20, "kept")]
    assert not (written / "root" / "step-10").exists()
    if (written / "versions").exists():
        versions = json.loads(holdfast_cli("ls", written / "versions", "--json").output)
        assert sorted(row["step"] for row in versions["entries"]) == [*VERSIONS]


@each(WITH_DELTAS)
def test_pruning_versions_keeps_what_a_delta_needs(written: Path) -> None:
    arguments = ("prune", written / "versions", "--last", 1, "--name-template", "version-{step}")
    assert holdfast_cli(*arguments).exit_code == 0
    checkpoint = holdfast.open(written / "versions" / f"version-{VERSIONS[-1]}")
    assert torch.equal(checkpoint.read("weight"), model_of(VERSIONS[-1]).weight)


def data_files(where: Path) -> dict[str, bytes]:
    """Files whose bytes depend on the state alone: manifests have times, reports attempts, ``.metadata`` both."""
    return {
        str(path.relative_to(where)): path.read_bytes()
        for path in sorted(where.rglob("*"))
        if path.suffix in (".distcp", ".safetensors")
    }


def keys(value: object, at: str = "") -> set[str]:
    if isinstance(value, dict):
        return {f"{at}/{key}" for key in value}.union(*(keys(item, f"{at}/{key}") for key, item in value.items()))
    return set().union(*(keys(item, f"{at}[]") for item in value)) if isinstance(value, list) else set()


@pytest.mark.timeout(300)  # two ranks start a torch each, on a machine that others use
def test_what_is_written_today_is_what_the_newest_fixture_holds(tmp_path: Path) -> None:
    write_all(tmp_path / "now", made_by={"commit": "here", "what": "here"})
    before, now = FIXTURES / NEWEST, tmp_path / "now"
    assert data_files(now).keys() == data_files(before).keys()
    assert data_files(now) == data_files(before), "the same values are the same bytes: a change needs a new format"
    for path in before.rglob("holdfast.json"):
        old, new = (json.loads((where / path.relative_to(before)).read_bytes()) for where in (before, now))
        assert old["format"] == new["format"]
        assert keys(old) <= keys(new)


def claim_later(manifest: Path, *, writer: str = LATER, number: int = 99) -> None:
    """Make it what a later Holdfast might write: the seal, and where the format is said, never change."""
    text = re.sub(rb'"format": \d+', b'"format": %d' % number, manifest.read_bytes(), count=1)
    text = re.sub(rb'("holdfast": )"[^"]*"', rb'\1"%s"' % writer.encode(), text)
    body = text[: -len(b'"\n}\n') - 32]
    manifest.write_bytes(body + xxh3_128(body).encode() + b'"\n}\n')
    check_json_seal(manifest.read_bytes(), what="manifest", path=str(manifest))


@each([NEWEST])
def test_a_later_format_is_refused_by_the_name_of_the_version_to_install(written: Path) -> None:
    where = written / "root" / f"step-{STEPS[-1]}"
    claim_later(where / "holdfast.json")
    state = emptied()

    def restore() -> None:
        with holdfast.CheckpointManager(str(written / "root"), state) as manager:
            manager.restore()

    for call in (lambda: holdfast.open(where), lambda: holdfast.load(state, where), restore):
        with pytest.raises(ConfigError) as caught:
            call()
        message = str(caught.value)
        assert str(where) in message
        assert f"pip install 'holdfast>={LATER}'" in message
        assert f"format 99, and Holdfast {holdfast.__version__} reads formats 1, 2 and 3" in message
    assert_is(state | values_of(0), 0)
    assert state["train"] == {}, "nothing was loaded, and it did not fall back to an older step"


@each([NEWEST])
def test_the_command_line_names_the_version_to_install_and_deletes_nothing(written: Path) -> None:
    where = written / "root" / f"step-{STEPS[-1]}"
    claim_later(where / "holdfast.json")
    for command in ("show", "verify"):
        ended = holdfast_cli(command, where)
        told = str(ended.exception) + ended.output
        assert ended.exit_code != 0
        assert LATER in told, (command, told)
    listed = json.loads(holdfast_cli("ls", written / "root", "--json").output)
    (error,) = [row["error"] for row in listed["entries"] if row["step"] == STEPS[-1]]
    assert f"holdfast>={LATER}" in error
    assert holdfast_cli("prune", written / "root", "--last", 0).exit_code == 0
    assert where.is_dir(), "what can't be read is not retention's"


@pytest.mark.parametrize(
    ("writer", "told"), [("1.0; rm -rf /", False), (holdfast.__version__, False), ("1.2.0rc1", True)]
)
def test_only_a_release_that_can_help_is_named(tmp_path: Path, writer: str, told: bool) -> None:
    path = Path(shutil.copy(FIXTURES / NEWEST / "sharded" / "holdfast.json", tmp_path))
    claim_later(path, writer=writer)
    with pytest.raises(ConfigError) as caught:
        decode_manifest(path.read_bytes(), path=str(path))
    assert ("install 'holdfast>=" in str(caught.value)) == told
    assert told or "pip install --upgrade holdfast" in str(caught.value)


def test_reports_and_plans_of_a_later_format_are_no_damage() -> None:
    data = (FIXTURES / NEWEST / "sharded" / "rank-00000.report").read_bytes()
    _, content = unseal(data[:7], (1, 2, 3), data, what="report", path="r")
    with pytest.raises(ConfigError, match=r"format 99.*newer Holdfast"):
        decode_report(seal(data[:7], 99, bytes(content)), path="r")
    with pytest.raises(ConfigError, match=r"format 99.*newer Holdfast"):
        decode_attempt_plan(seal(b"HFplan\0", 99, b"anything at all"), path="p")


def test_a_format_that_nobody_writes_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(FIXTURES / NEWEST / "sharded" / "holdfast.json", tmp_path))
    claim_later(path, number=0)
    with pytest.raises(ConfigError, match="no release of Holdfast writes that format"):
        decode_manifest(path.read_bytes(), path=str(path))
