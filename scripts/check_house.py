"""House rules that no linter knows: run by ``make check``, exit status 1 and one line for each breach.

1. Private names of torch (``torch._C``, ``DTensor._local_tensor``, a private parameter of an optimizer ...) are used in
   ``_torch_compat.py`` only: the one file to mend when a torch release moves them. A name that is private and that
   Holdfast does not define itself is taken for somebody else's.
2. A module has at most 800 lines, as long as it has one idea; a function at most 70.
3. A module opens with a docstring: its job, what it guarantees, what it assumes, what it does not do.
4. No module is called ``utils``, ``helpers``, ``common`` or ``misc``: name it by its one job.
5. Nothing unfinished is marked for later: it is an issue, or it is done.
6. No two modules of tests have one name: pytest can't run both at once. One has at most 1,000 lines.
7. No storage is named outside of ``storage/`` and what is made for one: nothing imports ``LocalStorage``, or casts to a
   storage. Ask for `holdfast.storage.protocol.Storage`; ``open_storage`` makes one of a path.
8. The top level has the rooms and modules of docs/design.md, section 7, and no others.
9. A class name means one thing in the whole package.
10. A module of under 120 lines with one importer belongs into its importer, but for the few that are named here.
11. The state of an attempt is set by its table of transitions (`advance`) only.
12. A docstring doesn't begin with "Of": say what the thing does, with a verb, or what it is.
13. No `except` block of several statements stands in two modules: share it.

Reads syntax trees only; imports nothing of the package.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
COMPAT = "_torch_compat.py"
MAX_MODULE_LINES = 800
MAX_FUNCTION_LINES = 70
MAX_TEST_LINES = 1000
MAX_SATELLITE_LINES = 120
TOP_LEVEL = {
    *(
        "__init__",
        "__main__",
        "_torch_compat",
        "_version",
        "boxes",
        "config",
        "cores",
        "dtypes",
        "errors",
        "events",
        "validation",
    ),
    *("api", "manager", "cli", "sync", "dcp", "export", "saver", "loader", "staging", "keymap", "engine", "commit"),
    *("catalog", "state", "storage", "coordination", "plan", "format", "testing", "integrations", "view"),
}
NAMED_TWICE = frozenset({"TensorInfo", "CheckpointManager"})  # public in two places, where users know it
SATELLITES = {  # one importer each, and a job of their own all the same
    *(
        "cli.app",
        "cli.bench",
        "cli.ls",
        "cli.report",
        "cli.view",
        "coordination.votes",
        "engine.ranges",
        "integrations.torchtitan.manager",
    ),
    "saver.reentry",
    "sync.transports.directory",
    "sync.transports.shared_memory",
}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|STUB)\b")


@dataclass(frozen=True, slots=True)
class Module:
    path: Path
    source: str
    tree: ast.Module

    @property
    def shown(self) -> str:
        return str(self.path.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Breach:
    where: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.what}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name.strip("_") != ""


def names_defined(tree: ast.Module) -> Iterator[str]:
    """Names the module itself brings into being: functions, classes, variables, attributes of self, slots."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=items)):
                yield from (
                    item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)
                )
            case _:
                pass


def names_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names the module reaches for on something else: attributes, imports, ``getattr`` by constant name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, lineno=line) if is_private(name):
                yield line, name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name):
                    yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names, lineno=line) if not module.startswith("holdfast"):
                parts = [*module.split("."), *(alias.name for alias in names)]
                yield from ((line, part) for part in parts if is_private(part))
            case ast.Import(names=names, lineno=line):
                yield from ((line, part) for alias in names for part in alias.name.split(".") if is_private(part))
            case _:
                pass


def check_private_names(modules: list[Module]) -> Iterator[Breach]:
    own = {name for module in modules if module.path.name != COMPAT for name in names_defined(module.tree)}
    # ``os._exit`` and the like are documented in spite of their underscore.
    own |= {"_exit", "_asdict", "_replace", "_fields", "_make"}
    for module in modules:
        if module.path.name == COMPAT or "integrations" in module.path.parts:  # an adapter is its framework's compat
            continue
        for line, name in names_used(module.tree):
            if name not in own and not name.startswith("_torch_compat"):
                yield Breach(
                    module.shown,
                    line,
                    f"`{name}` is a private name that Holdfast does not define: wrap it in {COMPAT}, where it can be "
                    "mended when its owner moves it",
                )


def check_size(module: Module) -> Iterator[Breach]:
    lines = module.source.count("\n")
    if lines > MAX_MODULE_LINES:
        yield Breach(
            module.shown,
            1,
            f"{lines} lines, at most {MAX_MODULE_LINES}: split it by job, or move what is pure out of it",
        )
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield Breach(
                    module.shown,
                    node.lineno,
                    f"`{node.name}` has {length} lines, at most {MAX_FUNCTION_LINES}: give its steps names",
                )


def check_docstring(module: Module) -> Iterator[Breach]:
    if module.source.strip() and not ast.get_docstring(module.tree):
        yield Breach(
            module.shown,
            1,
            "no module docstring: open with its job, its guarantees, its assumptions, what it leaves out",
        )


def check_name(module: Module) -> Iterator[Breach]:
    if module.path.stem in VAGUE_NAMES:
        yield Breach(module.shown, 1, f"`{module.path.name}` says nothing: name the module by its one job")


def check_finished(module: Module) -> Iterator[Breach]:
    for number, text in enumerate(module.source.splitlines(), 1):
        if found := UNFINISHED.search(text):
            yield Breach(
                module.shown, number, f"{found.group()} left in the source: do it, or open an issue and say nothing"
            )


def check_storages(module: Module) -> Iterator[Breach]:
    if module.path.parent.name == "storage":
        return
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(names=names, lineno=line) if any(alias.name == "LocalStorage" for alias in names):
                found = "imports `LocalStorage`"
            case ast.Call(
                func=ast.Name(id="cast"), args=[ast.Constant(value=str(kind)) | ast.Name(id=kind), _], lineno=line
            ) if kind.endswith("Storage"):
                found = f"casts to `{kind}`"
            case _:
                continue
        yield Breach(module.shown, line, f"{found}: ask for a `Storage`, and `open_storage` where there is a path")


def check_test_names(paths: list[Path]) -> Iterator[Breach]:
    known: dict[str, Path] = {}
    for path in paths:
        first = known.setdefault(path.name, path)
        if first is not path:
            yield Breach(str(path), 1, f"`{path.name}` is also the name of {first}, and pytest can't run both at once")


def check_test_sizes(paths: list[Path]) -> Iterator[Breach]:
    for path in paths:
        lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
        if lines > MAX_TEST_LINES:
            yield Breach(str(path), 1, f"{lines} lines, at most {MAX_TEST_LINES}: split it by what it tests")


def check_top_level(module: Module) -> Iterator[Breach]:
    top = module.path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if top not in TOP_LEVEL:
        yield Breach(module.shown, 1, f"`{top}` is a new room: put it into one that is there, see docs/design.md")


def check_class_names(modules: list[Module]) -> Iterator[Breach]:
    known: dict[str, Module] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name not in NAMED_TWICE:
                first = known.setdefault(node.name, module)
                if first is not module:
                    yield Breach(
                        module.shown, node.lineno, f"`{node.name}` is a class of {first.shown} too: name it anew"
                    )


def name_of(module: Module) -> str:
    parts = module.path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(module: Module) -> Iterator[str]:
    """Modules of the package that this one imports, by their names below ``holdfast``; maybe names in them as well."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "holdfast":
            base = (node.module or "").removeprefix("holdfast").lstrip(".")
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("holdfast.") for alias in node.names)


def check_satellites(modules: list[Module]) -> Iterator[Breach]:
    importers: dict[str, set[str]] = {}
    for module in modules:
        for target in set(imported_by(module)) - {name_of(module)}:
            importers.setdefault(target, set()).add(name_of(module))
    for module in modules:
        name, lines = name_of(module), module.source.count("\n")
        few = importers.get(name, set())
        if module.path.stem.startswith("_") or lines >= MAX_SATELLITE_LINES or len(few) != 1 or name in SATELLITES:
            continue
        yield Breach(module.shown, 1, f"{lines} lines, imported by {min(few)} alone: make it a part of that")


def check_states(module: Module) -> Iterator[Breach]:
    for node in ast.walk(module.tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="state")], value=value) if "State." in ast.unparse(value):
                if not re.fullmatch(r"State\.BEGIN", ast.unparse(value)):
                    yield Breach(module.shown, node.lineno, "a state is set past its table: call `advance`")


def check_openings(module: Module) -> Iterator[Breach]:
    for node in ast.walk(module.tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (ast.get_docstring(node) or "").startswith("Of "):
            line = getattr(node, "lineno", 1)
            yield Breach(module.shown, line, 'a docstring that begins with "Of": say what it does, with a verb')


def check_copied_handlers(modules: list[Module]) -> Iterator[Breach]:
    known: dict[str, Module] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and len(node.body) > 2:
                first = known.setdefault(ast.dump(ast.Module(node.body, [])), module)
                if first is not module:
                    yield Breach(module.shown, node.lineno, f"this `except` block stands in {first.shown} as well")


def read(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    return Module(path, source, ast.parse(source, filename=str(path)))


def main() -> int:
    package = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
    around = [read(path) for folder in ("examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    breaches = list(check_private_names(package))
    for whole in (check_class_names, check_satellites, check_copied_handlers):
        breaches += whole(package)
    for module in package:
        breaches += [*check_storages(module), *check_top_level(module), *check_states(module), *check_openings(module)]
    for module in package + around:
        breaches += [*check_size(module), *check_docstring(module), *check_name(module), *check_finished(module)]
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    breaches += [*check_test_names([path for path in tests if path.name.startswith("test_")]), *check_test_sizes(tests)]
    for breach in sorted(breaches, key=lambda breach: (breach.where, breach.line)):
        print(breach)
    print(f"house rules: {len(package) + len(around)} modules, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
