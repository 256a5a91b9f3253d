"""Versions in a directory: saved there by a publisher or any other writer, read by any receiver.

    root/version-7/      an ordinary checkpoint, written by all publisher ranks
    root/step-500/       of a `CheckpointManager`: ``name_template="step-{step}", prefix="model"``
    root/hf-500/         a Hugging Face export: ``name_template="hf-{step}"``

``root`` may be the URL of an object store with the same contents (``transports.object_store``). A receiver needs no
process group, and nothing shared with the publisher but the storage.

Guarantees and limits: those of the halves, in their modules.
Assumes: a file system, or an object store, that all see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.catalog.root import checked_template
from holdfast.errors import ConfigError
from holdfast.storage.local import open_storage
from holdfast.storage.object_store import ObjectStore
from holdfast.sync.transports.object_store import ObjectPublishing, ObjectReceiving
from holdfast.sync.transports.stored import DirectoryPublishing
from holdfast.sync.transports.stored_receiving import DirectoryReceiving
from holdfast.validation import checked_path, is_store

if TYPE_CHECKING:
    import os

    from holdfast.sync.protocol import PublisherOptions, Publishing, Receiving


class DirectoryTransport:
    """Weight versions as directories below ``root``, for a `Publisher`, a `Receiver`, or both.

    root: a directory that all publisher ranks and receivers see; made by the publisher if it doesn't exist; a receiver
    waits for it. Or its URL (``file:///directory``; ``memory://name``, in the host's shared memory), or that of a place
    on an object store (``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``), whose bucket exists.
    store_options: access options for a URL (``endpoint``, ``region``,
    credentials, ``proxy_url``, …), with the names that ``obstore`` uses; the rest comes from the environment.

    name_template: directory of one version, with exactly one field, ``{step}``, for the version. prefix: the top-level
    key of the weights in the state, for a root of checkpoints that hold more; a publisher also saves under it. key_map:
    how Hugging Face exports name and shape a module's tensors, as for `holdfast.load`. process_group: the publisher's
    ranks; None for the default group, or a single rank if there is none.

    Raises `ConfigError` naming the argument.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name_template: str = "version-{step}",
        prefix: str | None = None,
        key_map: Any = None,
        process_group: Any | None = None,
        store_options: Mapping[str, str] | None = None,
    ) -> None:
        place = checked_path(root, field="root")
        self._is_url = is_store(place)
        self._store_options = _checked_options(store_options)
        if store_options is not None and not self._is_url:
            raise ConfigError(
                f"store_options are for the URL of an object store, but root is {root!r}", field="store_options"
            )
        # Made by each half again, so that a transport can be passed to another process.
        self.root: str = self._store(place).url if self._is_url else place
        checked_template("DirectoryTransport", name_template, example="version-{step}")
        given: object = prefix
        if given is not None and (not isinstance(given, str) or not given):
            raise ConfigError(
                f"prefix: expected a key such as 'model', or None for tensors at the top, found {prefix!r}",
                field="prefix",
            )
        self.name_template = name_template
        self.prefix = prefix
        self.key_map = key_map
        self.process_group = process_group

    def __repr__(self) -> str:
        return f"DirectoryTransport({self.root!r}, name_template={self.name_template!r}, prefix={self.prefix!r})"

    def publishing(self, options: PublisherOptions) -> Publishing:
        """See `DirectoryPublishing`, which locks ``root``, and `ObjectPublishing`. Every rank of the group calls it."""
        if options.captures is not None:
            raise ConfigError(
                "manager: a version in a directory is a checkpoint of its own; let receivers read the "
                "manager's checkpoints with a DirectoryTransport of its root, its name_template and a "
                "prefix",
                field="manager",
            )
        if self.key_map is not None:
            raise ConfigError(
                "key_map: the transport's is for receiving exports; to publish other names, give it to the Publisher",
                field="key_map",
            )
        if self._is_url:
            store = self._store(self.root)
            return ObjectPublishing(store, self.name_template, self.prefix, self.process_group, options)
        return DirectoryPublishing(self.root, self.name_template, self.prefix, self.process_group, options)

    def receiving(self) -> Receiving:
        """See `DirectoryReceiving`, `ObjectReceiving`."""
        if self._is_url:
            return ObjectReceiving(self._store(self.root), self.name_template, self.prefix, self.key_map)
        return DirectoryReceiving(open_storage(self.root), self.name_template, self.prefix, self.key_map)

    def _store(self, url: str) -> ObjectStore:
        return ObjectStore(url, self._store_options)


def _checked_options(options: object) -> dict[str, str]:
    if options is None or isinstance(options, Mapping):
        return dict(options or {})
    raise ConfigError(
        f"store_options must be a mapping of names to strings, not {options!r:.80}", field="store_options"
    )
