"""Prepare the decoding of messages and records, while one thread imports the module that defines them. Torch-free.

msgspec finds out how to decode a class when it first has to, and shows other threads the result before it is complete:
one of them that decodes the same class at that moment crashes the process. So every module that defines classes which
are decoded calls `prepare_decoding` with them, at its end, unless it makes decoders of them there.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare_decoding(*kinds: Any) -> None:
    """Make classes, or unions of classes, decodable by several threads at once; for the end of a module."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
