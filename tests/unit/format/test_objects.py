"""Plain objects: what is refused and how it is named, capacities, records, and loading."""

import enum
import functools
import io
import pickle
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.objects import (
    FACTORIES,
    CapacityExceeded,
    ObjectPayload,
    dump_object,
    load_object,
    object_capacity,
    render_object,
)


class Level(enum.IntEnum):
    LOW = 1


class Settings(dict):
    pass


class Point(NamedTuple):
    x: int
    y: int


def module_function():
    pass


PLAIN = [
    None,
    True,
    0,
    -(10**400),
    1.5,
    float("-inf"),
    1j,
    "x\ud800é",
    b"",
    b"\x00\xff",
    bytearray(b"a\xff"),
    bytearray(),
    [1, [2, (3,)]],
    {"a": {1, 2}, (1, 2): frozenset({3})},
    OrderedDict(b=1, a=2),
    defaultdict(list, a=[1]),
    defaultdict(None, a=2),
    *(defaultdict(factory, a=factory()) for factory in FACTORIES),
    deque([1, 2, 3], 3),
    deque(),
    Counter("abca"),
    range(10, 0, -2),
    slice(1, None, 2),
    slice(np.int64(2), np.float32(9), True),
    slice((1, 2), [3], b"x"),
    deque([deque([1]), defaultdict(list, a=[deque()])]),
    {frozenset({frozenset({1}), (2, frozenset())}): frozenset(range(5000))},
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.strided,
]
ARRAYS = [
    np.arange(5),
    np.array(3, dtype="u1"),
    np.zeros((0, 3), dtype=np.float16),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(20).reshape(4, 5)[::2, 1:],
    np.array(["ab", "c"]),
    np.array([b"ab"]),
    np.array([True, False]),
    np.array([1j], dtype=np.complex64),
    np.float32(2.5),
    np.float64(1e300),
    np.longdouble(1.5),
    np.bool_(True),
    np.str_("hé"),
    np.str_(""),
    np.bytes_(b"ab"),
    np.dtype("f4"),
    np.dtype("U3"),
]


def stream_at(content, position):
    stream = io.BytesIO(content)
    stream.seek(position)
    return stream


REFUSED = [
    Level.LOW,
    Level,
    Settings(),
    Point(1, 2),
    len,
    module_function,
    lambda: 0,
    types,
    int,
    dict,
    set,
    object(),
    io.StringIO(),
    memoryview(b""),
    NotImplemented,
    ...,
    defaultdict(lambda: 0),
    np.array([object()]),
    np.zeros(2, dtype=[("a", "i4")]),
    np.datetime64("2020"),
    np.array([1], dtype=">i4"),
    np.random.default_rng(0),
    np.int64,
    torch.Generator(),
    torch.nn.Linear(1, 1),
    torch.zeros(2).to_sparse(),
    torch.empty(1, device="meta"),
    torch.contiguous_format,
    # On the list by their types, and yet not to be loaded back: for what they could cost whoever reads them.
    {tuple(range(5000)): 0},
    {
        (1, (2, tuple(range(5000)))),
    },
    frozenset({frozenset({frozenset(range(5000))})}),
    {number * ((1 << 61) - 1): 0 for number in range(1, 400)},
    slice(slice(1)),
    slice(None, deque()),
    stream_at(b"abc", 9),
]


def identical(found, expected):
    if type(found) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        same = found.dtype == expected.dtype and found.shape == expected.shape and np.array_equal(found, expected)
        return same and found.flags.writeable
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
        return same and found.requires_grad == expected.requires_grad
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(identical, found, expected))
    if isinstance(expected, defaultdict):
        return found == expected and found.default_factory is expected.default_factory
    if isinstance(expected, deque):
        return found == expected and found.maxlen == expected.maxlen
    if isinstance(expected, OrderedDict):
        return list(found.items()) == list(expected.items())
    return found == expected


def record_of(value):
    payload = dump_object(value, name="x")
    return render_object(payload, object_capacity(payload))


def load(record):
    return load_object(record, name="train.x", path="some/file")


@pytest.mark.parametrize("value", [*PLAIN, *ARRAYS], ids=range(len(PLAIN) + len(ARRAYS)))
def test_what_is_on_the_list_comes_back(value):
    for wrapped in (value, (value, [value])):
        assert identical(load(record_of(wrapped)), wrapped)


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_on_the_list_is_refused_with_its_place(value):
    with pytest.raises(ConfigError, match=r"^train\.x: ") as error:
        dump_object(value, name="train.x")
    assert error.value.field == "train.x"
    with pytest.raises(ConfigError, match=r"^train\.x\[1\]\['k'\]\[0\]: "):
        dump_object([1, {"k": (value,)}], name="train.x")


def test_a_refusal_names_the_type_and_the_list():
    with pytest.raises(ConfigError, match=r"Level can't be stored.*collections\.OrderedDict"):
        dump_object({"a": Level.LOW}, name="n")


def test_a_refused_key_is_named():
    with pytest.raises(ConfigError, match=r"n \(key \(1, <Level"):
        dump_object({(1, Level.LOW): 2}, name="n")


def test_an_ordered_dict_keeps_the_metadata_of_a_state_dict_and_nothing_else():
    value = torch.nn.Linear(1, 1).state_dict()
    found = load(record_of((value,)))[0]
    assert found._metadata == value._metadata
    value.other = 1
    with pytest.raises(ConfigError, match="attributes"):
        dump_object((value,), name="n")


def test_a_too_deep_object_is_a_clear_error():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ConfigError, match=r"deep: .*nested"):
        dump_object(value, name="deep")


def test_a_long_chain_of_deques_is_refused_when_it_is_saved():
    chain = functools.reduce(lambda inner, _: deque([inner]), range(150), deque())
    with pytest.raises(ConfigError, match=r"^train\.x: more than 100 deques"):
        dump_object({"a": chain}, name="train.x")
    broken = functools.reduce(lambda inner, _: deque([[inner]]), range(150), deque())
    assert load(record_of(broken)) == broken


def test_cycles_come_back():
    value = {"self": []}
    value["self"].append(value)
    found = load(record_of(value))
    assert found["self"][0] is found


def test_tensors_in_containers_come_back():
    weight = torch.arange(6.0).reshape(2, 3)
    value = (weight, weight.t(), torch.tensor(3), torch.zeros(0, 2, dtype=torch.int8), weight)
    found = load(record_of(value))
    assert identical(found, value)
    assert found[0] is found[4]
    parameters = (torch.nn.Parameter(weight), torch.nn.Parameter(weight, requires_grad=False))
    assert identical(load(record_of(parameters)), parameters)
    lazy = torch.view_as_complex(torch.randn(3, 2)).conj()
    assert identical(load(record_of((lazy,))), (lazy.resolve_conj(),))


def test_a_dumped_tensor_is_a_copy():
    tensor = torch.zeros(3)
    payload = dump_object((tensor,), name="x")
    tensor += 1
    assert load(render_object(payload, object_capacity(payload)))[0].tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(name for name in ITEMSIZE if hasattr(torch, name)))
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype):
    raw = torch.arange(48, dtype=torch.uint8) % 2 if dtype == "bool" else torch.arange(48, dtype=torch.uint8)
    typed = torch.empty(0, dtype=getattr(torch, dtype))
    typed.set_(raw.untyped_storage(), 0, (48 // ITEMSIZE[dtype],), (1,))
    (found,) = load(record_of((typed,)))
    assert found.dtype == typed.dtype
    assert bytes(found.untyped_storage()) == bytes(raw.untyped_storage())


# capacities and records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 500, 1024, 60_000, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_capacity_leaves_room_and_is_not_wasteful(size):
    payload = ObjectPayload(b"x" * size, ())
    capacity = object_capacity(payload)
    assert capacity % 64 == 0
    assert capacity >= 1024
    assert capacity >= size * 1.2
    assert capacity <= max(1024, (size + 1024) * (2.6 if size <= 1 << 20 else 1.5))
    grown = ObjectPayload(b"x" * (size + size // 8), ())
    assert object_capacity(grown, capacity) == capacity


def test_capacity_never_shrinks():
    assert object_capacity(ObjectPayload(b"x", ()), 4096) == 4096
    assert object_capacity(ObjectPayload(b"x" * 5000, ()), 4096) > 4096


@pytest.mark.parametrize("capacity", [1024, 1088, 4096, 100_032])
def test_a_record_is_exactly_its_capacity_and_a_sound_zip(capacity):
    payload = dump_object({"a": 1, "t": (torch.arange(3), torch.ones(2))}, name="x")
    record = render_object(payload, capacity)
    assert len(record) == capacity
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None
    assert load(record)["t"][0].tolist() == [0, 1, 2]


def test_an_overflow_says_how_much_is_needed_and_that_much_is_enough():
    payload = ObjectPayload(pickle.dumps("x" * 3000, 2), (b"a" * 70, b"", b"b" * 3))
    with pytest.raises(CapacityExceeded) as error:
        render_object(payload, 1024)
    assert len(render_object(payload, error.value.needed)) == error.value.needed
    with pytest.raises(CapacityExceeded):
        render_object(payload, error.value.needed - 1)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (copy.needed, copy.capacity) == (error.value.needed, 1024)


# loading -------------------------------------------------------------------------------------------------------


def test_a_record_that_names_code_is_refused_and_does_not_run():
    payload = ObjectPayload(b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00falseq\x00\x85R.", ())
    with pytest.raises(CheckpointCorrupt, match=r"'train\.x' of some/file.*os\.system") as error:
        load(render_object(payload, 1024))
    assert (error.value.path, error.value.tensor) == ("some/file", "train.x")


NEW_ARRAY = b"cnumpy\ndtype\nX\x02\x00\x00\x00i8\x89\x88\x87R"


@pytest.mark.parametrize(
    "stream",
    [
        b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",  # bytearray(1 << 40)
        b"c__builtin__\nbytes\nJ\x00\x00\x00\x7f\x85R.",
        b"c__builtin__\nset\nc__builtin__\nxrange\nK\x00J\xff\xff\xff\x7fK\x01\x87R\x85R.",
        b"ccollections\ndeque\nc__builtin__\nxrange\nK\x00J\xff\xff\xff\x7fK\x01\x87R\x85R.",
        b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n(J\xff\xff\xff\x7ftX\x01\x00\x00\x00b\x87R.",
        b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.",
        b"cnumpy\ndtype\nX\x05\x00\x00\x00i4,i4\x85R.",
        NEW_ARRAY + b"(K\x03X\x01\x00\x00\x00>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb.",
        NEW_ARRAY + b"(K\x03X\x01\x00\x00\x00<NNNK\x63K\x08K\x00tb.",
        NEW_ARRAY + b"}b.",
        b"cnumpy.core.multiarray\nscalar\n"
        + NEW_ARRAY
        + b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R\x86R.",
        b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
        b"ctorch.serialization\n_get_layout\nX\x02\x00\x00\x00os\x85R.",
        b"ctorch\ndevice\nX\x04\x00\x00\x00nope\x85R.",
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\xff\xff\xff\x7ftQ.",
        b"X\x07\x00\x00\x00storageQ.",
        b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.",
        b"ccollections\ndefaultdict\nccollections\nOrderedDict\n\x85R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch.nn.modules.linear\nLinear\n)\x81.",
    ],
)
def test_makers_check_what_they_are_given(stream):
    record = render_object(ObjectPayload(b"\x80\x02" + stream, (bytes(16),)), 2048)
    with pytest.raises(CheckpointCorrupt):
        load(record)


@pytest.mark.parametrize(
    "geometry",
    [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (1, 1)),
        (0, (1 << 62, 1 << 62), (1, 1)),
        (0, (2,), (1 << 70,)),
        (0, (2,), (-1,)),
        (5, (0,), (1,)),
        (0.0, (1,), (1,)),
    ],
)
def test_a_tensor_larger_than_its_storage_is_refused(geometry):
    offset, sizes, strides = geometry
    good = dump_object((torch.zeros(4),), name="x")
    assert load(render_object(good, 2048))[0].shape == (4,)
    head, tail = good.pickle.split(b"QK\x00K\x04\x85", 1)
    body = b"Q" + b"".join(pickle.dumps(part, 2)[2:-1] for part in (offset, sizes))
    tail = tail[tail.index(b"K\x01\x85") + 3 :]
    body += pickle.dumps(strides, 2)[2:-1]
    with pytest.raises(CheckpointCorrupt):
        load(render_object(ObjectPayload(head + body + tail, good.storages), 2048))


def test_a_big_endian_record_is_refused():
    buffer = io.BytesIO(record_of((torch.zeros(1),)))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("a/byteorder", "big")
    with pytest.raises(CheckpointCorrupt, match="big-endian"):
        load(buffer.getvalue())


@pytest.mark.parametrize("record", [b"", b"PK\3\4", b"x" * 5000, pickle.dumps(1)])
def test_what_is_not_a_record_is_refused(record):
    with pytest.raises(CheckpointCorrupt):
        load(record)


def test_streams_keep_content_and_position():
    stream = io.BytesIO(b"abcdef")
    stream.seek(4)
    found = load_object(render_object(dump_object({"s": stream}, name="x"), 1024), name="x", path="p")["s"]
    assert (type(found), found.getvalue(), found.tell()) == (io.BytesIO, b"abcdef", 4)

    buffer = io.BytesIO()
    torch.save(stream, buffer)
    assert load_object(buffer.getvalue(), name="x", path="p").getvalue() == b"abcdef"

    stream.name = "it has an attribute"
    with pytest.raises(ConfigError, match="BytesIO"):
        dump_object(stream, name="x")
