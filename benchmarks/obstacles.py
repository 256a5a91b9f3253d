"""What stands in the way of targets that a run doesn't reach: said beside the figure, and only where one is missed.

Pure. What is said here was found by profiling, not by the run it stands beside; it is wrong once somebody removes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.targets import Reached

OBSTACLES = {
    "held by a lazy save": (
        "The call itself takes 3 to 5 ms at 800 tensors, most of it for looking at every tensor once (kind, version, "
        "address); after a turn of others that took its objects out of the caches, longer. The rest is the wait in "
        "front of the update where copies aren't complete by then, as two ranks that compute on two cores have it now "
        "and then: the state has to be copied once. It is memory traffic, shown in brackets."
    ),
    "eager staging": (
        "The copies run at the speed of memory; what is added to them is fixed: looking at every tensor, and handing "
        "batches to two threads. It shows with small states."
    ),
    "persist + commit": (
        "One engine a rank writes with its own threads; two ranks on two cores share what the raw writers have alone."
    ),
    "until durable / best peer": (
        "The disk sets the time: the state can't be durable before it is written, and the best peer writes as many "
        "bytes. What is left to gain is the copies before it. torchsnapshot holds its caller for most of its time (the "
        "tables have it), so hardly a trainer computes beside it; those who let it compute take longer."
    ),
    "CPU seconds / that peer's": (
        "Copying the state once and hashing it once is what is left: about 0.35 s a GB on these cores together."
    ),
    "load, warm / raw preadv": (
        "Hashing an extent from the outer cache, as both cores do at a time, costs a third of reading it. Pieces for "
        "the inner cache are hashed twice as fast, and what they gain goes into the calls that each of them needs. "
        "Planning costs 40 us a tensor, in Python, by one thread, before the first byte is read."
    ),
    "load, cold / raw preadv": "The disk's own speed varies more from one minute to the next than the target allows.",
    "verification, of a warm load": "As for the warm load: a hash at the speed of the outer cache.",
    "many small tensors": "What is left is a few dozen steps of Python for each tensor.",
    "very many tensors, unchanged": (
        "Nothing is walked or copied one by one any more. What is left is fetching the parts of a hundred thousand "
        "tensor objects from memory, twice: once for kind, version and address, once for versions after the copies."
    ),
    "very many tensors: first plan": "Records of a hundred thousand tensors are laid out and rendered, in Python.",
    "slow-down of the training loop": (
        "Copies share the memory, and persisting the disk and some of a core, with an iteration that keeps both cores "
        "busy; the interval of this loop is short for the size of its state."
    ),
    "weight version over gloo /": (
        "The copy from the shadow to the live tensors, after the last byte has come, at the speed of memory: it makes "
        "a version whole or not at all. Both sides hash what is sent, beside a transfer that keeps the cores busy; "
        "nothing is copied on its way."
    ),
    "weight version over gloo, streaming": (
        "Hashing on both sides, beside a transfer that keeps the cores busy itself, and the words about each bucket."
    ),
    "weight version through shared memory /": (
        "A memcpy is one copy by two cores. A version is packed by one process, on one core, and unpacked by another; "
        "both hash it, which is a third of a side's time; and the copy from the shadow to the live tensors follows."
    ),
    "weight version through shared memory, streaming": (
        "A memcpy is one copy by two cores; here each of two processes copies all of it, and hashes it, on one core. "
        "Having the kernel copy from one process to the other (process_vm_readv) was measured: it looks up each page, "
        "which takes as long as the copy that it saves."
    ),
}
"""By how the name of a target begins."""


def obstacles(rows: Iterable[Reached]) -> str:
    """A list, one item for each kind of target that was missed; says so if there is none."""
    missed = [row.what for row in rows if row.verdict.startswith("not reached")]
    items = []
    for begin, why in OBSTACLES.items():
        named = [what for what in missed if what.startswith(begin)]
        if named:
            items.append(f"- {'; '.join(named)}: {why}")
    unexplained = [what for what in missed if not any(what.startswith(begin) for begin in OBSTACLES)]
    items += [f"- {what}: not yet explained." for what in unexplained]
    return "\n".join(items) or "Every target that was measured was reached."
