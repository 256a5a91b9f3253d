"""The pickle interpreter: what Python's pickler writes for plain values, and nothing that runs."""

import pickle
import time
from collections import OrderedDict

import pytest

from holdfast.format.pickles import PickleRefused, Vocabulary, read_pickle

NOTHING = Vocabulary({}, {})
VALUES = [
    None,
    True,
    [0, 255, 256, 65_535, 65_536, -1, 1 << 31, -(1 << 31), 1 << 70, -(1 << 300), 10**700],
    ("a" * 300, "é\ud800", b"", b"x" * 300, bytearray(b"y")),
    {"k": (1,), (1, 2): [1.5, float("inf")], 3: {}},
    {1, 2},
    frozenset({(1, 2, 3, 4)}),
    [[], (), [[[]]]] * 400,
]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_plain_values_come_back(value, protocol):
    vocabulary = Vocabulary({"builtins.bytearray": bytearray}, {bytearray: bytearray})
    assert read_pickle(pickle.dumps(value, protocol), vocabulary) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_cycles_and_shared_members_come_back(protocol):
    shared = [1]
    value = [shared, shared]
    value.append((value, shared))
    found = read_pickle(pickle.dumps(value, protocol), NOTHING)
    assert found[0] is found[1] is found[2][1]
    assert found[2][0] is found


@pytest.mark.parametrize(
    "stream",
    [
        b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.",
        b"]X\x06\x00\x00\x00appendR.",  # calls a value
        b"K\x01)R.",
        b"]}b.",  # state of a list
        b"(K\x01K\x02.",  # ends inside a group
        b"K\x01K\x02.",  # two values
        b".",
        b"",
        b"K\x01",
        b"t.",  # a group without a beginning
        b"h\x07.",  # a memo that isn't there
        b"\x86.",
        b"K\x01K\x02a.",  # appends to a number
        b"]K\x01s.",
        b"}(K\x01u.",
        b"}]K\x01s.",  # an unhashable key
        b"\x80\x09N.",
        b"I1\n.",  # a text opcode
        b"\x82\x01.",  # an extension code
        b"P1\n.",
        b"K\x01Q.",  # a storage where none can be
        b"X\xff\xff\xff\xffab.",
        b"\x8e" + b"\xff" * 8 + b"ab.",
        b"\x96" + (1 << 50).to_bytes(8, "little") + b".",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8b\xff\xff\xff\xff.",
        b"c" + b"x" * 10_000,
        b"X\x01\x00\x00\x00\xff.",  # not UTF-8
    ],
)
def test_damaged_and_hostile_streams_are_refused(stream):
    with pytest.raises(PickleRefused):
        read_pickle(stream, NOTHING)


def test_a_name_on_the_list_that_has_no_maker_is_not_called():
    with pytest.raises(PickleRefused, match="called"):
        read_pickle(b"cbuiltins\nlist\n)R.", Vocabulary({"builtins.list": list}, {}))


def test_what_a_maker_objects_to_is_refused():
    def make(_):
        raise TypeError("no")

    with pytest.raises(PickleRefused, match="TypeError: no"):
        read_pickle(b"cx\ny\nN\x85R.", Vocabulary({"x.y": make}, {make: make}))


def test_a_far_memo_index_costs_nothing():
    assert read_pickle(b"K\x05r\xff\xff\xff\xff0j\xff\xff\xff\xff.", NOTHING) == 5


def test_shared_tuples_as_a_key_do_not_take_for_ever():
    # t = (t, t), forty times over: hashing it would visit 2**40 members.
    start = time.monotonic()
    with pytest.raises(PickleRefused, match="members"):
        read_pickle(b"}K\x01" + b"q\x00h\x00\x86" * 40 + b"Ns.", NOTHING)
    assert time.monotonic() - start < 5


def test_a_deep_key_does_not_exhaust_the_stack():
    with pytest.raises(PickleRefused, match="members"):
        read_pickle(b"}K\x01" + b"\x85" * 200_000 + b"Ns.", NOTHING)


def test_items_of_an_ordered_dict_keep_their_order():
    vocabulary = Vocabulary({"collections.OrderedDict": OrderedDict}, {OrderedDict: OrderedDict})
    value = OrderedDict([("b", 1), ("a", 2)])
    for protocol in (2, 4):
        found = read_pickle(pickle.dumps(value, protocol), vocabulary)
        assert type(found) is OrderedDict
        assert list(found) == ["b", "a"]
