"""Files and directories that all hosts share, and what of them is durable.

A file's bytes are durable once it was fsynced, a directory's entries once the directory was. Before that a power cut
may lose them, keep them, or tear them: of a file any subset of 4,096-byte pages since its last fsync and any length in
between; of a directory any of its changes, in the order in which they touch a name, a rename or an exchange being one
change. After an fsync that failed, what was dirty then is never made durable by a later one (the kernel forgets a
failed page). An fsync is of what its own host has written: the pages of another are in that one's memory.
"""

from __future__ import annotations

PAGE = 4096


class File:
    __slots__ = ("data", "dirty", "durable", "ino", "locks", "mtime_ns", "poisoned", "unsynced")

    def __init__(self, ino):
        self.ino = ino
        self.data = bytearray()
        self.durable = b""
        self.dirty = False  # a new file of no bytes is whole
        self.poisoned = False
        self.locks = {}
        self.mtime_ns = 0
        self.unsynced = {}  # by host: where it has written since its last fsync

    def write(self, host, offset, data):
        end = offset + len(data)
        if len(self.data) < end:
            self.data.extend(bytes(end - len(self.data)))
        with memoryview(self.data) as view:
            view[offset:end] = data
        self.dirty = True
        self.unsynced.setdefault(host, set()).add((offset, end))

    def sync(self, host):
        if self.poisoned:
            return
        own = self.unsynced.pop(host, ())
        if not self.unsynced:
            self.durable = bytes(self.data)
            self.dirty = False
            return
        durable = bytearray(len(self.data))
        kept = min(len(durable), len(self.durable))
        with memoryview(durable) as view, memoryview(self.data) as data:
            view[:kept] = memoryview(self.durable)[:kept]
            for start, end in own:
                view[start:end] = data[start:end]
        self.durable = bytes(durable)

    def tear(self, rng):
        """A power cut."""
        if self.dirty:
            self.data = bytearray(_torn(self.durable, bytes(self.data), rng))
            self.durable = bytes(self.data)
        self.dirty = self.poisoned = False
        self.locks, self.unsynced = {}, {}


def _torn(old, new, rng):
    kind = rng.randrange(4)
    if kind == 0:
        return old
    if kind == 1:
        return new
    size = rng.choice((len(new), len(new), len(old), len(new) // 2, len(new) // PAGE * PAGE))
    data = bytearray(size)
    for start in range(0, size, PAGE):
        page = (new if rng.random() < 0.5 else old)[start : min(start + PAGE, size)]
        data[start : start + len(page)] = page
    return bytes(data)


class Dir:
    __slots__ = ("durable", "entries", "ino", "locks", "mtime_ns", "pending", "poisoned")

    def __init__(self, ino):
        self.ino = ino
        self.entries = {}
        self.durable = {}
        self.pending = []
        self.poisoned = False
        self.mtime_ns = 0
        self.locks = {}

    def link(self, name, node):
        self.entries[name] = node
        self.pending.append(((name,), ((name, node),)))

    def unlink(self, name):
        del self.entries[name]
        self.pending.append(((name,), ((name, None),)))

    def rename(self, old, new):
        node = self.entries.pop(old)
        self.entries[new] = node
        self.pending.append(((old, new), ((old, None), (new, node))))

    def exchange(self, one, other):
        first, second = self.entries[one], self.entries[other]
        self.entries[one], self.entries[other] = second, first
        self.pending.append(((one, other), ((one, second), (other, first))))

    def sync(self, _host):
        if not self.poisoned:
            self.durable = dict(self.entries)
            self.pending = []

    def tear(self, rng):
        """A power cut: some changes are kept."""
        if self.pending:
            entries = dict(self.durable)
            keep = rng.choice((0.0, 0.5, 0.5, 1.0))
            in_order = rng.random() < 0.5  # a journal: a prefix of the changes
            dropped = set()
            for names, changes in self.pending:
                if rng.random() >= keep or (in_order and dropped) or not dropped.isdisjoint(names):
                    dropped.update(names)
                    continue
                for name, node in changes:
                    if node is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = node
            self.entries = entries
            self.durable = dict(entries)
            self.pending = []
        self.poisoned = False
        self.locks = {}


class FileSystem:
    def __init__(self):
        self.inodes = 1
        self.root = Dir(1)
        self.watch = None  # called before a directory's entries change: (directory, act, names)

    def new(self, kind):
        self.inodes += 1
        return kind(self.inodes)

    def find(self, path):
        """The node at an absolute path, or None."""
        node = self.root
        for part in path.split("/"):
            if part:
                if type(node) is not Dir:
                    return None
                node = node.entries.get(part)
        return node

    def power_cut(self, rng):
        pending = [self.root]
        while pending:
            node = pending.pop()
            node.tear(rng)
            if type(node) is Dir:
                pending.extend(node.entries.values())


def durable_tree(node):
    """What the worst power cut would leave below a directory: nested dictionaries of bytes."""
    if type(node) is File:
        return bytes(node.durable)
    return {name: durable_tree(child) for name, child in node.durable.items()}
