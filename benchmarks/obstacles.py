"""Reasons why a run misses its targets; printed beside the figures of missed targets only.

Pure. The reasons were found by profiling, not by the run that they are printed with; update them with the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.targets import Reached

OBSTACLES = {
    "held by a lazy save": (
        "The call takes 3 to 5 ms at 800 tensors, most of it to check every tensor once (kind, version, address); "
        "longer if other contenders' turns have evicted its objects from the caches. The rest is the wait before the "
        "update when copies aren't complete, as happens now and then with two ranks that compute on two cores: the "
        "state has to be copied once. That memory traffic is shown in brackets."
    ),
    "eager staging": (
        "The copies run at memory speed; the fixed overhead is checking every tensor and passing batches to two "
        "threads. It shows with small states."
    ),
    "persist + commit": (
        "One engine per rank writes with its own threads; two ranks on two cores share what the raw writers have to "
        "themselves."
    ),
    "until durable / best peer": (
        "The disk sets the time: the state can't be durable before it is written, and the best peer writes as many "
        "bytes. Only the copies before that could be faster. torchsnapshot holds its caller most of the time (see the "
        "tables), so hardly any training computes beside it; peers that let it compute take longer."
    ),
    "CPU seconds / that peer's": (
        "Copying the state once and hashing it once remain: about 0.35 s per GB on these cores together."
    ),
    "load, warm / raw preadv": (
        "Hashing an extent from the outer cache, as both cores do at the same time, costs a third of reading it. "
        "Pieces that fit into the inner cache are hashed twice as fast, but the additional calls cost what that "
        "gains. Planning takes 40 us per tensor, in Python, on one thread, before the first byte is read."
    ),
    "load, cold / raw preadv": "The disk's own speed varies more from minute to minute than the target allows.",
    "verification, of a warm load": "As for the warm load: hashing runs at the speed of the outer cache.",
    "many small tensors": "A few dozen steps of Python per tensor remain.",
    "very many tensors, unchanged": (
        "Nothing is visited or copied one by one any more. What remains is fetching the parts of a hundred thousand "
        "tensor objects from memory, twice: for kind, version and address, and for versions after the copies."
    ),
    "very many tensors: first plan": "Records of a hundred thousand tensors are laid out and rendered, in Python.",
    "slow-down of the training loop": (
        "Copies share the memory, and persisting shares the disk and part of a core, with an iteration that keeps "
        "both cores busy; the interval of this loop is short for the size of its state."
    ),
    "weight version over gloo /": (
        "The copy from the shadow to the live tensors, at memory speed after the last byte has arrived: it makes a "
        "version apply completely or not at all. Both sides hash what is sent, beside a transfer that keeps the cores "
        "busy; there are no other copies."
    ),
    "weight version over gloo, streaming": (
        "Hashing on both sides, beside a transfer that itself keeps the cores busy, and the messages about each bucket."
    ),
    "weight version through shared memory /": (
        "A memcpy is one copy by two cores. A version is packed by one process on one core and unpacked by another; "
        "both hash it, which takes a third of each side's time; then the shadow is copied to the live tensors."
    ),
    "weight version through shared memory, streaming": (
        "A memcpy is one copy by two cores; here each of two processes copies and hashes all of it on one core. "
        "Having the kernel copy between the processes (process_vm_readv) was measured: it looks up each page, which "
        "takes as long as the copy that it saves."
    ),
    "save to a store / raw obstore": (
        "What is uploaded is an image: the state is copied before the first part is sent, a third of a second per GiB. "
        "It is hashed beside the upload, on a core that a server on loopback waits for. Eleven small requests, one "
        "after the other, go before the first part and 14 after the last."
    ),
    "load from a store / raw obstore": (
        "Every extent is hashed, on cores that a server on loopback waits for. Manifest, metadata and report are read "
        "one after the other before the first byte of data."
    ),
}
"""Reasons by the beginning of a target's name."""


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
