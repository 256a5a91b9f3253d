"""CPU cores and NUMA nodes: which cores are near a device, threads bound to some, work shared by threads. Torch-free.

    usable_cores("auto")       those of the NUMA node of this process's CUDA device; () where that is all of them
    usable_cores((8, 9))       these, once checked
    usable_cores("any")        (): bind to none

An empty tuple means everywhere: nothing is bound. Pages of memory come from the node of the thread that touches them
first (unless the program has set another policy, which stays), so memory is placed by touching it `from_cores`: that
needs no permission, as ``mbind`` does in containers.

Guarantees: ``"auto"`` never fails: what can't be read is not known, and then nothing is bound. What the system says of
itself is read once. Binding a thread affects that thread, and those that it starts later.
Assumes Linux; on other systems nothing is known, and no core can be chosen.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    Cores: TypeAlias = "Literal['auto', 'any'] | Sequence[int]"

NAMED: Final = ("auto", "any")
CORE_MAX: Final = 8191
"""Linux numbers at most so many."""
_SYSTEM: Final = "/sys"


def is_cores(value: object) -> bool:
    """Return True if ``value`` may be set: ``"auto"``, ``"any"``, or some core numbers; whatever the machine has."""
    if isinstance(value, str):
        return value in NAMED
    if not isinstance(value, (list, tuple, range, set, frozenset)) or not value:
        return False
    return all(isinstance(core, int) and not isinstance(core, bool) and 0 <= core <= CORE_MAX for core in value)


def usable_cores(cores: Cores, *, field: str = "cores", system: str = _SYSTEM) -> tuple[int, ...]:
    """Return the cores to bind to, in order; () for none.

    Raises `ConfigError`, which names ``field``, for values that aren't `is_cores`, and for cores that this process may
    not use. system: where the system tells of itself.
    """
    if not is_cores(cores):
        raise ConfigError(
            f"{field}: expected 'auto', 'any' or numbers of cores (0 to {CORE_MAX}), found {cores!r}", field=field
        )
    if isinstance(cores, str):
        address = device_address() if cores == "auto" else None
        return () if address is None else near_device(address, allowed_cores(), system)
    wanted, allowed = set(cores), allowed_cores()
    if not wanted <= allowed:
        raise ConfigError(
            f"{field}: this process may not use {_listed(wanted - allowed)}: it may use {_listed(allowed) or 'none'} "
            "(its affinity, as its launcher or container has set it; `taskset -p`, `nproc`). Choose from these, or "
            "start it with more",
            field=field,
        )
    return tuple(sorted(wanted))


def near_device(address: str, allowed: Collection[int], system: str = _SYSTEM) -> tuple[int, ...]:
    """Return those of ``allowed`` that are near the PCI device at ``address``; () if all or none are, or if unknown."""
    near = _local_to(address, system) & frozenset(allowed)
    return tuple(sorted(near)) if near != frozenset(allowed) else ()


def beside(cores: Collection[int], allowed: Collection[int], system: str = _SYSTEM) -> tuple[int, ...]:
    """Return those of ``allowed`` on the NUMA nodes of ``cores``; () if these are all nodes, or unknown."""
    nodes = _nodes(system)
    near = {node for node, its_cores in nodes.items() if its_cores & frozenset(cores)}
    if not near or len(near) == len(nodes):
        return ()
    return tuple(sorted(core for node in near for core in nodes[node] if core in allowed))


def memory_cores(cores: Collection[int]) -> tuple[int, ...]:
    """Return from which cores to touch memory for the first time so that it is on the NUMA nodes of ``cores``.

    () if it may be anywhere: ``cores`` is empty, or the machine has one node.
    """
    return beside(cores, allowed_cores()) if cores else ()


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may use: any of its threads, as libraries bind single threads to fewer."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    found = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                found |= os.sched_getaffinity(int(thread))
    return frozenset(found)


def bind(cores: Collection[int]) -> str | None:
    """Bind the calling thread, and those that it starts later, to ``cores``; return why it failed, or None."""
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError) as error:
        return f"it can't be bound to {_listed(cores)}: {error}"
    return None


@contextlib.contextmanager
def from_cores(cores: Collection[int]) -> Iterator[None]:
    """Run the block, and processes and threads that it starts, on ``cores``, if any and if possible."""
    before = os.sched_getaffinity(0) if cores else ()
    is_bound = bool(cores) and bind(cores) is None
    try:
        yield
    finally:
        if is_bound:
            bind(before)


def device_address() -> str | None:
    """Return the PCI address of the current CUDA device; None if the program doesn't use one, or torch can't tell."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    try:
        found = cuda.get_device_properties(cuda.current_device())
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError):  # an older torch, another kind of device
        return None


@lru_cache(maxsize=64)
def _local_to(address: str, system: str) -> frozenset[int]:
    return _read_cores(f"{system}/bus/pci/devices/{address}/local_cpulist")


@lru_cache(maxsize=8)
def _nodes(system: str) -> Mapping[int, frozenset[int]]:
    """Return the cores of each NUMA node that has some."""
    folder = f"{system}/devices/system/node"
    found: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            number = name.removeprefix("node")
            if name != number and number.isdecimal() and (cores := _read_cores(f"{folder}/{name}/cpulist")):
                found[int(number)] = cores
    return found


def _read_cores(path: str) -> frozenset[int]:
    """Return the cores of a list such as ``0-3,8``; none if there is no such file, or something else in it."""
    try:
        with open(path, encoding="ascii") as file:
            return parse_cores(file.read())
    except (OSError, ValueError):
        return frozenset()


def parse_cores(text: str) -> frozenset[int]:
    """Return the numbers of a kernel's list, ``0-3,8``. Raises `ValueError`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _listed(cores: Collection[int]) -> str:
    """Return ``cores`` as the kernel lists them."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def take_turns(work: Iterable[Callable[[], None]], threads: int) -> None:
    """Run the jobs of ``work`` on the caller's thread and up to ``threads - 1`` others, fewer if none can be started.

    They don't wait for one another.
    """
    jobs = list(work)
    queue = iter(jobs)  # a list iterator: safe to share
    errors: list[BaseException] = []
    ended: list[threading.Event] = []

    def take() -> None:
        try:
            for job in queue:
                if not errors:
                    job()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    def join_in(end: threading.Event) -> None:
        take()
        end.set()

    try:
        for number in range(1, min(threads, len(jobs))):
            end = threading.Event()
            thread = threading.Thread(target=join_in, args=(end,), name=f"holdfast-worker-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break  # no more threads available, or the interpreter exits: the caller runs more jobs
            ended.append(end)
        take()
        for end in ended:
            end.wait()
    finally:  # an interrupt also waits for the jobs that have begun, and starts no other
        for _ in queue:
            pass
        # Not by `Thread.join`: once interrupted it takes the thread for ended (seen with Python 3.11).
        for end in ended:
            end.wait()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # or the error, its traceback, this frame and all memory below would keep one another alive
