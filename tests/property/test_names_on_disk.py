"""Every name that a writer takes is read back; every other one is refused before anything is written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

import holdfast
import holdfast.dcp
from holdfast.catalog.root import checked_target, target_fault
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.export.layout import TargetTensor, layout
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    AttemptPlan,
    Manifest,
    ManifestReport,
    attempt_in,
    decode_attempt_plan,
    decode_manifest,
    encode_attempt_plan,
    encode_manifest,
    report_name,
)
from holdfast.storage.entries import hidden_name, parse_hidden
from holdfast.validation import name_fault

ATTEMPT = "0123456789ab"
AWKWARD = [
    *(
        "a\\b",
        "\\",
        "a/../b",
        "..",
        ".",
        "",
        "a\0b",
        "a\nb",
        " a ",
        "a\r",
        ".hidden",
        "..a",
        "~",
        "$HOME",
        "%s",
    ),
    *("holdfast.json", ".metadata", ".plan", ".holdfast", ".x.lock", "rank-00003.report", "lost+found", "C:", "a:b"),
    *(f".x.{ATTEMPT}.{kind}" for kind in ("incomplete", "recovering", "replaced", "trash")),
    *("x" * 229, "x" * 230, "x" * 255, "x" * 256, "\N{SNOWMAN}" * 76, "\N{SNOWMAN}" * 77, "\U0001f40b" * 58, "\ud800"),
    *("\x7f", "\x01" * 200, "\N{LINE SEPARATOR}", '"', "'", "-rf", "*", "model.safetensors"),
]
names = st.one_of(
    st.sampled_from(AWKWARD),
    st.text(st.characters(), max_size=80),
    st.lists(st.sampled_from([*"/\\.\0\n ~:", "..", "a", ATTEMPT, "lock", "trash", "é"]), max_size=6).map("".join),
)


def manifest_of(name: str, reports: tuple[ManifestReport, ...]) -> Manifest:
    return Manifest(
        format=1, name=name, attempt=ATTEMPT, step=1, world=1, created="2026-01-01T00:00:00+00:00", metrics={},
        resumable=True, versions={}, reports=reports, files=(),
    )  # fmt: skip


@given(names)
@settings(max_examples=400)
def test_what_writers_take_is_what_readers_take(name: str) -> None:
    report = ManifestReport(0, report_name(0), 100, "0" * 32, 7)
    manifest = manifest_of(name, (report,))
    plan = AttemptPlan(ATTEMPT, name, 1, 1, (((), )), manifest_of(name, ()))  # fmt: skip
    if target_fault(name) is None:
        data = encode_manifest(manifest)
        assert decode_manifest(data, path="") == manifest
        assert attempt_in(data[:MANIFEST_HEAD_BYTES]) == ATTEMPT
        assert decode_attempt_plan(encode_attempt_plan(plan), path="") == plan
        for kind in ("incomplete", "recovering", "replaced", "trash"):
            hidden = hidden_name(name, ATTEMPT, kind)
            assert len(os.fsencode(hidden)) <= 255
            found = parse_hidden(hidden)
            assert found is not None
            assert (found.name, found.attempt, found.kind) == (name, ATTEMPT, kind)
    elif name_fault(name) is not None and "\ud800" not in name:
        with pytest.raises(CheckpointCorrupt, match="isn't a plain file name"):
            decode_manifest(encode_manifest(manifest), path="")


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def error_of(act: Callable[[], object]) -> Any:
    """What ``act`` raises, None if nothing."""
    try:
        act()
    except holdfast.HoldfastError as error:
        return error
    return None


def below(place: str, *parts: str) -> str:
    return "/".join((place, *parts))


@given(st.lists(names, max_size=2), names)
@settings(max_examples=12, deadline=None)
@example(["a\\b"], "c\\d")
@example(["a\\b", "x "], "c\nd")
@example([], "x" * 230)
def test_a_save_to_any_path_is_loaded_from_there_or_refused(parents: list[str], name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = below(place, *parents, name)
        if not os.path.abspath(path.replace("\0", "")).startswith(place + "/"):
            return
        if refusal := error_of(lambda: holdfast.save(state(2.0), path, step=1)):
            assert isinstance(refusal, ConfigError) or "ENAMETOOLONG" in str(refusal)
            assert [found for found in Path(place).rglob("holdfast.json") if found.is_file()] == []
            return
        loaded = state()
        assert holdfast.load(loaded, path).step == 1
        assert loaded["w"].tolist() == [2.0] * 3
        assert holdfast.open(path).verify().ok


@pytest.mark.parametrize("name", AWKWARD, ids=lambda name: ascii(name)[:24])
def test_a_template_that_is_taken_makes_names_that_are_resumed_from(name: str, tmp_path: Path) -> None:
    template = name + "{step}"
    if refusal := error_of(lambda: holdfast.CheckpointConfig(name_template=template)):
        assert refusal.field == "name_template"
        with pytest.raises(ConfigError, match="name_template"):
            holdfast.HFExport(tmp_path, name_template=template)
        return
    config = holdfast.CheckpointConfig(name_template=template)
    assert holdfast.HFExport(tmp_path, name_template=template).name_template == template
    if len(name) % 4:
        return  # a start takes a while, and they are all checked by the same rule
    for expected in (None, 7):
        with holdfast.CheckpointManager(tmp_path / "root", state(), config=config) as manager:
            assert manager.restore() == expected
            if expected is None:
                manager.save(7).result()


@pytest.mark.parametrize(
    "name", ["a\\b", "\\", "holdfast.json", f".x.{ATTEMPT}.trash", ".x.lock", "x" * 231], ids=ascii
)
def test_every_writer_refuses_what_no_reader_would_take(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    model = torch.nn.Linear(2, 2)
    for write in (
        lambda: holdfast.save(state(), path),
        lambda: holdfast.async_save(state(), path),
        lambda: holdfast.dcp.Writer(path),
        lambda: holdfast.dcp.Writer(tmp_path / "other").reset(path),
        lambda: holdfast.export_hf({"model": model}, path),
        lambda: checked_target(path, field="path"),
    ):
        with pytest.raises(ConfigError, match=r"can't be the name of a checkpoint") as caught:
            write()
        assert caught.value.field in ("path", "checkpoint_id", "out")
    assert not holdfast.dcp.Writer.validate_checkpoint_id(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_directories_above_may_have_any_name(tmp_path: Path) -> None:
    place = tmp_path / "a\\b" / ".x.lock" / "holdfast.json" / " "
    dcp.save(state(3.0), storage_writer=holdfast.dcp.Writer(place / "stock"), no_dist=True)
    assert holdfast.open(place / "stock").read("w").tolist() == [3.0] * 3
    with holdfast.CheckpointManager(place, state(4.0)) as manager:
        manager.save(1).result()
    with holdfast.CheckpointManager(place, state()) as manager:
        assert manager.restore() == 1


def test_weights_are_in_files_that_an_index_may_name() -> None:
    for name in ("a:b.safetensors", "a\\b.safetensors"):
        with pytest.raises(ConfigError, match="not a plain file name"):
            layout([TargetTensor("w", "F32", (2,))], max_shard_bytes=9, total_parameters=2, weights_name=name)


@pytest.mark.parametrize("path", ["/", "//", "/."])
def test_the_top_of_the_file_system_is_no_checkpoint(path: str) -> None:
    with pytest.raises(holdfast.errors.HoldfastError):
        holdfast.open(path)
    with pytest.raises(ConfigError):
        holdfast.save(state(), path)
