"""House rules that no linter knows: run by ``make check``, exit status 1 and one line for each breach.

1. Private names of torch (``torch._C``, ``DTensor._local_tensor``, a private parameter of an optimizer ...) are used in
   ``_torch_compat.py`` only: the one file to mend when a torch release moves them. A name that is private and that
   Holdfast does not define itself is taken for somebody else's.
2. A module has at most 450 lines, a function at most 80 (aim lower: 400 and 70).
3. A module opens with a docstring: its job, what it guarantees, what it assumes, what it does not do.
4. No module is called ``utils``, ``helpers``, ``common`` or ``misc``: name it by its one job.
5. Nothing unfinished is marked for later: it is an issue, or it is done.
6. No two modules of tests have one name: pytest can't run both at once.

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
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 80
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
        if module.path.name == COMPAT:
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


def check_test_names(paths: list[Path]) -> Iterator[Breach]:
    known: dict[str, Path] = {}
    for path in paths:
        first = known.setdefault(path.name, path)
        if first is not path:
            yield Breach(str(path), 1, f"`{path.name}` is also the name of {first}, and pytest can't run both at once")


def read(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    return Module(path, source, ast.parse(source, filename=str(path)))


def main() -> int:
    package = [read(path) for path in sorted(PACKAGE.rglob("*.py"))]
    around = [read(path) for folder in ("examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    breaches = list(check_private_names(package))
    for module in package + around:
        breaches += [*check_size(module), *check_docstring(module), *check_name(module), *check_finished(module)]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    breaches += check_test_names([path.relative_to(ROOT) for path in tests if path.name.startswith("test_")])
    for breach in sorted(breaches, key=lambda breach: (breach.where, breach.line)):
        print(breach)
    print(f"house rules: {len(package) + len(around)} modules, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
