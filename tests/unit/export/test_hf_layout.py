"""The files of an export as bytes, against safetensors' own serializer; what can't be written is named."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest
import safetensors

from holdfast.errors import ConfigError
from holdfast.export.layout import (
    ADAPTER_WEIGHTS_NAME,
    CODE_BITS,
    HEADER_BYTES_MAX,
    INDEX_NAME,
    TORCH_CODES,
    HFLayout,
    SubModel,
    TargetTensor,
    adapter_layout,
    layout,
    layout_parts,
    target_nbytes,
    target_of,
)

BUFFER = ctypes.create_string_buffer(bytes(range(256)) * 64)
STRANGE_NAMES = [
    "",
    "a.10",
    "a.9",
    'quote"back\\slash',
    "line\nfeed\ttab\rreturn\bback\fform",
    "\x00\x01\x1f\x7f",
    "é",
    "\u0080",
    "\u2028",
    "重み",
    "\uffff",
    "\U0001f600",
    "{}",
    "a/b",
]


def serialized(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None) -> bytes:
    """What safetensors makes of tensors of these torch types and shapes, whose bytes are those of the buffer."""
    specs = {}
    for name, (dtype, shape) in tensors.items():
        nbytes = target_nbytes(target_of(name, dtype, shape))
        specs[name] = safetensors.TensorSpec(
            dtype=dtype, shape=list(shape), data_ptr=ctypes.addressof(BUFFER), data_len=nbytes
        )
    return bytes(safetensors.serialize(specs, metadata=metadata))


def written(found: HFLayout) -> dict[str, bytes]:
    """The files of a layout, the payload of each tensor being the first bytes of the buffer."""
    files = {}
    for file in found.files:
        data = bytearray(file.header)
        for tensor in file.tensors:
            assert len(data) == tensor.start, "payloads lie end to end"
            data += BUFFER.raw[: tensor.stop - tensor.start]
        assert len(data) == file.size
        files[file.name] = bytes(data)
    return files


def one_file(targets: list[TargetTensor], **options: Any) -> bytes:
    found = layout(targets, max_shard_bytes=1 << 40, total_parameters=0, **options)
    assert found.index is None
    (data,) = written(found).values()
    return data


def f32(name: str, count: int, **more: Any) -> TargetTensor:
    return TargetTensor(name, "F32", (count,), **more)


# bytes ---------------------------------------------------------------------------------------------------------


def test_every_type_lies_where_safetensors_puts_it() -> None:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, dtype in enumerate(TORCH_CODES):
        kinds[f"b{number % 3}.{dtype}"] = (dtype, (2, 4))
        kinds[f"a{number}"] = (dtype, (3,) if dtype != "float4_e2m1fn_x2" else (1,))
        kinds[f"zero.{dtype}"] = (dtype, (0, 3))
        if dtype != "float4_e2m1fn_x2":
            kinds[f"scalar.{dtype}"] = (dtype, ())
    targets = [target_of(name, dtype, shape) for name, (dtype, shape) in kinds.items()]
    assert {target.code for target in targets} == set(TORCH_CODES.values())
    assert one_file(targets) == serialized(kinds, {"format": "pt"})


def test_the_order_of_types_is_that_in_which_safetensors_declares_them() -> None:
    # Six-bit types have no name in Python, so no serializer can be asked; the reader lists all that it knows.
    header = b'{"x":{"dtype":"none","shape":[],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as raised:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header)
    listed = [word for word in str(raised.value).split("`") if word in CODE_BITS]
    assert listed == list(reversed(CODE_BITS))


@pytest.mark.parametrize("code", CODE_BITS)
def test_every_code_can_be_read_back(code: str) -> None:
    read = safetensors.deserialize(one_file([TargetTensor("x", code, (2, 4)), TargetTensor("y", code, (0,))]))
    assert sorted((name, row["dtype"], row["shape"]) for name, row in read) == [("x", code, [2, 4]), ("y", code, [0])]


def test_strange_names_are_escaped_and_sorted_as_safetensors_does() -> None:
    kinds = {name: ("bfloat16" if number % 2 else "float32", (number,)) for number, name in enumerate(STRANGE_NAMES)}
    assert one_file([target_of(name, *kind) for name, kind in kinds.items()]) == serialized(kinds, {"format": "pt"})


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}, {"ä\n": 'v"'}])
def test_metadata(metadata: dict[str, str]) -> None:
    assert one_file([f32("x", 1)], metadata=metadata) == serialized({"x": ("float32", (1,))}, metadata)


def test_several_entries_of_metadata_are_sorted() -> None:
    data = one_file([f32("x", 1)], metadata={"b": "1", "a": "2"})
    assert list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]) == ["a", "b"]


def test_the_header_is_padded_whatever_its_length() -> None:
    for length in range(1, 20):
        kinds = {"n" * length: ("uint8", (3,))}
        assert one_file([target_of("n" * length, "uint8", (3,))]) == serialized(kinds, {"format": "pt"})


# files and index -----------------------------------------------------------------------------------------------


def files_of(found: HFLayout) -> list[list[str]]:
    return [sorted(tensor.name for tensor in file.tensors) for file in found.files]


def test_a_file_is_closed_when_the_next_tensor_would_make_it_too_large() -> None:
    found = layout([f32("c", 1), f32("a", 1), f32("d", 1), f32("b", 2)], max_shard_bytes=8, total_parameters=5)
    assert files_of(found) == [["a", "c"], ["d"], ["b"]]
    assert [file.name for file in found.files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert found.total_size == 20
    assert found.index_name == INDEX_NAME
    assert found.index == (
        b'{\n  "metadata": {\n    "total_parameters": 5,\n    "total_size": 20\n  },\n  "weight_map": {\n'
        b'    "a": "model-00001-of-00003.safetensors",\n    "b": "model-00003-of-00003.safetensors",\n'
        b'    "c": "model-00001-of-00003.safetensors",\n    "d": "model-00002-of-00003.safetensors"\n  }\n}\n'
    )


def test_what_is_larger_than_a_file_has_one_of_its_own_and_the_others_go_on() -> None:
    found = layout([f32("a", 1), f32("big", 9), f32("b", 1), f32("c", 1)], max_shard_bytes=8, total_parameters=1)
    assert files_of(found) == [["big"], ["a", "b"], ["c"]]
    assert layout([f32("big", 9)], max_shard_bytes=1, total_parameters=9).index is None


def test_tensors_of_one_storage_stay_together() -> None:
    experts = [f32(f"experts.{n}", 1, storage="down") for n in range(4)]
    found = layout(
        [f32("a", 1), experts[0], f32("b", 1), *experts[1:], f32("c", 2)], max_shard_bytes=16, total_parameters=1
    )
    assert files_of(found) == [["a"], [f"experts.{n}" for n in range(4)], ["b", "c"]]
    whole = layout([f32("a", 1), *experts, f32("b", 1)], max_shard_bytes=15, total_parameters=1)
    assert files_of(whole) == [[f"experts.{n}" for n in range(4)], ["a", "b"]]
    assert whole.total_size == 24


def test_zero_size_tensors_have_no_storage_of_their_own() -> None:
    found = layout(
        [f32("a", 2), f32("z0", 0), f32("b", 2), f32("z1", 0, storage="empty")], max_shard_bytes=8, total_parameters=4
    )
    assert files_of(found) == [["a", "z0", "z1"], ["b"]]


def test_a_prefix_and_names_of_ones_own() -> None:
    found = layout(
        [f32("w", 1), f32("v", 1)],
        max_shard_bytes=4,
        total_parameters=2,
        prefix="model.",
        weights_name="model.fp16.safetensors",
        index_name="model.safetensors.index.fp16.json",
    )
    assert [file.name for file in found.files] == [f"model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert files_of(found) == [["model.w"], ["model.v"]]


def test_an_adapter_is_one_file_whatever_its_size() -> None:
    found = adapter_layout([f32("base_model.model.a.lora_A.weight", 100), f32("base_model.model.a.lora_B.weight", 100)])
    assert [file.name for file in found.files] == [ADAPTER_WEIGHTS_NAME]
    assert found.index is None


# several models ------------------------------------------------------------------------------------------------


def test_several_models_have_their_own_files_and_one_index() -> None:
    parts = [
        SubModel((f32("blocks.0", 2), f32("blocks.1", 2)), "model.visual.", "vision.safetensors"),
        SubModel((f32("weight", 1),), "model.projector.", "projector.safetensors"),
        SubModel((f32("layers.0", 1), f32("layers.1", 1), f32("layers.2", 1)), "model.language_model."),
    ]
    found = layout_parts(parts, max_shard_bytes=8, total_parameters=8)
    assert {file.name: [tensor.name for tensor in file.tensors] for file in found.files} == {
        "vision-00001-of-00002.safetensors": ["model.visual.blocks.0"],
        "vision-00002-of-00002.safetensors": ["model.visual.blocks.1"],
        "projector.safetensors": ["model.projector.weight"],
        "model-00001-of-00002.safetensors": ["model.language_model.layers.0", "model.language_model.layers.1"],
        "model-00002-of-00002.safetensors": ["model.language_model.layers.2"],
    }
    assert found.index is not None
    index = json.loads(found.index)
    assert index["metadata"] == {"total_parameters": 8, "total_size": 32}
    assert index["weight_map"] == {tensor.name: file.name for file in found.files for tensor in file.tensors}


def test_no_part_is_the_file_that_readers_take_for_all() -> None:
    found = layout_parts(
        [SubModel((f32("a", 1),), "vision.", "vision.safetensors"), SubModel((f32("a", 1),))],
        max_shard_bytes=100,
        total_parameters=2,
    )
    assert [file.name for file in found.files] == ["vision.safetensors", "model-00001-of-00001.safetensors"]
    assert found.index is not None


def test_one_part_alone_is_as_one_model() -> None:
    targets = (f32("a", 1), f32("b", 1))
    for largest in (4, 100):
        assert layout_parts([SubModel(targets)], max_shard_bytes=largest, total_parameters=2) == layout(
            targets, max_shard_bytes=largest, total_parameters=2
        )


# bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "no tensor"),
        ([f32("twice", 1), f32("other", 1), f32("twice", 1)], "'twice'"),
        ([f32("__metadata__", 1)], "__metadata__"),
        ([f32("half\ud800", 1)], "Unicode"),
        ([TargetTensor("x", "F7", (1,))], "'F7'"),
        ([TargetTensor("x", "F32", (2, -1))], r"\(2, -1\)"),
        ([TargetTensor("x", "F32", (1.5,))], "shape"),  # type: ignore[arg-type]
        ([TargetTensor("x", "F32", (True,))], "shape"),
        ([TargetTensor("x", "F4", (3,))], "whole number of bytes"),
        ([TargetTensor("x", "U64", (1 << 60, 2))], "too large"),
        ([TargetTensor(7, "F32", (1,))], "7"),  # type: ignore[arg-type]
    ],
)
def test_tensors_that_no_file_can_hold_are_named(targets: list[TargetTensor], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout(targets, max_shard_bytes=100, total_parameters=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_shard_bytes": 0}, "max_shard_bytes"),
        ({"max_shard_bytes": -5}, "max_shard_bytes"),
        ({"max_shard_bytes": 1.5}, "max_shard_bytes"),
        ({"max_shard_bytes": True}, "max_shard_bytes"),
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes"),
        ({"total_parameters": -1}, "total_parameters"),
        ({"weights_name": "../model.safetensors"}, "weights_name"),
        ({"weights_name": "a/model.safetensors"}, "weights_name"),
        ({"weights_name": ".hidden.safetensors"}, "weights_name"),
        ({"weights_name": ".safetensors"}, "weights_name"),
        ({"weights_name": "model.bin"}, "weights_name"),
        ({"weights_name": "m" * 300 + ".safetensors"}, "weights_name"),
        ({"index_name": "../index.json"}, "index_name"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"prefix": "__meta", "targets": [f32("data__", 1)]}, "targets"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], field: str) -> None:
    given = {"targets": [f32("x", 1)], "max_shard_bytes": 100, "total_parameters": 1, **options}
    with pytest.raises(ConfigError) as raised:
        layout(**given)
    assert raised.value.field == field


def test_parts_may_not_share_names() -> None:
    with pytest.raises(ConfigError, match=r"'a\.w'"):
        layout_parts(
            [SubModel((f32("w", 1),), "a."), SubModel((f32("a.w", 1),))], max_shard_bytes=9, total_parameters=1
        )
    with pytest.raises(ConfigError, match=r"same\.safetensors"):
        layout_parts(
            [SubModel((f32("w", 1),), "a.", "same.safetensors"), SubModel((f32("w", 1),), "b.", "same.safetensors")],
            max_shard_bytes=9,
            total_parameters=1,
        )
    with pytest.raises(ConfigError, match="no model"):
        layout_parts([], max_shard_bytes=9, total_parameters=1)


def test_a_type_that_safetensors_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="'w' is of type 'complex128'"):
        target_of("w", "complex128", (1,))


def test_a_header_that_no_reader_takes_is_refused() -> None:
    name = "n" * (1 << 20)
    targets = [TargetTensor(f"{name}{number}", "U8", (1,)) for number in range(HEADER_BYTES_MAX // (1 << 20) + 1)]
    with pytest.raises(ConfigError, match="lower max_shard_bytes"):
        layout(targets, max_shard_bytes=1 << 30, total_parameters=1)
    assert len(layout(targets, max_shard_bytes=50, total_parameters=1).files) == 2
