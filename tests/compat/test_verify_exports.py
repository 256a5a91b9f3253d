"""``holdfast verify`` on exports: those that a manifest was committed with, and those that anybody wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

import holdfast
from holdfast.export.layout import TargetTensor, layout
from holdfast.format.manifest import (
    EXTENT_BYTES,
    Manifest,
    ManifestFile,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    encode_index,
    encode_manifest,
    encode_report,
    report_name,
)
from holdfast.format.sealed import xxh3_128

SOURCE = str(Path(holdfast.__file__).parents[1])
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ATTEMPT = "0123456789ab"


def document(*arguments: object, status: int = 0) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def write_export(directory: Path) -> None:
    directory.mkdir(parents=True)
    targets = [TargetTensor(f"layers.{n}", "F32", (300_000,)) for n in range(3)]
    found = layout(targets, max_shard_bytes=2_500_000, total_parameters=900_000)
    for file in found.files:
        (directory / file.name).write_bytes(file.header + bytes(file.size - len(file.header)))
    assert found.index is not None
    (directory / INDEX).write_bytes(found.index)
    (directory / "config.json").write_text("{}")


def commit(directory: Path, step: int) -> None:
    """Put reports and a manifest beside the files, as one rank that has written all of them would."""
    weights = sorted(directory.glob("*.safetensors"))
    rows = [ReportFile(path.name, path.stat().st_size, sums(path.read_bytes())) for path in weights]
    index = encode_index(RankIndex((), ()))
    report = encode_report(Report(ATTEMPT, step, 0, 1, tuple(rows), b"", index))
    nbytes = sum(row.size for row in rows)
    files = [
        ManifestFile(path.name, path.stat().st_size, xxh3_128(path.read_bytes()))
        for path in sorted(directory.glob("*.json"))
        if path.name != "holdfast.json"
    ]
    (directory / report_name(0)).write_bytes(report)
    manifest = Manifest(
        format=1,
        name=directory.name,
        attempt=ATTEMPT,
        step=step,
        world=1,
        created="2026-01-01T00:00:00+00:00",
        metrics={},
        resumable=False,
        versions={},
        reports=(ManifestReport(0, report_name(0), len(report), xxh3_128(report), nbytes),),
        files=tuple(files),
    )
    (directory / "holdfast.json").write_bytes(encode_manifest(manifest))


def sums(data: bytes) -> bytes:
    return b"".join(
        xxhash.xxh3_64_intdigest(data[at : at + EXTENT_BYTES]).to_bytes(8, "little")
        for at in range(0, len(data), EXTENT_BYTES)
    )


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """What has no manifest, as ``save_pretrained`` leaves it."""
    write_export(tmp_path / "foreign")
    return tmp_path / "foreign"


@pytest.fixture
def root(foreign: Path) -> Path:
    """Two exports that were committed, without their ``save_pretrained`` twin."""
    for step in (1, 2):
        made = Path(shutil.copytree(foreign, foreign.parent / "root" / f"hf-{step}"))
        commit(made, step)
    return foreign.parent / "root"


def problems(row: dict[str, Any]) -> list[str]:
    return [os.path.relpath(problem["path"], row["path"]) for problem in row["problems"]]


def test_what_anybody_wrote(foreign: Path) -> None:
    (row,) = document("verify", foreign)["checkpoints"]
    size = sum(path.stat().st_size for path in foreign.iterdir())
    assert row == {
        "path": str(foreign),
        "step": None,
        "kind": "export",
        "state": "verified",
        "ok": True,
        "error": None,
        "files": 4,
        "nbytes": size,
        "checksummed": False,
        "problems": [],
    }
    os.truncate(foreign / FIRST, 2000)
    (foreign / "config.json").write_text("{")
    found = document("verify", foreign, status=1)
    assert not found["ok"]
    assert problems(found["checkpoints"][0]) == [FIRST, "config.json"]


def test_what_was_committed(root: Path) -> None:
    found = document("verify", root)
    assert [(row["step"], row["kind"], row["checksummed"]) for row in found["checkpoints"]] == [
        (1, "export", True),
        (2, "export", True),
    ]
    assert document("verify", root, "--step", 2)["checkpoints"] == found["checkpoints"][1:]
    assert document("verify", root / "hf-1")["checkpoints"][0]["kind"] == "export"


def test_a_flipped_bit_is_found_by_its_checksum_and_told_once(root: Path) -> None:
    for name, at in ((FIRST, 9), (SECOND, 1_000_000)):
        data = bytearray((root / "hf-1" / name).read_bytes())
        data[at] ^= 1
        (root / "hf-1" / name).write_bytes(data)
    (row,) = document("verify", root / "hf-1", status=1)["checkpoints"]
    assert problems(row) == [FIRST, SECOND]
    assert [problem["byte_range"][0] for problem in row["problems"]] == [0, 0]
    assert document("verify", root / "hf-2")["ok"]


def test_a_file_that_is_missing_is_told_once(root: Path) -> None:
    (root / "hf-1" / "config.json").unlink()
    (row,) = document("verify", root / "hf-1", status=1)["checkpoints"]
    assert problems(row) == ["config.json"]
    (root / "hf-1" / "holdfast.json").unlink()
    (row,) = document("verify", root / "hf-1", status=1)["checkpoints"]
    assert problems(row) == ["holdfast.json"]


def test_what_was_committed_wrongly_is_found_too(root: Path) -> None:
    """Every checksum is right, and a reader would still not get what the export says it has."""
    directory = root / "hf-1"
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["layers.0"] = SECOND
    (directory / INDEX).write_text(json.dumps(index))
    commit(directory, 1)
    (row,) = document("verify", directory, status=1)["checkpoints"]
    assert row["checksummed"]
    assert {(os.path.basename(problem["path"]), problem["tensor"]) for problem in row["problems"]} == {
        (INDEX, "layers.0")
    }


def test_an_export_has_no_steps(foreign: Path) -> None:
    found = document("verify", foreign, "--newest", status=2)
    assert "is one export" in found["error"]["message"]


def test_verifying_an_export_imports_no_torch(root: Path, foreign: Path) -> None:
    code = (
        "import sys; from holdfast.cli.app import app\n"
        "for path in sys.argv[1:]: app(['verify', path], standalone_mode=False)\n"
        "print([name for name in ('torch', 'numpy', 'safetensors', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(root), str(foreign)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stdout.splitlines()
    assert last == "[]"
    assert [line.split(": ")[1].split(" (")[0] for line in lines] == ["fine"] * 3
    assert lines[-1].endswith("which has no checksums: only what an index and headers tell would show)")
