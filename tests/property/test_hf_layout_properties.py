"""Layouts of random state dicts against huggingface_hub's split and safetensors' serializer, on real tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from holdfast._torch_compat import dtype_name
from holdfast.export.layout import TORCH_CODES, HFLayout, TargetTensor, layout, target_of

hub = pytest.importorskip("huggingface_hub")

DTYPES = [name for name in TORCH_CODES if hasattr(torch, name)]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")


@dataclass(frozen=True)
class Storage:
    """A tensor, or as many of its rows as tensors, under these names."""

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    split: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        whole = bytes_of(self.shape, len(self.names[0]), getattr(torch, self.dtype))
        return dict(zip(self.names, whole if self.split else [whole], strict=True))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Storage], list[str]]:
    """Tensors of their own, zero-size ones, rows that lie side by side in one storage; and the order of all names."""
    names = draw(st.lists(NAMES, min_size=1, max_size=14, unique=True))
    found = []
    left = names
    while left:
        dtype = draw(st.sampled_from(DTYPES))
        pairs = dtype == "float4_e2m1fn_x2"  # alone, one of its elements has two numbers, and no shape says so
        shape = draw(st.lists(st.integers(0, 5), min_size=1 if pairs else 0, max_size=3))
        split = bool(shape) and all(shape) and len(shape) > pairs and draw(st.booleans())
        count = min(shape[0], len(left)) if split else 1
        found.append(Storage(dtype, (count, *shape[1:]) if split else tuple(shape), tuple(left[:count]), split))
        left = left[count:]
    return found, draw(st.permutations(names))


def bytes_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own storage whose bytes are not all the same."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    count = itemsize
    for length in shape:
        count *= length
    raw = torch.arange(seed, seed + count, dtype=torch.int32).remainder(2 if dtype == torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def targets_of(state: dict[str, torch.Tensor]) -> list[TargetTensor]:
    return [
        target_of(name, dtype_name(tensor.dtype), tuple(tensor.shape), storage=str(tensor.untyped_storage().data_ptr()))
        for name, tensor in state.items()
    ]


def files_of(found: HFLayout, state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    files = {}
    for file in found.files:
        data = bytearray(file.header)
        for tensor in file.tensors:
            assert len(data) == tensor.start
            data += raw_bytes(state[tensor.name])
            assert len(data) == tensor.stop
        assert len(data) == file.size
        files[file.name] = bytes(data)
    return files


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@given(states(), st.integers(1, 400))
@settings(max_examples=150)
def test_layouts_are_what_the_hub_splits_and_safetensors_writes(
    drawn: tuple[list[Storage], list[str]], largest: int
) -> None:
    storages, order = drawn
    tensors = {name: tensor for storage in storages for name, tensor in storage.tensors().items()}
    state = {name: tensors[name] for name in order}
    found = layout(targets_of(state), max_shard_bytes=largest, total_parameters=3)
    split = hub.split_torch_state_dict_into_shards(state, max_shard_size=largest)
    expected = {
        name: save({key: state[key] for key in keys}, metadata={"format": "pt"})
        for name, keys in split.filename_to_tensors.items()
    }
    assert files_of(found, state) == expected
    assert [file.name for file in found.files] == list(expected)
    assert (found.index is not None) == split.is_sharded
    assert found.total_size == split.metadata["total_size"]
    assert {tensor.name: file.name for file in found.files for tensor in file.tensors} == split.tensor_to_filename
