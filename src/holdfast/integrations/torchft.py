"""Save and load the replicas of a TorchFT run with Holdfast, and heal one from another.

    <root>/step-N                        the state, and TorchFT's own counters: by the replica that is participating
                                         rank 0 when step N is due
    <root>/ft-replicat-<id>/step-N       a replica's dataloader, at every step, by itself

    checkpoints = ReplicaCheckpoints(root, manager, {"model": model, "optimizer": optimizer}, replica_id=0,
                                     dataloader=loader)
    checkpoints.restore()
    while manager.current_step() < steps:
        ...                              # a step as TorchFT has it
        checkpoints.step()

    manager = torchft.Manager(checkpoint_transport=CheckpointTransport(), ...)

Guarantees: the folder of the full checkpoints is held by one replica at a time, and handed on when another becomes rank
0; a checkpoint is visible when it is whole. A damaged checkpoint of a dataloader is passed over for the one before it,
and never keeps a replica from starting. What a healing replica is given is loaded only once its copies are made; it is
the state that its peer had at that step, bit for bit, or an error that TorchFT turns into another try.
Assumes: all ranks of a replica call it alike, from the training thread; names of folders are torchtitan's.
Does not: agree with other replicas on anything, or decide who heals whom: TorchFT does.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torchft.checkpointing.transport

import holdfast
from holdfast.errors import CheckpointCorrupt, CheckpointExists, ConfigError, RootLocked
from holdfast.manager import CheckpointManager
from holdfast.sync.handover import BUCKET_BYTES, HandoverServer, fetch_state
from holdfast.validation import checked_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from holdfast.saver.handle import SaveHandle

TORCHFT: Final = "torchft"
_log = logging.getLogger("holdfast.integrations.torchft")
_RETRY_S: Final = 0.25


class ReplicaCheckpoints:
    """The checkpoints of one replica.

    root: a directory that all replicas see. manager: `torchft.Manager`; its functions that load a peer's state are made
    to wait for copies in the making. state: as for `holdfast.save`, the same in every replica.
    replica_id: what names this replica's folder, the same after a restart. dataloader: anything with ``state_dict``;
    None saves none. config: of the full checkpoints; ``every`` says when one is due. keep_dataloader: how many of the
    dataloader's stay; at least as many as there are steps between full checkpoints where a whole run is to be resumed
    with ``dataloader="restored"``. process_group: the ranks of this replica. lock_timeout: seconds to wait for
    another replica to hand ``root`` on, after which the step is not saved, as a warning says.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        manager: Any,
        state: Mapping[str, Any],
        *,
        replica_id: int | str,
        dataloader: Any = None,
        config: holdfast.CheckpointConfig | None = None,
        keep_dataloader: int = 20,
        process_group: Any = None,
        lock_timeout: float = 60.0,
    ) -> None:
        if TORCHFT in state:
            raise ConfigError(f"the state has the key {TORCHFT!r}, which is for TorchFT's own counters", field=TORCHFT)
        self._root = checked_directory(root, field="root")
        self._manager = manager
        self._state = {**state, TORCHFT: _TorchFTCounters(manager)}
        self._config = config or holdfast.CheckpointConfig()
        self._group = process_group
        self._lock_timeout_s = lock_timeout
        self._full: CheckpointManager | None = None
        self._own: CheckpointManager | None = None
        self._saved = -1
        if dataloader is not None:
            # Made at once: it recovers what a killed predecessor left before one is chosen to resume from.
            folder = os.path.join(self._root, f"ft-replicat-{replica_id}")
            kept = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=keep_dataloader), on_error="warn")
            self._own = CheckpointManager(folder, {"dataloader": dataloader}, config=kept, process_group=process_group)
        loads = getattr(manager, "_load_state_dict_fns", {})
        for key, load in list(loads.items()):
            loads[key] = self._guarded(load)

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Register with the manager what a healing replica is given, as `torchft.Manager.register_state_dict_fn`.

        For functions registered after this was made: those from before wait for copies already.
        """
        self._manager.register_state_dict_fn(key, self._guarded(load), state_dict)

    def restore(self, step: int | None = None, *, dataloader: str = "newest") -> int | None:
        """Load the newest full checkpoint, or exactly ``step``, and this replica's dataloader; return the step or None.

        dataloader: ``"newest"`` for its newest position, of a replica that comes back into a run that has gone on;
        ``"restored"`` for the one at the step that was loaded, of a run that starts again as a whole. One that is
        damaged is passed over, and none is no error.

        Raises as `holdfast.CheckpointManager.restore` for the full checkpoint; `ConfigError`.
        """
        if dataloader not in ("newest", "restored"):
            raise ConfigError(f"dataloader is 'newest' or 'restored', not {dataloader!r}", field="dataloader")
        config = replace(self._config, load_only=True)
        found: int | None = None
        if "://" in self._root or os.path.isdir(self._root):
            reader = CheckpointManager(self._root, self._state, config=config, process_group=self._group)
            try:
                found = reader.restore(step)
            finally:
                reader.close()
        if self._own is not None:
            self._restore_own(found if dataloader == "restored" else None)
        return found

    def _restore_own(self, step: int | None) -> None:
        assert self._own is not None
        try:
            if step is None or step in self._own.steps():
                self._own.restore(step)
                return
        except CheckpointCorrupt as error:
            warnings.warn(f"the dataloader of this replica begins anew: {error}", stacklevel=4)
            return
        warnings.warn(f"the dataloader of this replica has no checkpoint of step {step}: it begins anew", stacklevel=4)

    def step(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    ) -> SaveHandle | None:
        """Save what is due after a step; returns the handle of the full checkpoint, if this replica saves one.

        The step is TorchFT's (``manager.current_step()``); one that was not committed is not saved again. Waits for the
        quorum. metrics, files: as for `holdfast.CheckpointManager.save`. Raises what an earlier full save failed with.
        """
        step = self._manager.current_step()
        is_first = self._manager.participating_rank() == 0
        if self._full is not None and not is_first:
            full, self._full = self._full, None
            full.close()
        if step == self._saved:
            return None
        self._saved = step
        if self._own is not None:
            self._save(self._own, step)
        every = self._config.every
        if not is_first or every is None or step % every or not self._take_root():
            return None
        assert self._full is not None
        return self._save(self._full, step, metrics, files)

    def _save(
        self,
        manager: CheckpointManager,
        step: int,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    ) -> SaveHandle | None:
        try:
            return manager.save(step, metrics=metrics, files=files)
        except CheckpointExists as error:  # of a replica that was rank 0 before this one, or before it was killed
            _log.info("%s", error)
            return None

    def _take_root(self) -> bool:
        """Make the manager of the full checkpoints; False if another replica holds on to the folder."""
        tries = max(1, round(self._lock_timeout_s / _RETRY_S))
        for left in reversed(range(tries if self._full is None else 0)):
            try:
                self._full = CheckpointManager(self._root, self._state, config=self._config, process_group=self._group)
            except RootLocked as error:
                if not left:
                    warnings.warn(f"step {self._saved} is not saved: {error}", stacklevel=4)
                    return False
                time.sleep(_RETRY_S)
            else:
                break
        return True

    def before_update(self) -> None:
        """Wait until the state may be changed by hand: copies of it are made. Optimizers of torch's wait themselves."""
        if self._full is not None:
            self._full.before_update()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything begun by this replica is published; as `holdfast.CheckpointManager.wait`."""
        for manager in (self._own, self._full):
            if manager is not None:
                manager.wait(timeout)

    def close(self, *, failed: bool | None = None) -> None:
        """Let what is in flight end, and hand the folders on; idempotent.

        failed: as for `holdfast.CheckpointManager.close`; None: within an ``except`` the training has failed.
        """
        gone = sys.exc_info()[1] is not None if failed is None else failed
        full, self._full = self._full, None
        try:
            if full is not None:
                full.close(failed=gone)
        finally:
            if self._own is not None:
                self._own.close(failed=gone)

    def _guarded(self, load: Callable[[Any], None]) -> Callable[[Any], None]:
        def load_when_copied(state: Any) -> None:
            self.before_update()
            load(state)

        return load_when_copied


class _TorchFTCounters:
    """TorchFT's own state: its step, and how many batches were committed."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, int]:
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._manager.load_state_dict(dict(state))


class CheckpointTransport(torchft.checkpointing.transport.CheckpointTransport[Any]):
    """Heals a joining replica from a live one: for ``torchft.Manager(checkpoint_transport=...)``, in all replicas.

    The state is copied to host memory once, and sent from there, in buckets with checksums, to all who ask for it, over
    TCP. It may have what a checkpoint may have, nested in any way; what else it has is a `ConfigError` that names it,
    in the sender and in the receiver. A receiver that hangs holds nobody.

    state_dict: returns this replica's own state, laid out as the manager sends it (``{"user": {"default": ...}}``), or
    some of it: it is received into these tensors, where they are of the same kind. Only with
    ``use_async_quorum=False``, as they change during the quorum. before_update: called before they do
    (`ReplicaCheckpoints.before_update`). bucket_bytes: unit of checking. host: how others reach this one; None finds it
    out. Listens from now on, on all addresses; serves only who was given `metadata`.
    """

    def __init__(
        self,
        *,
        state_dict: Callable[[], Any] | None = None,
        before_update: Callable[[], None] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        host: str | None = None,
    ) -> None:
        self._state_dict = state_dict
        self._before_update = before_update
        self._server = HandoverServer(bucket_bytes=bucket_bytes, host=host)

    def metadata(self) -> str:
        """Return what a peer's `recv_checkpoint` needs to reach this one."""
        return self._server.address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copy ``state_dict`` and serve it to whoever asks; return when it is copied, before anybody has it.

        timeout: after it, nobody is sent anything. Raises `ConfigError` for a value that can't be sent; names it.
        """
        _log.info("serving the state at step %d to replicas %s", step, dst_ranks)
        self._server.offer(step, state_dict, timeout_s=timeout.total_seconds())

    def disallow_checkpoint(self) -> None:
        """Serve nobody else; waits for nobody. What is being sent goes on: it is a copy."""
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of ``step`` of the replica that gave ``metadata``; waits until it serves it.

        Tensors are in host memory, but for those received in place.

        Raises:
            DeadlineExceeded: it hasn't arrived within ``timeout``.
            PeerLost: the sender has ended.
            CheckpointNotFound: it serves a later step, or could not copy its state.
            CheckpointCorrupt: a bucket was damaged on the way; names it.
        """
        _log.info("fetching the state at step %d from replica %d", step, src_rank)
        own = None if self._state_dict is None else self._state_dict()
        return fetch_state(metadata, step, timeout_s=timeout.total_seconds(), own=own, before_write=self._before_update)

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - TorchFT's signature
        """End all transfers. wait: also wait for the threads, for some seconds."""
        self._server.close(wait=wait)
