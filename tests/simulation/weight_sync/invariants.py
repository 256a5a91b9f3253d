"""What must hold, looked at whenever a process takes a turn.

true     live tensors that aren't dirty have one version, all of it: the one that `version` and `meta` name
whole    what is fetched was staged by all ranks, and is what was asked for
kept     nothing is written over a version that is kept or pinned, and it can be fetched
leased   nothing is written over what a receiver holds, unless its lease was revoked for want of a block
memory   at most ``keep_versions`` + 2 blocks, and one a pin; `MIRRORS_MAX` mirrors of a rank, and deltas
offered  what a receiver lets others read is what it says: extents of the version that has this digest
free     a publisher never waits for a receiver
bounded  each call ends in time: with a result, or an error of `holdfast.errors` that is true
rewind   a number that an earlier publisher has used is not published again, unless it is allowed
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from weight_sync.memory import EXTENT_BYTES, HEADER_BYTES

SHAPES = {"a": (12,), "b": (5, 4), "c": (3,), "d": (5, 4)}
"""Published tensors, of 4 bytes an element; "d" is "b" where they are tied."""
_SPAN = 1000
MIRRORS_MAX = 4
"""Of a rank's blocks: what is held, what is being fetched, and two that are kept."""


class InvariantBroken(Exception):
    def __init__(self, invariant, what):
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Published:
    """One call of publish: which version by which job, who has staged it, and its values."""

    def __init__(self, serial, job, version):
        self.serial, self.job, self.version = serial, job, version
        self.staged = set()
        self.tied = self.damaged = False
        self.base = None
        """The publish from which this one differs in some elements; None: in all."""
        self.failed = set()
        """Ranks on which `publish` raised."""
        self._values = self._bytes = None

    def values(self):
        """Return the tensors' values, of the caller."""
        found = {name: values.copy() for name, values in self._untied().items()}
        if self.tied:
            found["d"] = found["b"]
        return found

    def _untied(self):
        if self._values is None:
            self._values = found = {
                name: np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape) + self.serial * _SPAN + number * 100
                for number, (name, shape) in enumerate(SHAPES.items())
            }
            if self.base is not None:
                for name, own in found.items():
                    values = self.base._untied()[name].copy()
                    at = self.serial % values.size
                    values.flat[at] = own.flat[at]
                    found[name] = values
        return self._values

    @property
    def as_bytes(self):
        """The tensors' values as bytes."""
        if self._bytes is None:
            self._bytes = tuple(value.tobytes() for value in self.values().values())
        return self._bytes


class Checker:
    def __init__(self, sim):
        self.sim = sim
        self.breach = None
        self.published = []
        self.receivers = []
        self.blocks = {}
        """What a block was filled with, by the digest of its version."""

    def broken(self, invariant, what):
        if self.breach is None:
            self.breach = InvariantBroken(invariant, f"at {self.sim.now:.4f} s: {what}")
            self.sim.log("BROKEN", str(self.breach))
            self.sim.stop = True

    # publishers ------------------------------------------------------------------------------------------------------

    def new(self, job, version):
        made = Published(len(self.published) + 1, job, version)
        self.published.append(made)
        return made

    def now(self, version):
        """Return the meta of the publish that a rank is in."""
        mine = next(one for one in reversed(self.published) if one.version == version)
        return {"serial": mine.serial, "step": version}

    def find(self, serial):
        return self.published[serial - 1]

    def staged(self, process, version, digest):
        mine = process.publishing
        if mine.version != version:
            self.broken("whole", f"{process.name} stages {version} instead of {mine.version}")
        mine.staged.add(process.rank)
        image = process.images_by_block[process.filling.block.number]
        image.serial = mine.serial
        if self.sim.faults.fan_out:
            self.blocks[digest] = image.bytes_view.clone()
        faults = self.sim.faults
        if faults.active and faults.damage and self.sim.random() < faults.damage:
            mine.damaged = True
            image.bytes_view[HEADER_BYTES + self.sim.rng.randrange(EXTENT_BYTES)] ^= 1

    def kept(self, process):
        """Return the versions that a rank keeps."""
        newest = process.published[-self.sim.faults.keep :]
        return {*newest, *process.pins}

    def overwrites(self, process, image):
        filling = process.filling
        process.images_by_block[filling.block.number] = image
        serial, image.serial = image.serial, None
        if serial is None:
            return
        was = self.find(serial)
        if was.version in self.kept(process) and process.rank not in was.failed:
            self.broken("kept", f"{process.name} writes over version {was.version}, which it keeps")
        if filling.revoked or process.rank in was.failed:
            return
        for receiver in self.receivers:
            if receiver.holds(process.rank, image, serial):
                self.broken(
                    "leased",
                    f"{process.name} writes over version {was.version}, which {receiver.name} holds, and says of no "
                    "lease that it is revoked",
                )

    def count_blocks(self, process):
        keep = self.sim.faults.keep
        beside = len(process.pins - set(process.published[-keep:]))
        if len(process.images) > keep + 2 + beside:
            self.broken("memory", f"{process.name} has {len(process.images)} blocks, with {beside} pins")

    # mirrors ---------------------------------------------------------------------------------------------------------

    def count_mirrors(self, process, image, kind):
        """Note that a receiver makes one, or memory for a delta that it shares."""
        alive = [known for known in process.mirrors.get(kind, ()) if known() is not None]
        process.mirrors[kind] = [*alive, weakref.ref(image)]
        most = MIRRORS_MAX * max(one.job.world for one in self.published)
        if len(alive) >= most:
            self.broken("memory", f"{process.name} has {len(alive) + 1} {kind}")

    def offered(self, digest, encoded):
        """Note a delta that receivers may bring from one another: what lies behind the header of its memory."""
        if encoded and digest not in self.blocks:
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            self.blocks[digest] = torch.cat([header, torch.frombuffer(bytearray(encoded), dtype=torch.uint8)])

    def opens(self, process, image):
        """Note that another receiver is about to be sent some of a mirror."""
        for digest, held in image.offers.items():
            true = self.blocks[digest]
            for extent in range(held.here.bit_length()):
                end = min(HEADER_BYTES + (extent + 1) * EXTENT_BYTES, len(true))
                at = slice(HEADER_BYTES + extent * EXTENT_BYTES, end)
                if held.here >> extent & 1 and not torch.equal(image.bytes_view[at], true[at]):
                    self.broken("offered", f"{process.name} offers extent {extent}, and has something else there")

    # receivers -------------------------------------------------------------------------------------------------------

    def look(self, process):
        receiver = process.receiver
        if receiver is None or receiver.dirty:
            return
        found = receiver.bytes_now()
        if found == receiver.true_bytes and receiver.version == receiver.true_version:
            return
        version, meta = receiver.version, receiver.meta
        if version is None:
            self.broken("true", f"{receiver.name} has nothing yet, isn't dirty, and its tensors have changed")
            return
        said = self.find(meta["serial"])
        if said.version != version:
            self.broken("true", f"{receiver.name} says version {version}; its meta is of {said.version}")
        elif found != said.as_bytes:
            cells = sorted({int(cell) // _SPAN for array in receiver.arrays for cell in array.flat})
            self.broken(
                "true", f"{receiver.name} says version {version} (serial {said.serial}); its tensors have {cells}"
            )
        elif len(said.staged) < said.job.world:
            self.broken("whole", f"{receiver.name} has version {version}, which only {said.staged} have staged")
        receiver.true_bytes, receiver.true_version = found, version

    def fetched(self, receiver, fetched, asked):
        said = self.find(fetched.meta["serial"])
        if fetched.version != said.version:
            self.broken("true", f"{receiver.name} fetched version {fetched.version}; its meta is of {said.version}")
        elif len(said.staged) < said.job.world:
            self.broken("whole", f"{receiver.name} fetched version {said.version}, which {said.staged} have staged")
        elif asked is not None and fetched.version != asked:
            self.broken("whole", f"{receiver.name} asked for version {asked}, and fetched {fetched.version}")
