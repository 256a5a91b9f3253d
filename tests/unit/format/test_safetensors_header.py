"""Headers of safetensors files, and indexes of sharded models: what is right, and everything that isn't."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.safetensors import (
    DTYPES,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    Header,
    header_length,
    is_file_beside,
    parse_header,
    parse_index,
    torch_name,
)


def entry(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **more}


def parse(header: Any, *, payloads: int) -> Header:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(data, file_size=LENGTH_BYTES + len(data) + payloads, path="m.safetensors")


def test_what_safetensors_writes(tmp_path: Any) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b.c": torch.ones(5, dtype=torch.float64),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    data = save(tensors, metadata={"format": "pt"})
    length = header_length(data[:LENGTH_BYTES], file_size=len(data), path="p")
    header = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], file_size=len(data), path="p")
    assert header.metadata == {"format": "pt"}
    assert {tensor.name for tensor in header.tensors} == set(tensors)
    for found in header.tensors:
        tensor = tensors[found.name]
        assert torch_name(found.dtype, name=found.name, path="p") == str(tensor.dtype).removeprefix("torch.")
        assert found.shape == tuple(tensor.shape)
        stored = bytearray(data[found.start : found.end])
        if stored:
            assert torch.equal(torch.frombuffer(stored, dtype=tensor.dtype).reshape(tensor.shape), tensor)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_code_is_that_of_safetensors(code: str, tmp_path: Any) -> None:
    dtype = getattr(torch, DTYPES[code])
    tensor = torch.zeros(3, dtype=torch.uint8).view(torch.uint8).repeat_interleave(ITEMSIZE[DTYPES[code]]).view(dtype)
    try:
        save_file({"t": tensor}, tmp_path / "t.safetensors")
    except Exception as error:  # what an old safetensors doesn't know
        pytest.skip(f"this safetensors doesn't write it: {error}")
    data = (tmp_path / "t.safetensors").read_bytes()
    length = header_length(data[:LENGTH_BYTES], file_size=len(data), path="p")
    header = parse_header(data[LENGTH_BYTES : LENGTH_BYTES + length], file_size=len(data), path="p")
    assert header.tensors[0][:3] == ("t", code, (3,))


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = parse({"late": entry(start=8, end=16), "early": entry(), "empty": entry("I8", [0], 8, 8)}, payloads=16)
    assert [tensor.name for tensor in header.tensors] == ["early", "empty", "late"]
    assert parse({}, payloads=0) == Header((), {})
    assert parse(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}   ', payloads=1).tensors[0].shape == ()


WRONG: dict[str, tuple[Any, int, str]] = {
    "not JSON": (b"\x80\x02}q\x00.", 8, "not the JSON"),
    "a list": ([], 0, "not the JSON"),
    "nothing": (b"", 0, "not the JSON"),
    "more behind it": (b"{}{}", 0, "not the JSON"),
    "not UTF-8": (b'{"\xff":1}', 0, "not the JSON"),
    "nested without end": (b'{"a":' + b"[" * 1_000_000, 0, "nested too deep"),
    "nested deep": (b'{"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, 0, "nested too deep"),
    "an entry that is a number": ({"a": 1}, 0, "can't be read"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "can't be read"),
    "more in an entry": ({"a": entry(more=1)}, 8, "can't be read"),
    "an unknown dtype": ({"a": entry("F99")}, 8, "which the format doesn't have"),
    "a dtype in torch's words": ({"a": entry("float32")}, 8, "which the format doesn't have"),
    "a negative length": ({"a": entry("F32", [-1, -2])}, 8, "has the shape"),
    "a length that is no integer": ({"a": entry("F32", [2.0])}, 8, "can't be read"),
    "a huge length": ({"a": entry("F32", [10**30])}, 8, "doesn't take 8 bytes"),
    "a product that overflows": ({"a": entry("F32", [1 << 32, 1 << 32])}, 8, "doesn't take 8 bytes"),
    "dimensions without end": ({"a": entry("F32", [1] * 2000)}, 8, "has the shape"),
    "bytes too few": ({"a": entry("F32", [2], 0, 7)}, 7, "doesn't take 7 bytes"),
    "bytes backwards": ({"a": entry("F32", [0], 8, 4)}, 8, "are said to be 8 to 4"),
    "bytes before the start": ({"a": entry("F32", [2], -8, 0)}, 8, "are said to be -8 to 0"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, 8, "can't be read"),
    "an overlap": ({"a": entry(), "b": entry(start=4, end=12)}, 12, "overlaps the tensor before it"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, 8, "overlaps the tensor before it"),
    "a gap": ({"a": entry(), "b": entry(start=12, end=20)}, 20, "leaves out 4 bytes"),
    "a gap at the start": ({"a": entry(start=8, end=16)}, 16, "leaves out 8 bytes"),
    "an end cut off": ({"a": entry()}, 7, "cut short"),
    "more behind the tensors": ({"a": entry()}, 9, "written to after that"),
    "metadata that isn't text": ({"__metadata__": {"a": 1}, "a": entry()}, 8, "not the JSON"),
    "metadata that is a list": ({"__metadata__": [], "a": entry()}, 8, "not the JSON"),
}


@pytest.mark.parametrize("what", WRONG)
def test_nonsense_is_corrupt_and_says_what(what: str) -> None:
    header, payloads, message = WRONG[what]
    with pytest.raises(CheckpointCorrupt, match=message) as caught:
        parse(header, payloads=payloads)
    assert "m.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert caught.value.path == "m.safetensors"


def test_a_dtype_that_shares_bytes_is_told_apart_from_damage() -> None:
    header = parse({"a": entry("F4", [8], 0, 4)}, payloads=4)
    assert header.tensors[0].dtype == "F4"
    with pytest.raises(ConfigError, match="stored as F4, which can't be read here"):
        torch_name("F4", name="a", path="p")


@pytest.mark.parametrize(
    ("head", "file_size", "message"),
    [
        (b"", 0, "too few"),
        (b"1234567", 7, "too few"),
        ((100).to_bytes(8, "little"), 50, "its first 8 bytes say that a header of 100 bytes follows"),
        ((43).to_bytes(8, "little"), 50, "cut short"),
        ((HEADER_BYTES_MAX + 1).to_bytes(8, "little"), 1 << 40, "a header at most"),
        (b"\xff" * 8, 1 << 40, "isn't a safetensors file"),
        (b"version ", 130, "Git LFS"),
    ],
)
def test_a_length_that_cannot_be(head: bytes, file_size: int, message: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=message):
        header_length(head, file_size=file_size, path="p")


def test_a_header_may_be_all_there_is() -> None:
    assert header_length((42).to_bytes(8, "little"), file_size=50, path="p") == 42


def test_an_index() -> None:
    index = {"metadata": {"total_size": 3, "total_parameters": 1}, "weight_map": {"a": "x.safetensors", "b": "y..z"}}
    assert parse_index(json.dumps(index).encode(), path="i") == index["weight_map"]
    assert parse_index(b'{"weight_map":{}}', path="i") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map":[]}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":null}}',
        b'{"weight_map":' + b'{"a":' * 100_000,
        b'{"metadata":' + b"[" * 1_000_000,
    ],
)
def test_what_is_no_index_is_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="is not an index"):
        parse_index(data, path="i")


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "c:x", "a\0b"])
def test_no_file_of_an_index_leads_elsewhere(file: str) -> None:
    assert not is_file_beside(file)
    with pytest.raises(CheckpointCorrupt, match="isn't the name of a file in the same directory") as caught:
        parse_index(json.dumps({"weight_map": {"a": "x", "b": file}}).encode(), path="i")
    assert caught.value.tensor == "b"
