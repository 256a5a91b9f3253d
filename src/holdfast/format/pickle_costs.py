"""What a pickle of some bytes could cost whoever reads it: time to compare its keys, stack to release it. Torch-free.

Guarantees: what passes these checks is hashed, compared and released in time and stack that are bounded by its bytes.
They are made of what is read, and of what is to be written: what can't be loaded back is refused when it is saved.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Refused(ValueError):
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
                    raise Refused(f"more than {CHAIN_LIMIT} deques or defaultdicts are one inside the other")


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
                raise Refused(f"a key is a {type(key).__name__} of more than {MEMBERS_LIMIT} members")
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
            raise Refused(f"more than {EQUAL_HASHES_LIMIT} keys of one container have the same hash")
