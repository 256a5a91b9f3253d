"""Weight sync: versions of weights from a trainer to rollout workers, applied completely or not at all.

    publisher = holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport("/tmp/run"))      # on every trainer rank
    publisher.publish(model.state_dict(), version)

    receiver = holdfast.sync.Receiver(holdfast.sync.SharedMemoryTransport("/tmp/run"))        # in every rollout worker
    version = receiver.receive(model)

Importing this starts nothing and imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.sync.protocol import Published
    from holdfast.sync.publisher import Publisher
    from holdfast.sync.receiver import Receiver, ReceiveStats
    from holdfast.sync.transports.cuda_ipc import CudaIpcTransport
    from holdfast.sync.transports.directory import DirectoryTransport
    from holdfast.sync.transports.nixl import NixlTransport
    from holdfast.sync.transports.process_group import ProcessGroupTransport
    from holdfast.sync.transports.shared_memory import SharedMemoryTransport

_WHERE = {
    "CudaIpcTransport": "holdfast.sync.transports.cuda_ipc",
    "DirectoryTransport": "holdfast.sync.transports.directory",
    "NixlTransport": "holdfast.sync.transports.nixl",
    "ProcessGroupTransport": "holdfast.sync.transports.process_group",
    "Published": "holdfast.sync.protocol",
    "Publisher": "holdfast.sync.publisher",
    "ReceiveStats": "holdfast.sync.receiver",
    "Receiver": "holdfast.sync.receiver",
    "SharedMemoryTransport": "holdfast.sync.transports.shared_memory",
}

__all__ = [
    "CudaIpcTransport",
    "DirectoryTransport",
    "NixlTransport",
    "ProcessGroupTransport",
    "Published",
    "Publisher",
    "ReceiveStats",
    "Receiver",
    "SharedMemoryTransport",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast.sync' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
