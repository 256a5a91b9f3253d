"""verl: a checkpoint engine by the name of ``holdfast``, which carries weights by any of Holdfast's transports.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: holdfast
      custom_backend_module: holdfast.sync.adapters.verl_backend      # where verl has it; else call `register` yourself
      engine_kwargs: {holdfast: {transport: shared_memory, place: /dev/shm/run-7}}

verl hands out weights one whole tensor at a time, the same on every trainer rank, and takes them again one at a time.
So each trainer rank copies its share of them, by bytes, into host memory, and all ranks publish them as one version;
each rollout worker receives that version, whole and verified, before it yields the first tensor of it.

Guarantees: a version that fails on its way costs the rollout nothing: no tensor of it is yielded (unless
``streaming``). Version numbers go up, also from one job to the next.
Assumes: every trainer rank is given all tensors, in the same order, as verl's engines for FSDP and Megatron do.
Does not: touch a device's memory on the trainer beside what verl gathers; send what a LoRA adapter alone has changed.

Written against verl 0.8 (``verl/checkpoint_engine/base.py`` of January 2026). Its parts are tested against a record of
that interface; a training run of verl itself, which needs GPUs, has not been made with it.
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
from holdfast.arguments import checked_seconds
from holdfast.errors import ConfigError
from holdfast.sync.adapters.transports import require, transport_of
from holdfast.sync.publisher import Publisher
from holdfast.sync.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

BACKEND: Final = "holdfast"
AHEAD: Final = 2
"""How many tensors a streaming receive may be ahead of who takes them."""
_LOOK_S: Final = 0.1


def register(backend: str = BACKEND) -> type:
    """Make the engine known to verl's ``CheckpointEngineRegistry`` as ``backend``; returns its class. Idempotent.

    Call it in every process of trainer and rollout before verl makes its engines. Raises `ConfigError` where verl is
    not installed.
    """
    base = require("verl.checkpoint_engine.base", "verl", why="this checkpoint engine")
    try:
        known: type = base.CheckpointEngineRegistry.get(backend)
    except KeyError:
        known = object
    if issubclass(known, VerlEngine):
        return known
    made = type("HoldfastCheckpointEngine", (VerlEngine, base.CheckpointEngine), {"__doc__": VerlEngine.__doc__})
    base.CheckpointEngineRegistry.register(backend)(made)
    return made


class VerlEngine:
    """What the engine does, without verl's base class; verl makes one in each trainer and rollout worker.

    Args:
        bucket_size: bytes of a bucket; verl gives it.
        is_master: whether this is trainer rank 0; verl gives it.
        transport: ``"shared_memory"`` (one host), ``"process_group"``, ``"nixl"`` or ``"directory"``.
        place: the rendezvous of the transport, or the directory of versions; the same for all workers.
        options: further arguments of the transport, by name.
        streaming: yield tensors as they come: takes no memory on the rollout side, but what has been yielded of a
            version that then fails is in the rollout's weights.
        timeout_s: seconds for one version, > 0.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,  # noqa: FBT001, FBT002 - verl's own
        *,
        transport: str = "shared_memory",
        place: str | None = None,
        options: Mapping[str, Any] | None = None,
        streaming: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._transport = transport_of(transport, place, dict(options or {}))
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._streaming = streaming
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._version = -1
        self._receivers: int | None = None
        self._publisher: Publisher | None = None
        self._receiver: Receiver | None = None

    # What verl calls, in this order, for each version. ----------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """The number of the next version, which the master's counts."""
        # Not one more than the last: a job that starts anew must go on above what is in a directory.
        return {"version": max(self._version + 1, time.time_ns() // 1_000_000)}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everybody is told the version, and trainers how many come for it."""
        version = metadata[0]["version"]  # trainers come first, the master first of them
        trainers = {"version": [version] * trainer_world_size, "receivers": [rollout_world_size] * trainer_world_size}
        rollouts = {"version": [version] * rollout_world_size, "receivers": [None] * rollout_world_size}
        return trainers, rollouts

    def init_process_group(self, *, version: int, receivers: int | None) -> None:
        """Get ready to publish ``version`` to ``receivers`` workers, or to receive it (None)."""
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
        """Nothing: connections and plans serve the next version too."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish all of ``weights``; returns when every rollout worker has them."""
        if self._publisher is None:
            raise ConfigError("send_weights before init_process_group: verl's manager calls that first")
        # Here, not on another thread: taking the next tensor may be a collective of the trainer's.
        share = share_of(weights)
        await asyncio.to_thread(self._publisher.publish, share, self._version, self._timeout_s)

    async def receive_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields every tensor of the version, in host memory."""
        receiver, version = self._receiver, self._version
        if receiver is None:
            raise ConfigError("receive_weights before init_process_group: verl's manager calls that first")

        def receive(apply: Callable[[str, torch.Tensor], object]) -> None:
            receiver.receive(apply, version, self._timeout_s, self._streaming)

        if self._streaming:
            async for item in as_received(receive):
                yield item
            return
        whole: deque[tuple[str, torch.Tensor]] = deque()
        await asyncio.to_thread(receive, lambda name, tensor: whole.append((name, tensor)))
        while whole:
            yield whole.popleft()


def share_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """This trainer rank's share of ``weights``, copied to host memory: each tensor is in one rank's share.

    It goes to the rank that has the fewest bytes so far, which every rank finds by itself.
    """
    grouped = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    nbytes = [0] * world
    share: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if compat.is_dtensor(tensor):
            raise ConfigError(f"{name} is a DTensor: verl hands out whole tensors; gather it first", field=name)
        owner = nbytes.index(min(nbytes))
        nbytes[owner] += max(1, tensor.numel() * tensor.element_size())
        if owner == rank:
            share[name] = tensor.detach().to("cpu", copy=True)
    return share


class _NobodyTakesIt(Exception):
    """Whoever iterated has gone."""


async def as_received(
    receive: Callable[[Callable[[str, torch.Tensor], None]], object],
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """What ``receive``, on a thread of its own, hands to the function that it is given; at most `AHEAD` ahead.

    Raises what ``receive`` raises, behind what it has handed over. Left early, it has ``receive`` end with an error.
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
