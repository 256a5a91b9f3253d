"""The targets and what was reached of them. Pure: from samples alone.

A target is not a gate. Where it isn't reached, the report says how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.stats import bootstrap, nbytes, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.samples import Results

US = "holdfast"
NOT_PEERS = {"raw", "holdfast", "holdfast-eager", "holdfast-unverified", "holdfast-warmed"}


@dataclass(frozen=True, slots=True)
class Reached:
    """One row: ``value`` against ``limit`` in the same unit, both as text too. value is None where nothing was run."""

    what: str
    target: str
    reached: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        good = self.value >= self.limit if self.at_least else self.value <= self.limit
        if good:
            return "ok"
        if self.limit == 0 or self.value == 0:
            return "not reached"
        factor = self.limit / self.value if self.at_least else self.value / self.limit
        return f"not reached: {factor:.2f}x off"


def peers_of(results: Results, case: str) -> list[str]:
    return [name for name in results.contenders(case) if name not in NOT_PEERS]


def best_peer(results: Results, case: str, figure: str) -> tuple[str, float] | None:
    """The peer with the lowest median, and that."""
    found = [(median, name) for name in peers_of(results, case) if (median := results.median(case, name, figure))]
    return (min(found)[1], min(found)[0]) if found else None


def _over(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def _ratio_row(what: str, sign: str, limit: float, value: float | None, detail: str) -> Reached:
    shown = "-" if value is None else f"{value:.2f}{detail}"
    return Reached(what, f"{sign} {limit:g}", shown, value, limit, at_least=sign == ">=")


def _amount_row(what: str, limit_text: str, limit: float, value: float | None, shown: str) -> Reached:
    return Reached(what, limit_text, "-" if value is None else shown, value, limit)


def _sum(*values: float | None) -> float | None:
    return None if any(value is None for value in values) else sum(value for value in values if value is not None)


def saving(results: Results) -> Iterable[Reached]:
    """Cases (a) and (d)."""
    for case, trainer in (("save", "idle"), ("save-compute", "computing"), ("save-2-compute", "computing, two ranks")):
        held = results.median(case, US, "held_s")
        staging = results.median(case, US, "staging_s")
        shown = (
            "" if held is None else seconds(held) + ("" if not staging else f" (copies beside it: {seconds(staging)})")
        )
        yield _amount_row(f"held by a lazy save, {trainer} trainer", "<= 5 ms", 0.005, held, shown)
    held = results.median("train", US, "held_s")
    yield _amount_row(
        "held by a lazy save, training loop (d)", "<= 5 ms", 0.005, held, "" if held is None else seconds(held)
    )
    for case, ranks in (("eager", "one rank"), ("eager-2", "two ranks")):
        eager = _over(results.median(case, "holdfast-eager", "held_s"), results.median(case, "raw", "memcpy_s"))
        yield _ratio_row(f"eager staging / warm memcpy, {ranks}", "<=", 1.15, eager, " x")
    for case, ranks in (("eager", "one rank"), ("eager-2", "two ranks")):
        ours = _sum(
            results.median(case, "holdfast-eager", "persist_s"), results.median(case, "holdfast-eager", "commit_s")
        )
        ratio = _over(ours, results.median(case, "raw", "durable_s"))
        yield _ratio_row(f"persist + commit / raw write + fsync, idle trainer, {ranks}", "<=", 1.15, ratio, " x")
    for case, trainer in (
        ("save-compute", "computing"),
        ("save-python", "pure Python"),
        ("save-2-compute", "computing, two ranks"),
    ):
        best = best_peer(results, case, "durable_s")
        name, peer_s = best if best is not None else ("no peer", None)
        ratio = _over(results.median(case, US, "durable_s"), peer_s)
        yield _ratio_row(f"until durable / best peer, {trainer} trainer", "<=", 0.3, ratio, f" x {name}")
        peer_cpu = results.median(case, name, "cpu_s")
        ratio = _over(results.median(case, US, "cpu_s"), peer_cpu)
        yield _ratio_row(f"CPU seconds / that peer's, {trainer} trainer", "<=", 0.15, ratio, f" x {name}")


def training(results: Results) -> Iterable[Reached]:
    """Case (d): lost time and slow-down, with intervals."""
    ours = results.values("train", US, "slowdown")
    means = {
        name: bootstrap(values)
        for name in peers_of(results, "train")
        if (values := results.values("train", name, "slowdown"))
    }
    best = min(means, key=lambda name: means[name].mean, default=None)
    value, shown = None, "-"
    if ours and best is not None:
        mine = bootstrap(ours)
        # A slow-down below what can be seen is none, not a gain.
        value = max(mine.mean, 0.0) / max(means[best].mean, 1e-6)
        shown = (
            f"{100 * mine.mean:.1f} % ({100 * mine.low:.1f} to {100 * mine.high:.1f}) against "
            f"{100 * means[best].mean:.1f} % ({100 * means[best].low:.1f} to {100 * means[best].high:.1f}) of {best}"
        )
    yield Reached("slow-down of the training loop / best peer's", "<= 0.5", shown, value, 0.5)
    lost = results.values("train", US, "lost_s")
    best_lost = best_peer_mean(results, "lost_s")
    value, shown = None, "-"
    if lost and best_lost is not None:
        mine_s = bootstrap(lost).mean
        value = max(mine_s, 0.0) / max(best_lost[1], 1e-6)
        shown = f"{seconds(mine_s)} a save against {seconds(best_lost[1])} of {best_lost[0]}"
    yield Reached("training time lost per save / best peer's", "< 1", shown, value, 1.0)


def best_peer_mean(results: Results, figure: str) -> tuple[str, float] | None:
    found = [
        (bootstrap(values).mean, name)
        for name in peers_of(results, "train")
        if (values := results.values("train", name, figure))
    ]
    return (min(found)[1], min(found)[0]) if found else None


def loading(results: Results) -> Iterable[Reached]:
    """Cases (f) and (b)."""
    for cache, limit in (("warm", 1.25), ("cold", 1.15)):
        ratio = _over(results.median(f"load-{cache}", US, "load_s"), results.median(f"load-{cache}", "raw", "load_s"))
        yield _ratio_row(f"load, {cache} / raw preadv, verified", "<=", limit, ratio, " x")
    times = _over(results.median("load-warm", "dcp-save", "load_s"), results.median("load-warm", US, "load_s"))
    yield _ratio_row("load, warm: times faster than dcp.load", ">=", 3.0, times, " x")
    verified = _over(
        results.median("load-warm", US, "load_s"), results.median("load-warm", "holdfast-unverified", "load_s")
    )
    cost = None if verified is None else verified - 1.0
    yield _amount_row(
        "verification, of a warm load", "<= 15 %", 0.15, cost, "" if cost is None else f"{100 * cost:.0f} %"
    )
    times = _over(results.median("small", "dcp-save", "durable_s"), results.median("small", US, "durable_s"))
    yield _ratio_row("many small tensors, save: times faster than dcp.save", ">=", 10.0, times, " x")
    times = _over(results.median("small-warm", "dcp-save", "load_s"), results.median("small-warm", US, "load_s"))
    yield _ratio_row("many small tensors, warm load: times faster than dcp.load", ">=", 10.0, times, " x")


def lasting(results: Results) -> Iterable[Reached]:
    """Cases (c), (e), (g) and (h)."""
    held = results.median("many", US, "held_s")
    yield _amount_row(
        "very many tensors, unchanged: training thread", "<= 80 ms", 0.08, held, "" if held is None else seconds(held)
    )
    first = results.median("many", US, "first_durable_s")
    yield _amount_row(
        "very many tensors: first plan (the whole first save)",
        "<= 3 s",
        3.0,
        first,
        "" if first is None else seconds(first),
    )
    ratio = results.median("first", "holdfast-warmed", "ratio")
    yield _ratio_row("first save after warm-up / later saves", "<=", 1.5, ratio, " x")
    beside = results.median("memory", US, "beside_images")
    yield _amount_row(
        "memory beside images, one rank", "<= 64 MiB", 64 << 20, beside, "" if beside is None else nbytes(beside)
    )
    kinds = ("fds", "threads", "processes", "files")
    growth = [results.median("memory", US, f"growth_{kind}") for kind in kinds]
    total = _sum(*growth)
    shown = ", ".join(f"{value:+.0f} {kind}" for kind, value in zip(kinds, growth, strict=True) if value is not None)
    yield _amount_row("growth over many saves: descriptors, threads, ...", "0", 0.0, total, shown)
    grown = results.median("memory", US, "growth_bytes")
    yield _amount_row(
        "growth over many saves: memory (1 MiB is noise)", "0", 1 << 20, grown, "" if grown is None else nbytes(grown)
    )
    ready = results.median("engine", US, "ready_s")
    yield _amount_row("engine ready", "<= 0.2 s", 0.2, ready, "" if ready is None else seconds(ready))
    resident = results.median("engine", US, "resident")
    yield _amount_row(
        "engine's own memory", "<= 60 MiB", 60 << 20, resident, "" if resident is None else nbytes(resident)
    )


def syncing(results: Results) -> Iterable[Reached]:
    """Case (j): with a shadow, as by default, and straight into the live tensors."""
    for table, way, raw, limit in (
        ("sync-gloo", "over gloo", "raw-broadcast", "a broadcast"),
        ("sync-memory", "through shared memory", "raw-copy", "a memcpy"),
    ):
        for kind, said in (("", ""), ("-streaming", ", streaming")):
            ours = results.median(table, f"holdfast-{table}{kind}", "bytes_per_s")
            ratio = _over(ours, results.median(table, raw, "bytes_per_s"))
            yield _ratio_row(f"weight version {way}{said} / {limit} of its bytes, rates", ">=", 0.9, ratio, " x")


def sharing(results: Results) -> Iterable[Reached]:
    """Case (k)."""
    for case, what in (("beside-small", "many small tensors"), ("beside-large", "a few large ones")):
        for figure, until in (("persist_s", "persisted"), ("durable_s", "published")):
            one, two = (results.median(case, f"holdfast-{name}", figure) for name in ("one-engine", "two-engines"))
            yield _ratio_row(f"{until} beside an export / with two engines, {what}", "<=", 1.1, _over(one, two), " x")


def storing(results: Results) -> Iterable[Reached]:
    """Case (m): against obstore alone, and against s3torchconnector."""
    ours, raw = "holdfast-store", "raw-store"
    for server, called in (("seaweedfs", "SeaweedFS"), ("ceph", "Ceph")):
        case = f"stores-{server}"
        for doing, where in (("save", "to"), ("load", "from")):
            ratio = _over(results.median(case, ours, f"{doing}_s"), results.median(case, raw, f"{doing}_s"))
            yield _ratio_row(f"{doing} {where} a store / raw obstore, {called}", "<=", 1.15, ratio, " x")
            cpu = results.median(case, ours, f"{doing}_cpu_s")
            ratio = _over(cpu, results.median(case, "s3torchconnector", f"{doing}_cpu_s"))
            yield _ratio_row(f"CPU of a {doing} {where} a store / s3torchconnector's, {called}", "<=", 1.0, ratio, " x")
            peak = results.median(case, ours, f"{doing}_peak_bytes")
            shown = "" if peak is None else nbytes(peak)
            what = f"memory beside images, {doing} {where} a store, {called}"
            yield _amount_row(what, "<= 256 MiB", 256 << 20, peak, shown)


def reached(results: Results) -> list[Reached]:
    """Every target, in the order of the cases."""
    cases = (saving, training, loading, lasting, syncing, sharing, storing)
    return [row for rows in cases for row in rows(results)]
