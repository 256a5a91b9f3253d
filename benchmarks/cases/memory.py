"""Case (g): what is held beside the images while saving, and what has grown after many saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.cpu import MemoryWatch

if TYPE_CHECKING:
    from benchmarks.bench import Bench

CONTENDERS = ("holdfast", "dcp-thread")
EACH_BYTES = 1 << 20
WARM_SAVES = 10
LOOKS = 20


def run(bench: Bench) -> None:
    size = bench.size
    state = bench.state(kind="flat", count=size.memory_mib, each=EACH_BYTES)
    wanted = CONTENDERS if size.thorough else CONTENDERS[:1]
    peers = bench.peers(lambda peer: peer.name in wanted)
    with bench.workers("memory", peers, state) as workers:
        bench.results.cases["memory"]["saves"] = size.memory_saves
        for worker in workers:
            before = bench.attempt("memory", worker, "adopt", state=state)  # once more, for what is held before it
            if before is None:
                continue
            path = str(bench.target(worker))
            warm = min(WARM_SAVES, size.memory_saves)
            with MemoryWatch(worker.pids[0]) as watch:
                looks = []
                for count in (warm, size.memory_saves - warm):
                    found = bench.attempt(
                        "memory",
                        worker,
                        "save_many",
                        count=count,
                        path=path,
                        look_every=max(1, size.memory_saves // LOOKS),
                        timeout_s=600.0,
                    )
                    if found is None:
                        break
                    looks += found["looks"]  # type: ignore[operator]
            if not looks:
                continue
            settled = next(look for look in looks if look["save"] >= warm)
            last = looks[-1]
            figures = {
                "beside_images": max(watch.most_others, last["others"]) - before["others_before"],
                "images": max(watch.most_images, last["images"]),
                "growth_bytes": last["images"] + last["others"] - settled["images"] - settled["others"],
                "growth_fds": last["fds"] - settled["fds"],
                "growth_threads": last["threads"] - settled["threads"],
                "growth_processes": last["processes"] - settled["processes"],
                "growth_files": last["files"] - settled["files"],
                "looks": looks,
            }
            bench.record("memory", worker.name, 1, figures, counted=True)
            bench.say(f"memory: {worker.name}, {size.memory_saves} saves")
