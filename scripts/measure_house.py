"""Print the measures of the house: what they were before the rooms were drawn, what to aim for, what is reached.

    python scripts/measure_house.py [--static]

Static measures read syntax trees. The others run small programs on one rank and count what they enter: Python files of
Holdfast, frames down to a system call, engines and threads. ``--static`` leaves those out. Changes nothing, and never
fails a build: `check_house.py` does that.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
VAGUE_OPENINGS = ("Of ", "What ", "Whether ", "As ", "By ", "Where ")

MEASURES = (  # what is measured, before, aim
    ("Python files under src/holdfast", "254", "<= 180"),
    ("top-level rooms and modules", "70", "<= 28"),
    ("lines of the layers contracts", "61 + 20", "<= 16"),
    ("import cycles / upward arrows", "3 / 19", "0 / 0"),
    ("files entered by manager.step + update + wait", "63", "<= 32"),
    ("files entered by load", "47", "<= 25"),
    ("files entered by export_hf", "86", "<= 45"),
    ("files entered by publish + receive", "34", "<= 22"),
    ("frames from manager.step to the system call", "16", "<= 8"),
    ("engines, threads of a manager + 2 exports + a publisher", "4, 11", "1, <= 6"),
    ("class names that mean two things (private ones too)", "37 (54)", "0 (<= 2)"),
    ("files under 120 lines with one importer", "23", "<= 10"),
    ("docstrings that begin with Of, What, Whether, As, By, Where", "423", "<= 40"),
    ("lines of src/holdfast", "48.2k", "<= 42k"),
)


def modules() -> dict[str, ast.Module]:
    """Syntax tree by dotted name below ``holdfast``; packages under their own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.AST, known: set[str]) -> set[str]:
    """Modules of the package that ``tree`` imports when it runs, lazily or not; not those for type checkers."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "holdfast":
            base = node.module[len("holdfast") :].lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                found.add(full if full in known else base)
        elif isinstance(node, ast.Import):
            found.update(a.name[len("holdfast.") :] for a in node.names if a.name.startswith("holdfast."))
        found |= imports(node, known)
    return found & known


def cycles(graph: dict[str, set[str]]) -> int:
    """Groups of more than one module that import one another, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start, targets in graph.items():
        seen: set[str] = set()
        todo = list(targets)
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo.extend(graph.get(at, ()))
        reach[start] = seen
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sum(len(group) > 1 for group in groups)


def layers() -> list[list[str]]:
    """The lines of every layers contract, top down, without their separators."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [
        [part.strip() for part in line.replace(":", "|").split("|")]
        for contract in contracts
        if contract["type"] == "layers"
        for line in contract["layers"]
    ]


def upward(graph: dict[str, set[str]]) -> int:
    """Arrows between rooms that the layers contract would refuse."""
    level = {name[len("holdfast.") :]: at for at, line in enumerate(layers()) for name in line}
    rooms = {(name.split(".")[0], target.split(".")[0]) for name, targets in graph.items() for target in targets}
    return sum(level[a] > level[b] for a, b in rooms if a in level and b in level and a != b)


def static_measures() -> list[str]:
    trees = modules()
    known = set(trees)
    graph = {name: imports(tree, known) - {name, ""} for name, tree in trees.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in files}
    small = 0
    for path in files:
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        small += path.name not in ("__init__.py", "__main__.py") and lines[path] < 120 and len(importers[name]) == 1
    homes: dict[str, set[str]] = defaultdict(set)
    vague = 0
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(name)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                vague += (ast.get_docstring(node) or "").startswith(VAGUE_OPENINGS)
    twice = [name for name, where in homes.items() if len(where) > 1]
    public = [name for name in twice if not name.startswith("_")]
    rooms = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())]
    return [
        str(len(files)),
        str(len(rooms) - 1),  # without __init__.py itself
        str(len(layers())),
        f"{cycles(graph)} / {upward(graph)}",
        f"{len(public)} ({len(twice)})",
        str(small),
        str(vague),
        f"{sum(lines.values()) / 1000:.1f}k",
    ]


PROGRAM = """
import collections, json, os, sys, tempfile, threading
import torch
import holdfast

here = os.path.dirname(holdfast.__file__) + os.sep
entered, deepest = set(), collections.Counter()
CALLS = {"posix", "_socket", "fcntl", "select", "mmap"}
NO_CALLS = {"fspath"}  # enters no system

def profile(frame, event, arg):
    if event == "call":
        name = frame.f_code.co_filename
        if name.startswith(here):
            entered.add(name)
    elif event == "c_call" and getattr(arg, "__module__", None) in CALLS and arg.__name__ not in NO_CALLS:
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(here)
            frame = frame.f_back
        thread = threading.current_thread().name
        deepest[thread] = max(deepest[thread], depth)

def measured(act):
    entered.clear(); deepest.clear()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return len(entered), max(deepest.values(), default=0)

threading.setprofile(profile)  # for threads, which may live longer than what is measured
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "train": {"epoch": 0}}

def update():
    model(torch.randn(4, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()

def tree(name):
    return os.path.join(tempfile.mkdtemp(), name)

update()
"""

ACTS = {
    "step": """
manager = holdfast.CheckpointManager(tree("root"), state, config=holdfast.CheckpointConfig(every=1))
manager.step(1); update(); manager.wait()
def act():
    manager.step(2); update(); manager.wait()
print(json.dumps(measured(act))); sys.stdout.flush(); manager.close()
""",
    "load": """
path = tree("saved"); holdfast.save(state, path)
holdfast.load(state, path)  # imports are not what is counted
print(json.dumps(measured(lambda: holdfast.load(state, path))))
""",
    "export": """
holdfast.export_hf({"model": model}, tree("hf"))
print(json.dumps(measured(lambda: holdfast.export_hf({"model": model}, tree("hf")))))
""",
    "sync": """
where = tree("rendezvous")
into = {key: torch.empty_like(value) for key, value in model.state_dict().items()}
def receive():
    with holdfast.sync.Receiver(holdfast.sync.SharedMemoryTransport(where)) as receiver:
        receiver.receive(into, timeout=60.0)
def act():
    with holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport(where), bypass_cpu=False) as publisher:
        got = threading.Thread(target=receive)
        got.start()
        publisher.publish(model.state_dict(), 1, timeout=60.0)
        got.join()
act()
print(json.dumps(measured(act)))
""",
    "processes": """
exports = [holdfast.HFExport(tree("hf"), every=1, name_template=f"hf{n}-{{step}}", latest_link=False) for n in range(2)]
manager = holdfast.CheckpointManager(tree("root"), state, config=holdfast.CheckpointConfig(every=1), exports=exports)
publisher = holdfast.sync.Publisher(holdfast.sync.DirectoryTransport(tree("versions")))
manager.step(1); publisher.publish(model.state_dict(), 1); manager.wait()
import psutil
engines = [p for p in psutil.Process().children() if "holdfast.engine" in " ".join(p.cmdline())]
print(json.dumps([len(engines), threading.active_count() - 1])); sys.stdout.flush()
publisher.close(); manager.close()
""",
}


def run(act: str) -> list[int] | str:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + ACTS[act]],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    if not lines:
        return (ended.stderr.strip().splitlines() or ["nothing printed"])[-1][:60]
    return list(json.loads(lines[-1]))


def live_measures() -> list[str]:
    step, load, export, sync, processes = (run(act) for act in ("step", "load", "export", "sync", "processes"))

    def shown(found: list[int] | str, at: int = 0) -> str:
        return found if isinstance(found, str) else str(found[at])

    both = processes if isinstance(processes, str) else f"{processes[0]}, {processes[1]}"
    return [*map(shown, (step, load, export, sync)), shown(step, 1), both]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--static", action="store_true", help="only what syntax trees tell")
    options = parser.parse_args()
    static = static_measures()
    live = ["-"] * 6 if options.static else live_measures()
    reached = [*static[:4], *live, *static[4:]]
    width = max(len(name) for name, _, _ in MEASURES)
    print(f"{'':{width}}  {'before':>8}  {'aim':>9}  reached")
    for (name, before, aim), now in zip(MEASURES, reached, strict=True):
        print(f"{name:{width}}  {before:>8}  {aim:>9}  {now}")


if __name__ == "__main__":
    main()
