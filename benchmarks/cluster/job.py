"""What the programs of a recipe share: options, the process group, the state they train or load, and their results.

A program is started by torchrun, once for each rank, and leaves one JSON file, OUT/parts/NAME.json, for the report.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shlex
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from benchmarks.cluster.models import RECIPES, Recipe
from benchmarks.cluster.parallel import Layout, allocate, initialise, is_expert, shard
from torch import nn

import holdfast

COLLECTIVE_TIMEOUT_S = 1800.0
PROBE_LENGTH = 128
WARM_UP_STEPS = 10


def options(description: str) -> argparse.ArgumentParser:
    """What every program takes: it must be the same for all programs of one OUT."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory on a file system that every rank sees")
    parser.add_argument("--experts", type=int, default=1, help="ranks among which experts are divided")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model (HSDP)")
    parser.add_argument("--parameters", choices=("auto", "float32", "bfloat16"), default="auto", help="their dtype")
    parser.add_argument("--seed", type=int, default=0)
    return parser


@dataclass(frozen=True, slots=True)
class Job:
    """One rank of a running program."""

    rank: int
    world: int
    device: torch.device
    recipe: Recipe
    out: Path
    parameters: torch.dtype
    seed: int

    def training_state(self, layout: Layout, *, seed: int, lr: float) -> dict[str, Any]:
        """Everything the next step depends on, sharded; no rank needs memory for more than its shards."""
        model = self.recipe.empty_model(self.parameters)
        shard(model, layout, self.device, torch.bfloat16 if self.device.type == "cuda" else None)
        allocate(model, self.device)
        initialise(model, seed)
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        # Foreach and fused kernels want parameters of one mesh: experts have another.
        named = list(model.named_parameters())
        groups = [[param for name, param in named if is_expert(name) == wanted] for wanted in (False, True)]
        optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups if group], lr=lr, fused=self.device.type == "cuda"
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (n + 1)))
        )
        progress = {"step": 0, "tokens": 0}
        return {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "train": progress}

    def tokens(self, step: int, batch: int, length: int) -> torch.Tensor:
        """What this rank trains on in this step: few words often and many seldom, so there is something to learn."""
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + step) * 65_537 + self.rank) % (1 << 62))
        drawn = torch.rand((batch, length), generator=generator, dtype=torch.float64)
        return (drawn**4 * self.vocabulary).long().to(self.device)

    def probe(self) -> torch.Tensor:
        """Tokens that all programs evaluate the model on."""
        return torch.arange(min(PROBE_LENGTH, self.recipe.length), device=self.device)[None] * 7 % self.vocabulary

    @property
    def vocabulary(self) -> int:
        return int(self.recipe.config().vocab_size)

    def clock_stops(self) -> None:
        """Return when all ranks have done what they were told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def from_all(self, value: Any) -> list[Any]:
        """``value`` of every rank, in order, on every rank."""
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered

    def means(self, values: torch.Tensor) -> list[float]:
        """The mean over ranks of each value, the same bits whichever others it is sent with.

        A ring adds up in an order that depends on where a value stands: here every sum of float32 is exact in float64.
        """
        total = values.double()
        dist.all_reduce(total)
        return (total / self.world).tolist()  # type: ignore[no-any-return]

    def memory(self) -> dict[str, int]:
        """The most memory this process has had, in bytes: of the host, and of its device."""
        peak = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if self.device.type == "cuda":
            peak["device_bytes"] = torch.cuda.max_memory_allocated()
        return peak

    def write_part(self, name: str, **fields: Any) -> None:
        """Rank 0's result, whole or not at all."""
        if self.rank:
            return
        path = self.out / "parts" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        place = {"machine": machine(self.out, self.device), "world": self.world, "command": shlex.join(sys.orig_argv)}
        whole = {"recipe": self.recipe.name, "parameters": str(self.parameters).removeprefix("torch."), **place}
        path.with_suffix(".new").write_text(json.dumps({**whole, **fields}, indent=1))
        path.with_suffix(".new").rename(path)

    def end(self) -> NoReturn:
        """End the process once all ranks are here, without the interpreter's own end; managers are closed by then.

        torch keeps the groups of a mesh, and with them gloo's threads: one that frees a tensor while the interpreter
        ends aborts the process ("terminate called without an active exception"), though all is done.
        """
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def start(args: argparse.Namespace, *, distributed: bool = True) -> Job:
    """Join the process group, on this rank's GPU if the machine has any; ``distributed=False`` for a single process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = distributed and torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # Sums are in one order every time, with one thread; a single process compares with itself only.
        torch.set_num_threads(1 if distributed else len(os.sched_getaffinity(0)))
    rank, world = 0, 1
    args.out = args.out.absolute()
    if distributed:
        # gloo beside NCCL, for tensors of the host such as the step counters of an optimizer.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )
        rank, world = dist.get_rank(), dist.get_world_size()
    name = _dtype_trained(args) if args.parameters == "auto" else args.parameters
    return Job(rank, world, device, RECIPES[args.recipe], args.out, getattr(torch, name), args.seed)


def _dtype_trained(args: argparse.Namespace) -> str:
    """That of the reference run, which a machine without a GPU may be reading; else what this machine is good at."""
    reference = args.out / "parts" / "reference.json"
    if reference.exists():
        return str(json.loads(reference.read_text())["parameters"])
    return "bfloat16" if torch.cuda.is_available() else "float32"


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def machine(out: Path, device: torch.device) -> dict[str, Any]:
    """Where this runs, and on which versions."""
    out.mkdir(parents=True, exist_ok=True)
    return {
        "host": socket.gethostname(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(out),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "holdfast": holdfast.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _file_system(path: Path) -> str:
    """The type of the file system that holds ``path``."""
    path, found = path.resolve(), ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        place, kind = line.split()[1:3]
        if path.is_relative_to(place.replace("\\040", " ")) and len(place) >= len(found[0]):
            found = place, kind
    return found[1]
