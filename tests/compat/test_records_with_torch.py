"""Our records in stock `torch.load`, and stock `torch.save`'s objects in our reader: bit for bit."""

import io
import pickle
import random
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from holdfast.dtypes import ITEMSIZE
from holdfast.format.objects import dump_object, load_object, object_capacity, render_object
from holdfast.format.torch_record import payload_bytes, read_entries, render, render_pickle

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SHAPES = [(), (0,), (3, 0, 2), (5,), (3, 7), (256, 256, 5)]


def tensor_of(raw, dtype, sizes):
    """A contiguous tensor over these bytes: not every dtype has kernels that would fill one."""
    made = torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
    return torch.empty(0, dtype=made.dtype).set_(raw.untyped_storage(), 0, made.shape, made.stride())


def bytes_of(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


DTYPES = sorted(name for name in ITEMSIZE if hasattr(torch, name))
"""Those that this torch has: older ones lack the newest."""


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stock_load_reads_a_rendered_record(dtype, sizes):
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (payload_bytes(dtype, sizes),), dtype=torch.uint8)
    expected = tensor_of(raw, dtype, sizes)
    stock = io.BytesIO()
    torch.save(expected, stock)
    for offset in (0, 100_003):
        header, trailer = render(dtype, sizes, record_offset=offset)
        record = header + raw.numpy().tobytes() + trailer
        for source in (io.BytesIO(record), io.BytesIO(stock.getvalue())):
            found = torch.load(source, weights_only=True)
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            assert not found.requires_grad
            assert torch.equal(bytes_of(found), raw)


@pytest.mark.parametrize("sizes", [*SHAPES, (300,), (70_000,), (1 << 33, 0), (1, 1 << 31, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_the_pickle_is_what_stock_save_writes_without_its_memo(dtype, sizes):
    """Rebuilt with stand-ins, both pickles call the same function with the same arguments."""

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            if name == "OrderedDict":
                return OrderedDict
            return (lambda *arguments: (name, arguments)) if name.startswith("_rebuild") else f"{module}.{name}"

        def persistent_load(self, identity):
            return ("storage", identity)

    stock = io.BytesIO()
    torch.save(torch.empty(sizes, dtype=getattr(torch, dtype)), stock)
    ours = Recorder(io.BytesIO(render_pickle(dtype, sizes))).load()
    with zipfile.ZipFile(stock) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        assert ours == Recorder(io.BytesIO(archive.read(name))).load()


def test_every_dtype_that_torch_saves_by_a_new_or_a_typed_storage_is_known():
    known = {getattr(torch, name) for name in DTYPES}
    quantized = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
    assert set(torch.storage._dtype_to_storage_type_map()) | set(torch.storage._new_dtypes()) <= known | quantized
    for name in DTYPES:
        assert getattr(torch, name).itemsize == ITEMSIZE[name]


def write_sparse(path, dtype, sizes):
    """A record whose payload is a hole in the file but for its first and last 8 bytes."""
    header, trailer = render(dtype, sizes, record_offset=0)
    end = len(header) + payload_bytes(dtype, sizes)
    with path.open("wb") as file:
        file.write(header + (1).to_bytes(8, "little"))
        file.seek(end - 8)
        file.write((2).to_bytes(8, "little") + trailer)
    return end


@pytest.mark.parametrize("nbytes", [(1 << 32) - 8192, (1 << 32) - 1000, (1 << 32) - 8, 1 << 32, (1 << 32) + 8, 5 << 30])
def test_records_around_and_past_4_gib_load(tmp_path, nbytes):
    # Mapped, so that neither memory nor disk of that size is needed: only the two pages that are looked at.
    path = tmp_path / "record"
    write_sparse(path, "int64", (nbytes // 8,))
    found = torch.load(path, weights_only=True, mmap=True)
    assert found.shape == (nbytes // 8,)
    assert (found[0].item(), found[1].item(), found[-1].item()) == (1, 0, 2)


@pytest.mark.slow
def test_a_record_past_4_gib_loads_unmapped(tmp_path):
    path = tmp_path / "record"
    write_sparse(path, "int64", ((5 << 30) // 8,))
    found = torch.load(path, weights_only=True)
    assert (found[0].item(), found[-1].item()) == (1, 2)


# objects -------------------------------------------------------------------------------------------------------

OBJECTS = [
    {"step": 1000, "lr": [0.1, 1e-300], "name": "é", "flags": (True, None)},
    {b"bytes": b"\x00\xff" * 10, "set": {1, 2}, "frozen": frozenset(["ab"]), "array": bytearray(b"ab\xff")},
    [range(1, 9, 2), slice(None, 3), 2 + 1j, 10**60, -(1 << 40)],
    [OrderedDict(b=1, a=2), defaultdict(int, a=1), deque([1, 2], 5), Counter("aab")],
    [torch.Size((2, 3)), torch.float8_e5m2, torch.device("cpu"), torch.strided],
    [np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("x"), np.dtype("complex64")],
    random.Random(0).getstate(),
]


def in_stock_format(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("value", OBJECTS, ids=range(len(OBJECTS)))
def test_stock_load_reads_our_objects_and_we_read_stock_ones(value):
    payload = dump_object(value, name="x")
    record = render_object(payload, object_capacity(payload))
    for found in (
        torch.load(io.BytesIO(record), weights_only=False),
        load_object(record, name="x", path="p"),
        load_object(in_stock_format(value), name="x", path="p"),
    ):
        assert found == value
        assert repr(found) == repr(value)


def test_the_plainest_objects_load_with_weights_only():
    value = {"step": 10, "loss": [1.5, None], "done": False, "size": torch.Size((1,)), "rng": torch.arange(5)}
    payload = dump_object((value,), name="x")
    (found,) = torch.load(io.BytesIO(render_object(payload, 4096)), weights_only=True)
    assert torch.equal(found.pop("rng"), value.pop("rng"))
    assert found == value


@pytest.mark.parametrize(
    "array",
    [np.arange(12).reshape(3, 4).T, np.array(["a", "bcd"]), np.zeros((2, 0)), np.array(7, np.uint16), np.array([b"x"])],
    ids=range(5),
)
def test_arrays_pass_in_both_directions(array):
    payload = dump_object({"a": array}, name="x")
    record = render_object(payload, object_capacity(payload))
    for found in (
        torch.load(io.BytesIO(record), weights_only=False)["a"],
        load_object(record, name="x", path="p")["a"],
        load_object(in_stock_format({"a": array}), name="x", path="p")["a"],
    ):
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_numpys_generator_state_passes_in_both_directions():
    generator = np.random.RandomState(5)
    state = generator.get_state()
    expected = generator.rand(4)
    for found in (
        load_object(in_stock_format(state), name="x", path="p"),
        torch.load(io.BytesIO(render_object(dump_object(state, name="x"), 16_384)), weights_only=False),
    ):
        generator.set_state(found)
        assert np.array_equal(generator.rand(4), expected)


def test_what_an_older_numpy_pickled_loads():
    stream = pickle.dumps({"a": np.arange(3), "b": np.float32(1)}, 2).replace(b"numpy._core.", b"numpy.core.")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
    found = load_object(buffer.getvalue(), name="x", path="p")
    assert found["a"].tolist() == [0, 1, 2]
    assert type(found["b"]) is np.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_in_a_stock_object_come_back(dtype):
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (48,), dtype=torch.uint8)
    tensor = tensor_of(raw, dtype, (48 // ITEMSIZE[dtype],))
    payload = dump_object((tensor,), name="x")
    record = render_object(payload, object_capacity(payload))
    for (found,) in (
        load_object(in_stock_format((tensor,)), name="x", path="p"),
        torch.load(io.BytesIO(record), weights_only=True),
        torch.load(io.BytesIO(record), weights_only=False),
    ):
        assert found.dtype == tensor.dtype
        assert torch.equal(bytes_of(found), raw)


def test_tensors_of_a_stock_object_that_share_storage_still_do():
    base = torch.arange(6.0)
    views = (base, base[2:], base.reshape(2, 3).t(), base.expand(2, 6))
    found = load_object(in_stock_format(views), name="x", path="p")
    for ours, stock in zip(found, views, strict=True):
        assert torch.equal(ours, stock)
    found[0][2] = 100
    assert found[1][0] == 100
    assert found[2][2, 0] == 100


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda values: values.conj().imag, lambda values: -values.conj()])
def test_conjugate_and_negative_views_of_a_stock_object_come_back(lazy):
    views = (lazy(torch.randn(3, dtype=torch.complex64)),)
    (found,) = load_object(in_stock_format(views), name="x", path="p")
    assert torch.equal(found, views[0])


def test_a_parameter_of_a_stock_object_comes_back():
    for grad in (True, False):
        value = (torch.nn.Parameter(torch.ones(2), requires_grad=grad),)
        (found,) = load_object(in_stock_format(value), name="x", path="p")
        assert type(found) is torch.nn.Parameter
        assert found.requires_grad is grad


def test_storages_of_an_object_are_aligned_as_torch_aligns():
    payload = dump_object((torch.zeros(3), torch.zeros(5), torch.zeros(1)), name="x")
    record = bytearray(render_object(payload, object_capacity(payload)))
    for name, view in read_entries(memoryview(record)).items():
        if name.startswith("data/"):
            view[:] = b"\xab" * len(view)
            assert record.index(b"\xab" * len(view)) % 64 == 0
            view[:] = bytes(len(view))
