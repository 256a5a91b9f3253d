"""Fill the images of an export: copy what this rank holds, and exchange the rest with other ranks.

    fill_local, run_copies    the copies of a rank plan (``staging.copier``)
    Exchange                  rounds of bounded buckets over separate connections

Ranks send to one another point to point, not all to all, which is as fast: a rank knows whom it waits for and can say
so, and ranks without messages for one another don't wait. While one round is in transit, the next is filled.

Guarantees: an element arrives as ``tensor.to(dtype)`` would make it, bit for bit where the dtype stays. Copies are made
in batches on the calling thread alone. Python's work grows with the number of copies and of pieces of some 20,000
elements. `Exchange.run` ends within its deadline and three times the grace of a `RollCall`, whatever becomes of other
ranks. It raises the same cause on every rank, which names the rank that did not answer. It ends early when the attempt
is given up, or when another rank has failed. Buckets take twice what the plan says of a round; nothing else of size is
allocated. Links that have failed are never used again, and closing them waits for nobody.
Assumes: memories are contiguous host memory that doesn't change meanwhile, each as long as the plan says, aligned to
its elements; images and buckets are aligned to 16 bytes. All ranks carry out the same plan under the same key, off the
training thread, one exchange at a time.
Does not: decide what is copied or who sends it (``export.plan``), or wait until others have made their images durable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import StridedIndex
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.links import GlooLinks, LinkLost, PeerLate, is_gloo_available, prefix_store
from holdfast.coordination.store import BoardLost, clone_store
from holdfast.coordination.votes import GRACE_S, Answer, RollCall, meet
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.export.fp8 import find_scales
from holdfast.export.inputs import OnDemand
from holdfast.export.rank_plan import BUCKET, BUCKETS
from holdfast.staging.copier import ByteMemory, CopyList, elements_of, views_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from holdfast.coordination.board import Board
    from holdfast.coordination.links import Links, TransferHandle
    from holdfast.export.fp8 import Scales
    from holdfast.export.rank_plan import Copy, PeerMessage, RankExportPlan, TransferRound


def check_memories(plan: RankExportPlan, memories: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` unless ``memories`` are what ``plan.memories`` says, as one-dimensional bytes."""
    if len(memories) != len(plan.memories):
        raise ConfigError(f"{len(memories)} memories for a plan that copies from {len(plan.memories)}")
    if isinstance(memories, OnDemand):
        return  # made of what the plan says, when they are needed
    dtypes = {copy.source: copy.source_dtype for copy in plan.local}
    for turn in plan.rounds:
        dtypes.update({copy.source: copy.source_dtype for message in turn.sends for copy in message.copies})
    for number, (memory, wanted) in enumerate(zip(memories, plan.memories, strict=True)):
        nbytes = prod(wanted.sizes) * ITEMSIZE[dtypes[number]] if number in dtypes else memory.numel()
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.numel() != nbytes:
            raise ConfigError(
                f"rank {plan.rank}: the staged part of {wanted.source!r} is {memory.dtype} {tuple(memory.shape)}, "
                f"expected {nbytes} contiguous bytes: {list(wanted.sizes)} elements of {dtypes.get(number)}",
                field=wanted.source,
            )


def fill_local(
    plan: RankExportPlan,
    memories: Sequence[torch.Tensor],
    image: torch.Tensor,
    *,
    scales: Scales | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Write all of the image that needs nobody else: headers, and what the rank has itself.

    memories: for each of ``plan.memories`` its bytes. image: ``plan.image_bytes`` of writable host memory (uint8).
    scales: of what is quantized, where anything is (``fp8.find_scales``).
    between: called between batches, at least every 32 MiB; what it raises ends the work.
    """
    check_memories(plan, memories)
    if image.dtype != torch.uint8 or image.dim() != 1 or image.numel() < plan.image_bytes:
        raise ConfigError(
            f"rank {plan.rank}: an image of {tuple(image.shape)} {image.dtype}, expected {plan.image_bytes} bytes"
        )
    host = compat.host_memory(image)
    for at, constant in plan.constants:
        host[at : at + len(constant)] = constant
    run_copies(plan.local, memories, image, scales=scales, between=between)


def run_copies(
    copies: Iterable[Copy],
    memories: Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    bucket: torch.Tensor | None = None,
    scales: Scales | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Make ``copies`` into ``target`` (uint8), from ``memories`` or from ``bucket``."""
    made = memories if isinstance(memories, OnDemand) else None
    waiting, into = CopyList(), ByteMemory(target)
    for copy in copies:
        if made is not None and waiting.targets and copy.source != BUCKET and not made.is_here(copy.source):
            # What waits to be copied keeps its memory, also of what is dropped for the next.
            waiting.make()
            between()
        memory = bucket if copy.source == BUCKET else memories[copy.source]
        if memory is None:
            raise AssertionError("a copy from a bucket where there is none")
        if copy.scaled is not None:
            if scales is None:
                raise AssertionError("a copy of what is to be quantized, without scales")
            with torch.no_grad():
                scales.quantize(copy, memory, into)
            between()
            continue
        for view, source in _views(copy, memory, into):
            waiting.push(view, source)
            if waiting.is_full:
                waiting.make()
                between()
    waiting.make()


def _views(copy: Copy, memory: torch.Tensor, target: ByteMemory) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if copy.source_dtype == copy.target_dtype:
        width, index = StridedIndex(
            copy.counts, copy.source_at, copy.source_strides, copy.target_at, copy.target_strides
        ).in_words(ITEMSIZE[copy.source_dtype])
        source_type = target_type = compat.SAME_SIZE_INT[width]
    else:
        source_type, target_type = getattr(torch, copy.source_dtype), getattr(torch, copy.target_dtype)
        source_at, rest = divmod(copy.source_at, source_type.itemsize)
        target_at, over = divmod(copy.target_at, target_type.itemsize)
        if rest or over:
            raise AssertionError(f"{copy} begins within an element")
        index = StridedIndex(copy.counts, source_at, copy.source_strides, target_at, copy.target_strides).merged()
    return views_of(index, elements_of(memory, source_type), target.elements(target_type))


_log = logging.getLogger("holdfast")

LOOK_S: Final = 0.5
"""Interval at which a rank checks if another has failed or the attempt was aborted, in groups of up to 8,000 ranks."""
_LOOKS_PER_S: Final = 16_000
_STOP_S: Final = 5.0
SCALES_TAG: Final = 1 << 20
"""Tag above the numbers of rounds: a rank that has all scales may begin with rounds while others still wait for
theirs.
"""
_T = TypeVar("_T")


class Exchange:
    """The links of one session, made when first needed and kept. For one thread."""

    def __init__(self, board: Board, make_links: Callable[[str, float], Links], *, grace_s: float = GRACE_S) -> None:
        """make_links(name, timeout_s): links to all other ranks, which make theirs under the same name."""
        self._board = board
        self._make_links = make_links
        self._grace_s = grace_s
        self._links: Links | None = None
        self._after = "first"
        """Name of new links: the last attempt that failed."""

    @classmethod
    def over_gloo(cls, board: Board, store: Any, prefix: str, *, grace_s: float = GRACE_S) -> Exchange:
        """Links over gloo, which find one another through ``store`` under names that begin with ``prefix``."""
        if not is_gloo_available():
            raise ConfigError("an export by several ranks needs torch.distributed with gloo; this torch has none")
        own = clone_store(store)

        def make_links(name: str, timeout_s: float) -> Links:
            place = prefix_store(f"{prefix}/{name}", own)
            return GlooLinks(place, board.rank, board.world, timeout_s=timeout_s)

        return cls(board, make_links, grace_s=grace_s)

    def find_scales(
        self,
        plan: RankExportPlan,
        memories: Sequence[torch.Tensor],
        image: torch.Tensor,
        *,
        key: str,
        timeout_s: float,
        given_up: Callable[[], RankFailure | None] = lambda: None,
    ) -> Scales:
        """The scales that this rank needs of what is quantized; those that are its to write go to ``image``.

        Comes before copies and `run`, on all ranks. Arguments and errors are those of `run`.
        """
        if not plan.grids or plan.world == 1:
            return find_scales(plan, memories, image)

        def find(links: Links, deadline: float) -> Scales:
            check_memories(plan, memories)
            largest = _Largest(links, plan.rank, plan.world, deadline)
            return find_scales(plan, memories, image, largest_of_all=largest)

        return self._together(f"{key}/scales", key, timeout_s, given_up, find)

    def run(
        self,
        plan: RankExportPlan,
        memories: Sequence[torch.Tensor],
        image: torch.Tensor,
        *,
        key: str,
        timeout_s: float,
        scales: Scales | None = None,
        given_up: Callable[[], RankFailure | None] = lambda: None,
    ) -> None:
        """Send what others need of ``memories`` and write what they send into ``image``; returns when both is done.

        key: of the attempt: the same on all ranks, and never used again. timeout_s: for all of it.
        given_up: says why the attempt has been given up, if it has; asked about twice a second, on any thread.

        Raises:
            DeadlineExceeded: a rank did not answer in time. SaveFailed: one ended. The same on every rank.
            HoldfastError: what ``given_up`` says, or what went wrong on one rank, on all of them.
        """
        if not plan.rounds:
            return  # nowhere: there is nobody to wait for
        work = _Work(plan, memories, image, scales)
        self._together(f"{key}/rounds", key, timeout_s, given_up, work.run)

    def _together(
        self,
        name: str,
        key: str,
        timeout_s: float,
        given_up: Callable[[], RankFailure | None],
        work: Callable[[Links, float], _T],
    ) -> _T:
        """Do this rank's part of what all do; where any fails, all do."""
        deadline = time.monotonic() + timeout_s
        roll = RollCall(self._board, name, grace_s=self._grace_s)
        place = f"links/{self._after}"
        if self._links is None:
            try:
                meet(self._board, place, timeout_s=timeout_s, given_up=given_up)
            except BaseException:
                self.give_up(key)
                raise
        try:
            links = self._links
            if links is None:  # all have come to make them: it can't be ended
                links = self._links = self._make_links(place, max(1.0, deadline - time.monotonic()))
            with _Watch(links, roll, given_up, look_s=max(LOOK_S, self._board.world / _LOOKS_PER_S)):
                result = work(links, deadline)
            roll.say_done()
        except BaseException as error:
            self.give_up(key)
            reason = _asked(given_up)
            if reason is not None:
                raise reason.cause() from error
            if not isinstance(error, Exception):
                raise
            raise _settled(roll, _answer(error, self._board.rank)) from error
        return result

    def give_up(self, key: str) -> None:
        """The attempt ``key`` has failed: its links are closed, and the next attempt makes new ones. Idempotent.

        To be called on every rank for every attempt that fails, whatever the cause.
        """
        self.close()
        self._after = key

    def forget(self, key: str) -> None:
        """Remove what ranks have told one another. By one rank, when all know the outcome of the attempt."""
        for name in ("scales", "rounds"):
            RollCall(self._board, f"{key}/{name}").forget()

    def close(self) -> None:
        """Close the links; idempotent, waits for nobody: others may still be reading what this rank has sent them.

        So, but for a failure, it is for when the outcome of the last attempt is known.
        """
        links, self._links = self._links, None
        if links is not None:
            links.abort()


def _settled(roll: RollCall, answer: Answer) -> HoldfastError:
    try:
        return roll.settle(answer)
    except BoardLost as error:
        # Nobody can be asked, so nobody can agree: this is what it looks like from here.
        _log.warning("the ranks can't agree on why an export failed: %s", error)
        return answer.reason().cause()


def _asked(given_up: Callable[[], RankFailure | None]) -> RankFailure | None:
    try:
        return given_up()
    except BoardLost:
        return None  # then what happened here is all there is to say


def _answer(error: Exception, rank: int) -> Answer:
    """Return the message that tells other ranks about ``error``."""
    if isinstance(error, _Failed):
        return Answer(rank, error.round, waited_for=error.peer, late_s=error.late_s, detail=error.detail)
    return Answer(rank, 0, own=RankFailure.of(error, rank=rank))


class _Failed(Exception):
    """The exchange can't go on, because of ``peer``."""

    def __init__(self, peer: int, number: int, late_s: float | None, detail: str) -> None:
        super().__init__(f"rank {peer}: {detail}")
        self.peer = peer
        self.round = number
        self.late_s = late_s
        self.detail = detail


class _Work:
    """One rank's part of the rounds of one attempt."""

    def __init__(
        self, plan: RankExportPlan, memories: Sequence[torch.Tensor], image: torch.Tensor, scales: Scales | None
    ) -> None:
        self._plan = plan
        self._memories = memories
        self._image = image
        self._scales = scales

    def run(self, links: Links, deadline: float) -> None:
        check_memories(self._plan, self._memories)
        turns = [(number, turn) for number, turn in enumerate(self._plan.rounds) if turn.sends or turn.receives]
        buckets = [torch.empty(self._plan.bucket_bytes, dtype=torch.uint8) for _ in range(min(BUCKETS, len(turns)))]
        under_way: deque[_UnderWay] = deque()
        for number, turn in turns:
            if not buckets:
                buckets.append(self._finish(under_way.popleft(), deadline))
            under_way.append(self._start(links, number, turn, buckets.pop()))
        while under_way:
            self._finish(under_way.popleft(), deadline)

    def _start(self, links: Links, number: int, turn: TransferRound, bucket: torch.Tensor) -> _UnderWay:
        # What is to come first: it needs no work of ours, and who sends it may be waiting.
        receives = [
            (message, _start(links.receive, message.peer, _place(message, bucket), number)) for message in turn.receives
        ]
        sends = []
        for message in turn.sends:
            run_copies(message.copies, self._memories, bucket, scales=self._scales)
            sends.append((message, _start(links.send, message.peer, _place(message, bucket), number)))
        return _UnderWay(number, bucket, receives, sends)

    def _finish(self, turn: _UnderWay, deadline: float) -> torch.Tensor:
        """Wait for a round, and take what came to the image. Returns its bucket."""
        for message, transfer in turn.receives:
            _wait(message.peer, transfer, turn.number, deadline)
            run_copies(message.copies, (), self._image, bucket=turn.bucket)
        for message, transfer in turn.sends:
            _wait(message.peer, transfer, turn.number, deadline)
        return turn.bucket


class _UnderWay(NamedTuple):
    """A round that has been started: its messages, and their bucket."""

    number: int
    bucket: torch.Tensor
    receives: list[tuple[PeerMessage, TransferHandle]]
    sends: list[tuple[PeerMessage, TransferHandle]]


class _Largest:
    """Finds the largest numbers of all ranks: each rank those of a stretch, which it then tells everyone."""

    def __init__(self, links: Links, rank: int, world: int, deadline: float) -> None:
        self._links = links
        self._rank = rank
        self._peers = [peer for peer in range(world) if peer != rank]
        self._world = world
        self._deadline = deadline
        self._number = 0

    def __call__(self, found: torch.Tensor) -> None:
        cuts = [found.numel() * part // self._world for part in range(self._world + 1)]
        stretches = [found[start:stop] for start, stop in pairwise(cuts)]
        mine = stretches[self._rank]
        theirs = {peer: torch.empty_like(mine) for peer in self._peers}
        self._swap(theirs, {peer: stretches[peer] for peer in self._peers})
        for stretch in theirs.values():
            torch.maximum(mine, stretch, out=mine)
        self._swap({peer: stretches[peer] for peer in self._peers}, dict.fromkeys(self._peers, mine))

    def _swap(self, into: Mapping[int, torch.Tensor], out_of: Mapping[int, torch.Tensor]) -> None:
        tag = SCALES_TAG + self._number
        self._number += 1
        transfers = [
            (peer, _start(act, peer, memory.view(torch.uint8), tag))
            for act, memories in ((self._links.receive, into), (self._links.send, out_of))
            for peer, memory in memories.items()
            if memory.numel()
        ]
        for peer, transfer in transfers:
            _wait(peer, transfer, self._number, self._deadline)


def _place(message: PeerMessage, bucket: torch.Tensor) -> torch.Tensor:
    return bucket[message.at : message.at + message.nbytes]


def _start(
    start: Callable[[int, torch.Tensor, int], TransferHandle], peer: int, memory: torch.Tensor, number: int
) -> TransferHandle:
    try:
        return start(peer, memory, number)
    except LinkLost as error:
        raise _Failed(peer, number, None, str(error)) from error


def _wait(peer: int, transfer: TransferHandle, number: int, deadline: float) -> None:
    left_s = max(0.001, deadline - time.monotonic())
    try:
        transfer.wait(left_s)
    except PeerLate as error:
        raise _Failed(peer, number, left_s, str(error)) from error
    except LinkLost as error:
        raise _Failed(peer, number, None, str(error)) from error


class _Watch:
    """Ends the links when another rank has failed, or the attempt is given up: nobody else would end our waits."""

    def __init__(
        self, links: Links, roll: RollCall, given_up: Callable[[], RankFailure | None], *, look_s: float
    ) -> None:
        self._links = links
        self._roll = roll
        self._given_up = given_up
        self._look_s = look_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="holdfast-exchange-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_STOP_S)  # it may be within a request to the board, which has a deadline of its own

    def _look(self) -> None:
        while not self._over.wait(self._look_s):
            try:
                if self._given_up() is None and not self._roll.is_stopped():
                    continue
            except HoldfastError as error:
                _log.warning("can't see whether other ranks still exchange: %s", error)
                continue
            self._links.abort()
            return


# Fill a rank's export image: scales first, then its own bytes, then those of other ranks.


def make_image(
    plan: RankExportPlan,
    memories: Sequence[torch.Tensor],
    image: torch.Tensor,
    exchange: Exchange | None,
    *,
    key: str,
    deadline: float,
    given_up: Callable[[], RankFailure | None],
) -> None:
    """Fill ``image`` by ``plan`` from ``memories``; every rank calls it, under the same ``key``.

    deadline: monotonic. given_up: says why the attempt is given up, if it is. Raises what ends it, or
    `DeadlineExceeded`.
    """

    def check() -> None:
        reason = given_up()
        if reason is not None:
            raise reason.cause()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"rank {plan.rank}: the export was not ready to be written within `persist_timeout`",
                waited_for="the export image",
                timeout_s=0.0,
            )

    def left_s() -> float:
        return max(1.0, deadline - time.monotonic())

    if exchange is None:
        fill_local(plan, memories, image, scales=find_scales(plan, memories, image, between=check), between=check)
        return
    scales = exchange.find_scales(plan, memories, image, key=key, timeout_s=left_s(), given_up=given_up)
    fill_local(plan, memories, image, scales=scales, between=check)
    exchange.run(plan, memories, image, key=key, timeout_s=left_s(), scales=scales, given_up=given_up)
