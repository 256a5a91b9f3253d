"""What `verify_export` finds: every contradiction between index, headers and files; of hostile bytes nothing worse."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointCorrupt
from holdfast.export.layout import CODE_BITS, HFLayout, TargetTensor, layout
from holdfast.export.verify import is_export, read_header, verify_export
from holdfast.loader.checkpoint import Problem

TARGETS = [TargetTensor(f"layers.{n}.weight", ("F32", "BF16", "U8")[n % 3], (n + 1, 4)) for n in range(6)]
INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def write(directory: Path, found: HFLayout) -> None:
    directory.mkdir(exist_ok=True)
    for file in found.files:
        (directory / file.name).write_bytes(file.header + bytes(range(256))[:1] * (file.size - len(file.header)))
    if found.index is not None:
        (directory / found.index_name).write_bytes(found.index)
    (directory / "config.json").write_text('{"model_type": "llama", "rope_theta": Infinity}')
    (directory / "tokenizer.json").write_text("{}")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    found = layout(TARGETS, max_shard_bytes=64, total_parameters=84)
    write(tmp_path / "hf-1", found)
    assert [file.name for file in found.files] == [FIRST, SECOND, THIRD]
    return tmp_path / "hf-1"


def said(directory: Path) -> list[tuple[str, str | None]]:
    """The files that something is wrong with, and the tensors where they are known."""
    problems = verify_export(str(directory))
    for problem in problems:
        assert problem.message.startswith(problem.path)
    return [(os.path.relpath(problem.path, directory), problem.tensor) for problem in problems]


def only(directory: Path) -> Problem:
    (problem,) = verify_export(str(directory))
    return problem


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((directory / INDEX).read_text())
    change(document)
    (directory / INDEX).write_text(json.dumps(document))


def raw(header: object, payload: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


# what is fine --------------------------------------------------------------------------------------------------


def test_exports_that_are_fine(export: Path, tmp_path: Path) -> None:
    assert verify_export(str(export)) == ()
    assert is_export(str(export))
    write(tmp_path / "single", layout(TARGETS, max_shard_bytes=1 << 30, total_parameters=84))
    assert verify_export(str(tmp_path / "single")) == ()
    assert not is_export(str(tmp_path))
    assert not is_export(str(tmp_path / "none"))


@pytest.mark.parametrize("code", CODE_BITS)
def test_every_type_is_known(code: str, tmp_path: Path) -> None:
    write(
        tmp_path / "x",
        layout(
            [TargetTensor("a", code, (4, 2)), TargetTensor("b", code, (0,))], max_shard_bytes=99, total_parameters=8
        ),
    )
    assert verify_export(str(tmp_path / "x")) == ()


def test_what_other_writers_leave_out_is_not_missed(export: Path) -> None:
    edit(export, lambda document: document.pop("metadata"))
    assert verify_export(str(export)) == ()
    edit(export, lambda document: document.update(metadata={}))
    assert verify_export(str(export)) == ()


# the index -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_not_where_the_index_says(export: Path) -> None:
    edit(export, lambda document: document["weight_map"].update({"layers.0.weight": THIRD}))
    assert said(export) == [(INDEX, "layers.0.weight")] * 2
    messages = [problem.message for problem in verify_export(str(export))]
    assert any("doesn't hold it" in message and THIRD in message for message in messages)
    assert any(FIRST in message for message in messages)


def test_a_tensor_that_the_index_does_not_name_and_one_that_is_not_there(export: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        del document["weight_map"]["layers.1.weight"]
        document["weight_map"]["layers.99.weight"] = FIRST

    edit(export, change)
    assert sorted(said(export)) == [(INDEX, "layers.1.weight"), (INDEX, "layers.99.weight")]


def test_a_file_that_is_missing(export: Path) -> None:
    (export / SECOND).unlink()
    assert said(export) == [(INDEX, None)]
    assert SECOND in only(export).message


def test_a_file_that_no_index_names(export: Path) -> None:
    shutil.copy(export / FIRST, export / "model-00004-of-00004.safetensors")
    assert said(export) == [("model-00004-of-00004.safetensors", None)]
    (export / INDEX).unlink()
    assert "no index" in only(export).message


def test_a_wrong_sum(export: Path) -> None:
    edit(export, lambda document: document["metadata"].update(total_size=1))
    assert "its total_size is 1, and its tensors have 172 bytes" in only(export).message


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "", "a\0b", "sub/model.safetensors"])
def test_an_index_that_leads_out_of_the_directory(export: Path, name: str) -> None:
    shutil.copy(export / FIRST, export.parent / "outside.safetensors")
    edit(export, lambda document: document["weight_map"].update({"layers.0.weight": name}))
    problems = verify_export(str(export))
    assert problems
    assert all(problem.path == str(export / INDEX) for problem in problems)
    assert "no name of a file in the export" in problems[0].message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {}, "metadata": {"total_size": "many"}}',
        b"[" * 200_000,
        b'{"weight_map": {"a": "b"',
        b'\xff\xfe{"weight_map": {}}',
    ],
)
def test_an_index_that_is_none(export: Path, data: bytes) -> None:
    (export / INDEX).write_bytes(data)
    problem = only(export)
    assert (problem.path, problem.byte_range) == (str(export / INDEX), (0, len(data)))


def test_many_findings_are_counted(export: Path) -> None:
    edit(export, lambda document: document["weight_map"].update({f"none.{n}": FIRST for n in range(1000)}))
    problems = verify_export(str(export))
    assert len(problems) == 17
    assert "984 more" in problems[-1].message


def test_a_single_file_hides_an_index(export: Path) -> None:
    shutil.copy(export / FIRST, export / "model.safetensors")
    assert said(export) == [("model.safetensors", None)]


# headers -------------------------------------------------------------------------------------------------------

U8 = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("data", "why", "tensor"),
    [
        (b"", "no safetensors", None),
        (b"1234567", "no safetensors", None),
        ((1 << 63).to_bytes(8, "little") + b"{}", "9,223,372,036,854,775,808", None),
        ((100_000_001).to_bytes(8, "little") + b"{}", "100,000,001", None),
        ((3).to_bytes(8, "little") + b"{}", "would have 3 bytes", None),
        (raw(b"{", b""), "can't be read", None),
        (raw(b"[]", b""), "can't be read", None),
        (raw(b'{"a":' * 100_000, b""), "can't be read", None),
        (raw(b'{"a":"\xff"}', b""), "'a'", "a"),
        (raw({"__metadata__": {"a": 1}}, b""), "can't be read", None),
        (raw({"__metadata__": []}, b""), "can't be read", None),
        (raw({"a": 1}, b""), "'a'", "a"),
        (raw({"a": {}}, b""), "dtype", "a"),
        (raw({"a": {**U8, "dtype": "U9"}}, b"12"), "'U9'", "a"),
        (raw({"a": {**U8, "dtype": ["U8"]}}, b"12"), "dtype", "a"),
        (raw({"a": {**U8, "shape": [-2]}}, b"12"), "shape", "a"),
        (raw({"a": {**U8, "shape": [2.0]}}, b"12"), "shape", "a"),
        (raw({"a": {**U8, "shape": [True, 2]}}, b"12"), "shape", "a"),
        (raw({"a": {**U8, "shape": [1 << 62] * 500}}, b"12"), "aren't", "a"),
        (raw({"a": {**U8, "shape": [1] * 5000}}, b"12"), "shape", "a"),
        (raw({"a": {**U8, "data_offsets": [0]}}, b"12"), "data_offsets", "a"),
        (raw({"a": {**U8, "data_offsets": [2, 0]}}, b"12"), "aren't", "a"),
        (raw({"a": {**U8, "data_offsets": [0, 1 << 80]}}, b"12"), "data_offsets", "a"),
        (raw({"a": {**U8, "data_offsets": [0, 1]}}, b"1"), "aren't", "a"),
        (raw({"a": U8}, b"1"), "cut short", None),
        (raw({"a": U8}, b"123"), "something was added", None),
        (raw({}, b"1"), "something was added", None),
        (raw({"a": U8, "b": {**U8, "data_offsets": [1, 3]}}, b"123"), "overlaps", "b"),
        (raw({"a": U8, "b": {**U8, "data_offsets": [3, 5]}}, b"12345"), "gap of 1", "b"),
        (raw({"a": {**U8, "data_offsets": [1, 3]}}, b"123"), "gap of 1", "a"),
        (raw({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"12"), "aren't", "a"),
    ],
)
def test_headers_that_fit_nothing(tmp_path: Path, data: bytes, why: str, tensor: str | None) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=why) as raised:
        read_header(str(tmp_path), "model.safetensors")
    assert raised.value.tensor == tensor
    problem = only(tmp_path)
    assert (problem.path, problem.tensor) == (str(tmp_path / "model.safetensors"), tensor)
    with pytest.raises(safetensors.SafetensorError):  # and a reader agrees
        safetensors.deserialize(data)


@pytest.mark.parametrize(
    "data",
    [
        raw(b"{}    ", b""),
        raw({"a": U8, "__metadata__": None}, b"12"),
        raw({"a": U8, "__metadata__": {"format": "pt"}}, b"12"),
        raw({"a": {**U8, "more": 1}}, b"12"),
        raw({"a": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}, "b": U8}, b"12"),
        raw({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"123"),
    ],
)
def test_headers_that_fit(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert set(read_header(str(tmp_path), "model.safetensors")) == {name for name, _ in safetensors.deserialize(data)}


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_told_of_a_damaged_header_is_what_a_reader_finds(tmp_path: Path, data: st.DataObject) -> None:
    (file,) = layout(TARGETS, max_shard_bytes=1 << 20, total_parameters=1).files
    whole = bytearray(file.header + bytes(file.size - len(file.header)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(file.header) + 3))
        whole[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    (tmp_path / "model.safetensors").write_bytes(whole)
    try:
        expected = {name for name, _ in safetensors.deserialize(bytes(whole))}
    except safetensors.SafetensorError:
        with pytest.raises(CheckpointCorrupt):
            read_header(str(tmp_path), "model.safetensors")
    else:
        assert set(read_header(str(tmp_path), "model.safetensors")) == expected


def test_no_size_is_believed(export: Path) -> None:
    with (export / FIRST).open("r+b") as file:
        file.write((99_999_999).to_bytes(8, "little"))
    with (export / "huge.json").open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    assert [name for name, _ in said(export)] == [FIRST, "huge.json"]
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_one_damaged_file_is_told_once(export: Path) -> None:
    (export / FIRST).write_bytes(b"")
    assert said(export) == [(FIRST, None)]


# files beside the weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "nested/deep/some.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"\xef\xbb\xbf{}", b'"\x00"', b"[" * 200_000])
def test_json_that_does_not_parse(export: Path, name: str, data: bytes) -> None:
    (export / name).parent.mkdir(parents=True, exist_ok=True)
    (export / name).write_bytes(data)
    assert said(export) == [(name, None)]


def test_a_configuration_is_an_object(export: Path) -> None:
    (export / "config.json").write_text("[1]")
    (export / "tokenizer.json").write_text("[1]")
    assert said(export) == [("config.json", None)]


def test_large_json_is_gone_through(export: Path) -> None:
    (export / "tokenizer.json").write_bytes(b'{"a": [' + b'"word", ' * (2 << 20) + b"1]}")
    assert verify_export(str(export)) == ()
    (export / "tokenizer.json").write_bytes(b'{"a": [' + b'"word", ' * (2 << 20) + b"1}")
    assert said(export) == [("tokenizer.json", None)]


def test_what_is_no_plain_file(export: Path, tmp_path: Path) -> None:
    os.mkfifo(export / "pipe.json")
    (export / "loop").symlink_to(".")
    shutil.move(export / FIRST, tmp_path / "elsewhere")
    (export / FIRST).symlink_to(tmp_path / "elsewhere")
    assert sorted(said(export)) == [("loop", None), (FIRST, None), ("pipe.json", None)]


def test_a_directory_that_is_too_deep(export: Path) -> None:
    (export / "/".join("abcdefghi")).mkdir(parents=True)
    (problem,) = verify_export(str(export))
    assert "8 deep" in problem.message


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    (problem,) = verify_export(str(tmp_path / "none"))
    assert problem.path == str(tmp_path / "none")
