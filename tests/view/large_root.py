"""Make a root as large as they get, of manifests and reports only: no data is written.

    python tests/view/large_root.py ROOT [--steps 1000] [--tensors 100000] [--ranks 64] [--whole 4] [--cuts 4]

``--whole``: how many of the newest steps have reports, 27 MB each; the others have a manifest alone, which is all that
a list of steps reads. A checkpoint's sizes add up to about 1 TB: layers of attention and experts, with Adam's moments,
large tensors cut in four, or ``--cuts``, along their first dimension.
"""

from __future__ import annotations

import argparse
import math
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

from holdfast.catalog.course import PARENT, Course
from holdfast.dtypes import ITEMSIZE
from holdfast.format.manifest import (
    EXTENT_BYTES,
    FORMAT,
    SUM_BYTES,
    IndexObject,
    IndexTensor,
    Manifest,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    encode_index,
    encode_manifest,
    encode_report,
    report_name,
)
from holdfast.format.sealed import xxh3_128

HIDDEN = 2048
EXPERTS = 64
CUTS = 4
_BEGAN = datetime(2026, 3, 1, tzinfo=timezone.utc)


def tensors_of(count: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a model's ``count`` tensors: parameters and two moments each."""
    kinds = [(f"attn.{name}.weight", (HIDDEN, HIDDEN)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    kinds += [(f"norm{number}.weight", (HIDDEN,)) for number in (1, 2)]
    kinds += [
        (f"mlp.experts.{expert}.{name}.weight", (HIDDEN, HIDDEN // 2))
        for expert in range(EXPERTS)
        for name in ("up", "down")
    ]
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for number in range(math.ceil(count / len(kinds) / 3)):
        for kind, shape in kinds:
            name = f"layers.{number}.{kind}"
            found.append((f"model.{name}", "bfloat16", shape))
            found += [(f"optimizer.state.{name}.{moment}", "float32", shape) for moment in ("exp_avg", "exp_avg_sq")]
    return found[:count]


def reports_of(step: int, attempt: str, tensors: int, ranks: int, cuts_max: int = CUTS) -> list[bytes]:
    """The reports of a checkpoint; of tensors, one in eight is the same at every step."""
    rows: list[list[IndexTensor]] = [[] for _ in range(ranks)]
    sums: list[list[bytes]] = [[] for _ in range(ranks)]
    ends = [0] * ranks
    for number, (name, dtype, shape) in enumerate(tensors_of(tensors)):
        cuts = cuts_max if len(shape) > 1 and number % 3 else 1
        path = tuple(name.split("."))
        for cut in range(cuts):
            rank = (number + cut) % ranks
            sizes = (shape[0] // cuts, *shape[1:])
            nbytes = math.prod(sizes) * ITEMSIZE[dtype]
            start = ends[rank]
            ends[rank] = end = start + 4096 + nbytes
            offsets = (cut * sizes[0], *(0 for _ in shape[1:]))
            rows[rank].append(
                IndexTensor(name, path, dtype, shape, offsets, sizes, 0, start, start + 4096, nbytes, end)
            )
            seed = number if number % 8 == 0 else number + step * 1_000_003
            sums[rank].append((seed * 0x9E3779B97F4A7C15 + cut & (1 << 64) - 1).to_bytes(SUM_BYTES, "little"))
    found = []
    for rank in range(ranks):
        size = ends[rank] + 4096
        label = f"rank-{rank:05d}"
        kept = IndexObject(f"rng.{label}.python", ("rng", label, "python"), 0, ends[rank], 4096)
        extents = bytes(SUM_BYTES) * -(-size // EXTENT_BYTES)
        index = encode_index(RankIndex(tuple(rows[rank]), (kept,)))
        files = (ReportFile(f"{label}.distcp", size, extents),)
        found.append(encode_report(Report(attempt, step, rank, ranks, files, b"".join(sums[rank]), index)))
    return found


def make_root(
    root: Path, *, steps: int = 1000, tensors: int = 100_000, ranks: int = 64, whole: int = 4, cuts: int = CUTS
) -> None:
    """Write ``steps`` checkpoints, 500 training steps apart; large tensors are in ``cuts`` shards."""
    chance = random.Random(0)
    parent, course = "", Course("a" * 12, (), told=True)
    lines: tuple[ManifestReport, ...] = ()
    nbytes = sum(math.prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors_of(tensors)) // ranks
    for number in range(1, steps + 1):
        step, attempt = number * 500, f"{number:012x}"
        directory = root / f"step-{step}"
        directory.mkdir(parents=True)
        if number > steps - whole:
            encoded = reports_of(step, attempt, tensors, ranks, cuts)
            for rank, data in enumerate(encoded):
                (directory / report_name(rank)).write_bytes(data)
            lines = tuple(
                ManifestReport(rank, report_name(rank), len(data), xxh3_128(data), nbytes)
                for rank, data in enumerate(encoded)
            )
        else:
            lines = lines or tuple(
                ManifestReport(rank, report_name(rank), 400_000, "0" * 32, nbytes) for rank in range(ranks)
            )
        manifest = Manifest(
            FORMAT,
            directory.name,
            attempt,
            step,
            ranks,
            (_BEGAN + timedelta(minutes=11 * number)).isoformat(timespec="milliseconds"),
            {"loss": round(8 / math.log(number + 2) + chance.random() / 10, 4)},
            True,
            {"holdfast": "0.1.0", "torch": "2.9.0"},
            lines,
            (),
            {**course.encode(), **({PARENT: parent} if parent else {})},
        )
        (directory / "holdfast.json").write_bytes(encode_manifest(manifest))
        parent = attempt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    for option, default in (("steps", 1000), ("tensors", 100_000), ("ranks", 64), ("whole", 4), ("cuts", CUTS)):
        parser.add_argument(f"--{option}", type=int, default=default)
    given = vars(parser.parse_args())
    make_root(given.pop("root"), **given)
