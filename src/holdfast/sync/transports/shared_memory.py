"""Transfer weights between processes of one host, through memory that the publisher fills and receivers have mapped.

A version lies in blocks of memory, one a publisher rank (``sync.versions``). Receivers verify it where it lies, and
copy it once. The memory is passed on as a descriptor, over a socket that has a path.

Guarantees: receivers are independent of one another and of the publisher: one that hangs costs it one block, once.
Nothing but the sockets, and two small values in the rendezvous, is ever in a file system.
Assumes Linux, and that publisher and receivers run as the same user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.sync.versions.publishing import BlockPublishing
from holdfast.sync.versions.receiving import BlockReceiving
from holdfast.validation import checked_directory, checked_seconds

if TYPE_CHECKING:
    from holdfast.sync.protocol import PublisherOptions, Publishing, Receiving


class SharedMemoryTransport:
    """Transfers versions through shared memory, within one host; implements `Transport`.

    Args:
        rendezvous: where both sides find each other: a directory, ``"tcp://host:port"``, or a torch Store.
        process_group: the publisher ranks; None for the default group if there is one. Receivers need none.
        peer_timeout_s: seconds after which a receiver gives up a publisher rank that doesn't answer.
        directory: of a local file system that both sides see, for the publisher's sockets; None: the rendezvous if it
            is a directory, else one of this user's in the directory for temporary files.
    """

    def __init__(
        self,
        rendezvous: Any,
        *,
        process_group: Any | None = None,
        peer_timeout_s: float = 30.0,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if rendezvous is None:
            raise ConfigError(
                "rendezvous must be the path of a shared directory, 'tcp://host:port' or a Store", field="rendezvous"
            )
        self._rendezvous = rendezvous
        self.process_group = process_group
        self._peer_timeout_s = checked_seconds("peer_timeout_s", peer_timeout_s)
        self._directory = None if directory is None else checked_directory(directory, field="directory")

    def publishing(self, options: PublisherOptions) -> Publishing:
        return BlockPublishing(
            options,
            rendezvous=self._rendezvous,
            process_group=self.process_group,
            peer_timeout_s=self._peer_timeout_s,
            directory=self._directory,
        )

    def receiving(self) -> Receiving:
        return BlockReceiving(rendezvous=self._rendezvous, peer_timeout_s=self._peer_timeout_s)
