"""A publisher that is interrupted, short of descriptors, or without its directory goes on, or `publish` says why."""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from typing_extensions import Self

from holdfast.errors import HoldfastError
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.versions import block, books, deltas, publishing, serving
from holdfast.sync.versions.books import Books

TIMEOUT_S = 20.0
INTERRUPTED = {module.__file__ for module in (block, books, deltas, publishing, serving, threading)}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(version))}


def receives(receiver: Receiver, into: dict[str, torch.Tensor], version: int) -> bool:
    return receiver.receive(timeout=TIMEOUT_S) == version and torch.equal(into["weight"], weights(version)["weight"])


# interrupts --------------------------------------------------------------------------------------------------------


class Interrupts:
    """Raises KeyboardInterrupt where Python looks for signals, in what decides on blocks: after some of its calls."""

    def __init__(self, *after: int) -> None:
        self.calls = 0
        self.left = set(after)
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in INTERRUPTED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith("CALL"):
                self.calls += 1
                if self.calls in self.left:
                    self.left.discard(self.calls)
                    raise KeyboardInterrupt
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("kind", "delta"), [(SharedMemoryTransport, None), (ProcessGroupTransport, None), (ProcessGroupTransport, "sparse")]
)
def test_an_interrupted_publish_leaves_the_publisher_usable(
    tmp_path: Path, kind: Any, delta: Any, twice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    into = weights(0)
    with Publisher(kind(tmp_path), delta=delta) as publisher, Receiver(kind(tmp_path), into) as receiver:
        half: Any = publisher._half
        with Interrupts() as interrupts:
            publisher.publish(weights(1), 1)
        assert interrupts.calls > 50
        most, version, cut_off = interrupts.calls + 20, 1, 0
        for call in range(1, most):
            version += 1
            with contextlib.suppress(KeyboardInterrupt), Interrupts(call, call + 1 + call % 9 if twice else 0) as once:
                publisher.publish(weights(version), version)
            cut_off += call not in once.left
            version += 1
            publisher.publish(weights(version), version)
            assert receives(receiver, into, version), call
            assert len(half._served.memory) <= 4
            assert half._served.memory.keys() >= half._served.books._blocks.keys(), call
        assert cut_off > 50
        if delta is None:  # else who makes deltas may hold a block for longer than it needs it
            assert not any("takes back" in said.message for said in caplog.records)


def test_blocks_that_an_interrupt_left_of_another_size_are_freed(tmp_path: Path) -> None:
    with Publisher(SharedMemoryTransport(tmp_path)) as publisher:
        half: Any = publisher._half
        version = 0
        for call in range(1, 60):
            for rows in (1000, 3_000_000 // 100):
                version += 1
                given = {"weight": torch.zeros(rows * (1 + call % 2 * 7))}
                with contextlib.suppress(KeyboardInterrupt), Interrupts(call):
                    publisher.publish(given, version)
        for number in range(1, 4):
            publisher.publish(weights(version + number), version + number)
        assert half._served.memory.keys() == half._served.books._blocks.keys()


def test_nothing_to_fill_is_said() -> None:
    made = Books(keep=1, max_blocks=2, where="publisher rank 3")
    for version in (1, 2):
        made.begin(version, 100)
        made.staged(version, b"")
        made.publish(version)
        made.pin(version)
    made._max_blocks = 1
    with pytest.raises(HoldfastError, match="publisher rank 3 has no memory for version 3"):
        made.begin(3, 100)
