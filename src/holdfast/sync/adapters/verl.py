"""verl: a checkpoint engine named ``holdfast``, which transfers weights by any of Holdfast's transports.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: holdfast
      custom_backend_module: holdfast.sync.adapters.verl_backend      # registers the engine in every process
      engine_kwargs: {holdfast: {transport: shared_memory, place: /dev/shm/run-7}}

verl passes weights one whole tensor at a time, the same on every trainer rank, and takes them one at a time. So each
trainer rank copies its share of them, by bytes, into host memory, which is reused from version to version, and all
ranks publish them as one version; each rollout worker receives that version, complete and verified, before it yields
its first tensor.

Guarantees: a version that fails in transfer doesn't affect the rollout: no tensor of it is yielded (unless
``streaming``). Version numbers increase, also from one job to the next.
Assumes: every trainer rank gets all tensors, in the same order, as from verl's engines for FSDP and Megatron.
Does not: use device memory on the trainer besides what verl gathers; send LoRA changes separately; serve verl's backend
``delta_sharded``, whose trainers pass their training engine instead of weights.

Runs in tests with the wheels of verl 0.8.0 and 0.9.1: its `CheckpointEngineManager` and its workers, on ray and CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync.adapters.by_name import require, transport_of
from holdfast.sync.publisher import Publisher, checked_flag
from holdfast.sync.receiver import Receiver
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

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
    made = type("HoldfastCheckpointEngine", bases, {"__doc__": VerlEngine.__doc__})
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
        timeout_s: seconds for one version, > 0.
    """

    wire_format = "named_tensors"

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
        self._cached: dict[str, torch.Tensor] = {}
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._version = -1
        self.global_steps: int | None = None
        """The trainer's step of the version that was sent or received last, as verl told it."""
        self._receivers: int | None = None
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None

    # Called by verl in this order, for each version. ------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version; the master's is used."""
        # Not the last one plus one: a new job must continue above the versions in a directory.
        return {"version": max(self._version + 1, time.time_ns() // 1_000_000)}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell everybody the version, and the trainers how many workers receive it."""
        version = metadata[0]["version"]  # trainers come first, the master first of them
        trainers = {"version": [version] * trainer_world_size, "receivers": [rollout_world_size] * trainer_world_size}
        rollouts = {"version": [version] * rollout_world_size, "receivers": [None] * rollout_world_size}
        return trainers, rollouts

    def init_process_group(self, *, version: int, receivers: int | None) -> None:
        """Prepare to publish ``version`` to ``receivers`` workers, or to receive it (None)."""
        self._version = version
        if receivers is None:
            if self._receiver is None:
                self._receiver = Receiver(self._transport)
            return
        if self._publisher is not None and self._receivers != receivers:
            self._publisher.close()  # replicas were added or removed
            self._publisher = None
        if self._publisher is None:
            self._publisher = Publisher(self._transport, bucket_bytes=self._bucket_bytes, receivers=receivers)
        self._receivers = receivers

    def finalize(self) -> None:
        """Do nothing: connections and plans are reused for the next version."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish all of ``weights``; returns when every rollout worker has them: metrics, on the master.

        global_steps: the trainer's step, for the metrics only: it may start again below the last version.
        """
        if self._publisher is None:
            raise ConfigError("send_weights before init_process_group: verl's manager calls that first")
        begun = time.monotonic()
        # On this thread: taking the next tensor may be a collective of the trainer's.
        share, total_bytes = self._share.copy(weights)
        copied = time.monotonic()
        published = await asyncio.to_thread(self._publisher.publish, share, self._version, self._timeout_s)
        self.global_steps = global_steps
        if not self._is_master:
            return {}  # verl merges the metrics of all trainer ranks: the last of them would count
        metrics = {
            "payload_mbytes": total_bytes / 2**20,
            "gather_s": copied - begun,
            "publish_s": published.seconds,
            "receivers": float(published.receivers),
            "lost_receivers": float(published.lost),
        }
        if global_steps is not None:
            metrics["global_steps"] = float(global_steps)
        return {f"checkpoint_engine/{name}": value for name, value in metrics.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the version, in host memory. With ``cache`` they must not be changed."""
        receiver, version = self._receiver, self._version
        if receiver is None:
            raise ConfigError("receive_weights before init_process_group: verl's manager calls that first")

        def receive(apply: Callable[[str, torch.Tensor], object]) -> None:
            receiver.receive(apply, version, self._timeout_s, self._streaming)

        if self._streaming:
            async for item in as_received(receive):
                yield item
            self.global_steps = global_steps
            return
        if self._cache:
            await asyncio.to_thread(self._receive_into_cache, receiver, version)
            self.global_steps = global_steps
            async for item in self.get_weights():
                yield item
            return
        whole: deque[tuple[str, torch.Tensor]] = deque()
        await asyncio.to_thread(receive, lambda name, tensor: whole.append((name, tensor)))
        self.global_steps = global_steps
        while whole:
            yield whole.popleft()

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the version that was received last, from the cache, as often as it is called.

        Raises `ConfigError` without ``cache``, before the first version, and if receiving the last one failed: its
        bytes are in the memory of the version before.
        """
        receiver = self._receiver
        if not self._cache or receiver is None or receiver.version is None or receiver.dirty:
            raise ConfigError(
                "no version in the cache: "
                + ("make the engine with cache=True" if not self._cache else "none was received completely since then"),
                field="cache",
            )
        for item in list(self._cached.items()):
            yield item

    def _receive_into_cache(self, receiver: Receiver, version: int) -> None:
        """Receive into the memory of the last version if it had the same tensors, else into new memory."""
        deadline = time.monotonic() + self._timeout_s
        if self._cached:
            try:
                # Streaming: nothing but this cache is written to, so a shadow of it would protect nothing.
                receiver.receive(self._cached, version, self._timeout_s, True)  # noqa: FBT003
            except StateMismatch:
                self._cached = {}
            else:
                return
        fresh: dict[str, torch.Tensor] = {}
        receiver.receive(fresh.__setitem__, version, max(_LOOK_S, deadline - time.monotonic()))
        self._cached = fresh


class HostShare:
    """This trainer rank's share of the weights in host memory, which one version after the other is copied into.

    dtype: floating point weights are cast to it; None: to nothing.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._held: dict[str, torch.Tensor] = {}

    def copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], int]:
        """Copy the share: each tensor is in one rank's. Returns it, valid until the next call, and all ranks' bytes."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        nbytes = [0] * world
        held, self._held = self._held, {}
        for name, tensor in weights:
            if compat.is_dtensor(tensor):
                raise ConfigError(f"{name} is a DTensor, but verl passes whole tensors; gather it first", field=name)
            if name in self._held:
                raise ConfigError(f"{name} was passed twice in one version", field=name)
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            owner = nbytes.index(min(nbytes))
            nbytes[owner] += max(1, tensor.numel() * dtype.itemsize)
            if owner != rank:
                continue
            memory = held.pop(name, None)
            if memory is None or memory.shape != tensor.shape or memory.dtype != dtype:
                memory = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._held[name] = memory.copy_(tensor.detach())
        return dict(self._held), sum(nbytes)


def share_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy this trainer rank's share of ``weights`` to new host memory: each tensor is in one rank's share."""
    return HostShare().copy(weights)[0]


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
