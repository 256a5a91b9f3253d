"""Weights from one trainer to a fleet of receivers: how long until all have them, and what a straggler costs the rest.

    python -m benchmarks.fleet --out out/fleet          (--quick: small, 1 and 2 receivers)

A publisher and its receivers are processes of their own on this host; all memory is warm. A round is timed from the
call of `publish` until the last receiver has committed, by one clock. Transports take turns with gloo's broadcast of as
many bytes (all ranks in one group, straight into their memory, nothing verified) and with a copy of the bytes by one
thread, round by round, so that what else the machine does hits all alike; medians of the rounds after the first ones.
Each transport has the machine to itself but for these two.
Receivers have one thread of torch each; Holdfast copies and hashes by as many threads as there are cores, up to four.

Stragglers: a fleet of four, and with it one receiver that is stopped, holds what it fetched, waits a second before it
commits, polls with a timeout of 10 ms, or asks for another shape. A fifth receiver that fetches takes its share of the
cores, whatever it is: so there are two baselines, four alone and four beside a fifth that behaves. All take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError
from holdfast.sync import (
    DirectoryTransport,
    NixlTransport,
    ProcessGroupTransport,
    Publisher,
    Receiver,
    SharedMemoryTransport,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S: Final = 60.0
TENSORS: Final = 32
WARM: Final = 4
"""Rounds before those that count: blocks are made in the first ones."""
KINDS: Final = ("shared memory", "gloo", "gloo, fan-out", "directory", *(["nixl"] if find_spec("nixl") else []))
STRAGGLERS: Final = ("none", "plain", "stopped", "holding", "slow", "polling", "shape")
"""Who else there is beside a fleet; ``plain`` behaves."""
SLOW_S: Final = 1.0
VERL: Final = "verl mooncake"
PEERS: Final = """
Not measured, read in their released wheels (verl 0.9.1, checkpoint-engine 0.4.2):

- checkpoint-engine: `DeviceManager._detect_device_type` (`device_utils.py`), which `ParameterServer` and the workers
  call first, raises a `TypeError` without CUDA or an NPU; what workers get are CUDA IPC handles.
- verl `kimi_ckpt_engine`: makes that `ParameterServer`. `nccl`, `delta_sharded`: allocate their buckets with
  `device="cuda"`. `hccl`: NPUs only. `naive`: hands a generator over within one process, so there is no transfer.
- verl `nixl`: takes `device="cpu"`, but asks for pinned memory (`prepare`) and calls `torch.cuda.synchronize()` for
  each bucket (`send_weights`); both raise in a torch without CUDA, so it needs a shim for these at least (not tried).

verl `mooncake` is measured where `--verl` names an interpreter that has it (benchmarks/peers/verl_mooncake.py): over
TCP, which its transfer engine takes without an RDMA device. It verifies nothing; ranks hand buckets on in a chain.
"""


def weights_of(nbytes: int) -> dict[str, torch.Tensor]:
    rows = max(1, nbytes // TENSORS // 2 // 1024)
    return {f"layers.{number}.weight": torch.zeros(rows, 1024, dtype=torch.bfloat16) for number in range(TENSORS)}


def transport_of(kind: str, place: str) -> Any:
    if kind in ("gloo", "gloo, fan-out"):
        return ProcessGroupTransport(place, fan_out=kind != "gloo")
    if kind in ("nixl", "nixl, fan-out"):
        return NixlTransport(place, fan_out=kind != "nixl")
    if kind == "directory":
        return DirectoryTransport(Path(place) / "versions")
    return SharedMemoryTransport(place)


# Receivers --------------------------------------------------------------------------------------------------------


def say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def be_receiver(kind: str, place: str, nbytes: int, role: str) -> None:
    """Receive a version for each line that is read; say when it was committed."""
    torch.set_num_threads(1)
    into = weights_of(nbytes)
    if role == "shape":
        into = {name: torch.zeros(3) for name in into}
    with Receiver(transport_of(kind, place), into) as receiver:
        with contextlib.suppress(HoldfastError):
            receiver.poll()
        say(ready=True)
        for line in sys.stdin:
            version = int(line)
            if role == "polling":
                poll_until(receiver, version)
                continue
            if role == "shape":
                with contextlib.suppress(HoldfastError):
                    receiver.fetch(timeout=TIMEOUT_S)
                continue
            receiver.fetch(timeout=TIMEOUT_S)
            fetched_s = time.monotonic()
            if role == "holding":
                continue
            if role == "slow":
                time.sleep(SLOW_S)
                with contextlib.suppress(HoldfastError):  # taken back meanwhile, as it may be
                    receiver.commit()
                continue
            receiver.commit()
            first = next(iter(into.values()))
            good = bool((first == version % 128).all())
            say(version=receiver.version, fetched_s=fetched_s, committed_s=time.monotonic(), good=good)


def poll_until(receiver: Receiver, version: int) -> None:
    ends_s = time.monotonic() + 2.0
    while receiver.version != version and time.monotonic() < ends_s:
        with contextlib.suppress(HoldfastError):
            receiver.receive(timeout=0.01)


class Fleet:
    """Receivers of one transport, as processes, and the publisher in this one."""

    def __init__(self, kind: str, place: str, count: int, nbytes: int, straggler: str = "none") -> None:
        self._version = 0
        self._straggler = straggler
        self.weights = weights_of(nbytes)
        os.makedirs(place, exist_ok=True)
        options: dict[str, Any] = {"receivers": count} if kind == "gloo" else {}
        self._publisher = Publisher(transport_of(kind, place), **options)
        self._children = [child("receive", kind, place, str(nbytes), "plain") for _ in range(count)]
        self._odd = None if straggler == "none" else child("receive", kind, place, str(nbytes), straggler)
        for one in (*self._children, *([] if self._odd is None else [self._odd])):
            read(one)
        if straggler == "stopped" and self._odd is not None:
            self._odd.send_signal(signal.SIGSTOP)

    def round(self) -> dict[str, float]:
        """Bring a version to all; return its phases in seconds."""
        self._version += 1
        for tensor in self.weights.values():
            tensor.fill_(self._version % 128)
        everyone = self._children if self._odd is None else [*self._children, self._odd]
        for one in everyone:
            tell(one, str(self._version))
        time.sleep(0.02)  # all wait for it
        began_s = time.monotonic()
        with contextlib.suppress(HoldfastError):  # of one that asks for another shape, where it is the publisher's
            self._publisher.publish(self.weights, self._version, timeout=TIMEOUT_S)
        published_s = time.monotonic()
        said = [read(one) for one in self._children]
        if self._straggler == "plain" and self._odd is not None:
            read(self._odd)  # the round is over when it is done, but only the others are timed
        assert all(one["good"] and one["version"] == self._version for one in said), said
        return {
            "publish_s": published_s - began_s,
            "fetched_s": max(one["fetched_s"] for one in said) - began_s,
            "all_s": max(one["committed_s"] for one in said) - began_s,
        }

    def close(self) -> None:
        if self._odd is not None:
            self._odd.send_signal(signal.SIGCONT)
        for one in (*self._children, *([] if self._odd is None else [self._odd])):
            one.kill()
            one.wait()
        self._publisher.close()


def child(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet", "--child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "UCX_LOG_FILE": "stderr"},
    )


def tell(one: subprocess.Popen[str], line: str) -> None:
    assert one.stdin is not None
    one.stdin.write(f"{line}\n")
    one.stdin.flush()


def read(one: subprocess.Popen[str]) -> dict[str, Any]:
    assert one.stdout is not None
    line = one.stdout.readline()
    if not line:
        raise RuntimeError(f"a receiver ended with status {one.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


# What it is compared with -----------------------------------------------------------------------------------------


def be_member(rank: str, world: str, port: str, nbytes: str) -> None:
    """Take part in a broadcast for each line that is read."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), None, rank == "0", wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    memory = torch.zeros(int(nbytes), dtype=torch.uint8)
    say(ready=True)
    for _ in sys.stdin:
        began_s = time.monotonic()
        dist.broadcast(memory, src=0)
        say(began_s=began_s, committed_s=time.monotonic())
    os._exit(0)


class Broadcast:
    """gloo's broadcast of as many bytes to as many processes."""

    def __init__(self, count: int, nbytes: int, port: int) -> None:
        self._members = [child("member", str(n), str(count + 1), str(port), str(nbytes)) for n in range(count + 1)]
        for one in self._members:
            read(one)

    def round(self) -> dict[str, float]:
        for number, one in enumerate((*self._members[1:], self._members[0])):
            if number == len(self._members) - 1:
                time.sleep(0.02)  # the others wait for it
            tell(one, "go")
        said = [read(one) for one in self._members]
        return {"all_s": max(one["committed_s"] for one in said) - said[0]["began_s"]}

    def close(self) -> None:
        for one in self._members:
            one.kill()
            one.wait()


class VerlMooncake:
    """verl's `mooncake` engine to as many processes, of an interpreter that has it."""

    def __init__(self, python: str, count: int, nbytes: int) -> None:
        script = str(Path(__file__).parent / "peers" / "verl_mooncake.py")
        ranks = [[python, script, str(rank), str(count + 1), str(nbytes), str(TENSORS)] for rank in range(count + 1)]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
        self._version = 0
        self._members = [
            subprocess.Popen(
                rank, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
            )
            for rank in ranks
        ]
        metadata = [read(one)["metadata"] for one in self._members]
        for one in self._members:
            tell(one, json.dumps(metadata[0]))
        for one in self._members:
            read(one)

    def round(self) -> dict[str, float]:
        self._version += 1
        for one in self._members[1:]:
            tell(one, str(self._version))
        time.sleep(0.02)  # all wait for it
        tell(self._members[0], str(self._version))
        said = [read(one) for one in self._members]
        assert all(one["good"] for one in said), said
        return {"all_s": max(one["committed_s"] for one in said) - said[0]["began_s"]}

    def close(self) -> None:
        for one in self._members:
            one.kill()
            one.wait()


class Copy:
    """The bytes copied once, by one thread, from warm memory to warm memory."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)

    def round(self) -> dict[str, float]:
        began_s = time.monotonic()
        self._target.copy_(self._source)
        return {"all_s": time.monotonic() - began_s}

    def close(self) -> None:
        del self._source, self._target


# Rounds -----------------------------------------------------------------------------------------------------------


def in_turns(contenders: dict[str, Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Let all take turns; return the seconds of each phase in the rounds that count."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for number in range(WARM + rounds):
        for name, one in contenders.items():
            for phase, seconds in one.round().items():
                if number >= WARM:
                    found[name].setdefault(phase, []).append(seconds)
    return found


@contextlib.contextmanager
def closed_at_end(contenders: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        yield contenders
    finally:
        for one in contenders.values():
            one.close()


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"machine": platform.platform(), "cores": os.cpu_count(), "bytes": args.bytes}
    results["fleet"], results["stragglers"] = {}, {}
    torch.set_num_threads(1)
    if len(os.sched_getaffinity(0)) > 1:
        results["pinned"] = measure_pinned(args, place)
    kinds = [*([VERL] if args.verl else []), *args.transports]
    for count in args.receivers:
        # One after the other, or their memory would not fit; each beside the same broadcast and copy.
        bases = {"copy": Copy(args.bytes), "broadcast": Broadcast(count, args.bytes, args.port)}
        args.port += 1
        with closed_at_end(bases):
            results["fleet"][str(count)] = {kind: measure_kind(kind, count, bases, args, place) for kind in kinds}
        print(f"{count} receivers", flush=True)
    for kind in [kind for kind in args.transports if args.others and kind in ("shared memory", "gloo")]:
        fleets = {
            straggler: Fleet(kind, str(place / f"{kind}-{straggler}"), args.others, args.bytes // 4, straggler)
            for straggler in STRAGGLERS
        }
        with closed_at_end(fleets):
            results["stragglers"][kind] = in_turns(fleets, args.rounds)
    return results


def measure_kind(
    kind: str, count: int, bases: dict[str, Any], args: argparse.Namespace, place: Path
) -> dict[str, dict[str, list[float]]]:
    """Measure one transport to ``count`` receivers; it takes turns with ``bases``."""
    fleet: Any
    if kind == VERL:
        fleet = VerlMooncake(args.verl, count, args.bytes)
    else:
        fleet = Fleet(kind, str(place / f"{kind}-{count}"), count, args.bytes)
    with closed_at_end({kind: fleet}):
        return in_turns({**bases, kind: fleet}, args.rounds)


def measure_pinned(args: argparse.Namespace, place: Path) -> dict[str, dict[str, list[float]]]:
    """Measure shared memory to one receiver, with the publisher on one core and the receiver on another."""
    before = os.sched_getaffinity(0)
    ours, theirs = sorted(before)[:2]
    os.sched_setaffinity(0, {theirs})
    fleet = Fleet("shared memory", str(place / "pinned"), 1, args.bytes)
    try:
        pin({ours})
        with closed_at_end({"copy": Copy(args.bytes), "shared memory": fleet}) as contenders:
            return in_turns(contenders, args.rounds)
    finally:
        pin(before)


def pin(cores: set[int]) -> None:
    """Have all threads of this process run on ``cores``."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task), cores)


def report_pinned(found: dict[str, dict[str, list[float]]]) -> str:
    copy_s = median(found, "copy")
    publish, fetched, done = (median(found, "shared memory", name) for name in ("publish_s", "fetched_s", "all_s"))
    phases = {
        "publish": publish,
        "fetch": fetched - publish,
        "commit": done - fetched,
        "fetch and commit": done - publish,
    }
    told = ", ".join(f"{name} {seconds / copy_s:.2f}" for name, seconds in {**phases, "all": done}.items())
    return f"\nOne core for the publisher and one for its receiver, shared memory, in copies: {told}."


def report(results: dict[str, Any]) -> str:
    kinds = list(next(iter(results["fleet"].values())))
    about = f"{results['bytes'] / 2**20:.0f} MiB of bf16 on {results['cores']} cores, {results['machine']}."
    lines = [
        "# Weights from one trainer to a fleet\n",
        f"{about} `python -m benchmarks.fleet`; what a round is: benchmarks/fleet.py.\n",
        "From `publish` until all have committed, in copies of the bytes by one thread, medians:\n",
        f"| receivers | broadcast | {' | '.join(kinds)} |",
        "|---|---|" + "---|" * len(kinds),
    ]
    for count, found in results["fleet"].items():
        lines.append(f"| {count} | " + " | ".join(_cells(found, kinds)) + " |")
    phases = ("publish_s", "fetched_s", "all_s")
    lines.append("\nIn such copies: until `publish` returns, all have fetched, all have committed:\n")
    ours = [kind for kind in kinds if kind != VERL]
    lines += [f"| receivers | {' | '.join(ours)} |", "|---|" + "---|" * len(ours)]
    for count, found in results["fleet"].items():
        told = [
            ", ".join(f"{median(found[kind], kind, phase) / median(found[kind], 'copy'):.2f}" for phase in phases)
            for kind in ours
        ]
        lines.append(f"| {count} | {' | '.join(told)} |")
    if "pinned" in results:
        lines.append(report_pinned(results["pinned"]))
    if results["stragglers"]:
        lines += _stragglers(results["stragglers"])
    return "\n".join(lines) + "\n" + PEERS


def median(found: dict[str, Any], name: str, phase: str = "all_s") -> float:
    return statistics.median(found[name][phase])


def _stragglers(kinds: dict[str, dict[str, dict[str, list[float]]]]) -> list[str]:
    lines = [
        "\nReceivers beside one more, their time against that of as many alone, and beside one that behaves:\n",
        "| transport | one more | against alone | against one that behaves |",
        "|---|---|---|---|",
    ]
    for kind, found in kinds.items():
        for straggler in [name for name in found if name != "none"]:
            against = [f"{median(found, straggler) / median(found, base):.2f}" for base in ("none", "plain")]
            lines.append(f"| {kind} | {straggler} | {' | '.join(against)} |")
    return lines


def _cells(found: dict[str, dict[str, dict[str, list[float]]]], kinds: list[str]) -> list[str]:
    """The broadcast, over all that it took turns with, and each transport with what it took against its broadcast."""
    broadcasts = [median(one, "broadcast") / median(one, "copy") for one in found.values()]
    cells = [f"{statistics.median(broadcasts):.1f}"]
    for kind in kinds:
        one = found[kind]
        took_s = median(one, kind)
        against = took_s / median(one, "broadcast")
        cells.append(f"{took_s / median(one, 'copy'):.1f} ({took_s:.3f} s; {against:.2f} of the broadcast)")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/fleet"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--others", type=int, default=4, help="receivers beside a straggler; 0: no stragglers")
    parser.add_argument("--transports", nargs="+", default=KINDS)
    parser.add_argument("--verl", help="an interpreter that has verl, vLLM, ray and mooncake-transfer-engine-non-cuda")
    parser.add_argument("--port", type=int, default=29_650)
    args = parser.parse_args()
    if args.quick:
        args.bytes, args.rounds, args.receivers, args.others = 8 << 20, 2, [1, 2], 2
    args.out.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="holdfast-fleet-"))
    try:
        results = measure(args, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    (args.out / "report.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        arguments = sys.argv[3:]
        if sys.argv[2] == "receive":
            be_receiver(arguments[0], arguments[1], int(arguments[2]), arguments[3])
        else:
            be_member(*arguments)
    else:
        main()
