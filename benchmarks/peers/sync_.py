"""Ways to bring weights from one process to another: rank 0 has them, rank 1 wants them; all of them in one worker.

Raw: gloo's own broadcast of as many bytes, and a copy of them by two threads. Nothing is named, hashed or committed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.contender import Contender
from benchmarks.peers.raw import CHUNK_BYTES, THREADS, in_threads
from benchmarks.state import Shared
from holdfast import events
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport

if TYPE_CHECKING:
    from benchmarks.state import Entry
    from holdfast.sync.protocol import Transport

BUCKET_BYTES = 256 << 20
"""Holdfast's default."""
FULL_EVERY = 1000
"""Deltas only, once there is something to differ from."""
TIMEOUT_S = 60.0


class Syncing(Contender):
    """What both sides have: the weights that are published, and memory of their own that they go to.

    Rank 0 has the former and rank 1 the latter, each as its own tensors; both map both, for checks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.source = self.held_state.shared
        self.target = Shared(self.source.path + ".target", self.source.nbytes)
        self.target.bytes.view(torch.int64).sum()  # its pages are mapped before anything is timed
        self.mine = {entry.name: self.memory.view(entry) for entry in self.held_state.entries}

    @property
    def memory(self) -> Shared:
        """What this rank's weights lie in."""
        return self.target if self.rank else self.source

    def bring(self) -> dict[str, float]:
        """Bring the weights to rank 1; returns when this rank is done, with what there is to tell of it."""
        raise NotImplementedError

    def change(self, share: float) -> None:
        """Change whole tensors, on rank 0, as many as make up this share of the bytes; the last one in part."""
        if self.rank == 0:
            for name, rows in rows_of_share(self.held_state.entries, share):
                tensor = self.mine[name]
                tensor[:rows].neg_()

    def close(self) -> None:
        self.mine = {}
        del self.source, self.target


def rows_of_share(entries: list[Entry], share: float) -> list[tuple[str, int]]:
    """Names and rows of tensors that make up ``share`` of all bytes: whole ones, and of the last some rows."""
    left = share * sum(entry.nbytes for entry in entries)
    found = []
    for entry in reversed(entries):  # what comes first, embeddings, is much of a small model
        row_bytes = entry.nbytes // entry.shape[0]
        rows = min(entry.shape[0], round(left / row_bytes))
        if rows:
            found.append((entry.name, rows))
        if rows < entry.shape[0]:
            break
        left -= rows * row_bytes
    return found


class Broadcast(Syncing):
    """`dist.broadcast` over gloo, a bucket at a time, straight from and into the memory."""

    def bring(self) -> dict[str, float]:
        for start in range(0, self.memory.nbytes, BUCKET_BYTES):
            dist.broadcast(self.memory.bytes[start : start + BUCKET_BYTES], src=0)
        return {}


class Copy(Syncing):
    """A copy from warm memory to warm memory, by threads that hold no lock; rank 1 does nothing."""

    def bring(self) -> dict[str, float]:
        if self.rank == 0:
            target, source, nbytes = self.target.bytes.data_ptr(), self.source.bytes.data_ptr(), self.source.nbytes

            def copy(number: int) -> None:
                for start in range(number * CHUNK_BYTES, nbytes, THREADS * CHUNK_BYTES):
                    ctypes.memmove(target + start, source + start, min(CHUNK_BYTES, nbytes - start))

            in_threads(THREADS, copy)
        return {}


class Versions(Syncing):
    """Holdfast: a version each time, with its defaults."""

    delta = False
    streaming = False

    def start(self) -> None:
        root = self.folder / "rendezvous"
        root.mkdir(parents=True, exist_ok=True)
        alone = dist.new_group([0])  # of this job only rank 0 publishes; rank 1 plays a job of its own
        self._version = 0
        if self.rank == 0:
            transport = self.transport(root, process_group=alone)
            self._publisher = Publisher(transport, delta=self.delta, anchor_every=FULL_EVERY)
        else:
            self._receiver = Receiver(self.transport(root))

    def transport(self, root: Any, **options: Any) -> Transport:
        raise NotImplementedError

    def bring(self) -> dict[str, float]:
        self._version += 1
        if self.rank == 0:
            self._publisher.publish(self.mine, self._version, timeout=TIMEOUT_S)
            return {"bytes_sent": 0.0}
        before = events.statistics()["sync_bytes_brought"]
        received = self._receiver.receive(self.mine, timeout=TIMEOUT_S, streaming=self.streaming)
        assert received == self._version, f"received version {received}, expected {self._version}"
        return {"bytes_sent": float(events.statistics()["sync_bytes_brought"] - before)}

    def close(self) -> None:
        if self.rank == 0:
            self._publisher.close()
        else:
            self._receiver.close()
        super().close()


class OverGloo(Versions):
    """Between hosts, or as here within one."""

    def transport(self, root: Any, **options: Any) -> Transport:
        return ProcessGroupTransport(root, "gloo", **options)


class OverGlooStreaming(OverGloo):
    """Straight into the live tensors."""

    streaming = True


class OverGlooDelta(OverGloo):
    """Only what has changed."""

    delta = True


class ThroughMemory(Versions):
    """Within one host."""

    def transport(self, root: Any, **options: Any) -> Transport:
        return SharedMemoryTransport(root, **options)


class ThroughMemoryStreaming(ThroughMemory):
    """Straight into the live tensors."""

    streaming = True
