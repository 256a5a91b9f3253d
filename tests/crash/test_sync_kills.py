"""A publisher rank or a receiver dies, or stands still, at every word of a weight sync: the others are told, and go on.

Whoever survives ends within its deadlines, has some version whole, bit by bit, and gets the next one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Child, Nursery
from processes import free_port
from sync_job import PEER_TIMEOUT_S, PUBLISH_S

KINDS = ["slots"]
LAST = 4
PATIENCE_S = 45.0
OF_RECEIVERS = ("Hello", "Ask", "Wants", "Taken", "Committed")
OF_PUBLISHERS = ("Begin", "Table", "Plan", "Bucket")
OF_OTHER_RANKS = ("Peer", "Offer", "Table", "Plan", "Bucket")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("sync_job") as found:
        yield found


def told(child: Child) -> list[dict[str, Any]]:
    return [json.loads(line) for line in child.stdout().splitlines()]


def check_receiver(child: Child, *, errors: tuple[str, ...] = ()) -> list[int]:
    """Check that a surviving receiver got only complete versions, and no errors but ``errors``; return the versions."""
    assert child.wait(PATIENCE_S) == 0, child.stderr()
    for event in told(child):
        assert event["right"], event
        assert not event["dirty"], event
        assert event.get("error") in (None, *errors), event
    return [event["received"] for event in told(child) if "received" in event]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("word", "sign"),
    [
        ("Taken", "SIGKILL"),
        ("Wants", "SIGSTOP"),
        *(
            pytest.param(word, sign, marks=pytest.mark.slow)
            for word in OF_RECEIVERS
            for sign in ("SIGKILL", "SIGSTOP")
            if (word, sign) not in (("Taken", "SIGKILL"), ("Wants", "SIGSTOP"))
        ),
    ],
)
def test_a_lost_receiver_costs_the_others_only_a_deadline(
    nursery: Nursery, tmp_path: Path, tried: Counter[str], kind: str, word: str, sign: str
) -> None:
    base = {"place": str(tmp_path / "place"), "kind": kind}
    # Hello is said once; the others are those of the second version.
    number = {"Hello": 1, "Wants": 2, "Ask": 2, "Committed": 2, "Taken": 8}[word]
    publisher = nursery.start(
        "sync_job", "publish", {**base, "first": 1, "last": LAST, "receivers": 2}, log=tmp_path / "publisher"
    )
    survivor = nursery.start("sync_job", "receive", {**base, "last": LAST}, log=tmp_path / "survivor")
    victim = nursery.start(
        "sync_job",
        "receive",
        {**base, "last": LAST, "word": word, "number": number, "sign": sign},
        log=tmp_path / "victim",
    )
    if word == "Hello":  # it never joined: then somebody else has to
        nursery.start("sync_job", "receive", {**base, "last": LAST}, log=tmp_path / "another")
    assert publisher.wait(PATIENCE_S) == 0, publisher.stderr()
    done = told(publisher)
    assert [event.get("published") for event in done] == list(range(1, LAST + 1)), done
    assert check_receiver(survivor) == list(range(1, LAST + 1))
    lost = [event["lost"] for event in done]
    assert sum(lost) <= 1, done
    assert max(event["seconds"] for event in done) < 3 * PEER_TIMEOUT_S + 5, done
    if sign == "SIGKILL":
        assert victim.wait(PATIENCE_S) == -9
    tried["kills and stops of receivers, in the middle of a weight version"] += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "word", ["Bucket", *(pytest.param(word, marks=pytest.mark.slow) for word in OF_PUBLISHERS if word != "Bucket")]
)
def test_receivers_keep_their_version_after_the_publisher_dies_and_a_new_one_continues(
    nursery: Nursery, tmp_path: Path, tried: Counter[str], kind: str, word: str
) -> None:
    base = {"place": str(tmp_path / "place"), "kind": kind}
    number = {"Bucket": 15, "Begin": 3, "Table": 3, "Plan": 3}[word]
    first = nursery.start(
        "sync_job",
        "publish",
        {**base, "first": 1, "last": LAST, "receivers": 2, "word": word, "number": number},
        log=tmp_path / "first",
    )
    receivers = [
        nursery.start("sync_job", "receive", {**base, "last": 2 * LAST}, log=tmp_path / f"receiver-{index}")
        for index in range(2)
    ]
    assert first.wait(PATIENCE_S) == -9
    second = nursery.start(
        "sync_job", "publish", {**base, "first": LAST + 1, "last": 2 * LAST, "receivers": 2}, log=tmp_path / "second"
    )
    assert second.wait(PATIENCE_S) == 0, second.stderr()
    assert [event.get("published") for event in told(second)] == list(range(LAST + 1, 2 * LAST + 1))
    for receiver in receivers:
        got = check_receiver(receiver, errors=("PeerLost",))
        assert got[-LAST:] == list(range(LAST + 1, 2 * LAST + 1))
        assert any("publisher rank 0" in event.get("message", "") for event in told(receiver))
    tried["kills of publishers, in the middle of a weight version"] += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "word", ["Bucket", *(pytest.param(word, marks=pytest.mark.slow) for word in OF_OTHER_RANKS if word != "Bucket")]
)
def test_a_publisher_rank_that_dies_is_named_on_both_sides(
    nursery: Nursery, tmp_path: Path, tried: Counter[str], kind: str, word: str
) -> None:
    base = {"place": str(tmp_path / "place"), "kind": kind}
    number = {"Bucket": 6, "Table": 2, "Plan": 2, "Offer": 2, "Peer": 1}[word]
    ranks = {**base, "first": 1, "last": 2, "receivers": 1, "world": 2, "port": free_port()}
    zero = nursery.start("sync_job", "publish", {**ranks, "rank": 0}, log=tmp_path / "zero")
    one = nursery.start(
        "sync_job", "publish", {**ranks, "rank": 1, "word": word, "number": number}, log=tmp_path / "one"
    )
    receiver = nursery.start("sync_job", "receive", {**base, "last": 2, "until_error": True}, log=tmp_path / "receiver")
    assert one.wait(PATIENCE_S) == -9
    assert zero.wait(PATIENCE_S + PUBLISH_S) == 0, zero.stderr()
    failed = [event for event in told(zero) if "failed" in event]
    assert failed, told(zero)
    assert all("rank 1" in event["message"] or "rank(s) 1 of 2" in event["message"] for event in failed), failed
    got = check_receiver(receiver, errors=("PeerLost", "DeadlineExceeded"))
    assert got == list(range(1, len(got) + 1))
    tried["kills of publisher ranks, in the middle of a weight version"] += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("Bucket", 6),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("Begin", 3), ("Begin", 4), ("Table", 2))),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("Plan", 2), ("Finished", 1), ("Finished", 2))),
    ],
)
def test_the_first_publisher_rank_that_dies_is_named_by_the_others(
    nursery: Nursery, tmp_path: Path, tried: Counter[str], kind: str, word: str, number: int
) -> None:
    base = {"place": str(tmp_path / "place"), "kind": kind}
    ranks = {**base, "first": 1, "last": 2, "receivers": 1, "world": 2, "port": free_port()}
    dying = {**ranks, "rank": 0, "word": word, "number": number}
    zero = nursery.start("sync_job", "publish", dying, log=tmp_path / "zero")
    one = nursery.start("sync_job", "publish", {**ranks, "rank": 1}, log=tmp_path / "one")
    receiver = nursery.start("sync_job", "receive", {**base, "last": 4}, log=tmp_path / "receiver")
    assert zero.wait(PATIENCE_S) == -9
    assert one.wait(PATIENCE_S + PUBLISH_S) == 0, one.stderr()
    failed = [event for event in told(one) if "failed" in event]
    assert failed, told(one)
    assert failed[0]["error"] in ("PeerLost", "BoardLost"), failed
    assert max(event["seconds"] for event in failed) < PUBLISH_S, failed
    second = nursery.start("sync_job", "publish", {**base, "first": 3, "last": 4, "receivers": 1}, log=tmp_path / "new")
    assert second.wait(PATIENCE_S) == 0, second.stderr()
    assert check_receiver(receiver, errors=("PeerLost",))[-2:] == [3, 4]
    tried["kills of first publisher ranks, in the middle of a weight version"] += 1
