"""What a publisher rank's memory is to who maps it."""

from __future__ import annotations

import gc
import os
import warnings

import pytest
from slots import ReceiveSlots

from holdfast.coordination.deadline import Deadline
from holdfast.format.manifest import PAGE_BYTES
from holdfast.sync.session.channel import SLOTS


def test_mapping_is_silent_leaves_the_filters_alone_and_outlives_its_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To change the filters, even for a moment, would be to change them for every thread of the program."""

    def changed(*_args: object, **_options: object) -> None:
        pytest.fail("the filters of the program were changed")

    fd = os.memfd_create("slots")
    os.truncate(fd, SLOTS * PAGE_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(warnings, "catch_warnings", changed)
        patched.setattr(warnings, "simplefilter", changed)
        slots = ReceiveSlots(fd, SLOTS * PAGE_BYTES, PAGE_BYTES)
    with open(fd, "r+b") as writer:
        writer.seek(PAGE_BYTES)
        writer.write(b"held")
    gc.collect()
    slots.post(1, 4, (0,))
    assert bytes(slots.take(1, Deadline.after(1.0)).tolist()) == b"held"
    slots.release(1)
    slots.close()
