"""Links between ranks over gloo: what `abort` promises to whoever waits."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from holdfast.coordination.links import GlooLinks, LinkLost

DEADLINE_S = 12.0
"""No wait here comes near it, if `abort` ends it."""
MESSAGE_BYTES = 256 << 20


@pytest.fixture
def links():
    """Links of two ranks, both in this process."""
    store = dist.HashStore()
    made = [None, None]

    def make(rank):
        made[rank] = GlooLinks(store, rank, 2, timeout_s=DEADLINE_S)

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    yield made
    for one in made:
        one.abort()
    left_behind = [thread for thread in threading.enumerate() if thread.name == "holdfast-link"]
    for thread in left_behind:  # in gloo, until their deadline
        thread.join(DEADLINE_S + 5.0)
        assert not thread.is_alive()


def test_abort_ends_the_wait_for_a_message_that_has_come_in_half(links):
    memory = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    receiving = links[0].receive(1, memory, 7)
    caught = []

    def wait():
        try:
            receiving.wait(DEADLINE_S)
        except LinkLost as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    sending = links[1].send(0, torch.ones(MESSAGE_BYTES, dtype=torch.uint8), 7)
    while not memory[0]:
        pass
    links[0].abort()
    aborted_at = time.monotonic()
    waiting.join()
    assert memory[-1] == 0, "it has come whole: this shows nothing"
    assert len(caught) == 1
    with pytest.raises(LinkLost):
        sending.wait(DEADLINE_S)
    assert time.monotonic() - aborted_at < DEADLINE_S / 2


def test_a_message_that_has_come_before_is_no_loss(links):
    memory = torch.zeros(8, dtype=torch.uint8)
    receiving = links[0].receive(1, memory, 7)
    links[1].send(0, torch.ones(8, dtype=torch.uint8), 7).wait(DEADLINE_S)
    receiving.wait(DEADLINE_S)
    assert memory.tolist() == [1] * 8
