"""`FanOut`: how a version or a delta spreads to up to 1,024 receivers, in simulated time; hops die, stop, or lie."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from holdfast.sync.versions.fanout import FanOut, RunOutcome, RunSource, bits_between

RATE = 1000.0
"""Extents a second on each link, each way: about 1 GB/s."""
LANES = 2
SILENCE_S = 2.0
"""After so long a receiver gives up a source that sends nothing."""
SOON_S = 0.002
LATEST_S = 0.16


@dataclass
class Peer:
    wanted: int
    begins_s: float = 0.0
    here: int = 0
    doing: int = 0
    uploads: int = 0
    downloads: int = 0
    state: str = "well"  # or "dead", "stopped", "lies"
    done_s: float | None = None
    waits_since_s: float = 0.0
    pause_s: dict[int, float] = field(default_factory=dict)


class Fleet:
    """Receivers that follow `FanOut`, as `versions.peers` does; events in order of their time."""

    def __init__(self, receivers: int, extents: int) -> None:
        self.fan, self.extents = FanOut(extents), extents
        self.peers = {f"r{n}": Peer(bits_between(0, extents)) for n in range(receivers)}
        self.sent: Counter[str] = Counter()
        self.uploads = 0
        self.now_s = 0.0
        self.events: list[tuple[float, int, str, int, RunSource | None]] = []
        self.number = 0

    def at(self, when_s: float, name: str, lane: int, source: RunSource | None = None) -> None:
        self.number += 1
        heapq.heappush(self.events, (when_s, self.number, name, lane, source))

    def run(self, ills: dict[str, tuple[float, str]] | None = None) -> float:
        """Play until all that are well have all; return when. ills: by name, when it falls into which state."""
        for name, (when_s, state) in (ills or {}).items():
            self.at(when_s, name, -1, RunSource(0, 0, 0, state))
        for name, peer in self.peers.items():
            peer.waits_since_s = peer.begins_s
            for lane in range(LANES):
                self.at(peer.begins_s, name, lane)
        while any(peer.done_s is None and peer.state in ("well", "lies") for peer in self.peers.values()):
            self.now_s, _, name, lane, source = heapq.heappop(self.events)
            assert self.now_s < 600, "it doesn't end"
            peer = self.peers[name]
            if lane < 0:
                assert source is not None
                peer.state = source.holder
                if peer.state == "dead":
                    self.fan.forget(name)
            elif peer.state in ("well", "lies"):
                if source is not None:
                    peer.pause_s[lane] = SOON_S
                    if self.end(name, source) == RunOutcome.HERE:
                        peer.waits_since_s = self.now_s
                self.step(name, lane)
        return self.now_s

    def step(self, name: str, lane: int) -> None:
        peer = self.peers[name]
        lacking = peer.wanted & ~peer.here & ~peer.doing
        if not lacking:
            if peer.wanted == peer.here and peer.done_s is None:
                peer.done_s = self.now_s
            elif peer.done_s is None:
                self.at(self.now_s + SOON_S, name, lane)
            return
        source = self.fan.ask(name, lacking, self.now_s - peer.waits_since_s, self.now_s)
        if source is None:
            pause = peer.pause_s[lane] = min(LATEST_S, 2 * peer.pause_s.get(lane, SOON_S))
            self.at(self.now_s + pause, name, lane)
            return
        run = bits_between(source.start, source.end)
        assert run & lacking == run, "only what is lacking is named"
        assert source.holder != name
        peer.doing |= run
        peer.downloads += 1
        holder = self.peers.get(source.holder)
        if holder is None:
            self.uploads += 1
            busy = self.uploads
        else:
            holder.uploads += 1
            busy = holder.uploads
            if holder.state in ("dead", "stopped"):
                self.at(self.now_s + (SILENCE_S if holder.state == "stopped" else SOON_S), name, lane, source)
                return
        self.at(self.now_s + (source.end - source.start) * max(busy, peer.downloads) / RATE, name, lane, source)

    def end(self, name: str, source: RunSource) -> RunOutcome:
        peer, run = self.peers[name], bits_between(source.start, source.end)
        peer.doing &= ~run
        peer.downloads -= 1
        holder = self.peers.get(source.holder)
        outcome = RunOutcome.HERE
        if holder is None:
            self.uploads -= 1
            self.sent["publisher"] += source.end - source.start
        else:
            holder.uploads -= 1
            if holder.state != "well":
                outcome = RunOutcome.FAILED
            else:
                assert holder.here & run == run, "only what a holder has is named"
                self.sent[source.holder] += source.end - source.start
        if outcome == RunOutcome.HERE:
            peer.here |= run
        self.fan.brought(name, source.number, peer.here, outcome)
        return outcome

    @property
    def publisher_sent(self) -> float:
        """How many times the publisher's link carried the version."""
        return self.sent["publisher"] / self.extents


@pytest.mark.parametrize(("receivers", "extents"), [(1, 256), (2, 256), (8, 256), (64, 1024), (1024, 2048)])
def test_the_publishers_link_carries_a_version_about_once(receivers: int, extents: int) -> None:
    fleet = Fleet(receivers, extents)
    took_s = fleet.run()
    assert fleet.publisher_sent <= 1.05
    assert took_s <= 3.0 * extents / RATE + 0.5  # from one link to each: receivers x extents / RATE


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ill", ["dead", "stopped", "lies"])
def test_hops_that_die_stop_or_lie_are_routed_around(ill: str, seed: int) -> None:
    choose = random.Random(seed)
    fleet = Fleet(64, 1024)
    ills = {f"r{n}": (choose.uniform(0.0, 1.5), ill) for n in choose.sample(range(64), 6)}
    took_s = fleet.run(ills)
    assert fleet.publisher_sent <= (1.6 if ill == "stopped" else 1.3)
    assert took_s <= 3.0 * 1024 / RATE + 4 * SILENCE_S
    well = [peer for peer in fleet.peers.values() if peer.state == "well"]
    assert all(peer.here == peer.wanted for peer in well)
    assert len(well) >= 58


@pytest.mark.parametrize("extents", [1, 7, 31])
@pytest.mark.parametrize("receivers", [1, 2, 8, 64, 1024])
def test_the_publishers_link_carries_a_delta_about_once(receivers: int, extents: int) -> None:
    """A delta has few extents: 31 are 3 % of 1 GiB, fewer runs than receivers."""
    fleet = Fleet(receivers, extents)
    took_s = fleet.run()
    assert fleet.publisher_sent <= 1.1
    assert took_s <= 3.0 * extents / RATE + 0.5


@pytest.mark.parametrize("extents", [1, 7, 31])
@pytest.mark.parametrize("ill", ["dead", "stopped", "lies"])
def test_hops_with_a_delta_that_die_stop_or_lie_are_routed_around(ill: str, extents: int) -> None:
    sent: list[float] = []
    for seed in range(20):
        choose = random.Random(seed)
        fleet = Fleet(64, extents)
        ills = {f"r{n}": (choose.uniform(0.0, 0.06), ill) for n in choose.sample(range(64), 6)}
        took_s = fleet.run(ills)
        sent.append(fleet.publisher_sent)
        assert took_s <= 0.5 + (3 * SILENCE_S if ill == "stopped" else 0.0), seed
        well = [peer for peer in fleet.peers.values() if peer.state == "well"]
        assert all(peer.here == peer.wanted for peer in well)
        assert len(well) >= 58
    assert sum(sent) / len(sent) <= 1.35, sent
    assert max(sent) <= 4.0, "the first to have it may be ill, and has to be found out"


@pytest.mark.parametrize("ill", ["dead", "stopped"])
def test_the_first_with_a_delta_may_be_lost_while_it_brings_it(ill: str) -> None:
    fleet = Fleet(8, 7)
    for name in ("r1", "r2", "r3", "r4", "r5", "r6", "r7"):
        fleet.peers[name].begins_s = 0.001
    took_s = fleet.run({"r0": (0.002, ill)})
    assert fleet.publisher_sent <= 2.0
    assert took_s <= 0.1 + (2 * SILENCE_S if ill == "stopped" else 0.0)


def test_those_who_come_late_or_want_slices_are_served_by_others() -> None:
    choose = random.Random(1)
    fleet = Fleet(32, 1024)
    for number, peer in enumerate(fleet.peers.values()):
        peer.begins_s = 0.0 if number < 8 else choose.uniform(0.0, 5.0)
        if number % 2:
            start = choose.randrange(768)
            peer.wanted = bits_between(start, start + 256) & choose.getrandbits(1024)
    fleet.run()
    assert fleet.publisher_sent <= 1.05


def test_a_receiver_whose_holders_are_all_stopped_gets_its_version_from_the_publisher() -> None:
    fleet = Fleet(5, 256)
    fleet.peers["r4"].begins_s = 10.0
    took_s = fleet.run({f"r{n}": (5.0, "stopped") for n in range(4)})
    assert took_s <= 10.0 + 4 * SILENCE_S + 2.0
    assert fleet.peers["r4"].here == fleet.peers["r4"].wanted


def test_what_a_receiver_was_sent_is_sent_again_once_it_has_gone() -> None:
    fan = FanOut(8)
    lacking = bits_between(0, 8)
    first = fan.ask("a", lacking, 0.0, 0.0)
    assert first == RunSource(1, 0, 4, "")
    fan.brought("a", 1, bits_between(0, 4), RunOutcome.HERE)
    assert fan.ask("b", bits_between(0, 4), 0.0, 0.0) == RunSource(2, 0, 4, "a")
    fan.forget("a")
    assert fan.ask("b", bits_between(0, 4), 0.0, 0.0) == RunSource(3, 0, 4, "")
    fan.brought("b", 2, 0, RunOutcome.FAILED)  # of one that is not there any more
    assert fan.ask("c", bits_between(0, 4), 0.0, 0.0) is None
    assert fan.ask("c", bits_between(0, 4), 1.5, 1.5) == RunSource(4, 0, 4, "")  # b took too long


def test_a_holder_that_has_no_more_or_fails_twice_is_not_named() -> None:
    lacking = bits_between(0, 4)
    for outcome, askers in ((RunOutcome.GONE, 1), (RunOutcome.FAILED, 2)):
        fan = FanOut(4)
        sent = fan.ask("a", lacking, 0.0, 0.0)
        assert sent == RunSource(1, 0, 4, "")
        fan.brought("a", 1, lacking, RunOutcome.HERE)
        for number in range(askers):
            source = fan.ask(f"b{number}", lacking, 0.0, 0.0)
            assert source is not None
            assert source.holder == "a"
            fan.brought(f"b{number}", source.number, 0, outcome)
            if number + 1 < askers:
                assert fan.ask(f"b{number}", lacking, 0.0, 0.0) is None, "it is left out for this one only, so far"
        found = fan.ask("c", lacking, 0.0, 0.0)
        assert found is not None
        assert not found.holder
        assert fan.ask("d", lacking, 0.0, 0.0) is None, "it is sent again once"


def test_those_who_have_waited_are_not_all_sent_what_is_on_its_way() -> None:
    fan = FanOut(4)
    lacking = bits_between(0, 4)
    assert fan.ask("a", lacking, 0.0, 0.0) == RunSource(1, 0, 4, "")
    for waited_s in (0.5, 1.5, 3.5):
        assert fan.ask("b", lacking, waited_s, 0.9) is None
    assert fan.ask("b", lacking, 4.5, 0.9) == RunSource(2, 0, 4, "")
    assert fan.ask("c", lacking, 2.0, 1.5) is None, "a took too long, but b brings it"
    assert fan.ask("c", lacking, 2.0, 2.5) == RunSource(3, 0, 4, "")


def test_what_others_say_of_a_run_that_is_not_theirs_changes_nothing() -> None:
    fan = FanOut(4)
    lacking = bits_between(0, 4)
    fan.ask("a", lacking, 0.0, 0.0)
    fan.brought("b", 1, 0, RunOutcome.FAILED)
    fan.brought("b", 77, 0, RunOutcome.GONE)
    assert fan.ask("c", lacking, 0.0, 0.0) is None, "a is bringing it"
