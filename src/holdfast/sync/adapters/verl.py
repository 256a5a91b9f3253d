"""verl: a checkpoint engine named ``holdfast``, which transfers weights by any of Holdfast's transports.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: holdfast
      custom_backend_module: holdfast.sync.adapters.verl_backend      # registers the engine in every process
      engine_kwargs: {holdfast: {transport: shared_memory, place: /dev/shm/run-7}}

verl passes weights one whole tensor at a time, the same on every trainer rank, and takes them one at a time. So each
trainer rank copies its share of them, by bytes, into host memory, which is reused from version to version, and all
ranks publish them as one version; each rollout worker fetches that version, complete and verified, before it yields
its first tensor (unless ``streaming``). Without ``cache`` it begins to fetch as soon as verl says which version comes,
while the trainers still gather it.

With ``delta: sparse`` the trainers send the elements that changed, if all rollout workers have the version that was
sent last, and the workers pass them on to verl's own consumers of ``delta_flush``: in SGLang by its
``custom_weight_loader``, in vLLM by the backend ``verl_delta_ipc``. verl configures both for ``backend: delta_sharded``
only, so either set them in ``rollout.engine_kwargs`` (`verl_flush`), or register this engine under that name, by
``custom_backend_module: holdfast.sync.adapters.verl_delta_backend``. Workers apply a delta to their cache first, and
verify the result; if anything is wrong with it nothing is passed on, and the next version is sent whole.

Guarantees: a version that fails in transfer doesn't affect the rollout: no tensor of it is yielded (unless
``streaming``). Version numbers increase, also from one job to the next. After a version that verl didn't take
completely the next one is yielded whole.
Assumes: every trainer rank gets all tensors, in the same order, as from verl's engines for FSDP and Megatron.
Does not: use device memory on the trainer besides what verl gathers; send LoRA changes separately; find what changed on
each trainer's own shard, as verl's own engine does: with deltas, too, verl gathers all weights.

Runs in tests with the wheels of verl 0.9.1 and 0.8.0: its `CheckpointEngineManager` and its workers, on ray and CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, StateMismatch
from holdfast.format import sparse
from holdfast.sync.adapters.by_name import require, transport_of
from holdfast.sync.adapters.deltas import (
    DeltaSender,
    Patch,
    PreparedVersion,
    checked_delta,
    digest_in,
    is_delta,
    read,
)
from holdfast.sync.adapters.host_share import HostShare, share_of  # noqa: F401 - it was public here
from holdfast.sync.adapters.prefetch import Prefetch
from holdfast.sync.adapters.verl_flush import flushes_of
from holdfast.sync.publisher import Publisher, checked_flag
from holdfast.sync.receiver import Receiver
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

BACKEND: Final = "holdfast"
AHEAD: Final = 2
"""Number of tensors that a streaming receive may be ahead of the consumer."""
_LOOK_S: Final = 0.1


def register(backend: str = BACKEND) -> type:
    """Register the engine with verl's ``CheckpointEngineRegistry`` as ``backend``; return its class. Idempotent.

    Call it in every process of trainer and rollout before verl makes its engines. Raises `ConfigError` if verl is not
    installed.
    """
    base = require("verl.checkpoint_engine.base", "verl", why="this checkpoint engine")
    try:
        known: type = base.CheckpointEngineRegistry.get(backend)
    except (KeyError, ValueError):  # verl 0.8, and 0.9
        known = object
    if issubclass(known, VerlEngine):
        return known
    bases = (VerlEngine, getattr(base, "CheckpointEngineWithCache", base.CheckpointEngine))
    members = {"__doc__": VerlEngine.__doc__, "takes_deltas": hasattr(base.CheckpointEngine, "wire_format")}
    made = type("HoldfastCheckpointEngine", bases, members)
    base.CheckpointEngineRegistry.register(backend)(made)
    return made


class VerlEngine:
    """The engine without verl's base class; verl makes one in each trainer and rollout worker.

    Args:
        bucket_size: bytes of a bucket; passed by verl.
        is_master: whether this is trainer rank 0; passed by verl.
        transport: ``"shared_memory"`` (one host), ``"process_group"``, ``"nixl"`` or ``"directory"``.
        place: the rendezvous of the transport, or the directory of versions; the same for all workers.
        options: further arguments of the transport, by name.
        streaming: yield tensors as they arrive: needs no memory on the rollout side, but tensors yielded before a
            version fails stay in the rollout's weights.
        rollout_dtype: cast floating point weights to this dtype on the trainer, e.g. ``"bfloat16"``; None: as verl
            passes them.
        cache: keep the version received last in the rollout worker's host memory, for `get_weights`. The next one is
            received into the same memory. Not with ``streaming``.
        delta: ``"sparse"``: send what changed since the last version, by element, where that is less. Needs ``cache``,
            and verl 0.9; takes the memory of a second share on the trainer.
        timeout_s: seconds for one version, > 0.
    """

    wire_format = "named_tensors"
    takes_deltas = False
    """Whether this verl has consumers of deltas."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,  # noqa: FBT001, FBT002 - verl's own
        *,
        transport: str = "shared_memory",
        place: str | None = None,
        options: Mapping[str, Any] | None = None,
        streaming: bool = False,
        rollout_dtype: torch.dtype | str | None = None,
        cache: bool = False,
        delta: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._transport = transport_of(transport, place, dict(options or {}))
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._streaming = checked_flag("streaming", streaming)
        self._cache = checked_flag("cache", cache)
        if cache and streaming:
            raise ConfigError("cache: nothing is kept with streaming; choose one of them", field="cache")
        self._dtype = _dtype_of(rollout_dtype)
        self._share = HostShare(self._dtype)
        self._deltas = DeltaSender(self._dtype) if self._checked_delta(delta) else None
        self._base: str | None = None
        self._digest: str | None = None
        """Of the version in the cache, if the sender told."""
        self._delivered: str | None = None
        """Digest of what verl took completely from here, to the last item."""
        self._cached: dict[str, torch.Tensor] = {}
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._version = -1
        self.global_steps: int | None = None
        """The trainer's step of the version that was sent or received last, as verl told it."""
        self._receivers: int | None = None
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None
        self._prefetch: Prefetch
        self._taker: Callable[[str, torch.Tensor], object]
        self._is_cached = True
        """False while a delta is applied to the cache, and after that has failed."""

    def _checked_delta(self, delta: str | None) -> bool:
        is_sparse = checked_delta(delta)
        if is_sparse and not self._cache:
            raise ConfigError("delta needs cache=True: a delta is applied there, and verified", field="delta")
        if is_sparse:
            if not self.takes_deltas:
                raise ConfigError("delta: this verl takes whole weights only; use 0.9 or later", field="delta")
            self.wire_format = "delta_flush"
        return is_sparse

    # Called by verl in this order, for each version. ------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version, of which the master's is used, and what this worker holds."""
        # Not the last one plus one: a new job must continue above the versions in a directory.
        return {"version": max(self._version + 1, time.time_ns() // 1_000_000), "holds": self._digest}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell everybody the version, and the trainers how many workers receive it, and what all of these hold."""
        version = metadata[0]["version"]  # trainers come first, the master first of them
        held = {given.get("holds") for given in metadata[trainer_world_size:]}
        base = held.pop() if len(held) == 1 else None
        trainers = {"version": [version], "receivers": [rollout_world_size], "base": [base]}
        rollouts = {"version": [version], "receivers": [None], "base": [base]}
        return (
            {name: given * trainer_world_size for name, given in trainers.items()},
            {name: given * rollout_world_size for name, given in rollouts.items()},
        )

    def init_process_group(self, *, version: int, receivers: int | None, base: str | None = None) -> None:
        """Prepare to publish ``version`` to ``receivers`` workers that hold ``base``, or to receive it (None)."""
        self._version, self._base = version, base
        if receivers is None:
            if self._receiver is None:
                self._receiver = Receiver(self._transport)
                self._prefetch = Prefetch(self._receiver, self._hand, watch=False)
            if not self._streaming and not self._cache:
                self._prefetch.begin(version, self._timeout_s)
            return
        if self._publisher is not None and self._receivers != receivers:
            self._publisher.close()  # replicas were added or removed
            self._publisher = None
        if self._publisher is None:
            self._publisher = Publisher(self._transport, bucket_bytes=self._bucket_bytes, receivers=receivers)
        self._receivers = receivers

    def close(self) -> None:
        """Leave; idempotent. verl doesn't call it: its processes end."""
        if self._publisher is not None:
            self._publisher.close()
        if self._receiver is not None:
            self._prefetch.close()
            self._receiver.close()

    def finalize(self) -> None:
        """Do nothing: connections and plans are reused for the next version."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish all of ``weights``; returns metrics, on the master.

        Over links it waits until every rollout worker has them; otherwise until they are staged, and verl's manager
        waits for the workers.

        weights: pairs of names and tensors; or verl's training engine, which passes itself for ``delta_sharded``.
        global_steps: the trainer's step, which workers get with the version; it may start again below the last one.
        """
        publisher = self._publisher
        if publisher is None:
            raise ConfigError("send_weights before init_process_group: verl's manager calls that first")
        if hasattr(weights, "get_per_tensor_param"):
            weights, _ = weights.get_per_tensor_param()
        begun = time.monotonic()
        # On this thread: taking the next tensor may be a collective of the trainer's.
        if self._deltas is None:
            share, total_bytes = self._share.copy(weights)
            outgoing = PreparedVersion(share, share, None, "", total_bytes, total_bytes, {})
            meta: dict[str, Any] = {}
        else:
            outgoing = self._deltas.prepare(weights, self._base)
            meta = outgoing.meta
        copied = time.monotonic()
        meta["global_steps"] = global_steps
        published = await asyncio.to_thread(
            publisher.publish, outgoing.payload, self._version, self._timeout_s, meta=meta
        )
        if self._deltas is not None:
            self._deltas.sent(outgoing)
        self.global_steps = global_steps
        if not self._is_master:
            return {}  # verl merges the metrics of all trainer ranks: the last of them would count
        metrics = {
            "payload_mbytes": outgoing.sent_bytes / 2**20,
            "gather_s": copied - begun,
            "publish_s": published.seconds,
            "receivers": float(self._receivers or 0),
            "lost_receivers": float(published.lost),
        }
        if self._deltas is not None:
            metrics["is_delta"] = float(outgoing.base is not None)
            metrics["whole_mbytes"] = outgoing.dense_bytes / 2**20
        if global_steps is not None:
            metrics["global_steps"] = float(global_steps)
        return {f"checkpoint_engine/{name}": value for name, value in metrics.items()}

    def receive_weights(self, global_steps: int | None = None) -> Any:
        """Return an iterator over every tensor of the version, in host memory. With ``cache`` they must not be changed.

        With ``delta`` it is one of flushes, as verl's consumers of ``delta_flush`` take them.
        """
        if self._receiver is None:
            raise ConfigError("receive_weights before init_process_group: verl's manager calls that first")
        if self.wire_format == "delta_flush":
            return self._flushes(self._receiver, global_steps)
        return self._tensors(self._receiver, global_steps)

    def _hand(self, name: str, tensor: torch.Tensor) -> None:
        self._taker(name, tensor)

    async def _tensors(self, receiver: Receiver, global_steps: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        version = self._version
        if self._cache:
            await asyncio.to_thread(self._receive_into_cache, receiver, version)
            self.global_steps = global_steps
            async for item in self.get_weights():
                yield item
            return

        def receive(apply: Callable[[str, torch.Tensor], object]) -> None:
            receiver.receive(apply, version, self._timeout_s, True)  # noqa: FBT003 - streaming

        def commit(apply: Callable[[str, torch.Tensor], object]) -> None:
            self._taker = apply
            self._prefetch.commit()

        if not self._streaming:  # all of it is there and verified before the first tensor is yielded
            await asyncio.to_thread(self._prefetch.bring, version, self._timeout_s)
        async for item in as_received(receive if self._streaming else commit):
            yield item
        self.global_steps = global_steps

    def _flushes(
        self, receiver: Receiver, global_steps: int | None
    ) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Yield what changed, if verl has exactly its base, else everything. Not async: verl's SGLang takes it so."""
        had, self._delivered = self._delivered, None
        patches = self._receive_into_cache(receiver, self._version)
        if patches is not None and (had is None or had != self._base):
            patches = None  # the cache has the base, but verl didn't take all of that
        yield from flushes_of(self._cached, patches, self._bucket_bytes)
        self._delivered, self.global_steps = self._digest, global_steps

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the version that was received last, from the cache, as often as it is called.

        Raises `ConfigError` without ``cache``, before the first version, and if receiving the last one failed: its
        bytes are in the memory of the version before.
        """
        receiver = self._receiver
        if not self._cache or receiver is None or receiver.version is None or receiver.dirty or not self._is_cached:
            raise ConfigError(
                "no version in the cache: "
                + ("make the engine with cache=True" if not self._cache else "none was received completely since then"),
                field="cache",
            )
        for item in list(self._cached.items()):
            yield item

    def _receive_into_cache(self, receiver: Receiver, version: int) -> dict[str, Patch] | None:
        """Receive into the memory of the last version if it had the same tensors, else into new memory.

        Returns what changed, if that is what was received.
        """
        deadline = time.monotonic() + self._timeout_s
        base, self._digest = self._digest, None
        if self._deltas is not None:
            fresh: dict[str, torch.Tensor] = {}
            receiver.receive(fresh.__setitem__, version, self._timeout_s)
            digest = digest_in(receiver.meta)
            patches = None
            if is_delta(fresh):
                patches = read(fresh, receiver.meta, base)
                self._apply(patches)
            else:
                self._cached = fresh
            self._digest, self._is_cached = digest, True
            return patches
        if self._cached:
            try:
                # Streaming: nothing but this cache is written to, so a shadow of it would protect nothing.
                receiver.receive(self._cached, version, self._timeout_s, True)  # noqa: FBT003
            except StateMismatch:
                self._cached = {}
            else:
                return None
        fresh = {}
        receiver.receive(fresh.__setitem__, version, max(_LOOK_S, deadline - time.monotonic()))
        self._cached = fresh
        return None

    def _apply(self, patches: Mapping[str, Patch]) -> None:
        """Make the new version of the one in the cache; whoever asks for the cache meanwhile is refused."""
        self._is_cached = False
        for name, patch in patches.items():
            tensor = self._cached.get(name)
            if tensor is None or tuple(tensor.shape) != patch.shape or tensor.dtype != patch.dtype:
                raise StateMismatch(f"{name} of the delta is another tensor than in the cache; nothing was passed on")
        for name, patch in patches.items():
            sparse.apply(patch.record, compat.as_bytes(self._cached[name]).numpy())


def _dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if found is not None and isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    if given is None:
        return None
    raise ConfigError(f"rollout_dtype must name a floating point dtype of torch, not {given!r}", field="rollout_dtype")


class _NobodyTakesIt(Exception):
    """The consumer has stopped iterating."""


async def as_received(
    receive: Callable[[Callable[[str, torch.Tensor], None]], object],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Run ``receive`` on a thread and yield what it passes to its callback, at most `AHEAD` items ahead.

    Raises the error of ``receive`` after the items it has passed. If the iterator is left early, ``receive`` ends with
    an error.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[str, torch.Tensor] | None] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)
    left = threading.Event()

    def hand_over(name: str, tensor: torch.Tensor) -> None:
        while not room.acquire(timeout=_LOOK_S):
            if left.is_set():
                break
        if left.is_set():
            raise _NobodyTakesIt
        loop.call_soon_threadsafe(items.put_nowait, (name, tensor))

    def run() -> None:
        try:
            receive(hand_over)
        finally:
            loop.call_soon_threadsafe(items.put_nowait, None)

    running = loop.run_in_executor(None, run)
    try:
        while (item := await items.get()) is not None:
            yield item
            room.release()
    finally:
        left.set()
        with contextlib.suppress(_NobodyTakesIt):
            await running
