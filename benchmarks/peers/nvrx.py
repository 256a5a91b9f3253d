"""nvidia-resiliency-ext's asynchronous checkpoints on CPU tensors.

Its writer takes CPU tensors as they are, so training on would change what is saved: the state is cloned first, into
shared memory that is kept from save to save, which its worker process then maps. It asks `torch.cuda` for a device and
to synchronize: both are answered for the CPU, in this process and in its worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.contender import Contender, Pending

if TYPE_CHECKING:
    from pathlib import Path


def answer_for_the_cpu() -> None:
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")


answer_for_the_cpu()  # its worker process imports this module, too: what it is sent names `preloaded`


def preloaded(buckets: Any) -> Any:
    """What its `preload_tensors` does, but for the pinned copies: the tensors are in shared host memory already."""
    return buckets


class Finalizing(Pending):
    """Polled on the training thread, where it finalizes: its users call this after every step."""

    ask_every_s = 0.05
    ends_when_asked = True

    def __init__(self, queue: AsyncCallsQueue) -> None:
        super().__init__()
        self._queue = queue

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return self._queue.get_num_unfinalized_calls() == 0


class Persistent(Contender):
    def start(self) -> None:
        self._queue = AsyncCallsQueue(persistent=True)
        self._cache = CheckpointMetadataCache()
        self._clones: dict[str, Any] = {}

    def _clone(self) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor

        def local(tensor: Any) -> torch.Tensor:
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor

        flat = self.held_state.flat
        if not self._clones:
            for name, tensor in flat.items():
                own = torch.empty_like(local(tensor)).share_memory_()
                self._clones[name] = (
                    DTensor.from_local(
                        own,
                        tensor.device_mesh,
                        tensor.placements,
                        run_check=False,
                        shape=tensor.shape,
                        stride=tensor.stride(),
                    )
                    if isinstance(tensor, DTensor)
                    else own
                )
        with torch.no_grad():
            for name, tensor in flat.items():
                local(self._clones[name]).copy_(local(tensor))
        return self._clones

    def save(self, path: Path) -> Pending:
        path.mkdir(exist_ok=True)
        writer = FileSystemWriterAsync(str(path), thread_count=2)
        result = save_state_dict_async_plan(
            self._clone(), writer, planner=DefaultSavePlanner(), enable_cache=True, metadata_cache=self._cache
        )
        # It hands back what `save_state_dict_async_finalize` takes.
        written, _, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(written, tuple(arguments), [lambda: save_state_dict_async_finalize(*result)])
        self._queue.schedule_async_request(request)
        return Finalizing(self._queue)

    def close(self) -> None:
        self._queue.close()
