"""What transports over links have in common: both halves, above channels of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.arguments import checked_seconds
from holdfast.errors import ConfigError
from holdfast.sync.publishing import LinkedPublishing
from holdfast.sync.receiving import LinkedReceiving

if TYPE_CHECKING:
    from holdfast.sync.seam import PublisherOptions, Publishing, Receiving
    from holdfast.sync.transports.base import Channels


class LinkedTransport:
    """The base of transports over links; implements `Transport` with the `Channels` that a subclass makes."""

    def __init__(
        self,
        rendezvous: Any,
        *,
        process_group: Any | None = None,
        peer_timeout_s: float = 30.0,
        host: str | None = None,
    ) -> None:
        if rendezvous is None:
            raise ConfigError(
                "rendezvous must be the path of a shared directory, 'tcp://host:port' or a Store", field="rendezvous"
            )
        self._rendezvous = rendezvous
        self._process_group = process_group
        self._host = host
        self._peer_timeout_s = checked_seconds("peer_timeout_s", peer_timeout_s)

    def make_channels(self) -> Channels:
        """Channels for one publisher rank or one receiver."""
        raise NotImplementedError

    def publishing(self, options: PublisherOptions) -> Publishing:
        return LinkedPublishing(
            self.make_channels(),
            options,
            rendezvous=self._rendezvous,
            process_group=self._process_group,
            host=self._host,
            peer_timeout_s=self._peer_timeout_s,
        )

    def receiving(self) -> Receiving:
        return LinkedReceiving(self.make_channels(), rendezvous=self._rendezvous, peer_timeout_s=self._peer_timeout_s)
