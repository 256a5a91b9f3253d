"""Every dtype that ``torch.save`` supports, in every shape of memory, both ways between Holdfast and stock DCP."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.dtypes import ITEMSIZE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

ALL = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Stock DCP's own planner can't work out the size of these, so nobody saves them with it; it loads them.
NOT_BY_STOCK = {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A dense tensor of any dtype; its bytes are random but for booleans, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The values, row-major, resolved, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_floating_point() or not plain.is_contiguous():
        plain = plain.view(SAME_SIZE[plain.itemsize])
    dense = plain.contiguous()
    flat = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())
    start = dense.storage_offset() * dense.itemsize
    return bytes(flat[start : start + dense.numel() * dense.itemsize].numpy())


def variants(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    def strided(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Many dtypes have no kernels: strides are made on integers of the same size."""
        base = random_bits((6, 8), dtype, seed + 1)
        return change(base.view(SAME_SIZE[dtype.itemsize])).view(dtype)

    found = {
        "plain": random_bits((5, 7), dtype, seed),
        "one": random_bits((1,), dtype, seed),
        "scalar": random_bits((), dtype, seed),
        "empty": random_bits((0, 3), dtype, seed),
        "transposed": strided(lambda base: base.t()),
        "sliced": strided(lambda base: base[1:5:2, 3:]),
        "expanded": strided(lambda base: base[:1].expand(4, 8)),
    }
    if dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.complex128):
        found["large"] = random_bits((2, (1 << 20) // dtype.itemsize + 8), dtype, seed)  # starts on a page
    if dtype.is_complex:
        found["conjugated"] = random_bits((4, 3), dtype, seed).conj()
        found["negated"] = random_bits((4, 3), dtype, seed).conj().imag
        assert found["conjugated"].is_conj()
        assert found["negated"].is_neg()
    return found


def blank(like: dict[str, Any], *, strided: bool) -> dict[str, Any]:
    """Destinations of the same shapes, dense or not, without any of the values."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        shape = (*tensor.shape, 2) if strided else tensor.shape
        out = torch.zeros(shape, dtype=SAME_SIZE[tensor.itemsize]).view(tensor.dtype)
        return out[..., 1] if strided else out

    return {kind: {name: make(tensor) for name, tensor in of_kind.items()} for kind, of_kind in like.items()}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "conjugated": lambda tensor: tensor.conj(),
    "negated": lambda tensor: torch._neg_view(tensor),
    "both": lambda tensor: torch._neg_view(tensor.conj()),
}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{kind}/{name}"
        for kind, of_kind in expected.items()
        for name, tensor in of_kind.items()
        if found[kind][name].dtype != tensor.dtype or bits_of(found[kind][name]) != bits_of(tensor)
    ]


def saved_by_torch() -> set[str]:
    names = set()
    for name, dtype in ALL.items():
        try:
            torch.save(random_bits((2, 2), dtype, 0), io.BytesIO())
        except Exception:
            continue
        names.add(name)
    return names


def copies_strided(dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for it: stock copies what it has read by it."""
    try:
        random_bits((2, 2), dtype, 0).t().copy_(random_bits((2, 2), dtype, 0))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@functools.cache
def everything() -> dict[str, dict[str, torch.Tensor]]:
    return {name: variants(ALL[name], seed) for seed, name in enumerate(sorted(ITEMSIZE)) if name in ALL}


@functools.cache
def what_stock_saves() -> dict[str, dict[str, torch.Tensor]]:
    return {name: of_kind for name, of_kind in everything().items() if name not in NOT_BY_STOCK}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dtypes")
    places = {name: root / name for name in ("holdfast", "stock", "writer")}
    holdfast.save(everything(), places["holdfast"])
    dcp.save(what_stock_saves(), checkpoint_id=places["stock"], no_dist=True)
    dcp.save(what_stock_saves(), storage_writer=holdfast.dcp.Writer(places["writer"]), no_dist=True)
    return places


def test_the_table_is_what_torch_save_supports() -> None:
    assert saved_by_torch() == set(everything())
    assert all(ALL[name].itemsize == ITEMSIZE[name] for name in everything())


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("holdfast", "holdfast"),
        ("holdfast", "stock"),
        ("holdfast", "reader"),
        ("stock", "holdfast"),
        ("stock", "reader"),
        ("writer", "holdfast"),
        ("writer", "stock"),
        ("writer", "reader"),
    ],
)
def test_every_dtype_comes_back_bit_for_bit(saved: dict[str, Path], writer: str, reader: str, strided: bool) -> None:
    expected = everything() if writer == "holdfast" else what_stock_saves()
    if reader == "stock" and strided:
        expected = {name: of_kind for name, of_kind in expected.items() if copies_strided(ALL[name])}
    found = blank(expected, strided=strided)
    if reader == "holdfast":
        holdfast.load(found, saved[writer])
    elif reader == "stock":
        dcp.load(found, checkpoint_id=saved[writer], no_dist=True)
    else:
        dcp.load(found, storage_reader=holdfast.dcp.Reader(saved[writer]), no_dist=True)
    assert differences(expected, found) == []


def shown(view: str, memory: torch.Tensor) -> list[Any]:
    """What a view of complex ``memory`` shows, by way of a dtype that has all kernels."""
    wide = VIEWS[view](torch.view_as_complex(torch.view_as_real(memory).double()))
    values: list[Any] = torch.view_as_real(wide.resolve_conj().resolve_neg()).tolist()
    return values


@pytest.mark.parametrize("staging", ["lazy", "eager"])
@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_views_that_show_other_values_than_their_memory(tmp_path: Path, name: str, staging: Any) -> None:
    numbers = torch.randn(4, 3, 2, dtype=ALL[name].to_real())
    memory = torch.view_as_complex(numbers)
    views = {view: change(memory) for view, change in VIEWS.items()}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    optimizer.state[optimizer.param_groups[0]["params"][0]] = dict(views)  # staged as staging says
    handle = holdfast.async_save({"plain": views, "optimizer": optimizer}, tmp_path / "a", staging=staging)
    checkpoint = handle.result()
    for view in VIEWS:
        for stored in (f"plain.{view}", f"optimizer.state.0.{view}"):
            assert shown("plain", checkpoint.read(stored)) == shown(view, memory), stored
    for through, change in VIEWS.items():
        memories = {view: torch.view_as_complex(torch.zeros_like(numbers)) for view in VIEWS}
        holdfast.load({"plain": {view: change(memories[view]) for view in VIEWS}}, checkpoint.path)
        assert [view for view in VIEWS if shown(through, memories[view]) != shown(view, memory)] == []


def test_holdfast_is_verified_and_read_by_name(saved: dict[str, Path]) -> None:
    for place in ("holdfast", "writer"):
        checkpoint = holdfast.open(saved[place])
        assert checkpoint.verify().ok
        expected = everything() if place == "holdfast" else what_stock_saves()
        for kind, of_kind in expected.items():
            for name, tensor in of_kind.items():
                assert bits_of(checkpoint.read(f"{kind}.{name}")) == bits_of(tensor)


@pytest.mark.parametrize("name", sorted(name for name in set(ALL) - set(ITEMSIZE) if not name.startswith("q")))
def test_other_dtypes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    dtype = ALL[name]
    state = {"fine": torch.ones(2), "odd": {"one": random_bits((2, 2), dtype, 0)}}
    with pytest.raises(holdfast.ConfigError, match=r"odd\.one") as refused:
        holdfast.save(state, tmp_path / "a")
    assert refused.value.field == "odd.one"
    assert list(tmp_path.iterdir()) == []
