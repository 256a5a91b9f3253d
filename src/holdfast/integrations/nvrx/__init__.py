"""The asynchronous checkpointing of NVIDIA Resiliency Extension (NVRx), with its names and signatures.

    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest        # before
    from holdfast.integrations.nvrx import AsyncCallsQueue, AsyncRequest                                  # after

    AsyncRequest, AsyncCallsQueue      any function, run in a worker process; finalize functions on all ranks in step
    TorchAsyncCheckpoint               ``torch.save`` of each rank, to files that are there when they are whole
    save_state_dict_async_plan, FileSystemWriterAsync, save_state_dict_async_finalize
                                       a distributed checkpoint: Holdfast's, that stock ``dcp.load`` reads
    abort_nvrx_checkpoint              for a restart in-process
    CachedMetadataFileSystemReader, get_write_results_queue    what else Megatron-LM imports from NVRx

Guarantees: see ``calls`` (what a queue promises) and ``writer``. Runs on the CPU too, with or
without a process group. NVRx need not be installed.
Does not: cover NVRx's local checkpoints, its Multi-Storage Client, or functions that can't be pickled.
"""

from holdfast.integrations.nvrx.calls import (
    AsyncCallsQueue,
    AsyncRequest,
    TorchAsyncCheckpoint,
    abort_nvrx_checkpoint,
)
from holdfast.integrations.nvrx.writer import (
    CachedMetadataFileSystemReader,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    get_metadata_caching_status,
    get_write_results_queue,
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "TorchAsyncCheckpoint",
    "abort_nvrx_checkpoint",
    "get_metadata_caching_status",
    "get_write_results_queue",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

_results_queue = None
"""Megatron-LM looks for this name, and shuts down what it finds."""
