"""`os`, `fcntl` and `shutil` over the simulated file system, as the process that runs now sees them.

Every call may take long, fail as the schedule's faults say, and be the last of its process: before or after it has
had its effect.
"""

from __future__ import annotations

import errno
import os as real_os
import stat
from types import SimpleNamespace

from greenlet import getcurrent

from simulator.filesystem import Dir, File
from simulator.scheduler import Current, Dead, Task


class Image:
    """What is behind the descriptor of a memfd."""

    def __init__(self, data):
        self.data = data


class Open:
    """An open file description."""

    __slots__ = ("flags", "node", "users")

    def __init__(self, node, flags):
        self.node, self.flags, self.users = node, flags, 0


def host():
    """Of the process that runs now."""
    task = getcurrent()
    return task.process.host if type(task) is Task else "checker"


def fail(code, path):
    raise OSError(code, real_os.strerror(code), path)


class System:
    """The simulated system: one for each schedule. ``os``, ``fcntl`` and ``shutil`` have the methods of their names."""

    def __init__(self, sim, files, faults):
        self.sim, self.files, self.faults = sim, files, faults
        self.open_files = {}
        self.next_fd = 10
        self.owner = {}

    # calls -------------------------------------------------------------------------------------------------------

    def enter(self, name, path, *, changes):
        """A system call begins. It may fail, and may be the last of its process."""
        task = getcurrent()
        if type(task) is not Task:
            return
        process, sim = task.process, self.sim
        if process.dead or process.dying:
            raise Dead
        process.calls += 1
        sim.calls += 1
        if process.kill_at == process.calls and not process.kill_after:
            sim.log("killed before", f"{name} {path}")
            sim.kill(process)
            raise Dead
        if sim.on_call is not None:
            sim.on_call(process, name, path, False)
            if process.dead:
                raise Dead
        task.in_call = True
        try:
            sim.sleep(self.faults.latency(process, name))
        except Dead:
            task.in_call = False
            raise
        if changes:
            code = self.faults.error(process, name, path)
            if code:
                sim.log("fails", f"{name} {path} {errno.errorcode[code]}")
                task.in_call = False
                if process.dying:
                    sim.end(process, -9)
                    raise Dead
                fail(code, path)
        if sim.lines is not None:
            sim.log(name, path)

    def leave(self, name, path):
        task = getcurrent()
        if type(task) is not Task:
            return
        process = task.process
        task.in_call = False
        if process.dying:
            if not any(other.in_call for other in process.tasks if not other.finished):
                self.sim.end(process, -9)
            raise Dead
        if process.kill_at == process.calls and process.kill_after:
            self.sim.log("killed after", f"{name} {path}")
            self.sim.kill(process)
            raise Dead
        if self.sim.on_call is not None:
            self.sim.on_call(process, name, path, True)
            if process.dead:
                raise Dead

    # descriptors -------------------------------------------------------------------------------------------------

    def new_fd(self, opened, process=None):
        self.next_fd += 1
        fd = self.next_fd
        self.open_files[fd] = opened
        opened.users += 1
        if process is None:
            task = getcurrent()
            process = task.process if type(task) is Task else None
        if process is not None:
            process.fds.add(fd)
            self.owner[fd] = process
        return fd

    def opened(self, fd):
        found = self.open_files.get(fd)
        if found is None:
            fail(errno.EBADF, str(fd))
        return found

    def drop_fd(self, fd):
        opened = self.open_files.pop(fd, None)
        if opened is None:
            return
        process = self.owner.pop(fd, None)
        if process is not None:
            process.fds.discard(fd)
        opened.users -= 1
        if not opened.users and type(opened.node) is File:
            opened.node.locks.pop(id(opened), None)

    def drop_process(self, process):
        for fd in list(process.fds):
            self.drop_fd(fd)

    def at(self, path, dir_fd):
        """The directory that holds ``path`` and the name in it; the directory is None where there is none."""
        if dir_fd is not None:
            return self.opened(dir_fd).node, path
        head, _, name = path.rpartition("/")
        return self.files.find(head), name

    def path_of(self, path, dir_fd):
        return path if dir_fd is None else f"@{self.opened(dir_fd).node.ino}/{path}"


class Stat:
    __slots__ = ("st_dev", "st_ino", "st_mode", "st_mtime_ns", "st_nlink", "st_size")

    def __init__(self, node):
        self.st_dev, self.st_ino = 1, node.ino
        self.st_mode = stat.S_IFDIR | 0o755 if type(node) is Dir else stat.S_IFREG | 0o644
        self.st_size = 0 if type(node) is Dir else len(node.data)
        self.st_mtime_ns = node.mtime_ns
        self.st_nlink = 2 if type(node) is Dir else 1  # there are no hard links here


class SimOs:
    """`os`: what is not here is taken from the real one, constants and paths above all."""

    def __init__(self):
        for name in dir(real_os):
            if name.startswith(("O_", "POSIX_")):
                setattr(self, name, getattr(real_os, name))
        self.path, self.fspath, self.strerror = real_os.path, real_os.fspath, real_os.strerror
        self.fsencode = real_os.fsencode

    def umask(self, mask):
        """Files have no modes here."""
        return mask

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        system = Current.sim.system
        creates = bool(flags & real_os.O_CREAT)
        shown = system.path_of(path, dir_fd)
        system.enter("create" if creates else "open", shown, changes=creates)
        parent, name = system.at(path, dir_fd)
        node = None
        if type(parent) is Dir:
            node = parent.entries.get(name) if name else parent
        try:
            if type(parent) is not Dir:
                fail(errno.ENOENT if parent is None else errno.ENOTDIR, path)
            if node is None:
                if not creates:
                    fail(errno.ENOENT, path)
                node = system.files.new(File)
                parent.link(name, node)
            elif creates and flags & real_os.O_EXCL:
                fail(errno.EEXIST, path)
            if flags & real_os.O_DIRECTORY and type(node) is not Dir:
                fail(errno.ENOTDIR, path)
            fd = system.new_fd(Open(node, flags))
        finally:
            system.leave("open", shown)
        return fd

    def close(self, fd):
        Current.sim.system.drop_fd(fd)

    def dup(self, fd):
        system = Current.sim.system
        return system.new_fd(system.opened(fd))

    def fdopen(self, fd, _mode):
        """Enough for a whole small file that is read once."""
        sim_os = self

        class Reader:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                sim_os.close(fd)

            def read(self, nbytes):
                return sim_os.pread(fd, nbytes, 0)

        return Reader()

    def pwrite(self, fd, data, offset):
        system = Current.sim.system
        node = system.opened(fd).node
        system.enter("pwrite", f"@{node.ino}+{offset}", changes=True)
        count = system.faults.short(len(data))
        node.write(host(), offset, data[:count])
        node.mtime_ns = int(system.sim.now * 1e9)
        system.leave("pwrite", "")
        return count

    def write(self, fd, data):
        return self.pwrite(fd, data, len(Current.sim.system.opened(fd).node.data))

    def ftruncate(self, fd, size):
        node = Current.sim.system.opened(fd).node
        node.dirty = True
        del node.data[size:]
        node.data.extend(bytes(size - len(node.data)))

    def posix_fadvise(self, *_):
        pass

    def pread(self, fd, nbytes, offset):
        node = Current.sim.system.opened(fd).node
        Current.sim.system.enter("pread", f"@{node.ino}", changes=False)
        with memoryview(node.data) as view:
            data = bytes(view[offset : offset + nbytes])
        Current.sim.system.leave("pread", "")
        return data

    def read(self, _fd, _nbytes):
        return b""  # of the engine's own pipe, which is not needed here

    def fsync(self, fd):
        system = Current.sim.system
        node = system.opened(fd).node
        try:
            system.enter("fsync", f"@{node.ino}{'/' if type(node) is Dir else ''}", changes=True)
        except OSError:
            node.poisoned = node.poisoned or bool(type(node) is File and node.dirty)
            raise
        node.sync(host())
        system.leave("fsync", "")

    def fstat(self, fd):
        node = Current.sim.system.opened(fd).node
        return Stat(node) if type(node) is not Image else SimpleNamespace(st_size=len(node.data))

    def lstat(self, path):
        system = Current.sim.system
        system.enter("stat", path, changes=False)
        node = system.files.find(path)
        system.leave("stat", path)
        if node is None:
            fail(errno.ENOENT, path)
        return Stat(node)

    def stat(self, path, *, follow_symlinks=True):
        return self.lstat(path)

    def listdir(self, path):
        system = Current.sim.system
        opened = system.opened(path).node if isinstance(path, int) else None
        system.enter("list", path if opened is None else f"@{opened.ino}", changes=False)
        node = system.files.find(path) if opened is None else opened
        names = list(node.entries) if type(node) is Dir else None
        system.leave("list", path)
        if names is None:
            fail(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return names

    def scandir(self, fd):
        node = Current.sim.system.opened(fd).node
        Current.sim.system.enter("scandir", f"@{node.ino}", changes=False)
        found = [_Entry(name, type(child) is Dir) for name, child in sorted(node.entries.items())]
        Current.sim.system.leave("scandir", "")
        return _Scan(found)

    def mkdir(self, path, mode=0o777):
        system = Current.sim.system
        system.enter("mkdir", path, changes=True)
        parent, name = system.at(path, None)
        try:
            if type(parent) is not Dir:
                fail(errno.ENOENT, path)
            if name in parent.entries:
                fail(errno.EEXIST, path)
            parent.link(name, system.files.new(Dir))
            self._changed(parent, "mkdir", None, name)
        finally:
            system.leave("mkdir", path)

    def rename(self, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        system = Current.sim.system
        shown = f"{system.path_of(source, src_dir_fd)} -> {target}"
        system.enter("rename", shown, changes=True)
        try:
            parent, old = system.at(source, src_dir_fd)
            there, new = system.at(target, dst_dir_fd)
            if parent is not there:
                self._move(parent, old, there, new)
                return
            if type(parent) is not Dir or old not in parent.entries:
                fail(errno.ENOENT, source)
            node, at_target = parent.entries[old], parent.entries.get(new)
            if type(at_target) is Dir and (at_target.entries or type(node) is not Dir):
                fail(errno.ENOTEMPTY if type(node) is Dir else errno.EISDIR, target)
            if type(node) is Dir and type(at_target) is File:
                fail(errno.ENOTDIR, target)
            parent.rename(old, new)
            self._changed(parent, "rename", old, new)
            lost = system.faults.repeated_answer(getcurrent())
        finally:
            system.leave("rename", shown)
        if lost:
            system.sim.log("answered as repeated", shown)
            fail(errno.ENOENT, source)

    def _move(self, parent, old, there, new):
        """To another directory, as one entry of a journal."""
        if type(parent) is not Dir or type(there) is not Dir or old not in parent.entries:
            fail(errno.ENOENT, old)
        node = parent.entries.pop(old)
        there.entries[new] = there.durable[new] = node
        parent.durable.pop(old, None)
        for directory, name in ((parent, old), (there, new)):
            directory.pending = [change for change in directory.pending if name not in change[0]]

    def exchange(self, first, second):
        """`renameat2` as ``local`` calls it: an errno, or 0. A request that a file server repeats changes all back."""
        system = Current.sim.system
        shown = f"{first} <-> {second}"
        if not system.faults.exchanges:
            return errno.EINVAL
        try:
            system.enter("exchange", shown, changes=True)
        except OSError as error:
            return error.errno
        repeated = system.faults.repeated_exchange(getcurrent())
        try:
            parent, one = system.at(first, None)
            there, other = system.at(second, None)
            assert parent is there or parent is None, "exchanges stay in one directory"
            if type(parent) is not Dir or one not in parent.entries or other not in parent.entries:
                return errno.ENOENT
            if repeated != "twice":
                parent.exchange(one, other)
                self._changed(parent, "exchange", one, other)
        finally:
            system.leave("exchange", shown)
        if repeated:
            system.sim.log("exchanged", repeated)
        return errno.EIO if repeated == "answer lost" else 0

    def link(self, source, target, *, follow_symlinks=True):
        system = Current.sim.system
        system.enter("link", f"{source} -> {target}", changes=True)
        try:
            parent, old = system.at(source, None)
            there, new = system.at(target, None)
            if type(parent) is not Dir or type(there) is not Dir or old not in parent.entries:
                fail(errno.ENOENT, source)
            if new in there.entries:
                fail(errno.EEXIST, target)
            there.link(new, parent.entries[old])
        finally:
            system.leave("link", target)

    def unlink(self, path, *, dir_fd=None):
        system = Current.sim.system
        shown = system.path_of(path, dir_fd)
        system.enter("unlink", shown, changes=True)
        try:
            parent, name = system.at(path, dir_fd)
            if type(parent) is not Dir or name not in parent.entries:
                fail(errno.ENOENT, path)
            if type(parent.entries[name]) is Dir:
                fail(errno.EISDIR, path)
            parent.unlink(name)
        finally:
            system.leave("unlink", shown)

    def rmdir(self, path, *, dir_fd=None):
        system = Current.sim.system
        shown = system.path_of(path, dir_fd)
        system.enter("rmdir", shown, changes=True)
        try:
            parent, name = system.at(path, dir_fd)
            if type(parent) is not Dir or name not in parent.entries:
                fail(errno.ENOENT, path)
            if parent.entries[name].entries:
                fail(errno.ENOTEMPTY, path)
            parent.unlink(name)
            self._changed(parent, "rmdir", name, None)
        finally:
            system.leave("rmdir", shown)

    def readlink(self, path):
        return "/simulated"

    def getpid(self):
        task = getcurrent()
        return task.process.pid if type(task) is Task else 1

    def uname(self):
        return SimpleNamespace(nodename=host())

    def cpu_count(self):
        return 2

    def _changed(self, parent, act, old, new):
        watch = Current.sim.system.files.watch
        if watch is not None:
            watch(parent, act, old, new)


class _Entry:
    def __init__(self, name, is_dir):
        self.name, self._is_dir = name, is_dir

    def is_dir(self, *, follow_symlinks=True):
        return self._is_dir


class _Scan(list):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class SimFcntl:
    """`flock`; where the file system keeps locks to a host, another host doesn't see them."""

    LOCK_SH, LOCK_EX, LOCK_NB, LOCK_UN = 1, 2, 4, 8

    def flock(self, fd, how):
        system = Current.sim.system
        opened = system.opened(fd)
        locks = opened.node.locks
        if how & self.LOCK_UN:
            locks.pop(id(opened), None)
            return
        exclusive = bool(how & self.LOCK_EX)
        for holder, (theirs, at) in locks.items():
            seen = at == host() or not system.faults.locks_are_local
            if holder != id(opened) and (exclusive or theirs) and seen:
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        locks[id(opened)] = (exclusive, host())


class SimShutil:
    @staticmethod
    def rmtree(path):
        """Entry by entry, as the real one: it may be stopped anywhere."""
        for name in sorted(OS.listdir(path)):
            child = f"{path}/{name}"
            if stat.S_ISDIR(OS.lstat(child).st_mode):
                SimShutil.rmtree(child)
            else:
                OS.unlink(child)
        OS.rmdir(path)


OS, FCNTL, SHUTIL = SimOs(), SimFcntl(), SimShutil()
