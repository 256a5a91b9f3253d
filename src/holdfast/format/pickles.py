"""Pickles read as data: a small interpreter that can only build what it was given makers for. Torch-free, no I/O.

Python's own unpickler runs whatever a stream names. This one resolves a name only through a table, calls only the
makers of that table, and sets the state of an object only through the table's `build`. There is nothing else in it that
could run.

Guarantees: nothing is imported or called that isn't in the `Vocabulary`; nothing is allocated by a length, count or
memo index that the stream claims, only for bytes and items that are really there; a damaged or hostile stream ends in
`PickleRefused`, never in another exception, a crash, deep recursion or a hash that takes for ever.
Does not: read protocols 0 and 1's text opcodes, ``NEWOBJ_EX``, extension codes or out-of-band buffers: neither
`torch.save` nor stock DCP writes them.
"""

from __future__ import annotations

import pickle
import struct
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# Bound the cost of reading a pickle: time to compare its keys, stack to release it. Checked when reading and when
# writing, so that a save refuses what a load would refuse.

EQUAL_HASHES_LIMIT: Final = 256
"""Most keys of one container with one hash; what training keeps has one or two."""
WHOLE_MAX: Final = 1 << 64
MEMBERS_LIMIT: Final = 4096
"""Most members, all levels of tuples and frozensets together, that a dictionary key or set element may have."""
CHAIN_LIMIT: Final = 100
"""Most containers of `TAKEN_APART_NESTED` that may be directly inside one another."""
TAKEN_APART_NESTED: Final = (deque, defaultdict)
"""Containers that Python releases one inside the other, on its stack; of others it puts off those deep inside."""
_GROUPS: Final = (tuple, frozenset)


class PickleRefused(ValueError):
    """The stream names what isn't in the vocabulary, or is damaged; the message says what."""


def check_nesting(containers: Sequence[Any]) -> None:
    """Return if ``containers``, all `TAKEN_APART_NESTED` of a value, can be released without overflowing the stack."""
    inside: dict[int, list[Any]] = {}
    for container in containers:
        held = container if type(container) is deque else container.values()
        inside[id(container)] = [item for item in held if type(item) in TAKEN_APART_NESTED]
    depths: dict[int, int] = {}
    done: set[int] = set()
    for first in containers:
        pending = [first]
        while pending:
            here = id(pending[-1])
            if here not in depths:
                depths[here] = 0  # until it is known: what leads back to where it came from adds nothing
                pending.extend(item for item in inside[here] if id(item) not in depths)
                continue
            pending.pop()
            if here not in done:
                done.add(here)
                depths[here] = 1 + max((depths[id(item)] for item in inside[here]), default=0)
                if depths[here] > CHAIN_LIMIT:
                    raise PickleRefused(f"more than {CHAIN_LIMIT} deques or defaultdicts are nested")


def check_key(key: Any) -> Any:
    """``key`` itself, if it is cheap to hash and to compare: nested or shared groups could cost for ever, or the stack.

    A frozenset's own members cost no more than reading them did.
    """
    if type(key) in _GROUPS:
        pending, members = [key], 0
        while pending:
            group = pending.pop()
            if type(group) is tuple or group is not key:
                members += len(group)
            if members > MEMBERS_LIMIT:
                raise PickleRefused(f"a key is a {type(key).__name__} of more than {MEMBERS_LIMIT} members")
            pending.extend(item for item in group if type(item) in _GROUPS)
    return key


def check_keys(keys: Sequence[Any], seen: dict[int, int]) -> None:
    """Return if a container takes ``keys`` in reasonable time. ``seen``: how often each hash came before; added to.

    Strings are hashed with a secret; what else may be a key can be made up so that all have one hash, and each is then
    compared with all before it. Of whole and floating-point numbers below 64 bits only some forty have the same.
    """
    for key in keys:
        kind = type(key)
        if kind is str or kind is float or (kind is int and -WHOLE_MAX < key < WHOLE_MAX):
            continue
        number = hash(check_key(key))
        seen[number] = count = seen.get(number, 0) + 1
        if count > EQUAL_HASHES_LIMIT:
            raise PickleRefused(f"more than {EQUAL_HASHES_LIMIT} keys of one container have the same hash")


__all__ = ["PickleRefused", "Vocabulary", "read_pickle"]


def _no_persistent(_: Any) -> Any:
    raise PickleRefused("it refers to a storage, which is not allowed here")


def _no_build(target: Any, _: Any) -> None:
    raise PickleRefused(f"it sets the state of a {type(target).__name__}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Names and operations that a pickle may use.

    ``names``: what a name ``module.qualname`` stands for. ``makers``: for those of them that may be called, the
    function that is called instead; it must check its arguments. ``build(target, state)`` sets the state of an object
    that a maker made. ``persistent(identity)`` resolves a persistent id.
    """

    names: Mapping[str, Any]
    makers: Mapping[Any, Callable[..., Any]]
    build: Callable[[Any, Any], None] = _no_build
    persistent: Callable[[Any], Any] = _no_persistent


def read_pickle(data: bytes | memoryview, vocabulary: Vocabulary) -> Any:
    """The value that a pickle stands for; bytes behind its STOP are ignored. Raises `PickleRefused`."""
    try:
        return _Reader(data if type(data) is bytes else bytes(data), vocabulary).read()
    except PickleRefused:
        raise
    except (IndexError, KeyError, struct.error) as error:
        raise PickleRefused("it ends too early or refers to an undefined value") from error
    except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError, RuntimeError, MemoryError) as error:
        # RuntimeError covers torch's and RecursionError; whatever a maker objects to is the stream's fault.
        raise PickleRefused(f"{type(error).__name__}: {error}") from error


_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from


class _Reader:
    """One pass over one stream."""

    __slots__ = ("data", "hashes", "memo", "nested", "outer", "position", "stack", "vocabulary")

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        """The stacks below each mark, innermost last: a mark itself can then never pass for a value."""
        self.memo: dict[int, Any] = {}
        self.vocabulary = vocabulary
        self.hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        """The containers that have unusual keys, by identity, which is used again where one isn't held on to."""
        self.nested: list[Any] = []
        """All that are `TAKEN_APART_NESTED`."""

    def read(self) -> Any:
        try:
            value = self.run()
            check_nesting(self.nested)
        except BaseException:
            for container in self.nested:
                container.clear()  # while all of them are held on to: nothing is released inside another
            raise
        return value

    def run(self) -> Any:
        data, memo, table = self.data, self.memo, _OPCODES
        stack, at = self.stack, 0
        while True:
            opcode = data[at]
            # The four that make up half of a pickle of many small objects are worth not calling for.
            if opcode == _BINGET:
                stack.append(memo[data[at + 1]])
                at += 2
            elif opcode == _LONG_BINGET:
                stack.append(memo[_U32(data, at + 1)[0]])
                at += 5
            elif opcode == _BINPUT:
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
                at += 1
            elif opcode == _STOP:
                if len(stack) != 1 or self.outer:
                    raise PickleRefused("it ends in the middle of a value")
                return stack[0]
            else:
                step = table[opcode]
                if step is None:
                    raise PickleRefused(f"opcode 0x{opcode:02x} at byte {at:,} is not allowed in a checkpoint")
                self.position = at + 1
                step(self)
                stack, at = self.stack, self.position

    # bytes of the stream ---------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        start = self.position
        end = start + nbytes
        if nbytes < 0 or end > len(self.data):
            raise PickleRefused(f"it claims {nbytes:,} bytes at {start:,} and has {len(self.data) - start:,}")
        self.position = end
        return self.data[start:end]

    def count(self, unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Any:
        value = unpack(self.data, self.position)[0]
        self.position += nbytes
        return value

    def byte(self) -> int:
        value = self.data[self.position]
        self.position += 1
        return value

    def line(self) -> str:
        start = self.position
        # Names are short: a search that would run over a whole damaged file is refused instead.
        newline = self.data.find(b"\n", start, start + 512)
        if newline < 0:
            raise PickleRefused(f"the name at byte {start:,} has no end")
        self.position = newline + 1
        return str(self.data[start:newline], "utf-8")

    # the stack -------------------------------------------------------------------------------------------------

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def check_keys(self, target: Any, keys: Sequence[Any]) -> None:
        if all(type(key) is str for key in keys):
            return
        check_keys(keys, self.hashes.setdefault(id(target), (target, {}))[1])

    def resolve(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self.vocabulary.names:
            raise PickleRefused(f"it names {full}, which isn't on the list of what may be loaded")
        return self.vocabulary.names[full]

    def call(self, function: Any, arguments: Any) -> Any:
        try:
            maker = self.vocabulary.makers.get(check_key(function))
        except TypeError:
            maker = None
        if maker is None or type(arguments) is not tuple:
            raise PickleRefused(f"it calls a {type(function).__name__}, which isn't on the list of what may be called")
        made = maker(*arguments)
        if type(made) in TAKEN_APART_NESTED:
            self.nested.append(made)
        return made


def _literal(value: Any) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value)


def _integer(unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.stack.append(reader.count(unpack, nbytes))

    return step


def _long(unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.stack.append(int.from_bytes(reader.take(reader.count(unpack, nbytes)), "little", signed=True))

    return step


def _string(unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.stack.append(str(reader.take(reader.count(unpack, nbytes)), "utf-8", "surrogatepass"))

    return step


def _blob(
    unpack: Callable[[bytes, int], tuple[Any, ...]], nbytes: int, kind: type[bytes | bytearray]
) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        reader.stack.append(kind(reader.take(reader.count(unpack, nbytes))))

    return step


def _small_tuple(length: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        stack = reader.stack
        if len(stack) < length:
            raise PickleRefused("a tuple has too few members")
        stack[-length:] = [tuple(stack[-length:])]

    return step


def _mark(reader: _Reader) -> None:
    reader.outer.append(reader.stack)
    reader.stack = []


def _tuple(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    reader.stack.append(tuple(items))


def _append_to(target: Any, items: list[Any]) -> None:
    if not isinstance(target, _SEQUENCES):
        raise PickleRefused(f"it appends to a {type(target).__name__}")
    target.extend(items)


def _append(reader: _Reader) -> None:
    item = reader.stack.pop()
    _append_to(reader.stack[-1], [item])


def _appends(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    _append_to(reader.stack[-1], items)


def _set_items(reader: _Reader, target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict) or len(items) % 2:
        raise PickleRefused(f"it sets items of a {type(target).__name__}")
    keys, values = items[::2], items[1::2]
    reader.check_keys(target, keys)
    if type(target) is dict:
        target.update(zip(keys, values, strict=True))
    else:  # a Counter's update() adds
        for key, value in zip(keys, values, strict=True):
            target[key] = value


def _setitem(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set_items(reader, reader.stack[-1], [key, value])


def _setitems(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    _set_items(reader, reader.stack[-1], items)


def _additems(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    target = reader.stack[-1]
    if type(target) is not set:
        raise PickleRefused(f"it adds elements to a {type(target).__name__}")
    reader.check_keys(target, items)
    target.update(items)


def _frozenset(reader: _Reader) -> None:
    items = reader.pop_to_mark()
    check_keys(items, {})
    reader.stack.append(frozenset(items))


def _long_put(reader: _Reader) -> None:
    reader.memo[reader.count(_U32, 4)] = reader.stack[-1]


def _global(reader: _Reader) -> None:
    module = reader.line()
    reader.stack.append(reader.resolve(module, reader.line()))


def _stack_global(reader: _Reader) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleRefused("it uses a name that is not a string")
    reader.stack.append(reader.resolve(module, name))


def _reduce(reader: _Reader) -> None:
    arguments, function = reader.stack.pop(), reader.stack.pop()
    reader.stack.append(reader.call(function, arguments))


def _build(reader: _Reader) -> None:
    state = reader.stack.pop()
    reader.vocabulary.build(reader.stack[-1], state)


def _persistent(reader: _Reader) -> None:
    reader.stack.append(reader.vocabulary.persistent(reader.stack.pop()))


def _pop(reader: _Reader) -> None:
    reader.stack.pop()


def _pop_mark(reader: _Reader) -> None:
    reader.pop_to_mark()


def _protocol(reader: _Reader) -> None:
    if reader.byte() > 5:
        raise PickleRefused("its pickle protocol is newer than 5")


def _frame(reader: _Reader) -> None:
    # Frames only help readers of streams: this one has all the bytes, so it steps over the length.
    reader.take(8)


def _u8(data: bytes, position: int) -> tuple[int]:
    return (data[position],)


def _new(kind: type[list[Any] | dict[Any, Any] | set[Any]]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(kind())


_STOP: Final = pickle.STOP[0]
_BINGET: Final = pickle.BINGET[0]
_LONG_BINGET: Final = pickle.LONG_BINGET[0]
_BINPUT: Final = pickle.BINPUT[0]
_MEMOIZE: Final = pickle.MEMOIZE[0]
_SEQUENCES: Final = (list, deque)

_STEPS: Final[dict[bytes, Callable[[_Reader], None]]] = {
    pickle.PROTO: _protocol,
    pickle.FRAME: _frame,
    pickle.NONE: _literal(None),
    pickle.NEWTRUE: _literal(True),  # noqa: FBT003 - the value itself
    pickle.NEWFALSE: _literal(False),  # noqa: FBT003 - the value itself
    pickle.BININT: _integer(_I32, 4),
    pickle.BININT1: _integer(_u8, 1),
    pickle.BININT2: _integer(_U16, 2),
    pickle.LONG1: _long(_u8, 1),
    pickle.LONG4: _long(_I32, 4),
    pickle.BINFLOAT: _integer(_F64, 8),
    pickle.SHORT_BINUNICODE: _string(_u8, 1),
    pickle.BINUNICODE: _string(_U32, 4),
    pickle.BINUNICODE8: _string(_U64, 8),
    pickle.SHORT_BINBYTES: _blob(_u8, 1, bytes),
    pickle.BINBYTES: _blob(_U32, 4, bytes),
    pickle.BINBYTES8: _blob(_U64, 8, bytes),
    pickle.BYTEARRAY8: _blob(_U64, 8, bytearray),
    pickle.EMPTY_TUPLE: _literal(()),
    pickle.TUPLE1: _small_tuple(1),
    pickle.TUPLE2: _small_tuple(2),
    pickle.TUPLE3: _small_tuple(3),
    pickle.TUPLE: _tuple,
    pickle.EMPTY_LIST: _new(list),
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.EMPTY_DICT: _new(dict),
    pickle.SETITEM: _setitem,
    pickle.SETITEMS: _setitems,
    pickle.EMPTY_SET: _new(set),
    pickle.ADDITEMS: _additems,
    pickle.FROZENSET: _frozenset,
    pickle.MARK: _mark,
    pickle.POP: _pop,
    pickle.POP_MARK: _pop_mark,
    pickle.LONG_BINPUT: _long_put,
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _reduce,
    pickle.BUILD: _build,
    pickle.BINPERSID: _persistent,
}
"""All but those that `_Reader.run` does itself. An object is made by its maker whether the stream calls the class
(REDUCE) or its ``__new__`` (NEWOBJ)."""

_OPCODES: Final[tuple[Callable[[_Reader], None] | None, ...]] = tuple(_STEPS.get(bytes((n,))) for n in range(256))
