"""Which block holds which version: whatever publishers and readers do, kept versions stay and memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.errors import CheckpointNotFound
from holdfast.sync.versions.books import Books

KEEP, MAX = 2, 4


class BooksMachine(RuleBasedStateMachine):
    """A publisher rank's books beside what memory would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(keep=KEEP, max_blocks=MAX)
        self.next = 1
        self.written: dict[int, int] = {}
        """By number of a block: the version whose bytes it has."""
        self.epochs: dict[int, int] = {}
        self.published: list[int] = []
        self.pins: set[int] = set()
        self.staged: int | None = None
        self.leases: list[tuple[str, int, int, int]] = []
        """Reader, block, epoch, version."""

    @precondition(lambda self: self.staged is None)
    @rule(
        nbytes=st.sampled_from([100, 150, 1000]),
        how=st.sampled_from(["staged", "aborted", "discarded", "unfinished"]),
    )
    def fill(self, nbytes: int, how: str) -> None:
        kept = {block.number: block.epoch for block in self.books._held.values()}
        block = self.books.begin(self.next, nbytes).block
        assert block.number not in kept, "a kept version would be overwritten"
        assert block.nbytes >= nbytes
        gone = [number for number in self.written if self.books.epoch_of(number) is None]
        assert not kept.keys() & set(gone)
        is_new = block.number not in self.written
        assert not is_new or block.number > max(self.written, default=0), "it would be taken for an earlier one"
        assert block.epoch > self.epochs.get(block.number, 0)
        for number in gone:
            del self.written[number]
        self.epochs[block.number] = block.epoch
        if how == "unfinished":
            self.written[block.number] = self.next
            self.next += 1
            return
        if how == "discarded" and is_new:
            self.books.discard(block)
            del self.epochs[block.number]
            return
        self.written[block.number] = self.next
        if how == "staged":
            self.books.staged(self.next, b"%d" % self.next)
            self.staged = self.next
        else:
            self.books.abort(self.next)
            self.epochs[block.number] = block.epoch
        self.next += 1

    @precondition(lambda self: self.staged is not None)
    @rule(how=st.sampled_from(["published", "published twice", "aborted", "unfinished"]))
    def settle(self, how: str) -> None:
        assert self.staged is not None
        if how.startswith("published"):
            for _ in how.split():
                self.books.publish(self.staged)
            self.published.append(self.staged)
            assert self.books.newest == self.staged
        elif how == "aborted":
            self.books.abort(self.staged)
        self.staged = None

    @rule(reader=st.sampled_from("abc"), back=st.integers(0, 5))
    def lease(self, reader: str, back: int) -> None:
        version = self.next - 1 - back
        try:
            lease = self.books.lease(reader, version, b"%d" % version)
        except CheckpointNotFound:
            assert version not in self.books.versions
            return
        assert self.written[lease.block.number] == version, "a lease on other bytes"
        self.leases.append((reader, lease.block.number, lease.epoch, version))

    @rule(back=st.integers(1, 3))
    def lease_of_another(self, back: int) -> None:
        if self.staged is not None:
            with pytest.raises(CheckpointNotFound):
                self.books.lease("a", self.staged, b"another")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        reader, block, epoch, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.books.release(reader, block, epoch)

    @rule(reader=st.sampled_from("abc"))
    def end(self, reader: str) -> None:
        self.books.forget(reader)
        self.leases = [lease for lease in self.leases if lease[0] != reader]

    @rule(back=st.integers(0, 3), on=st.booleans())
    def pin(self, back: int, on: bool) -> None:
        version = self.next - 1 - back
        if on and version in self.books.versions:
            self.books.pin(version)
            self.pins.add(version)
        elif not on:
            self.books.unpin(version)
            self.pins.discard(version)

    @rule()
    def prepare(self) -> None:
        if self.books.lacks_blocks:
            block = self.books.add(1000)
            assert block is not None
            self.written[block.number], self.epochs[block.number] = -1, 0

    @invariant()
    def kept_versions_are_whole(self) -> None:
        for version in self.books.versions:
            block = self.books._held[version]
            assert self.written[block.number] == version
        assert set(self.published[-KEEP:]) <= set(self.books.versions)
        assert self.pins <= set(self.books.versions)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.books.blocks <= MAX + len(self.pins)

    @invariant()
    def an_epoch_says_whether_the_bytes_are_still_there(self) -> None:
        for _, block, epoch, version in self.leases:
            if self.epochs.get(block) == epoch and block in self.books._blocks:
                assert self.books._blocks[block].epoch != epoch or self.written[block] == version


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_reader_that_hangs_costs_one_block_and_is_revoked_first() -> None:
    books = Books(keep=1, max_blocks=3)

    def publish(version: int) -> Any:
        filling = books.begin(version, 100)
        books.staged(version, b"")
        books.publish(version)
        return filling

    publish(1)
    books.lease("hangs", 1, b"")
    publish(2)
    books.lease("reads", 2, b"")
    publish(3)
    filling = publish(4)  # blocks of 1 and 2 are held by readers: the one of 1 since longer
    assert (filling.revoked, filling.block.number, books.blocks) == (("hangs",), 1, 3)
    books.forget("reads")
    assert not publish(5).revoked
    assert books.blocks == 3


def test_books_that_could_not_fill_another_version_are_refused() -> None:
    with pytest.raises(AssertionError, match="2 blocks can't keep 2 versions"):
        Books(keep=2, max_blocks=2)
