r"""Agree among publisher ranks on what a version looks like, and cut each rank's tensors into the pieces it sends.

    tensors -> look (does the structure stand?) -> looks of all ranks -> pieces
                \-> in the capture of a checkpoint? (``weights.from_capture``)

Guarantees: all ranks get the same looks, in the order of the ranks, or all fail with the same cause. A structure that
stands is not planned again, and travels once, and once more when some rank may have missed it. All ranks are in the
same rounds, whatever went wrong on one of them before: who comes to a round that was given up goes on to the next.
Assumes: all ranks publish in the same order, one thread each.
Does not: copy or send.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import xxhash

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Round, Rounds
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, HoldfastError
from holdfast.format.structure import SOURCE_MARK, Structure, decode_structure
from holdfast.state.entries import joined, known_dtype, local_tensor
from holdfast.sync.weights.buckets import row_bytes, unfit
from holdfast.sync.weights.from_capture import Captured, Shared, captured_of
from holdfast.sync.weights.pieces import Outgoing, WeightsSpec, entries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.coordination.board import Board
    from holdfast.coordination.deadline import Deadline
    from holdfast.coordination.group import Group
    from holdfast.saver.capture import SharedCaptures
    from holdfast.sync.weights.buckets import Piece
    from holdfast.sync.weights.pieces import Local, Weights


class RankSpec(msgspec.Struct, frozen=True, array_like=True):
    """Structure that a rank would publish, encoded if it is new; or why it can't publish."""

    rank: int
    version: int
    digest: str
    encoded: bytes | None = None
    failure: RankFailure | None = None
    unfit: RankFailure | None = None
    """Why these buckets can't carry it, whoever takes it."""
    capture: int | None = None
    """Of which save this rank has a capture of the same moment; None if of none."""
    apart: tuple[str, ...] = ()
    """Which of its weights that one lacks."""
    anew: bool = False
    """This rank hasn't heard all that was said: every one has to say all of it once more."""


class SpecExchange:
    """Exchange specs between ranks. ``structures``: all received ones by digest, and those that the caller adds."""

    def __init__(self, board: Board) -> None:
        self.structures: dict[str, Structure] = {}
        self._board = board
        self._rounds = Rounds(
            board,
            "looks",
            had_not="published this version",
            advice="every rank must call publish, with the same version; look at their logs, or raise the timeout",
        )
        self._told: set[str] = set()
        self._missed = False
        """Something that was said may not have been heard here."""

    def exchange(self, mine: RankSpec, deadline: Deadline) -> list[RankSpec]:
        """Return the specs of all ranks, including ``mine``; the structures that they name are in `structures`.

        Raises the error of any rank that failed, `ConfigError` if versions differ, and `DeadlineExceeded` if a rank
        doesn't answer, which it names.
        """
        while self._board.world > 1:
            is_known = mine.digest in self._told and not self._missed
            said = msgspec.structs.replace(mine, encoded=None if is_known else mine.encoded, anew=self._missed)
            self._missed = True
            self._rounds.skip_failed()
            round_ = self._rounds.next()
            round_.say(_encode(said))
            silent = functools.partial(_silent, round_, deadline)
            found = round_.wait(_encode, timeout_s=deadline.left_s(), grace_s=0.0, silent=silent, watch=True)
            if isinstance(found, RankFailure):
                raise found.cause()
            heard = list(map(_SPEC.decode, _WORDS.decode(found)))
            for said in heard:
                if said.encoded is not None and said.digest not in self.structures:
                    self.structures[said.digest] = decode_structure(said.encoded)
            self._told.add(mine.digest)
            is_anew = any(said.anew for said in heard)
            self._missed = is_anew or len(heard) < self._board.world
            _check_alike(heard)
            if not is_anew:
                return heard
            self._told.clear()
            self._missed = False
        return [mine]

    def fail(self, mine: RankSpec) -> None:
        """Tell the others why this rank can't publish; doesn't wait for them. Where all know already, say nothing."""
        self._missed = True
        with contextlib.suppress(HoldfastError):  # they will give up
            if self._board.world == 1 or self._rounds.skip_failed():
                return
            round_ = self._rounds.next()
            if self._board.rank:
                round_.say(_encode(mine))
            else:
                round_.announce(_encode([_encode(mine)]))  # nobody else would


_encode: Final = msgspec.msgpack.encode
_WORDS: Final = msgspec.msgpack.Decoder(list[bytes])
_SPEC: Final = msgspec.msgpack.Decoder(RankSpec)


def _silent(round_: Round, deadline: Deadline, words: Mapping[int, bytes], _: float) -> RankFailure:
    return round_.silence(words, deadline.timeout_s)


def _check_alike(found: list[RankSpec]) -> None:
    """Raise unless all ranks would publish, and the same version."""
    for said in found:
        if said.failure is not None:
            raise said.failure.cause()
    first = found[0]
    for said in found:
        if said.version != first.version:
            raise ConfigError(
                f"publisher rank {first.rank} publishes version {first.version}, but rank {said.rank} version "
                f"{said.version}; all ranks must publish the same version",
                field="version",
            )


class CutWeights(NamedTuple):
    """Pieces of one version that this rank sends. ``lying``: numbers of the pieces in ``captured``."""

    table: tuple[Piece, ...]
    digest: str
    pieces: list[Local]
    lying: frozenset[int] = frozenset()
    captured: Captured | None = None
    unfit: HoldfastError | None = None


class AgreedLook(NamedTuple):
    """Tensors that this rank publishes, and the combined specs of all ranks.

    ``apart``: the names that aren't taken from the capture; None if none are.
    """

    weights: Weights
    look: WeightsSpec
    captured: Captured | None
    digests: tuple[str, ...]
    apart: frozenset[str] | None
    unfit: HoldfastError | None


class WeightsAgreement:
    """One publisher rank's part in agreeing on each version.

    bucket_bytes: size of the buckets that rows must fit into; None: any size fits. refuses_unfit: all ranks raise if
    one has a row that doesn't fit; otherwise `CutWeights.unfit` says so. captures: of the manager that saves these
    weights.
    """

    def __init__(
        self,
        group: Group,
        captures: SharedCaptures | None,
        *,
        bucket_bytes: int | None = None,
        refuses_unfit: bool = False,
    ) -> None:
        self._group = group
        self._captures = captures
        self._bucket_bytes = bucket_bytes
        self._refuses_unfit = refuses_unfit
        self._look: WeightsSpec | None = None
        self._unfit: HoldfastError | None = None
        self._exchange = SpecExchange(group.board)
        self._outgoing: tuple[WeightsSpec, tuple[str, ...], Outgoing, str] | None = None
        self._shared: tuple[Shared, str] | None = None
        self.newest_out = -1
        """Versions up to this one are out already."""

    def agree(self, given: Callable[[], Weights], version: int, deadline: Deadline) -> AgreedLook:
        """Return once all ranks would publish this version; raise what one of them met."""
        rank, structures = self._group.rank, self._exchange.structures
        try:
            weights, look, captured = self._look_at(given, version, deadline)
        except BaseException as error:
            self._exchange.fail(RankSpec(rank, version, "", failure=RankFailure.of(error, rank=rank)))
            raise
        if look is not self._look:
            self._unfit = None if self._bucket_bytes is None else _unfit(weights, self._bucket_bytes)
        number = None if captured is None else captured.number
        apart = () if captured is None else tuple(set(look.names).difference(captured.names))
        reason = None if self._unfit is None else RankFailure.of(self._unfit, rank=rank)
        mine = RankSpec(rank, version, look.digest, look.encoded, unfit=reason, capture=number, apart=apart)
        structures[look.digest] = look.structure
        found = self._exchange.exchange(mine, deadline)
        digests = tuple(said.digest for said in found)
        if not any(structures[digest].tensors for digest in digests):
            raise ConfigError(
                "weights is empty: there is nothing to publish; an iterator gives its tensors once", field="weights"
            )
        misfit = next((said.unfit.cause() for said in found if said.unfit is not None), None)
        if misfit is not None and self._refuses_unfit:
            raise misfit
        self._look = look
        is_shared = number is not None and all(said.capture == number for said in found)
        names = frozenset(name for said in found for name in said.apart) if is_shared else None
        return AgreedLook(weights, look, captured, digests, names, misfit)

    def _look_at(
        self, given: Callable[[], Weights], version: int, deadline: Deadline
    ) -> tuple[Weights, WeightsSpec, Captured | None]:
        weights, look = given(), self._look
        if version <= self.newest_out:
            raise ConfigError(
                f"version {version} isn't greater than {self.newest_out}, which receivers already have",
                field="version",
            )
        if look is None or not look.stands(weights):
            look = WeightsSpec(weights, rank=self._group.rank, group_ranks=self._group.ranks)
        held = None if self._captures is None else self._captures.held
        return weights, look, None if held is None else captured_of(held, look, weights, timeout_s=deadline.left_s())

    def names_of(self, agreed: AgreedLook) -> set[str]:
        """Return the names that all ranks publish together."""
        structures = [self._exchange.structures[digest] for digest in set(agreed.digests)]
        return {spec.name.partition(SOURCE_MARK)[0] for structure in structures for spec in structure.tensors}

    def cut(self, agreed: AgreedLook) -> CutWeights:
        """Cut the tensors into the pieces that this rank sends."""
        look, captured = agreed.look, agreed.captured
        made = self._outgoing
        if made is None or made[0] is not look or made[1] != agreed.digests:
            outgoing = Outgoing(look, self._exchange.structures, agreed.digests)
            made = self._outgoing = look, agreed.digests, outgoing, digest_of(outgoing.table)
        pieces = made[2].locals(agreed.weights)
        if captured is None or agreed.apart is None:
            return CutWeights(made[2].table, made[3], pieces, unfit=agreed.unfit)
        if self._shared is None or not self._shared[0].is_for(captured, made[2], agreed.apart):
            shared = Shared(captured, made[2], look, agreed.apart)
            self._shared = shared, made[3] if shared.table is made[2].table else digest_of(shared.table)
        shared, digest = self._shared
        return CutWeights(shared.table, digest, shared.locals(captured, pieces), shared.lying, captured, agreed.unfit)


def _unfit(weights: Weights, bucket_bytes: int) -> HoldfastError | None:
    """Why this rank's tensors can't be sent in buckets of so many bytes, if they can't."""
    for entry in entries_of(weights):
        local, dtype = local_tensor(entry.tensor), entry.stored_as or known_dtype(entry.tensor, entry.name)
        row = row_bytes(local.shape, ITEMSIZE[dtype])
        if row > bucket_bytes and local.numel():
            shape = entry.tensor.shape if entry.place is None else entry.place.shape
            return unfit(joined(entry.path), dtype, shape, row, bucket_bytes)
    return None


def digest_of(table: Sequence[Piece]) -> str:
    """Return the digest that identifies a table."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(table))
